#include "mem/tensor_map.h"

#include <cstring>

#include "core/error.h"

namespace emu {

TensorMap decode_tensor_map(const uint8_t* bytes) {
  uint32_t word[16];
  std::memcpy(word, bytes, sizeof word);
  const auto field = [&](int index, int low, int width) { return word[index] >> low & ((1u << width) - 1); };

  if ((word[2] & 0xdu) != 0 || word[2] == 0)
    throw fail("tensor map: word 2 is 0x%08x, which no tiled map has (is this a tensor map?)", word[2]);
  if (field(2, 11, 2) != 0) throw fail("tensor map: interleaved layouts are not modelled");
  if ((word[13] & 0xffffffu) != 0)
    throw fail("tensor map: element strides other than 1 are not modelled (word 13 is 0x%08x)", word[13]);

  TensorMap map{};
  map.address = word[0] | uint64_t{word[1] & 0x1ffffffu} << 32;
  map.rank = field(2, 4, 3) + 1;
  if (map.rank > 5) throw fail("tensor map: rank %u, allowed 1 to 5", map.rank);
  const uint32_t type = field(2, 7, 4);
  static constexpr uint8_t kBytes[] = {1, 2, 4, 4, 8, 8, 2, 4, 4, 8, 2};
  if (type >= sizeof kBytes) throw fail("tensor map: element type %u, allowed 0 to %zu", type, sizeof kBytes - 1);
  map.type = static_cast<TensorMapType>(type);
  map.element_bytes = kBytes[type];
  map.swizzle = static_cast<Swizzle>(field(2, 13, 2));
  map.fill_nan = field(2, 15, 1) != 0;
  if (map.address % 16) throw fail("tensor map: global address 0x%llx is not a multiple of 16",
                                   static_cast<unsigned long long>(map.address));
  for (uint32_t d = 0; d < 5; ++d) {
    const bool used = d < map.rank;
    map.size[d] = used ? uint64_t{word[8 + d]} + 1 : 1;
    map.box[d] = !used ? 1 : d == 0 ? field(13, 24, 8) + 1 : field(14, 8 * (int(d) - 1), 8) + 1;
    map.stride[d] = d == 0 ? map.element_bytes
                    : used ? (word[2 + d] | uint64_t{field(7, 4 * (int(d) - 1), 4)} << 32) * 16
                           : 0;
  }
  if (map.row_bytes() % 16)
    throw fail("tensor map: the box's rows have %u bytes, must be a multiple of 16", map.row_bytes());
  const uint32_t span = 16u << static_cast<uint32_t>(map.swizzle);
  if (map.swizzle != Swizzle::kNone && map.row_bytes() > span)
    throw fail("tensor map: the box's rows have %u bytes, at most the swizzle's %u", map.row_bytes(), span);
  return map;
}

}  // namespace emu
