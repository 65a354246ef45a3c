// A warp is 32 lanes; a 32-bit register of a warp is an array of 32 words, so that lane loops vectorise.
#pragma once

#include <cstdint>

namespace emu {

inline constexpr int kLanes = 32;
using Mask = uint32_t;  // bit i: lane i
inline constexpr Mask kAllLanes = 0xffffffffu;

struct alignas(64) Lanes32 {
  uint32_t lane[kLanes];
};
struct alignas(64) Lanes64 {
  uint64_t lane[kLanes];
};

}  // namespace emu
