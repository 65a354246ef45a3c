#include "exec/copy_ops.h"

#include <cstring>

namespace emu {
namespace {

constexpr uint32_t kSwizzlePeriod = 1024;  // the pattern depends on this many bytes of an address

}  // namespace

void TileLoad::write(Cluster& cluster) {
  std::vector<SharedView> views;
  for (const Destination& d : destinations) views.push_back(cluster.shared_of(d.shared, "tensor copy"));
  tile_load(tile, global_view(cluster, judged.get()), views.data(), static_cast<int>(views.size()));
  cluster.traffic.bulk_read += bytes;
}

void BulkLoad::write(Cluster& cluster) {
  std::vector<uint8_t> copy(bytes);
  if (global) {
    std::memcpy(copy.data(), global_view(cluster, judged.get()).read(global, bytes), bytes);
    cluster.traffic.bulk_read += bytes;
  } else {
    SharedView& view = cluster.shared_of(source, "bulk copy");
    std::memcpy(copy.data(), view.read(Cluster::offset_of(source), bytes, Proxy::kAsync), bytes);
  }
  for (const Destination& d : destinations) {
    uint8_t* to = cluster.shared_of(d.shared, "bulk copy").write(Cluster::offset_of(d.shared), bytes, Proxy::kAsync);
    if (reduction == Reduction::kNone) std::memcpy(to, copy.data(), bytes);
    else bulk_reduce(to, copy.data(), bytes, reduction, type);
  }
}

bool StoreOperation::step(Cluster& cluster) {
  switch (stage_) {
    case kRead:
      if (cluster.launch.options.is_strict(kStrictEnd) && source_cta->live_threads == 0)
        throw fail("strict: bulk store: CTA %u of the cluster may end before its shared memory has been read", source_cta->rank);
      read(cluster);
      --group->reads;
      stage_ = kWrite;
      return false;
    case kWrite:
      if (needs_turn()) {
        stage_ = kTurn;
        cluster.turn_operations.push_back({shared_from_this(), cluster.clock(), false});
        return true;
      }
      [[fallthrough]];
    case kTurn:
      write(cluster);
      --group->writes;
      if (judged) group->written.insert(group->written.end(), judged->written.begin(), judged->written.end());
      cluster.event();
      return true;
  }
  return true;
}

void TileStore::read(Cluster&) {
  const uint32_t bytes = tile_shared_bytes(tile.map), low = tile.shared % kSwizzlePeriod;
  copy_.reset(new uint8_t[low + bytes]);
  std::memcpy(copy_.get() + low, source_cta->shared.read(tile.shared, bytes, Proxy::kAsync), bytes);
  view_ = SharedView{copy_.get(), low + bytes, nullptr};
  tile.shared = low;
}
void TileStore::write(Cluster& cluster) {
  tile_store(tile, reduction, view_, global_view(cluster, judged.get()));
  cluster.traffic.bulk_written += tile_bytes(tile.map);
  copy_.reset();
}

void BulkStore::read(Cluster&) {
  const uint8_t* from = source_cta->shared.read(shared, bytes, Proxy::kAsync);
  copy_.assign(from, from + bytes);
}
void BulkStore::write(Cluster& cluster) {
  uint8_t* to = global_view(cluster, judged.get()).write(global, bytes);
  if (reduction == Reduction::kNone) std::memcpy(to, copy_.data(), bytes);
  else bulk_reduce(to, copy_.data(), bytes, reduction, type);
  cluster.traffic.bulk_written += bytes;
  copy_.clear();
}

bool LaneCopy::step(Cluster& cluster) {
  if (cluster.order) cluster.order->begin(line, false);
  for (const Lane& lane : lanes) {
    uint8_t* to = view.write(lane.shared, bytes, Proxy::kGeneric);
    if (lane.source_bytes) std::memcpy(to, cluster.global.read(lane.global, lane.source_bytes), lane.source_bytes);
    std::memset(to + lane.source_bytes, 0, bytes - lane.source_bytes);
    cluster.traffic.global_read += lane.source_bytes;
  }
  cluster.event();
  return true;
}

}  // namespace emu
