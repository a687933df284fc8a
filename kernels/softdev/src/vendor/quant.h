// SPDX-License-Identifier: Apache-2.0
// Integer modes A8W8 and A8W4: tokens as int8 with one scale per row, weights as int8 or int4 with
// one scale per column, exact int32 sums. Every rounding of the operator is in this file.
//
//   dispatch   s = max|x| / 127; q = x / s, cut to fp16, rounded with halves away from zero
//   product    int32; times the column's scale in fp32, rounded to fp16
//   A8W8       fp16 value * s
//   A8W4       q = 16 * high + low + 8 with high, low in -8..7: two products, then
//              ((16 * high + low) + bias) * s, where bias = 8 * column sum of the weights
//   activation fp32, not rounded; then s2 = max|a| / 127, q = a * (127 / max|a|) to the nearest even
//
// Read from ops-transformer, mc2/mega_moe/op_kernel/arch22 (moe_init_routing_quant_v2 and the
// block_epilogue files). Assumed here: int32 sums become fp32 before they are scaled, and fp16
// results overflow to infinity. Nothing of it was ever compared with an NPU.
//
// A row of zeros gets scale 0 and stays zero. (The 9.1.0 kernel divides by zero there; later ones
// guard it.) A NaN in a row makes its scale, and with it the row's results, NaN. A value beyond
// fp16 becomes infinite.
#pragma once

#include <cstddef>
#include <cstdint>

#include "mega_moe.h"

namespace megamoe {

// FRACTAL_NZ of a [depth, cols] matrix: blocks of 16 rows and 32 bytes; the blocks of one block
// column follow each other. Since depth is a multiple of 16, element (k, n) of the 32-byte groups
// lies at ((group(n) * depth) + k) * 32 bytes.
constexpr int64_t kGroupBytes = 32;

// What the public text leaves open, by environment: nullptr when all values are known, else the
// name of the variable whose value is not.
const char* read_quant_settings(QuantSettings* settings);

// bf16 row (elements `step` apart) to int8; returns the scale.
float quantise_token(const uint16_t* x, int64_t step, int64_t count, int8_t* q);
// Activation row to int8; returns the scale.
float quantise_activation(const float* a, int64_t count, int8_t* q);
// q = 16 * high + low + 8.
void split(const int8_t* q, int64_t count, int8_t* high, int8_t* low);
// Two int4 per byte, the even element in the low half.
void pack_int4(const int8_t* values, int64_t count, uint8_t* packed);
void unpack_int4(const uint8_t* packed, int64_t count, int8_t* values);

// out[rows, cols] = in[rows, depth] * weight; exact. int8 weights in FRACTAL_NZ.
void multiply_int8(const int8_t* in, const int8_t* weight, int32_t* out, int64_t rows, int64_t cols,
                   int64_t depth);
// The same for int4 weights. scratch: 64 * depth bytes. offset_binary: a nibble stores value + 8.
void multiply_int4(const int8_t* in, const uint8_t* weight, int32_t* out, int64_t rows,
                   int64_t cols, int64_t depth, bool offset_binary, int8_t* scratch);

// The column scale in the low word of a scale element.
inline float column_scale(uint64_t element, uint32_t mask) {
  const uint32_t bits = static_cast<uint32_t>(element) & mask;
  float value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
}

// A token's row in the window: int8 values, or all high parts and then all low parts two to a byte;
// behind them the scale. `workspace` lends the rows' place.
inline int64_t token_bytes(int64_t hidden) { return hidden + 32; }
void write_token(const Problem& p, const uint16_t* x, char* row, char* workspace);
// One expert on up to kTileRows rows of windows; results as bf16.
void quant_tile(const Problem& p, char* workspace, size_t expert, const char* const* tokens,
                uint16_t* const* results, int64_t count);

// The nearest fp16 value, ties to even.
float round_half(float value);

}  // namespace megamoe
