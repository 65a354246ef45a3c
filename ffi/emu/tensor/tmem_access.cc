// tcgen05.ld and tcgen05.st of one warp. Which lane and column of tensor memory a register of a thread holds, per
// shape: PTX ISA, "Data movement shape".
#include <algorithm>

#include "tensor/tensor_memory.h"
#include "tensor/units.h"

namespace emu {
namespace {

struct Cell {
  uint32_t lane, column;  // relative to the instruction's address; columns count packed pairs once with .pack::16b
};

Cell cell(TmemShape shape, uint32_t thread, uint32_t reg) {
  switch (shape) {
    case kTmem32x32b: return {thread, reg};
    case kTmem16x64b: return {thread / 4 + thread % 2 * 8, reg * 2 + thread / 2 % 2};
    case kTmem16x128b: return {thread / 4 + reg % 2 * 8, reg / 2 * 4 + thread % 4};
    case kTmem16x256b: return {thread / 4 + reg / 2 % 2 * 8, reg / 4 * 8 + thread % 4 * 2 + reg % 2};
    case kTmem16x32bx2: return {thread % 16, reg};  // threads 16.. are shifted by immHalfSplitoff
  }
  throw fail("tcgen05.ld/st: unknown shape %u", shape);
}

uint32_t registers_per_repeat(TmemShape shape) {
  return shape == kTmem16x256b ? 4 : shape == kTmem16x128b ? 2 : 1;
}

struct Extent {
  uint32_t lane, lanes, column, columns, registers;
};

Extent checked_extent(const TmemAccess& access, const TensorMemory& tensor) {
  const auto count = static_cast<uint32_t>(tmem_registers(access));
  const uint32_t lane = tmem_lane(access.address), column = tmem_column(access.address);
  const uint32_t first = access.warp * 32u;
  const bool all_lanes = access.shape == kTmem32x32b;
  if (lane != first && !(lane == first + 16 && !all_lanes))
    throw fail("tcgen05.ld/st: warp %u of its warpgroup addresses lane %u; it may touch lanes %u-%u, from lane %u%s",
               access.warp, lane, first, first + 31, first, all_lanes ? "" : " or 16 above");
  // The 16-lane shapes spread 32 threads over two columns, except 16x32bx2, whose threads 16.. lie at an offset.
  const bool one_column = all_lanes || access.shape == kTmem16x32bx2;
  const uint32_t columns = count * (one_column ? 1 : 2) * (access.pack ? 2 : 1);
  const Extent extent{lane, all_lanes ? 32u : 16u, column, columns, count};
  tensor.check(extent.lane, extent.lanes, column, columns);
  if (access.shape == kTmem16x32bx2)
    tensor.check(extent.lane, extent.lanes, column + access.half_split_offset, columns);
  return extent;
}

void tell(const TmemAccess& access, const TensorMemory& tensor, const Extent& extent, bool write) {
  tensor.accessed(extent.lane, extent.lanes, extent.column, extent.columns, write);
  if (access.shape == kTmem16x32bx2)
    tensor.accessed(extent.lane, extent.lanes, extent.column + access.half_split_offset, extent.columns, write);
}

// Calls move(thread, reg, lane, column) for each 32-bit register.
template <typename Move>
void for_each_cell(const TmemAccess& access, const Extent& extent, Move move) {
  const uint32_t width = access.pack ? 2 : 1;
  for (uint32_t reg = 0; reg < extent.registers; ++reg)
    for (uint32_t thread = 0; thread < 32; ++thread) {
      const Cell at = cell(access.shape, thread, reg);
      const uint32_t split = access.shape == kTmem16x32bx2 && thread >= 16 ? access.half_split_offset : 0;
      move(thread, reg, extent.lane + at.lane, extent.column + at.column * width + split);
    }
}

bool is_row_per_thread(const TmemAccess& access) { return access.shape == kTmem32x32b && !access.pack; }

TensorMemory::Columns columns_of(const TmemAccess& access, const Extent& extent) {
  const auto columns = TensorMemory::span(extent.column, extent.columns);
  return access.shape == kTmem16x32bx2 ? columns | TensorMemory::span(extent.column + access.half_split_offset, extent.columns)
                                       : columns;
}

// Of each register the threads whose cells were never written. True: there are none.
bool find_unwritten(const TmemAccess& access, const TensorMemory& tensor, const Extent& extent, uint32_t* unwritten) {
  bool whole = true;
  const auto columns = columns_of(access, extent);
  for (uint32_t lane = extent.lane; lane < extent.lane + extent.lanes; ++lane) whole = whole && tensor.written(lane, columns);
  if (whole) return true;
  std::fill_n(unwritten, extent.registers, 0u);
  for_each_cell(access, extent, [&](uint32_t thread, uint32_t reg, uint32_t lane, uint32_t column) {
    if (!tensor.written(lane, TensorMemory::span(column, access.pack ? 2 : 1))) unwritten[reg] |= 1u << thread;
  });
  return false;
}

// A load must find written cells. Whole lanes may be without: an M = 64 product leaves half of them alone.
void check_written(const TmemAccess& access, const TensorMemory& tensor, const Extent& extent) {
  const auto columns = columns_of(access, extent);
  bool any = false;
  for (uint32_t lane = extent.lane; lane < extent.lane + extent.lanes; ++lane) {
    if (tensor.written(lane, columns))
      any = true;
    else if (!tensor.unwritten(lane, columns))
      throw fail("tcgen05.ld: lane %u, columns %u-%u: some of them were never written", lane, extent.column,
                 extent.column + extent.columns - 1);
  }
  if (!any)
    throw fail("tcgen05.ld: lanes %u-%u, columns %u-%u: nothing was ever written there", extent.lane,
               extent.lane + extent.lanes - 1, extent.column, extent.column + extent.columns - 1);
}

}  // namespace

int tmem_registers(const TmemAccess& access) { return int(access.repeat * registers_per_repeat(access.shape)); }

bool tmem_load(const TmemAccess& access, const TensorMemory& tensor, uint32_t* const* registers, uint32_t* unwritten) {
  const Extent extent = checked_extent(access, tensor);
  bool whole = true;
  if (unwritten) whole = find_unwritten(access, tensor, extent, unwritten);
  else check_written(access, tensor, extent);
  tell(access, tensor, extent, false);
  if (is_row_per_thread(access)) {
    for (uint32_t thread = 0; thread < 32; ++thread) {
      const uint32_t* source = tensor.row(extent.lane + thread) + extent.column;
      for (uint32_t reg = 0; reg < extent.registers; ++reg) registers[reg][thread] = source[reg];
    }
    return whole;
  }
  for_each_cell(access, extent, [&](uint32_t thread, uint32_t reg, uint32_t lane, uint32_t column) {
    const uint32_t* source = tensor.row(lane) + column;
    registers[reg][thread] = access.pack ? (source[0] & 0xffffu) | source[1] << 16 : source[0];
  });
  return whole;
}

void tmem_store(const TmemAccess& access, TensorMemory& tensor, const uint32_t* const* registers) {
  const Extent extent = checked_extent(access, tensor);
  const auto columns = columns_of(access, extent);
  for (uint32_t lane = 0; lane < extent.lanes; ++lane) tensor.mark_written(extent.lane + lane, columns);
  tell(access, tensor, extent, true);
  if (is_row_per_thread(access)) {
    for (uint32_t thread = 0; thread < 32; ++thread) {
      uint32_t* destination = tensor.row(extent.lane + thread) + extent.column;
      for (uint32_t reg = 0; reg < extent.registers; ++reg) destination[reg] = registers[reg][thread];
    }
    return;
  }
  for_each_cell(access, extent, [&](uint32_t thread, uint32_t reg, uint32_t lane, uint32_t column) {
    uint32_t* destination = tensor.row(lane) + column;
    const uint32_t value = registers[reg][thread];
    if (access.pack) {
      destination[0] = value & 0xffffu;
      destination[1] = value >> 16;
    } else {
      destination[0] = value;
    }
  });
}

}  // namespace emu
