// SPDX-License-Identifier: Apache-2.0
#include <cstring>

#include "quant.h"
#include "window.h"

namespace megamoe {
namespace {

// Parts of the workspace that integer launches use.
struct Scratch {
  int8_t* rows;
  float* scales;
  int32_t* sums;
  float* values;
  float* act;
  int8_t* group;

  Scratch(const WorkspacePlan& plan, char* base)
      : rows(reinterpret_cast<int8_t*>(base + plan.rows)),
        scales(reinterpret_cast<float*>(base + plan.scales)),
        sums(reinterpret_cast<int32_t*>(base + plan.sums)),
        values(reinterpret_cast<float*>(base + plan.tile_out)),
        act(reinterpret_cast<float*>(base + plan.tile_in)),
        group(reinterpret_cast<int8_t*>(base + plan.group)) {}
};

// One weight of an expert with what belongs to its columns.
struct Matrix {
  const View& weight;
  const View& scales;
  const View* bias;  // nullptr for int8
};

// rows (with int4: high parts of all rows, then low parts of all rows) times the weight, then back
// to fp32 values. The order of the fp32 operations is the operator's.
void product(const Problem& p, const Scratch& s, const Matrix& m, int64_t count) {
  const int64_t depth = m.weight.dims[0], cols = m.weight.dims[1];
  const uint64_t* scale = m.scales.at<uint64_t>(0);
  const uint32_t mask = p.settings.scale_mask;
  if (m.bias == nullptr) {
    const int8_t* weight = reinterpret_cast<const int8_t*>(m.weight.data);
    multiply_int8(s.rows, weight, s.sums, count, cols, depth);
    for (int64_t r = 0; r < count; ++r)
      for (int64_t n = 0; n < cols; ++n)
        s.values[r * cols + n] = round_half(static_cast<float>(s.sums[r * cols + n]) *
                                            column_scale(scale[n], mask)) *
                                 s.scales[r];
    return;
  }
  const uint8_t* weight = reinterpret_cast<const uint8_t*>(m.weight.data);
  multiply_int4(s.rows, weight, s.sums, 2 * count, cols, depth, p.settings.offset_binary, s.group);
  const float* bias = m.bias->at<float>(0);
  for (int64_t r = 0; r < count; ++r) {
    const int32_t* high = s.sums + r * cols;
    const int32_t* low = s.sums + (count + r) * cols;
    for (int64_t n = 0; n < cols; ++n) {
      const float factor = column_scale(scale[n], mask);
      const float upper = round_half(static_cast<float>(high[n]) * factor) * 16.0f;
      const float lower = round_half(static_cast<float>(low[n]) * factor);
      s.values[r * cols + n] = ((upper + lower) + bias[n]) * s.scales[r];
    }
  }
}

}  // namespace

void write_token(const Problem& p, const uint16_t* x, char* row, char* workspace) {
  const int64_t hidden = p.hidden;
  float scale;
  if (p.quant == Quant::kInt8) {
    scale = quantise_token(x, p.x.strides[1], hidden, reinterpret_cast<int8_t*>(row));
  } else {
    const Scratch s(p.plan, workspace);  // not in use before the first tile
    int8_t* high = s.rows + hidden;
    int8_t* low = high + hidden;
    scale = quantise_token(x, p.x.strides[1], hidden, s.rows);
    split(s.rows, hidden, high, low);
    pack_int4(high, hidden, reinterpret_cast<uint8_t*>(row));
    pack_int4(low, hidden, reinterpret_cast<uint8_t*>(row) + hidden / 2);
  }
  // Eight copies, as the operator writes whole 32-byte blocks.
  for (int64_t at = hidden; at < token_bytes(hidden); at += 4)
    std::memcpy(row + at, &scale, sizeof scale);
}

void quant_tile(const Problem& p, char* workspace, size_t expert, const char* const* tokens,
                uint16_t* const* results, int64_t count) {
  const Scratch s(p.plan, workspace);
  const int64_t hidden = p.hidden, inter = p.inter;
  const bool int4 = p.quant == Quant::kInt4;
  for (int64_t r = 0; r < count; ++r) {
    std::memcpy(&s.scales[r], tokens[r] + hidden, sizeof(float));
    if (int4) {
      const uint8_t* packed = reinterpret_cast<const uint8_t*>(tokens[r]);
      unpack_int4(packed, hidden, s.rows + r * hidden);
      unpack_int4(packed + hidden / 2, hidden, s.rows + (count + r) * hidden);
    } else {
      std::memcpy(s.rows + r * hidden, tokens[r], static_cast<size_t>(hidden));
    }
  }
  product(p, s, {p.weight1[expert], p.scales1[expert], int4 ? &p.bias1[expert] : nullptr}, count);
  for (int64_t r = 0; r < count; ++r) {
    const float* value = s.values + r * 2 * inter;
    for (int64_t i = 0; i < inter; ++i) s.act[i] = gated(value[i], value[inter + i], p.clamp);
    int8_t* q = s.rows + r * inter;
    if (int4) {
      int8_t* whole = reinterpret_cast<int8_t*>(s.sums);  // free until the next product
      s.scales[r] = quantise_activation(s.act, inter, whole);
      split(whole, inter, q, q + count * inter);
    } else {
      s.scales[r] = quantise_activation(s.act, inter, q);
    }
  }
  product(p, s, {p.weight2[expert], p.scales2[expert], int4 ? &p.bias2[expert] : nullptr}, count);
  for (int64_t r = 0; r < count; ++r)
    for (int64_t h = 0; h < hidden; ++h) results[r][h] = narrow(s.values[r * hidden + h]);
}

}  // namespace megamoe
