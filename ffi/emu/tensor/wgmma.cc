// wgmma.mma_async.m64nNk16 of 16-bit types. Register fragments: PTX ISA, "Register fragments and shared memory matrix
// layouts".
#include "tensor/descriptor.h"
#include "tensor/gather.h"
#include "tensor/half.h"
#include "tensor/matmul.h"
#include "tensor/units.h"

namespace emu {
namespace {

constexpr uint32_t kRows = 64;

OperandType operand_type(ElementType type, int scale) { return {type == ElementType::kBf16, scale < 0}; }

// A's fragment: lane t holds, of rows t/4 and t/4 + 8, the pairs at k = 2*(t%4) and k = 8 + 2*(t%4).
void gather_register_rows(const WgmmaForm& form, const WgmmaOperands& operands, float* out) {
  for (uint32_t warp = 0; warp < 4; ++warp)
    for (uint32_t reg = 0; reg < 4; ++reg)
      for (uint32_t lane = 0; lane < kLanes; ++lane) {
        const uint32_t row = warp * 16 + lane / 4 + reg % 2 * 8, k = reg / 2 * 8 + lane % 4 * 2;
        const uint32_t pair = operands.a[warp][reg][lane];
        for (uint32_t i = 0; i < 2; ++i) {
          const auto bits = static_cast<uint16_t>(pair >> i * 16);
          const float value = form.a == ElementType::kBf16 ? bf16_to_float(bits) : f16_to_float(bits);
          out[row * kMmaDepth + k + i] = form.scale_a < 0 ? -value : value;
        }
      }
}

// Rows to the order of the lanes: [warp][half][k][lane].
void spread_rows(const float* rows, float* out) {
  for (uint32_t group = 0; group < 8; ++group)
    for (uint32_t k = 0; k < kMmaDepth; ++k)
      for (uint32_t lane = 0; lane < kLanes; ++lane)
        out[(group * kMmaDepth + k) * kLanes + lane] = rows[(group * 8 + lane / 4) * kMmaDepth + k];
}

void check_form(const WgmmaForm& form) {
  const bool half = form.a == form.b && (form.a == ElementType::kF16 || form.a == ElementType::kBf16);
  const bool good_d = form.d == ElementType::kF32 || (form.d == ElementType::kF16 && form.a == ElementType::kF16);
  if (!half || !good_d)
    throw fail("wgmma: only f16 and bf16 inputs with f32 (or f16 of f16) accumulators are modelled");
  if (form.n < 8 || form.n > 256 || form.n % 8) throw fail("wgmma: n = %u, allowed multiples of 8 up to 256", form.n);
}

}  // namespace

void wgmma(const WgmmaForm& form, const WgmmaOperands& operands, const SharedView& shared) {
  check_form(form);
  alignas(64) float rows[kRows * kMmaDepth], fragments[4 * 2 * kMmaDepth * kLanes], b[kMmaDepth * 256];
  if (form.a_in_registers)
    gather_register_rows(form, operands, rows);
  else
    gather_rows(decode_wgmma_descriptor(operands.a_descriptor, form.transpose_a), operand_type(form.a, form.scale_a),
                kRows, shared, rows);
  spread_rows(rows, fragments);
  gather_columns(decode_wgmma_descriptor(operands.b_descriptor, form.transpose_b), operand_type(form.b, form.scale_b),
                 form.n, shared, b, form.n);

  const uint32_t elements = form.n / 2;  // of D in a lane
  float* pointers[4][128];
  alignas(64) float widened[4][128][kLanes];
  const bool packed = form.d == ElementType::kF16;
  for (uint32_t warp = 0; warp < 4; ++warp)
    for (uint32_t i = 0; i < elements; ++i) {
      if (!packed) {
        pointers[warp][i] = reinterpret_cast<float*>(operands.d[warp][i]);
        continue;
      }
      pointers[warp][i] = widened[warp][i];
      if (operands.accumulate)
        for (uint32_t lane = 0; lane < kLanes; ++lane)
          widened[warp][i][lane] = f16_to_float(static_cast<uint16_t>(operands.d[warp][i / 2][lane] >> i % 2 * 16));
    }
  FragmentProduct products[4];
  for (uint32_t warp = 0; warp < 4; ++warp)
    products[warp] = {pointers[warp], fragments + warp * 2 * kMmaDepth * kLanes, b, form.n, form.n,
                      operands.accumulate};
  multiply_fragments(products);
  if (!packed) return;
  for (uint32_t warp = 0; warp < 4; ++warp)
    for (uint32_t i = 0; i < elements; i += 2)
      for (uint32_t lane = 0; lane < kLanes; ++lane)
        operands.d[warp][i / 2][lane] = float_to_f16(widened[warp][i][lane]) |
                                        uint32_t{float_to_f16(widened[warp][i + 1][lane])} << 16;
}

}  // namespace emu
