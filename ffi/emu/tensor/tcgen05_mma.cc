// tcgen05.mma kind::f16, dense, cta_group 1 and 2. Where D and A lie in tensor memory: PTX ISA, "Data path layout
// organization"; a lane of tensor memory meets one row of A, and one CTA's share of D is described by where each row of
// its part lies and which columns of the product that lane holds.
#include <cstring>

#include "tensor/descriptor.h"
#include "tensor/gather.h"
#include "tensor/matmul.h"
#include "tensor/tensor_memory.h"
#include "tensor/units.h"

namespace emu {
namespace {

// One CTA's part of D, as runs of lanes that hold consecutive rows of its part of A.
struct LaneRun {
  uint32_t lane;    // first lane
  uint32_t row;     // first row within the CTA's part of A
  uint32_t column;  // first column of the product
};
struct Partition {
  uint32_t rows;     // of A that this CTA provides
  uint32_t columns;  // of D that a lane holds
  uint32_t run;      // lanes in a run
  LaneRun runs[4];
  uint32_t count;
};

Partition partition(const InstructionDescriptor& shape, uint32_t cta_group, uint32_t lane) {
  if (cta_group == 1 && shape.m == 64)
    return {64, shape.n, 16, {{lane, 0, 0}, {lane + 32, 16, 0}, {lane + 64, 32, 0}, {lane + 96, 48, 0}}, 4};
  if (cta_group == 2 && shape.m == 128)
    return {64, shape.n / 2, 64, {{lane, 0, 0}, {lane + 64, 0, shape.n / 2}}, 2};
  return {128, shape.n, 128, {{lane, 0, 0}}, 1};
}

// A from tensor memory: each lane holds its own row, two 16-bit elements a column, 8 columns for K = 16.
void gather_tensor_rows(const TensorMemory& tensor, uint32_t address, const Partition& part, OperandType type,
                        const LaneRun& run, float* out) {
  const uint32_t column = tmem_column(address);
  const auto wanted = TensorMemory::span(column, kMmaDepth / 2);
  for (uint32_t i = 0; i < part.run; ++i) {
    const uint32_t lane = run.lane + i;
    if (!tensor.written(lane, wanted))
      throw fail("tcgen05.mma: A is read from tensor memory lane %u, columns %u-%u, where nothing was written", lane,
                 column, column + kMmaDepth / 2 - 1);
    const auto* source = reinterpret_cast<const uint8_t*>(tensor.row(lane) + column);
    for (uint32_t half = 0; half < 2; ++half) widen8(source + half * 16, type, out + i * kMmaDepth + half * 8);
  }
}

struct Decoded {
  InstructionDescriptor shape;
  OperandLayout a, b;
  uint32_t lane;  // of D
};

Decoded decode(const Tcgen05Mma& mma) {
  if (mma.kind != MmaKind::kF16) throw fail("tcgen05.mma: only kind::f16 is modelled");
  Decoded out{decode_instruction_descriptor(mma.instruction_descriptor, mma.cta_group), {}, {}, tmem_lane(mma.d)};
  const InstructionDescriptor& shape = out.shape;
  if (!shape.d_is_f32) throw fail("tcgen05.mma kind::f16: f16 accumulators are not modelled");
  const bool half_lanes = mma.cta_group == 1 && shape.m == 64;
  if (out.lane != 0 && !(half_lanes && out.lane == 16))
    throw fail("tcgen05.mma: D begins at lane %u, allowed %s", out.lane, half_lanes ? "0 and 16" : "0");
  if (mma.a_in_tensor_memory) {
    const uint32_t address = static_cast<uint32_t>(mma.a);
    if (shape.transpose_a) throw fail("tcgen05.mma: A in tensor memory cannot be transposed");
    if (tmem_lane(address) != out.lane)
      throw fail("tcgen05.mma: A begins at lane %u and D at lane %u; must be the same", tmem_lane(address), out.lane);
  } else {
    out.a = decode_tcgen05_descriptor(mma.a, shape.transpose_a);
  }
  out.b = decode_tcgen05_descriptor(mma.b, shape.transpose_b);
  return out;
}

void multiply_one(const Tcgen05Mma& mma, const Decoded& decoded, uint32_t rank, const float* b, uint32_t b_pitch) {
  const InstructionDescriptor& shape = decoded.shape;
  const Partition part = partition(shape, mma.cta_group, decoded.lane);
  TensorMemory& tensor = *mma.tensor[rank];
  const OperandType type{shape.a_is_bf16, shape.negate_a};
  const uint32_t column = tmem_column(mma.d);
  const auto wanted = TensorMemory::span(column, part.columns);
  alignas(64) float a[kTmemLanes * kMmaDepth];
  if (!mma.a_in_tensor_memory) gather_rows(decoded.a, type, part.rows, mma.shared[rank], a);
  for (uint32_t r = 0; r < part.count; ++r) {
    const LaneRun& run = part.runs[r];
    const float* rows = a + run.row * kMmaDepth;
    if (mma.a_in_tensor_memory) {
      gather_tensor_rows(tensor, static_cast<uint32_t>(mma.a), part, type, run, a);
      rows = a;
      tensor.accessed(run.lane, part.run, tmem_column(static_cast<uint32_t>(mma.a)), kMmaDepth / 2, false);
    }
    tensor.accessed(run.lane, part.run, column, part.columns, true);
    bool masked = false;
    for (uint32_t i = 0; i < part.run; ++i) {
      const uint32_t lane = run.lane + i;
      if (mma.disable_output_lane[lane / 32] >> lane % 32 & 1) {
        masked = true;
      } else {
        if (mma.accumulate && !tensor.written(lane, wanted))
          throw fail("tcgen05.mma: accumulates onto lane %u, columns %u-%u, where nothing was written", lane, column,
                     column + part.columns - 1);
        tensor.mark_written(lane, wanted);
      }
    }
    float* const d = reinterpret_cast<float*>(tensor.row(run.lane)) + column;
    if (!masked) {
      multiply_dense({d, kTmemPitch, rows, b + run.column, b_pitch, part.run, part.columns, mma.accumulate});
      continue;
    }
    for (uint32_t i = 0; i < part.run; i += 4) {  // four rows at a time into a copy, then the lanes that are enabled
      float copy[4][256];
      for (uint32_t j = 0; j < 4; ++j)
        std::memcpy(copy[j], d + (i + j) * kTmemPitch, part.columns * sizeof(float));
      multiply_dense({copy[0], 256, rows + i * kMmaDepth, b + run.column, b_pitch, 4, part.columns, mma.accumulate});
      for (uint32_t j = 0; j < 4; ++j) {
        const uint32_t lane = run.lane + i + j;
        if (!(mma.disable_output_lane[lane / 32] >> lane % 32 & 1))
          std::memcpy(d + (i + j) * kTmemPitch, copy[j], part.columns * sizeof(float));
      }
    }
  }
}

}  // namespace

void tcgen05_mma_check(const Tcgen05Mma& mma) {
  const Decoded decoded = decode(mma);
  const Partition part = partition(decoded.shape, mma.cta_group, decoded.lane);
  for (uint32_t rank = 0; rank < mma.cta_group; ++rank) {
    mma.tensor[rank]->check(0, kTmemLanes, tmem_column(mma.d), part.columns);
    if (mma.a_in_tensor_memory)
      mma.tensor[rank]->check(0, kTmemLanes, tmem_column(static_cast<uint32_t>(mma.a)), kMmaDepth / 2);
  }
}

MmaWork tcgen05_mma(const Tcgen05Mma& mma) {
  const Decoded decoded = decode(mma);
  const InstructionDescriptor& shape = decoded.shape;
  alignas(64) float b[kMmaDepth * 256];
  const uint32_t share = shape.n / mma.cta_group;  // each CTA of a pair holds half of B's columns
  for (uint32_t rank = 0; rank < mma.cta_group; ++rank)
    gather_columns(decoded.b, {shape.b_is_bf16, shape.negate_b}, share, mma.shared[rank], b + rank * share, shape.n);
  for (uint32_t rank = 0; rank < mma.cta_group; ++rank) multiply_one(mma, decoded, rank, b, shape.n);
  return {shape.m, shape.n, kMmaDepth};
}

}  // namespace emu
