// cvt between integers, floating-point types and packed 16-bit pairs; cvt.pack; cvta.
#include <cmath>

#include "exec/float_ops.h"
#include "exec/lane_ops.h"

namespace emu {
namespace {

struct ConvertForm : Extra {
  Type to, from;
  Rounding rounding = Rounding::kNearest;
  bool integer_rounding = false, flush = false, saturate = false, relu = false, satfinite = false;
};

bool is_float(Type t) { return t == Type::kF16 || t == Type::kBf16 || t == Type::kF32 || t == Type::kF64; }

int64_t read_integer(Type type, uint64_t cell) {
  switch (type) {
    case Type::kU8: return static_cast<uint8_t>(cell);
    case Type::kS8: return static_cast<int8_t>(cell);
    case Type::kU16: return static_cast<uint16_t>(cell);
    case Type::kS16: return static_cast<int16_t>(cell);
    case Type::kU32: return static_cast<uint32_t>(cell);
    case Type::kS32: return static_cast<int32_t>(cell);
    default: return static_cast<int64_t>(cell);
  }
}
double read_float(Type type, uint64_t cell) {
  switch (type) {
    case Type::kF16: return f16_to_float(static_cast<uint16_t>(cell));
    case Type::kBf16: return bf16_to_float(static_cast<uint16_t>(cell));
    case Type::kF32: return bits_to_float(static_cast<uint32_t>(cell));
    default: return std::bit_cast<double>(cell);
  }
}
double round_integral(double v, Rounding r) {
  return r == Rounding::kNearest ? std::nearbyint(v) : r == Rounding::kZero ? std::trunc(v)
       : r == Rounding::kDown ? std::floor(v) : std::ceil(v);
}
float narrow(double v, Rounding r) {
  const float f = static_cast<float>(v);
  const double error = v - static_cast<double>(f);
  switch (r) {
    case Rounding::kZero: return redirect<Rounding::kZero>(f, static_cast<float>(error));
    case Rounding::kDown: return redirect<Rounding::kDown>(f, static_cast<float>(error));
    case Rounding::kUp: return redirect<Rounding::kUp>(f, static_cast<float>(error));
    default: return f;
  }
}
// A 16-bit format, rounded to zero: the nearest one that is not larger in magnitude.
uint16_t narrow_half(double v, Rounding r, bool bf16) {
  uint16_t bits = double_to_half(v, bf16);
  if (r == Rounding::kZero && v == v && std::fabs(half_to_float(bits, bf16)) > std::fabs(v)) --bits;
  return bits;
}
uint64_t write_float(const ConvertForm& f, double v) {
  if (f.relu && !(v > 0)) v = v != v ? v : 0;
  switch (f.to) {
    case Type::kF16: return v != v ? 0x7fff : narrow_half(v, f.rounding, false);
    case Type::kBf16: return v != v ? 0x7fff : narrow_half(v, f.rounding, true);
    case Type::kF32: return v != v ? kCanonicalNan : float_to_bits(narrow(v, f.rounding));
    default: return std::bit_cast<uint64_t>(v);
  }
}
// Out of range gives the nearest limit, NaN gives 0 (the top bit for 64-bit results of f32/f64).
uint64_t write_integer(Type type, double v) {
  const int bits = type_bits(type);
  const bool sign = type_signed(type);
  if (v != v) return bits == 64 ? uint64_t{1} << 63 : 0;
  const double low = sign ? -std::ldexp(1.0, bits - 1) : 0, high = std::ldexp(1.0, sign ? bits - 1 : bits);
  if (v <= low) return sign ? ~uint64_t{0} << (bits - 1) : 0;
  if (v >= high) return sign ? (uint64_t{1} << (bits - 1)) - 1 : bits == 64 ? ~uint64_t{0} : (uint64_t{1} << bits) - 1;
  return sign ? static_cast<uint64_t>(static_cast<int64_t>(v)) : static_cast<uint64_t>(v);
}
uint64_t clamp_integer(Type type, Type from, int64_t v) {
  const int bits = type_bits(type);
  const bool huge = from == Type::kU64 && v < 0;  // above every signed number
  if (type_signed(type)) {
    const int64_t high = bits == 64 ? INT64_MAX : (int64_t{1} << (bits - 1)) - 1, low = -high - 1;
    return static_cast<uint64_t>(huge || v > high ? high : v < low ? low : v);
  }
  if (!huge && v < 0) return 0;
  const uint64_t high = bits == 64 ? ~uint64_t{0} : (uint64_t{1} << bits) - 1;
  return static_cast<uint64_t>(v) > high ? high : static_cast<uint64_t>(v);
}

uint64_t convert(const ConvertForm& f, uint64_t cell) {
  const bool from_float = is_float(f.from), to_float = is_float(f.to);
  if (!from_float && !to_float) {
    const int64_t v = read_integer(f.from, cell);
    // A register wider than the result has it extended.
    return f.saturate ? clamp_integer(f.to, f.from, v) : static_cast<uint64_t>(read_integer(f.to, static_cast<uint64_t>(v)));
  }
  if (!from_float) {
    const int64_t v = read_integer(f.from, cell);
    if (f.to == Type::kF32) {  // one rounding, from 64 bits
      if (f.rounding == Rounding::kNearest)
        return float_to_bits(f.from == Type::kU64 ? static_cast<float>(static_cast<uint64_t>(v)) : static_cast<float>(v));
    }
    return write_float(f, f.from == Type::kU64 ? static_cast<double>(static_cast<uint64_t>(v)) : static_cast<double>(v));
  }
  double v = read_float(f.from, cell);
  if (f.flush && f.from == Type::kF32) v = flush(static_cast<float>(v));
  if (f.integer_rounding) v = round_integral(v, f.rounding);
  if (!to_float) return write_integer(f.to, v);
  if (f.saturate) v = v > 0 ? (v < 1 ? v : 1) : 0;
  return write_float(f, v);
}

Status execute_convert(Warp& w, const Inst& in, Mask m) {
  const ConvertForm& f = static_cast<const ConvertForm&>(*in.extra);
  const bool wide_from = in.immediate & 1, wide_to = in.immediate & 2;
  const int bits = in.immediate >> 2 & 255;  // of the destination register
  for (int i = 0; i < kLanes; ++i) {
    if (!(m >> i & 1)) continue;
    const uint64_t cell = wide_from ? w.pairs(in.op[1])[i] : w.words(in.op[1])[i];
    const uint64_t result = convert(f, cell);
    if (wide_to) w.pairs(in.op[0])[i] = result;
    else w.words(in.op[0])[i] = static_cast<uint32_t>(bits == 16 ? result & 0xffff : result);
  }
  return Status::kNext;
}

// The frequent ones as vector loops.
constexpr auto u64_from_u32 = [](uint32_t a) { return uint64_t{a}; };
constexpr auto s64_from_s32 = [](int32_t a) { return int64_t{a}; };
constexpr auto u32_from_u64 = [](uint64_t a) { return static_cast<uint32_t>(a); };
constexpr auto f32_from_bf16 = [](uint16_t a) { return bf16_to_float(a); };
constexpr auto f32_from_s32 = [](int32_t a) { return static_cast<float>(a); };
template <bool kRelu>
constexpr auto pack_bf16 = [](float high, float low) {
  if (kRelu) {
    high = high <= 0 ? 0.0f : high;  // also -0
    low = low <= 0 ? 0.0f : low;
  }
  return uint32_t{float_to_bf16(high)} << 16 | float_to_bf16(low);
};
template <bool kRelu>
constexpr auto pack_f16 = [](float high, float low) {
  if (kRelu) {
    high = high <= 0 ? 0.0f : high;  // also -0
    low = low <= 0 ? 0.0f : low;
  }
  return uint32_t{float_to_f16(high)} << 16 | float_to_f16(low);
};

Execute fast_path(const ConvertForm& f) {
  if (f.saturate || f.relu || f.satfinite || f.flush) return nullptr;
  const bool nearest = f.rounding == Rounding::kNearest;
  if (f.to == Type::kU64 && f.from == Type::kU32) return unary<uint64_t, uint32_t, u64_from_u32>;
  if (f.to == Type::kS64 && f.from == Type::kU32) return unary<uint64_t, uint32_t, u64_from_u32>;
  if (f.to == Type::kS64 && f.from == Type::kS32) return unary<int64_t, int32_t, s64_from_s32>;
  if ((f.to == Type::kU32 || f.to == Type::kS32) && (f.from == Type::kU64 || f.from == Type::kS64))
    return unary<uint32_t, uint64_t, u32_from_u64>;
  if (f.to == Type::kF32 && f.from == Type::kBf16) return unary<float, uint16_t, f32_from_bf16>;
  if (f.to == Type::kF32 && f.from == Type::kS32 && nearest) return unary<float, int32_t, f32_from_s32>;
  return nullptr;
}

void decode_packed(Builder& b, const ConvertForm& f) {
  if (f.from != Type::kF32 || f.rounding != Rounding::kNearest || f.integer_rounding || f.saturate || f.satfinite)
    b.refuse("this packed conversion is not known");
  b.expect_operands(3, 3);
  b.inst.op[1] = b.source(1, Type::kF32);
  b.inst.op[2] = b.source(2, Type::kF32);
  b.inst.op[0] = b.destination(0, f.to);
  if (f.to == Type::kBf16x2)
    b.inst.execute = f.relu ? binary<uint32_t, float, float, pack_bf16<true>> : binary<uint32_t, float, float, pack_bf16<false>>;
  else
    b.inst.execute = f.relu ? binary<uint32_t, float, float, pack_f16<true>> : binary<uint32_t, float, float, pack_f16<false>>;
  b.finish_modifiers();
}

// cvt.rn.tf32.f32 and cvt.rna.tf32.f32: a float with 10 bits of mantissa.
template <bool kAway>
constexpr auto to_tf32 = [](float a) {
  const uint32_t bits = float_to_bits(a);
  if (a != a) return kCanonicalNan;
  if ((bits & 0x7f800000u) == 0x7f800000u) return bits;
  const uint32_t bias = kAway ? 0x1000u : 0xfffu + (bits >> 13 & 1);
  return (bits + bias) & ~0x1fffu;
};

void decode_cvt(Builder& b) {
  ConvertForm f;
  const int integral = b.take_one({"rni", "rzi", "rmi", "rpi"});
  const int rounding = b.take_one({"rn", "rz", "rm", "rp"});
  const bool away = b.take("rna");
  f.integer_rounding = integral >= 0;
  f.rounding = static_cast<Rounding>(integral >= 0 ? integral : rounding >= 0 ? rounding : 0);
  f.flush = b.take("ftz");
  f.saturate = b.take("sat");
  f.satfinite = b.take("satfinite");
  f.relu = b.take("relu");
  f.to = b.take_type();
  f.from = b.take_type();
  b.inst.unit = Unit::kConvert;
  if (f.to == Type::kBf16x2 || f.to == Type::kF16x2) return decode_packed(b, f);
  b.expect_operands(2, 2);
  if (f.to == Type::kTf32) {
    if (f.from != Type::kF32 || (!away && f.rounding != Rounding::kNearest) || f.relu || f.satfinite)
      b.refuse("this conversion is not known");
    b.inst.op[1] = b.source(1, Type::kB32);
    b.inst.op[0] = b.destination(0, Type::kB32);
    b.inst.execute = away ? unary<uint32_t, float, to_tf32<true>> : unary<uint32_t, float, to_tf32<false>>;
    return b.finish_modifiers();
  }
  const auto known = [](Type t) { return is_float(t) || (type_bits(t) <= 64 && t != Type::kPred && t != Type::kB8 && t != Type::kB16 && t != Type::kB32 && t != Type::kB64 && t != Type::kTf32 && t != Type::kF16x2 && t != Type::kBf16x2 && t != Type::kF32x2); };
  if (!known(f.to) || !known(f.from) || away || f.satfinite) b.refuse("this conversion is not known");
  // The registers may be wider than the types.
  const auto width = [&](size_t i, Type t) {
    const int bits = b.register_bits(b.operand(i));
    const int least = type_bits(t);
    return bits >= least && bits <= 64 ? bits : least;
  };
  const int from = width(1, f.from), to = width(0, f.to);
  b.inst.op[1] = b.source(b.operand(1), from);
  b.inst.op[0] = b.destination(b.operand(0), to);
  const bool same_widths = from == std::max(16, type_bits(f.from)) && to == std::max(16, type_bits(f.to));
  b.inst.execute = same_widths ? fast_path(f) : nullptr;
  if (!b.inst.execute) {
    *b.make_extra<ConvertForm>() = f;
    b.inst.execute = execute_convert;
    b.inst.immediate = (from == 64) | (to == 64) << 1 | to << 2;
  }
  b.finish_modifiers();
}

template <bool kTo, bool kShared>
constexpr auto window = [](uint64_t a) { return kShared ? (kTo ? a - kSharedWindow : a + kSharedWindow) : a; };

// Global, parameter and constant memory are where generic addresses point already; shared memory has a window.
void decode_cvta(Builder& b) {
  const bool to = b.take("to");
  const int space = b.take_one({"shared", "shared::cta", "shared::cluster", "global", "param", "const", "local"});
  const Type type = b.take_type();
  if (space < 0 || type != Type::kU64) b.refuse("the form is not known here");
  const bool shared = space <= 2;
  decode_same(b, shared ? (to ? unary<uint64_t, uint64_t, window<true, true>> : unary<uint64_t, uint64_t, window<false, true>>)
                        : unary<uint64_t, uint64_t, window<false, false>>,
              Unit::kMove, type, 1);
}

// isspacep: which window a generic address lies in.
template <bool kShared>
Status execute_isspacep(Warp& w, const Inst& in, Mask m) {
  const uint64_t* a = w.pairs(in.op[1]);
  set_predicate(w, in.op[0], m, lanes_where([&](int i) { return (a[i] >= kSharedWindow) == kShared; }));
  return Status::kNext;
}
void decode_isspacep(Builder& b) {
  const int space = b.take_one({"shared", "shared::cta", "shared::cluster", "global"});
  if (space < 0) b.refuse("the state space is not known");
  b.expect_operands(2, 2);
  b.inst.op[1] = b.source(1, Type::kB64);
  b.inst.op[0] = b.destination(0, Type::kPred);
  b.inst.execute = space <= 2 ? execute_isspacep<true> : execute_isspacep<false>;
  b.inst.unit = Unit::kPredicate;
  b.finish_modifiers();
}

}  // namespace

void register_convert(DecodeTable& t) {
  t["cvt"] = decode_cvt;
  t["cvta"] = decode_cvta;
  t["isspacep"] = decode_isspacep;
}

}  // namespace emu
