// SPDX-License-Identifier: Apache-2.0
#include "quant.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>

namespace megamoe {
namespace {

typedef int16_t Words __attribute__((vector_size(32)));
typedef int8_t Bytes __attribute__((vector_size(16)));
typedef int16_t HalfWords __attribute__((vector_size(16)));
typedef int32_t Sums __attribute__((vector_size(32)));

constexpr int64_t kGroup = kGroupBytes;  // columns of one int8 group
constexpr float kSteps = 127.0f;
constexpr float kSmallestNormalHalf = 1.0f / 16384;
constexpr float kHalfSteps = 16777216.0f;  // fp16 values below the normal ones are 2**-24 apart

#define XSD_INLINE static inline __attribute__((always_inline))

bool read_choice(const char* variable, const char* first, const char* second, bool* is_second) {
  const char* set = std::getenv(variable);
  if (set == nullptr || *set == '\0') set = first;
  *is_second = std::strcmp(set, second) == 0;
  return *is_second || std::strcmp(set, first) == 0;
}

// As the vector unit converts: a NaN becomes 0, the rest saturates.
int8_t to_int8(float rounded) {
  if (rounded != rounded) return 0;
  return static_cast<int8_t>(std::min(127.0f, std::max(-128.0f, rounded)));
}

// Rounds towards zero to the 11 significant bits of fp16. Below 2**-14 fp16 keeps fewer; such a
// value rounds to the integer 0 either way.
float cut_to_half(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  if ((bits & 0x7f800000u) != 0x7f800000u) bits &= 0xffffe000u;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

float largest(float so_far, float value) {
  const float size = std::fabs(value);
  return size != size || so_far != so_far ? so_far + size : std::max(so_far, size);
}

// ROWS x 32 sums over the depth. A product of two int8 fits into 16 bits.
template <int ROWS>
XSD_INLINE void group_product(const int8_t* in, const int8_t* weight, int32_t* out, int64_t cols,
                              int64_t depth) {
  Sums sum[ROWS][4] = {};
  for (int64_t k = 0; k < depth; ++k) {
    for (int half = 0; half < 2; ++half) {
      Bytes narrow;
      std::memcpy(&narrow, weight + k * kGroup + half * 16, sizeof narrow);
      const Words wide = __builtin_convertvector(narrow, Words);
      for (int r = 0; r < ROWS; ++r) {
        const Words product = wide * static_cast<int16_t>(in[r * depth + k]);
        HalfWords part[2];
        std::memcpy(part, &product, sizeof product);
        sum[r][2 * half] += __builtin_convertvector(part[0], Sums);
        sum[r][2 * half + 1] += __builtin_convertvector(part[1], Sums);
      }
    }
  }
  for (int r = 0; r < ROWS; ++r) std::memcpy(out + r * cols, sum[r], sizeof sum[r]);
}

XSD_INLINE void all_rows(const int8_t* in, const int8_t* weight, int32_t* out, int64_t rows,
                         int64_t cols, int64_t depth) {
  int64_t r = 0;
  for (; r + 2 <= rows; r += 2)
    group_product<2>(in + r * depth, weight, out + r * cols, cols, depth);
  if (r < rows) group_product<1>(in + r * depth, weight, out + r * cols, cols, depth);
}

void group_portable(const int8_t* in, const int8_t* weight, int32_t* out, int64_t rows,
                    int64_t cols, int64_t depth) {
  all_rows(in, weight, out, rows, cols, depth);
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) void group_avx2(const int8_t* in, const int8_t* weight,
                                                int32_t* out, int64_t rows, int64_t cols,
                                                int64_t depth) {
  all_rows(in, weight, out, rows, cols, depth);
}
#endif

using GroupFn = void (*)(const int8_t*, const int8_t*, int32_t*, int64_t, int64_t, int64_t);

GroupFn group_function() {
#if defined(__x86_64__)
  static const bool wide = __builtin_cpu_supports("avx2") != 0;
  if (wide) return group_avx2;
#endif
  return group_portable;
}

int8_t nibble(uint8_t bits, bool offset_binary) {
  const int value = bits & 15;
  if (offset_binary) return static_cast<int8_t>(value - 8);
  return static_cast<int8_t>(value >= 8 ? value - 16 : value);
}

}  // namespace

const char* read_quant_settings(QuantSettings* settings) {
  struct Found {
    QuantSettings settings;
    const char* unknown = nullptr;
    Found() {
      bool truncated = false;
      if (!read_choice("XSD_MEGAMOE_SCALE_BITS", "32", "19", &truncated))
        unknown = "XSD_MEGAMOE_SCALE_BITS (32, 19)";
      if (!read_choice("XSD_MEGAMOE_INT4", "twos_complement", "offset_binary",
                       &settings.offset_binary))
        unknown = "XSD_MEGAMOE_INT4 (twos_complement, offset_binary)";
      if (truncated) settings.scale_mask = 0xffffe000u;
    }
  };
  static const Found found;  // read once, as all settings of the software device are
  *settings = found.settings;
  return found.unknown;
}

float round_half(float value) {
  const float size = std::fabs(value);
  if (size < kSmallestNormalHalf) return std::nearbyint(value * kHalfSteps) / kHalfSteps;
  if (size >= 65520.0f) return std::copysign(INFINITY, value);
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return value;
  bits = (bits + 0xfffu + ((bits >> 13) & 1u)) & 0xffffe000u;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

float quantise_token(const uint16_t* x, int64_t step, int64_t count, int8_t* q) {
  float most = 0.0f;
  for (int64_t i = 0; i < count; ++i) most = largest(most, widen(x[i * step]));
  const float scale = most / kSteps;
  for (int64_t i = 0; i < count; ++i)
    q[i] = to_int8(std::round(cut_to_half(widen(x[i * step]) / scale)));
  return scale;
}

float quantise_activation(const float* a, int64_t count, int8_t* q) {
  float most = 0.0f;
  for (int64_t i = 0; i < count; ++i) most = largest(most, a[i]);
  const float factor = most > 0.0f ? kSteps / most : 0.0f;
  for (int64_t i = 0; i < count; ++i) q[i] = to_int8(std::nearbyint(a[i] * factor));
  return most / kSteps;
}

void split(const int8_t* q, int64_t count, int8_t* high, int8_t* low) {
  for (int64_t i = 0; i < count; ++i) {
    const int bits = static_cast<uint8_t>(q[i]);
    high[i] = static_cast<int8_t>((bits >> 4) - (q[i] < 0 ? 16 : 0));
    low[i] = static_cast<int8_t>((bits & 15) - 8);
  }
}

void pack_int4(const int8_t* values, int64_t count, uint8_t* packed) {
  for (int64_t i = 0; i < count / 2; ++i)
    packed[i] = static_cast<uint8_t>((values[2 * i] & 15) | ((values[2 * i + 1] & 15) << 4));
}

void unpack_int4(const uint8_t* packed, int64_t count, int8_t* values) {
  for (int64_t i = 0; i < count / 2; ++i) {
    values[2 * i] = nibble(packed[i], false);
    values[2 * i + 1] = nibble(static_cast<uint8_t>(packed[i] >> 4), false);
  }
}

void multiply_int8(const int8_t* in, const int8_t* weight, int32_t* out, int64_t rows, int64_t cols,
                   int64_t depth) {
  const GroupFn product = group_function();
  for (int64_t n = 0; n < cols; n += kGroup)
    product(in, weight + n * depth, out + n, rows, cols, depth);
}

void multiply_int4(const int8_t* in, const uint8_t* weight, int32_t* out, int64_t rows,
                   int64_t cols, int64_t depth, bool offset_binary, int8_t* scratch) {
  const GroupFn product = group_function();
  int8_t values[16];  // one table look-up per nibble
  for (int i = 0; i < 16; ++i) values[i] = nibble(static_cast<uint8_t>(i), offset_binary);
  for (int64_t n = 0; n < cols; n += 2 * kGroup) {
    const uint8_t* group = weight + n / 2 * depth;  // 64 columns in 32 bytes
    for (int64_t k = 0; k < depth; ++k) {
      for (int64_t b = 0; b < kGroupBytes; ++b) {
        const uint8_t byte = group[k * kGroupBytes + b];
        int8_t* to = scratch + (2 * b >= kGroup ? depth : 0) * kGroup + k * kGroup + 2 * b % kGroup;
        to[0] = values[byte & 15];
        to[1] = values[byte >> 4];
      }
    }
    product(in, scratch, out + n, rows, cols, depth);
    product(in, scratch + depth * kGroup, out + n + kGroup, rows, cols, depth);
  }
}

}  // namespace megamoe
