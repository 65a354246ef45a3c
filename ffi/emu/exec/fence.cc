// Fences. Memory is sequentially consistent here; the judge keeps account of the proxies.
#include "exec/lane_ops.h"
#include "machine/cluster.h"

namespace emu {
namespace {

Status execute_proxy_fence(Warp& w, const Inst&, Mask) {
  w.cta.cluster.judge->fence();
  return Status::kNext;
}

Status execute_init_fence(Warp& w, const Inst&, Mask) {
  w.cta.cluster.judge->fence_inits();
  return Status::kNext;
}

void decode_fence(Builder& b) {
  b.inst.unit = Unit::kFence;
  b.inst.execute = execute_nothing;
  if (b.at->opcode == "membar") {
    if (b.take_one({"cta", "gl", "sys"}) < 0) b.refuse("the form is not known here");
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
    if (kind == 0 && space != 0) b.inst.execute = execute_proxy_fence;
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
    if (scope > 0) b.inst.execute = execute_init_fence;
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
