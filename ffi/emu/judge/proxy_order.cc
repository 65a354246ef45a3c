#include "judge/proxy_order.h"

#include <algorithm>

#include "core/error.h"

namespace emu {
namespace {

void raise(Fences& fences, const Fences& others) {
  for (size_t warp = 0; warp < others.size(); ++warp) fences[warp] = std::max(fences[warp], others[warp]);
}

}  // namespace

void ProxyOrder::fence() {
  auto more = std::make_shared<Fences>(*before_[running_]);
  ++(*more)[running_];
  before_[running_] = std::move(more);
}

void ProxyOrder::join(uint32_t warp, const Fences& more) {
  const Fences& own = *before_[warp];
  if (std::equal(more.begin(), more.end(), own.begin(), [](uint32_t theirs, uint32_t mine) { return theirs <= mine; })) return;
  auto sum = std::make_shared<Fences>(own);
  raise(*sum, more);
  before_[warp] = std::move(sum);
}

void ProxyOrder::arrive(uint64_t barrier, bool waits) {
  Barrier& b = barriers_[barrier];
  b.arrived.resize(before_.size());
  raise(b.arrived, *before());
  if (waits) b.waiting.push_back(running_);
}

void ProxyOrder::complete(uint64_t barrier) {
  Barrier& b = barriers_[barrier];
  b.before_end = b.arrived;
  for (uint32_t warp : b.waiting) join(warp, b.before_end);
  b.waiting.clear();
}

void ProxyShadow::access(uint32_t address, uint32_t bytes) {
  const Access access{address, bytes, order_.running(), order_.fences() + 1};
  if (access == last_) return;
  last_ = access;
  for (uint32_t piece = address / kPiece; piece * kPiece < address + bytes; ++piece) {
    if (rows_[piece] == 0) {
      rows_[piece] = static_cast<uint32_t>(next_.size());
      next_.resize(next_.size() + warps_);
    }
    next_[rows_[piece] + access.warp] = access.next;
  }
}

void ProxyShadow::overwrite(uint32_t address, uint32_t bytes) {
  const Fences& before = *order_.before();
  last_ = {};
  for (uint32_t piece = address / kPiece; piece * kPiece < address + bytes; ++piece) {
    if (rows_[piece] == 0) continue;
    uint32_t* const next = &next_[rows_[piece]];
    for (uint32_t warp = 0; warp < warps_; ++warp)
      if (next[warp] > before[warp])
        throw fail("strict: missing fence.proxy.async: a bulk copy overwrites shared memory at 0x%x, which warp %u of the "
                   "cluster read or wrote through the generic proxy; no fence of that warp stands between, before the "
                   "barrier", piece * kPiece, warp);
    std::fill(next, next + warps_, 0);
  }
}

}  // namespace emu
