#include "tensor/tensor_memory.h"

#include <algorithm>
#include <bit>

namespace emu {
TensorMemory::TensorMemory() : cells_(new uint32_t[kTmemLanes * kTmemPitch]) {
  std::fill_n(cells_.get(), kTmemLanes * kTmemPitch, kTmemPoison);
}

bool TensorMemory::allocate(uint32_t columns, uint32_t* address) {
  if (columns < 32 || columns > kTmemColumns || !std::has_single_bit(columns))
    throw fail("tcgen05.alloc: %u columns, allowed 32, 64, 128, 256, 512", columns);
  if (relinquished_) throw fail("tcgen05.alloc: after tcgen05.relinquish_alloc_permit");
  for (uint32_t first = 0; first + columns <= kTmemColumns; first += 32) {
    const auto wanted = span(first, columns);
    if ((allocated_ & wanted).any()) continue;
    allocated_ |= wanted;
    length_[first] = static_cast<uint16_t>(columns);
    for (uint32_t lane = 0; lane < kTmemLanes; ++lane) {
      written_[lane] &= ~wanted;
      std::fill_n(row(lane) + first, columns, kTmemPoison);
    }
    if (observer_) observer_->forget(first, columns);
    *address = first;
    return true;
  }
  return false;
}

void TensorMemory::release(uint32_t address, uint32_t columns) {
  const uint32_t first = tmem_column(address);
  if (tmem_lane(address) != 0 || first >= kTmemColumns || length_[first] == 0 || length_[first] != columns)
    throw fail("tcgen05.dealloc: %u columns at 0x%x were not allocated (or already freed)", columns, address);
  length_[first] = 0;
  allocated_ &= ~span(first, columns);
}

uint32_t TensorMemory::allocated_columns() const { return static_cast<uint32_t>(allocated_.count()); }

void TensorMemory::check(uint32_t lane, uint32_t lanes, uint32_t column, uint32_t columns) const {
  if (lane >= kTmemLanes || lanes > kTmemLanes - lane || column >= kTmemColumns || columns > kTmemColumns - column)
    throw fail("tensor memory: access to lanes %u-%u, columns %u-%u; it has 128 lanes and 512 columns", lane,
               lane + lanes - 1, column, column + columns - 1);
  const auto wanted = span(column, columns);
  if ((allocated_ & wanted) != wanted)
    throw fail("tensor memory: access to columns %u-%u, which are not all allocated", column, column + columns - 1);
}

}  // namespace emu
