// What orders accesses of different clusters to global memory, whatever the seed made of them.
//
// A cluster's releases divide what it does into moments, which it counts. Whoever acquires what it released knows its
// moments up to then, and those that it knew (vector clocks; the clusters are the processes, for what orders the threads of
// one is the seeds' affair). Of each word of an array that a kernel may write, the judge keeps the moment of the last
// write, or of all additions and atomic operations since, and of the reads since. An access that conflicts with one of
// another cluster's moments that it does not know is an error.
//
// What a bulk store or reduction wrote belongs to a moment only when its thread has waited for it (wait_group without
// .read). Bulk copies know what their CTA knew at its last fence.proxy.async of global memory before it issued them.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "core/memory.h"

namespace emu {

struct Moment {
  uint32_t cluster, clock;
  int line;  // PTX, of the write
  auto operator<=>(const Moment&) const = default;
};
inline constexpr uint32_t kUnfinished = UINT32_MAX;  // the clock of a bulk store that nobody has waited for

using Clocks = std::vector<uint32_t>;        // by cluster: its last moment that is known; 0: none
using Past = std::shared_ptr<const Clocks>;  // null: nothing
Past join(const Past&, const Past&);

struct GlobalRange {
  uint64_t address, bytes;
};

// Of one launch. Clusters that run at the same time may call it.
class GlobalOrder {
 public:
  // `strict`: that two write the same words, in no order, is an error though nobody reads them.
  GlobalOrder(const std::vector<GlobalRegion>& regions, bool strict)
      : regions_(regions), strict_(strict), written_(regions.size()), read_(regions.size()) {}

  struct Access {
    Moment moment;
    const Past& past;   // what it knows
    const Past& known;  // what its cluster knows: more, where a proxy fence is missing
    bool writes;
    bool strong;        // a reduction, an atomic operation, a volatile or relaxed access: no conflict among them
  };
  void access(const Access&, const GlobalRegion&, uint64_t address, uint64_t bytes);
  // Bulk stores of that cluster have been waited for.
  void finish(uint32_t cluster, uint32_t clock, const std::vector<GlobalRange>&);
  // A strong access to a word: what was released there, and what is from now on (`adds`: an atomic operation, which
  // continues the release of the writes before it).
  Past released(uint64_t address) const;
  void release(uint64_t address, Past past, bool adds);

 private:
  struct State {
    bool strong;
    std::vector<Moment> moments;  // one of a cluster, and its unfinished one
    auto operator<=>(const State&) const = default;
  };
  static bool ordered(const Access&, const Moment&);
  using Words = std::vector<uint32_t>;  // number of the state of each four bytes of a region
  void check(const Access&, const State&, uint64_t address, bool reads) const;
  uint32_t after(const Access&, const State&);
  uint32_t after_read(const Access&, const State&);
  uint32_t number_of(State);
  struct Step {
    uint32_t before = UINT32_MAX, now = 0;  // a word's state
  };
  template <class F>
  void replace(std::vector<Words>& of, const GlobalRegion&, uint64_t address, uint64_t bytes, Step& last, F number);

  const std::vector<GlobalRegion>& regions_;
  const bool strict_;
  std::mutex mutex_;
  std::vector<Words> written_, read_;         // by region; empty until needed
  std::vector<State> states_{{true, {}}};     // the first: nobody touched it
  std::map<State, uint32_t> numbers_;
  struct {  // the last access, and what it made of the last word
    Moment moment{};
    Past past;
    bool writes, strong;
    Step written, read;
  } last_{};
  std::unordered_map<uint64_t, Past> releases_;  // by address; changed in turns only
};

// One cluster's part: its moments, what it knows, and its threads' accesses.
class ClusterOrder final : public GlobalObserver {
 public:
  ClusterOrder(GlobalOrder& order, uint32_t cluster) : order_(order), cluster_(cluster) {}

  // The instruction whose accesses follow.
  void begin(int line, bool strong) {
    line_ = line;
    strong_ = strong;
  }
  void read(const GlobalRegion& region, uint64_t address, uint64_t bytes) override {
    access(region, address, bytes, false);
  }
  void write(const GlobalRegion& region, uint64_t address, uint64_t bytes) override {
    access(region, address, bytes, true);
  }

  struct Strong {
    bool acquires, releases, reads, writes;
  };
  void synchronise(uint64_t address, const Strong&);
  void fence();        // fence.acq_rel or .sc of scope gpu or sys
  void fence_async();  // fence.proxy.async of global memory
  void finish(const std::vector<GlobalRange>& ranges) { order_.finish(cluster_, clock_, ranges); }

 private:
  friend class BulkAccess;
  void access(const GlobalRegion&, uint64_t address, uint64_t bytes, bool writes);
  Past now();  // ends a moment

  GlobalOrder& order_;
  const uint32_t cluster_;
  uint32_t clock_ = 1;
  Past seen_, seen_by_bulk_;
  std::unordered_map<uint64_t, Past> released_;  // by address
  Past fenced_;    // to be released by relaxed writes
  Past observed_;  // by relaxed reads, to be acquired by a fence
  int line_ = 0;
  bool strong_ = false;
};

// A bulk copy's accesses: made when it is issued, used when it happens.
class BulkAccess final : public GlobalObserver {
 public:
  BulkAccess(ClusterOrder& owner, int line, bool reduces)
      : owner_(owner), past_(owner.seen_by_bulk_), known_(owner.seen_), line_(line), reduces_(reduces) {}
  void read(const GlobalRegion&, uint64_t address, uint64_t bytes) override;
  void write(const GlobalRegion&, uint64_t address, uint64_t bytes) override;
  std::vector<GlobalRange> written;

 private:
  ClusterOrder& owner_;
  const Past past_, known_;
  const int line_;
  const bool reduces_;
};

}  // namespace emu
