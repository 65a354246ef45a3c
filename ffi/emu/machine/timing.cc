#include "machine/timing.h"

#include <algorithm>

namespace emu {
namespace {

// The assembler orders instructions so that short latencies are hidden; only those that it cannot hide are modelled.
constexpr uint32_t kShuffleLatency = 24, kBarrierLatency = 20, kWakeLatency = 12, kWindow = 300;

}  // namespace

MachineRates rates_of(int architecture) {
  MachineRates r;
  r.tensor_flops = architecture >= 100 ? 8192 : 4096;
  r.mufu_cycles = architecture == 103 ? 4 : 8;
  return r;
}

Timing::Timing(const MachineRates& rates, const Program& program, uint32_t ctas) : rates_(rates), program_(program), sm_(ctas) {}

Timing::WarpClock& Timing::warp(uint32_t cta, uint32_t index) {
  std::vector<WarpClock>& warps = sm_[cta].warps;
  if (warps.size() <= index) warps.resize(index + 1);
  if (warps[index].ready.empty()) warps[index].ready.assign(program_.register_bytes / 128 + 1, 0);
  return warps[index];
}

uint64_t Timing::occupy(uint64_t& free, uint64_t from, uint64_t cycles, const char* unit) {
  const uint64_t begin = std::max(free, from);
  free = begin + cycles;
  busy_[unit] += cycles;
  return begin;
}

void Timing::issue(uint32_t cta, uint32_t warp_index, const Inst& in, uint32_t lanes) {
  WarpClock& w = warp(cta, warp_index);
  Multiprocessor& sm = sm_[cta];
  Quarter& q = sm.quarter[warp_index % 4];
  const uint16_t* units = program_.touched.data() + in.touched;
  if (in.unit == Unit::kMove) {  // the assembler removes most of them: the value is ready when its source is
    uint64_t ready = 0;
    for (uint32_t i = 0; i < in.touched_reads; ++i) ready = std::max(ready, w.ready[units[i]]);
    for (uint32_t i = in.touched_reads; i < in.touched_count; ++i) w.ready[units[i]] = ready;
    now = std::max(now, w.time);
    return;
  }
  uint64_t operands = w.time;
  for (uint32_t i = 0; i < in.touched_reads; ++i) operands = std::max(operands, w.ready[units[i]]);
  uint64_t latency = 1, cycles = 0;
  uint64_t* free = nullptr;
  const char* unit = "issue";
  switch (in.unit) {
    case Unit::kAlu:
    case Unit::kPredicate: free = &q.alu, cycles = 2, unit = "alu"; break;
    case Unit::kFma: free = &q.fma, cycles = 1, unit = "fma"; break;
    case Unit::kFmaPacked: free = &q.fma, cycles = 2, unit = "fma"; break;
    case Unit::kConvert: free = &q.convert, cycles = 2, unit = "convert"; break;
    case Unit::kMufu: free = &q.mufu, cycles = rates_.mufu_cycles, unit = "mufu"; break;
    case Unit::kShuffle: free = &sm.shared, cycles = 1, unit = "shared_memory", latency = kShuffleLatency; break;
    case Unit::kSharedLoad:
    case Unit::kSharedStore: {
      const uint64_t words = in.touched_count > 1 ? in.touched_count - 1u : 1u;
      free = &sm.shared, unit = "shared_memory", latency = rates_.shared_latency;
      cycles = std::max<uint64_t>(1, words * 4 * lanes / rates_.shared_bytes);
      break;
    }
    case Unit::kGlobalLoad:
    case Unit::kAtomic: latency = rates_.global_latency; break;
    case Unit::kBarrier: latency = kBarrierLatency; break;
    default: break;
  }
  // The assembler interleaves independent arithmetic, so a unit that is busy, or an operand that is late, holds up only
  // what depends on it, within a window. Everything else waits for its operands.
  const uint64_t issued = occupy(q.issue, free ? w.time : operands, 1, "issue");
  const uint64_t begin = free ? occupy(*free, std::max(issued, operands), cycles, unit) : issued;
  uint64_t next = issued + 1;
  if (begin > next + kWindow) next = begin - kWindow;
  if (next > w.time + 1) {
    Stall& s = w.stalls[{in.line, operands > w.time && (!free || operands > begin - std::min(begin, cycles)) ? "register" : unit}];
    s.cycles += next - w.time - 1;
    ++s.count;
  }
  w.time = next;
  for (uint32_t i = in.touched_reads; i < in.touched_count; ++i) w.ready[units[i]] = begin + latency;
  now = std::max(now, issued);
}

void Timing::wake(uint32_t cta, uint32_t warp_index, uint32_t line, const char* why) {
  WarpClock& w = warp(cta, warp_index);
  const uint64_t at = now + kWakeLatency;
  if (at <= w.time) return;
  Stall& s = w.stalls[{line, why}];
  s.cycles += at - w.time;
  ++s.count;
  w.time = at;
}

Span Timing::copy_done(uint32_t cta, uint64_t bytes) {
  const uint64_t cycles = bytes / rates_.copy_bytes, begin = occupy(sm_[cta].copy, now, cycles, "copy");
  return {begin, begin + cycles + rates_.copy_latency};
}

Span Timing::store_read(uint32_t cta, uint64_t bytes) {
  const uint64_t cycles = bytes / rates_.shared_bytes, begin = occupy(sm_[cta].shared, now, cycles, "shared_memory");
  return {begin, begin + cycles + rates_.copy_latency / 4};
}

Span Timing::tensor_done(uint32_t cta, uint32_t ctas, uint64_t flops, uint64_t shared_bytes) {
  const uint64_t cycles = std::max(flops / ctas / rates_.tensor_flops, shared_bytes / rates_.shared_bytes);
  uint64_t begin = now;
  for (uint32_t i = 0; i < ctas; ++i) begin = std::max(begin, sm_[cta + i].tensor);
  for (uint32_t i = 0; i < ctas; ++i) occupy(sm_[cta + i].tensor, begin, cycles, "tensor");
  return {begin, begin + cycles + rates_.tensor_latency};
}

Span Timing::tmem_done(uint32_t cta, uint32_t warp_index, uint32_t columns) {
  const uint64_t begin = occupy(sm_[cta].quarter[warp_index % 4].tmem, now, columns, "tensor_memory");
  return {begin, begin + columns + rates_.tmem_latency};
}

uint64_t Timing::end() const {
  uint64_t last = 0;
  for (const Multiprocessor& sm : sm_)
    for (const WarpClock& w : sm.warps) last = std::max(last, w.time);
  return last;
}

std::string Timing::json() const {
  std::string text = "{\"cycles\":" + std::to_string(end()) + ",\"multiprocessors\":" + std::to_string(sm_.size()) + ",\"busy\":{";
  for (const auto& [unit, cycles] : busy_)
    text += (text.back() == '{' ? "\"" : ",\"") + unit + "\":" + std::to_string(cycles);
  text += "},\"warps\":[";
  for (size_t s = 0; s < sm_.size(); ++s)
    for (size_t i = 0; i < sm_[s].warps.size(); ++i) {
      const WarpClock& w = sm_[s].warps[i];
      text += (text.back() == '[' ? "{\"cta\":" : ",{\"cta\":") + std::to_string(s) + ",\"warp\":" + std::to_string(i) +
              ",\"end\":" + std::to_string(w.time) + ",\"stalls\":[";
      for (const auto& [key, stall] : w.stalls)
        text += (text.back() == '[' ? "[" : ",[") + std::to_string(key.first) + ",\"" + key.second + "\"," +
                std::to_string(stall.cycles) + "," + std::to_string(stall.count) + "]";
      text += "]}";
    }
  return text + "]}";
}

}  // namespace emu
