// clusterlaunchcontrol: a running cluster takes over the work of one that has not begun.
#include <cstring>

#include "exec/address.h"
#include "machine/mbarrier.h"

namespace emu {
namespace {

// The response is opaque: here x, y, z of the first CTA and 1, or zeros.
class TryCancel final : public Operation {
 public:
  uint32_t response = 0, barrier = 0;
  bool multicast = false;
  OperationNote note() const override { return {"clusterlaunchcontrol", barrier, 0}; }
  // The answer comes from far away: modelled as a load from global memory.
  Span due(Timing& timing) const override { return {timing.now, timing.global_answer()}; }
  bool step(Cluster& cluster) override {
    if (!in_turn_) {
      in_turn_ = true;
      cluster.turn_operations.push_back({shared_from_this(), cluster.clock(), true});
      cluster.stopped = cluster.timing != nullptr;
      return true;
    }
    Dim3 first{0, 0, 0};
    const bool cancelled = cluster.launch.cancel_cluster(&first);
    const uint32_t words[4] = {first.x, first.y, first.z, cancelled};
    for (const auto& cta : cluster.ctas) {
      if (!multicast && cta->rank != response >> 24) continue;
      std::memcpy(cta->shared.write(Cluster::offset_of(response), 16, Proxy::kAsync), words, 16);
      mbarrier::complete_tx(cluster, Cluster::offset_of(barrier) | cta->rank << 24, 16);
    }
    return true;
  }

 private:
  bool in_turn_ = false;
};

struct CancelForm : Extra {
  AddressForm response, barrier;
  bool multicast = false;
};
Status execute_try_cancel(Warp& w, const Inst& in, Mask m) {
  const CancelForm& f = static_cast<const CancelForm&>(*in.extra);
  Cluster& cluster = w.cta.cluster;
  for (Mask rest = m; rest; rest &= rest - 1) {
    auto operation = std::make_shared<TryCancel>();
    operation->response = static_cast<uint32_t>(f.response.of(w, first_lane(rest)));
    operation->barrier = static_cast<uint32_t>(f.barrier.of(w, first_lane(rest)));
    operation->multicast = f.multicast;
    operation->line = static_cast<int>(in.line);
    check_aligned(operation->response, 16, "shared");
    cluster.engine.issue(cluster, std::move(operation), -1, cluster.clock());
  }
  return Status::kNext;
}

// A 128-bit register is two arrays of 64-bit words: (x, y) and (z, flag).
Status execute_is_canceled(Warp& w, const Inst& in, Mask m) {
  const uint64_t* high = w.pairs(in.op[1]) + kLanes;
  set_predicate(w, in.op[0], m, lanes_where([&](int i) { return high[i] >> 32 != 0; }));
  return Status::kNext;
}
Status execute_first_cta(Warp& w, const Inst& in, Mask m) {
  for (int k = 0; k < 4; ++k) {
    if (in.op[k] == kNoSlot) continue;
    const int word = in.immediate < 0 ? k : static_cast<int>(in.immediate);
    const uint64_t* half = w.pairs(in.op[5]) + (word / 2) * kLanes;
    for (int i = 0; i < kLanes; ++i)
      if (m >> i & 1) w.words(in.op[k])[i] = word == 3 ? 0 : static_cast<uint32_t>(half[i] >> (32 * (word % 2)));
  }
  return Status::kNext;
}

void decode_cluster_launch(Builder& b) {
  b.inst.unit = Unit::kOther;
  if (b.take("try_cancel")) {
    CancelForm& f = *b.make_extra<CancelForm>();
    if (!b.take("async") || !b.take("mbarrier::complete_tx::bytes")) b.refuse("the form is not known here");
    b.take("shared::cta");
    f.multicast = b.take("multicast::cluster::all");
    if (b.take_type() != Type::kB128) b.refuse("the type is not known here");
    b.expect_operands(2, 2);
    f.response = make_address(b, b.operand(0));
    f.barrier = make_address(b, b.operand(1));
    b.inst.execute = execute_try_cancel;
    b.program.operations.add(OperationKind::kOther);
    return b.finish_modifiers();
  }
  if (!b.take("query_cancel")) b.refuse("the form is not known here");
  if (b.take("is_canceled")) {
    b.take("pred");
    if (b.take_type() != Type::kB128) b.refuse("the type is not known here");
    b.expect_operands(2, 2);
    b.inst.op[1] = b.source(b.operand(1), 128);
    b.inst.op[0] = b.destination(0, Type::kPred);
    b.inst.execute = execute_is_canceled;
    return b.finish_modifiers();
  }
  const int which = b.take_one({"get_first_ctaid::x", "get_first_ctaid::y", "get_first_ctaid::z", "get_first_ctaid"});
  if (which < 0) b.refuse("the form is not known here");
  if (which == 3) b.take("v4");
  if (b.take_type() != Type::kB32 || b.take_type() != Type::kB128) b.refuse("the type is not known here");
  b.expect_operands(2, 2);
  b.inst.op[5] = b.source(b.operand(1), 128);
  const std::vector<Slot> d = b.destinations(b.operand(0), 32);
  if (d.size() != (which == 3 ? 4u : 1u)) b.refuse("the vector has another length");
  for (size_t i = 0; i < d.size(); ++i) b.inst.op[i] = d[i];
  b.inst.immediate = which == 3 ? -1 : which;
  b.inst.execute = execute_first_cta;
  b.finish_modifiers();
}

}  // namespace

void register_cluster_launch(DecodeTable& t) { t["clusterlaunchcontrol"] = decode_cluster_launch; }

}  // namespace emu
