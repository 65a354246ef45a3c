// Fences. Memory is sequentially consistent here; the judge keeps account of the proxies.
#include "exec/lane_ops.h"
#include "machine/cluster.h"

namespace emu {
namespace {

Status execute_proxy_fence(Warp& w, const Inst&, Mask) {
  w.cta.cluster.judge->fence();
  return Status::kNext;
}

Status execute_global_proxy_fence(Warp& w, const Inst&, Mask) {
  if (ClusterOrder* order = w.cta.cluster.order.get()) order->fence_async();
  return Status::kNext;
}

Status execute_all_proxy_fence(Warp& w, const Inst& in, Mask m) {
  execute_global_proxy_fence(w, in, m);
  return execute_proxy_fence(w, in, m);
}

Status execute_init_fence(Warp& w, const Inst&, Mask) {
  w.cta.cluster.judge->fence_inits();
  return Status::kNext;
}

Status execute_wide_fence(Warp& w, const Inst& in, Mask m) {  // of scope gpu or sys
  if (ClusterOrder* order = w.cta.cluster.order.get()) order->fence();
  return execute_init_fence(w, in, m);
}

void decode_fence(Builder& b) {
  b.inst.unit = Unit::kFence;
  b.inst.execute = execute_nothing;
  if (b.at->opcode == "membar") {
    const int scope = b.take_one({"cta", "gl", "sys"});
    if (scope < 0) b.refuse("the form is not known here");
    if (scope > 0) b.inst.execute = execute_wide_fence;
    b.expect_operands(0, 0);
    return b.finish_modifiers();
  }
  if (b.take("mbarrier_init")) {
    if (!b.take("release") || !b.take("cluster")) b.refuse("the form is not known here");
    b.inst.execute = execute_init_fence;
  } else if (b.take("proxy")) {
    const int kind = b.take_one({"async", "alias", "async::generic", "tensormap::generic"});
    if (kind < 0) b.refuse("the proxy is not known");
    const int space = b.take_one({"global", "shared::cta", "shared::cluster"});
    if (kind == 0) b.inst.execute = space == 0 ? execute_global_proxy_fence : space < 0 ? execute_all_proxy_fence : execute_proxy_fence;
    if (kind >= 2) {
      b.take_one({"acquire", "release"});
      b.take_one({"sync_restrict::shared::cta", "sync_restrict::shared::cluster"});
      b.take_one({"cta", "cluster", "gpu", "sys"});
    }
  } else {
    b.take_one({"sc", "acq_rel", "acquire", "release"});
    b.take_one({"sync_restrict::shared::cta", "sync_restrict::shared::cluster"});
    const int scope = b.take_one({"cta", "cluster", "gpu", "sys"});
    if (scope < 0) b.refuse("no scope");
    if (scope > 0) b.inst.execute = scope > 1 ? execute_wide_fence : execute_init_fence;
  }
  b.expect_operands(0, 2);
  if (b.operand_count() == 2) {  // fence.proxy.tensormap::generic.acquire [address], 128
    b.address(b.operand(0));
    if (b.immediate(1) != 128) b.refuse("the size must be 128");
  } else {
    b.expect_operands(0, 0);
  }
  b.finish_modifiers();
}

}  // namespace

void register_fence(DecodeTable& t) {
  t["fence"] = decode_fence;
  t["membar"] = decode_fence;
}

}  // namespace emu
