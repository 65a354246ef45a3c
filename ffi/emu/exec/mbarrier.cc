// mbarrier instructions.
#include "machine/mbarrier.h"

#include <bit>

#include "exec/address.h"

namespace emu {
namespace {

struct BarrierForm : Extra {
  AddressForm address;
  bool cluster = false;   // .shared::cluster: may be in another CTA
  bool generic = false;
  bool parity = false, polls = false, drop = false;
  Slot state = kNoSlot;   // written by arrive, read by test_wait
  Slot value = kNoSlot;   // count, bytes, parity
};

uint32_t barrier_address(Warp& w, const BarrierForm& f, int lane) {
  const uint64_t wide = f.address.of(w, lane);
  if (f.generic && !in_shared_window(wide)) throw fail("mbarrier: generic address 0x%" PRIx64 " is not in shared memory", wide);
  const uint32_t address = static_cast<uint32_t>(wide);
  if (!f.cluster && address >> 24 != w.cta.rank)
    throw fail("mbarrier: 0x%08x is in CTA %u of the cluster, this is CTA %u", address, address >> 24, w.cta.rank);
  return address;
}

enum Act { kInit, kInvalidate, kArrive, kArriveExpect, kExpect, kComplete };
template <Act kAct>
Status execute_act(Warp& w, const Inst& in, Mask m) {
  const BarrierForm& f = static_cast<const BarrierForm&>(*in.extra);
  Cluster& cluster = w.cta.cluster;
  for (Mask rest = m; rest; rest &= rest - 1) {
    const int lane = first_lane(rest);
    const uint32_t address = barrier_address(w, f, lane);
    const uint32_t value = f.value == kNoSlot ? 1 : w.words(f.value)[lane];
    if (cluster.trace && rest == m && (kAct == kArrive || kAct == kArriveExpect)) cluster.trace->arrived(in.line, "mbarrier", address);
    uint64_t state = 0;
    if (kAct != kInit && address >> 24 != w.cta.rank) cluster.judge->check_init(address);
    switch (kAct) {
      case kInit: mbarrier::init(cluster, address, value); break;
      case kInvalidate: mbarrier::invalidate(cluster, address); break;
      case kArrive: state = mbarrier::arrive(cluster, address, value, f.drop); break;
      case kArriveExpect:
        mbarrier::expect_tx(cluster, address, value);
        state = mbarrier::arrive(cluster, address, 1, f.drop);
        break;
      case kExpect: mbarrier::expect_tx(cluster, address, value); break;
      case kComplete: mbarrier::complete_tx(cluster, address, value); break;
    }
    if (f.state != kNoSlot) w.pairs(f.state)[lane] = state;
  }
  return Status::kNext;
}

// The phase with the given parity (or that of the given state) is complete when it is no longer the barrier's own.
Status execute_wait(Warp& w, const Inst& in, Mask m) {
  const BarrierForm& f = static_cast<const BarrierForm&>(*in.extra);
  Cluster& cluster = w.cta.cluster;
  const bool gave_up = w.current().gave_up;
  w.current().gave_up = false;
  ProxyOrder* const proxies = cluster.judge->proxies();
  Mask done = 0;
  uint32_t waited = 0;  // address of an mbarrier; none is there
  Wait wait;
  for (Mask rest = m; rest; rest &= rest - 1) {
    const int lane = first_lane(rest);
    const uint32_t address = barrier_address(w, f, lane);
    const uint32_t parity = f.parity ? w.words(f.value)[lane] & 1 : mbarrier::phase_of_state(w.pairs(f.state)[lane]);
    if (mbarrier::phase(cluster, address) != parity) {
      done |= 1u << lane;
      if (proxies && address != waited) proxies->wait(waited = address);
    } else if (!wait.done) {
      wait.done = [](Warp& warp, const Wait& self) {
        return mbarrier::phase(warp.cta.cluster, static_cast<uint32_t>(self.a)) != self.b;
      };
      wait.what = "mbarrier, phase";
      wait.a = address;
      wait.b = parity;
      wait.polls = true;
    }
  }
  if (f.polls && done == 0 && !gave_up) return w.block(std::move(wait));
  set_predicate(w, in.op[0], m, done);
  return Status::kNext;
}

void decode_mbarrier(Builder& b) {
  const int which = b.take_one({"init", "inval", "arrive", "arrive_drop", "expect_tx", "complete_tx", "test_wait", "try_wait"});
  if (which < 0) b.refuse("the form is not known here");
  BarrierForm& f = *b.make_extra<BarrierForm>();
  const bool expect = (which == 2 || which == 3) && b.take("expect_tx");
  f.drop = which == 3;
  f.parity = which >= 6 && b.take("parity");
  f.polls = which == 7;
  b.take_one({"release", "acquire", "relaxed"});
  b.take_one({"cta", "cluster"});
  const bool own = b.take("shared") || b.take("shared::cta");
  f.cluster = b.take("shared::cluster");
  f.generic = !own && !f.cluster;
  if (b.take_type() != Type::kB64) b.refuse("the type is not known here");
  b.inst.unit = Unit::kBarrier;
  switch (which) {
    case 0:
    case 4:
    case 5:
      b.expect_operands(2, 2);
      f.address = make_address(b, b.operand(0));
      f.value = b.source(1, Type::kB32);
      b.inst.execute = which == 0 ? execute_act<kInit> : which == 4 ? execute_act<kExpect> : execute_act<kComplete>;
      break;
    case 1:
      b.expect_operands(1, 1);
      f.address = make_address(b, b.operand(0));
      b.inst.execute = execute_act<kInvalidate>;
      break;
    case 2:
    case 3: {
      const bool returns = b.operand(0).kind != ptx::Operand::kAddress;  // remote arrivals return nothing
      b.expect_operands(1 + returns + expect, 2 + returns);
      f.address = make_address(b, b.operand(returns));
      if (b.operand_count() > size_t{1} + returns) f.value = b.source(1 + returns, Type::kB32);
      if (returns) f.state = b.destination(b.operand(0), 64);
      b.inst.execute = expect ? execute_act<kArriveExpect> : execute_act<kArrive>;
      break;
    }
    default:
      b.expect_operands(3, f.polls ? 4 : 3);
      f.address = make_address(b, b.operand(1));
      if (f.parity) f.value = b.source(2, Type::kB32);
      else f.state = b.source(2, Type::kB64);
      if (b.operand_count() == 4) b.source(3, Type::kB32);
      b.inst.op[0] = b.destination(0, Type::kPred);
      b.inst.execute = execute_wait;
  }
  b.finish_modifiers();
}

}  // namespace

void register_mbarrier(DecodeTable& t) { t["mbarrier"] = decode_mbarrier; }

}  // namespace emu
