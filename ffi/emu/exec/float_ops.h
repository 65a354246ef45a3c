// Scalar floating-point operations with PTX's rules; the lane loops are made of them.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "tensor/half.h"

namespace emu {

enum class Rounding : uint8_t { kNearest, kZero, kDown, kUp };

inline float bits_to_float(uint32_t bits) { return std::bit_cast<float>(bits); }
inline uint32_t float_to_bits(float value) { return std::bit_cast<uint32_t>(value); }
inline constexpr uint32_t kCanonicalNan = 0x7fffffffu;

// Operations that make a NaN make this one.
inline float canonical(float v) { return v != v ? bits_to_float(kCanonicalNan) : v; }
// .ftz: subnormals become zero of the same sign.
inline float flush(float v) {
  const uint32_t bits = float_to_bits(v);
  return bits_to_float(bits & 0x7f800000u ? bits : bits & 0x80000000u);
}
inline float next_up(float v) {
  const uint32_t bits = float_to_bits(v);
  return v == 0 ? bits_to_float(1) : bits_to_float(bits & 0x80000000u ? bits - 1 : bits + 1);
}
inline float next_down(float v) { return -next_up(-v); }

// `rounded` is the nearest float to a value that exceeds it by something of the sign of `error`.
template <Rounding kRounding>
inline float redirect(float rounded, float error) {
  if (!(std::fabs(rounded) <= std::numeric_limits<float>::max())) {
    // Overflow in another direction than the rounding's gives the largest finite number.
    return rounded;
  }
  if (kRounding == Rounding::kDown) return error < 0 ? next_down(rounded) : rounded;
  if (kRounding == Rounding::kUp) return error > 0 ? next_up(rounded) : rounded;
  if (kRounding == Rounding::kZero)
    return (rounded > 0 && error < 0) ? next_down(rounded) : (rounded < 0 && error > 0) ? next_up(rounded) : rounded;
  return rounded;
}

template <Rounding kRounding>
inline float add_rounded(float a, float b) {
  const float s = a + b;
  if (kRounding == Rounding::kNearest) return s;
  const float t = s - a;
  const float error = (a - (s - t)) + (b - t);  // Knuth: exact
  const float result = redirect<kRounding>(s, error);
  // An exact zero of unequal signs is -0 when rounding down.
  return kRounding == Rounding::kDown && s == 0 && error == 0 && float_to_bits(a) != float_to_bits(b)
             ? -0.0f : result;
}
template <Rounding kRounding>
inline float mul_rounded(float a, float b) {
  const float p = a * b;
  if (kRounding == Rounding::kNearest) return p;
  const double exact = double(a) * double(b);  // 48 bits: exact
  return redirect<kRounding>(p, exact > double(p) ? 1.0f : exact < double(p) ? -1.0f : 0.0f);
}
template <Rounding kRounding>
inline float fma_rounded(float a, float b, float c) {
  const float r = __builtin_fmaf(a, b, c);
  if (kRounding == Rounding::kNearest) return r;
  const double p = double(a) * double(b), s = p + double(c), t = s - p;
  const double low = (p - (s - t)) + (double(c) - t);  // s + low is the exact value
  const double error = (s - double(r)) + low;
  return redirect<kRounding>(r, error > 0 ? 1.0f : error < 0 ? -1.0f : 0.0f);
}

inline float saturate(float v) { return v > 0 ? (v < 1 ? v : 1.0f) : 0.0f; }  // NaN becomes 0

template <bool kMax, bool kNan>
inline float min_max(float a, float b) {
  const uint32_t x = float_to_bits(a), y = float_to_bits(b);
  const float equal = bits_to_float(kMax ? x & y : x | y);  // -0 is below +0
  const float ordered = a == b ? equal : (kMax ? a > b : a < b) ? a : b;
  const float number = a != a ? b : b != b ? a : ordered;
  const bool nan = kNan ? (a != a || b != b) : (a != a && b != b);
  return nan ? bits_to_float(kCanonicalNan) : number;
}

// 2^x within 2^-22.5 relative, exact at integers; the manual's bound for ex2.approx is 2^-22 (2 ulp).
template <bool kFlush>
inline float exp2_approx(float x) {
  if (kFlush) x = flush(x);
  const float clamped = x < -160.0f ? -160.0f : x > 129.0f ? 129.0f : x;
  const float shifted = clamped + 0x1.8p23f;
  const float n = shifted - 0x1.8p23f, f = clamped - n;
  // Taylor's series of 2^f to degree 7: its remainder on [-1/2, 1/2] is below 6e-9.
  float p = 1.52527338e-5f;
  p = __builtin_fmaf(p, f, 1.54035304e-4f);
  p = __builtin_fmaf(p, f, 1.33335581e-3f);
  p = __builtin_fmaf(p, f, 9.61812911e-3f);
  p = __builtin_fmaf(p, f, 5.55041087e-2f);
  p = __builtin_fmaf(p, f, 2.40226507e-1f);
  p = __builtin_fmaf(p, f, 6.93147181e-1f);
  p = __builtin_fmaf(p, f, 1.0f);
  const int exponent = static_cast<int>(n), half = exponent >> 1, rest = exponent - half;
  const float scale_a = bits_to_float(static_cast<uint32_t>(half + 127) << 23);
  const float scale_b = bits_to_float(static_cast<uint32_t>(rest + 127) << 23);
  const float r = p * scale_a * scale_b;
  const float result = x != x ? bits_to_float(kCanonicalNan) : r;
  return kFlush ? flush(result) : result;
}

template <bool kFlush>
inline float log2_approx(float x) {
  if (kFlush) x = flush(x);
  return canonical(static_cast<float>(std::log2(static_cast<double>(x))));
}
template <bool kFlush>
inline float reciprocal(float x) {
  if (kFlush) x = flush(x);
  const float r = canonical(1.0f / x);
  return kFlush ? flush(r) : r;
}
template <bool kFlush>
inline float reciprocal_sqrt(float x) {
  if (kFlush) x = flush(x);
  return canonical(static_cast<float>(1.0 / std::sqrt(static_cast<double>(x))));
}

// double to float16 or bfloat16, rounded once.
inline uint16_t double_to_half(double v, bool bf16) {
  // Round to odd into a float first: its extra bits then decide every later rounding rightly.
  float f = static_cast<float>(v);
  const double back = static_cast<double>(f);
  if (back != v && back == back && std::fabs(f) <= std::numeric_limits<float>::max() && !(float_to_bits(f) & 1))
    f = (back < v) ? next_up(f) : next_down(f);
  return bf16 ? float_to_bf16(f) : float_to_f16(f);
}
inline float half_to_float(uint16_t v, bool bf16) { return bf16 ? bf16_to_float(v) : f16_to_float(v); }

}  // namespace emu
