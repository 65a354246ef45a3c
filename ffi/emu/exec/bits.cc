// Bits and bytes of integers: counts, fields, funnel shifts, permutations, any logic of three, dot products of bytes.
#include <algorithm>
#include <bit>

#include "exec/lane_ops.h"

namespace emu {
namespace {

template <class T> constexpr auto clz_ = [](T a) { return uint32_t(std::countl_zero(a)); };
template <class T> constexpr auto popc_ = [](T a) { return uint32_t(std::popcount(a)); };
constexpr auto brev_ = [](uint32_t a) {
  a = (a >> 1 & 0x55555555) | (a & 0x55555555) << 1;
  a = (a >> 2 & 0x33333333) | (a & 0x33333333) << 2;
  a = (a >> 4 & 0x0f0f0f0f) | (a & 0x0f0f0f0f) << 4;
  return __builtin_bswap32(a);
};
constexpr auto bfind_ = [](uint32_t a) { return a ? 31u - uint32_t(std::countl_zero(a)) : 0xffffffffu; };
template <bool kSigned> constexpr auto bfe_ = [](uint32_t a, uint32_t position, uint32_t length) -> uint32_t {
  position &= 255;
  length &= 255;
  if (length == 0) return 0;
  const uint64_t sign = kSigned ? a >> std::min(position + length - 1, 31u) & 1 : 0;
  const uint64_t wide = uint64_t(a) | (sign ? 0xffffffff00000000u : 0);
  const uint64_t field = position > 63 ? (sign ? ~uint64_t{0} : 0) : wide >> position;
  if (length >= 32) return static_cast<uint32_t>(field);
  const uint32_t bits = static_cast<uint32_t>(field) & ((1u << length) - 1);
  return sign ? bits | ~((1u << length) - 1) : bits;
};
// The shift is in c; a is the low word, b the high one.
template <bool kLeft, bool kWrap> constexpr auto shf_ = [](uint32_t a, uint32_t b, uint32_t c) -> uint32_t {
  const uint32_t n = kWrap ? c & 31 : c > 32 ? 32 : c;
  const uint64_t both = uint64_t(b) << 32 | a;
  if (kLeft) return n == 32 ? a : static_cast<uint32_t>((both << n) >> 32);
  return n == 32 ? b : static_cast<uint32_t>(both >> n);
};

void decode_shf(Builder& b) {
  const int left = b.take_one({"l", "r"}), wrap = b.take_one({"wrap", "clamp"});
  if (left < 0 || wrap < 0 || b.take_type() != Type::kB32) b.refuse("the form is not known here");
  decode_same(b, left == 0 ? (wrap == 0 ? ternary<uint32_t, uint32_t, uint32_t, uint32_t, shf_<true, true>>
                                        : ternary<uint32_t, uint32_t, uint32_t, uint32_t, shf_<true, false>>)
                           : (wrap == 0 ? ternary<uint32_t, uint32_t, uint32_t, uint32_t, shf_<false, true>>
                                        : ternary<uint32_t, uint32_t, uint32_t, uint32_t, shf_<false, false>>),
              Unit::kAlu, Type::kB32, 3);
}

// Counts: the result has 32 bits whatever the source.
template <bool kZeros>
void decode_count(Builder& b) {
  const Type type = b.take_type();
  if (type != Type::kB32 && type != Type::kB64) b.refuse("the type is not known here");
  b.expect_operands(2, 2);
  b.inst.op[1] = b.source(1, type);
  b.inst.op[0] = b.destination(0, Type::kU32);
  if (kZeros)
    b.inst.execute = type == Type::kB32 ? unary<uint32_t, uint32_t, clz_<uint32_t>> : unary<uint32_t, uint64_t, clz_<uint64_t>>;
  else
    b.inst.execute = type == Type::kB32 ? unary<uint32_t, uint32_t, popc_<uint32_t>> : unary<uint32_t, uint64_t, popc_<uint64_t>>;
  b.inst.unit = Unit::kAlu;
  b.finish_modifiers();
}
void decode_brev(Builder& b) {
  if (b.take_type() != Type::kB32) b.refuse("the type is not known here");
  decode_same(b, unary<uint32_t, uint32_t, brev_>, Unit::kAlu, Type::kB32, 1);
}
void decode_bfind(Builder& b) {
  if (b.take_type() != Type::kU32) b.refuse("the type is not known here");
  decode_same(b, unary<uint32_t, uint32_t, bfind_>, Unit::kAlu, Type::kU32, 1);
}
void decode_bfe(Builder& b) {
  const Type type = b.take_type();
  if (type != Type::kU32 && type != Type::kS32) b.refuse("the type is not known here");
  decode_same(b, type == Type::kU32 ? ternary<uint32_t, uint32_t, uint32_t, uint32_t, bfe_<false>>
                                    : ternary<uint32_t, uint32_t, uint32_t, uint32_t, bfe_<true>>,
              Unit::kAlu, type, 3);
}

constexpr auto bfi_ = [](uint32_t a, uint32_t b, uint32_t position, uint32_t length) -> uint32_t {
  const uint32_t p = position & 255, n = length & 255;
  const uint64_t field = n >= 32 ? 0xffffffffu : (uint64_t{1} << n) - 1;
  const uint32_t mask = p > 31 ? 0 : static_cast<uint32_t>(field << p);
  return (b & ~mask) | (p > 31 ? 0 : a << p & mask);
};
Status execute_bfi(Warp& w, const Inst& in, Mask m) {
  map_lanes<uint32_t, uint32_t, uint32_t, uint32_t, uint32_t>(w, m, in.op[0], bfi_, w.words(in.op[1]), w.words(in.op[2]),
                                                              w.words(in.op[3]), w.words(in.op[4]));
  return Status::kNext;
}
void decode_bfi(Builder& b) {
  if (b.take_type() != Type::kB32) b.refuse("the type is not known here");
  decode_same(b, execute_bfi, Unit::kAlu, Type::kB32, 4);
}

// Bytes of (b, a) picked by the nibbles of c; the top bit of a nibble replicates the byte's sign.
constexpr auto prmt_ = [](uint32_t a, uint32_t b, uint32_t c) {
  const uint64_t bytes = uint64_t(b) << 32 | a;
  uint32_t result = 0;
  for (int k = 0; k < 4; ++k) {
    const uint32_t nibble = c >> (4 * k) & 15;
    uint32_t byte = static_cast<uint32_t>(bytes >> (8 * (nibble & 7))) & 255;
    if (nibble & 8) byte = byte & 128 ? 255 : 0;
    result |= byte << (8 * k);
  }
  return result;
};
void decode_prmt(Builder& b) {
  if (b.take_type() != Type::kB32) b.refuse("the type is not known here");
  decode_same(b, ternary<uint32_t, uint32_t, uint32_t, uint32_t, prmt_>, Unit::kAlu, Type::kB32, 3);
}

// dp2a: c + the products of a's two halves with two bytes of b; dp4a: of the four bytes of each.
template <bool kSignedA, bool kSignedB, int kTerms, int kShift>
constexpr auto dot = [](uint32_t a, uint32_t b, uint32_t c) {
  constexpr int kBitsA = 32 / kTerms;
  uint32_t sum = c;
  for (int k = 0; k < kTerms; ++k) {
    const uint32_t x = a << (32 - kBitsA * (k + 1)), y = b << (24 - 8 * k - kShift);
    const uint32_t p = kSignedA ? static_cast<uint32_t>(static_cast<int32_t>(x) >> (32 - kBitsA)) : x >> (32 - kBitsA);
    const uint32_t q = kSignedB ? static_cast<uint32_t>(static_cast<int32_t>(y) >> 24) : y >> 24;
    sum += p * q;
  }
  return sum;
};
template <int kTerms, int kShift>
Execute pick_dot(bool a, bool b) {
  return a ? (b ? ternary<uint32_t, uint32_t, uint32_t, uint32_t, dot<true, true, kTerms, kShift>>
                : ternary<uint32_t, uint32_t, uint32_t, uint32_t, dot<true, false, kTerms, kShift>>)
           : (b ? ternary<uint32_t, uint32_t, uint32_t, uint32_t, dot<false, true, kTerms, kShift>>
                : ternary<uint32_t, uint32_t, uint32_t, uint32_t, dot<false, false, kTerms, kShift>>);
}
void decode_dot(Builder& b) {
  const bool four = b.at->opcode == "dp4a";
  const int high = four ? 0 : b.take_one({"lo", "hi"});
  const Type a = b.take_type(), c = b.take_type();
  const auto known = [](Type t) { return t == Type::kU32 || t == Type::kS32; };
  if (high < 0 || !known(a) || !known(c)) b.refuse("the form is not known here");
  const bool sa = a == Type::kS32, sb = c == Type::kS32;
  decode_same(b, four ? pick_dot<4, 0>(sa, sb) : high ? pick_dot<2, 16>(sa, sb) : pick_dot<2, 0>(sa, sb), Unit::kAlu, Type::kB32, 3);
}

// lop3: the result's bit is bit (4a + 2b + c) of the table.
Status execute_lop3(Warp& w, const Inst& in, Mask m) {
  const uint32_t table = static_cast<uint32_t>(in.immediate);
  const auto f = [table](uint32_t a, uint32_t b, uint32_t c) {
    uint32_t result = 0;
    for (int k = 0; k < 8; ++k)
      if (table >> k & 1) result |= (k & 4 ? a : ~a) & (k & 2 ? b : ~b) & (k & 1 ? c : ~c);
    return result;
  };
  map_lanes<uint32_t, uint32_t, uint32_t, uint32_t>(w, m, in.op[0], f, w.words(in.op[1]), w.words(in.op[2]), w.words(in.op[3]));
  return Status::kNext;
}
void decode_lop3(Builder& b) {
  if (b.take_type() != Type::kB32) b.refuse("the type is not known here");
  b.expect_operands(5, 5);
  for (int i = 1; i <= 3; ++i) b.inst.op[i] = b.source(i, Type::kB32);
  b.inst.op[0] = b.destination(0, Type::kB32);
  b.inst.immediate = static_cast<int64_t>(b.immediate(4));
  b.inst.execute = execute_lop3;
  b.inst.unit = Unit::kAlu;
  b.finish_modifiers();
}

}  // namespace

void register_bits(DecodeTable& t) {
  t["shf"] = decode_shf;
  t["clz"] = decode_count<true>;
  t["popc"] = decode_count<false>;
  t["brev"] = decode_brev;
  t["bfind"] = decode_bfind;
  t["bfe"] = decode_bfe;
  t["bfi"] = decode_bfi;
  t["prmt"] = decode_prmt;
  t["lop3"] = decode_lop3;
  t["dp2a"] = decode_dot;
  t["dp4a"] = decode_dot;
}

}  // namespace emu
