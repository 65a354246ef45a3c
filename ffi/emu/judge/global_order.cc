#include "judge/global_order.h"

#include <algorithm>
#include <cinttypes>

namespace emu {
namespace {

constexpr uint64_t kWord = 4;
constexpr size_t kMoments = 64;  // of a word: with more, the oldest are forgotten

bool knows(const Past& past, const Moment& moment) {
  return past && moment.cluster < past->size() && (*past)[moment.cluster] >= moment.clock;
}

}  // namespace

Past join(const Past& a, const Past& b) {
  if (!a || !b || a == b) return a ? a : b;
  auto result = std::make_shared<Clocks>(*a);
  if (result->size() < b->size()) result->resize(b->size());
  for (size_t i = 0; i < b->size(); ++i) (*result)[i] = std::max((*result)[i], (*b)[i]);
  return result;
}

bool GlobalOrder::ordered(const Access& access, const Moment& moment) {
  return moment.cluster == access.moment.cluster || (moment.clock != kUnfinished && knows(access.past, moment));
}

void GlobalOrder::check(const Access& access, const State& state, uint64_t address, bool reads) const {
  if (access.strong && state.strong) return;
  if (!strict_ && access.writes && !access.strong && !state.strong && !reads) return;
  for (const Moment& moment : state.moments) {
    if (ordered(access, moment)) continue;
    const char* const verb = access.writes ? (access.strong ? "an addition to" : "a write of") : "a read of";
    const char* why = "no release by that cluster and acquire by this one lie between";
    if (moment.clock == kUnfinished)
      why = "its thread has not waited for that bulk store or reduction (wait_group without .read)";
    else if (knows(access.known, moment))
      why = "missing fence.proxy.async between the acquire and this bulk copy";
    throw fail("global memory: race: %s 0x%" PRIx64 ", which PTX line %d %s in cluster %u: %s", verb, address,
               moment.line, reads ? "read" : "wrote", moment.cluster, why);
  }
}

uint32_t GlobalOrder::after_read(const Access& access, const State& state) {
  State result{false, {}};
  for (const Moment& moment : state.moments)  // who knows this reader knows those that it knows
    if (moment.cluster != access.moment.cluster && !ordered(access, moment)) result.moments.push_back(moment);
  if (result.moments.size() >= kMoments) result.moments.erase(result.moments.begin());
  result.moments.push_back(access.moment);
  return number_of(std::move(result));
}

uint32_t GlobalOrder::number_of(State state) {
  const auto [found, added] = numbers_.try_emplace(state, static_cast<uint32_t>(states_.size()));
  if (added) states_.push_back(std::move(state));
  return found->second;
}

uint32_t GlobalOrder::after(const Access& access, const State& state) {
  State result{access.strong, {}};
  if (!access.strong && !state.strong) {  // written by several, in no order: who reads it must know them all
    for (const Moment& moment : state.moments)
      if (!ordered(access, moment)) result.moments.push_back(moment);
  }
  if (access.strong && state.strong) {
    result.moments = state.moments;
    std::erase_if(result.moments, [&](const Moment& m) {
      return m.cluster == access.moment.cluster && (m.clock == kUnfinished) == (access.moment.clock == kUnfinished);
    });
  }
  if (result.moments.size() >= kMoments) result.moments.erase(result.moments.begin());
  result.moments.push_back(access.moment);
  return number_of(std::move(result));
}

// `number(state, address)` of each word that lies wholly within. `last` knows some of the answers.
template <class F>
void GlobalOrder::replace(std::vector<Words>& of, const GlobalRegion& region, uint64_t address, uint64_t bytes,
                          Step& last, F number) {
  Words& words = of[static_cast<size_t>(&region - regions_.data())];
  if (words.empty()) words.resize(region.bytes / kWord);
  const uint64_t at = address - region.base;
  for (uint64_t word = (at + kWord - 1) / kWord; word < (at + bytes) / kWord; ++word) {
    if (words[word] != last.before) last = {words[word], number(words[word], region.base + word * kWord)};
    words[word] = last.now;
  }
}

void GlobalOrder::access(const Access& access, const GlobalRegion& region, uint64_t address, uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  if (access.moment != last_.moment || access.past != last_.past || access.writes != last_.writes ||
      access.strong != last_.strong)
    last_ = {access.moment, access.past, access.writes, access.strong, {}, {}};
  const size_t index = static_cast<size_t>(&region - regions_.data());
  if (access.writes || !written_[index].empty())
    replace(written_, region, address, bytes, last_.written, [&](uint32_t number, uint64_t place) {
      check(access, states_[number], place, false);
      return access.writes ? after(access, states_[number]) : number;
    });
  if (access.writes ? read_[index].empty() : access.strong) return;
  replace(read_, region, address, bytes, last_.read, [&](uint32_t number, uint64_t place) {
    if (!access.writes) return after_read(access, states_[number]);
    check(access, states_[number], place, true);
    return access.strong ? number : 0;  // who adds next may not know those that read, though this one does
  });
}

void GlobalOrder::finish(uint32_t cluster, uint32_t clock, const std::vector<GlobalRange>& ranges) {
  const std::lock_guard lock(mutex_);
  for (const GlobalRange& range : ranges) {
    const auto region = std::upper_bound(regions_.begin(), regions_.end(), range.address,
                                         [](uint64_t a, const GlobalRegion& r) { return a < r.base; });
    Step last;
    replace(written_, region[-1], range.address, range.bytes, last, [&](uint32_t number, uint64_t) {
      State state = states_[number];
      const auto is = [&](bool unfinished) {
        return std::find_if(state.moments.begin(), state.moments.end(), [&](const Moment& m) {
          return m.cluster == cluster && (m.clock == kUnfinished) == unfinished;
        });
      };
      const auto unfinished = is(true);
      if (unfinished == state.moments.end()) return number;
      unfinished->clock = clock;
      const Moment moment = *unfinished;
      std::erase_if(state.moments, [&](const Moment& m) { return m.cluster == cluster && m != moment; });
      return number_of(std::move(state));
    });
  }
}

Past GlobalOrder::released(uint64_t address) const {
  if (releases_.empty()) return nullptr;
  const auto found = releases_.find(address);
  return found == releases_.end() ? nullptr : found->second;
}

void GlobalOrder::release(uint64_t address, Past past, bool adds) {
  if (!past && releases_.empty()) return;
  Past& here = releases_[address];
  here = adds ? join(here, past) : std::move(past);
}

void ClusterOrder::access(const GlobalRegion& region, uint64_t address, uint64_t bytes, bool writes) {
  order_.access({{cluster_, clock_, line_}, seen_, seen_, writes, strong_}, region, address, bytes);
}

Past ClusterOrder::now() {
  auto result = seen_ ? std::make_shared<Clocks>(*seen_) : std::make_shared<Clocks>();
  if (result->size() <= cluster_) result->resize(cluster_ + 1);
  (*result)[cluster_] = clock_++;
  return result;
}

void ClusterOrder::synchronise(uint64_t address, const Strong& strong) {
  const Past before = strong.reads ? order_.released(address) : nullptr;
  if (strong.writes) {
    if (strong.releases) released_[address] = now();
    // What a release wrote to this place, a relaxed write after it releases too.
    const auto own = released_.find(address);
    const Past past = own == released_.end() ? fenced_ : join(own->second, fenced_);
    if (past || !strong.reads) order_.release(address, past, strong.reads);
  }
  if (!before) return;
  Past& into = strong.acquires ? seen_ : observed_;
  into = join(into, before);
}

void ClusterOrder::fence() {
  seen_ = join(seen_, observed_);
  observed_ = nullptr;
  fenced_ = now();
}

void ClusterOrder::fence_async() { seen_by_bulk_ = seen_; }

void BulkAccess::read(const GlobalRegion& region, uint64_t address, uint64_t bytes) {
  owner_.order_.access({{owner_.cluster_, owner_.clock_, line_}, past_, known_, false, false}, region, address, bytes);
}

void BulkAccess::write(const GlobalRegion& region, uint64_t address, uint64_t bytes) {
  owner_.order_.access({{owner_.cluster_, kUnfinished, line_}, past_, known_, true, reduces_}, region, address, bytes);
  if (!written.empty() && written.back().address + written.back().bytes == address) written.back().bytes += bytes;
  else written.push_back({address, bytes});
}

}  // namespace emu
