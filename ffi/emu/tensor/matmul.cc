#include "tensor/matmul.h"

#include <cstring>

#pragma GCC optimize("fp-contract=fast")  // exact products (see the header): fusing changes no bit
#pragma GCC diagnostic ignored "-Wpsabi"  // wide vectors are passed within this file alone, inlined

namespace emu {
namespace {

template <int kWidth>
struct Vector;
template <>
struct Vector<16> { using Type = float __attribute__((vector_size(64))); };
template <>
struct Vector<8> { using Type = float __attribute__((vector_size(32))); };
template <>
struct Vector<4> { using Type = float __attribute__((vector_size(16))); };

#define EMU_INLINE [[gnu::always_inline]] static inline

template <typename V>
EMU_INLINE V load(const float* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
template <typename V>
EMU_INLINE void store(float* p, V v) {
  std::memcpy(p, &v, sizeof v);
}

// kRows x (kVectors * width) outputs at a time stay in vector registers.
template <int kRows, int kVectors, int kWidth>
EMU_INLINE void dense_tile(const DenseProduct& p, uint32_t row, uint32_t column) {
  using V = typename Vector<kWidth>::Type;
  V sum[kRows][kVectors];
  float* const d = p.d + uint64_t{row} * p.d_pitch + column;
  for (int i = 0; i < kRows; ++i)
    for (int j = 0; j < kVectors; ++j)
      sum[i][j] = p.accumulate ? load<V>(d + uint64_t(i) * p.d_pitch + j * kWidth) : V{};
  const float* const a = p.a + row * kMmaDepth;
  const float* b = p.b + column;
#pragma GCC unroll 4
  for (uint32_t k = 0; k < kMmaDepth; ++k, b += p.b_pitch) {
    V line[kVectors];
    for (int j = 0; j < kVectors; ++j) line[j] = load<V>(b + j * kWidth);
    for (int i = 0; i < kRows; ++i) {
      const float factor = a[i * kMmaDepth + k];
      for (int j = 0; j < kVectors; ++j) sum[i][j] += line[j] * factor;
    }
  }
  for (int i = 0; i < kRows; ++i)
    for (int j = 0; j < kVectors; ++j) store(d + uint64_t(i) * p.d_pitch + j * kWidth, sum[i][j]);
}

template <int kRows, int kVectors, int kWidth>
EMU_INLINE void dense_product(const DenseProduct& p) {
  constexpr uint32_t kColumns = kVectors * kWidth;
  constexpr uint32_t kTailWidth = kWidth < 8 ? kWidth : 8;
  uint32_t column = 0;
  for (; column + kColumns <= p.columns; column += kColumns) {
    uint32_t row = 0;
    for (; row + kRows <= p.rows; row += kRows) dense_tile<kRows, kVectors, kWidth>(p, row, column);
    for (; row < p.rows; row += 4) dense_tile<4, kVectors, kWidth>(p, row, column);
  }
  for (; column < p.columns; column += kTailWidth)
    for (uint32_t row = 0; row < p.rows; row += 4) dense_tile<4, 1, kTailWidth>(p, row, column);
}

template <int kWidth>
EMU_INLINE void fragment_product(const FragmentProduct (&warps)[4]) {
  using V = typename Vector<kWidth>::Type;
  constexpr int kChunks = 32 / kWidth;
  for (uint32_t block = 0; block < warps[0].columns / 8; ++block) {
    // A line of b as the lanes see it repeats every four lanes.
    alignas(64) float line[2][kMmaDepth][kWidth];
    for (uint32_t k = 0; k < kMmaDepth; ++k) {
      using Quad = typename Vector<4>::Type;
      const float* const source = warps[0].b + k * warps[0].b_pitch + block * 8;
      const Quad low = load<Quad>(source), high = load<Quad>(source + 4);
      const Quad even = __builtin_shufflevector(low, high, 0, 2, 4, 6);
      const Quad odd = __builtin_shufflevector(low, high, 1, 3, 5, 7);
      for (int c = 0; c < kWidth; c += 4) {
        store(line[0][k] + c, even);
        store(line[1][k] + c, odd);
      }
    }
    for (const FragmentProduct& warp : warps)
      for (uint32_t half = 0; half < 2; ++half) {
        float* const even = warp.d[block * 4 + half * 2];
        float* const odd = warp.d[block * 4 + half * 2 + 1];
        const float* const a = warp.a + half * kMmaDepth * 32;
        V sum[2][kChunks];
        for (int c = 0; c < kChunks; ++c) {
          sum[0][c] = warp.accumulate ? load<V>(even + c * kWidth) : V{};
          sum[1][c] = warp.accumulate ? load<V>(odd + c * kWidth) : V{};
        }
        for (uint32_t k = 0; k < kMmaDepth; ++k) {
          const V first = load<V>(line[0][k]), second = load<V>(line[1][k]);
          for (int c = 0; c < kChunks; ++c) {
            const V factor = load<V>(a + k * 32 + c * kWidth);
            sum[0][c] += factor * first;
            sum[1][c] += factor * second;
          }
        }
        for (int c = 0; c < kChunks; ++c) {
          store(even + c * kWidth, sum[0][c]);
          store(odd + c * kWidth, sum[1][c]);
        }
      }
  }
}

#if defined(__x86_64__)
[[gnu::target("avx512f,avx512vl,avx512dq,avx2,fma")]] void dense_512(const DenseProduct& p) {
  dense_product<8, 2, 16>(p);
}
[[gnu::target("avx2,fma")]] void dense_256(const DenseProduct& p) { dense_product<4, 2, 8>(p); }
[[gnu::target("avx512f,avx512vl,avx512dq,avx2,fma")]] void fragments_512(const FragmentProduct (&w)[4]) {
  fragment_product<16>(w);
}
[[gnu::target("avx2,fma")]] void fragments_256(const FragmentProduct (&w)[4]) { fragment_product<8>(w); }
#endif
void dense_128(const DenseProduct& p) { dense_product<4, 2, 4>(p); }
void fragments_128(const FragmentProduct (&w)[4]) { fragment_product<4>(w); }

int vector_bits() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
    return 512;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return 256;
#endif
  return 128;
}
const int kVectorBits = vector_bits();

}  // namespace

void multiply_dense(const DenseProduct& p) {
#if defined(__x86_64__)
  if (kVectorBits == 512) return dense_512(p);
  if (kVectorBits == 256) return dense_256(p);
#endif
  dense_128(p);
}

void multiply_fragments(const FragmentProduct (&warps)[4]) {
#if defined(__x86_64__)
  if (kVectorBits == 512) return fragments_512(warps);
  if (kVectorBits == 256) return fragments_256(warps);
#endif
  fragments_128(warps);
}

}  // namespace emu
