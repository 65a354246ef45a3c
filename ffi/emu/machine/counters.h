// What a run counts. Every figure repeats exactly for a seed.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "decode/program.h"
#include "machine/trace.h"

namespace emu {

struct WarpCounters {
  uint64_t units[static_cast<size_t>(Unit::kCount)] = {};
  uint64_t instructions = 0;
  uint64_t lanes = 0;  // sum over instructions of active lanes
};

// A way in which a tensor or tensor-copy instruction was used: its descriptors without addresses.
enum class FormKind : uint8_t { kTcgen05Mma, kWgmma, kTileLoad, kTileStore };
using Form = std::tuple<FormKind, uint64_t, uint64_t, uint64_t>;

struct TrafficCounters {
  uint64_t global_read = 0, global_written = 0, shared_read = 0, shared_written = 0;  // bytes, by threads
  uint64_t tensor_memory_read = 0, tensor_memory_written = 0;                         // bytes, by threads
  uint64_t bulk_read = 0, bulk_written = 0;      // bytes of global memory, by asynchronous copies
  uint64_t tensor_flops = 0;
  uint64_t poll_retries = 0;                     // try_wait that gave up
  std::map<std::string, uint64_t> mma_shapes;
  std::map<uint32_t, std::pair<uint64_t, uint64_t>> votes;  // PTX line -> votes of warps, how many came out true
  std::set<Form> forms;

  void add(const TrafficCounters& other);
};

struct KernelCounters {
  std::string kernel;
  uint64_t clusters = 0, ctas = 0, launches = 0;
  std::vector<WarpCounters> warps;    // by index in the CTA, summed over CTAs
  std::vector<uint64_t> executed;     // by instruction
  std::vector<uint32_t> executed_by;  // by instruction: bit i: warp i of a CTA did
  TrafficCounters traffic;
  std::vector<uint64_t> cluster_cycles;  // timed runs: by cluster
  std::string timing_json;               // and what happened in the first one
  std::vector<std::pair<uint32_t, std::vector<TraceEvent>>> traces;  // of the first launch: cluster, what happened
};

}  // namespace emu
