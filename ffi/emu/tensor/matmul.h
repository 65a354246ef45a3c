// The arithmetic of one MMA instruction, K = 16: float32 products of 16-bit values are exact, so the result does not
// depend on the vector width or on fused multiply-adds, and each element adds its products in the order of k.
#pragma once

#include <cstdint>

#include "tensor/gather.h"

namespace emu {

// d[row * d_pitch + column] (+)= sum over k of a[row * kMmaDepth + k] * b[k * b_pitch + column].
// rows: a multiple of 4; columns: a multiple of 8.
struct DenseProduct {
  float* d;
  uint32_t d_pitch;
  const float* a;
  const float* b;
  uint32_t b_pitch;
  uint32_t rows, columns;
  bool accumulate;
};
void multiply_dense(const DenseProduct&);

// WGMMA's accumulators stay in the registers' own order: d[4*block + 2*half + parity] is 32 lanes, lane t the element
// (row t/4 + 8*half, column 8*block + 2*(t%4) + parity) of one warp's 16 rows.
// a: [2 halves][kMmaDepth][32 lanes]; b: [kMmaDepth * b_pitch + column].
struct FragmentProduct {
  float* const* d;
  const float* a;
  const float* b;
  uint32_t b_pitch;
  uint32_t columns;
  bool accumulate;
};
// The four warps of a warpgroup share b.
void multiply_fragments(const FragmentProduct (&warps)[4]);

}  // namespace emu
