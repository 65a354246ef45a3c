#include "judge/shadow.h"

#include <algorithm>
#include <cstring>

namespace emu {

SharedShadow::SharedShadow(ClusterJudge& judge, uint32_t bytes) : judge_(judge), state_(bytes, kUnwritten) {
  if (judge.proxies()) proxies_ = std::make_unique<ProxyShadow>(*judge.proxies(), bytes);
}

bool SharedShadow::read(uint32_t address, uint32_t bytes, Proxy proxy) {
  if (proxies_ && proxy == Proxy::kGeneric) proxies_->access(address, bytes);
  for (uint32_t at = address; at < address + bytes;) {
    // Eight bytes at once where all are visible, as nearly all are.
    uint64_t states;
    if (at + 8 <= address + bytes) {
      std::memcpy(&states, state_.data() + at, 8);
      if (states == 0x0101010101010101u * kVisible) {
        at += 8;
        continue;
      }
    }
    const uint8_t state = state_[at];
    if (state == kUnwritten && proxy == Proxy::kGeneric) return false;
    if (state == kUnwritten)
      throw fail("shared memory: %u bytes are read at 0x%x, but nothing was ever written at 0x%x", bytes, address, at);
    if (state >= kFirstWarp && proxy != Proxy::kGeneric)
      throw fail("missing fence.proxy.async: %s reads shared memory at 0x%x, which warp %u of the cluster wrote through "
                 "the generic proxy and did not fence since",
                 proxy == Proxy::kAsync ? "a bulk copy" : "a tensor core", at, state - kFirstWarp);
    ++at;
  }
  return true;
}

void SharedShadow::write(uint32_t address, uint32_t bytes, Proxy proxy) {
  uint8_t* const first = state_.data() + address;
  if (proxy != Proxy::kGeneric) {
    if (proxies_) proxies_->overwrite(address, bytes);
    std::memset(first, kVisible, bytes);
    return;
  }
  if (proxies_) proxies_->access(address, bytes);
  const uint8_t tag = judge_.tag();
  if (tag != kVisible && !std::all_of(first, first + bytes, [&](uint8_t state) { return state == tag; })) {
    auto& ranges = judge_.pending_[judge_.running_];
    if (!ranges.empty() && ranges.back().shadow == this && ranges.back().address + ranges.back().bytes == address)
      ranges.back().bytes += bytes;
    else
      ranges.push_back({this, address, bytes});
  }
  std::memset(first, tag, bytes);
}

void ClusterJudge::fence() {
  fence_inits();
  if (proxies_) proxies_->fence();
  const uint8_t mine = tag();
  for (const Range& range : pending_[running_])
    std::replace(range.shadow->state_.begin() + range.address,
                 range.shadow->state_.begin() + range.address + range.bytes, mine, uint8_t{SharedShadow::kVisible});
  pending_[running_].clear();
}

}  // namespace emu
