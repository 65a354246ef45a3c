// Loops over the lanes of a warp, written so that the compiler makes vector code of them.
#pragma once

#include <bit>
#include <cstdint>
#include <type_traits>

#include "decode/builder.h"
#include "machine/warp.h"

namespace emu {

// Registers of 16 and 32 bits have a word a lane, those of 64 bits two.
template <class T>
using Cell = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;

template <class T>
inline T load_cell(Cell<T> cell) {
  if constexpr (sizeof(T) == sizeof(Cell<T>)) return std::bit_cast<T>(cell);
  else return std::bit_cast<T>(static_cast<std::conditional_t<sizeof(T) == 1, uint8_t, uint16_t>>(cell));
}
template <class T>
inline Cell<T> store_cell(T value) {
  if constexpr (sizeof(T) == sizeof(Cell<T>)) return std::bit_cast<Cell<T>>(value);
  else return std::bit_cast<std::conditional_t<sizeof(T) == 1, uint8_t, uint16_t>>(value);
}

// d[lane] = f(lane) for the lanes of `mask`; every f comes before the first d.
template <class T, class F>
inline void set_lanes(T* d, Mask mask, F f) {
  T result[kLanes];
  for (int i = 0; i < kLanes; ++i) result[i] = f(i);
  if (mask == kAllLanes) {
    for (int i = 0; i < kLanes; ++i) d[i] = result[i];
  } else {
    for (int i = 0; i < kLanes; ++i) d[i] = mask >> i & 1 ? result[i] : d[i];
  }
}

// d[lane] = f(s[lane]...) for the lanes of `mask`.
template <class D, class... S, class F>
inline void map_lanes(Warp& warp, Mask mask, Slot destination, F f, const Cell<S>* __restrict... s) {
  set_lanes(warp.at<Cell<D>>(destination), mask, [&](int i) { return store_cell<D>(f(load_cell<S>(s[i])...)); });
}

// Instructions of one, two and three sources: op[0] = f(op[1], ...).
template <class D, class A, auto F>
Status unary(Warp& w, const Inst& in, Mask m) {
  map_lanes<D, A>(w, m, in.op[0], F, w.at<Cell<A>>(in.op[1]));
  return Status::kNext;
}
template <class D, class A, class B, auto F>
Status binary(Warp& w, const Inst& in, Mask m) {
  map_lanes<D, A, B>(w, m, in.op[0], F, w.at<Cell<A>>(in.op[1]), w.at<Cell<B>>(in.op[2]));
  return Status::kNext;
}
template <class D, class A, class B, class C, auto F>
Status ternary(Warp& w, const Inst& in, Mask m) {
  map_lanes<D, A, B, C>(w, m, in.op[0], F, w.at<Cell<A>>(in.op[1]), w.at<Cell<B>>(in.op[2]), w.at<Cell<C>>(in.op[3]));
  return Status::kNext;
}

// For what is ordered by the machine itself, or does nothing here.
inline Status execute_nothing(Warp&, const Inst&, Mask) { return Status::kNext; }

// predicate bits of the lanes for which `f` holds
template <class F>
inline Mask lanes_where(F f) {
  Mask result = 0;
  for (int i = 0; i < kLanes; ++i) result |= static_cast<Mask>(f(i) ? 1 : 0) << i;
  return result;
}
inline void set_predicate(Warp& w, Slot slot, Mask mask, Mask value) {
  if (slot == kNoSlot) return;
  Mask& p = w.predicate(slot);
  p = (p & ~mask) | (value & mask);
}

// Decodes `op d, a, b, ...` whose operands all have the type.
inline void decode_same(Builder& b, Execute execute, Unit unit, Type type, int sources) {
  b.expect_operands(sources + 1, sources + 1);
  for (int i = 1; i <= sources; ++i) b.inst.op[i] = b.source(i, type);
  b.inst.op[0] = b.destination(0, type);
  b.inst.execute = execute;
  b.inst.unit = unit;
  b.finish_modifiers();
}

// Bits of a first lane of a mask, for operands that must be equal in all lanes.
inline int first_lane(Mask m) { return std::countr_zero(m); }

}  // namespace emu
