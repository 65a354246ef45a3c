// tcgen05 operations in flight (async/engine.h).
#pragma once

#include <algorithm>
#include <vector>

#include "core/lanes.h"
#include "machine/cluster.h"
#include "machine/launch.h"
#include "machine/mbarrier.h"
#include "tensor/units.h"

namespace emu {

// A strict run's judge is told whose accesses to tensor memory these are.
class OrderScope {
 public:
  OrderScope(Cluster& cluster, const std::shared_ptr<TensorAccess>& access) : order_(cluster.tensor_order.get()) {
    if (order_) order_->begin(access);
  }
  ~OrderScope() {
    if (order_) order_->end();
  }

 private:
  TensorOrder* const order_;
};
// The access that the running warp issues now; null unless the run is strict.
inline std::shared_ptr<TensorAccess> ordered(Cluster& cluster, const char* what, uint32_t line) {
  return cluster.tensor_order ? cluster.tensor_order->issue(what, static_cast<int>(line), cluster.judge->running()) : nullptr;
}

class TensorLoad final : public Operation {
 public:
  TensorLoad(const TmemAccess& access, Warp& warp, const std::vector<Slot>& slots) : access_(access), warp_(warp), slots_(slots) {}
  std::shared_ptr<TensorAccess> order;
  OperationKind kind() const override { return OperationKind::kTensorLoad; }
  OperationNote note() const override { return {{}, access_.address, slots_.size() * 128}; }
  bool step(Cluster& cluster) override {
    const OrderScope scope(cluster, order);
    uint32_t unused[kLanes];
    uint32_t* registers[256];
    for (size_t i = 0; i < slots_.size(); ++i) registers[i] = slots_[i] == kNoSlot ? unused : warp_.words(slots_[i]);
    uint32_t unwritten[256];
    if (!tmem_load(access_, warp_.cta.tensor_memory(), registers, unwritten))
      for (size_t i = 0; i < slots_.size(); ++i)
        if (unwritten[i]) warp_.taint.mark(slots_[i], 32, unwritten[i], {"tensor memory", access_.address, static_cast<uint32_t>(line)});
    warp_.release(shared_from_this());
    return true;
  }

 private:
  const TmemAccess access_;
  Warp& warp_;
  const std::vector<Slot>& slots_;
};

class TensorStore final : public Operation {
 public:
  TensorStore(const TmemAccess& access, TensorMemory& tensor) : access_(access), tensor_(tensor) {}
  std::shared_ptr<TensorAccess> order;
  std::vector<Lanes32> values;
  OperationPtr previous;  // stores of a warp happen in order
  bool ready() const override { return !previous || previous->finished; }
  OperationKind kind() const override { return OperationKind::kTensorStore; }
  OperationNote note() const override { return {{}, access_.address, values.size() * 128}; }
  bool step(Cluster& cluster) override {
    const OrderScope scope(cluster, order);
    const uint32_t* registers[256];
    for (size_t i = 0; i < values.size(); ++i) registers[i] = values[i].lane;
    tmem_store(access_, tensor_, registers);
    previous.reset();
    cluster.event();
    return true;
  }

 private:
  const TmemAccess access_;
  TensorMemory& tensor_;
};

class TensorMma final : public Operation {
 public:
  Tcgen05Mma mma{};
  std::shared_ptr<TensorAccess> order;
  uint32_t cta = 0;  // that issues it
  // M and N of the instruction descriptor; K is 32 bytes.
  uint64_t m() const { return (mma.instruction_descriptor >> 24 & 0x1f) * 16; }
  uint64_t n() const { return (mma.instruction_descriptor >> 17 & 0x3f) * 8; }
  uint64_t k() const { return mma.kind == MmaKind::kTf32 ? 8 : mma.kind == MmaKind::kF16 ? 16 : 32; }
  Span due(Timing& timing) const override {
    const uint64_t shared_bytes = ((mma.a_in_tensor_memory ? 0 : m()) + n()) * 32 / mma.cta_group;
    return timing.tensor_done(cta, mma.cta_group, 2 * m() * n() * k(), shared_bytes);
  }
  OperationKind kind() const override { return OperationKind::kMma; }
  OperationNote note() const override {
    const std::string shape = "m" + std::to_string(m()) + "n" + std::to_string(n()) + "k" + std::to_string(k());
    return {shape + (mma.a_in_tensor_memory ? ", A in tensor memory" : ""), mma.d, 2 * m() * n() * k()};
  }
  bool step(Cluster& cluster) override {
    const OrderScope scope(cluster, order);
    const MmaWork work = tcgen05_mma(mma);
    cluster.traffic.tensor_flops += 2ull * work.m * work.n * work.k;
    ++cluster.traffic.mma_shapes["tcgen05.cta_group::" + std::to_string(mma.cta_group) + ".m" + std::to_string(work.m) + "n" +
                                 std::to_string(work.n) + "k" + std::to_string(work.k)];
    // Descriptors without their start addresses; A in tensor memory has none.
    constexpr uint64_t kNoAddress = ~uint64_t{0x3fff};
    cluster.traffic.forms.emplace(FormKind::kTcgen05Mma, mma.instruction_descriptor | uint64_t{mma.cta_group} << 32,
                                  mma.a_in_tensor_memory ? 0 : mma.a & kNoAddress, mma.b & kNoAddress);
    cluster.event();
    return true;
  }
};

class TensorCopy final : public Operation {
 public:
  Tcgen05Copy copy{};
  std::vector<Cta*> ctas;
  std::shared_ptr<TensorAccess> order;
  OperationKind kind() const override { return OperationKind::kTensorCopy; }
  OperationNote note() const override { return {{}, copy.address, 0}; }
  bool step(Cluster& cluster) override {
    const OrderScope scope(cluster, order);
    for (Cta* cta : ctas) tcgen05_cp(copy, cta->shared, cta->tensor_memory());
    cluster.event();
    return true;
  }
};

class TensorCommit final : public Operation {
 public:
  std::vector<uint32_t> barriers;
  uint32_t cta = 0;
  Span due(Timing& timing) const override { return {timing.now, timing.tensor_idle(cta)}; }
  OperationKind kind() const override { return OperationKind::kCommit; }
  bool reports_to(uint32_t barrier) const override { return std::find(barriers.begin(), barriers.end(), barrier) != barriers.end(); }
  OperationNote note() const override { return {{}, barriers[0], barriers.size()}; }
  bool step(Cluster& cluster) override {
    for (uint32_t address : barriers) {
      cluster.judge->check_init(address);
      mbarrier::arrive(cluster, address, 1);
    }
    return true;
  }
};

}  // namespace emu
