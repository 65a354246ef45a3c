// Loads and stores of threads: ld, st, prefetch, mapa.
#include <algorithm>
#include <bit>
#include <cstring>

#include "exec/address.h"

namespace emu {
namespace {

struct AccessForm : Extra {
  AccessSpace space;
  AddressForm address;
  uint8_t bytes = 0, count = 1;  // of an element; elements
  bool sign = false;             // sign-extended into a wider register
  bool strong = false;           // volatile, relaxed, acquire, release
  bool ordered = false;          // and meets other clusters: has its turn at global memory
  bool synchronises = false;     // acquire or release
  uint8_t width[8] = {};         // bits of the register
  Slot slot[8] = {};
};

void put(Warp& w, const AccessForm& f, int k, int lane, const uint8_t* p) {
  if (f.slot[k] == kNoSlot) return;
  if (f.bytes == 4 && f.width[k] == 32) {
    std::memcpy(w.words(f.slot[k]) + lane, p, 4);
  } else if (f.bytes == 8) {
    std::memcpy(w.pairs(f.slot[k]) + lane, p, 8);
  } else if (f.bytes == 16) {
    std::memcpy(w.pairs(f.slot[k]) + lane, p, 8);
    std::memcpy(w.pairs(f.slot[k]) + kLanes + lane, p + 8, 8);
  } else {
    uint64_t v = 0;
    std::memcpy(&v, p, f.bytes);
    if (f.sign) v = static_cast<uint64_t>(static_cast<int64_t>(v << (64 - 8 * f.bytes)) >> (64 - 8 * f.bytes));
    if (f.width[k] == 64) w.pairs(f.slot[k])[lane] = v;
    else w.words(f.slot[k])[lane] = static_cast<uint32_t>(f.width[k] == 16 ? v & 0xffff : v);
  }
}
void get(Warp& w, const AccessForm& f, int k, int lane, uint8_t* p) {
  if (f.bytes == 16) {
    std::memcpy(p, w.pairs(f.slot[k]) + lane, 8);
    std::memcpy(p + 8, w.pairs(f.slot[k]) + kLanes + lane, 8);
  } else if (f.width[k] == 64) {
    std::memcpy(p, w.pairs(f.slot[k]) + lane, f.bytes);
  } else {
    std::memcpy(p, w.words(f.slot[k]) + lane, f.bytes);
  }
}

// A lane's load met memory that was never written: the registers that it goes to remember it.
void mark_unwritten(Warp& w, const Inst& in, const AccessForm& f, int lane, uint32_t address) {
  for (uint32_t k = 0; k < f.count; ++k) {
    bool written = true;
    shared_load(w, address + k * f.bytes, f.bytes, true, &written);
    if (!written) w.taint.mark(f.slot[k], std::max<uint32_t>(f.width[k], f.bytes * 8u), 1u << lane, {"shared memory", address + k * f.bytes, in.line});
  }
}

template <bool kStore>
Status execute_access(Warp& w, const Inst& in, Mask m) {
  const AccessForm& f = static_cast<const AccessForm&>(*in.extra);
  if (f.ordered && !w.turn()) return Status::kBlocked;
  const uint32_t total = uint32_t{f.bytes} * f.count;
  const uint64_t moved = uint64_t{total} * static_cast<uint64_t>(std::popcount(m));
  Cluster& cluster = w.cta.cluster;
  bool shared = f.space == AccessSpace::kShared || f.space == AccessSpace::kSharedCluster;
  if (cluster.order) cluster.order->begin(static_cast<int>(in.line), f.strong);
  for (Mask rest = m; rest; rest &= rest - 1) {
    const int lane = first_lane(rest);
    const uint64_t address = f.address.of(w, lane);
    if (f.space == AccessSpace::kGeneric) shared = in_shared_window(address);
    uint8_t* p;
    if (shared) {
      const uint32_t at = static_cast<uint32_t>(address);
      check_aligned(at, total, "shared");
      const bool any = f.space != AccessSpace::kShared;
      bool written = true;
      p = kStore ? shared_write(w, at, total, any) : const_cast<uint8_t*>(shared_load(w, at, total, any, &written));
      if (!written) mark_unwritten(w, in, f, lane, at);
    } else if (w.in_local(address, total)) {
      check_aligned(address, total, "local");
      p = reinterpret_cast<uint8_t*>(address);
    } else {
      if (f.space == AccessSpace::kLocal) throw fail("local memory: address 0x%" PRIx64 " is outside it", address);
      check_aligned(address, total, "global");
      p = kStore ? cluster.global.write(address, total) : const_cast<uint8_t*>(cluster.global.read(address, total));
      if (f.ordered && cluster.order)
        cluster.order->synchronise(address, {!kStore && f.synchronises, kStore && f.synchronises, !kStore, kStore});
    }
    for (int k = 0; k < f.count; ++k) {
      if (kStore) get(w, f, k, lane, p + k * f.bytes);
      else put(w, f, k, lane, p + k * f.bytes);
    }
  }
  TrafficCounters& t = cluster.traffic;
  if (kStore) {
    (shared ? t.shared_written : t.global_written) += moved;
    cluster.stored();
  } else {
    (shared ? t.shared_read : t.global_read) += moved;
  }
  return Status::kNext;
}

Status execute_load_parameter(Warp& w, const Inst& in, Mask m) {
  const AccessForm& f = static_cast<const AccessForm&>(*in.extra);
  const uint8_t* p = w.cta.cluster.launch.parameters + in.immediate;
  for (Mask rest = m; rest; rest &= rest - 1)
    for (int k = 0; k < f.count; ++k) put(w, f, k, first_lane(rest), p + k * f.bytes);
  return Status::kNext;
}

// Modifiers that only advise: caches, prefetch sizes, weak and scopes of weak accesses.
void take_hints(Builder& b, AccessForm& f, size_t* operands) {
  const int order = b.take_one({"weak", "volatile", "relaxed", "acquire", "release", "mmio"});
  const int scope = b.take_one({"cta", "cluster", "gpu", "sys"});
  f.strong = order >= 1;
  f.synchronises = order == 3 || order == 4;
  f.ordered = f.strong && scope != 0 && scope != 1;
  b.take_one({"ca", "cg", "cs", "lu", "cv", "wb", "wt"});
  b.take("nc");
  b.take_one({"L1::evict_normal", "L1::evict_unchanged", "L1::evict_first", "L1::evict_last", "L1::no_allocate"});
  b.take_one({"L2::evict_normal", "L2::evict_first", "L2::evict_last"});
  b.take_one({"L2::64B", "L2::128B", "L2::256B"});
  b.take("unified");
  if (b.take("L2::cache_hint")) *operands = 3;
}

template <bool kStore>
void decode_access(Builder& b) {
  AccessForm& f = *b.make_extra<AccessForm>();
  size_t operands = 2;
  f.space = take_space(b);
  take_hints(b, f, &operands);
  if (f.space == AccessSpace::kShared || f.space == AccessSpace::kSharedCluster) f.ordered = false;
  const int vector = b.take_one({"v2", "v4", "v8"});
  const Type type = b.take_type();
  if (type_bits(type) < 8) b.refuse("the type is not known here");
  b.expect_operands(operands, operands);
  f.bytes = static_cast<uint8_t>(type_bits(type) / 8);
  f.count = static_cast<uint8_t>(vector < 0 ? 1 : 2 << vector);
  f.sign = type_signed(type);
  if (f.bytes * f.count > 32) b.refuse("more than 32 bytes a thread");
  if (operands == 3) b.source(2, Type::kB64);
  const ptx::Operand& data = b.operand(kStore ? 1 : 0);
  const size_t items = data.kind == ptx::Operand::kVector ? data.items.size() : 1;
  if (items != f.count) b.refuse("the vector has " + std::to_string(items) + " registers, expected " + std::to_string(f.count));
  // A source register is read before the destination is given: order matters for the passes only in being the same.
  const ptx::Operand& where = b.operand(kStore ? 0 : 1);
  for (size_t k = 0; k < items; ++k) {
    const ptx::Operand& o = data.kind == ptx::Operand::kVector ? data.items[k] : data;
    const int least = type_bits(type) == 8 ? 16 : type_bits(type);
    const int width = std::max(b.register_bits(o), least);
    if (width > 64 && width != least) b.refuse("a register of another width");
    f.width[k] = static_cast<uint8_t>(width);
    f.slot[k] = kStore ? b.source(o, width) : kNoSlot;
  }
  if (f.space == AccessSpace::kParameter) {
    if (kStore) b.refuse("parameters are read-only");
    if (where.kind != ptx::Operand::kAddress || where.items[0].kind != ptx::Operand::kName) b.refuse("expected a parameter's name");
    const auto symbol = b.symbols.find(where.items[0].name);
    if (symbol == b.symbols.end() || symbol->second.kind != Symbol::kParameter) b.refuse("unknown parameter " + where.items[0].name);
    const int64_t offset = static_cast<int64_t>(symbol->second.value) + where.offset;
    if (offset < 0 || offset + f.bytes * f.count > static_cast<int64_t>(b.program.parameter_bytes)) b.refuse("outside the parameters");
    b.inst.immediate = offset;
    b.inst.execute = execute_load_parameter;
    b.inst.unit = Unit::kMove;
  } else {
    f.address = make_address(b, where);
    const bool shared = f.space == AccessSpace::kShared || f.space == AccessSpace::kSharedCluster;
    b.inst.execute = execute_access<kStore>;
    b.inst.unit = kStore ? (shared ? Unit::kSharedStore : Unit::kGlobalStore) : (shared ? Unit::kSharedLoad : Unit::kGlobalLoad);
  }
  if (!kStore)
    for (size_t k = 0; k < items; ++k) {
      const ptx::Operand& o = data.kind == ptx::Operand::kVector ? data.items[k] : data;
      f.slot[k] = b.destination(o, f.width[k]);
    }
  b.finish_modifiers();
}

void decode_prefetch(Builder& b) {
  b.take("global");
  b.take("param");
  b.take("const");
  if (b.take_one({"tensormap", "L1", "L2"}) < 0) b.refuse("the form is not known here");
  b.expect_operands(1, 1);
  b.address(b.operand(0));
  b.inst.execute = execute_nothing;
  b.inst.unit = Unit::kOther;
  b.finish_modifiers();
}

template <class T>
Status execute_mapa(Warp& w, const Inst& in, Mask m) {
  // A rank beyond the cluster gives an address that no access accepts; lanes may compute one and not use it.
  const T* a = w.at<T>(in.op[1]);
  const uint32_t* rank = w.words(in.op[2]);
  for (Mask rest = m; rest; rest &= rest - 1) {
    const int lane = first_lane(rest);
    w.at<T>(in.op[0])[lane] = (a[lane] & ~T{0xff000000u}) | T{std::min(rank[lane], 255u)} << 24;
  }
  return Status::kNext;
}
void decode_mapa(Builder& b) {
  const bool shared = b.take("shared::cluster");
  const Type type = b.take_type();
  if (type != Type::kU32 && type != Type::kU64) b.refuse("the type is not known here");
  if (!shared && type == Type::kU32) b.refuse("a generic address has 64 bits");
  b.expect_operands(3, 3);
  b.inst.op[1] = b.source(1, type);
  b.inst.op[2] = b.source(2, Type::kU32);
  b.inst.op[0] = b.destination(0, type);
  b.inst.execute = type == Type::kU32 ? execute_mapa<uint32_t> : execute_mapa<uint64_t>;
  b.inst.unit = Unit::kAlu;
  b.finish_modifiers();
}

}  // namespace

void register_memory(DecodeTable& t) {
  t["ld"] = decode_access<false>;
  t["ldu"] = decode_access<false>;
  t["st"] = decode_access<true>;
  t["prefetch"] = decode_prefetch;
  t["prefetchu"] = decode_prefetch;
  t["mapa"] = decode_mapa;
}

}  // namespace emu
