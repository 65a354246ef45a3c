// Operand tiles out of shared memory into dense float arrays, so that the arithmetic runs over contiguous data.
#pragma once

#include "core/memory.h"
#include "tensor/descriptor.h"

namespace emu {

inline constexpr uint32_t kMmaDepth = 16;  // K of one 16-bit MMA instruction: 32 bytes

struct OperandType {
  bool bf16;
  bool negate;
};

// out[row * kMmaDepth + k], for rows 0 .. rows-1 (a multiple of 8).
void gather_rows(const OperandLayout&, OperandType, uint32_t rows, const SharedView&, float* out);

// out[k * pitch + row].
void gather_columns(const OperandLayout&, OperandType, uint32_t rows, const SharedView&, float* out, uint32_t pitch);

// Eight 16-bit elements to floats.
void widen8(const uint8_t* source, OperandType, float* out);

}  // namespace emu
