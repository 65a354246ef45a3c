// A warp: 32 lanes with their registers. Lanes that diverged are fragments with program counters of their own.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "async/engine.h"
#include "core/memory.h"
#include "decode/program.h"
#include "judge/global_order.h"
#include "judge/registers.h"
#include "judge/taint.h"
#include "machine/counters.h"

namespace emu {

class Cta;
class Cluster;

// Why a fragment sleeps. `done` is asked again and again; null: it does not sleep.
struct Wait {
  bool (*done)(Warp&, const Wait&) = nullptr;
  const char* what = "";   // for reports: "mbarrier", with a and b as its address and parity
  uint64_t a = 0, b = 0;
  bool polls = false;      // a try_wait: may be told to give up
  bool global_turn = false;  // waits for its turn to touch global memory
  OperationPtr operation;
};

struct Fragment {
  Mask mask = 0;
  uint32_t pc = 0;
  int32_t node = -1;         // reconvergence point that it runs towards
  bool retry = false;        // the instruction at pc begins again when the wait is over (else pc has moved on)
  bool gave_up = false;      // its try_wait shall return false
  bool granted = false;      // its turn at global memory is now
  Wait wait;
};

// Lanes that diverged at a branch meet again here.
struct JoinNode {
  uint32_t pc;
  int32_t parent;
  Mask expected, arrived;
  bool used;
};

// Asynchronous bulk operations of one thread, by group (cp.async.bulk.commit_group).
struct BulkGroup {
  uint32_t reads = 0, writes = 0;  // operations that have not read their source, not written their destination
  std::vector<GlobalRange> written;  // what they wrote, where the judge asks
};
struct BulkGroups {
  std::deque<std::shared_ptr<BulkGroup>> committed;
  std::shared_ptr<BulkGroup> open;
  uint64_t popped = 0;  // groups that are done and no longer in `committed`
  std::vector<std::pair<uint64_t, std::vector<GlobalRange>>> unawaited;  // their number, what they wrote: none waited for that
};

// Asynchronous operations of a warp, by group.
struct OperationGroups {
  std::deque<std::vector<OperationPtr>> committed;
  std::vector<OperationPtr> open;

  void commit() {
    committed.push_back(std::move(open));
    open.clear();
  }
  // True when all but the last `keep` groups are done; forgets those.
  bool done_but(size_t keep) {
    while (committed.size() > keep) {
      for (const OperationPtr& operation : committed.front())
        if (!operation->finished) return false;
      committed.pop_front();
    }
    return true;
  }
};

class Warp {
 public:
  Warp(Cta& cta, uint32_t index, uint32_t threads);

  // Runs one fragment that can go on, for at most `budget` instructions. Returns how many it executed.
  uint64_t run(uint64_t budget);
  bool runnable();                 // has a fragment that can go on
  bool exited() const { return live_ == 0; }
  bool run_one(int fragment);      // exactly one instruction of that fragment (its turn at global memory)

  // -- for instructions ---------------------------------------------------------------------------------------------
  template <class T>
  T* at(Slot slot) {
    return reinterpret_cast<T*>(base_[slot >> 31] + (slot & ~kConstantSlot));
  }
  uint32_t* words(Slot slot) { return at<uint32_t>(slot); }
  float* floats(Slot slot) { return at<float>(slot); }
  uint64_t* pairs(Slot slot) { return at<uint64_t>(slot); }
  Mask& predicate(Slot slot) { return *at<Mask>(slot); }

  Fragment& current() { return fragments_[current_]; }
  Mask live() const { return live_; }
  // Sleep; the instruction is made again afterwards.
  Status block(Wait wait) {
    current().wait = std::move(wait);
    return Status::kBlocked;
  }
  // Sleep after an instruction that has been made.
  Status suspend(Wait wait) {
    current().wait = std::move(wait);
    return Status::kSuspend;
  }
  // True when the current instruction may touch global memory that others touch too; else it has been put to sleep.
  bool turn();
  Status branch(const Inst&, Mask taken);
  Status exit_lanes(Mask lanes);
  // The lanes' local memory: host memory that belongs to no array.
  bool in_local(uint64_t address, uint32_t bytes) const {
    const uint64_t base = reinterpret_cast<uint64_t>(local_.get()), size = uint64_t{program_.local_bytes} * kLanes;
    return address >= base && address - base < size && bytes <= size - (address - base);
  }

  // Registers that an operation in flight will read or write: whoever touches them waits for it. But a move from one of them
  // follows the operation, as it does where the assembler gives both its ends one register.
  void hold(const std::vector<Slot>& slots, const OperationPtr& operation);
  void release(const OperationPtr& operation);

  Cta& cta;
  const uint32_t index;            // in its CTA
  uint32_t number() const;         // in its cluster
  WarpCounters counters;
  BulkGroups bulk[kLanes];
  OperationGroups wgmma_groups;
  uint64_t wgmma_issued = 0;
  std::unique_ptr<WgmmaRegisters> wgmma_registers;      // null where the program has no wgmma
  std::unique_ptr<TensorLoadRegisters> load_registers;  // in a strict run
  OperationGroups copy_groups;     // cp.async
  std::vector<OperationPtr> tensor_loads, tensor_stores;  // tcgen05.ld and st in flight
  Taint taint;                     // registers that came from memory never written
  Mask carry = 0;                  // the lanes' carry flags
  Mask warp_sync_arrived = 0;      // bar.warp.sync
  uint64_t warp_sync_generation = 0;
  uint32_t register_budget = 0;    // setmaxnreg
  bool register_budget_set = false;  // by a setmaxnreg; before, it is the most that ptxas may have chosen
  uint32_t cluster_barrier_phase = 0;  // generation that this warp's last barrier.cluster.arrive belongs to
  bool cluster_arrived = false;
  uint64_t starved_until = 0;
  bool laggard = false;

  int fragment_count() const { return count_; }
  Fragment& fragment(int i) { return fragments_[i]; }
  const Program& program() const { return program_; }
  int line_of(const Fragment& f) const;

 private:
  struct Held {
    OperationPtr operation;
    std::vector<uint16_t> units;
    std::vector<std::pair<const Inst*, Mask>> moves;  // to be made when it is done
  };
  int pick();                       // a fragment that can go on, -1: none
  bool awake(Fragment&);
  bool arrive_at_join(int fragment);  // false: the fragment is gone (its lanes wait)
  bool converge(int fragment, uint32_t pc);  // aligned instruction: false when it must wait for other lanes
  bool interlock(const Inst&);      // false: sleeps until an operation that holds a register is done
  bool follow(const Inst&, Mask);   // true: a move, and put off until the operation that holds its source is done
  void remove(int fragment);
  int32_t new_node(uint32_t pc, int32_t parent, Mask expected);
  void check_node(int32_t node);
  uint64_t loop(uint64_t budget);
  void fill_specials(uint32_t threads);

  const Program& program_;
  uint8_t* base_[2];
  std::unique_ptr<uint8_t[], void (*)(uint8_t*)> registers_;
  std::unique_ptr<uint8_t[], void (*)(uint8_t*)> local_;
  Fragment fragments_[kLanes];
  int count_ = 0;
  int current_ = 0;
  int first_ = 0;
  Mask live_ = 0;
  std::vector<JoinNode> nodes_;
  std::vector<Held> held_;
};

}  // namespace emu
