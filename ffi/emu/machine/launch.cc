#include "machine/launch.h"

#include <algorithm>
#include <cinttypes>
#include <cstring>
#include <new>

#include "machine/mbarrier.h"
#include "machine/pool.h"

namespace emu {
namespace {

constexpr uint64_t kIdleEpochs = 20000;  // epochs of nothing but loads from global memory: a hang
constexpr uint32_t kSharedLimit = 232448 + kSharedBase;

void step_in_turn(Cluster& cluster, Operation& operation) {
  try {
    operation.step_judged(cluster);
  } catch (const Error& error) {
    rethrow_in(cluster, Error(error.what(), operation.line));
  }
}

}  // namespace

void TrafficCounters::add(const TrafficCounters& o) {
  global_read += o.global_read;
  global_written += o.global_written;
  shared_read += o.shared_read;
  shared_written += o.shared_written;
  tensor_memory_read += o.tensor_memory_read;
  tensor_memory_written += o.tensor_memory_written;
  bulk_read += o.bulk_read;
  bulk_written += o.bulk_written;
  tensor_flops += o.tensor_flops;
  poll_retries += o.poll_retries;
  for (const auto& [shape, count] : o.mma_shapes) mma_shapes[shape] += count;
  for (const auto& [line, outcome] : o.votes) {
    votes[line].first += outcome.first;
    votes[line].second += outcome.second;
  }
  forms.insert(o.forms.begin(), o.forms.end());
}

Launch::Launch(const Program& p, const LaunchConfig& c, const MachineOptions& o, uint64_t launch_number)
    : program(p), config(c), options(o), number(launch_number), turn_random_(o.seed, launch_number << 40 | 0xffffffffffu) {
  cluster_shape = c.cluster;
  if (p.required_cluster[0]) cluster_shape = {p.required_cluster[0], p.required_cluster[1], p.required_cluster[2]};
  check();
  cluster_grid = {c.grid.x / cluster_shape.x, c.grid.y / cluster_shape.y, c.grid.z / cluster_shape.z};
  shared_bytes = kSharedBase + p.static_shared_bytes + c.dynamic_shared_bytes;
  shared_bytes = (shared_bytes + 15) / 16 * 16;
  // Tensor maps must be 64-byte aligned, parameters ask for up to 128.
  parameter_memory_.reset(new uint8_t[p.parameter_bytes + 256]);
  parameters = parameter_memory_.get() + (128 - reinterpret_cast<uintptr_t>(parameter_memory_.get()) % 128);
  for (size_t i = 0; i < p.parameters.size(); ++i)
    std::memcpy(parameters + p.parameters[i].offset, c.parameters[i], p.parameters[i].bytes);
  regions = o.regions;
  if (!regions.empty()) {
    regions.push_back({reinterpret_cast<uint64_t>(parameters), p.parameter_bytes, false});
    std::sort(regions.begin(), regions.end(), [](const auto& a, const auto& b) { return a.base < b.base; });
  }
  global = {regions.data(), regions.size(), nullptr};
  if (!regions.empty() && cluster_count() > 1) order = std::make_unique<GlobalOrder>(regions, options.strict & kStrict);
  counters.kernel = p.name;
  counters.launches = 1;
  counters.executed.assign(p.code.size(), 0);
  counters.executed_by.assign(p.code.size(), 0);
}

Launch::~Launch() = default;

void Launch::check() const {
  const Dim3 grid = config.grid, block = config.block, shape = cluster_shape;
  const uint64_t threads = uint64_t{block.x} * block.y * block.z;
  if (threads == 0 || threads > 1024) throw fail("launch of %s: %" PRIu64 " threads a CTA, allowed 1 to 1024", program.name.c_str(), threads);
  if (!grid.x || !grid.y || !grid.z) throw fail("launch of %s: an empty grid", program.name.c_str());
  const uint64_t ctas = uint64_t{shape.x} * shape.y * shape.z;
  if (ctas == 0 || ctas > 16) throw fail("launch of %s: cluster of %" PRIu64 " CTAs, allowed 1 to 16", program.name.c_str(), ctas);
  if (grid.x % shape.x || grid.y % shape.y || grid.z % shape.z)
    throw fail("launch of %s: grid (%u, %u, %u) is no multiple of the cluster (%u, %u, %u)", program.name.c_str(), grid.x,
               grid.y, grid.z, shape.x, shape.y, shape.z);
  const uint32_t* required = program.required_threads;
  if (required[0] && (block.x != required[0] || block.y != required[1] || block.z != required[2]))
    throw fail("launch of %s: block (%u, %u, %u), the kernel requires (%u, %u, %u)", program.name.c_str(), block.x, block.y,
               block.z, required[0], required[1], required[2]);
  const uint64_t shared = kSharedBase + program.static_shared_bytes + config.dynamic_shared_bytes;
  if (shared > kSharedLimit)
    throw fail("launch of %s: %" PRIu64 " bytes of shared memory, allowed %u", program.name.c_str(), shared - kSharedBase,
               kSharedLimit - kSharedBase);
  if (!program.parameters.empty() && !config.parameters) throw fail("launch of %s: no parameters", program.name.c_str());
}

Dim3 Launch::cluster_index(uint64_t i) const {
  return {static_cast<uint32_t>(i % cluster_grid.x), static_cast<uint32_t>(i / cluster_grid.x % cluster_grid.y),
          static_cast<uint32_t>(i / cluster_grid.x / cluster_grid.y)};
}

uint64_t Launch::resident_clusters() const {
  const uint64_t threads = uint64_t{config.block.x} * config.block.y * config.block.z;
  const uint64_t ctas = uint64_t{cluster_shape.x} * cluster_shape.y * cluster_shape.z;
  const uint64_t per_sm = std::max<uint64_t>(1, std::min<uint64_t>({2048 / threads, 233472 / shared_bytes, 32}));
  return std::max<uint64_t>(1, options.sm_count * per_sm / ctas);
}

bool Launch::cancel_cluster(Dim3* first_cta) {
  if (next_cluster_ >= cluster_count()) return false;
  const Dim3 at = cluster_index(next_cluster_++);
  *first_cta = {at.x * cluster_shape.x, at.y * cluster_shape.y, at.z * cluster_shape.z};
  return true;
}

void Launch::run() {
  while (epoch()) {
  }
}

void Launch::run_clusters(const std::vector<Cluster*>& ready) {
  std::vector<std::exception_ptr> problems(ready.size());
  parallel_for(options.threads, ready.size(), [&](size_t i) {
    try {
      ready[i]->run();
    } catch (...) {
      problems[i] = std::current_exception();
    }
  });
  for (const std::exception_ptr& p : problems)  // the first in grid order, whatever the threads did
    if (p) std::rethrow_exception(p);
}

// In the order that the seed gives. In a timed run those that want an answer get it one at a time, the earliest first: all
// clusters have come to their next one, so none can ask earlier any more.
uint64_t Launch::take_turns() {
  struct Turn {
    Cluster* cluster;
    Warp* warp;
    int fragment;
    Cluster::WaitingTurn waiting;
  };
  std::vector<Turn> turns;
  for (auto& cluster : active_) {
    std::vector<std::pair<Warp*, int>> waiters;
    cluster->take_turns_into(waiters);
    for (auto& [warp, fragment] : waiters) {
      const uint64_t time = options.timing ? cluster->timing->warp(warp->cta.rank, warp->index).time : 0;
      turns.push_back({cluster.get(), warp, fragment, {nullptr, time, true}});
    }
    for (Cluster::WaitingTurn& waiting : cluster->turn_operations) turns.push_back({cluster.get(), nullptr, 0, std::move(waiting)});
    cluster->turn_operations.clear();
  }
  if (options.timing) {
    const auto answered = std::stable_partition(turns.begin(), turns.end(), [](const Turn& t) { return !t.waiting.answers; });
    std::stable_sort(answered, turns.end(), [](const Turn& a, const Turn& b) { return a.waiting.time < b.waiting.time; });
    const auto later = answered == turns.end() ? answered : answered + 1;
    for (auto turn = later; turn != turns.end(); ++turn)
      if (!turn->warp) turn->cluster->turn_operations.push_back(std::move(turn->waiting));
    turns.erase(later, turns.end());
  } else {
    for (size_t i = turns.size(); i > 1; --i) std::swap(turns[i - 1], turns[turn_random_.below(static_cast<uint32_t>(i))]);
  }
  met_ |= !turns.empty();
  for (Turn& turn : turns) {
    if (turn.cluster->timing) turn.cluster->timing->now = turn.waiting.time;
    if (turn.waiting.answers) turn.cluster->stopped = false;
    if (turn.warp) turn.warp->run_one(turn.fragment);
    else step_in_turn(*turn.cluster, *turn.waiting.operation);
    turn.cluster->state = Cluster::State::kReady;
  }
  return turns.size();
}

void Launch::retire(Cluster& cluster) {
  ++counters.clusters;
  counters.ctas += cluster.ctas.size();
  counters.traffic.add(cluster.traffic);
  if (cluster.timing) {
    counters.cluster_cycles.resize(std::max(counters.cluster_cycles.size(), static_cast<size_t>(cluster.number + 1)));
    counters.cluster_cycles[cluster.number] = cluster.timing->end();
    if (cluster.number == 0) counters.timing_json = cluster.timing->json();
  }
  if (cluster.trace) counters.traces.push_back({static_cast<uint32_t>(cluster.number), cluster.trace->take()});
  for (size_t i = 0; i < cluster.executed.size(); ++i) {
    counters.executed[i] += cluster.executed[i];
    counters.executed_by[i] |= cluster.executed_by[i];
  }
  mbarrier::check_finished(cluster);
  for (auto& cta : cluster.ctas) {
    if (cta->tensor && cta->tensor->allocated_columns())
      throw fail("tensor memory: CTA (%u, %u, %u) of %s ended with %u columns allocated", cta->index.x, cta->index.y,
                 cta->index.z, program.name.c_str(), cta->tensor->allocated_columns());
    counters.warps.resize(std::max(counters.warps.size(), cta->warps.size()));
    for (auto& warp : cta->warps) {
      WarpCounters& sum = counters.warps[warp->index];
      for (size_t u = 0; u < static_cast<size_t>(Unit::kCount); ++u) sum.units[u] += warp->counters.units[u];
      sum.instructions += warp->counters.instructions;
      sum.lanes += warp->counters.lanes;
    }
  }
}

bool Launch::epoch() {
  while (active_.size() < resident_clusters() && next_cluster_ < cluster_count()) {
    const uint64_t i = next_cluster_++;
    active_.push_back(nullptr);
    active_.back() = std::make_unique<Cluster>(*this, i, cluster_index(i));
    ++progress_;
  }
  if (active_.empty()) return false;
  std::vector<Cluster*> ready;
  for (auto& cluster : active_)
    if (cluster->state == Cluster::State::kReady) ready.push_back(cluster.get());
  run_clusters(ready);
  uint64_t progress = progress_;
  for (auto& cluster : active_) {
    progress += cluster->events();
    if (cluster->state != Cluster::State::kDone) continue;
    retire(*cluster);
    progress_ += cluster->events() + 1;
    ++progress;
    cluster.reset();
  }
  std::erase(active_, nullptr);
  ++epochs_;
  const bool turns = take_turns() > 0;
  if (active_.empty()) return next_cluster_ < cluster_count();
  idle_epochs_ = progress != last_progress_ ? 0 : idle_epochs_ + 1;
  last_progress_ = progress;
  const bool room = active_.size() < resident_clusters() && next_cluster_ < cluster_count();
  const bool goes_on =
      std::any_of(active_.begin(), active_.end(), [](const auto& c) { return c->state == Cluster::State::kReady; });
  if (room || (!turns && goes_on) || (turns && idle_epochs_ < kIdleEpochs * (options.timing ? active_.size() : 1)))
    return true;
  std::string text;
  for (auto& cluster : active_)
    if (text.size() < 6000) text += cluster->describe();
  throw Error("deadlock in " + program.name.substr(0, 100) + ": no warp can go on\n" + text);
}

}  // namespace emu
