// What a seed decides about asynchronous operations that happen late.
#pragma once

#include <bit>
#include <cstdint>

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

// Even seeds mix: operations of every kind may be late, and warps that the seed starves are later still. But a race with
// one operation that outlasts all others of its neighbourhood hardly shows so: somebody's wait, or a starved warp, lets it
// happen. Each odd seed holds one kind back: it happens when no warp of the cluster can go on, starved or not, and then
// first what a warp sleeps for (Engine::needed); all other operations happen soon. Consecutive odd seeds take the kinds of
// the program in turn, so that a few seeds hold back each of them; every second round holds back only a drawn half of the
// instructions that start operations of that kind.
class Lateness {
 public:
  Lateness(uint64_t seed, OperationKinds kinds) : seed_(seed) {
    if (seed % 2 == 0 || kinds.size() == 0) return;
    const uint64_t turn = seed / 2, count = static_cast<uint64_t>(kinds.size());
    holds_ = true;
    kind_ = kinds.at(static_cast<int>(turn % count));
    halved_ = turn / count % 2 == 1;
  }
  bool holds() const { return holds_; }
  bool holds(OperationKind kind, int line) const {
    return holds_ && kind == kind_ && (!halved_ || draw(line, 2));
  }
  // A mixing seed makes some instructions laggards: what they start happens only when nothing else in the cluster can. A
  // missing wait far from its operation would hardly show otherwise, for others give the operation time.
  bool lags(int line) const { return !holds_ && draw(line, 4); }

 private:
  bool draw(int line, uint32_t one_in) const { return Random(seed_, static_cast<uint64_t>(line)).below(one_in) == 0; }

  uint64_t seed_;
  bool holds_ = false, halved_ = false;
  OperationKind kind_ = OperationKind::kOther;
};

}  // namespace emu
