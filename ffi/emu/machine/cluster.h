// A cluster of CTAs: simulated by one host thread at a time.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "async/engine.h"
#include "judge/global_order.h"
#include "judge/shadow.h"
#include "judge/tensor_order.h"
#include "core/memory.h"
#include "core/random.h"
#include "loader/runtime.h"
#include "machine/counters.h"
#include "machine/timing.h"
#include "machine/trace.h"
#include "machine/warp.h"
#include "tensor/tensor_memory.h"

namespace emu {

class Launch;

class WgmmaOperation;

// A warpgroup's WGMMAs in flight: each is made when its four warps have issued it.
struct Warpgroup {
  std::deque<std::shared_ptr<WgmmaOperation>> pending;
  uint64_t first = 0;  // number of the first pending one
  int queue = -1;
};

struct NamedBarrier {
  uint32_t arrived = 0, expected = 0;
  uint64_t generation = 0;
};

class Cta {
 public:
  Cta(Cluster& cluster, uint32_t rank, Dim3 index);

  Cluster& cluster;
  const uint32_t rank;   // in the cluster
  const Dim3 index;      // %ctaid
  SharedView shared;
  std::unique_ptr<TensorMemory> tensor;  // made by the first tcgen05.alloc
  NamedBarrier named[16];
  uint32_t live_threads = 0;             // that have not exited; its shared memory ends with the last
  uint32_t registers_free = 0;           // that setmaxnreg.inc may take
  Warpgroup warpgroups[8];
  uint32_t pair_allocations = 0;         // tcgen05.alloc.cta_group::2 that it has made
  int tensor_queue = -1;                 // of tcgen05.mma, cp and commit
  std::vector<std::unique_ptr<Warp>> warps;
  TensorMemory& tensor_memory();

 private:
  std::unique_ptr<uint8_t[], void (*)(uint8_t*)> memory_;
  std::unique_ptr<SharedShadow> shadow_;
};

class Cluster {
 public:
  enum class State { kReady, kTurn, kStuck, kDone };

  Cluster(Launch& launch, uint64_t number, Dim3 index);  // number: in grid order; index: in clusters

  State run();               // until nothing in it can go on
  uint32_t running_cta() const { return judge->running() / static_cast<uint32_t>(ctas[0]->warps.size()); }
  bool awaits(const Operation&) const;  // a warp sleeps for the phase of an mbarrier that the operation reports to
  void take_turns_into(std::vector<std::pair<Warp*, int>>& waiters);
  std::string describe();    // where each warp stands

  Launch& launch;
  const uint64_t number;
  const Dim3 index;
  std::unique_ptr<ClusterJudge> judge;  // before the CTAs, whose shared memories it watches
  std::unique_ptr<TensorOrder> tensor_order;  // in a strict run
  std::unique_ptr<ClusterOrder> order;        // null where the launch has none
  GlobalView global;                          // of its threads
  std::vector<std::unique_ptr<Cta>> ctas;
  Engine engine;
  uint64_t now = 0;          // instructions executed so far
  std::unique_ptr<Timing> timing;  // in a timed run
  std::unique_ptr<Trace> trace;    // when this cluster is traced
  uint64_t clock() const { return timing ? timing->now : now; }
  TrafficCounters traffic;
  std::vector<uint64_t> executed;     // by instruction
  std::vector<uint32_t> executed_by;  // by instruction: bit i: warp i of a CTA did
  // Operations that wait for their turn at global memory, since when, and whether somebody waits for what they find there.
  struct WaitingTurn {
    OperationPtr operation;
    uint64_t time;
    bool answers;
  };
  std::vector<WaitingTurn> turn_operations;
  // In a timed run the cluster stops until who waits for an answer has had its turn: nobody gets ahead of its clock.
  bool stopped = false;
  State state = State::kReady;

  int new_queue() { return queues_++; }
  void event() { last_event_ = last_change_ = now; ++events_; }  // something changed that others may wait for
  void stored() { last_change_ = now; ++events_; }  // likewise, but a loop without end may do so too
  uint64_t events() const { return events_; }
  SharedView& shared_of(uint32_t address, const char* what);  // by the rank in bits 24 and up
  static uint32_t offset_of(uint32_t address) { return address & 0xffffffu; }

  // barrier.cluster
  uint32_t barrier_arrived = 0;
  uint64_t barrier_generation = 0;
  uint32_t live_threads = 0;
  void cluster_arrive(uint32_t threads);
  void threads_exited(Cta& cta, uint32_t threads);

 private:
  State run_until_stopped();
  void complete_barrier();
  bool schedule();
  bool schedule_timed();
  bool give_up_polls();
  bool awaits_turn() const;  // a warp, at global memory
  Random random_;
  int queues_ = 0;
  uint64_t last_event_ = 0, last_change_ = 0, events_ = 0;
  uint64_t events_at_give_up_ = UINT64_MAX;
  int turns_ahead_ = 0;
  std::vector<Warp*> warps_;
};

// Puts kernel, CTA, warp and PTX line behind the message.
[[noreturn]] void rethrow_in(const Warp& warp, const Error& error, int line);
// Likewise kernel, cluster and PTX line, where the error is of an asynchronous operation and no warp's.
[[noreturn]] void rethrow_in(const Cluster& cluster, const Error& error);

}  // namespace emu
