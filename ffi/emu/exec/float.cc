// Floating-point arithmetic: f32, packed f32x2, f64, and the 16-bit types.
#include <cmath>

#include "exec/float_ops.h"
#include "exec/lane_ops.h"

namespace emu {
namespace {

using R = Rounding;

struct Form {
  Rounding rounding = R::kNearest;
  bool flush = false, saturate = false;
};

Form take_form(Builder& b) {
  Form f;
  const int rounding = b.take_one({"rn", "rz", "rm", "rp"});
  f.rounding = rounding < 0 ? R::kNearest : static_cast<R>(rounding);
  f.flush = b.take("ftz");
  f.saturate = b.take("sat");
  return f;
}

template <bool kFlush> inline float in(float v) { return kFlush ? flush(v) : v; }
template <bool kFlush, bool kSaturate> inline float out(float v) {
  if (kSaturate) return saturate(v);
  return canonical(kFlush ? flush(v) : v);
}

enum Op { kAdd, kSub, kMul, kFma };
template <Op kOp, R kR, bool kF, bool kS>
inline float compute(float a, float b, float c) {
  a = in<kF>(a);
  b = in<kF>(b);
  if (kOp == kAdd) return out<kF, kS>(add_rounded<kR>(a, b));
  if (kOp == kSub) return out<kF, kS>(add_rounded<kR>(a, -b));
  if (kOp == kMul) return out<kF, kS>(mul_rounded<kR>(a, b));
  return out<kF, kS>(fma_rounded<kR>(a, b, in<kF>(c)));
}

template <Op kOp, R kR, bool kF, bool kS>
Status execute_f32(Warp& w, const Inst& i, Mask m) {
  if constexpr (kOp == kFma)
    map_lanes<float, float, float, float>(w, m, i.op[0], [](float a, float b, float c) { return compute<kOp, kR, kF, kS>(a, b, c); },
                                          w.words(i.op[1]), w.words(i.op[2]), w.words(i.op[3]));
  else
    map_lanes<float, float, float>(w, m, i.op[0], [](float a, float b) { return compute<kOp, kR, kF, kS>(a, b, 0); },
                                   w.words(i.op[1]), w.words(i.op[2]));
  return Status::kNext;
}

// A register pair holds two floats a lane, so that 64 of them lie in a row.
template <Op kOp, R kR, bool kF>
Status execute_f32x2(Warp& w, const Inst& i, Mask m) {
  const float *a = w.at<float>(i.op[1]), *b = w.at<float>(i.op[2]);
  const float* c = kOp == kFma ? w.at<float>(i.op[3]) : a;
  float result[2 * kLanes];
  for (int k = 0; k < 2 * kLanes; ++k) result[k] = compute<kOp, kR, kF, false>(a[k], b[k], c[k]);
  float* d = w.at<float>(i.op[0]);
  if (m == kAllLanes) {
    for (int k = 0; k < 2 * kLanes; ++k) d[k] = result[k];
  } else {
    for (int k = 0; k < 2 * kLanes; ++k)
      if (m >> (k / 2) & 1) d[k] = result[k];
  }
  return Status::kNext;
}

template <Op kOp>
Status execute_f64(Warp& w, const Inst& i, Mask m) {
  const auto f = [](double a, double b) { return kOp == kAdd ? a + b : kOp == kSub ? a - b : a * b; };
  if constexpr (kOp == kFma)
    map_lanes<double, double, double, double>(w, m, i.op[0], [](double a, double b, double c) { return std::fma(a, b, c); },
                                              w.pairs(i.op[1]), w.pairs(i.op[2]), w.pairs(i.op[3]));
  else
    map_lanes<double, double, double>(w, m, i.op[0], f, w.pairs(i.op[1]), w.pairs(i.op[2]));
  return Status::kNext;
}

// One or two 16-bit numbers a word. Computed in double and rounded once.
template <Op kOp, bool kBf16, bool kPacked, bool kRelu>
Status execute_half(Warp& w, const Inst& i, Mask m) {
  const uint32_t *a = w.words(i.op[1]), *b = w.words(i.op[2]), *c = kOp == kFma ? w.words(i.op[3]) : a;
  uint32_t* d = w.words(i.op[0]);
  const auto one = [](uint32_t x, uint32_t y, uint32_t z) -> uint32_t {
    const double p = half_to_float(static_cast<uint16_t>(x), kBf16), q = half_to_float(static_cast<uint16_t>(y), kBf16);
    const double r = kOp == kAdd ? p + q : kOp == kSub ? p - q : kOp == kMul ? p * q
                     : p * q + double(half_to_float(static_cast<uint16_t>(z), kBf16));
    if (r != r) return 0x7fff;
    return double_to_half(kRelu && r < 0 ? 0.0 : r, kBf16);
  };
  for (int k = 0; k < kLanes; ++k) {
    if (!(m >> k & 1)) continue;
    uint32_t result = one(a[k], b[k], c[k]);
    if (kPacked) result |= one(a[k] >> 16, b[k] >> 16, c[k] >> 16) << 16;
    d[k] = result;
  }
  return Status::kNext;
}

template <Op kOp, bool kS>
Execute pick_f32(const Form& f) {
  switch (f.rounding) {
    case R::kNearest: return f.flush ? execute_f32<kOp, R::kNearest, true, kS> : execute_f32<kOp, R::kNearest, false, kS>;
    case R::kZero: return f.flush ? execute_f32<kOp, R::kZero, true, kS> : execute_f32<kOp, R::kZero, false, kS>;
    case R::kDown: return f.flush ? execute_f32<kOp, R::kDown, true, kS> : execute_f32<kOp, R::kDown, false, kS>;
    default: return f.flush ? execute_f32<kOp, R::kUp, true, kS> : execute_f32<kOp, R::kUp, false, kS>;
  }
}
template <Op kOp>
Execute pick_f32x2(const Form& f) {
  switch (f.rounding) {
    case R::kNearest: return f.flush ? execute_f32x2<kOp, R::kNearest, true> : execute_f32x2<kOp, R::kNearest, false>;
    case R::kZero: return f.flush ? execute_f32x2<kOp, R::kZero, true> : execute_f32x2<kOp, R::kZero, false>;
    case R::kDown: return f.flush ? execute_f32x2<kOp, R::kDown, true> : execute_f32x2<kOp, R::kDown, false>;
    default: return f.flush ? execute_f32x2<kOp, R::kUp, true> : execute_f32x2<kOp, R::kUp, false>;
  }
}
template <Op kOp>
Execute pick_half(Type type, bool relu) {
  switch (type) {
    case Type::kF16: return relu ? execute_half<kOp, false, false, true> : execute_half<kOp, false, false, false>;
    case Type::kBf16: return relu ? execute_half<kOp, true, false, true> : execute_half<kOp, true, false, false>;
    case Type::kF16x2: return relu ? execute_half<kOp, false, true, true> : execute_half<kOp, false, true, false>;
    case Type::kBf16x2: return relu ? execute_half<kOp, true, true, true> : execute_half<kOp, true, true, false>;
    default: return nullptr;
  }
}

// add.f32.bf16 d, a, c and fma.rn.f32.bf16 d, a, b, c: the last operand is f32, those before it have 16 bits.
template <Op kOp, bool kBf16>
Status execute_mixed(Warp& w, const Inst& i, Mask m) {
  if constexpr (kOp == kFma)
    map_lanes<float, uint16_t, uint16_t, float>(
        w, m, i.op[0], [](uint16_t a, uint16_t b, float c) {
          return canonical(__builtin_fmaf(half_to_float(a, kBf16), half_to_float(b, kBf16), c));
        }, w.words(i.op[1]), w.words(i.op[2]), w.words(i.op[3]));
  else
    map_lanes<float, uint16_t, float>(
        w, m, i.op[0], [](uint16_t a, float c) {
          const float x = half_to_float(a, kBf16);
          return canonical(kOp == kSub ? x - c : x + c);
        }, w.words(i.op[1]), w.words(i.op[2]));
  return Status::kNext;
}

template <Op kOp>
void decode_arithmetic(Builder& b) {
  const Form form = take_form(b);
  const bool relu = kOp == kFma && b.take("relu");
  const Type type = b.take_type();
  const int sources = kOp == kFma ? 3 : 2;
  const Unit unit = Unit::kFma;
  if (type == Type::kF32 && b.peek_type()) {
    const Type narrow = b.take_type();
    if (kOp == kMul || form.saturate || form.flush || form.rounding != R::kNearest ||
        (narrow != Type::kF16 && narrow != Type::kBf16))
      b.refuse("this mixture of types is not known");
    b.expect_operands(sources + 1, sources + 1);
    for (int i = 1; i < sources; ++i) b.inst.op[i] = b.source(i, narrow);
    b.inst.op[sources] = b.source(sources, Type::kF32);
    b.inst.op[0] = b.destination(0, Type::kF32);
    b.inst.execute = narrow == Type::kBf16 ? execute_mixed<kOp, true> : execute_mixed<kOp, false>;
    b.inst.unit = unit;
    return b.finish_modifiers();
  }
  if (type == Type::kF32)
    return decode_same(b, form.saturate ? pick_f32<kOp, true>(form) : pick_f32<kOp, false>(form), unit, type, sources);
  if (form.saturate) b.refuse(".sat is known for f32 only");
  if (type == Type::kF32x2) return decode_same(b, pick_f32x2<kOp>(form), Unit::kFmaPacked, type, sources);
  if (form.rounding != R::kNearest) b.refuse("the rounding is not known for this type");
  if (type == Type::kF64) return decode_same(b, execute_f64<kOp>, unit, type, sources);
  if (form.flush) b.refuse(".ftz is not known for this type");
  decode_same(b, pick_half<kOp>(type, relu), unit, type, sources);
}

template <bool kMax, bool kFlush, bool kNan>
Status execute_min_max(Warp& w, const Inst& i, Mask m) {
  const auto f = [](float a, float b) {
    const float r = min_max<kMax, kNan>(in<kFlush>(a), in<kFlush>(b));
    return kFlush ? flush(r) : r;
  };
  if (i.op[3] == kNoSlot)
    map_lanes<float, float, float>(w, m, i.op[0], f, w.words(i.op[1]), w.words(i.op[2]));
  else
    map_lanes<float, float, float, float>(w, m, i.op[0], [f](float a, float b, float c) { return f(f(a, b), c); },
                                          w.words(i.op[1]), w.words(i.op[2]), w.words(i.op[3]));
  return Status::kNext;
}
template <bool kMax, bool kBf16, bool kPacked, bool kNan>
Status execute_min_max_half(Warp& w, const Inst& i, Mask m) {
  map_lanes<uint32_t, uint32_t, uint32_t>(w, m, i.op[0], [](uint32_t a, uint32_t b) {
    const auto one = [](uint32_t x, uint32_t y) -> uint32_t {
      const float r = min_max<kMax, kNan>(half_to_float(static_cast<uint16_t>(x), kBf16), half_to_float(static_cast<uint16_t>(y), kBf16));
      return kBf16 ? float_to_bf16(r) : float_to_f16(r);
    };
    return one(a, b) | (kPacked ? one(a >> 16, b >> 16) << 16 : 0);
  }, w.words(i.op[1]), w.words(i.op[2]));
  return Status::kNext;
}
template <bool kMax>
Status execute_min_max_f64(Warp& w, const Inst& i, Mask m) {
  map_lanes<double, double, double>(w, m, i.op[0], [](double a, double b) { return kMax ? std::fmax(a, b) : std::fmin(a, b); },
                                    w.pairs(i.op[1]), w.pairs(i.op[2]));
  return Status::kNext;
}

template <bool kMax>
void decode_min_max(Builder& b) {
  const bool flush = b.take("ftz"), nan = b.take("NaN");
  const Type type = b.take_type();
  if (type == Type::kF64) return decode_same(b, execute_min_max_f64<kMax>, Unit::kAlu, type, 2);
  if (type == Type::kF32) {
    const Execute e = flush ? (nan ? execute_min_max<kMax, true, true> : execute_min_max<kMax, true, false>)
                            : (nan ? execute_min_max<kMax, false, true> : execute_min_max<kMax, false, false>);
    return decode_same(b, e, Unit::kAlu, type, b.operand_count() == 4 ? 3 : 2);
  }
  if (flush) b.refuse(".ftz is not known for this type");
  Execute e = nullptr;
  if (type == Type::kBf16) e = nan ? execute_min_max_half<kMax, true, false, true> : execute_min_max_half<kMax, true, false, false>;
  if (type == Type::kBf16x2) e = nan ? execute_min_max_half<kMax, true, true, true> : execute_min_max_half<kMax, true, true, false>;
  if (type == Type::kF16) e = nan ? execute_min_max_half<kMax, false, false, true> : execute_min_max_half<kMax, false, false, false>;
  if (type == Type::kF16x2) e = nan ? execute_min_max_half<kMax, false, true, true> : execute_min_max_half<kMax, false, true, false>;
  decode_same(b, e, Unit::kAlu, type, 2);
}

template <bool kAbs>
constexpr auto bf16_sign = [](uint16_t a) {
  return static_cast<uint16_t>((a & 0x7fff) > 0x7f80 ? 0x7fff : kAbs ? a & 0x7fff : a ^ 0x8000);
};
template <bool kAbs>
constexpr auto bf16x2_sign = [](uint32_t a) {
  return bf16_sign<kAbs>(static_cast<uint16_t>(a)) | uint32_t{bf16_sign<kAbs>(static_cast<uint16_t>(a >> 16))} << 16;
};

// The sign of a NaN does not survive in f32 and bf16, where real parts compute an addition; f16 and f64 change the bit.
template <bool kAbs>
void decode_sign(Builder& b) {
  const bool ftz = b.take("ftz");
  const Type type = b.take_type();
  constexpr auto f32 = [](float a) { return canonical(kAbs ? std::fabs(a) : -a); };
  constexpr auto f32_flush = [](float a) { return canonical(kAbs ? std::fabs(flush(a)) : -flush(a)); };
  constexpr auto f64 = [](uint64_t a) { return kAbs ? a & ~(uint64_t{1} << 63) : a ^ uint64_t{1} << 63; };
  constexpr auto f16 = [](uint16_t a) { return static_cast<uint16_t>(kAbs ? a & 0x7fff : a ^ 0x8000); };
  constexpr auto f16x2 = [](uint32_t a) { return kAbs ? a & 0x7fff7fffu : a ^ 0x80008000u; };
  Execute e = nullptr;
  if (type == Type::kF32) e = ftz ? unary<float, float, f32_flush> : unary<float, float, f32>;
  if (type == Type::kF64) e = unary<uint64_t, uint64_t, f64>;
  if (type == Type::kF16) e = unary<uint16_t, uint16_t, f16>;
  if (type == Type::kF16x2) e = unary<uint32_t, uint32_t, f16x2>;
  if (type == Type::kBf16) e = unary<uint16_t, uint16_t, bf16_sign<kAbs>>;
  if (type == Type::kBf16x2) e = unary<uint32_t, uint32_t, bf16x2_sign<kAbs>>;
  decode_same(b, e, Unit::kAlu, type, 1);
}

// -- special functions --------------------------------------------------------------------------------------------------

template <auto F>
Status execute_function(Warp& w, const Inst& i, Mask m) {
  map_lanes<float, float>(w, m, i.op[0], [](float a) { return F(a); }, w.words(i.op[1]));
  return Status::kNext;
}
constexpr auto sqrt_ = [](float a) { return canonical(std::sqrt(a)); };
constexpr auto sqrt_flush = [](float a) { return canonical(std::sqrt(flush(a))); };
constexpr auto sin_ = [](float a) { return canonical(std::sin(a)); };
constexpr auto cos_ = [](float a) { return canonical(std::cos(a)); };
constexpr auto tanh_ = [](float a) { return canonical(std::tanh(a)); };
template <bool kBf16> constexpr auto half_exp2 = [](uint16_t a) -> uint16_t {
  const float r = exp2_approx<false>(half_to_float(a, kBf16));
  return kBf16 ? float_to_bf16(r) : float_to_f16(r);
};
template <bool kBf16> constexpr auto half_exp2_packed = [](uint32_t a) -> uint32_t {
  return half_exp2<kBf16>(static_cast<uint16_t>(a)) | uint32_t{half_exp2<kBf16>(static_cast<uint16_t>(a >> 16))} << 16;
};
template <bool kBf16> constexpr auto half_tanh = [](uint16_t a) -> uint16_t {
  const float r = std::tanh(half_to_float(a, kBf16));
  return kBf16 ? float_to_bf16(r) : float_to_f16(r);
};
template <bool kBf16> constexpr auto half_tanh_packed = [](uint32_t a) -> uint32_t {
  return half_tanh<kBf16>(static_cast<uint16_t>(a)) | uint32_t{half_tanh<kBf16>(static_cast<uint16_t>(a >> 16))} << 16;
};

template <auto kPlain, auto kFlush>
void decode_function(Builder& b) {
  if (b.take_one({"approx", "rn"}) < 0) b.refuse("the form is not known here");
  const bool ftz = b.take("ftz");
  const Type type = b.take_type();
  if (type != Type::kF32) b.refuse("the type is not known here");
  decode_same(b, ftz ? execute_function<kFlush> : execute_function<kPlain>, Unit::kMufu, type, 1);
}
template <Execute kF32, Execute kF32Flush, Execute kF16, Execute kBf16, Execute kF16x2, Execute kBf16x2>
void decode_function_any(Builder& b) {
  if (!b.take("approx")) b.refuse("only .approx is known");
  const bool ftz = b.take("ftz");
  const Type type = b.take_type();
  const Execute e = type == Type::kF32 ? (ftz ? kF32Flush : kF32) : type == Type::kF16 ? kF16 : type == Type::kBf16 ? kBf16
                  : type == Type::kF16x2 ? kF16x2 : type == Type::kBf16x2 ? kBf16x2 : nullptr;
  decode_same(b, e, Unit::kMufu, type, 1);
}

constexpr auto div_ = [](float a, float b) { return canonical(a / b); };
constexpr auto div_flush = [](float a, float b) { return canonical(flush(flush(a) / flush(b))); };
constexpr auto div_double = [](double a, double b) { return a / b; };
constexpr auto rcp_double = [](double a) { return 1.0 / a; };

}  // namespace

void decode_float_add(Builder& b) { decode_arithmetic<kAdd>(b); }
void decode_float_sub(Builder& b) { decode_arithmetic<kSub>(b); }
void decode_float_mul(Builder& b) { decode_arithmetic<kMul>(b); }
void decode_float_min(Builder& b) { decode_min_max<false>(b); }
void decode_float_max(Builder& b) { decode_min_max<true>(b); }
void decode_float_neg(Builder& b) { decode_sign<false>(b); }
void decode_float_abs(Builder& b) { decode_sign<true>(b); }
void decode_float_div(Builder& b) {
  if (b.take_one({"rn", "approx", "full"}) < 0) b.refuse("the rounding is not known");
  const bool ftz = b.take("ftz");
  const Type type = b.take_type();
  if (type == Type::kF64) return decode_same(b, binary<double, double, double, div_double>, Unit::kMufu, type, 2);
  if (type != Type::kF32) b.refuse("the type is not known here");
  decode_same(b, ftz ? binary<float, float, float, div_flush> : binary<float, float, float, div_>, Unit::kMufu, type, 2);
}

namespace {
void decode_rcp(Builder& b) {
  for (const std::string& s : b.at->suffix)
    if (s == "f64") {
      b.take("rn");
      b.take_type();
      return decode_same(b, unary<double, double, rcp_double>, Unit::kMufu, Type::kF64, 1);
    }
  decode_function<reciprocal<false>, reciprocal<true>>(b);
}
template <class T>
constexpr auto copy_sign = [](T a, T b) -> T { return b ^ ((a ^ b) & T{1} << (8 * sizeof(T) - 1)); };
void decode_copysign(Builder& b) {  // the sign of the first, the rest of the second
  const Type type = b.take_type();
  if (type != Type::kF32 && type != Type::kF64) b.refuse("the type is not known here");
  decode_same(b, type == Type::kF32 ? binary<uint32_t, uint32_t, uint32_t, copy_sign<uint32_t>>
                                    : binary<uint64_t, uint64_t, uint64_t, copy_sign<uint64_t>>, Unit::kAlu, type, 2);
}
}  // namespace

void register_float(DecodeTable& t) {
  t["fma"] = decode_arithmetic<kFma>;
  t["rcp"] = decode_rcp;
  t["copysign"] = decode_copysign;
  t["rsqrt"] = decode_function<reciprocal_sqrt<false>, reciprocal_sqrt<true>>;
  t["sqrt"] = decode_function<sqrt_, sqrt_flush>;
  t["lg2"] = decode_function<log2_approx<false>, log2_approx<true>>;
  t["sin"] = decode_function<sin_, sin_>;
  t["cos"] = decode_function<cos_, cos_>;
  t["ex2"] = decode_function_any<execute_function<exp2_approx<false>>, execute_function<exp2_approx<true>>,
                                 unary<uint16_t, uint16_t, half_exp2<false>>, unary<uint16_t, uint16_t, half_exp2<true>>,
                                 unary<uint32_t, uint32_t, half_exp2_packed<false>>, unary<uint32_t, uint32_t, half_exp2_packed<true>>>;
  t["tanh"] = decode_function_any<execute_function<tanh_>, execute_function<tanh_>,
                                  unary<uint16_t, uint16_t, half_tanh<false>>, unary<uint16_t, uint16_t, half_tanh<true>>,
                                  unary<uint32_t, uint32_t, half_tanh_packed<false>>, unary<uint32_t, uint32_t, half_tanh_packed<true>>>;
}

}  // namespace emu
