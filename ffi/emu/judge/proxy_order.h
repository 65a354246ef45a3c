// In a strict run: the order between threads' accesses to shared memory and bulk copies that overwrite it. The two go
// through different proxies, so barriers between them are not enough: a thread that read or wrote needs fence.proxy.async
// behind that and before it gives the memory away. The PTX ISA ("Causality order") wants such a fence anywhere on the path;
// compute-sanitizer's racecheck wants it of the thread itself (tried on an H200: tests/emu/rereading.py), and so does this.
//
// Followed is which fences come before what, by barriers and by what asynchronous operations tell them: what is missing
// is reported whatever the seed made of it. A warp's threads count as one.
#pragma once

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

namespace emu {

// By warp of the cluster: how many of its proxy fences come before something.
using Fences = std::vector<uint32_t>;

class ProxyOrder {
 public:
  explicit ProxyOrder(uint32_t warps) : before_(warps, std::make_shared<Fences>(warps)) {}

  // Whose accesses and arrivals follow: a warp's or, from `begin` to `end`, an operation's. What came before its issue comes
  // before all that it does.
  using Before = std::shared_ptr<const Fences>;
  void set_running(uint32_t warp) { running_ = warp; }
  Before begin(Before operation) { return std::exchange(acting_, std::move(operation)); }  // returns the others', for `end`
  void end(Before others) { acting_ = std::move(others); }
  const Before& before() const { return acting_ ? acting_ : before_[running_]; }
  uint32_t running() const { return running_; }
  uint32_t warps() const { return static_cast<uint32_t>(before_.size()); }

  void fence();  // fence.proxy.async by the running warp
  uint32_t fences() const { return (*before_[running_])[running_]; }

  // Barriers, by an mbarrier's address or one of the numbers below. What arrives comes before the end of the phase, and
  // that before whoever has waited for it. A warp may say when it arrives that it `waits`.
  static uint64_t named(uint32_t cta, uint32_t barrier) { return uint64_t{1} << 32 | cta << 4 | barrier; }
  static constexpr uint64_t kOfCluster = uint64_t{2} << 32;
  void arrive(uint64_t barrier, bool waits = false);
  void complete(uint64_t barrier);
  void wait(uint64_t barrier) { join(running_, barriers_[barrier].before_end); }

 private:
  struct Barrier {
    Fences arrived, before_end;     // before what arrived so far, and before the end of the last phase
    std::vector<uint32_t> waiting;  // warps
  };
  void join(uint32_t warp, const Fences& more);

  uint32_t running_ = 0;
  Before acting_;
  std::vector<Before> before_;  // by warp
  std::unordered_map<uint64_t, Barrier> barriers_;
};

// One CTA's shared memory: which warps accessed it since a bulk copy wrote it.
class ProxyShadow {
 public:
  ProxyShadow(ProxyOrder& order, uint32_t bytes)
      : order_(order), warps_(order.warps()), rows_((bytes + kPiece - 1) / kPiece), next_(warps_) {}

  void access(uint32_t address, uint32_t bytes);     // by the running warp
  void overwrite(uint32_t address, uint32_t bytes);  // by a bulk copy

 private:
  static constexpr uint32_t kPiece = 16;  // bytes; a bulk copy writes whole pieces

  struct Access {
    uint32_t address, bytes, warp, next;  // number of the warp's first fence after it
    bool operator==(const Access&) const = default;
  };

  ProxyOrder& order_;
  const uint32_t warps_;
  std::vector<uint32_t> rows_;  // by piece: where its row of `next_` begins, once it is accessed; until then 0
  Fences next_;                 // in a row, by warp: as that of its last access; 0: it made none
  Access last_ = {};            // lanes often access the same
};

}  // namespace emu
