// What the judge knows of each byte of shared memory: whether it was written, and whether a thread wrote it through the
// generic proxy and has not fenced since. Bulk copies and tensor cores go through the async proxy: they do not see such a
// write before the writing thread's fence.proxy.async, whatever barriers lie between. (What they overwrite: see
// proxy_order.h.)
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <vector>

#include "core/memory.h"
#include "judge/proxy_order.h"

namespace emu {

class ClusterJudge;

// One CTA's shared memory.
class SharedShadow final : public SharedObserver {
 public:
  SharedShadow(ClusterJudge& judge, uint32_t bytes);

  bool read(uint32_t address, uint32_t bytes, Proxy proxy) override;
  void write(uint32_t address, uint32_t bytes, Proxy proxy) override;

 private:
  friend class ClusterJudge;
  // A byte's state: unwritten, visible to everyone, or kFirstWarp + the warp whose generic write is not fenced yet.
  enum : uint8_t { kUnwritten, kVisible, kFirstWarp };

  ClusterJudge& judge_;
  std::vector<uint8_t> state_;
  std::unique_ptr<ProxyShadow> proxies_;  // where there is a ProxyOrder
};

class ClusterJudge {
 public:
  // `overwrites`: those by bulk copies are judged too.
  ClusterJudge(uint32_t warps, bool overwrites)
      : pending_(warps), proxies_(overwrites ? std::make_unique<ProxyOrder>(warps) : nullptr) {}

  // The warp (numbered through the cluster) whose accesses follow.
  void set_running(uint32_t warp) {
    running_ = warp;
    if (proxies_) proxies_->set_running(warp);
  }
  uint32_t running() const { return running_; }
  ProxyOrder* proxies() { return proxies_.get(); }  // null where overwrites are not judged
  // fence.proxy.async by the running warp: what it wrote is visible to the async proxy.
  void fence();
  // An mbarrier was initialised by the running warp: until its fence.mbarrier_init (or a wider one) neither the async
  // proxy nor other CTAs see that.
  void initialised(uint32_t address) { unfenced_inits_[address] = running_; }
  void fence_inits() {
    std::erase_if(unfenced_inits_, [&](const auto& init) { return init.second == running_; });
  }
  void check_init(uint32_t address) const {
    if (unfenced_inits_.contains(address))
      throw fail("missing fence.mbarrier_init: mbarrier 0x%08x is used from another CTA or the async proxy, but warp %u of the "
                 "cluster did not fence since it initialised it", address, unfenced_inits_.at(address));
  }
  // mbarriers that were initialised (addresses with the CTA's rank): looked at once more when the cluster ends.
  void add_barrier(uint32_t address) { barriers_.insert(address); }
  const std::set<uint32_t>& barriers() const { return barriers_; }

 private:
  friend class SharedShadow;
  struct Range {
    SharedShadow* shadow;
    uint32_t address, bytes;
  };
  uint8_t tag() const {
    const uint32_t tag = SharedShadow::kFirstWarp + running_;
    return tag > 255 ? uint8_t{SharedShadow::kVisible} : static_cast<uint8_t>(tag);  // beyond 253 warps nothing is said
  }

  uint32_t running_ = 0;
  std::set<uint32_t> barriers_;
  std::map<uint32_t, uint32_t> unfenced_inits_;  // mbarrier -> warp
  std::vector<std::vector<Range>> pending_;  // by warp: generic writes since its last fence
  std::unique_ptr<ProxyOrder> proxies_;
};

}  // namespace emu
