// The 64-bit shared-memory descriptors of WGMMA and tcgen05, and tcgen05's 32-bit instruction descriptor.
// Layouts and field meanings: PTX ISA, "Shared memory descriptor" and "Instruction descriptor".
#pragma once

#include <cstdint>

namespace emu {

enum class Swizzle : uint8_t { kNone, k32B, k64B, k128B };

// An operand tile in shared memory. "Rows" are the M or N coordinate. The unit of layout is a core matrix: 8 lines of
// 16 bytes. With swizzling a line of `line_bytes` holds several 16-byte chunks, permuted among 8 lines.
struct OperandLayout {
  uint32_t start;    // byte offset in the block's shared memory
  uint32_t leading;  // leading-dimension byte offset
  uint32_t stride;   // stride-dimension byte offset
  Swizzle swizzle;
  bool mn_major;     // 16-byte chunks run along the row coordinate instead of along K

  uint32_t line_bytes() const { return 16u << static_cast<uint32_t>(swizzle); }

  // Address of the 16-byte chunk that holds 8 elements of 16 bits: K-major, elements k = 8*chunk.. of row `line`;
  // MN-major, rows 8*chunk.. at k = `line`.
  uint32_t chunk_address(uint32_t line, uint32_t chunk) const {
    const uint32_t in_line = line_bytes() / 16;
    uint32_t address = start;
    if (swizzle == Swizzle::kNone) {
      address += line % 8 * 16 + line / 8 * (mn_major ? leading : stride) + chunk * (mn_major ? stride : leading);
    } else {
      address += line % 8 * line_bytes() + line / 8 * stride;
      address += mn_major ? chunk % in_line * 16 + chunk / in_line * leading : chunk * 16;
    }
    return swizzled(address, swizzle);
  }

  // Bits 4..6 of an address are exclusive-ored with as many bits from 7 up: the pattern repeats every 8 lines of
  // 128 bytes and is anchored at address zero.
  static uint32_t swizzled(uint32_t address, Swizzle swizzle) {
    const uint32_t mask = (1u << static_cast<uint32_t>(swizzle)) - 1;
    return address ^ (address >> 7 & mask) << 4;
  }
};

OperandLayout decode_wgmma_descriptor(uint64_t descriptor, bool mn_major);
OperandLayout decode_tcgen05_descriptor(uint64_t descriptor, bool mn_major);

struct InstructionDescriptor {  // tcgen05.mma, kind::f16
  bool d_is_f32;
  bool a_is_bf16, b_is_bf16;
  bool negate_a, negate_b;
  bool transpose_a, transpose_b;  // MN-major
  uint32_t m, n;
};
// Throws on reserved or sparse fields and on (M, N) that cta_group does not allow.
InstructionDescriptor decode_instruction_descriptor(uint32_t bits, uint32_t cta_group);

}  // namespace emu
