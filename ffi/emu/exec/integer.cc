// Integer arithmetic, logic and shifts.
#include <algorithm>
#include <bit>

#include "exec/carry.h"
#include "exec/lane_ops.h"

namespace emu {
namespace {

template <class T>
using Unsigned = std::make_unsigned_t<T>;
template <class T>
using Wider = std::conditional_t<sizeof(T) == 2, std::conditional_t<std::is_signed_v<T>, int32_t, uint32_t>,
              std::conditional_t<sizeof(T) == 4, std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>,
              std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>>>;

template <class T> constexpr auto add_ = [](T a, T b) { return static_cast<T>(Unsigned<T>(a) + Unsigned<T>(b)); };
template <class T> constexpr auto sub_ = [](T a, T b) { return static_cast<T>(Unsigned<T>(a) - Unsigned<T>(b)); };
template <class T> constexpr auto mul_ = [](T a, T b) { return static_cast<T>(uint64_t(a) * uint64_t(b)); };
template <class T> constexpr auto mul_high_ = [](T a, T b) {
  return static_cast<T>((Wider<T>(a) * Wider<T>(b)) >> (8 * sizeof(T)));
};
template <class T> constexpr auto mul_wide_ = [](T a, T b) { return Wider<T>(Wider<T>(a) * Wider<T>(b)); };
template <class T> constexpr auto mad_ = [](T a, T b, T c) { return static_cast<T>(uint64_t(a) * uint64_t(b) + uint64_t(c)); };
template <class T> constexpr auto mad_high_ = [](T a, T b, T c) {
  return static_cast<T>(Unsigned<T>((Wider<T>(a) * Wider<T>(b)) >> (8 * sizeof(T))) + Unsigned<T>(c));
};
template <class T> constexpr auto mad_wide_ = [](T a, T b, Wider<T> c) {
  return Wider<T>(Unsigned<Wider<T>>(Wider<T>(a) * Wider<T>(b)) + Unsigned<Wider<T>>(c));
};
// Division by zero gives all ones on real parts; the overflowing quotient gives the dividend.
template <class T> constexpr auto div_ = [](T a, T b) {
  if (b == 0) return static_cast<T>(-1);
  if constexpr (std::is_signed_v<T>)
    if (b == -1) return static_cast<T>(0 - Unsigned<T>(a));
  return static_cast<T>(a / b);
};
template <class T> constexpr auto rem_ = [](T a, T b) {
  if (b == 0) return a;
  if constexpr (std::is_signed_v<T>)
    if (b == -1) return T(0);
  return static_cast<T>(a % b);
};
template <class T> constexpr auto min_ = [](T a, T b) { return a < b ? a : b; };
template <class T> constexpr auto max_ = [](T a, T b) { return a > b ? a : b; };
template <class T> constexpr auto neg_ = [](T a) { return static_cast<T>(0 - Unsigned<T>(a)); };
template <class T> constexpr auto abs_ = [](T a) { return static_cast<T>(a < 0 ? 0 - Unsigned<T>(a) : Unsigned<T>(a)); };
template <class T> constexpr auto and_ = [](T a, T b) { return static_cast<T>(a & b); };
template <class T> constexpr auto or_ = [](T a, T b) { return static_cast<T>(a | b); };
template <class T> constexpr auto xor_ = [](T a, T b) { return static_cast<T>(a ^ b); };
template <class T> constexpr auto not_ = [](T a) { return static_cast<T>(~a); };
template <class T> constexpr auto shl_ = [](T a, uint32_t n) {
  return n >= 8 * sizeof(T) ? T(0) : static_cast<T>(a << n);
};
template <class T> constexpr auto shr_ = [](T a, uint32_t n) {
  const uint32_t most = 8 * sizeof(T) - 1;
  if constexpr (std::is_signed_v<T>) return static_cast<T>(a >> (n > most ? most : n));
  else return n > most ? T(0) : static_cast<T>(a >> n);
};
// -- decoding -----------------------------------------------------------------------------------------------------------

// The instance for a type among those of a family; null when the type is not one of them.
#define EMU_PICK(type, F)                               \
  ((type) == Type::kU16 || (type) == Type::kB16   ? F(uint16_t) \
   : (type) == Type::kS16                         ? F(int16_t)  \
   : (type) == Type::kU32 || (type) == Type::kB32 ? F(uint32_t) \
   : (type) == Type::kS32                         ? F(int32_t)  \
   : (type) == Type::kU64 || (type) == Type::kB64 ? F(uint64_t) \
   : (type) == Type::kS64                         ? F(int64_t)  \
                                                  : static_cast<Execute>(nullptr))

bool arithmetic(Type t) {
  return t == Type::kU16 || t == Type::kS16 || t == Type::kU32 || t == Type::kS32 || t == Type::kU64 || t == Type::kS64;
}
bool untyped(Type t) { return t == Type::kB16 || t == Type::kB32 || t == Type::kB64; }
bool float_type(const Builder& b) {
  for (const std::string& s : b.at->suffix)
    if (s[0] == 'f' || s.rfind("bf16", 0) == 0) return true;
  return false;
}

}  // namespace

// Shared with exec/float.cc: opcodes that exist for integers and floating-point numbers alike.
void decode_float_add(Builder&);
void decode_float_sub(Builder&);
void decode_float_mul(Builder&);
void decode_float_div(Builder&);
void decode_float_min(Builder&);
void decode_float_max(Builder&);
void decode_float_neg(Builder&);
void decode_float_abs(Builder&);
void decode_predicate_logic(Builder&);

namespace {

template <Execute (*kPick)(Type), void (*kFloat)(Builder&), int kSources>
void decode_arithmetic(Builder& b) {
  if (kFloat && float_type(b)) return kFloat(b);
  if (has_carry(b) && (b.at->opcode == "add" || b.at->opcode == "sub")) return decode_carry(b);
  const Type type = b.take_type();
  if (!arithmetic(type)) b.refuse("the type is not known here");
  decode_same(b, kPick(type), Unit::kAlu, type, kSources);
}

#define EMU_BINARY(name)                                                       \
  Execute pick_##name(Type t) {                                                \
    auto make = [&]<class T>(T) -> Execute { return binary<T, T, T, name##_<T>>; }; \
    return t == Type::kU16 ? make(uint16_t()) : t == Type::kS16 ? make(int16_t()) : t == Type::kU32 ? make(uint32_t()) \
         : t == Type::kS32 ? make(int32_t()) : t == Type::kU64 ? make(uint64_t()) : make(int64_t()); \
  }
EMU_BINARY(add)
EMU_BINARY(sub)
EMU_BINARY(div)
EMU_BINARY(rem)
EMU_BINARY(min)
EMU_BINARY(max)
#undef EMU_BINARY

template <bool kMax> constexpr auto min_max_relu = [](int32_t a, int32_t b) {
  const int32_t r = kMax ? (a > b ? a : b) : (a < b ? a : b);
  return r > 0 ? r : 0;
};
template <bool kMax>
void decode_min_max(Builder& b) {
  if (!b.take("relu")) return decode_arithmetic<kMax ? pick_max : pick_min, kMax ? decode_float_max : decode_float_min, 2>(b);
  if (b.take_type() != Type::kS32) b.refuse(".relu is known for s32 only");
  decode_same(b, binary<int32_t, int32_t, int32_t, min_max_relu<kMax>>, Unit::kAlu, Type::kS32, 2);
}

Execute pick_neg(Type t) {
  return t == Type::kS16 ? unary<int16_t, int16_t, neg_<int16_t>> : t == Type::kS32 ? unary<int32_t, int32_t, neg_<int32_t>>
       : t == Type::kS64 ? unary<int64_t, int64_t, neg_<int64_t>> : static_cast<Execute>(nullptr);
}
Execute pick_abs(Type t) {
  return t == Type::kS16 ? unary<int16_t, int16_t, abs_<int16_t>> : t == Type::kS32 ? unary<int32_t, int32_t, abs_<int32_t>>
       : t == Type::kS64 ? unary<int64_t, int64_t, abs_<int64_t>> : static_cast<Execute>(nullptr);
}

void decode_mul(Builder& b) {
  if (float_type(b)) return decode_float_mul(b);
  const int half = b.take_one({"lo", "hi", "wide"});
  const Type type = b.take_type();
  if (!arithmetic(type) || half < 0) b.refuse("the form is not known here");
#define EMU_LOW(T) binary<T, T, T, mul_<T>>
#define EMU_HIGH(T) binary<T, T, T, mul_high_<T>>
  if (half < 2) return decode_same(b, half == 0 ? EMU_PICK(type, EMU_LOW) : EMU_PICK(type, EMU_HIGH), Unit::kAlu, type, 2);
  if (type_bits(type) == 64) b.refuse("there is no 128-bit product");
  b.expect_operands(3, 3);
  b.inst.op[1] = b.source(1, type);
  b.inst.op[2] = b.source(2, type);
  b.inst.op[0] = b.destination(b.operand(0), 2 * type_bits(type));
  b.inst.execute = type == Type::kU16   ? binary<uint32_t, uint16_t, uint16_t, mul_wide_<uint16_t>>
                   : type == Type::kS16 ? binary<int32_t, int16_t, int16_t, mul_wide_<int16_t>>
                   : type == Type::kU32 ? binary<uint64_t, uint32_t, uint32_t, mul_wide_<uint32_t>>
                                        : binary<int64_t, int32_t, int32_t, mul_wide_<int32_t>>;
  b.inst.unit = Unit::kAlu;
  b.finish_modifiers();
}

void decode_mad(Builder& b) {
  if (has_carry(b)) return decode_carry(b);
  const int half = b.take_one({"lo", "hi", "wide"});
  const Type type = b.take_type();
  if (!arithmetic(type) || half < 0) b.refuse("the form is not known here");
#define EMU_MAD_LOW(T) ternary<T, T, T, T, mad_<T>>
#define EMU_MAD_HIGH(T) ternary<T, T, T, T, mad_high_<T>>
  if (half < 2)
    return decode_same(b, half == 0 ? EMU_PICK(type, EMU_MAD_LOW) : EMU_PICK(type, EMU_MAD_HIGH), Unit::kAlu, type, 3);
  if (type_bits(type) == 64) b.refuse("there is no 128-bit product");
  b.expect_operands(4, 4);
  const int wide = 2 * type_bits(type);
  b.inst.op[1] = b.source(1, type);
  b.inst.op[2] = b.source(2, type);
  b.inst.op[3] = b.source(b.operand(3), wide);
  b.inst.op[0] = b.destination(b.operand(0), wide);
  b.inst.execute = type == Type::kU16   ? ternary<uint32_t, uint16_t, uint16_t, uint32_t, mad_wide_<uint16_t>>
                   : type == Type::kS16 ? ternary<int32_t, int16_t, int16_t, int32_t, mad_wide_<int16_t>>
                   : type == Type::kU32 ? ternary<uint64_t, uint32_t, uint32_t, uint64_t, mad_wide_<uint32_t>>
                                        : ternary<int64_t, int32_t, int32_t, int64_t, mad_wide_<int32_t>>;
  b.inst.unit = Unit::kAlu;
  b.finish_modifiers();
}

template <int kWhich>  // and, or, xor
void decode_logic(Builder& b) {
  const Type type = b.take_type();
  if (type == Type::kPred) return decode_predicate_logic(b);
  if (!untyped(type)) b.refuse("the type is not known here");
#define EMU_AND(T) binary<T, T, T, and_<T>>
#define EMU_OR(T) binary<T, T, T, or_<T>>
#define EMU_XOR(T) binary<T, T, T, xor_<T>>
  decode_same(b, kWhich == 0 ? EMU_PICK(type, EMU_AND) : kWhich == 1 ? EMU_PICK(type, EMU_OR) : EMU_PICK(type, EMU_XOR),
              Unit::kAlu, type, 2);
}
void decode_not(Builder& b) {
  const Type type = b.take_type();
  if (type == Type::kPred) return decode_predicate_logic(b);
  if (!untyped(type)) b.refuse("the type is not known here");
#define EMU_NOT(T) unary<T, T, not_<T>>
  decode_same(b, EMU_PICK(type, EMU_NOT), Unit::kAlu, type, 1);
}

template <bool kLeft>
void decode_shift(Builder& b) {
  const Type type = b.take_type();
  if (!untyped(type) && !(arithmetic(type) && !kLeft)) b.refuse("the type is not known here");
  b.expect_operands(3, 3);
  b.inst.op[1] = b.source(1, type);
  b.inst.op[2] = b.source(2, Type::kU32);
  b.inst.op[0] = b.destination(0, type);
#define EMU_SHL(T) binary<T, T, uint32_t, shl_<T>>
#define EMU_SHR(T) binary<T, T, uint32_t, shr_<T>>
  b.inst.execute = kLeft ? EMU_PICK(type, EMU_SHL) : EMU_PICK(type, EMU_SHR);
  b.inst.unit = Unit::kAlu;
  b.finish_modifiers();
}

}  // namespace

void register_integer(DecodeTable& t) {
  t["add"] = decode_arithmetic<pick_add, decode_float_add, 2>;
  t["sub"] = decode_arithmetic<pick_sub, decode_float_sub, 2>;
  t["mul"] = decode_mul;
  t["mad"] = decode_mad;
  t["div"] = decode_arithmetic<pick_div, decode_float_div, 2>;
  t["rem"] = decode_arithmetic<pick_rem, nullptr, 2>;
  t["min"] = decode_min_max<false>;
  t["max"] = decode_min_max<true>;
  t["neg"] = decode_arithmetic<pick_neg, decode_float_neg, 1>;
  t["abs"] = decode_arithmetic<pick_abs, decode_float_abs, 1>;
  t["and"] = decode_logic<0>;
  t["or"] = decode_logic<1>;
  t["xor"] = decode_logic<2>;
  t["not"] = decode_not;
  t["shl"] = decode_shift<true>;
  t["shr"] = decode_shift<false>;
}

}  // namespace emu
