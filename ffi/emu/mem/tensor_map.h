// The 128-byte tensor map in the hardware's own format, little-endian 32-bit words:
//   0-1   global address
//   2     bits 4-6 rank - 1; 7-10 element type; 11-12 interleave; 13-14 swizzle; 15 fill; 16 tf32; 17-18 L2 promotion;
//         bits 1 and 21 are set by CuTe DSL and not by the driver
//   3-6   strides of dimensions 1 to 4 in units of 16 bytes, low 32 bits; 7: four more bits of each, lowest first
//   8-12  sizes - 1, innermost first
//   13    bits 24-31: box size - 1 of dimension 0; below: element strides - 1, 3 bits each
//   14    box sizes - 1 of dimensions 1 to 4, 8 bits each
// Found by varying one argument of the driver's encoder at a time (tests/emu/hopper/record.py).
#pragma once

#include <cstdint>

#include "tensor/descriptor.h"

namespace emu {

enum class TensorMapType : uint8_t { kU8, kU16, kU32, kS32, kU64, kS64, kF16, kF32, kF32Ftz, kF64, kBf16 };

struct TensorMap {
  uint64_t address;
  uint32_t rank;
  TensorMapType type;
  uint32_t element_bytes;
  Swizzle swizzle;
  bool fill_nan;       // out-of-bounds elements of floating-point tensors: a NaN instead of zero
  uint64_t size[5];    // in elements; 1 beyond the rank
  uint64_t stride[5];  // in bytes; [0] is element_bytes
  uint32_t box[5];     // in elements; 1 beyond the rank

  uint32_t row_bytes() const { return box[0] * element_bytes; }
  uint32_t rows() const { return box[1] * box[2] * box[3] * box[4]; }
  uint32_t tile_bytes() const { return row_bytes() * rows(); }  // what a transfer counts
  // From row to row in shared memory: a swizzled row takes a whole line, even where the box is narrower.
  uint32_t row_pitch() const { return swizzle == Swizzle::kNone ? row_bytes() : 16u << static_cast<uint32_t>(swizzle); }
  uint32_t shared_bytes() const { return row_pitch() * rows(); }
};

// Throws on fields that are not modelled (interleave, element strides other than 1) or not allowed.
TensorMap decode_tensor_map(const uint8_t* bytes);

}  // namespace emu
