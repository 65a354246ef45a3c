#include "machine/warp.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <new>

#include "machine/cluster.h"
#include "machine/launch.h"

namespace emu {
namespace {

constexpr std::align_val_t kCacheLine{64};

void free_aligned(uint8_t* memory) { ::operator delete[](memory, kCacheLine); }

bool meets(const std::vector<uint16_t>& held, const uint16_t* begin, const uint16_t* end) {
  return std::any_of(begin, end, [&](uint16_t unit) { return std::find(held.begin(), held.end(), unit) != held.end(); });
}

}  // namespace

Warp::Warp(Cta& owner, uint32_t warp_index, uint32_t threads)
    : cta(owner), index(warp_index), program_(owner.cluster.launch.program), registers_(nullptr, free_aligned),
      local_(nullptr, free_aligned) {
  registers_.reset(new (kCacheLine) uint8_t[program_.register_bytes]);
  std::memset(registers_.get(), 0xff, program_.register_bytes);
  if (program_.local_bytes) {
    local_.reset(new (kCacheLine) uint8_t[size_t{program_.local_bytes} * kLanes]);
    std::memset(local_.get(), 0xff, size_t{program_.local_bytes} * kLanes);
  }
  base_[0] = registers_.get();
  base_[1] = const_cast<uint8_t*>(program_.constant_base);
  const uint32_t first = warp_index * kLanes, lanes = std::min<uint32_t>(kLanes, threads - first);
  live_ = lanes == kLanes ? kAllLanes : (1u << lanes) - 1;
  fragments_[0].mask = live_;
  count_ = 1;
  fill_specials(threads);
  if (program_.has_wgmma) wgmma_registers = std::make_unique<WgmmaRegisters>(program_);
  if (program_.has_tensor_loads && owner.cluster.launch.options.is_strict(kStrictLoads))
    load_registers = std::make_unique<TensorLoadRegisters>(program_);
}

void Warp::fill_specials(uint32_t threads) {
  const Cluster& cluster = cta.cluster;
  const Launch& launch = cluster.launch;
  const Dim3 block = launch.config.block, grid = launch.config.grid, shape = launch.cluster_shape;
  const auto value = [&](Special special, int64_t addend, uint32_t lane) -> uint64_t {
    const uint32_t t = index * kLanes + lane;
    switch (special) {
      case Special::kTidX: return t % block.x;
      case Special::kTidY: return t / block.x % block.y;
      case Special::kTidZ: return t / (block.x * block.y);
      case Special::kNtidX: return block.x;
      case Special::kNtidY: return block.y;
      case Special::kNtidZ: return block.z;
      case Special::kCtaidX: return cta.index.x;
      case Special::kCtaidY: return cta.index.y;
      case Special::kCtaidZ: return cta.index.z;
      case Special::kNctaidX: return grid.x;
      case Special::kNctaidY: return grid.y;
      case Special::kNctaidZ: return grid.z;
      case Special::kLaneid: return lane;
      case Special::kWarpid: return index;
      case Special::kNwarpid: return (threads + kLanes - 1) / kLanes;
      case Special::kSmid: return cluster.number % launch.options.sm_count;
      case Special::kNsmid: return launch.options.sm_count;
      case Special::kClusteridX: return cluster.index.x;
      case Special::kClusteridY: return cluster.index.y;
      case Special::kClusteridZ: return cluster.index.z;
      case Special::kNclusteridX: return launch.cluster_grid.x;
      case Special::kNclusteridY: return launch.cluster_grid.y;
      case Special::kNclusteridZ: return launch.cluster_grid.z;
      case Special::kClusterCtaidX: return cta.index.x % shape.x;
      case Special::kClusterCtaidY: return cta.index.y % shape.y;
      case Special::kClusterCtaidZ: return cta.index.z % shape.z;
      case Special::kClusterNctaidX: return shape.x;
      case Special::kClusterNctaidY: return shape.y;
      case Special::kClusterNctaidZ: return shape.z;
      case Special::kClusterCtarank: return cta.rank;
      case Special::kClusterNctarank: return uint64_t{shape.x} * shape.y * shape.z;
      case Special::kIsExplicitCluster: return shape.x * shape.y * shape.z > 1;
      case Special::kLanemaskEq: return 1u << lane;
      case Special::kLanemaskLt: return (1u << lane) - 1;
      case Special::kLanemaskLe: return (2u << lane) - 1;
      case Special::kLanemaskGt: return ~((2u << lane) - 1);
      case Special::kLanemaskGe: return ~((1u << lane) - 1);
      case Special::kDynamicSmemSize: return launch.config.dynamic_shared_bytes;
      case Special::kTotalSmemSize: return launch.shared_bytes;
      case Special::kSharedBase: return (uint64_t{cta.rank} << 24) + static_cast<uint64_t>(addend);
      case Special::kParameterBase:
        return reinterpret_cast<uint64_t>(launch.parameters) + static_cast<uint64_t>(addend);
      case Special::kLocalBase:
        return reinterpret_cast<uint64_t>(local_.get()) + uint64_t{lane} * program_.local_bytes + static_cast<uint64_t>(addend);
      case Special::kCount: break;
    }
    return 0;
  };
  for (const SpecialUse& use : program_.specials)
    for (uint32_t lane = 0; lane < kLanes; ++lane) {
      const uint64_t v = value(use.special, use.addend, lane);
      if (use.wide) pairs(use.slot)[lane] = v;
      else words(use.slot)[lane] = static_cast<uint32_t>(v);
    }
}

bool Warp::turn() {
  if (current().granted) {
    current().granted = false;
    return true;
  }
  Wait wait;
  wait.done = [](Warp&, const Wait&) { return false; };
  wait.what = "turn at global memory";
  wait.global_turn = true;
  current().wait = std::move(wait);
  cta.cluster.stopped = cta.cluster.timing != nullptr;
  return false;
}

uint32_t Warp::number() const { return cta.rank * static_cast<uint32_t>(cta.warps.size()) + index; }

int Warp::line_of(const Fragment& f) const {
  const uint32_t last = static_cast<uint32_t>(program_.code.size() - 1);
  const uint32_t pc = f.retry || f.pc == 0 || !f.wait.done ? f.pc : f.pc - 1;
  return static_cast<int>(program_.code[std::min(pc, last)].line);
}

bool Warp::awake(Fragment& f) {
  if (!f.wait.done) return true;
  if (!f.granted && !f.gave_up && !f.wait.done(*this, f.wait)) return false;
  const uint32_t line = static_cast<uint32_t>(line_of(f));
  Timing* const timing = cta.cluster.timing.get();
  if (timing) timing->wake(cta.rank, index, line, f.wait.what);
  if (Trace* trace = cta.cluster.trace.get()) {
    trace->set_running(number());
    trace->waited(line, f.wait.what, f.wait.a, f.wait.b, timing ? timing->warp(cta.rank, index).time : 0);
  }
  f.wait = Wait();
  f.retry = false;
  return true;
}

int Warp::pick() {
  for (int i = 0; i < count_; ++i) {
    const int candidate = (i + first_) % count_;
    if (awake(fragments_[candidate])) return candidate;
  }
  return -1;
}

bool Warp::runnable() {
  return pick() >= 0;
}

uint64_t Warp::run(uint64_t budget) {
  current_ = pick();
  return current_ < 0 ? 0 : loop(budget);
}

bool Warp::run_one(int fragment) {
  current_ = fragment;
  fragments_[fragment].granted = true;
  fragments_[fragment].wait = Wait();
  fragments_[fragment].retry = false;
  return loop(1) == 1;
}

uint64_t Warp::loop(uint64_t budget) {
  const Inst* const code = program_.code.data();
  Cluster& cluster = cta.cluster;
  uint64_t* const executed = cluster.executed.data();
  uint32_t* const executed_by = cluster.executed_by.data();
  Timing::WarpClock* const clock = cluster.timing ? &cluster.timing->warp(cta.rank, index) : nullptr;
  Trace* const trace = cluster.trace.get();
  cluster.judge->set_running(number());
  if (trace) trace->set_running(number());
  uint64_t done = 0;
  // Operations fall due at moments of the cluster, counted in instructions unless the run is timed.
  while (done < budget && (done == 0 || clock || cluster.now < cluster.engine.next_due())) {
    Fragment& f = fragments_[current_];
    const Inst& in = code[f.pc];
    try {
      if (in.joins && f.node >= 0 && nodes_[f.node].pc == f.pc && !arrive_at_join(current_)) break;
      Mask m = f.mask;
      if (in.guard != kNoSlot) m &= predicate(in.guard) ^ in.guard_flip;
      if (in.aligned && m && f.mask != live_ && !converge(current_, f.pc)) break;
      if (in.aligned && in.guard != kNoSlot) {
        Fragment& merged = fragments_[current_];
        m = merged.mask & (predicate(in.guard) ^ in.guard_flip);
        if (m && m != merged.mask)
          throw fail("the whole warp must execute this, its predicate holds for lanes 0x%08x of 0x%08x", m, merged.mask);
      } else if (in.aligned) {
        m = fragments_[current_].mask;
      }
      if (wgmma_registers && m && !in.chains) wgmma_registers->access(in);
      if (load_registers && m) load_registers->access(in);
      const bool follows = !held_.empty() && in.moves && m && follow(in, m);
      if (!held_.empty() && !follows && !interlock(in)) break;
      ++done;
      ++cluster.now;
      Fragment& now = fragments_[current_];
      if (taint.any()) taint.follow(*this, in, now.mask, m);
      if (m == 0 && !in.always) {
        ++executed[now.pc];
        executed_by[now.pc] |= 1u << index;
        ++counters.instructions;
        ++now.pc;
        if (trace) trace->executed(in.line, clock ? clock->time : 0);
        continue;
      }
      const uint32_t pc = now.pc;
      if (clock) cluster.timing->issue(cta.rank, index, in, static_cast<uint32_t>(std::popcount(m)));
      const Status status = follows ? Status::kNext : in.execute(*this, in, m);
      if (status == Status::kBlocked) {
        current().retry = true;
        --done;
        --cluster.now;
        break;
      }
      if (trace) trace->executed(in.line, clock ? clock->time : 0);
      ++executed[pc];
      executed_by[pc] |= 1u << index;
      ++counters.instructions;
      ++counters.units[static_cast<size_t>(in.unit)];
      counters.lanes += static_cast<uint64_t>(std::popcount(m));
      if (status == Status::kNext) {
        ++fragments_[current_].pc;
      } else if (status == Status::kSuspend) {
        ++fragments_[current_].pc;
        break;
      } else if (status == Status::kExit) {
        break;
      } else if (current_ < 0) {
        break;
      }
    } catch (const Error& error) {
      rethrow_in(*this, error, static_cast<int>(in.line));
    }
  }
  // A fragment that used up its budget may be spinning: another one begins the next burst.
  first_ = done == budget && count_ > 1 ? (current_ + 1) % count_ : 0;
  return done;
}

// ---- registers held by operations in flight -----------------------------------------------------------------------------

void Warp::hold(const std::vector<Slot>& slots, const OperationPtr& operation) {
  Held held{operation, {}, {}};
  for (Slot slot : slots)
    if (slot != kNoSlot) held.units.push_back(static_cast<uint16_t>(slot / 128));
  held_.push_back(std::move(held));
}

void Warp::release(const OperationPtr& operation) {
  std::vector<std::pair<const Inst*, Mask>> moves;
  for (Held& held : held_)
    if (held.operation == operation) moves.insert(moves.end(), held.moves.begin(), held.moves.end());
  std::erase_if(held_, [&](const Held& h) { return h.operation == operation; });
  for (const auto& [in, lanes] : moves) {
    if (taint.any()) taint.follow(*this, *in, lanes, lanes);
    in->execute(*this, *in, lanes);
  }
}

bool Warp::follow(const Inst& in, Mask lanes) {
  const uint16_t* const begin = program_.touched.data() + in.touched;
  const uint16_t *const writes = begin + in.touched_reads, *const end = begin + in.touched_count;
  Held* source = nullptr;
  for (Held& held : held_) {
    if (!meets(held.units, begin, end)) continue;
    if (source) return false;  // two operations: wait for them
    source = &held;
  }
  if (!source || !meets(source->units, begin, writes)) return false;
  source->moves.push_back({&in, lanes});
  source->units.insert(source->units.end(), begin, end);
  return true;
}

bool Warp::interlock(const Inst& in) {
  if (in.chains) return true;
  const uint16_t* begin = program_.touched.data() + in.touched;
  const uint16_t* end = begin + in.touched_count;
  for (size_t i = 0; i < held_.size();) {
    if (!meets(held_[i].units, begin, end)) {
      ++i;
      continue;
    }
    const OperationPtr operation = held_[i].operation;
    if (!cta.cluster.engine.finish(cta.cluster, operation)) {
      Wait wait;
      wait.what = "registers of an operation in flight";
      wait.done = [](Warp& warp, const Wait& w) { return warp.cta.cluster.engine.finish(warp.cta.cluster, w.operation); };
      wait.operation = operation;
      current().wait = std::move(wait);
      current().retry = true;
      return false;
    }
    release(operation);
    i = 0;
  }
  return true;
}

}  // namespace emu
