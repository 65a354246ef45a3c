// One launch of a kernel: its clusters, spread over host threads.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/memory.h"
#include "judge/global_order.h"
#include "loader/runtime.h"
#include "machine/cluster.h"
#include "machine/counters.h"

namespace emu {

// What hardware forgives, by kind; a run is strict about some, or (kStrict) all of it.
enum Strictness : uint32_t {
  kStrict = 1,
  kStrictLoads = 2,   // registers of a tcgen05.ld used before tcgen05.wait::ld
  kStrictEnd = 4,     // a CTA that ends while others still use its shared memory
  kStrictFences = 8,  // tcgen05.fence between accesses of different warps
  kStrictOverwrites = 16,  // fence.proxy.async between accesses to shared memory and bulk copies that overwrite it
};

struct MachineOptions {
  uint64_t seed = 0;
  uint32_t threads = 1;
  uint32_t strict = 0;
  bool is_strict(Strictness kind) const { return strict & (kStrict | kind); }
  bool timing = false;     // follow a model of the hardware's clock instead of the seed
  uint32_t trace = 0;      // clusters that are traced, the first ones
  uint64_t limit = 0;      // warp instructions of a cluster; 0: any number
  uint32_t sm_count = 148;
  int architecture = 100;  // compute capability times ten
  std::vector<GlobalRegion> regions;
};

class Launch {
 public:
  Launch(const Program& program, const LaunchConfig& config, const MachineOptions& options, uint64_t launch_number);
  ~Launch();

  void run();               // throws Error
  KernelCounters counters;  // complete after run()

  const Program& program;
  const LaunchConfig& config;
  const MachineOptions& options;
  const uint64_t number;
  GlobalView global;
  std::unique_ptr<GlobalOrder> order;  // of the clusters' accesses; null where there is one, or no array is known
  std::vector<GlobalRegion> regions;
  uint8_t* parameters = nullptr;
  Dim3 cluster_shape;       // in CTAs
  Dim3 cluster_grid;        // in clusters
  uint64_t shared_bytes = 0;  // of a CTA, with the reserved first KiB

  bool clusters_meet() const { return met_; }  // there has been a turn at global memory

  // clusterlaunchcontrol: takes a cluster that has not begun. Called in turn, by one thread.
  bool cancel_cluster(Dim3* first_cta);

 private:
  uint64_t cluster_count() const { return uint64_t{cluster_grid.x} * cluster_grid.y * cluster_grid.z; }
  Dim3 cluster_index(uint64_t number) const;
  uint64_t resident_clusters() const;
  void check() const;
  bool epoch();             // false: all clusters are done
  void run_clusters(const std::vector<Cluster*>& ready);
  uint64_t take_turns();
  void retire(Cluster&);

  std::vector<std::unique_ptr<Cluster>> active_;
  uint64_t next_cluster_ = 0;
  uint64_t epochs_ = 0, idle_epochs_ = 0, progress_ = 0, last_progress_ = UINT64_MAX;
  bool met_ = false;
  Random turn_random_;
  std::unique_ptr<uint8_t[]> parameter_memory_;
};

}  // namespace emu
