// Arithmetic with the carry flag: add.cc, addc, sub.cc, subc, mad.cc, madc. The flag of each lane is a bit of Warp::carry.
#include "exec/carry.h"

#include <bit>

#include "exec/lane_ops.h"

namespace emu {
namespace {

// immediate: bit 0 reads the flag, bit 1 writes it, bit 2 the high half of a product
enum Form { kReads = 1, kWrites = 2, kHigh = 4 };

template <class T, bool kSigned>
T high_product(T a, T b) {
  if constexpr (sizeof(T) == 4)
    return kSigned ? static_cast<T>((int64_t{static_cast<int32_t>(a)} * static_cast<int32_t>(b)) >> 32)
                   : static_cast<T>((uint64_t{a} * b) >> 32);
  else
    return kSigned ? static_cast<T>((static_cast<__int128>(static_cast<int64_t>(a)) * static_cast<int64_t>(b)) >> 64)
                   : static_cast<T>((static_cast<unsigned __int128>(a) * b) >> 64);
}

enum Kind { kAdd, kSub, kMad };
template <class T, Kind kKind, bool kSigned>
Status execute_carry(Warp& w, const Inst& in, Mask m) {
  const T *a = w.at<T>(in.op[1]), *b = w.at<T>(in.op[2]), *c = kKind == kMad ? w.at<T>(in.op[3]) : a;
  Mask flag = 0;
  set_lanes(w.at<T>(in.op[0]), m, [&](int i) {
    const T in_flag = in.immediate & kReads ? w.carry >> i & 1 : 0;
    T x = a[i], y = b[i];
    if (kKind == kMad) {
      x = in.immediate & kHigh ? high_product<T, kSigned>(a[i], b[i]) : static_cast<T>(a[i] * b[i]);
      y = c[i];
    }
    T sum, carry;
    if (kKind == kSub) {  // the flag is a borrow
      sum = static_cast<T>(x - y - in_flag);
      carry = x < y || (x == y && in_flag);
    } else {
      const T partial = static_cast<T>(x + y);
      sum = static_cast<T>(partial + in_flag);
      carry = partial < x || sum < partial;
    }
    flag |= static_cast<Mask>(carry & 1) << i;
    return sum;
  });
  if (in.immediate & kWrites) w.carry = (w.carry & ~m) | (flag & m);
  return Status::kNext;
}

template <Kind kKind>
Execute pick(Type t) {
  switch (t) {
    case Type::kU32: return execute_carry<uint32_t, kKind, false>;
    case Type::kS32: return execute_carry<uint32_t, kKind, true>;
    case Type::kU64: return execute_carry<uint64_t, kKind, false>;
    case Type::kS64: return execute_carry<uint64_t, kKind, true>;
    default: return nullptr;
  }
}

}  // namespace

bool has_carry(const Builder& b) {
  for (const std::string& s : b.at->suffix)
    if (s == "cc") return true;
  return false;
}

void decode_carry(Builder& b) {
  const std::string& op = b.at->opcode;
  const bool reads = op.back() == 'c' && op.size() == 4;  // addc, subc, madc
  const bool writes = b.take("cc");
  const Kind kind = op[0] == 'a' ? kAdd : op[0] == 's' ? kSub : kMad;
  int half = 0;
  if (kind == kMad && (half = b.take_one({"lo", "hi"})) < 0) b.refuse("the form is not known here");
  const Type type = b.take_type();
  b.inst.immediate = (reads ? kReads : 0) | (writes ? kWrites : 0) | (half ? kHigh : 0);
  decode_same(b, kind == kAdd ? pick<kAdd>(type) : kind == kSub ? pick<kSub>(type) : pick<kMad>(type), Unit::kAlu, type,
              kind == kMad ? 3 : 2);
}

void register_carry(DecodeTable& t) {
  t["addc"] = decode_carry;
  t["subc"] = decode_carry;
  t["madc"] = decode_carry;
}

}  // namespace emu
