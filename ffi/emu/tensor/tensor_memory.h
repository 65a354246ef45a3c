// Tensor memory of one CTA: 128 lanes x 512 columns of 32 bits, its allocator, and which cells hold a value.
#pragma once

#include <bitset>
#include <cstdint>
#include <memory>

#include "core/error.h"

namespace emu {

inline constexpr uint32_t kTmemLanes = 128;
inline constexpr uint32_t kTmemColumns = 512;
inline constexpr uint32_t kTmemPitch = kTmemColumns + 16;  // words from lane to lane: keeps lanes off one cache set
inline constexpr uint32_t kTmemPoison = 0x7fbadbad;  // a signalling NaN: what an unwritten cell reads as

// Told of every access to tensor memory when present (a strict run's judge); whole groups of 16 lanes.
class TensorObserver {
 public:
  virtual ~TensorObserver() = default;
  virtual void access(uint32_t lane, uint32_t lanes, uint32_t column, uint32_t columns, bool write) = 0;
  virtual void forget(uint32_t column, uint32_t columns) = 0;  // new columns: what happened to them before is no matter
};

class TensorMemory {
 public:
  using Columns = std::bitset<kTmemColumns>;
  static Columns span(uint32_t first, uint32_t count) {
    return ~Columns{} >> (kTmemColumns - count) << first;
  }

  TensorMemory();

  // tcgen05.alloc: false when no run of `columns` free columns exists (the instruction then waits). Throws on a size
  // that is not a power of two from 32 to 512, and after relinquish(). New columns hold no value.
  bool allocate(uint32_t columns, uint32_t* address);
  // tcgen05.dealloc: throws unless exactly this range was allocated.
  void release(uint32_t address, uint32_t columns);
  // tcgen05.relinquish_alloc_permit.
  void relinquish() { relinquished_ = true; }
  uint32_t allocated_columns() const;  // at exit: above 0 is a leak

  // Throws unless lanes lane..lane+lanes-1 and columns column..column+columns-1 exist and are allocated.
  void check(uint32_t lane, uint32_t lanes, uint32_t column, uint32_t columns) const;

  uint32_t* row(uint32_t lane) { return cells_.get() + lane * kTmemPitch; }
  const uint32_t* row(uint32_t lane) const { return cells_.get() + lane * kTmemPitch; }

  void mark_written(uint32_t lane, const Columns& columns) { written_[lane] |= columns; }
  bool written(uint32_t lane, const Columns& columns) const { return (written_[lane] & columns) == columns; }
  bool unwritten(uint32_t lane, const Columns& columns) const { return (written_[lane] & columns).none(); }

  void observe(std::unique_ptr<TensorObserver> observer) { observer_ = std::move(observer); }
  void accessed(uint32_t lane, uint32_t lanes, uint32_t column, uint32_t columns, bool write) const {
    if (observer_) observer_->access(lane, lanes, column, columns, write);
  }

 private:
  std::unique_ptr<uint32_t[]> cells_;
  Columns written_[kTmemLanes];
  Columns allocated_;
  uint16_t length_[kTmemColumns] = {};  // at the first column of an allocation: its columns
  bool relinquished_ = false;
  std::unique_ptr<TensorObserver> observer_;
};

// The two halves of a tensor-memory address.
inline uint32_t tmem_lane(uint32_t address) { return address >> 16; }
inline uint32_t tmem_column(uint32_t address) { return address & 0xffffu; }

}  // namespace emu
