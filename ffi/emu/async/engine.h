// Operations in flight. Each is split into steps that happen in order; the engine draws when each step happens.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "async/lateness.h"
#include "core/random.h"
#include "judge/proxy_order.h"

namespace emu {

class Cluster;
class Timing;

// The moment of a step: a number of executed instructions from now, or as late as possible.
inline constexpr uint64_t kAtOnce = 0;
inline constexpr uint64_t kLate = UINT64_MAX - 1;
inline constexpr uint64_t kLast = UINT64_MAX;  // after everything that is merely late

// In a timed run: when a unit takes an operation up, and when the operation's next step is made.
struct Span {
  uint64_t begin, end;
};

// What an operation is, for a trace.
struct OperationNote {
  std::string what;      // more of it: the shape of a product
  uint32_t address = 0;  // the barrier that it reports to; of a product or access, where in tensor memory
  uint64_t amount = 0;   // bytes, or floating-point operations
};

class Operation : public std::enable_shared_from_this<Operation> {
 public:
  virtual ~Operation() = default;
  // Does the next step; true when there are no more. May throw Error.
  virtual bool step(Cluster&) = 0;
  bool step_judged(Cluster&);  // likewise; the judge knows whose step it is
  // False while the step cannot be made yet (a WGMMA that not all warps have issued).
  virtual bool ready() const { return true; }
  // In a timed run (machine/timing.h), about the next step. Asked when the operation is issued and after each step.
  virtual Span due(Timing& timing) const;
  virtual OperationKind kind() const { return OperationKind::kOther; }
  virtual bool reports_to(uint32_t /*barrier*/) const { return false; }  // an mbarrier's address
  virtual OperationNote note() const { return {}; }
  int line = 0;           // PTX
  size_t traced = SIZE_MAX;  // its event in the trace
  bool finished = false;  // set by the engine after the last step
  ProxyOrder::Before before;  // set by the engine at its issue, where that is judged
};
using OperationPtr = std::shared_ptr<Operation>;

class Engine {
 public:
  static constexpr int kQueues = 256;
  Engine(uint64_t seed, uint64_t stream, Lateness lateness) : random_(seed, stream), lateness_(std::move(lateness)) {}

  // `queue`: operations of one queue (0 and up) are made in order, each wholly before the next; -1: independent.
  void issue(Cluster&, OperationPtr, int queue, uint64_t now);
  // Makes every step that is due. True when anything happened.
  bool advance(Cluster&, uint64_t now);
  // Nobody can go on: makes one step, the earliest due. Of those that wait as long as they can it is a drawn one, or, where
  // the seed holds operations back, one that a warp waits for.
  bool force(Cluster&);
  // Makes all steps of `operation`, and of those before it in its queue. False when one is not ready.
  bool finish(Cluster&, const OperationPtr& operation);
  void refresh();  // to be called when an operation may have become ready
  bool empty() const { return pending_.empty(); }
  bool only_stores() const;  // what is in flight changes global memory
  size_t size() const { return pending_.size(); }
  const Lateness& lateness() const { return lateness_; }
  uint64_t next_due() const { return next_due_; }

 private:
  struct Pending {
    OperationPtr operation;
    int queue;
    uint64_t due;
  };
  Span draw(Cluster&, const Operation&, uint64_t now);
  bool holds(const Operation&) const;
  template <class F>
  void heads(F visit) const;
  bool step(Cluster&, size_t index, uint64_t now);  // true when the operation is gone
  size_t needed(const Cluster&, const std::vector<size_t>& heads) const;

  Random random_;
  Lateness lateness_;
  std::vector<Pending> pending_;
  uint64_t next_due_ = kLate;
  const Operation* held_ = nullptr;  // kHoldOne
};

}  // namespace emu
