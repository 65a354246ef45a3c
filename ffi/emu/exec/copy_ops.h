// Asynchronous copies as operations of the engine (async/engine.h).
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "exec/address.h"
#include "machine/mbarrier.h"
#include "tensor/units.h"

namespace emu {

// Copies into shared memory that report to mbarriers: first the data, later the completion.
struct Destination {
  uint32_t shared;   // address with the CTA's rank
  uint32_t barrier;  // likewise
};

// Global memory as a copy touches it.
inline GlobalView global_view(const Cluster& cluster, GlobalObserver* judged) {
  GlobalView view = cluster.launch.global;
  view.observer = judged;
  return view;
}

class LoadOperation : public Operation {
 public:
  std::vector<Destination> destinations;
  uint32_t bytes = 0;  // that each destination's barrier counts
  std::unique_ptr<BulkAccess> judged;
  Span due(Timing& timing) const override {
    return written_ ? Span{timing.now, timing.now} : timing.copy_done(destinations[0].shared >> 24, bytes);
  }
  OperationKind kind() const override { return OperationKind::kLoad; }
  bool reports_to(uint32_t barrier) const override {
    return std::any_of(destinations.begin(), destinations.end(), [&](const Destination& d) { return d.barrier == barrier; });
  }
  OperationNote note() const override { return {{}, destinations[0].barrier, bytes}; }
  bool step(Cluster& cluster) override {
    if (!written_) {
      write(cluster);
      written_ = true;
      return false;
    }
    for (const Destination& d : destinations) mbarrier::complete_tx(cluster, d.barrier, bytes);
    return true;
  }

 protected:
  virtual void write(Cluster&) = 0;

 private:
  bool written_ = false;
};

class TileLoad final : public LoadOperation {
 public:
  TileCopy tile;

 protected:
  void write(Cluster& cluster) override;
};

class BulkLoad final : public LoadOperation {  // global or shared memory to shared memory
 public:
  uint64_t global = 0;
  uint32_t source = 0;  // when global is 0
  Reduction reduction = Reduction::kNone;
  BulkType type = BulkType::kB32;

 protected:
  void write(Cluster& cluster) override;
};

// Copies from shared to global memory, in bulk groups: first the source is read, later the destination is written. What
// other clusters may read or add to at the same time is written when its turn comes.
class StoreOperation : public Operation {
 public:
  std::shared_ptr<BulkGroup> group;
  const Cta* source_cta = nullptr;
  std::unique_ptr<BulkAccess> judged;
  Span due(Timing& timing) const override {
    return stage_ == kRead ? timing.store_read(source_cta->rank, size()) : Span{timing.now, timing.now + 500};
  }
  OperationKind kind() const override { return needs_turn() ? OperationKind::kReduce : OperationKind::kStore; }
  OperationNote note() const override { return {{}, 0, size()}; }
  bool step(Cluster& cluster) override;

 protected:
  virtual void read(Cluster&) = 0;
  virtual void write(Cluster&) = 0;
  virtual bool needs_turn() const = 0;
  virtual uint32_t size() const = 0;

 private:
  enum { kRead, kWrite, kTurn } stage_ = kRead;
};

class TileStore final : public StoreOperation {
 public:
  TileCopy tile;
  Reduction reduction = Reduction::kNone;

 protected:
  void read(Cluster&) override;
  void write(Cluster&) override;
  bool needs_turn() const override { return reduction != Reduction::kNone; }
  uint32_t size() const override { return tile_bytes(tile.map); }

 private:
  std::unique_ptr<uint8_t[]> copy_;
  SharedView view_;
};

class BulkStore final : public StoreOperation {
 public:
  uint64_t global = 0;
  uint32_t shared = 0, bytes = 0;
  Reduction reduction = Reduction::kNone;
  BulkType type = BulkType::kB32;

 protected:
  void read(Cluster&) override;
  void write(Cluster&) override;
  bool needs_turn() const override { return reduction != Reduction::kNone; }
  uint32_t size() const override { return bytes; }

 private:
  std::vector<uint8_t> copy_;
};

// cp.async of the lanes of a warp.
class LaneCopy final : public Operation {
 public:
  struct Lane {
    uint64_t global;
    uint32_t shared, source_bytes;
  };
  SharedView view;
  uint32_t bytes = 0;
  std::vector<Lane> lanes;
  Span due(Timing& timing) const override { return {timing.now, timing.now + 600}; }
  OperationKind kind() const override { return OperationKind::kLoad; }
  OperationNote note() const override { return {"cp.async", 0, bytes * lanes.size()}; }
  bool step(Cluster&) override;
};

// cp.async.mbarrier.arrive: arrives when the copies before it are done.
class CopyArrive final : public Operation {
 public:
  std::vector<OperationPtr> before;
  std::vector<uint32_t> barriers;  // one a lane
  bool ready() const override {
    for (const OperationPtr& operation : before)
      if (!operation->finished) return false;
    return true;
  }
  bool step(Cluster& cluster) override {
    for (uint32_t address : barriers) mbarrier::arrive(cluster, address, 1);
    return true;
  }
};

}  // namespace emu
