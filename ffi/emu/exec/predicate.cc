// Comparisons, selections and logic of predicates.
#include "exec/float_ops.h"
#include "exec/lane_ops.h"

namespace emu {
namespace {

enum Compare { kEq, kNe, kLt, kLe, kGt, kGe, kEqu, kNeu, kLtu, kLeu, kGtu, kGeu, kNum, kNanOp };

// A 16-bit floating-point number: compared as the float that it is.
template <bool kBf16>
struct Half {
  uint16_t bits;
  operator float() const { return half_to_float(bits, kBf16); }
};

template <class T>
bool compare(Compare c, T a, T b) {
  const bool unordered = a != a || b != b;
  switch (c) {
    case kEq: return a == b;
    case kNe: return !unordered && a != b;
    case kLt: return a < b;
    case kLe: return a <= b;
    case kGt: return a > b;
    case kGe: return a >= b;
    case kEqu: return unordered || a == b;
    case kNeu: return a != b;
    case kLtu: return unordered || a < b;
    case kLeu: return unordered || a <= b;
    case kGtu: return unordered || a > b;
    case kGeu: return unordered || a >= b;
    case kNum: return !unordered;
    case kNanOp: return unordered;
  }
  return false;
}

// op: 0 p, 1 a, 2 b, 3 c (predicate to combine with), 4 q. immediate: combination.
enum Combine { kAlone, kAnd, kOr, kXor };

template <class T, Compare kCompare>
Status execute_setp(Warp& w, const Inst& in, Mask m) {
  const Cell<T> *a = w.at<Cell<T>>(in.op[1]), *b = w.at<Cell<T>>(in.op[2]);
  uint32_t hits[kLanes];
  for (int i = 0; i < kLanes; ++i) hits[i] = compare<T>(kCompare, load_cell<T>(a[i]), load_cell<T>(b[i]));
  Mask p = 0;
  for (int i = 0; i < kLanes; ++i) p |= hits[i] << i;
  Mask q = ~p;
  if (in.immediate != kAlone) {
    const Mask c = w.predicate(in.op[3]);
    const auto combine = [&](Mask x) { return in.immediate == kAnd ? x & c : in.immediate == kOr ? x | c : x ^ c; };
    p = combine(p);
    q = combine(q);
  }
  set_predicate(w, in.op[0], m, p);
  set_predicate(w, in.op[4], m, q);
  return Status::kNext;
}

template <class T>
Execute pick_setp(int c) {
  static constexpr Execute table[] = {
      execute_setp<T, kEq>,  execute_setp<T, kNe>,  execute_setp<T, kLt>,  execute_setp<T, kLe>, execute_setp<T, kGt>,
      execute_setp<T, kGe>,  execute_setp<T, kEqu>, execute_setp<T, kNeu>, execute_setp<T, kLtu>, execute_setp<T, kLeu>,
      execute_setp<T, kGtu>, execute_setp<T, kGeu>, execute_setp<T, kNum>, execute_setp<T, kNanOp>};
  return table[c];
}
template <class T>
Execute pick_setp_integer(int c) {
  static constexpr Execute table[] = {execute_setp<T, kEq>, execute_setp<T, kNe>, execute_setp<T, kLt>,
                                      execute_setp<T, kLe>, execute_setp<T, kGt>, execute_setp<T, kGe>};
  return c < 6 ? table[c] : nullptr;
}

void decode_setp(Builder& b) {
  int c = b.take_one({"eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan"});
  // lo, ls, hi, hs compare unsigned integers.
  if (c < 0) {
    const int u = b.take_one({"lo", "ls", "hi", "hs"});
    if (u >= 0) c = u + 2;
  }
  if (c < 0) b.refuse("no comparison");
  const int combine = b.take_one({"and", "or", "xor"}) + 1;
  if (b.take("ftz")) b.refuse(".ftz is not known here");
  const Type type = b.take_type();
  b.expect_operands(combine ? 4 : 3, combine ? 4 : 3);
  b.inst.op[1] = b.source(1, type);
  b.inst.op[2] = b.source(2, type);
  if (combine) b.inst.op[3] = b.source(3, Type::kPred);
  const ptx::Operand& d = b.operand(0);
  if (d.kind == ptx::Operand::kPair) {
    b.inst.op[0] = b.destination(d.items.at(0), 1);
    b.inst.op[4] = b.destination(d.items.at(1), 1);
  } else {
    b.inst.op[0] = b.destination(d, 1);
  }
  switch (type) {
    case Type::kB16:
    case Type::kU16: b.inst.execute = pick_setp_integer<uint16_t>(c); break;
    case Type::kS16: b.inst.execute = pick_setp_integer<int16_t>(c); break;
    case Type::kB32:
    case Type::kU32: b.inst.execute = pick_setp_integer<uint32_t>(c); break;
    case Type::kS32: b.inst.execute = pick_setp_integer<int32_t>(c); break;
    case Type::kB64:
    case Type::kU64: b.inst.execute = pick_setp_integer<uint64_t>(c); break;
    case Type::kS64: b.inst.execute = pick_setp_integer<int64_t>(c); break;
    case Type::kF32: b.inst.execute = pick_setp<float>(c); break;
    case Type::kF64: b.inst.execute = pick_setp<double>(c); break;
    case Type::kF16: b.inst.execute = pick_setp<Half<false>>(c); break;
    case Type::kBf16: b.inst.execute = pick_setp<Half<true>>(c); break;
    default: b.refuse("the type is not known here");
  }
  b.inst.immediate = combine;
  b.inst.unit = Unit::kPredicate;
  b.finish_modifiers();
}

template <class T>
Status execute_selp(Warp& w, const Inst& in, Mask m) {
  const T *a = w.at<T>(in.op[1]), *b = w.at<T>(in.op[2]);
  const Mask p = w.predicate(in.op[3]);
  set_lanes(w.at<T>(in.op[0]), m, [&](int i) { return p >> i & 1 ? a[i] : b[i]; });
  return Status::kNext;
}
void decode_selp(Builder& b) {
  const Type type = b.take_type();
  const int bits = type_bits(type);
  if (bits < 16 || bits > 64) b.refuse("the type is not known here");
  b.expect_operands(4, 4);
  b.inst.op[1] = b.source(1, type);
  b.inst.op[2] = b.source(2, type);
  b.inst.op[3] = b.source(3, Type::kPred);
  b.inst.op[0] = b.destination(0, type);
  b.inst.execute = bits == 64 ? execute_selp<uint64_t> : execute_selp<uint32_t>;
  b.inst.selects = true;
  b.inst.unit = Unit::kAlu;
  b.finish_modifiers();
}

template <int kWhich>  // and, or, xor, not
Status execute_logic(Warp& w, const Inst& in, Mask m) {
  const Mask a = w.predicate(in.op[1]), b = kWhich == 3 ? 0 : w.predicate(in.op[2]);
  set_predicate(w, in.op[0], m, kWhich == 0 ? a & b : kWhich == 1 ? a | b : kWhich == 2 ? a ^ b : ~a);
  return Status::kNext;
}

}  // namespace

void decode_predicate_logic(Builder& b) {
  const std::string& op = b.at->opcode;
  decode_same(b, op == "and" ? execute_logic<0> : op == "or" ? execute_logic<1> : op == "xor" ? execute_logic<2> : execute_logic<3>,
              Unit::kPredicate, Type::kPred, op == "not" ? 1 : 2);
}

void register_predicate(DecodeTable& t) {
  t["setp"] = decode_setp;
  t["selp"] = decode_selp;
}

}  // namespace emu
