#include "machine/cluster.h"

#include <algorithm>
#include <cinttypes>
#include <cstring>
#include <new>

#include "machine/launch.h"

namespace emu {
namespace {

constexpr std::align_val_t kSharedAlignment{1024};
constexpr uint64_t kLaggardStream = uint64_t{1} << 62;
constexpr uint64_t kLag = 100'000;  // instructions that a laggard warp lets others execute before each of its bursts
// Executed in a cluster while nothing changed that anyone waits for: late operations happen, for warps may be spinning for
// them; later, a hang.
constexpr uint64_t kPatience = 200'000;
constexpr uint64_t kHangInstructions = 40'000'000;
constexpr uint32_t kTurnsAhead = 16;  // so many turns at global memory may pass before an operation that is held back
constexpr uint64_t kHangStoring = 100'000'000;  // with nothing but stores

void free_shared(uint8_t* memory) { ::operator delete[](memory, kSharedAlignment); }

}  // namespace

void rethrow_in(const Warp& warp, const Error& error, int line) {
  const Cta& cta = warp.cta;
  char place[256];
  std::snprintf(place, sizeof place, " [kernel %.80s, CTA (%u, %u, %u), warp %u, PTX line %d]", warp.program().name.c_str(),
                cta.index.x, cta.index.y, cta.index.z, warp.index, error.ptx_line ? error.ptx_line : line);
  if (std::strstr(error.what(), "[kernel ")) throw error;
  throw Error(std::string(error.what()) + place, error.ptx_line ? error.ptx_line : line);
}

void rethrow_in(const Cluster& cluster, const Error& error) {
  if (error.ptx_line == 0 || std::strstr(error.what(), "[kernel ")) throw error;
  char place[160];
  std::snprintf(place, sizeof place, " [kernel %.80s, cluster %" PRIu64 ", asynchronous operation of PTX line %d]",
                cluster.launch.program.name.c_str(), cluster.number, error.ptx_line);
  throw Error(std::string(error.what()) + place, error.ptx_line);
}

Cta::Cta(Cluster& owner, uint32_t cta_rank, Dim3 cta_index)
    : cluster(owner), rank(cta_rank), index(cta_index), memory_(nullptr, free_shared) {
  const Launch& launch = owner.launch;
  memory_.reset(new (kSharedAlignment) uint8_t[launch.shared_bytes]);
  std::memset(memory_.get(), 0xff, launch.shared_bytes);  // a NaN in every floating-point type
  shared.data = memory_.get();
  shared.bytes = static_cast<uint32_t>(launch.shared_bytes);
  const Dim3 block = launch.config.block;
  const uint32_t threads = block.x * block.y * block.z;
  shadow_ = std::make_unique<SharedShadow>(*owner.judge, shared.bytes);
  shared.observer = shadow_.get();
  for (uint32_t w = 0; w * kLanes < threads; ++w) warps.push_back(std::make_unique<Warp>(*this, w, threads));
  // What ptxas gives each thread when a kernel uses setmaxnreg: an equal share of the multiprocessor's registers.
  const uint32_t share = launch.program.max_registers ? launch.program.max_registers : 65536 / (32 * static_cast<uint32_t>(warps.size()));
  for (auto& warp : warps) warp->register_budget = std::min(share, 256u) / 8 * 8;
}

TensorMemory& Cta::tensor_memory() {
  if (!tensor) {
    tensor = std::make_unique<TensorMemory>();
    if (cluster.tensor_order) tensor->observe(std::make_unique<TensorOrderShadow>(*cluster.tensor_order));
  }
  return *tensor;
}

Cluster::Cluster(Launch& owner, uint64_t cluster_number, Dim3 cluster_index)
    : launch(owner), number(cluster_number), index(cluster_index),
      engine(owner.options.seed, owner.number << 40 | cluster_number << 1 | 1,
             Lateness(owner.options.seed, owner.program.operations)),
      random_(owner.options.seed, owner.number << 40 | cluster_number << 1) {
  const Dim3 shape = owner.cluster_shape;
  executed.assign(owner.program.code.size(), 0);
  executed_by.assign(owner.program.code.size(), 0);
  const Dim3 block = owner.config.block;
  const uint32_t warps_of_cta = (block.x * block.y * block.z + kLanes - 1) / kLanes, cta_count = shape.x * shape.y * shape.z;
  judge = std::make_unique<ClusterJudge>(warps_of_cta * cta_count, owner.options.is_strict(kStrictOverwrites));
  if (owner.options.is_strict(kStrictFences)) tensor_order = std::make_unique<TensorOrder>(warps_of_cta * cta_count);
  if (owner.order) order = std::make_unique<ClusterOrder>(*owner.order, static_cast<uint32_t>(cluster_number));
  global = owner.global;
  global.observer = order.get();
  if (owner.options.timing) timing = std::make_unique<Timing>(rates_of(owner.options.architecture), owner.program, cta_count);
  if (cluster_number < owner.options.trace) trace = std::make_unique<Trace>(timing.get(), cta_count, warps_of_cta);
  for (uint32_t z = 0; z < shape.z; ++z)
    for (uint32_t y = 0; y < shape.y; ++y)
      for (uint32_t x = 0; x < shape.x; ++x) {
        const Dim3 at{cluster_index.x * shape.x + x, cluster_index.y * shape.y + y, cluster_index.z * shape.z + z};
        ctas.push_back(std::make_unique<Cta>(*this, static_cast<uint32_t>(ctas.size()), at));
      }
  for (auto& cta : ctas) {
    for (auto& warp : cta->warps) {
      warps_.push_back(warp.get());
      cta->live_threads += static_cast<uint32_t>(__builtin_popcount(warp->live()));
      // A seed makes some warps laggards, the same in every CTA: they run when no other can, which shows waits for them.
      warp->laggard = Random(owner.options.seed, kLaggardStream + warp->index).below(6) == 0;
      if (warp->laggard) warp->starved_until = kLag;
    }
    live_threads += cta->live_threads;
  }
}

SharedView& Cluster::shared_of(uint32_t address, const char* what) {
  const uint32_t rank = address >> 24;
  if (rank >= ctas.size())
    throw fail("%s: shared address 0x%08x names CTA %u of a cluster of %zu", what, address, rank, ctas.size());
  if (launch.options.is_strict(kStrictEnd) && ctas[rank]->live_threads == 0)
    throw fail("strict: %s: shared address 0x%08x, but CTA %u of the cluster has ended", what, address, rank);
  return ctas[rank]->shared;
}

void Cluster::cluster_arrive(uint32_t threads) {
  barrier_arrived += threads;
  event();
  if (ProxyOrder* proxies = judge->proxies()) proxies->arrive(ProxyOrder::kOfCluster, true);
  if (barrier_arrived >= live_threads) complete_barrier();
}

void Cluster::threads_exited(Cta& cta, uint32_t threads) {
  cta.live_threads -= threads;
  live_threads -= threads;
  event();
  if (live_threads && barrier_arrived >= live_threads) complete_barrier();
}

void Cluster::complete_barrier() {
  barrier_arrived = 0;
  ++barrier_generation;
  if (ProxyOrder* proxies = judge->proxies()) proxies->complete(ProxyOrder::kOfCluster);
}

// One burst of one warp, drawn. False: none can go on.
bool Cluster::schedule() {
  Warp* ready[64 * 16];
  uint32_t count = 0, starved = 0;
  Warp* hungry[64 * 16];
  for (Warp* warp : warps_) {
    if (warp->exited() || !warp->runnable()) continue;
    if (warp->starved_until > now) hungry[starved++] = warp;
    else ready[count++] = warp;
  }
  if (count == 0 && starved == 0) return false;
  // Rather than a starved warp, operations that are late go on: it falls behind them too. Not those that are held back.
  if (count == 0 && !engine.lateness().holds() && random_.below(8) != 0 && engine.force(*this)) {
    event();
    return true;
  }
  Warp* const warp = count ? ready[random_.below(count)] : hungry[random_.below(starved)];
  uint64_t burst;
  switch (random_.below(4)) {
    case 0: burst = 1 + random_.below(40); break;
    case 1: burst = 1 + random_.below(400); break;
    default: burst = 1'000'000;
  }
  if (random_.below(32) == 0) {
    Warp* victim = warps_[random_.below(static_cast<uint32_t>(warps_.size()))];
    victim->starved_until = now + random_.below(20000);
  }
  // A watched warp may stall right after something that others wait for, before it does the next such thing.
  const bool watched = random_.below(4) == 0;
  while (burst && !warp->exited()) {
    // Asynchronous operations that fall due within the burst happen in its course.
    const uint64_t before = now, events = events_;
    const uint64_t ran = warp->run(watched ? 1 : burst);
    const bool stalls = watched && events_ != events && random_.below(4) == 0;
    engine.advance(*this, now);
    if (ran == 0 || !warp->runnable()) break;
    if (stalls) {
      warp->starved_until = std::max(warp->starved_until, now + random_.below(random_.below(2) ? 2000 : 60000));
      break;
    }
    burst -= std::min(burst, now - before);
  }
  if (warp->laggard) warp->starved_until = now + kLag;
  return true;
}

// The warp whose clock is behind the others' makes an instruction, or the operation that is due before it a step.
bool Cluster::schedule_timed() {
  Warp* first = nullptr;
  uint64_t time = kLate, next = kLate;
  for (Warp* warp : warps_) {
    if (warp->exited() || !warp->runnable()) continue;
    const uint64_t at = timing->warp(warp->cta.rank, warp->index).time;
    if (at < time) {
      next = time;
      time = at;
      first = warp;
    } else {
      next = std::min(next, at);
    }
  }
  if (engine.next_due() != kLate && engine.next_due() <= time) {
    timing->now = engine.next_due();
    engine.advance(*this, timing->now);
    return true;
  }
  if (!first) return false;
  const Timing::WarpClock& clock = timing->warp(first->cta.rank, first->index);
  const uint64_t generation = events_;
  do {
    timing->now = clock.time;
    if (first->run(1) == 0) break;
  } while (clock.time <= next && clock.time < engine.next_due() && events_ == generation && !first->exited() && first->runnable());
  return true;
}

// Nothing goes on: a try_wait that waits returns false, as it does on hardware after a while. False: that was done before
// and nothing has changed since.
bool Cluster::give_up_polls() {
  if (events_at_give_up_ == events_) return false;
  events_at_give_up_ = events_;
  bool any = false;
  for (Warp* warp : warps_)
    for (int i = 0; i < warp->fragment_count(); ++i) {
      Fragment& f = warp->fragment(i);
      if (!f.wait.done || !f.wait.polls) continue;
      f.gave_up = any = true;
      ++traffic.poll_retries;
    }
  return any;
}

Cluster::State Cluster::run() {
  try {
    return run_until_stopped();
  } catch (const Error& error) {
    rethrow_in(*this, error);
  }
}

Cluster::State Cluster::run_until_stopped() {
  state = State::kReady;
  while (true) {
    if (stopped) return state = State::kTurn;
    if (timing ? schedule_timed() : schedule()) {
      if (!timing && now - last_event_ > kPatience && engine.force(*this)) event();
      if (launch.options.limit && now > launch.options.limit)
        throw fail("limit: more than %" PRIu64 " instructions\n%s", launch.options.limit, describe().c_str());
      if (now - last_change_ > kHangInstructions || now - last_event_ > kHangStoring)
        throw fail("hang: %" PRIu64 " instructions without any progress\n%s", now - last_event_, describe().c_str());
      continue;
    }
    // Who is to have its turn at global memory can go on, though operations are in flight, and so can other clusters while
    // stores are; but not for ever, for they may poll.
    if (!timing && !engine.empty() && turns_ahead_ > 0 &&
        (awaits_turn() || (launch.clusters_meet() && engine.only_stores()))) {
      --turns_ahead_;
      return state = awaits_turn() ? State::kTurn : State::kReady;
    }
    if (engine.force(*this)) {
      turns_ahead_ = static_cast<int>(random_.below(2) * random_.below(kTurnsAhead));
      event();
      continue;
    }
    const bool exited = std::all_of(warps_.begin(), warps_.end(), [](Warp* w) { return w->exited(); });
    if (!turn_operations.empty() || awaits_turn()) return state = State::kTurn;
    if (exited) return state = State::kDone;
    if (!give_up_polls()) return state = State::kStuck;
  }
}

bool Cluster::awaits(const Operation& operation) const {
  for (Warp* warp : warps_)
    for (int i = 0; i < warp->fragment_count(); ++i) {
      const Wait& wait = warp->fragment(i).wait;
      if (wait.done && wait.polls && operation.reports_to(static_cast<uint32_t>(wait.a))) return true;
    }
  return false;
}

bool Cluster::awaits_turn() const {
  for (Warp* warp : warps_)
    for (int i = 0; i < warp->fragment_count(); ++i)
      if (warp->fragment(i).wait.global_turn) return true;
  return false;
}

void Cluster::take_turns_into(std::vector<std::pair<Warp*, int>>& waiters) {
  for (Warp* warp : warps_)
    for (int i = 0; i < warp->fragment_count(); ++i)
      if (warp->fragment(i).wait.global_turn) waiters.push_back({warp, i});
}

std::string Cluster::describe() {
  std::string text;
  char line[256];
  for (Warp* warp : warps_)
    for (int i = 0; i < warp->fragment_count(); ++i) {
      const Fragment& f = warp->fragment(i);
      std::snprintf(line, sizeof line, "  CTA (%u, %u, %u) warp %u lanes 0x%08x: PTX line %d, ", warp->cta.index.x,
                    warp->cta.index.y, warp->cta.index.z, warp->index, f.mask, warp->line_of(f));
      text += line;
      if (f.wait.done) {
        std::snprintf(line, sizeof line, "waits for %s (0x%" PRIx64 ", %" PRIu64 ")\n", f.wait.what, f.wait.a, f.wait.b);
        text += line;
      } else {
        text += "runs\n";
      }
    }
  std::snprintf(line, sizeof line, "  %zu asynchronous operations in flight\n", engine.size());
  return text + line;
}

}  // namespace emu
