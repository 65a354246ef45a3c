// A clock for one cluster (options.timing): a model of when each instruction issues and each operation completes, from
// published rates and latencies. The run then follows this clock instead of the seed. It is an estimate: registers are
// those of PTX, moves cost nothing, caches always hit L2, and clusters do not disturb each other.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "async/engine.h"
#include "decode/program.h"

namespace emu {

struct MachineRates {
  uint32_t tensor_flops;          // of a multiprocessor in a cycle, 16-bit operands
  uint32_t mufu_cycles;           // a warp's instruction keeps its quarter's unit busy for so long
  uint32_t copy_bytes = 64;       // from L2 to a multiprocessor in a cycle
  uint32_t shared_bytes = 128;    // in a cycle
  uint32_t copy_latency = 650, global_latency = 600, shared_latency = 28, tensor_latency = 40, tmem_latency = 24;
};
MachineRates rates_of(int architecture);

struct Stall {
  uint64_t cycles = 0, count = 0;
};

class Timing {
 public:
  Timing(const MachineRates& rates, const Program& program, uint32_t ctas);

  uint64_t now = 0;  // cycles; of the warp or operation at work

  struct WarpClock {
    uint64_t time = 0;              // when the next instruction may issue
    std::vector<uint64_t> ready;    // of each register unit (128 bytes)
    uint64_t loads_done = 0, stores_done = 0;  // tcgen05.ld and st
    std::map<std::pair<uint32_t, std::string>, Stall> stalls;  // (PTX line, why)
  };
  WarpClock& warp(uint32_t cta, uint32_t index);

  // Accounts for an instruction about to execute: advances the warp's clock past its issue. `now` becomes the issue time.
  void issue(uint32_t cta, uint32_t warp_index, const Inst& in, uint32_t lanes);
  // A warp that slept may go on since `now`.
  void wake(uint32_t cta, uint32_t warp_index, uint32_t line, const char* why);

  // When operations that are issued now are taken up, and when they complete.
  Span copy_done(uint32_t cta, uint64_t bytes);                    // global to shared memory
  Span store_read(uint32_t cta, uint64_t bytes);                   // shared memory read by a bulk store
  // `shared_bytes`: operands that the tensor core reads from the shared memory of each CTA.
  Span tensor_done(uint32_t cta, uint32_t ctas, uint64_t flops, uint64_t shared_bytes);
  uint64_t tensor_idle(uint32_t cta) const { return sm_[cta].tensor + rates_.tensor_latency; }
  uint64_t global_answer() const { return now + rates_.global_latency; }
  Span tmem_done(uint32_t cta, uint32_t warp_index, uint32_t columns);

  uint64_t end() const;        // the last warp's clock
  std::string json() const;

 private:
  struct Quarter {                  // of a multiprocessor: the warps of equal index modulo 4
    uint64_t issue = 0, fma = 0, alu = 0, mufu = 0, convert = 0, tmem = 0;
  };
  struct Multiprocessor {
    Quarter quarter[4];
    uint64_t shared = 0, copy = 0, tensor = 0;
    std::vector<WarpClock> warps;
  };
  uint64_t occupy(uint64_t& free, uint64_t from, uint64_t cycles, const char* unit);

  const MachineRates rates_;
  const Program& program_;
  std::vector<Multiprocessor> sm_;
  std::map<std::string, uint64_t> busy_;  // cycles by unit, summed over quarters and multiprocessors
};

}  // namespace emu
