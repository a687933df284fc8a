// SPDX-License-Identifier: Apache-2.0
// The matrix product. Blocking only changes which (row, column) pairs are in registers at a time;
// the chain over the depth is always k = 0, 1, 2, ... and continues exactly through fp32 memory
// between blocks, so every block shape gives the same bits.
#include <algorithm>
#include <cstring>

#include "mega_moe.h"

namespace megamoe {
namespace {

typedef float Vec __attribute__((vector_size(32)));
typedef uint32_t VecBits __attribute__((vector_size(32)));
typedef uint16_t VecHalf __attribute__((vector_size(16)));

constexpr int64_t kLanes = 8;
constexpr int64_t kColBlock = 64;
// 6 x 2 sums, two weights and an input fill sixteen vector registers.
constexpr int64_t kRowBlock = 6;
// Few rows: stream the weights nearly in memory order.
constexpr int64_t kThinDepth = 16;
// Many rows: a widened panel of this depth stays in the first cache.
constexpr int64_t kPackDepth = 64;

#define XSD_INLINE static inline __attribute__((always_inline))

XSD_INLINE void load(const float* from, Vec* to) { std::memcpy(to, from, sizeof *to); }

XSD_INLINE void load(const uint16_t* from, Vec* to) {
  VecHalf half;
  std::memcpy(&half, from, sizeof half);
  const VecBits bits = __builtin_convertvector(half, VecBits) << 16;
  std::memcpy(to, &bits, sizeof *to);
}

// Continue the chains of ROWS x (VECS * 8) outputs over `depth` more steps.
template <int ROWS, int VECS, class Weight>
XSD_INLINE void micro(const float* in, int64_t in_step, const Weight* weight, int64_t weight_step,
                      float* out, int64_t out_step, int64_t depth) {
  Vec sum[ROWS][VECS];
  for (int r = 0; r < ROWS; ++r)
    for (int v = 0; v < VECS; ++v) load(out + r * out_step + v * kLanes, &sum[r][v]);
  for (int64_t k = 0; k < depth; ++k) {
    for (int v = 0; v < VECS; ++v) {
      Vec w;
      load(weight + k * weight_step + v * kLanes, &w);
      for (int r = 0; r < ROWS; ++r) sum[r][v] += in[r * in_step + k] * w;
    }
  }
  for (int r = 0; r < ROWS; ++r)
    for (int v = 0; v < VECS; ++v)
      std::memcpy(out + r * out_step + v * kLanes, &sum[r][v], sizeof(Vec));
}

// All columns of one kColBlock panel for ROWS rows.
template <int ROWS, int VECS, class Weight>
XSD_INLINE void panel(const float* in, int64_t in_step, const Weight* weight, int64_t weight_step,
                      float* out, int64_t out_step, int64_t depth) {
  for (int64_t n = 0; n < kColBlock; n += VECS * kLanes)
    micro<ROWS, VECS>(in, in_step, weight + n, weight_step, out + n, out_step, depth);
}

template <class Weight>
XSD_INLINE void rest(int64_t rows, const float* in, int64_t in_step, const Weight* weight,
                     int64_t weight_step, float* out, int64_t out_step, int64_t depth) {
  switch (rows) {
    case 1:
      return panel<1, 8>(in, in_step, weight, weight_step, out, out_step, depth);
    case 2:
      return panel<2, 4>(in, in_step, weight, weight_step, out, out_step, depth);
    case 3:
      return panel<3, 2>(in, in_step, weight, weight_step, out, out_step, depth);
    case 4:
      return panel<4, 2>(in, in_step, weight, weight_step, out, out_step, depth);
    case 5:
      return panel<5, 2>(in, in_step, weight, weight_step, out, out_step, depth);
    default:
      return panel<6, 2>(in, in_step, weight, weight_step, out, out_step, depth);
  }
}

XSD_INLINE void product(const float* in, const uint16_t* weight, float* out, int64_t rows,
                        int64_t cols, int64_t depth) {
  std::memset(out, 0, static_cast<size_t>(rows * cols) * sizeof(float));
  if (rows <= kRowBlock) {
    for (int64_t k = 0; k < depth; k += kThinDepth)
      for (int64_t n = 0; n < cols; n += kColBlock)
        rest(rows, in + k, depth, weight + k * cols + n, cols, out + n, cols,
             std::min(kThinDepth, depth - k));
    return;
  }
  alignas(64) float packed[kPackDepth * kColBlock];
  for (int64_t k = 0; k < depth; k += kPackDepth) {
    const int64_t steps = std::min(kPackDepth, depth - k);
    for (int64_t n = 0; n < cols; n += kColBlock) {
      for (int64_t i = 0; i < steps; ++i)
        for (int64_t c = 0; c < kColBlock; c += kLanes) {
          Vec w;
          load(weight + (k + i) * cols + n + c, &w);
          std::memcpy(packed + i * kColBlock + c, &w, sizeof w);
        }
      int64_t r = 0;
      for (; r + kRowBlock <= rows; r += kRowBlock)
        panel<kRowBlock, 2>(in + r * depth + k, depth, packed, kColBlock, out + r * cols + n, cols,
                            steps);
      if (r < rows)
        rest(rows - r, in + r * depth + k, depth, packed, kColBlock, out + r * cols + n, cols,
             steps);
    }
  }
}

void product_portable(const float* in, const uint16_t* weight, float* out, int64_t rows,
                      int64_t cols, int64_t depth) {
  product(in, weight, out, rows, cols, depth);
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) void product_avx2(const float* in, const uint16_t* weight,
                                                  float* out, int64_t rows, int64_t cols,
                                                  int64_t depth) {
  product(in, weight, out, rows, cols, depth);
}
#endif

}  // namespace

void multiply(const float* in, const uint16_t* weight, float* out, int64_t rows, int64_t cols,
              int64_t depth) {
  // Without fused multiply-add on purpose: product and sum are rounded one by one in both versions,
  // so the product has the same bits on any machine.
#if defined(__x86_64__)
  static const bool wide = __builtin_cpu_supports("avx2") != 0;
  if (wide) return product_avx2(in, weight, out, rows, cols, depth);
#endif
  product_portable(in, weight, out, rows, cols, depth);
}

}  // namespace megamoe
