// cp.async.bulk.tensor in tiled mode: boxes between global and shared memory, with swizzle, clipping, fill, reduction.
#include <algorithm>
#include <cstring>

#include "mem/tensor_map.h"
#include "tensor/units.h"

namespace emu {
namespace {

uint32_t swizzled(const TensorMap& map, uint32_t address) { return OperandLayout::swizzled(address, map.swizzle); }

void check(const TileCopy& copy, const TensorMap& map) {
  if (copy.rank != map.rank) throw fail("TMA: a %uD instruction with a tensor map of rank %u", copy.rank, map.rank);
  if (copy.shared % 128) throw fail("TMA: shared address 0x%x is not a multiple of 128", copy.shared);
}

// The part of a box row that lies inside the tensor: elements [begin, end) of the row, at `address`.
struct Row {
  uint32_t begin, end;
  uint64_t address;  // of element 0 of the row, which itself may be out of bounds
  uint32_t shared;   // unswizzled
};

// Calls body(Row) for each row of the box, in the order in which rows lie in shared memory.
template <typename Body>
void for_each_row(const TileCopy& copy, const TensorMap& map, Body body) {
  const int64_t first = copy.coordinate[0];
  const int64_t begin = std::clamp<int64_t>(-first, 0, map.box[0]);
  const int64_t end = std::clamp<int64_t>(static_cast<int64_t>(map.size[0]) - first, begin, map.box[0]);
  uint32_t shared = copy.shared;
  uint32_t index[5] = {};
  for (index[4] = 0; index[4] < map.box[4]; ++index[4])
    for (index[3] = 0; index[3] < map.box[3]; ++index[3])
      for (index[2] = 0; index[2] < map.box[2]; ++index[2])
        for (index[1] = 0; index[1] < map.box[1]; ++index[1]) {
          bool inside = true;
          uint64_t address = map.address + static_cast<uint64_t>(first * map.element_bytes);
          for (uint32_t d = 1; d < map.rank; ++d) {
            const int64_t at = int64_t{copy.coordinate[d]} + index[d];
            inside = inside && at >= 0 && at < static_cast<int64_t>(map.size[d]);
            address += static_cast<uint64_t>(at) * map.stride[d];
          }
          Row row{static_cast<uint32_t>(begin), static_cast<uint32_t>(end), address, shared};
          if (!inside) row.end = row.begin;
          body(row);
          shared += map.row_pitch();
        }
}

// The NaN that the hardware fills with has the same 16-bit pattern in every floating-point type.
void fill(const TensorMap& map, uint8_t* out, uint32_t bytes) {
  const bool floating = map.type >= TensorMapType::kF16;
  const uint16_t pattern = map.fill_nan && floating ? 0x7ff7 : 0;
  for (uint32_t i = 0; i < bytes; i += sizeof pattern) std::memcpy(out + i, &pattern, sizeof pattern);
}

BulkType reduction_type(const TensorMap& map) {
  switch (map.type) {
    case TensorMapType::kU32: return BulkType::kU32;
    case TensorMapType::kS32: return BulkType::kS32;
    case TensorMapType::kU64: return BulkType::kU64;
    case TensorMapType::kS64: return BulkType::kS64;
    case TensorMapType::kF16: return BulkType::kF16;
    case TensorMapType::kBf16: return BulkType::kBf16;
    case TensorMapType::kF32: case TensorMapType::kF32Ftz: return BulkType::kF32;
    case TensorMapType::kF64: return BulkType::kF64;
    default: throw fail("TMA reduction: element type %u has none", static_cast<unsigned>(map.type));
  }
}

constexpr uint32_t kChunk = 16;  // swizzling moves pieces of this size

}  // namespace

uint32_t tile_bytes(const uint8_t* map) { return decode_tensor_map(map).tile_bytes(); }
uint32_t tile_shared_bytes(const uint8_t* map) { return decode_tensor_map(map).shared_bytes(); }

// What makes an H200 fault, each tried there (tests/emu/hopper): a row that begins off a multiple of 16 bytes, and a
// store that begins at a negative coordinate. Boxes may reach beyond the tensor's far end, and loads before its start.
void tile_check(const TileCopy& copy, bool store) {
  const TensorMap map = decode_tensor_map(copy.map);
  check(copy, map);
  if (copy.coordinate[0] * static_cast<int64_t>(map.element_bytes) % 16)
    throw fail("TMA: rows begin at element %d of %u bytes, must begin at a multiple of 16 bytes", copy.coordinate[0],
               map.element_bytes);
  for (uint32_t d = 0; store && d < map.rank; ++d)
    if (copy.coordinate[d] < 0)
      throw fail("TMA store: begins at coordinate %d of dimension %u; a store may not begin before 0",
                 copy.coordinate[d], d);
}

void tile_load(const TileCopy& copy, const GlobalView& global, const SharedView* destinations, int destination_count) {
  const TensorMap map = decode_tensor_map(copy.map);
  check(copy, map);
  for (int i = 0; i < destination_count; ++i) destinations[i].check(copy.shared, map.shared_bytes());
  const uint32_t bytes = map.row_bytes();
  uint8_t line[256 * 8];
  for_each_row(copy, map, [&](const Row& row) {
    const uint32_t begin = row.begin * map.element_bytes, end = row.end * map.element_bytes;
    if (begin > 0 || end < bytes) fill(map, line, bytes);
    if (end > begin) std::memcpy(line + begin, global.read(row.address + begin, end - begin), end - begin);
    for (int i = 0; i < destination_count; ++i)
      for (uint32_t at = 0; at < bytes; at += kChunk)
        std::memcpy(destinations[i].write(swizzled(map, row.shared + at), kChunk, Proxy::kAsync), line + at, kChunk);
  });
}

void tile_store(const TileCopy& copy, Reduction reduction, const SharedView& source, const GlobalView& global) {
  const TensorMap map = decode_tensor_map(copy.map);
  check(copy, map);
  source.check(copy.shared, map.shared_bytes());
  uint8_t line[256 * 8];
  for_each_row(copy, map, [&](const Row& row) {
    const uint32_t begin = row.begin * map.element_bytes, end = row.end * map.element_bytes;
    if (end == begin) return;
    for (uint32_t at = begin / kChunk * kChunk; at < end; at += kChunk)
      std::memcpy(line + at, source.read(swizzled(map, row.shared + at), kChunk, Proxy::kAsync), kChunk);
    uint8_t* const out = global.write(row.address + begin, end - begin);
    if (reduction == Reduction::kNone)
      std::memcpy(out, line + begin, end - begin);
    else
      bulk_reduce(out, line + begin, end - begin, reduction, reduction_type(map));
  });
}

}  // namespace emu
