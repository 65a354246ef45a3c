// C entry points to the software GPU's functional units, for tests alone. Each returns null or an error message.
#include <cstring>
#include <string>

#include "mem/tensor_map.h"
#include "tensor/tensor_memory.h"
#include "tensor/units.h"

using namespace emu;

namespace {

template <typename Body>
const char* guarded(Body body) {
  static thread_local std::string message;
  try {
    body();
    return nullptr;
  } catch (const Error& error) {
    message = error.what();
    return message.c_str();
  }
}

}  // namespace

extern "C" {

TensorMemory* unit_tmem_new() { return new TensorMemory; }
void unit_tmem_delete(TensorMemory* tensor) { delete tensor; }
const char* unit_tmem_allocate(TensorMemory* tensor, uint32_t columns, uint32_t* address, int* done) {
  return guarded([&] { *done = tensor->allocate(columns, address); });
}
const char* unit_tmem_release(TensorMemory* tensor, uint32_t address, uint32_t columns) {
  return guarded([&] { tensor->release(address, columns); });
}
void unit_tmem_relinquish(TensorMemory* tensor) { tensor->relinquish(); }
uint32_t unit_tmem_allocated(TensorMemory* tensor) { return tensor->allocated_columns(); }
void unit_tmem_read(TensorMemory* tensor, uint32_t* out) {
  for (uint32_t lane = 0; lane < kTmemLanes; ++lane) std::memcpy(out + lane * kTmemColumns, tensor->row(lane), kTmemColumns * 4);
}
void unit_tmem_write(TensorMemory* tensor, const uint32_t* in, int mark) {
  for (uint32_t lane = 0; lane < kTmemLanes; ++lane) {
    std::memcpy(tensor->row(lane), in + lane * kTmemColumns, kTmemColumns * 4);
    if (mark) tensor->mark_written(lane, TensorMemory::span(0, kTmemColumns));
  }
}
int unit_tmem_written(TensorMemory* tensor, uint32_t lane, uint32_t column, uint32_t columns) {
  return tensor->written(lane, TensorMemory::span(column, columns));
}

// registers: [register][32 lanes]
const char* unit_tmem_access(TensorMemory* tensor, int store, int shape, int repeat, int pack, int split, int warp,
                             uint32_t address, uint32_t* registers) {
  return guarded([&] {
    const TmemAccess access{static_cast<TmemShape>(shape), static_cast<uint8_t>(repeat), pack != 0,
                            static_cast<uint16_t>(split), static_cast<uint8_t>(warp), address};
    uint32_t* rows[128];
    for (int i = 0; i < tmem_registers(access); ++i) rows[i] = registers + i * 32;
    if (store)
      tmem_store(access, *tensor, rows);
    else
      tmem_load(access, *tensor, rows);
  });
}

struct UnitMma {
  uint32_t cta_group, a_in_tensor_memory, accumulate, instruction_descriptor;
  uint64_t a, b;
  uint32_t d;
  uint32_t disable_output_lane[8];
  uint32_t shared_bytes;
  uint8_t* shared[2];
  TensorMemory* tensor[2];
};
const char* unit_mma(const UnitMma* unit, int check_only) {
  return guarded([&] {
    Tcgen05Mma mma{};
    mma.kind = MmaKind::kF16;
    mma.cta_group = static_cast<uint8_t>(unit->cta_group);
    mma.a_in_tensor_memory = unit->a_in_tensor_memory != 0;
    mma.accumulate = unit->accumulate != 0;
    mma.instruction_descriptor = unit->instruction_descriptor;
    mma.a = unit->a;
    mma.b = unit->b;
    mma.d = unit->d;
    std::memcpy(mma.disable_output_lane, unit->disable_output_lane, sizeof mma.disable_output_lane);
    for (int i = 0; i < 2; ++i) {
      mma.shared[i] = {unit->shared[i], unit->shared_bytes, nullptr};
      mma.tensor[i] = unit->tensor[i];
    }
    tcgen05_mma_check(mma);
    if (!check_only) tcgen05_mma(mma);
  });
}

const char* unit_cp(TensorMemory* tensor, int shape, int multicast, uint32_t address, uint64_t descriptor,
                    uint8_t* shared, uint32_t bytes) {
  return guarded([&] {
    tcgen05_cp({static_cast<uint8_t>(shape), static_cast<uint8_t>(multicast), address, descriptor},
               {shared, bytes, nullptr}, *tensor);
  });
}

struct UnitWgmma {
  uint32_t n, d_type, type, transpose_a, transpose_b, a_in_registers, accumulate;
  int32_t scale_a, scale_b;
  uint64_t a_descriptor, b_descriptor;
  uint32_t* d;  // [4 warps][registers][32]
  const uint32_t* a;  // [4 warps][4][32]
  uint8_t* shared;
  uint32_t shared_bytes;
};
const char* unit_wgmma(const UnitWgmma* unit) {
  return guarded([&] {
    const auto type = static_cast<ElementType>(unit->type);
    WgmmaForm form{static_cast<uint16_t>(unit->n), static_cast<ElementType>(unit->d_type), type, type,
                   static_cast<int8_t>(unit->scale_a), static_cast<int8_t>(unit->scale_b), unit->transpose_a != 0,
                   unit->transpose_b != 0, unit->a_in_registers != 0};
    const uint32_t registers = form.n / 2 / (form.d == ElementType::kF16 ? 2 : 1);
    uint32_t* d[4][128];
    const uint32_t* a[4][4];
    WgmmaOperands operands{};
    for (uint32_t warp = 0; warp < 4; ++warp) {
      for (uint32_t i = 0; i < registers; ++i) d[warp][i] = unit->d + (warp * registers + i) * 32;
      for (uint32_t i = 0; i < 4; ++i) a[warp][i] = unit->a + (warp * 4 + i) * 32;
      operands.d[warp] = d[warp];
      operands.a[warp] = a[warp];
    }
    operands.a_descriptor = unit->a_descriptor;
    operands.b_descriptor = unit->b_descriptor;
    operands.accumulate = unit->accumulate != 0;
    wgmma(form, operands, {unit->shared, unit->shared_bytes, nullptr});
  });
}

const char* unit_tile(const uint8_t* map, int rank, const int32_t* coordinate, uint32_t shared_address, int store,
                      int reduction, uint8_t* shared, uint32_t bytes, uint32_t* tile) {
  return guarded([&] {
    TileCopy copy{map, static_cast<uint8_t>(rank), {}, shared_address};
    std::memcpy(copy.coordinate, coordinate, rank * sizeof(int32_t));
    tile_check(copy, store != 0);
    *tile = tile_bytes(map);
    const SharedView view{shared, bytes, nullptr};
    if (store)
      tile_store(copy, static_cast<Reduction>(reduction), view, {});
    else
      tile_load(copy, {}, &view, 1);
  });
}

const char* unit_bulk_reduce(uint8_t* destination, const uint8_t* source, uint32_t bytes, int reduction, int type) {
  return guarded([&] {
    bulk_reduce(destination, source, bytes, static_cast<Reduction>(reduction), static_cast<BulkType>(type));
  });
}

// The decoded fields, for comparison: address, rank, type, element bytes, swizzle, fill, size[5], stride[5], box[5].
const char* unit_tensor_map(const uint8_t* bytes, uint64_t* out) {
  return guarded([&] {
    const TensorMap map = decode_tensor_map(bytes);
    const uint64_t head[6] = {map.address, map.rank, static_cast<uint64_t>(map.type), map.element_bytes,
                              static_cast<uint64_t>(map.swizzle), map.fill_nan};
    std::memcpy(out, head, sizeof head);
    for (int d = 0; d < 5; ++d) {
      out[6 + d] = map.size[d];
      out[11 + d] = map.stride[d];
      out[16 + d] = map.box[d];
    }
  });
}

}  // extern "C"
