// Reductions of bulk copies: element by element into the destination.
#include <algorithm>
#include <cstring>

#include "tensor/half.h"
#include "tensor/units.h"

namespace emu {
namespace {

template <typename T>
void integers(uint8_t* destination, const uint8_t* source, uint32_t bytes, Reduction reduction) {
  for (uint32_t at = 0; at < bytes; at += sizeof(T)) {
    T old, value;
    std::memcpy(&old, destination + at, sizeof(T));
    std::memcpy(&value, source + at, sizeof(T));
    using U = std::make_unsigned_t<T>;
    switch (reduction) {
      case Reduction::kAdd: old = static_cast<T>(static_cast<U>(old) + static_cast<U>(value)); break;
      case Reduction::kMin: old = std::min(old, value); break;
      case Reduction::kMax: old = std::max(old, value); break;
      case Reduction::kAnd: old &= value; break;
      case Reduction::kOr: old |= value; break;
      case Reduction::kXor: old ^= value; break;
      case Reduction::kInc: old = old >= value ? T{0} : static_cast<T>(old + 1); break;
      case Reduction::kDec: old = old == 0 || old > value ? value : static_cast<T>(old - 1); break;
      case Reduction::kNone: throw fail("bulk reduction: no operation");
    }
    std::memcpy(destination + at, &old, sizeof(T));
  }
}

template <typename T>
T combine(T old, T value, Reduction reduction) {
  switch (reduction) {
    case Reduction::kAdd: return old + value;
    case Reduction::kMin: return std::min(old, value);
    case Reduction::kMax: return std::max(old, value);
    default: throw fail("bulk reduction: floating-point types allow add, min and max");
  }
}

template <typename T>
void floats(uint8_t* destination, const uint8_t* source, uint32_t bytes, Reduction reduction) {
  for (uint32_t at = 0; at < bytes; at += sizeof(T)) {
    T old, value;
    std::memcpy(&old, destination + at, sizeof(T));
    std::memcpy(&value, source + at, sizeof(T));
    old = combine(old, value, reduction);
    std::memcpy(destination + at, &old, sizeof(T));
  }
}

// A float32 sum rounded once more to 16 bits is the correctly rounded 16-bit sum (24 >= 2 * 11 + 2 bits).
template <float (*kWiden)(uint16_t), uint16_t (*kNarrow)(float)>
void halves(uint8_t* destination, const uint8_t* source, uint32_t bytes, Reduction reduction) {
  for (uint32_t at = 0; at < bytes; at += 2) {
    uint16_t old, value;
    std::memcpy(&old, destination + at, 2);
    std::memcpy(&value, source + at, 2);
    old = kNarrow(combine(kWiden(old), kWiden(value), reduction));
    std::memcpy(destination + at, &old, 2);
  }
}

}  // namespace

void bulk_reduce(uint8_t* destination, const uint8_t* source, uint32_t bytes, Reduction reduction, BulkType type) {
  switch (type) {
    case BulkType::kF16: return halves<f16_to_float, float_to_f16>(destination, source, bytes, reduction);
    case BulkType::kBf16: return halves<bf16_to_float, float_to_bf16>(destination, source, bytes, reduction);
    case BulkType::kF32: return floats<float>(destination, source, bytes, reduction);
    case BulkType::kF64: return floats<double>(destination, source, bytes, reduction);
    case BulkType::kU32: case BulkType::kB32: return integers<uint32_t>(destination, source, bytes, reduction);
    case BulkType::kS32: return integers<int32_t>(destination, source, bytes, reduction);
    case BulkType::kU64: case BulkType::kB64: return integers<uint64_t>(destination, source, bytes, reduction);
    case BulkType::kS64: return integers<int64_t>(destination, source, bytes, reduction);
  }
  throw fail("bulk reduction: unknown element type %u", static_cast<unsigned>(type));
}

}  // namespace emu
