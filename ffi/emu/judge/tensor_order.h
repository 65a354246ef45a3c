// In a strict run: the order between accesses of different warps to tensor memory. tcgen05 instructions are asynchronous,
// and a barrier alone does not order them: the first warp needs tcgen05.fence::before_thread_sync (tcgen05.commit implies
// it) after its access and before it arrives, the second one tcgen05.fence::after_thread_sync after its wait and before
// its own access (PTX ISA, "tcgen05 memory consistency model"). Hardware forgives their absence so far.
#pragma once

#include <bitset>
#include <cstdint>
#include <memory>
#include <vector>

#include "tensor/tensor_memory.h"

namespace emu {

// A tcgen05.ld, st, mma or cp. Moments are numbers of events in the cluster.
struct TensorAccess {
  const char* what;
  int line;                      // PTX
  uint32_t warp;                 // numbered through the cluster
  uint64_t issued, done;         // done 0: in flight
  uint64_t after;                // its warp's last fence::after_thread_sync when it was issued
  std::vector<uint64_t> before;  // every warp's last fence::before_thread_sync at that time
};

class TensorOrder {
 public:
  explicit TensorOrder(uint32_t warps) : before_(warps), after_(warps) {}

  void fence_before(uint32_t warp) { before_[warp] = ++events_; }
  void fence_after(uint32_t warp) { after_[warp] = ++events_; }
  std::shared_ptr<TensorAccess> issue(const char* what, int line, uint32_t warp);

  // What happens to tensor memory until `end` is done by `access`. Null: nobody looks.
  void begin(std::shared_ptr<TensorAccess> access) { current_ = std::move(access); }
  void end();
  const std::shared_ptr<TensorAccess>& current() const { return current_; }

 private:
  uint64_t events_ = 0;
  std::vector<uint64_t> before_, after_;
  std::shared_ptr<TensorAccess> current_;
};

// One CTA's tensor memory: the last write of each cell and the reads since. Cells are 16 lanes of a column: no access
// divides them.
class TensorOrderShadow final : public TensorObserver {
 public:
  explicit TensorOrderShadow(TensorOrder& order) : order_(order), cells_(kGroups * kTmemColumns) {}

  void access(uint32_t lane, uint32_t lanes, uint32_t column, uint32_t columns, bool write) override;
  void forget(uint32_t column, uint32_t columns) override;

 private:
  static constexpr uint32_t kGroupLanes = 16, kGroups = kTmemLanes / kGroupLanes;
  struct Cell {
    std::shared_ptr<TensorAccess> write;
    std::vector<std::shared_ptr<TensorAccess>> reads;  // since the write, the last of each warp
  };
  void check(const TensorAccess& earlier, const TensorAccess& later, uint32_t lane, uint32_t column) const;

  TensorOrder& order_;
  std::vector<Cell> cells_;
};

}  // namespace emu
