// What a seed decides about asynchronous operations that happen late.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <unordered_map>

#include "core/random.h"

namespace emu {

// By the unit that makes it; the names are those of traces.
enum class OperationKind : uint8_t { kLoad, kStore, kReduce, kMma, kCommit, kTensorLoad, kTensorStore, kTensorCopy, kOther };
inline constexpr const char* kOperationNames[] = {"load",        "store",        "reduce",      "mma",  "commit",
                                                  "tensor_load", "tensor_store", "tensor_copy", "other"};

// A set of kinds: those that a program's instructions start.
class OperationKinds {
 public:
  void add(OperationKind kind) { bits_ |= 1u << static_cast<int>(kind); }
  int size() const { return std::popcount(bits_); }
  OperationKind at(int i) const {  // the i-th of them
    uint32_t rest = bits_;
    while (i-- > 0) rest &= rest - 1;
    return static_cast<OperationKind>(std::countr_zero(rest));
  }

 private:
  uint32_t bits_ = 0;
};

// Seeds 0, 4, 8, ... mix: operations of every kind may be late, and warps that the seed starves are later still. But a race
// with one operation that outlasts all others of its neighbourhood hardly shows so: somebody's wait, or a starved warp, lets
// it happen. The others hold operations back, which happen when no warp of the cluster can go on, starved or not; the rest
// happens soon.
//
// Odd seeds hold one kind back, and what a warp sleeps for goes first (Engine::needed). Consecutive ones take the kinds of
// the program in turn, so that a few seeds hold back each of them; every second round holds back only a drawn half of the
// instructions that start operations of that kind.
//
// Seeds 2, 6, 10, ... hold one operation back at a time, of whatever kind, whoever sleeps for it; then another. Where it was
// issued, a PTX line in a CTA of the cluster, is its origin. Each seed takes a quarter of the origins, and those first that it
// held back least, so that four such seeds hold back operations of nearly all.
class Lateness {
 public:
  enum class Policy : uint8_t { kMix, kHoldKind, kHoldOne };

  Lateness(uint64_t seed, OperationKinds kinds) : seed_(seed) {
    if (kinds.size() == 0 || seed % 4 == 0) return;
    policy_ = seed % 2 ? Policy::kHoldKind : Policy::kHoldOne;
    const uint64_t turn = seed / 2, count = static_cast<uint64_t>(kinds.size());
    kind_ = kinds.at(static_cast<int>(turn % count));
    halved_ = turn / count % 2 == 1;
  }
  Policy policy() const { return policy_; }
  bool holds() const { return policy_ != Policy::kMix; }
  // kHoldKind:
  bool holds(OperationKind kind, int line) const { return kind == kind_ && (!halved_ || draw(line, 2)); }
  // kHoldOne: whether to hold back an operation, where no other is. To be asked of each that is issued.
  bool takes(int line, uint32_t cta, Random& random) {
    const uint64_t origin = static_cast<uint64_t>(line) << 4 | cta;
    if (Random(0, origin).below(kQuarters) != seed_ / 4 % kQuarters) return false;
    uint32_t& held = held_[origin];
    if (random.below(1u << std::min(3 * held, kRarest)) != 0) return false;
    ++held;
    return true;
  }
  // A mixing seed makes some instructions laggards: what they start happens only when nothing else in the cluster can. A
  // missing wait far from its operation would hardly show otherwise, for others give the operation time.
  bool lags(int line) const { return draw(line, 4); }

 private:
  static constexpr uint32_t kQuarters = 4, kRarest = 9;  // one in 2^9

  bool draw(int line, uint32_t one_in) const { return Random(seed_, static_cast<uint64_t>(line)).below(one_in) == 0; }

  uint64_t seed_;
  Policy policy_ = Policy::kMix;
  bool halved_ = false;
  OperationKind kind_ = OperationKind::kOther;
  std::unordered_map<uint64_t, uint32_t> held_;  // by origin: how many
};

}  // namespace emu
