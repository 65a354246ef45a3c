#include "tensor/gather.h"

#include "tensor/half.h"

namespace emu {
namespace {

using Half8 = uint16_t __attribute__((vector_size(16)));
using Word8 = uint32_t __attribute__((vector_size(32)));
using Float8 = float __attribute__((vector_size(32)));

inline void widen(const uint8_t* source, OperandType type, float* out) {
  Half8 half;
  std::memcpy(&half, source, sizeof half);
  const Word8 bits = __builtin_convertvector(half, Word8);
  Word8 value;
  if (type.bf16) {
    value = bits << 16;
  } else {  // see f16_to_float
    const Word8 magnitude = (bits & 0x7fffu) << 13;
    Float8 scaled;
    std::memcpy(&scaled, &magnitude, sizeof scaled);
    scaled *= 0x1p112f;
    std::memcpy(&value, &scaled, sizeof value);
    value |= (Word8)(magnitude >= 0x0f800000u) & 0x7f800000u;
    value |= (bits & 0x8000u) << 16;
  }
  if (type.negate) value ^= 0x80000000u;
  std::memcpy(out, &value, sizeof value);
}

// Reads chunks through the view: the observer sees each, the bounds are checked for each.
inline const uint8_t* chunk(const OperandLayout& layout, const SharedView& shared, uint32_t line, uint32_t index) {
  return shared.read(layout.chunk_address(line, index), 16, Proxy::kTensorCore);
}

}  // namespace

void widen8(const uint8_t* source, OperandType type, float* out) { widen(source, type, out); }

void gather_rows(const OperandLayout& layout, OperandType type, uint32_t rows, const SharedView& shared, float* out) {
  if (!layout.mn_major) {
    for (uint32_t row = 0; row < rows; ++row)
      for (uint32_t half = 0; half < 2; ++half)
        widen(chunk(layout, shared, row, half), type, out + row * kMmaDepth + half * 8);
    return;
  }
  for (uint32_t block = 0; block < rows / 8; ++block)
    for (uint32_t k = 0; k < kMmaDepth; ++k) {
      float line[8];
      widen(chunk(layout, shared, k, block), type, line);
      for (uint32_t i = 0; i < 8; ++i) out[(block * 8 + i) * kMmaDepth + k] = line[i];
    }
}

void gather_columns(const OperandLayout& layout, OperandType type, uint32_t rows, const SharedView& shared, float* out,
                    uint32_t pitch) {
  if (layout.mn_major) {
    for (uint32_t k = 0; k < kMmaDepth; ++k)
      for (uint32_t block = 0; block < rows / 8; ++block)
        widen(chunk(layout, shared, k, block), type, out + k * pitch + block * 8);
    return;
  }
  for (uint32_t block = 0; block < rows / 8; ++block)
    for (uint32_t half = 0; half < 2; ++half) {
      float tile[8][8];
      for (uint32_t i = 0; i < 8; ++i) widen(chunk(layout, shared, block * 8 + i, half), type, tile[i]);
      for (uint32_t k = 0; k < 8; ++k)
        for (uint32_t i = 0; i < 8; ++i) out[(half * 8 + k) * pitch + block * 8 + i] = tile[i][k];
    }
}

}  // namespace emu
