// cp.async, cp.async.bulk, cp.async.bulk.tensor and their reductions and groups.
#include <cstring>

#include "exec/copy_ops.h"

namespace emu {
namespace {

struct CopyForm : Extra {
  bool tensor = false, to_shared = false, from_global = false, multicast = false, pair = false;
  uint8_t rank = 0;
  Reduction reduction = Reduction::kNone;
  BulkType type = BulkType::kB32;
  AddressForm destination, source, barrier;
  Slot size = kNoSlot, mask = kNoSlot;
  Slot coordinates[5];
};

void check_bulk(uint64_t address, uint32_t bytes, const char* what) {
  if (address % 16) throw fail("bulk copy: %s 0x%" PRIx64 " is not aligned to 16 bytes", what, address);
  if (bytes % 16 || bytes == 0) throw fail("bulk copy: %u bytes, which is no multiple of 16", bytes);
}

TileCopy make_tile(Warp& w, const CopyForm& f, const AddressForm& map, int lane, uint32_t shared) {
  TileCopy tile;
  const uint64_t address = map.of(w, lane);
  if (address % 64) throw fail("tensor map at 0x%" PRIx64 ": not aligned to 64 bytes", address);
  tile.map = w.cta.cluster.launch.global.read(address, 128);
  tile.rank = f.rank;
  for (int i = 0; i < 5; ++i) tile.coordinate[i] = i < f.rank ? static_cast<int32_t>(w.words(f.coordinates[i])[lane]) : 0;
  tile.shared = Cluster::offset_of(shared);
  tile_check(tile, !f.to_shared);
  return tile;
}

// The CTAs that a load writes to, and where each of them is told.
std::vector<Destination> make_destinations(Warp& w, const CopyForm& f, int lane, uint32_t shared) {
  const uint32_t barrier = static_cast<uint32_t>(f.barrier.of(w, lane));
  const uint32_t own = shared >> 24, signal = barrier >> 24;
  std::vector<Destination> result;
  if (!f.multicast) {
    if (f.pair ? (own & ~1u) != (signal & ~1u) : own != signal)
      throw fail("bulk copy: destination in CTA %u of the cluster, its mbarrier in CTA %u", own, signal);
    result.push_back({shared, barrier});
    return result;
  }
  const uint32_t mask = w.words(f.mask)[lane] & 0xffff;
  const uint32_t ctas = static_cast<uint32_t>(w.cta.cluster.ctas.size());
  if (mask == 0 || mask >> ctas) throw fail("multicast: CTA mask 0x%x in a cluster of %u", mask, ctas);
  for (uint32_t rank = 0; rank < ctas; ++rank) {
    if (!(mask >> rank & 1)) continue;
    // With a CTA pair the barrier is the one in the CTA of the pair with the given barrier's parity of rank.
    const uint32_t where = f.pair ? (rank & ~1u) | (signal & 1) : rank;
    result.push_back({Cluster::offset_of(shared) | rank << 24, Cluster::offset_of(barrier) | where << 24});
  }
  return result;
}

// What the judge is told of a copy's accesses to global memory.
std::unique_ptr<BulkAccess> judged(Warp& w, const Inst& in, bool reduces) {
  ClusterOrder* const order = w.cta.cluster.order.get();
  return order ? std::make_unique<BulkAccess>(*order, static_cast<int>(in.line), reduces) : nullptr;
}

void start(Warp& w, const Inst& in, OperationPtr operation) {
  Cluster& cluster = w.cta.cluster;
  operation->line = static_cast<int>(in.line);
  cluster.engine.issue(cluster, std::move(operation), -1, cluster.clock());
  cluster.event();
}

// Kernels let all lanes of a warp issue the same plain store; making it once gives the same.
bool same_store(Warp& w, const CopyForm& f, int a, int b) {
  if (f.source.of(w, a) != f.source.of(w, b) || f.destination.of(w, a) != f.destination.of(w, b)) return false;
  if (f.size != kNoSlot && w.words(f.size)[a] != w.words(f.size)[b]) return false;
  for (int i = 0; i < f.rank; ++i)
    if (w.words(f.coordinates[i])[a] != w.words(f.coordinates[i])[b]) return false;
  return true;
}

Status execute_bulk(Warp& w, const Inst& in, Mask m) {
  const CopyForm& f = static_cast<const CopyForm&>(*in.extra);
  for (Mask rest = m; rest; rest &= rest - 1) {
    const int lane = first_lane(rest);
    const uint32_t bytes = f.size == kNoSlot ? 0 : w.words(f.size)[lane];
    if (f.to_shared) {
      const uint32_t shared = static_cast<uint32_t>(f.destination.of(w, lane));
      const std::vector<Destination> destinations = make_destinations(w, f, lane, shared);
      if (f.tensor) {
        auto operation = std::make_shared<TileLoad>();
        operation->tile = make_tile(w, f, f.source, lane, shared);
        operation->destinations = destinations;
        operation->bytes = tile_bytes(operation->tile.map);
        operation->judged = judged(w, in, false);
        start(w, in, std::move(operation));
      } else {
        auto operation = std::make_shared<BulkLoad>();
        const uint64_t source = f.source.of(w, lane);
        check_bulk(source, bytes, "source");
        check_bulk(shared, bytes, "destination");
        operation->destinations = destinations;
        operation->bytes = bytes;
        operation->reduction = f.reduction;
        operation->type = f.type;
        operation->judged = judged(w, in, false);
        if (f.from_global) operation->global = source;
        else operation->source = static_cast<uint32_t>(source);
        start(w, in, std::move(operation));
      }
      continue;
    }
    const uint32_t shared = static_cast<uint32_t>(f.source.of(w, lane));
    shared_view(w, shared, false);
    if (lane != first_lane(m) && f.reduction == Reduction::kNone && same_store(w, f, first_lane(m), lane)) continue;
    BulkGroups& groups = w.bulk[lane];
    if (!groups.open) groups.open = std::make_shared<BulkGroup>();
    const auto begin = [&](StoreOperation& operation) {
      operation.group = groups.open;
      operation.source_cta = &w.cta;
      operation.judged = judged(w, in, f.reduction != Reduction::kNone);
      ++groups.open->reads;
      ++groups.open->writes;
    };
    if (f.tensor) {
      auto operation = std::make_shared<TileStore>();
      operation->tile = make_tile(w, f, f.destination, lane, shared);
      operation->reduction = f.reduction;
      begin(*operation);
      start(w, in, std::move(operation));
    } else {
      auto operation = std::make_shared<BulkStore>();
      operation->global = f.destination.of(w, lane);
      operation->shared = Cluster::offset_of(shared);
      operation->bytes = bytes;
      operation->reduction = f.reduction;
      operation->type = f.type;
      check_bulk(operation->global, bytes, "destination");
      check_bulk(shared, bytes, "source");
      begin(*operation);
      start(w, in, std::move(operation));
    }
  }
  return Status::kNext;
}


// -- groups -------------------------------------------------------------------------------------------------------------------

Status execute_bulk_commit(Warp& w, const Inst&, Mask m) {
  for (Mask rest = m; rest; rest &= rest - 1) {
    BulkGroups& groups = w.bulk[first_lane(rest)];
    groups.committed.push_back(groups.open ? std::move(groups.open) : std::make_shared<BulkGroup>());
    groups.open.reset();
  }
  return Status::kNext;
}
// All but the last `keep` groups of a thread have been waited for, their writes too.
void writes_awaited(Cluster& cluster, BulkGroups& groups, uint64_t keep) {
  const uint64_t awaited = std::max(groups.popped + groups.committed.size(), keep) - keep;
  for (auto& [number, written] : groups.unawaited)
    if (number < awaited) cluster.order->finish(written);
  std::erase_if(groups.unawaited, [&](const auto& group) { return group.first < awaited; });
  for (size_t i = 0; groups.popped + i < awaited; ++i) {
    cluster.order->finish(groups.committed[i]->written);
    groups.committed[i]->written.clear();
  }
}

Status execute_bulk_wait(Warp& w, const Inst& in, Mask m) {
  Wait wait;
  wait.what = "bulk groups of lanes, all but";
  wait.a = static_cast<uint64_t>(m) << 1 | static_cast<uint64_t>(in.target);
  wait.b = static_cast<uint64_t>(in.immediate);
  wait.done = [](Warp& warp, const Wait& self) {
    const bool read = self.a & 1;
    const Mask lanes = static_cast<Mask>(self.a >> 1);
    for (Mask rest = lanes; rest; rest &= rest - 1) {
      BulkGroups& groups = warp.bulk[first_lane(rest)];
      auto& committed = groups.committed;
      for (; !committed.empty() && committed.front()->writes == 0; committed.pop_front(), ++groups.popped)
        if (!committed.front()->written.empty()) groups.unawaited.push_back({groups.popped, std::move(committed.front()->written)});
      for (size_t i = 0; i + self.b < committed.size(); ++i)
        if ((read ? committed[i]->reads : committed[i]->writes) != 0) return false;
    }
    if (!read && warp.cta.cluster.order)
      for (Mask rest = lanes; rest; rest &= rest - 1) writes_awaited(warp.cta.cluster, warp.bulk[first_lane(rest)], self.b);
    return true;
  };
  return wait.done(w, wait) ? Status::kNext : w.suspend(std::move(wait));
}

// -- cp.async -----------------------------------------------------------------------------------------------------------------

struct LaneForm : Extra {
  AddressForm destination, source;
  uint32_t bytes = 0;
  Slot source_bytes = kNoSlot;
};
Status execute_lane_copy(Warp& w, const Inst& in, Mask m) {
  const LaneForm& f = static_cast<const LaneForm&>(*in.extra);
  auto operation = std::make_shared<LaneCopy>();
  operation->bytes = f.bytes;
  operation->view = w.cta.shared;
  for (Mask rest = m; rest; rest &= rest - 1) {
    const int lane = first_lane(rest);
    const uint32_t shared = static_cast<uint32_t>(f.destination.of(w, lane));
    shared_view(w, shared, false);
    const uint32_t source_bytes = f.source_bytes == kNoSlot ? f.bytes : w.words(f.source_bytes)[lane];
    if (source_bytes > f.bytes) throw fail("cp.async: %u source bytes of %u", source_bytes, f.bytes);
    check_aligned(shared, f.bytes, "shared");
    check_aligned(f.source.of(w, lane), f.bytes, "global");
    operation->lanes.push_back({f.source.of(w, lane), Cluster::offset_of(shared), source_bytes});
  }
  w.copy_groups.open.push_back(operation);
  start(w, in, std::move(operation));
  return Status::kNext;
}
Status execute_lane_commit(Warp& w, const Inst&, Mask) {
  w.copy_groups.commit();
  return Status::kNext;
}
Status execute_lane_wait(Warp& w, const Inst& in, Mask) {
  if (in.target) w.copy_groups.commit();  // wait_all
  Wait wait;
  wait.what = "groups of cp.async, all but";
  wait.b = static_cast<uint64_t>(in.immediate);
  wait.done = [](Warp& warp, const Wait& self) { return warp.copy_groups.done_but(self.b); };
  return wait.done(w, wait) ? Status::kNext : w.suspend(std::move(wait));
}
Status execute_copy_arrive(Warp& w, const Inst& in, Mask m) {
  const LaneForm& f = static_cast<const LaneForm&>(*in.extra);
  auto operation = std::make_shared<CopyArrive>();
  for (const auto& group : w.copy_groups.committed) operation->before.insert(operation->before.end(), group.begin(), group.end());
  operation->before.insert(operation->before.end(), w.copy_groups.open.begin(), w.copy_groups.open.end());
  for (Mask rest = m; rest; rest &= rest - 1) operation->barriers.push_back(static_cast<uint32_t>(f.destination.of(w, first_lane(rest))));
  start(w, in, std::move(operation));
  return Status::kNext;
}

// -- decoding -----------------------------------------------------------------------------------------------------------------

void decode_lane_copy(Builder& b) {
  b.inst.unit = Unit::kAsyncCopy;
  if (b.take("commit_group")) {
    b.expect_operands(0, 0);
    b.inst.execute = execute_lane_commit;
    return b.finish_modifiers();
  }
  const int wait = b.take_one({"wait_group", "wait_all"});
  if (wait >= 0) {
    b.expect_operands(wait == 0, wait == 0);
    b.inst.immediate = wait == 0 ? static_cast<int64_t>(b.immediate(0)) : 0;
    b.inst.target = static_cast<uint32_t>(wait);
    b.inst.execute = execute_lane_wait;
    return b.finish_modifiers();
  }
  LaneForm& f = *b.make_extra<LaneForm>();
  if (b.take("mbarrier")) {
    if (!b.take("arrive") || !b.take("noinc") || (!b.take("shared") && !b.take("shared::cta"))) b.refuse("the form is not known here");
    if (b.take_type() != Type::kB64) b.refuse("the type is not known here");
    b.expect_operands(1, 1);
    f.destination = make_address(b, b.operand(0));
    b.inst.execute = execute_copy_arrive;
    return b.finish_modifiers();
  }
  b.take_one({"ca", "cg"});
  b.take_one({"L2::64B", "L2::128B", "L2::256B"});
  const bool hint = b.take("L2::cache_hint");
  if ((!b.take("shared") && !b.take("shared::cta")) || !b.take("global")) b.refuse("the form is not known here");
  b.expect_operands(3 + hint, 4 + hint);
  f.destination = make_address(b, b.operand(0));
  f.source = make_address(b, b.operand(1));
  f.bytes = static_cast<uint32_t>(b.immediate(2));
  if (f.bytes != 4 && f.bytes != 8 && f.bytes != 16) b.refuse("4, 8 or 16 bytes are allowed");
  const size_t rest = b.operand_count() - hint;
  if (rest == 4) f.source_bytes = b.source(3, Type::kB32);
  if (hint) b.source(rest, Type::kB64);
  b.inst.execute = execute_lane_copy;
  b.program.operations.add(OperationKind::kLoad);
  b.finish_modifiers();
}

void decode_groups(Builder& b, bool wait) {
  b.expect_operands(wait, wait);
  b.inst.target = wait && b.take("read");
  b.inst.immediate = wait ? static_cast<int64_t>(b.immediate(0)) : 0;
  b.inst.execute = wait ? execute_bulk_wait : execute_bulk_commit;
  b.finish_modifiers();
}

Reduction take_reduction(Builder& b) {
  const int r = b.take_one({"add", "min", "max", "inc", "dec", "and", "or", "xor"});
  if (r < 0) b.refuse("no operation");
  return static_cast<Reduction>(r + 1);
}
BulkType take_bulk_type(Builder& b) {
  switch (b.take_type()) {
    case Type::kF16: return BulkType::kF16;
    case Type::kBf16: return BulkType::kBf16;
    case Type::kB32: return BulkType::kB32;
    case Type::kU32: return BulkType::kU32;
    case Type::kS32: return BulkType::kS32;
    case Type::kB64: return BulkType::kB64;
    case Type::kU64: return BulkType::kU64;
    case Type::kS64: return BulkType::kS64;
    case Type::kF32: return BulkType::kF32;
    case Type::kF64: return BulkType::kF64;
    default: b.refuse("the type is not known here");
  }
}

// [map, {c0, c1, ...}]
void decode_map(Builder& b, CopyForm& f, AddressForm& where, const ptx::Operand& o) {
  if (o.kind != ptx::Operand::kAddress || o.items.size() != 2 || o.items[1].kind != ptx::Operand::kVector)
    b.refuse("expected [tensor map, {coordinates}]");
  if (o.items[1].items.size() != f.rank) b.refuse("the number of coordinates differs from the dimensions");
  where = make_address(b, o);
  for (int i = 0; i < f.rank; ++i) f.coordinates[i] = b.source(o.items[1].items[static_cast<size_t>(i)], 32);
}

void decode_bulk(Builder& b, bool reduce) {
  b.inst.unit = Unit::kAsyncCopy;
  if (b.take("commit_group")) return decode_groups(b, false);
  if (b.take("wait_group")) return decode_groups(b, true);
  CopyForm& f = *b.make_extra<CopyForm>();
  f.tensor = b.take("tensor");
  if (f.tensor) {
    const int rank = b.take_one({"1d", "2d", "3d", "4d", "5d"});
    if (rank < 0) b.refuse("no dimensions");
    f.rank = static_cast<uint8_t>(rank + 1);
    if (b.take_one({"im2col", "im2col_no_offs", "im2col::w", "im2col::w::128", "tile::gather4", "tile::scatter4"}) >= 0)
      b.refuse("only tiles are known");
    b.take("tile");
  }
  const bool prefetch = b.take("prefetch");
  const bool hint = b.take("L2::cache_hint");
  if (prefetch) {
    if (!b.take("L2") || !b.take("global")) b.refuse("the form is not known here");
    b.expect_operands(2 + hint - f.tensor, 2 + hint - f.tensor);
    if (f.tensor) decode_map(b, f, f.source, b.operand(0));
    else f.source = make_address(b, b.operand(0));
    for (size_t i = 1; i < b.operand_count(); ++i) b.source(b.operand(i), i + hint == b.operand_count() && hint ? 64 : 32);
    b.inst.execute = execute_nothing;
    return b.finish_modifiers();
  }
  // The destination's space comes first, the source's second.
  std::vector<std::string> spaces;
  for (const std::string& s : b.at->suffix)
    if (s == "global" || s == "shared::cta" || s == "shared::cluster") {
      spaces.push_back(s);
      b.take(s);
    }
  if (spaces.size() != 2) b.refuse("expected two state spaces");
  f.to_shared = spaces[0] != "global";
  f.from_global = spaces[1] == "global";
  if (!f.to_shared && f.from_global) b.refuse("the form is not known here");
  const bool completes = b.take("mbarrier::complete_tx::bytes"), grouped = b.take("bulk_group");
  if (f.to_shared != completes || f.to_shared == grouped) b.refuse("the completion mechanism does not fit");
  f.multicast = b.take("multicast::cluster");
  f.pair = b.take("cta_group::2");
  b.take("cta_group::1");
  if (reduce) {
    b.take("noftz");
    f.reduction = take_reduction(b);
    if (!f.tensor) f.type = take_bulk_type(b);
    if (f.tensor && f.to_shared) b.refuse("the form is not known here");
  }
  if (f.multicast && !f.to_shared) b.refuse("a store has no multicast");
  const size_t sized = !f.tensor, operands = 2 + sized + f.to_shared + f.multicast + hint;
  b.expect_operands(operands, operands);
  size_t at = 0;
  if (f.tensor && !f.to_shared) decode_map(b, f, f.destination, b.operand(at++));
  else f.destination = make_address(b, b.operand(at++));
  if (f.tensor && f.to_shared) decode_map(b, f, f.source, b.operand(at++));
  else f.source = make_address(b, b.operand(at++));
  if (sized) f.size = b.source(at++, Type::kB32);
  if (f.to_shared) f.barrier = make_address(b, b.operand(at++));
  if (f.multicast) f.mask = b.source(at++, Type::kB16);
  if (hint) b.source(at, Type::kB64);
  b.inst.execute = execute_bulk;
  b.program.operations.add(f.to_shared ? OperationKind::kLoad : reduce ? OperationKind::kReduce : OperationKind::kStore);
  b.finish_modifiers();
}

void decode_cp(Builder& b) {
  const bool reduce = b.take("reduce");
  if (!b.take("async")) b.refuse("the form is not known here");
  if (b.take("bulk")) return decode_bulk(b, reduce);
  if (reduce) b.refuse("the form is not known here");
  decode_lane_copy(b);
}

}  // namespace

void register_copy(DecodeTable& t) { t["cp"] = decode_cp; }

}  // namespace emu
