// Branches, exits, barriers of warps, CTAs and clusters, register budgets, dependent launches.
#include <bit>

#include "exec/lane_ops.h"
#include "machine/cluster.h"
#include "machine/launch.h"

namespace emu {
namespace {

Status execute_bra(Warp& w, const Inst& in, Mask m) { return w.branch(in, m); }

void decode_bra(Builder& b) {
  b.take("uni");
  b.expect_operands(1, 1);
  const ptx::Operand& o = b.operand(0);
  const auto label = b.kernel.labels.find(o.name);
  if (o.kind != ptx::Operand::kName || label == b.kernel.labels.end()) b.refuse("unknown label " + o.name);
  b.inst.target = static_cast<uint32_t>(label->second);
  if (b.inst.target >= b.kernel.instructions.size()) b.refuse("the label stands at the kernel's end");
  b.inst.execute = execute_bra;
  b.inst.unit = Unit::kControl;
  b.finish_modifiers();
}

Status execute_exit(Warp& w, const Inst&, Mask m) {
  w.cta.cluster.threads_exited(w.cta, static_cast<uint32_t>(std::popcount(m)));
  return w.exit_lanes(m);
}
void decode_exit(Builder& b) {
  b.take("uni");
  b.expect_operands(0, 0);
  b.inst.execute = execute_exit;
  b.inst.unit = Unit::kControl;
  b.finish_modifiers();
}

Status execute_trap(Warp&, const Inst&, Mask) { throw fail("the kernel executed a trap"); }
void decode_trap(Builder& b) {
  b.expect_operands(0, 0);
  b.inst.execute = execute_trap;
  b.inst.unit = Unit::kControl;
  b.finish_modifiers();
}
void decode_nanosleep(Builder& b) {
  if (b.take_type() != Type::kU32) b.refuse("the type is not known here");
  b.expect_operands(1, 1);
  b.inst.op[1] = b.source(0, Type::kU32);
  b.inst.execute = execute_nothing;
  b.inst.unit = Unit::kControl;
  b.finish_modifiers();
}

// -- barriers of a CTA ------------------------------------------------------------------------------------------------------

bool named_done(Warp& w, const Wait& wait) { return w.cta.named[wait.a].generation != wait.b; }

// op: 1 barrier, 2 threads (kNoSlot: all of the CTA). immediate: 1 sync, 0 arrive.
Status execute_bar(Warp& w, const Inst& in, Mask m) {
  Cta& cta = w.cta;
  const int lane = first_lane(m);
  const uint32_t id = w.words(in.op[1])[lane];
  if (id >= 16) throw fail("barrier %u, allowed 0 to 15", id);
  const Dim3 block = cta.cluster.launch.config.block;
  const uint32_t all = (block.x * block.y * block.z + kLanes - 1) / kLanes * kLanes;
  const uint32_t expected = in.op[2] == kNoSlot ? all : w.words(in.op[2])[lane];
  if (expected == 0 || expected % kLanes || expected > all)
    throw fail("barrier %u: %u threads, allowed are multiples of 32 up to %u", id, expected, all);
  NamedBarrier& barrier = cta.named[id];
  if (barrier.arrived && barrier.expected != expected)
    throw fail("barrier %u: %u threads expected here, %u by those that arrived before", id, expected, barrier.expected);
  barrier.expected = expected;
  // A warp arrives as a whole, lanes that are gone included.
  barrier.arrived += m == w.live() ? kLanes : static_cast<uint32_t>(std::popcount(m));
  if (barrier.arrived > expected) throw fail("barrier %u: %u threads arrived, %u expected", id, barrier.arrived, expected);
  cta.cluster.event();
  if (cta.cluster.trace) cta.cluster.trace->arrived(in.line, "named barrier", id);
  ProxyOrder* const proxies = cta.cluster.judge->proxies();
  if (proxies) proxies->arrive(ProxyOrder::named(cta.rank, id), in.immediate);
  if (barrier.arrived == expected) {
    barrier.arrived = 0;
    ++barrier.generation;
    if (proxies) proxies->complete(ProxyOrder::named(cta.rank, id));
    return Status::kNext;
  }
  if (!in.immediate) return Status::kNext;
  Wait wait;
  wait.done = named_done;
  wait.what = "named barrier, generation";
  wait.a = id;
  wait.b = barrier.generation;
  return w.suspend(std::move(wait));
}

Status execute_warp_sync(Warp& w, const Inst& in, Mask m) {
  const Mask members = w.words(in.op[1])[first_lane(m)];
  if (m & ~members) throw fail("lanes 0x%08x execute this, but the member mask is 0x%08x", m, members);
  w.warp_sync_arrived |= m;
  if ((members & w.live() & ~w.warp_sync_arrived) == 0) {
    w.warp_sync_arrived &= ~members;
    ++w.warp_sync_generation;
    return Status::kNext;
  }
  Wait wait;
  wait.done = [](Warp& warp, const Wait& self) {
    if (warp.warp_sync_generation != self.a) return true;
    if (self.b & warp.live() & ~warp.warp_sync_arrived) return false;
    warp.warp_sync_arrived &= ~static_cast<Mask>(self.b);  // the lanes missing have exited
    ++warp.warp_sync_generation;
    return true;
  };
  wait.what = "bar.warp.sync, generation and members";
  wait.a = w.warp_sync_generation;
  wait.b = members;
  return w.suspend(std::move(wait));
}

void decode_cluster_barrier(Builder&);

void decode_bar(Builder& b) {
  if (b.take("cluster")) return decode_cluster_barrier(b);
  b.inst.unit = Unit::kBarrier;
  if (b.take("warp")) {
    if (!b.take("sync")) b.refuse("the form is not known here");
    b.expect_operands(1, 1);
    b.inst.op[1] = b.source(0, Type::kB32);
    b.inst.execute = execute_warp_sync;
    return b.finish_modifiers();
  }
  b.take("cta");
  const bool aligned = b.take("aligned") || b.at->opcode == "bar";
  const int arrive = b.take_one({"sync", "arrive"});
  if (arrive < 0) b.refuse("the form is not known here");
  b.expect_operands(arrive ? 2 : 1, 2);
  b.inst.op[1] = b.source(0, Type::kB32);
  if (b.operand_count() == 2) b.inst.op[2] = b.source(1, Type::kB32);
  b.inst.immediate = !arrive;
  b.inst.aligned = aligned;
  b.inst.execute = execute_bar;
  b.finish_modifiers();
}

// -- barrier of a cluster ----------------------------------------------------------------------------------------------------

Status execute_cluster_arrive(Warp& w, const Inst&, Mask m) {
  if (w.cluster_arrived) throw fail("barrier.cluster.arrive twice without a wait");
  w.cluster_arrived = true;
  w.cluster_barrier_phase = static_cast<uint32_t>(w.cta.cluster.barrier_generation);
  w.cta.cluster.cluster_arrive(static_cast<uint32_t>(std::popcount(m)));
  return Status::kNext;
}
Status execute_cluster_wait(Warp& w, const Inst&, Mask) {
  if (!w.cluster_arrived) throw fail("barrier.cluster.wait without an arrive");
  w.cluster_arrived = false;
  Wait wait;
  wait.done = [](Warp& warp, const Wait& self) { return static_cast<uint32_t>(warp.cta.cluster.barrier_generation) != self.a; };
  wait.what = "the cluster's barrier, generation";
  wait.a = w.cluster_barrier_phase;
  return wait.done(w, wait) ? Status::kNext : w.suspend(std::move(wait));
}
void decode_cluster_barrier(Builder& b) {
  const int wait = b.take_one({"arrive", "wait"});
  b.take_one({"release", "relaxed", "acquire"});
  b.take("aligned");
  if (wait < 0) b.refuse("the form is not known here");
  b.expect_operands(0, 0);
  b.inst.aligned = true;
  b.inst.execute = wait ? execute_cluster_wait : execute_cluster_arrive;
  b.inst.unit = Unit::kBarrier;
  b.finish_modifiers();
}

// -- registers -----------------------------------------------------------------------------------------------------------------

// Each warp gives registers back or takes them from what its CTA has; an increase waits until enough are free.
Status execute_setmaxnreg(Warp& w, const Inst& in, Mask) {
  const uint32_t wanted = static_cast<uint32_t>(in.immediate);
  Cta& cta = w.cta;
  const bool increase = in.target;
  if (increase && !w.register_budget_set && wanted < w.register_budget) {
    cta.registers_free += w.register_budget - wanted;  // ptxas must have chosen fewer than the equal share
    w.register_budget = wanted;
  }
  w.register_budget_set = true;
  if (increase ? wanted < w.register_budget : wanted > w.register_budget)
    throw fail("setmaxnreg.%s to %u, the warp has %u registers", increase ? "inc" : "dec", wanted, w.register_budget);
  if (!increase) {
    cta.registers_free += w.register_budget - wanted;
    w.register_budget = wanted;
    cta.cluster.event();
    return Status::kNext;
  }
  const uint32_t more = wanted - w.register_budget;
  if (cta.registers_free < more) {
    Wait wait;
    wait.done = [](Warp& warp, const Wait& self) { return warp.cta.registers_free >= self.a; };
    wait.what = "registers (more of them)";
    wait.a = more;
    return w.block(std::move(wait));
  }
  cta.registers_free -= more;
  w.register_budget = wanted;
  return Status::kNext;
}
void decode_setmaxnreg(Builder& b) {
  const int increase = b.take_one({"dec", "inc"});
  if (increase < 0 || !b.take("sync") || !b.take("aligned") || b.take_type() != Type::kU32) b.refuse("the form is not known here");
  b.expect_operands(1, 1);
  const uint64_t count = b.immediate(0);
  if (count < 24 || count > 256 || count % 8) b.refuse(std::to_string(count) + " registers, allowed are multiples of 8 from 24 to 256");
  b.inst.immediate = static_cast<int64_t>(count);
  b.inst.target = static_cast<uint32_t>(increase);
  b.inst.aligned = true;
  b.inst.execute = execute_setmaxnreg;
  b.inst.unit = Unit::kControl;
  b.finish_modifiers();
}

// Kernels of a module run one after another here, so what an earlier one wrote is there already.
void decode_griddepcontrol(Builder& b) {
  if (b.take_one({"launch_dependents", "wait"}) < 0) b.refuse("the form is not known here");
  b.expect_operands(0, 0);
  b.inst.execute = execute_nothing;
  b.inst.unit = Unit::kControl;
  b.finish_modifiers();
}

}  // namespace

void register_control(DecodeTable& t) {
  t["bra"] = decode_bra;
  t["ret"] = decode_exit;
  t["exit"] = decode_exit;
  t["trap"] = decode_trap;
  t["nanosleep"] = decode_nanosleep;
  t["bar"] = decode_bar;
  t["barrier"] = decode_bar;
  t["setmaxnreg"] = decode_setmaxnreg;
  t["griddepcontrol"] = decode_griddepcontrol;
}

}  // namespace emu
