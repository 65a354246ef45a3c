// float16 and bfloat16 as 16-bit patterns, converted without branches where whole arrays are converted.
#pragma once

#include <bit>
#include <cstdint>

namespace emu {

inline float bf16_to_float(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }

inline float f16_to_float(uint16_t bits) {
  const uint32_t magnitude = uint32_t{bits & 0x7fffu} << 13;
  // The exponent is rebased by an exact multiplication, which also normalises subnormals.
  uint32_t value = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) * 0x1p112f);
  value |= magnitude >= 0x0f800000u ? 0x7f800000u : 0u;
  return std::bit_cast<float>(value | uint32_t{bits & 0x8000u} << 16);
}

// Round to nearest even. NaN becomes the canonical 0x7fff.
inline uint16_t float_to_bf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

inline uint16_t float_to_f16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = bits >> 16 & 0x8000u;
  uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7fff;
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // 65520 and above round to infinity
  if (magnitude < 0x38800000u) {  // below 2^-14: adding 0.5 lines the subnormal's last bit up with the float's
    const float aligned = std::bit_cast<float>(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(aligned) - 0x3f000000u));
  }
  magnitude += 0xc8000fffu + (magnitude >> 13 & 1u);
  return static_cast<uint16_t>(sign | magnitude >> 13);
}

}  // namespace emu
