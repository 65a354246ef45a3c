// What lanes of a warp exchange: shfl, vote, match, redux, elect.
#include <bit>

#include "exec/lane_ops.h"
#include "machine/cluster.h"

namespace emu {
namespace {

// The member mask names the lanes that take part: those of them that are alive must execute this together. With the mask
// of all lanes the instruction is decoded as aligned, and diverged lanes are waited for before it comes here.
void check_members(Warp& w, Mask m, Mask members) {
  if ((m & ~members) != 0) throw fail("lanes 0x%08x execute this, but the member mask is 0x%08x", m, members);
  if ((members & w.live() & ~m) != 0)
    throw fail("the member mask is 0x%08x, but only lanes 0x%08x execute this", members, m);
}

Mask member_mask(Warp& w, Slot slot, Mask m) { return w.words(slot)[first_lane(m)]; }

void decode_members(Builder& b, int op, size_t i) {
  const ptx::Operand& o = b.operand(i);
  b.inst.op[op] = b.source(i, Type::kB32);
  b.inst.aligned = o.kind == ptx::Operand::kInteger && static_cast<uint32_t>(o.bits) == kAllLanes;
}

// op: 0 d, 1 a, 2 b (lane or delta), 3 c (clamp and segment), 4 members, 5 p (in range)
enum Mode { kUp, kDown, kButterfly, kIndex };
template <Mode kMode>
Status execute_shfl(Warp& w, const Inst& in, Mask m) {
  check_members(w, m, member_mask(w, in.op[4], m));
  const uint32_t *a = w.words(in.op[1]), *b = w.words(in.op[2]), *c = w.words(in.op[3]);
  uint32_t result[kLanes];
  Mask in_range = 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    const int bval = static_cast<int>(b[lane] & 31), cval = static_cast<int>(c[lane] & 31);
    const int segment = static_cast<int>(c[lane] >> 8 & 31);
    const int most = (lane & segment) | (cval & ~segment), least = lane & segment;
    int j;
    bool valid;
    if (kMode == kUp) valid = (j = lane - bval) >= most;
    else if (kMode == kDown) valid = (j = lane + bval) <= most;
    else if (kMode == kButterfly) valid = (j = lane ^ bval) <= most;
    else valid = (j = least | (bval & ~segment)) <= most;
    if (!valid) j = lane;
    if ((m >> lane & 1) && !(m >> j & 1)) throw fail("lane %d reads from lane %d, which does not take part", lane, j);
    in_range |= static_cast<Mask>(valid) << lane;
    result[lane] = a[j];
  }
  if (in.op[0] != kNoSlot) {
    uint32_t* d = w.words(in.op[0]);
    for (int lane = 0; lane < kLanes; ++lane)
      if (m >> lane & 1) d[lane] = result[lane];
  }
  set_predicate(w, in.op[5], m, in_range);
  return Status::kNext;
}
void decode_shfl(Builder& b) {
  if (!b.take("sync")) b.refuse("only the .sync form is known");
  const int mode = b.take_one({"up", "down", "bfly", "idx"});
  if (mode < 0 || b.take_type() != Type::kB32) b.refuse("the form is not known here");
  b.expect_operands(5, 5);
  for (int i = 1; i <= 3; ++i) b.inst.op[i] = b.source(i, Type::kB32);
  decode_members(b, 4, 4);
  const ptx::Operand& d = b.operand(0);
  if (d.kind == ptx::Operand::kPair) {
    b.inst.op[0] = b.destination(d.items.at(0), 32);
    b.inst.op[5] = b.destination(d.items.at(1), 1);
  } else {
    b.inst.op[0] = b.destination(d, 32);
  }
  static constexpr Execute table[] = {execute_shfl<kUp>, execute_shfl<kDown>, execute_shfl<kButterfly>, execute_shfl<kIndex>};
  b.inst.execute = table[mode];
  b.inst.unit = Unit::kShuffle;
  b.finish_modifiers();
}

enum Vote { kAll, kAny, kUni, kBallot };
template <Vote kVote>
Status execute_vote(Warp& w, const Inst& in, Mask m) {
  check_members(w, m, member_mask(w, in.op[2], m));
  const Mask p = (w.predicate(in.op[1]) ^ static_cast<Mask>(in.immediate)) & m;
  if (kVote == kBallot) {
    set_lanes(w.words(in.op[0]), m, [&](int) { return p; });
    return Status::kNext;
  }
  const bool result = kVote == kAll ? p == m : kVote == kAny ? p != 0 : p == m || p == 0;
  auto& [times, true_times] = w.cta.cluster.traffic.votes[in.line];
  ++times;
  true_times += result;
  set_predicate(w, in.op[0], m, result ? kAllLanes : 0);
  return Status::kNext;
}
void decode_vote(Builder& b) {
  if (!b.take("sync")) b.refuse("only the .sync form is known");
  const int vote = b.take_one({"all", "any", "uni", "ballot"});
  const Type type = b.take_type();
  if (vote < 0 || type != (vote == kBallot ? Type::kB32 : Type::kPred)) b.refuse("the form is not known here");
  b.expect_operands(3, 3);
  ptx::Operand p = b.operand(1);
  b.inst.immediate = p.negated ? kAllLanes : 0;
  p.negated = false;
  b.inst.op[1] = b.source(p, 1);
  decode_members(b, 2, 2);
  b.inst.op[0] = b.destination(0, type);
  static constexpr Execute table[] = {execute_vote<kAll>, execute_vote<kAny>, execute_vote<kUni>, execute_vote<kBallot>};
  b.inst.execute = table[vote];
  b.inst.unit = Unit::kShuffle;
  b.finish_modifiers();
}

template <class T, int kWhich>  // add, min, max, and, or, xor
Status execute_redux(Warp& w, const Inst& in, Mask m) {
  check_members(w, m, member_mask(w, in.op[2], m));
  const uint32_t* a = w.words(in.op[1]);
  T result = static_cast<T>(a[first_lane(m)]);
  for (int i = first_lane(m) + 1; i < kLanes; ++i) {
    if (!(m >> i & 1)) continue;
    const T v = static_cast<T>(a[i]);
    result = kWhich == 0 ? static_cast<T>(uint32_t(result) + uint32_t(v)) : kWhich == 1 ? (v < result ? v : result)
           : kWhich == 2 ? (v > result ? v : result) : kWhich == 3 ? result & v : kWhich == 4 ? result | v : result ^ v;
  }
  set_lanes(w.words(in.op[0]), m, [&](int) { return static_cast<uint32_t>(result); });
  return Status::kNext;
}
void decode_redux(Builder& b) {
  if (!b.take("sync")) b.refuse("only the .sync form is known");
  const int which = b.take_one({"add", "min", "max", "and", "or", "xor"});
  const Type type = b.take_type();
  const bool sign = type == Type::kS32;
  if (which < 0 || type_bits(type) != 32 || type == Type::kF32) b.refuse("the form is not known here");
  b.expect_operands(3, 3);
  b.inst.op[1] = b.source(1, Type::kB32);
  decode_members(b, 2, 2);
  b.inst.op[0] = b.destination(0, Type::kB32);
  static constexpr Execute table[2][6] = {
      {execute_redux<uint32_t, 0>, execute_redux<uint32_t, 1>, execute_redux<uint32_t, 2>, execute_redux<uint32_t, 3>,
       execute_redux<uint32_t, 4>, execute_redux<uint32_t, 5>},
      {execute_redux<int32_t, 0>, execute_redux<int32_t, 1>, execute_redux<int32_t, 2>, execute_redux<int32_t, 3>,
       execute_redux<int32_t, 4>, execute_redux<int32_t, 5>}};
  b.inst.execute = table[sign][which];
  b.inst.unit = Unit::kShuffle;
  b.finish_modifiers();
}

Status execute_match_any(Warp& w, const Inst& in, Mask m) {
  check_members(w, m, member_mask(w, in.op[2], m));
  const uint32_t* a = w.words(in.op[1]);
  set_lanes(w.words(in.op[0]), m, [&](int i) { return lanes_where([&](int k) { return (m >> k & 1) && a[k] == a[i]; }); });
  return Status::kNext;
}
void decode_match(Builder& b) {
  if (!b.take("any") || !b.take("sync") || b.take_type() != Type::kB32) b.refuse("the form is not known here");
  b.expect_operands(3, 3);
  b.inst.op[1] = b.source(1, Type::kB32);
  decode_members(b, 2, 2);
  b.inst.op[0] = b.destination(0, Type::kB32);
  b.inst.execute = execute_match_any;
  b.inst.unit = Unit::kShuffle;
  b.finish_modifiers();
}

// Elects the lowest lane; which one is for the hardware to choose.
Status execute_elect(Warp& w, const Inst& in, Mask m) {
  check_members(w, m, member_mask(w, in.op[1], m));
  const uint32_t leader = static_cast<uint32_t>(first_lane(m));
  if (in.op[0] != kNoSlot) set_lanes(w.words(in.op[0]), m, [&](int) { return leader; });
  set_predicate(w, in.op[2], m, 1u << leader);
  return Status::kNext;
}
void decode_elect(Builder& b) {
  if (!b.take("sync")) b.refuse("only the .sync form is known");
  b.expect_operands(2, 2);
  decode_members(b, 1, 1);
  const ptx::Operand& d = b.operand(0);
  if (d.kind != ptx::Operand::kPair) b.refuse("expected d|p");
  b.inst.op[0] = b.destination(d.items.at(0), 32);
  b.inst.op[2] = b.destination(d.items.at(1), 1);
  b.inst.execute = execute_elect;
  b.inst.unit = Unit::kShuffle;
  b.finish_modifiers();
}

}  // namespace

void register_shuffle(DecodeTable& t) {
  t["shfl"] = decode_shfl;
  t["vote"] = decode_vote;
  t["redux"] = decode_redux;
  t["match"] = decode_match;
  t["elect"] = decode_elect;
}

}  // namespace emu
