// atom and red. On global memory they wait for their turn, so that their order comes from the seed.
#include <bit>
#include <cmath>
#include <cstring>

#include "exec/address.h"
#include "exec/float_ops.h"

namespace emu {
namespace {

enum AtomicOp { kAdd, kMin, kMax, kInc, kDec, kAnd, kOr, kXor, kExch, kCas };

struct AtomicForm : Extra {
  AccessSpace space;
  AddressForm address;
  AtomicOp op;
  Type type;
  uint8_t count = 1;
  bool acquires = false, releases = false, wide = false;  // wide: of scope gpu or sys
  Slot result[8], value[8];
  Slot compare = kNoSlot;  // of cas: value[0] is the new one
};

template <class T>
T integer_op(AtomicOp op, T old, T v) {
  using U = std::make_unsigned_t<T>;
  switch (op) {
    case kAdd: return static_cast<T>(U(old) + U(v));
    case kMin: return v < old ? v : old;
    case kMax: return v > old ? v : old;
    case kInc: return U(old) >= U(v) ? T(0) : static_cast<T>(U(old) + 1);
    case kDec: return old == 0 || U(old) > U(v) ? v : static_cast<T>(U(old) - 1);
    case kAnd: return old & v;
    case kOr: return old | v;
    case kXor: return old ^ v;
    default: return v;
  }
}
uint16_t half_op(AtomicOp op, uint16_t old, uint16_t v, bool bf16) {
  const float a = half_to_float(old, bf16), b = half_to_float(v, bf16);
  const double r = op == kAdd ? double(a) + double(b) : op == kMin ? min_max<false, false>(a, b) : min_max<true, false>(a, b);
  return r != r ? 0x7fff : double_to_half(r, bf16);
}
uint64_t apply(const AtomicForm& f, uint64_t old, uint64_t v, uint64_t expected) {
  if (f.op == kCas) return old == expected ? v : old;
  switch (f.type) {
    case Type::kS32: return static_cast<uint32_t>(integer_op<int32_t>(f.op, static_cast<int32_t>(old), static_cast<int32_t>(v)));
    case Type::kU32:
    case Type::kB32: return integer_op<uint32_t>(f.op, static_cast<uint32_t>(old), static_cast<uint32_t>(v));
    case Type::kS64: return static_cast<uint64_t>(integer_op<int64_t>(f.op, static_cast<int64_t>(old), static_cast<int64_t>(v)));
    case Type::kU64:
    case Type::kB64: return integer_op<uint64_t>(f.op, old, v);
    case Type::kB16: return integer_op<uint16_t>(f.op, static_cast<uint16_t>(old), static_cast<uint16_t>(v));
    case Type::kF32: return float_to_bits(canonical(bits_to_float(static_cast<uint32_t>(old)) + bits_to_float(static_cast<uint32_t>(v))));
    case Type::kF64: return std::bit_cast<uint64_t>(std::bit_cast<double>(old) + std::bit_cast<double>(v));
    case Type::kF16: return half_op(f.op, static_cast<uint16_t>(old), static_cast<uint16_t>(v), false);
    case Type::kBf16: return half_op(f.op, static_cast<uint16_t>(old), static_cast<uint16_t>(v), true);
    default: {
      const bool bf16 = f.type == Type::kBf16x2;
      return half_op(f.op, static_cast<uint16_t>(old), static_cast<uint16_t>(v), bf16) |
             uint64_t{half_op(f.op, static_cast<uint16_t>(old >> 16), static_cast<uint16_t>(v >> 16), bf16)} << 16;
    }
  }
}

Status execute_atomic(Warp& w, const Inst& in, Mask m) {
  const AtomicForm& f = static_cast<const AtomicForm&>(*in.extra);
  const bool shared_space = f.space == AccessSpace::kShared || f.space == AccessSpace::kSharedCluster;
  bool shared = shared_space || (f.space == AccessSpace::kGeneric && in_shared_window(f.address.of(w, first_lane(m))));
  if (!shared && !w.turn()) return Status::kBlocked;
  Cluster& cluster = w.cta.cluster;
  const uint32_t bytes = static_cast<uint32_t>(type_bits(f.type)) / 8, total = bytes * f.count;
  const bool wide = bytes == 8;
  if (cluster.order) cluster.order->begin(static_cast<int>(in.line), true);
  for (Mask rest = m; rest; rest &= rest - 1) {
    const int lane = first_lane(rest);
    const uint64_t address = f.address.of(w, lane);
    if (f.space == AccessSpace::kGeneric) shared = in_shared_window(address);
    check_aligned(address, total, shared ? "shared" : "global");
    uint8_t* p;
    if (shared) {
      shared_read(w, static_cast<uint32_t>(address), total, f.space != AccessSpace::kShared);
      p = shared_write(w, static_cast<uint32_t>(address), total, f.space != AccessSpace::kShared);
    } else {
      p = cluster.global.write(address, total);
      if (f.wide && cluster.order) cluster.order->synchronise(address, {f.acquires, f.releases, true, true});
    }
    const auto read = [&](Slot s) -> uint64_t { return wide ? w.pairs(s)[lane] : w.words(s)[lane]; };
    uint64_t values[8];  // all of them first: a result may go to the register of one
    for (int k = 0; k < f.count; ++k) values[k] = read(f.value[k]);
    for (int k = 0; k < f.count; ++k, p += bytes) {
      uint64_t old = 0;
      std::memcpy(&old, p, bytes);
      const uint64_t now = apply(f, old, values[k], f.compare == kNoSlot ? 0 : read(f.compare));
      std::memcpy(p, &now, bytes);
      if (f.result[k] == kNoSlot) continue;
      if (wide) w.pairs(f.result[k])[lane] = old;
      else w.words(f.result[k])[lane] = static_cast<uint32_t>(old);
    }
  }
  TrafficCounters& t = cluster.traffic;
  const uint64_t moved = uint64_t{total} * static_cast<uint64_t>(std::popcount(m));
  (shared ? t.shared_written : t.global_written) += moved;
  cluster.event();
  return Status::kNext;
}

template <bool kReturns>
void decode_atomic(Builder& b) {
  if (b.take("async")) b.refuse("red.async is not known");
  AtomicForm& f = *b.make_extra<AtomicForm>();
  f.space = take_space(b);
  const int order = b.take_one({"relaxed", "acquire", "release", "acq_rel"});
  f.acquires = order == 1 || order == 3;
  f.releases = order >= 2;
  const int scope = b.take_one({"cta", "cluster", "gpu", "sys"});
  f.wide = scope != 0 && scope != 1;
  b.take("noftz");
  const int op = b.take_one({"add", "min", "max", "inc", "dec", "and", "or", "xor", "exch", "cas"});
  const bool hint = b.take("L2::cache_hint");
  const int vector = b.take_one({"v2", "v4", "v8"});
  f.type = b.take_type();
  if (op < 0 || f.space == AccessSpace::kParameter || f.space == AccessSpace::kLocal) b.refuse("the form is not known here");
  f.op = static_cast<AtomicOp>(op);
  f.count = static_cast<uint8_t>(vector < 0 ? 1 : 2 << vector);
  const int bits = type_bits(f.type);
  const bool floating = f.type == Type::kF32 || f.type == Type::kF64 || f.type == Type::kF16 || f.type == Type::kBf16 ||
                        f.type == Type::kF16x2 || f.type == Type::kBf16x2;
  if (bits < 16 || bits > 64 || f.type == Type::kF32x2 || f.type == Type::kTf32) b.refuse("the type is not known here");
  if (floating && op != kAdd && !(bits <= 32 && f.type != Type::kF32 && op <= kMax)) b.refuse("not for this type");
  const size_t values = kReturns ? 1 : 0, cas = f.op == kCas;
  b.expect_operands(values + 2 + cas + hint, values + 2 + cas + hint);
  if (hint) b.source(values + 2 + cas, Type::kB64);
  f.address = make_address(b, b.operand(values));
  const std::vector<Slot> v = b.sources(b.operand(values + 1 + cas), bits);
  if (cas) f.compare = b.source(values + 1, f.type);
  if (v.size() != f.count) b.refuse("the vector has another length");
  std::copy(v.begin(), v.end(), f.value);
  std::fill(std::begin(f.result), std::end(f.result), kNoSlot);
  if (kReturns) {
    const std::vector<Slot> d = b.destinations(b.operand(0), bits);
    if (d.size() != f.count) b.refuse("the vector has another length");
    std::copy(d.begin(), d.end(), f.result);
  }
  b.inst.execute = execute_atomic;
  b.inst.unit = Unit::kAtomic;
  b.finish_modifiers();
}

}  // namespace

void register_atomic(DecodeTable& t) {
  t["atom"] = decode_atomic<true>;
  t["red"] = decode_atomic<false>;
}

}  // namespace emu
