// tcgen05: tensor memory, its loads and stores, and the tensor cores' operations.
#include <cstring>

#include "exec/address.h"
#include "exec/tcgen05_ops.h"

namespace emu {
namespace {

Cta& peer(Warp& w, uint32_t rank) {
  Cluster& cluster = w.cta.cluster;
  if (rank >= cluster.ctas.size()) throw fail("cta_group::2 in a cluster of %zu CTAs", cluster.ctas.size());
  return *cluster.ctas[rank];
}

// -- allocation -----------------------------------------------------------------------------------------------------------------

struct AllocForm : Extra {
  bool pair = false;  // cta_group::2
  AddressForm address;
  Slot columns = kNoSlot, tensor = kNoSlot;
};

Status execute_alloc(Warp& w, const Inst& in, Mask m) {
  const AllocForm& f = static_cast<const AllocForm&>(*in.extra);
  const int lane = first_lane(m);
  uint32_t address = 0;
  if (!w.cta.tensor_memory().allocate(w.words(f.columns)[lane], &address)) {
    Wait wait;
    wait.what = "free columns of tensor memory";
    wait.a = w.cta.tensor_memory().allocated_columns();
    wait.done = [](Warp& warp, const Wait& self) { return warp.cta.tensor_memory().allocated_columns() < self.a; };
    return w.block(std::move(wait));
  }
  const uint32_t shared = static_cast<uint32_t>(f.address.of(w, lane));
  check_aligned(shared, 4, "shared");
  std::memcpy(shared_write(w, shared, 4, false), &address, 4);
  w.cta.cluster.event();
  if (!f.pair) return Status::kNext;
  // A pair allocates together: the first warp goes on when the peer's has come too.
  Wait wait;
  wait.what = "the peer CTA's tcgen05.alloc, number";
  wait.a = ++w.cta.pair_allocations;
  wait.done = [](Warp& warp, const Wait& self) { return peer(warp, warp.cta.rank ^ 1).pair_allocations >= self.a; };
  return wait.done(w, wait) ? Status::kNext : w.suspend(std::move(wait));
}
Status execute_dealloc(Warp& w, const Inst& in, Mask m) {
  const AllocForm& f = static_cast<const AllocForm&>(*in.extra);
  const int lane = first_lane(m);
  w.cta.tensor_memory().release(w.words(f.tensor)[lane], w.words(f.columns)[lane]);
  w.cta.cluster.event();
  return Status::kNext;
}
Status execute_relinquish(Warp& w, const Inst&, Mask) {
  w.cta.tensor_memory().relinquish();
  return Status::kNext;
}

void decode_allocation(Builder& b, int which) {  // 0 alloc, 1 dealloc, 2 relinquish
  const int group = b.take_one({"cta_group::1", "cta_group::2"});
  if (group < 0 || !b.take("sync") || !b.take("aligned")) b.refuse("the form is not known here");
  AllocForm& f = *b.make_extra<AllocForm>();
  f.pair = group == 1;
  b.inst.aligned = true;
  b.inst.unit = Unit::kOther;
  if (which == 2) {
    b.expect_operands(0, 0);
    b.inst.execute = execute_relinquish;
    return b.finish_modifiers();
  }
  if (which == 0) b.take("shared::cta");
  if (b.take_type() != Type::kB32) b.refuse("the type is not known here");
  b.expect_operands(2, 2);
  if (which == 0) f.address = make_address(b, b.operand(0));
  else f.tensor = b.source(0, Type::kB32);
  f.columns = b.source(1, Type::kB32);
  b.inst.execute = which == 0 ? execute_alloc : execute_dealloc;
  b.finish_modifiers();
}

// -- ld and st ----------------------------------------------------------------------------------------------------------------------

Timing::WarpClock& clock_of(Warp& w) { return w.cta.cluster.timing->warp(w.cta.rank, w.index); }

struct AccessInst : Extra {
  TmemAccess access{};
  AddressForm address;
  std::vector<Slot> slots;
};

// Timed runs: the warp's path to tensor memory is busy with the access.
Span occupy(Warp& w, const AccessInst& f, const Operation& operation) {
  Cluster& cluster = w.cta.cluster;
  const Span span = cluster.timing->tmem_done(w.cta.rank, w.index, static_cast<uint32_t>(f.slots.size()));
  if (cluster.trace) cluster.trace->occupied(operation, span);
  return span;
}

template <bool kStore>
Status execute_access(Warp& w, const Inst& in, Mask m) {
  const AccessInst& f = static_cast<const AccessInst&>(*in.extra);
  Cluster& cluster = w.cta.cluster;
  TmemAccess access = f.access;
  access.warp = static_cast<uint8_t>(w.index % 4);
  access.address = static_cast<uint32_t>(f.address.of(w, first_lane(m)));
  const uint64_t bytes = f.slots.size() * 128;
  if (kStore) {
    auto operation = std::make_shared<TensorStore>(access, w.cta.tensor_memory());
    for (Slot slot : f.slots) {
      Lanes32 copy;
      std::memcpy(copy.lane, w.words(slot), sizeof copy.lane);
      operation->values.push_back(copy);
    }
    if (!w.tensor_stores.empty()) operation->previous = w.tensor_stores.back();
    operation->line = static_cast<int>(in.line);
    operation->order = ordered(cluster, "tcgen05.st", in.line);
    w.tensor_stores.push_back(operation);
    cluster.traffic.tensor_memory_written += bytes;
    cluster.engine.issue(cluster, operation, -1, cluster.clock());
    if (cluster.timing) clock_of(w).stores_done = occupy(w, f, *operation).end;
  } else {
    auto operation = std::make_shared<TensorLoad>(access, w, f.slots);
    operation->line = static_cast<int>(in.line);
    operation->order = ordered(cluster, "tcgen05.ld", in.line);
    w.hold(f.slots, operation);
    if (w.load_registers) w.load_registers->issue(in);
    w.tensor_loads.push_back(operation);
    cluster.traffic.tensor_memory_read += bytes;
    cluster.engine.issue(cluster, operation, -1, cluster.clock());
    if (cluster.timing) {
      Timing::WarpClock& clock = clock_of(w);
      clock.loads_done = occupy(w, f, *operation).end;
      for (Slot slot : f.slots)
        if (slot != kNoSlot) clock.ready[slot / 128] = clock.loads_done;
    }
  }
  std::erase_if(kStore ? w.tensor_stores : w.tensor_loads, [](const OperationPtr& o) { return o->finished; });
  cluster.event();
  return Status::kNext;
}

template <bool kStore>
void decode_access(Builder& b) {
  AccessInst& f = *b.make_extra<AccessInst>();
  if (!b.take("sync") || !b.take("aligned")) b.refuse("the form is not known here");
  const int shape = b.take_one({"32x32b", "16x64b", "16x128b", "16x256b", "16x32bx2"});
  const int repeat = b.take_one({"x1", "x2", "x4", "x8", "x16", "x32", "x64", "x128"});
  f.access.pack = b.take(kStore ? "unpack::16b" : "pack::16b");
  if (shape < 0 || repeat < 0 || b.take_type() != Type::kB32) b.refuse("the form is not known here");
  f.access.shape = static_cast<TmemShape>(shape);
  f.access.repeat = static_cast<uint8_t>(1u << repeat);
  const bool split = shape == kTmem16x32bx2;
  b.expect_operands(2 + split, 2 + split);
  const size_t address = kStore ? 0 : 1, data = kStore ? 1 + split : 0;
  f.address = make_address(b, b.operand(address));
  if (split) f.access.half_split_offset = static_cast<uint16_t>(b.immediate(kStore ? 1 : 2));
  f.slots = kStore ? b.sources(b.operand(data), 32) : b.destinations(b.operand(data), 32);
  if (static_cast<int>(f.slots.size()) != tmem_registers(f.access))
    b.refuse(std::to_string(f.slots.size()) + " registers, expected " + std::to_string(tmem_registers(f.access)));
  b.inst.aligned = true;
  b.inst.execute = execute_access<kStore>;
  b.inst.unit = kStore ? Unit::kTensorMemoryStore : Unit::kTensorMemoryLoad;
  b.program.operations.add(kStore ? OperationKind::kTensorStore : OperationKind::kTensorLoad);
  b.finish_modifiers();
}

template <bool kStore>
Status execute_wait(Warp& w, const Inst& in, Mask) {
  Wait wait;
  wait.what = kStore ? "tcgen05.st in flight" : "tcgen05.ld in flight";
  if (Cluster& cluster = w.cta.cluster; cluster.timing) {
    Timing::WarpClock& clock = clock_of(w);
    const uint64_t done = kStore ? clock.stores_done : clock.loads_done;
    if (cluster.trace && done > clock.time) cluster.trace->waited(in.line, wait.what, 0, 0, done);
    clock.time = std::max(clock.time, done);
  }
  wait.done = [](Warp& warp, const Wait&) {
    auto& list = kStore ? warp.tensor_stores : warp.tensor_loads;
    for (const OperationPtr& o : list)
      if (!o->finished) return false;
    list.clear();
    if (!kStore && warp.load_registers) warp.load_registers->wait();
    return true;
  };
  return wait.done(w, wait) ? Status::kNext : w.suspend(std::move(wait));
}
void decode_wait(Builder& b) {
  const int store = b.take_one({"wait::ld", "wait::st"});
  if (store < 0 || !b.take("sync") || !b.take("aligned")) b.refuse("the form is not known here");
  b.expect_operands(0, 0);
  b.inst.aligned = true;
  b.inst.execute = store ? execute_wait<true> : execute_wait<false>;
  b.inst.unit = Unit::kFence;
  b.finish_modifiers();
}

// -- the tensor cores ---------------------------------------------------------------------------------------------------------------

struct MmaForm : Extra {
  MmaKind kind = MmaKind::kF16;
  uint8_t group = 1;
  bool a_in_tensor_memory = false;
  AddressForm d, a_tensor;
  Slot a = kNoSlot, b = kNoSlot, descriptor = kNoSlot, accumulate = kNoSlot;
  bool accumulate_negated = false;
  std::vector<Slot> disable;
};

int queue_of(Warp& w, uint8_t group) {
  Cta& leader = group == 2 ? peer(w, w.cta.rank & ~1u) : w.cta;
  if (leader.tensor_queue < 0) leader.tensor_queue = w.cta.cluster.new_queue();
  return leader.tensor_queue;
}

int single_lane(Mask m, const char* what) {
  if (m & (m - 1)) throw fail("%s: %d threads of the warp issue it, one is allowed", what, std::popcount(m));
  return first_lane(m);
}

Status execute_mma(Warp& w, const Inst& in, Mask m) {
  const MmaForm& f = static_cast<const MmaForm&>(*in.extra);
  Cluster& cluster = w.cta.cluster;
  const int lane = single_lane(m, "tcgen05.mma");
  auto operation = std::make_shared<TensorMma>();
  Tcgen05Mma& mma = operation->mma;
  mma.kind = f.kind;
  mma.cta_group = f.group;
  mma.a_in_tensor_memory = f.a_in_tensor_memory;
  mma.accumulate = (w.predicate(f.accumulate) >> lane & 1) != f.accumulate_negated;
  mma.instruction_descriptor = w.words(f.descriptor)[lane];
  mma.a = f.a_in_tensor_memory ? f.a_tensor.of(w, lane) & 0xffffffffu : w.pairs(f.a)[lane];
  mma.b = w.pairs(f.b)[lane];
  mma.d = static_cast<uint32_t>(f.d.of(w, lane));
  for (size_t i = 0; i < 8; ++i) mma.disable_output_lane[i] = i < f.disable.size() ? w.words(f.disable[i])[lane] : 0;
  if (f.group == 2 && w.cta.rank % 2) throw fail("tcgen05.mma.cta_group::2: issued by the CTA of odd rank %u", w.cta.rank);
  for (uint32_t i = 0; i < f.group; ++i) {
    Cta& cta = f.group == 2 ? peer(w, w.cta.rank + i) : w.cta;
    mma.shared[i] = cta.shared;
    mma.tensor[i] = &cta.tensor_memory();
  }
  tcgen05_mma_check(mma);
  operation->line = static_cast<int>(in.line);
  operation->order = ordered(cluster, "tcgen05.mma", in.line);
  operation->cta = w.cta.rank;
  cluster.engine.issue(cluster, std::move(operation), queue_of(w, f.group), cluster.clock());
  cluster.event();
  return Status::kNext;
}

uint8_t take_group(Builder& b) {
  const int group = b.take_one({"cta_group::1", "cta_group::2"});
  if (group < 0) b.refuse("no cta_group");
  return static_cast<uint8_t>(group + 1);
}

void decode_mma(Builder& b) {
  MmaForm& f = *b.make_extra<MmaForm>();
  f.group = take_group(b);
  const int kind = b.take_one({"kind::f16", "kind::tf32", "kind::f8f6f4", "kind::i8"});
  if (kind < 0) b.refuse("the kind is not known");
  f.kind = static_cast<MmaKind>(kind);
  b.take_one({"collector::a::discard", "collector::a::lastuse", "collector::a::fill", "collector::a::use"});
  b.expect_operands(5, 6);
  f.d = make_address(b, b.operand(0));
  f.a_in_tensor_memory = b.operand(1).kind == ptx::Operand::kAddress;
  if (f.a_in_tensor_memory) f.a_tensor = make_address(b, b.operand(1));
  else f.a = b.source(1, Type::kB64);
  f.b = b.source(2, Type::kB64);
  f.descriptor = b.source(3, Type::kB32);
  const size_t last = b.operand_count() - 1;
  if (last == 5) {
    f.disable = b.sources(b.operand(4), 32);
    if (f.disable.size() != 4u * f.group) b.refuse("the disable-output-lane vector has another length");
  }
  ptx::Operand accumulate = b.operand(last);
  f.accumulate_negated = accumulate.negated;
  accumulate.negated = false;
  f.accumulate = b.source(accumulate, 1);
  b.inst.execute = execute_mma;
  b.program.operations.add(OperationKind::kMma);
  b.inst.unit = Unit::kTensor;
  b.finish_modifiers();
}

struct CopyForm : Extra {
  Tcgen05Copy copy{};
  uint8_t group = 1;
  AddressForm address;
  Slot descriptor = kNoSlot;
};
Status execute_cp(Warp& w, const Inst& in, Mask m) {
  const CopyForm& f = static_cast<const CopyForm&>(*in.extra);
  Cluster& cluster = w.cta.cluster;
  const int lane = single_lane(m, "tcgen05.cp");
  auto operation = std::make_shared<TensorCopy>();
  operation->copy = f.copy;
  operation->copy.address = static_cast<uint32_t>(f.address.of(w, lane));
  operation->copy.descriptor = w.pairs(f.descriptor)[lane];
  for (uint32_t i = 0; i < f.group; ++i) operation->ctas.push_back(f.group == 2 ? &peer(w, (w.cta.rank & ~1u) + i) : &w.cta);
  operation->line = static_cast<int>(in.line);
  operation->order = ordered(cluster, "tcgen05.cp", in.line);
  cluster.engine.issue(cluster, std::move(operation), queue_of(w, f.group), cluster.clock());
  return Status::kNext;
}
void decode_cp(Builder& b) {
  CopyForm& f = *b.make_extra<CopyForm>();
  f.group = take_group(b);
  const int shape = b.take_one({"128x256b", "4x256b", "128x128b", "64x128b", "32x128b"});
  const int multicast = b.take_one({"warpx2::02_13", "warpx2::01_23", "warpx4"});
  if (shape < 0) b.refuse("the form is not known here");
  f.copy.shape = static_cast<uint8_t>(shape);
  f.copy.multicast = static_cast<uint8_t>(multicast + 1);
  b.expect_operands(2, 2);
  f.address = make_address(b, b.operand(0));
  f.descriptor = b.source(1, Type::kB64);
  b.inst.execute = execute_cp;
  b.program.operations.add(OperationKind::kTensorCopy);
  b.inst.unit = Unit::kTensor;
  b.finish_modifiers();
}

struct CommitForm : Extra {
  uint8_t group = 1;
  AddressForm barrier;
  Slot mask = kNoSlot;
};
Status execute_commit(Warp& w, const Inst& in, Mask m) {
  const CommitForm& f = static_cast<const CommitForm&>(*in.extra);
  Cluster& cluster = w.cta.cluster;
  for (Mask rest = m; rest; rest &= rest - 1) {
    const int lane = first_lane(rest);
    auto operation = std::make_shared<TensorCommit>();
    operation->cta = f.group == 2 ? w.cta.rank & ~1u : w.cta.rank;
    const uint32_t barrier = static_cast<uint32_t>(f.barrier.of(w, lane));
    if (f.mask == kNoSlot) {
      operation->barriers.push_back(barrier);
    } else {
      const uint32_t mask = w.words(f.mask)[lane] & 0xffff, ctas = static_cast<uint32_t>(cluster.ctas.size());
      if (mask == 0 || mask >> ctas) throw fail("tcgen05.commit: CTA mask 0x%x in a cluster of %u", mask, ctas);
      for (uint32_t rank = 0; rank < ctas; ++rank)
        if (mask >> rank & 1) operation->barriers.push_back(Cluster::offset_of(barrier) | rank << 24);
    }
    operation->line = static_cast<int>(in.line);
    cluster.engine.issue(cluster, std::move(operation), queue_of(w, f.group), cluster.clock());
  }
  if (cluster.tensor_order) cluster.tensor_order->fence_before(cluster.judge->running());  // a commit implies it
  cluster.event();
  return Status::kNext;
}
void decode_commit(Builder& b) {
  CommitForm& f = *b.make_extra<CommitForm>();
  f.group = take_group(b);
  if (!b.take("mbarrier::arrive::one")) b.refuse("the form is not known here");
  b.take("shared::cluster");
  const bool multicast = b.take("multicast::cluster");
  if (b.take_type() != Type::kB64) b.refuse("the type is not known here");
  b.expect_operands(1 + multicast, 1 + multicast);
  f.barrier = make_address(b, b.operand(0));
  if (multicast) f.mask = b.source(1, Type::kB16);
  b.inst.execute = execute_commit;
  b.program.operations.add(OperationKind::kCommit);
  b.inst.unit = Unit::kTensor;
  b.finish_modifiers();
}

template <bool kAfter>
Status execute_fence(Warp& w, const Inst&, Mask) {
  Cluster& cluster = w.cta.cluster;
  if (!cluster.tensor_order) return Status::kNext;
  if (kAfter) cluster.tensor_order->fence_after(cluster.judge->running());
  else cluster.tensor_order->fence_before(cluster.judge->running());
  return Status::kNext;
}
void decode_fence(Builder& b) {
  const int after = b.take_one({"fence::before_thread_sync", "fence::after_thread_sync"});
  if (after < 0) b.refuse("the form is not known here");
  b.expect_operands(0, 0);
  b.inst.execute = after ? execute_fence<true> : execute_fence<false>;
  b.inst.unit = Unit::kFence;
  b.finish_modifiers();
}

void decode_tcgen05(Builder& b) {
  const int allocation = b.take_one({"alloc", "dealloc", "relinquish_alloc_permit"});
  if (allocation >= 0) return decode_allocation(b, allocation);
  if (b.take("ld")) return decode_access<false>(b);
  if (b.take("st")) return decode_access<true>(b);
  if (b.take("mma")) return decode_mma(b);
  if (b.take("cp")) return decode_cp(b);
  if (b.take("commit")) return decode_commit(b);
  if (b.at->suffix.size() == 1) return decode_fence(b);
  decode_wait(b);
}

}  // namespace

void register_tcgen05(DecodeTable& t) { t["tcgen05"] = decode_tcgen05; }

}  // namespace emu
