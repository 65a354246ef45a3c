// mov, also between registers and vectors of narrower ones.
#include "exec/lane_ops.h"
#include "machine/cluster.h"

namespace emu {
namespace {

template <class T>
Status execute_move(Warp& w, const Inst& in, Mask m) {
  const T* a = w.at<T>(in.op[1]);
  set_lanes(w.at<T>(in.op[0]), m, [&](int i) { return a[i]; });
  return Status::kNext;
}
Status execute_move_predicate(Warp& w, const Inst& in, Mask m) {
  set_predicate(w, in.op[0], m, w.predicate(in.op[1]));
  return Status::kNext;
}

// op[0] = {op[1], op[2], ...}; lowest first.
Status pack_64_from_32(Warp& w, const Inst& in, Mask m) {
  map_lanes<uint64_t, uint32_t, uint32_t>(w, m, in.op[0], [](uint32_t a, uint32_t b) { return uint64_t{b} << 32 | a; },
                                          w.words(in.op[1]), w.words(in.op[2]));
  return Status::kNext;
}
Status pack_32_from_16(Warp& w, const Inst& in, Mask m) {
  map_lanes<uint32_t, uint32_t, uint32_t>(w, m, in.op[0], [](uint32_t a, uint32_t b) { return b << 16 | (a & 0xffff); },
                                          w.words(in.op[1]), w.words(in.op[2]));
  return Status::kNext;
}
Status pack_64_from_16(Warp& w, const Inst& in, Mask m) {
  set_lanes(w.pairs(in.op[0]), m, [&](int i) {
    uint64_t v = 0;
    for (int k = 0; k < 4; ++k) v |= uint64_t{w.words(in.op[1 + k])[i] & 0xffff} << (16 * k);
    return v;
  });
  return Status::kNext;
}
// A 128-bit register is two arrays of 64-bit words.
Status pack_128_from_64(Warp& w, const Inst& in, Mask m) {
  for (int k = 0; k < 2; ++k) {
    const uint64_t* part = w.pairs(in.op[1 + k]);
    set_lanes(w.pairs(in.op[0]) + k * kLanes, m, [&](int i) { return part[i]; });
  }
  return Status::kNext;
}
Status unpack_128_to_64(Warp& w, const Inst& in, Mask m) {
  const uint64_t* a = w.pairs(in.op[5]);
  for (int k = 0; k < 2; ++k)
    if (in.op[k] != kNoSlot) set_lanes(w.pairs(in.op[k]), m, [&](int i) { return a[k * kLanes + i]; });
  return Status::kNext;
}
template <class From, class To, int kCount>
Status unpack(Warp& w, const Inst& in, Mask m) {
  const Cell<From>* a = w.at<Cell<From>>(in.op[5]);
  Cell<From> copy[kLanes];
  for (int i = 0; i < kLanes; ++i) copy[i] = a[i];
  for (int k = 0; k < kCount; ++k)
    if (in.op[k] != kNoSlot)
      set_lanes(w.words(in.op[k]), m, [&](int i) -> uint32_t { return static_cast<To>(copy[i] >> (8 * sizeof(To) * k)); });
  return Status::kNext;
}

void decode_pack(Builder& b, int bits, const ptx::Operand& vector) {
  const size_t count = vector.items.size();
  const int part = count ? bits / static_cast<int>(count) : 0;
  if (part * static_cast<int>(count) != bits || count > 4) b.refuse("the vector's width differs from the type's");
  const std::vector<Slot> s = b.sources(vector, part);
  for (size_t i = 0; i < s.size(); ++i) b.inst.op[1 + i] = s[i];
  b.inst.op[0] = b.destination(b.operand(0), bits);
  b.inst.execute = bits == 64 && count == 2 ? pack_64_from_32 : bits == 32 && count == 2 ? pack_32_from_16
                   : bits == 64 && count == 4 ? pack_64_from_16 : bits == 128 && count == 2 ? pack_128_from_64 : nullptr;
}
void decode_unpack(Builder& b, int bits, const ptx::Operand& vector) {
  const size_t count = vector.items.size();
  const int part = count ? bits / static_cast<int>(count) : 0;
  if (part * static_cast<int>(count) != bits || count > 4) b.refuse("the vector's width differs from the type's");
  b.inst.op[5] = b.source(b.operand(1), bits);
  const std::vector<Slot> d = b.destinations(vector, part);
  for (size_t i = 0; i < d.size(); ++i) b.inst.op[i] = d[i];
  b.inst.execute = bits == 64 && count == 2 ? unpack<uint64_t, uint32_t, 2> : bits == 32 && count == 2 ? unpack<uint32_t, uint16_t, 2>
                   : bits == 64 && count == 4 ? unpack<uint64_t, uint16_t, 4> : bits == 128 && count == 2 ? unpack_128_to_64 : nullptr;
}

// %clock and its like: the cluster's instruction count stands for time.
template <bool kWide>
Status execute_clock(Warp& w, const Inst& in, Mask m) {
  const uint64_t now = w.cta.cluster.now;
  using T = std::conditional_t<kWide, uint64_t, uint32_t>;
  set_lanes(w.at<T>(in.op[0]), m, [&](int) { return static_cast<T>(now); });
  return Status::kNext;
}
Status execute_activemask(Warp& w, const Inst& in, Mask m) {
  set_lanes(w.words(in.op[0]), m, [&](int) { return m; });
  return Status::kNext;
}

void decode_mov(Builder& b) {
  const Type type = b.take_type();
  const int bits = type_bits(type);
  b.expect_operands(2, 2);
  b.finish_modifiers();
  b.inst.unit = Unit::kMove;
  b.inst.moves = true;
  const ptx::Operand &d = b.operand(0), &s = b.operand(1);
  if (s.kind == ptx::Operand::kVector) return decode_pack(b, bits, s);
  if (d.kind == ptx::Operand::kVector) return decode_unpack(b, bits, d);
  if (s.kind == ptx::Operand::kName && (s.name == "%clock" || s.name == "%clock64" || s.name == "%globaltimer" || s.name == "%clock_hi")) {
    const bool wide = s.name != "%clock" && s.name != "%clock_hi";
    if (bits != (wide ? 64 : 32)) b.refuse("the special register has another width");
    b.inst.op[0] = b.destination(d, bits);
    b.inst.execute = wide ? execute_clock<true> : execute_clock<false>;
    return;
  }
  if (bits < 1 || bits == 8 || bits > 64) b.refuse("the type is not known here");
  b.inst.op[1] = b.source(s, bits);
  b.inst.op[0] = b.destination(d, bits);
  b.inst.execute = bits == 1 ? execute_move_predicate : bits == 64 ? execute_move<uint64_t> : execute_move<uint32_t>;
}
void decode_activemask(Builder& b) {
  if (b.take_type() != Type::kB32) b.refuse("the type is not known here");
  b.expect_operands(1, 1);
  b.inst.op[0] = b.destination(0, Type::kB32);
  b.inst.execute = execute_activemask;
  b.inst.unit = Unit::kOther;
  b.finish_modifiers();
}

}  // namespace

void register_move(DecodeTable& t) {
  t["mov"] = decode_mov;
  t["activemask"] = decode_activemask;
}

}  // namespace emu
