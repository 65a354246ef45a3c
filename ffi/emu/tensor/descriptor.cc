#include "tensor/descriptor.h"

#include "core/error.h"

namespace emu {
namespace {

uint32_t field(uint64_t value, int low, int width) {
  return static_cast<uint32_t>(value >> low & ((uint64_t{1} << width) - 1));
}

OperandLayout common_fields(uint64_t descriptor, bool mn_major, Swizzle swizzle) {
  if (const uint32_t base = field(descriptor, 49, 3); base != 0)
    throw fail("shared-memory descriptor 0x%016llx: base offset %u; only 0 is modelled: align the tile to the "
               "swizzle's repeating pattern (1024, 512 or 256 bytes)",
               static_cast<unsigned long long>(descriptor), base);
  return {field(descriptor, 0, 14) << 4, field(descriptor, 16, 14) << 4, field(descriptor, 32, 14) << 4, swizzle,
          mn_major};
}

}  // namespace

OperandLayout decode_wgmma_descriptor(uint64_t descriptor, bool mn_major) {
  static constexpr Swizzle kModes[4] = {Swizzle::kNone, Swizzle::k128B, Swizzle::k64B, Swizzle::k32B};
  return common_fields(descriptor, mn_major, kModes[field(descriptor, 62, 2)]);
}

OperandLayout decode_tcgen05_descriptor(uint64_t descriptor, bool mn_major) {
  const auto shown = static_cast<unsigned long long>(descriptor);
  if (field(descriptor, 46, 3) != 1)
    throw fail("tcgen05 shared-memory descriptor 0x%016llx: bits 46-48 are %u, must be 1", shown,
               field(descriptor, 46, 3));
  if (field(descriptor, 52, 1) != 0)
    throw fail("tcgen05 shared-memory descriptor 0x%016llx: absolute leading-dimension addresses need sm_103a", shown);
  if (field(descriptor, 53, 8) != 0)
    throw fail("tcgen05 shared-memory descriptor 0x%016llx: bits 53-60 are 0x%x, must be 0", shown,
               field(descriptor, 53, 8));
  Swizzle swizzle;
  switch (const uint32_t mode = field(descriptor, 61, 3)) {
    case 0: swizzle = Swizzle::kNone; break;
    case 2: swizzle = Swizzle::k128B; break;
    case 4: swizzle = Swizzle::k64B; break;
    case 6: swizzle = Swizzle::k32B; break;
    case 1: throw fail("tcgen05 shared-memory descriptor 0x%016llx: 128-byte swizzle of 32-byte atoms is for 32-bit "
                       "element types", shown);
    default: throw fail("tcgen05 shared-memory descriptor 0x%016llx: swizzle mode %u, allowed 0, 1, 2, 4, 6", shown,
                        mode);
  }
  return common_fields(descriptor, mn_major, swizzle);
}

InstructionDescriptor decode_instruction_descriptor(uint32_t bits, uint32_t cta_group) {
  if (field(bits, 2, 1)) throw fail("tcgen05.mma: instruction descriptor 0x%08x: a sparse A is not modelled", bits);
  if (field(bits, 0, 2) || field(bits, 3, 1) || field(bits, 6, 1) || field(bits, 23, 1) || field(bits, 29, 1))
    throw fail("tcgen05.mma: instruction descriptor 0x%08x has reserved bits set", bits);
  // Bits 30 and 31 shift B for the .ws forms and say nothing here; CuTe DSL leaves them zero.
  if (field(bits, 30, 2)) throw fail("tcgen05.mma: instruction descriptor 0x%08x: a shift is for .ws only", bits);
  const uint32_t d = field(bits, 4, 2), a = field(bits, 7, 3), b = field(bits, 10, 3);
  if (d > 1) throw fail("tcgen05.mma kind::f16: D type %u, allowed 0 (f16) and 1 (f32)", d);
  if (a > 1 || b > 1) throw fail("tcgen05.mma kind::f16: A and B types %u and %u, allowed 0 (f16) and 1 (bf16)", a, b);
  InstructionDescriptor out{d == 1, a == 1, b == 1, field(bits, 13, 1) != 0, field(bits, 14, 1) != 0,
                            field(bits, 15, 1) != 0, field(bits, 16, 1) != 0,
                            field(bits, 24, 5) << 4, field(bits, 17, 6) << 3};
  const bool one = cta_group == 1;
  const uint32_t step = out.m == 64 ? 8 : one ? 16 : 32;
  const bool good_m = one ? out.m == 64 || out.m == 128 : out.m == 128 || out.m == 256;
  if (!good_m || out.n < step || out.n > 256 || out.n % step)
    throw fail("tcgen05.mma kind::f16 cta_group::%u: M=%u N=%u, allowed %s", cta_group, out.m, out.n,
               one ? "M=64 with N a multiple of 8 and M=128 with N a multiple of 16, up to 256"
                   : "M=128 or 256 with N a multiple of 32, up to 256");
  return out;
}

}  // namespace emu
