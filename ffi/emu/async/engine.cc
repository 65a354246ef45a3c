#include "async/engine.h"

#include <algorithm>

#include "core/error.h"
#include "machine/cluster.h"
#include "machine/timing.h"
#include "machine/trace.h"

namespace emu {
namespace {

constexpr uint32_t kLongestDelay = 4000;  // instructions of the cluster

[[noreturn]] void rethrow_at(const Error& error, int line) {
  throw Error(error.what(), error.ptx_line ? error.ptx_line : line);
}

}  // namespace

Span Operation::due(Timing& timing) const { return {timing.now, timing.now}; }

bool Operation::step_judged(Cluster& cluster) {
  ProxyOrder* const proxies = cluster.judge->proxies();
  if (!proxies) return step(cluster);
  ProxyOrder::Before others = proxies->begin(before);
  const bool done = step(cluster);
  proxies->end(std::move(others));
  return done;
}

bool Engine::holds(const Operation& operation) const {
  return lateness_.policy() == Lateness::Policy::kHoldOne ? held_ == &operation
                                                          : lateness_.holds(operation.kind(), operation.line);
}

Span Engine::draw(Cluster& cluster, const Operation& operation, uint64_t now) {
  if (cluster.timing) return operation.due(*cluster.timing);
  if (lateness_.holds()) {
    if (holds(operation)) return {now, kLast};
    return {now, random_.below(4) ? now : now + 1 + random_.below(200)};
  }
  if (lateness_.lags(operation.line)) return {now, kLast};
  switch (random_.below(8)) {
    case 0:
    case 1:
    case 2: return {now, now};
    case 3:
    case 4: return {now, now + 1 + random_.below(kLongestDelay)};
    case 5: return {now, now + 1 + random_.below(200)};
    default: return {now, kLate};
  }
}

// Calls `visit(index)` for each operation that may make a step: ready, and at the head of its queue. Ends when it says so.
template <class F>
void Engine::heads(F visit) const {
  uint64_t passed[kQueues / 64] = {};  // queues whose head has been seen
  for (size_t i = 0; i < pending_.size(); ++i) {
    const int queue = pending_[i].queue;
    if (queue >= 0) {
      uint64_t& word = passed[queue / 64];
      if (word >> (queue % 64) & 1) continue;
      word |= uint64_t{1} << (queue % 64);
    }
    if (pending_[i].operation->ready() && !visit(i)) return;
  }
}

void Engine::refresh() {
  next_due_ = kLate;
  heads([&](size_t i) {
    next_due_ = std::min(next_due_, pending_[i].due);
    return true;
  });
}

bool Engine::step(Cluster& cluster, size_t index, uint64_t now) {
  const OperationPtr operation = pending_[index].operation;
  bool done;
  try {
    done = operation->step_judged(cluster);
  } catch (const Error& error) {
    rethrow_at(error, operation->line);
  }
  operation->finished = done;
  if (done && held_ == operation.get()) held_ = nullptr;
  if (cluster.trace && operation->traced != SIZE_MAX) cluster.trace->stepped(*operation, done);
  // The step may have issued more, so look the operation up again.
  const auto found = std::find_if(pending_.begin(), pending_.end(),
                                  [&](const Pending& p) { return p.operation == operation; });
  if (found == pending_.end()) return true;
  if (done) pending_.erase(found);
  else found->due = draw(cluster, *operation, now).end;
  return done;
}

void Engine::issue(Cluster& cluster, OperationPtr operation, int queue, uint64_t now) {
  if (queue >= kQueues) throw fail("more than %d queues of asynchronous operations", kQueues);
  if (lateness_.policy() == Lateness::Policy::kHoldOne && !held_ &&
      lateness_.takes(operation->line, cluster.running_cta(), random_))
    held_ = operation.get();
  if (ProxyOrder* proxies = cluster.judge->proxies()) operation->before = proxies->before();
  const Span span = draw(cluster, *operation, now);
  if (cluster.trace) cluster.trace->issued(*operation, span);
  pending_.push_back({std::move(operation), queue, span.end});
  refresh();
  advance(cluster, now);  // what is due at once happens before the next instruction
}

bool Engine::advance(Cluster& cluster, uint64_t now) {
  bool any = false;
  while (next_due_ <= now) {
    size_t due = SIZE_MAX;
    heads([&](size_t i) {
      if (pending_[i].due <= now) due = i;
      return due == SIZE_MAX;
    });
    step(cluster, due, now);
    refresh();
    any = true;
  }
  return any;
}

// The first of the heads that bring about a phase that a warp sleeps for, or an operation behind them in their queue does;
// if none does, the one issued first. So what nobody waits for is the last to happen.
size_t Engine::needed(const Cluster& cluster, const std::vector<size_t>& heads) const {
  for (size_t head : heads)
    for (size_t i = head; i < pending_.size(); ++i) {
      const bool follows = pending_[head].queue >= 0 && pending_[i].queue == pending_[head].queue;
      if ((i == head || follows) && cluster.awaits(*pending_[i].operation)) return head;
    }
  return heads.front();
}

bool Engine::force(Cluster& cluster) {
  std::vector<size_t> candidates;
  uint64_t earliest = kLast;
  heads([&](size_t i) {
    if (pending_[i].due < earliest) {
      earliest = pending_[i].due;
      candidates.clear();
    }
    if (pending_[i].due == earliest) candidates.push_back(i);
    return true;
  });
  if (candidates.empty()) return false;
  const size_t chosen = lateness_.holds() ? needed(cluster, candidates)
                                          : candidates[random_.below(static_cast<uint32_t>(candidates.size()))];
  step(cluster, chosen, earliest >= kLate ? 0 : earliest);
  refresh();
  return true;
}

bool Engine::only_stores() const {
  return std::all_of(pending_.begin(), pending_.end(), [](const Pending& p) {
    return p.operation->kind() == OperationKind::kStore || p.operation->kind() == OperationKind::kReduce;
  });
}

bool Engine::finish(Cluster& cluster, const OperationPtr& operation) {
  while (true) {
    const auto found =
        std::find_if(pending_.begin(), pending_.end(), [&](const Pending& p) { return p.operation == operation; });
    if (found == pending_.end()) return operation->finished;  // else it is not issued as a whole yet
    size_t index = static_cast<size_t>(found - pending_.begin());
    if (pending_[index].queue >= 0)
      for (size_t i = 0; i < index; ++i)
        if (pending_[i].queue == pending_[index].queue) {
          index = i;
          break;
        }
    if (!pending_[index].operation->ready()) return false;
    step(cluster, index, 0);
    refresh();
  }
}

}  // namespace emu
