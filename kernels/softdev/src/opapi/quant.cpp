// SPDX-License-Identifier: Apache-2.0
// Quantisation of activations. Source: op-plugin, docs of npu_dynamic_quant and npu_dequant_swiglu_quant.
#include "opapi.h"

using namespace xsd::op;

namespace {

constexpr int64_t kWidthLimit = 10496;

// scale = max|x| / 127, y = round(x / scale). What a row of zeros (0 / 0) or a NaN becomes is not
// documented; here it is 127, so that nobody comes to rely on 0.
void quantise(const at::Tensor& values, T y, T scale) {
  const auto rows = values.to(at::kFloat);
  const auto most = std::get<0>(rows.abs().max(-1, true));
  const auto factor = most / 127;
  const auto rounded = at::nan_to_num(at::round(rows / factor), 127.0, 127.0, -127.0);
  y.copy_(at::clamp(rounded, -128, 127));
  scale.copy_(factor.reshape(scale.sizes()));
}

void dynamic_quant(T x, T smooth, T group_index, int64_t type, T y, T scale, T offset) {
  TORCH_CHECK(x.scalar_type() == at::kHalf || x.scalar_type() == at::kBFloat16, "DynamicQuant: x must be FLOAT16 or BFLOAT16");
  TORCH_CHECK(x.dim() > 1 && x.sizes() == y.sizes(), "DynamicQuant: x must have two dimensions or more, y its shape");
  TORCH_CHECK(!smooth.defined() && !group_index.defined() && !offset.defined() && type == ACL_INT8 &&
              y.scalar_type() == at::kChar, "DynamicQuant: only symmetric INT8 without smooth scales is supported here");
  TORCH_CHECK(scale.scalar_type() == at::kFloat && scale.sizes() == x.sizes().slice(0, x.dim() - 1),
              "DynamicQuant: scale must be FLOAT with x's leading dimensions");
  quantise(x, y, scale);
}

struct Swiglu {
  T x, weight_scale, activation_scale, bias, quant_scale, quant_offset, group_index;
  bool left;
  Text mode;
  T y, scale;
};

void dequant_swiglu_quant(const Swiglu& s) {
  TORCH_CHECK(s.x.dim() == 2 && s.x.size(1) % 2 == 0, "DequantSwigluQuant: x must be [T, 2H]");
  TORCH_CHECK(s.mode == "dynamic" && !s.quant_scale.defined() && !s.quant_offset.defined() && !s.bias.defined(),
              "DequantSwigluQuant: only dynamic quantisation without bias and smooth scales is supported here");
  const int64_t tokens = s.x.size(0), width = s.x.size(1) / 2;
  const bool integers = s.x.scalar_type() == at::kInt;
  TORCH_CHECK(integers || s.x.scalar_type() == at::kHalf || s.x.scalar_type() == at::kBFloat16,
              "DequantSwigluQuant: x must be INT32, FLOAT16 or BFLOAT16");
  TORCH_CHECK(integers == s.weight_scale.defined() && integers == s.activation_scale.defined(),
              "DequantSwigluQuant: INT32 needs weight and activation scales, other types have none");
  auto rows = s.x.to(at::kFloat);
  std::vector<int64_t> counts{tokens};
  if (s.group_index.defined()) {
    TORCH_CHECK(s.group_index.scalar_type() == at::kLong && s.group_index.dim() == 1, "DequantSwigluQuant: group_index must be INT64 [G]");
    TORCH_CHECK(width % 64 == 0 && width <= kWidthLimit, "DequantSwigluQuant: with groups H must be a multiple of 64 up to 10496, not ", width);
    const auto list = s.group_index.contiguous();
    counts.assign(list.data_ptr<int64_t>(), list.data_ptr<int64_t>() + list.numel());
  }
  if (integers) {
    const auto groups = static_cast<int64_t>(counts.size());
    TORCH_CHECK(s.weight_scale.scalar_type() == at::kFloat && s.weight_scale.sizes() == at::IntArrayRef({groups, 2 * width}),
                "DequantSwigluQuant: weight_scale must be FLOAT [G, 2H]");
    TORCH_CHECK(s.activation_scale.scalar_type() == at::kFloat && s.activation_scale.numel() == tokens,
                "DequantSwigluQuant: activation_scale must be FLOAT [T, 1]");
  }
  int64_t start = 0;
  for (size_t group = 0; group < counts.size(); ++group) {
    const int64_t count = counts[group];
    TORCH_CHECK(count >= 0 && start + count <= tokens, "DequantSwigluQuant: groups of more rows than x");
    if (count == 0) continue;
    auto part = rows.narrow(0, start, count);
    if (integers) {
      part = part * s.weight_scale[static_cast<int64_t>(group)];
      part = part * s.activation_scale.reshape({tokens, 1}).narrow(0, start, count);
    }
    const auto halves = at::chunk(part, 2, 1);
    const auto act = s.left ? at::silu(halves[0]) * halves[1] : at::silu(halves[1]) * halves[0];
    quantise(act, s.y.narrow(0, start, count), s.scale.narrow(0, start, count));
    start += count;
  }
}

}  // namespace

// clang-format off
ACLNN(DynamicQuantV2, (T x, T smooth, T group_index, int64_t type, T y, T scale, T offset), dynamic_quant(x, smooth, group_index, type, y, scale, offset))
ACLNN(DequantSwigluQuant, (T x, T weight_scale, T activation_scale, T bias, T quant_scale, T quant_offset, T group_index, bool left,
                           Text mode, T y, T scale),
      dequant_swiglu_quant({x, weight_scale, activation_scale, bias, quant_scale, quant_offset, group_index, left, mode, y, scale}))
// clang-format on
