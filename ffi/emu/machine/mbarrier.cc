#include "machine/mbarrier.h"

#include <cstring>

namespace emu::mbarrier {
namespace {

constexpr uint64_t kPattern = uint64_t{2} << 62;
constexpr int64_t kMaxTransaction = (1 << 20) - 1;

struct State {
  uint32_t pending, expected;
  int64_t bytes;
  uint32_t phase;
};

uint8_t* word(Cluster& cluster, uint32_t address) {
  if (address % 8) throw fail("mbarrier: address 0x%08x is not aligned to 8 bytes", address);
  SharedView& view = cluster.shared_of(address, "mbarrier");
  view.check(Cluster::offset_of(address), 8);
  return view.data + Cluster::offset_of(address);
}
State decode(uint64_t bits) {
  return {static_cast<uint32_t>(bits & kMaxCount), static_cast<uint32_t>(bits >> 20 & kMaxCount),
          static_cast<int64_t>(bits << 3) >> 43, static_cast<uint32_t>(bits >> 61 & 1)};
}
State load(Cluster& cluster, uint32_t address) {
  uint64_t bits;
  std::memcpy(&bits, word(cluster, address), 8);
  if (bits >> 62 != 2) throw fail("mbarrier: 0x%08x has not been initialised", address);
  return decode(bits);
}
uint64_t encode(const State& s) {
  return s.pending | uint64_t{s.expected} << 20 | (static_cast<uint64_t>(s.bytes) & 0x1fffff) << 40 |
         uint64_t{s.phase} << 61 | kPattern;
}
void store(Cluster& cluster, uint32_t address, const State& s) {
  const uint64_t bits = encode(s);
  std::memcpy(word(cluster, address), &bits, 8);
}
void finish(Cluster& cluster, uint32_t address, State s) {
  if (s.pending == 0 && s.bytes == 0) {
    s.phase ^= 1;
    s.pending = s.expected;
    if (ProxyOrder* proxies = cluster.judge->proxies()) proxies->complete(address);
  }
  store(cluster, address, s);
  cluster.event();
}

}  // namespace

void init(Cluster& cluster, uint32_t address, uint32_t count) {
  if (count == 0 || count > kMaxCount) throw fail("mbarrier.init: count %u, allowed 1 to %u", count, kMaxCount);
  store(cluster, address, {count, count, 0, 0});
  cluster.judge->add_barrier(address);
  cluster.judge->initialised(address);
  cluster.event();
}
void check_finished(Cluster& cluster) {
  for (uint32_t address : cluster.judge->barriers()) {
    uint64_t bits;
    std::memcpy(&bits, cluster.ctas[address >> 24]->shared.data + Cluster::offset_of(address), 8);
    if (bits >> 62 != 2) continue;  // its memory has been used for something else
    if (const int64_t bytes = decode(bits).bytes; bytes < 0)
      throw fail("mbarrier 0x%08x: at the end %lld bytes more were copied than its expect_tx announced", address,
                 static_cast<long long>(-bytes));
  }
}
void invalidate(Cluster& cluster, uint32_t address) {
  load(cluster, address);
  std::memset(word(cluster, address), 0xff, 8);
}
uint64_t arrive(Cluster& cluster, uint32_t address, uint32_t count, bool drop) {
  State s = load(cluster, address);
  const uint64_t before = encode(s);
  if (count > s.pending)
    throw fail("mbarrier 0x%08x: %u arrivals, but only %u of %u are pending in this phase", address, count, s.pending, s.expected);
  if (ProxyOrder* proxies = cluster.judge->proxies()) proxies->arrive(address);
  s.pending -= count;
  if (drop) s.expected -= count;
  finish(cluster, address, s);
  return before;
}
void expect_tx(Cluster& cluster, uint32_t address, uint32_t bytes) {
  State s = load(cluster, address);
  s.bytes += bytes;
  if (s.bytes > kMaxTransaction) throw fail("mbarrier 0x%08x: %lld transaction bytes, allowed %lld", address,
                                            static_cast<long long>(s.bytes), static_cast<long long>(kMaxTransaction));
  finish(cluster, address, s);
}
void complete_tx(Cluster& cluster, uint32_t address, uint32_t bytes) {
  cluster.judge->check_init(address);
  State s = load(cluster, address);
  if (ProxyOrder* proxies = cluster.judge->proxies()) proxies->arrive(address);
  s.bytes -= bytes;
  if (s.bytes < -kMaxTransaction) throw fail("mbarrier 0x%08x: transaction bytes below -%lld", address, static_cast<long long>(kMaxTransaction));
  finish(cluster, address, s);
}
uint32_t phase(Cluster& cluster, uint32_t address) { return load(cluster, address).phase; }

}  // namespace emu::mbarrier
