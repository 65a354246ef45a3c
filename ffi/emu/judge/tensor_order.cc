#include "judge/tensor_order.h"

#include <algorithm>

namespace emu {

std::shared_ptr<TensorAccess> TensorOrder::issue(const char* what, int line, uint32_t warp) {
  return std::make_shared<TensorAccess>(TensorAccess{what, line, warp, ++events_, 0, after_[warp], before_});
}

void TensorOrder::end() {
  if (current_) current_->done = ++events_;
  current_.reset();
}

void TensorOrderShadow::check(const TensorAccess& earlier, const TensorAccess& later, uint32_t lane, uint32_t column) const {
  if (earlier.warp == later.warp) return;  // one warp's operations are pipelined or waited for, without fences
  const char* missing = nullptr;
  if (later.before[earlier.warp] < earlier.issued)
    missing = "tcgen05.fence::before_thread_sync (or commit) by the former after its access";
  else if (later.after < (earlier.done && earlier.done < later.issued ? earlier.done : earlier.issued))
    missing = "tcgen05.fence::after_thread_sync by the latter after its wait";
  if (missing)
    throw fail("strict: tensor memory lane %u, column %u: %s of warp %u of the cluster (PTX line %d), then %s of warp %u: "
               "missing %s", lane, column, earlier.what, earlier.warp, earlier.line, later.what, later.warp, missing);
}

void TensorOrderShadow::access(uint32_t lane, uint32_t lanes, uint32_t column, uint32_t columns, bool write) {
  const std::shared_ptr<TensorAccess>& now = order_.current();
  if (!now) return;
  for (uint32_t group = lane / kGroupLanes; group * kGroupLanes < lane + lanes; ++group)
    for (uint32_t c = column; c < column + columns; ++c) {
      Cell& cell = cells_[group * kTmemColumns + c];
      if (cell.write && cell.write != now) check(*cell.write, *now, group * kGroupLanes, c);
      if (write) {
        for (const auto& read : cell.reads)
          if (read != now) check(*read, *now, group * kGroupLanes, c);
        cell.reads.clear();
        cell.write = now;
      } else {
        const auto same = std::find_if(cell.reads.begin(), cell.reads.end(),
                                       [&](const auto& read) { return read->warp == now->warp; });
        if (same == cell.reads.end()) cell.reads.push_back(now);
        else *same = now;
      }
    }
}

void TensorOrderShadow::forget(uint32_t column, uint32_t columns) {
  for (uint32_t group = 0; group < kGroups; ++group)
    for (uint32_t c = column; c < column + columns; ++c) cells_[group * kTmemColumns + c] = Cell();
}

}  // namespace emu
