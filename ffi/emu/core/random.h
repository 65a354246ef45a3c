// A small generator (xoshiro256**, Blackman and Vigna): every draw of a run comes from one that is seeded by its place.
#pragma once

#include <cstdint>

namespace emu {

class Random {
 public:
  explicit Random(uint64_t seed = 0, uint64_t stream = 0) {
    uint64_t x = seed * 0x9e3779b97f4a7c15u + stream * 0xd1b54a32d192ed03u + 0x2545f4914f6cdd1du;
    for (uint64_t& word : state_) {  // splitmix64
      x += 0x9e3779b97f4a7c15u;
      uint64_t z = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
      z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
      word = z ^ (z >> 31);
    }
  }
  uint64_t next() {
    const uint64_t result = rotate(state_[1] * 5, 7) * 9, t = state_[1] << 17;
    state_[2] ^= state_[0];
    state_[3] ^= state_[1];
    state_[1] ^= state_[2];
    state_[0] ^= state_[3];
    state_[2] ^= t;
    state_[3] = rotate(state_[3], 45);
    return result;
  }
  uint32_t below(uint32_t bound) { return static_cast<uint32_t>((next() >> 32) * bound >> 32); }

 private:
  static uint64_t rotate(uint64_t x, int k) { return x << k | x >> (64 - k); }
  uint64_t state_[4];
};

}  // namespace emu
