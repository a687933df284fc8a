// SPDX-License-Identifier: Apache-2.0
// Grouped matrix products: plain, int8 x int8 and int8 x int4, split along the rows. Combinations that
// the documents do not list are refused. Source: ops-transformer, gmm/grouped_matmul/docs
// (aclnnGroupedMatmulV4, V5, WeightNz), sections on A8W8, A8W4 and the unquantised case.
#include <cstdint>

#include "opapi.h"

using namespace xsd::op;

namespace {

constexpr int64_t kBlockRows = 32, kInnerLimit = 65536, kGroupSize = 256, kDepthLimit = 18432, kInt4InInt32 = 8;

struct Grouped {
  TL x, weight, bias, scale, offset, per_token;
  T group_list;
  int64_t split_item, group_type, list_type;
  TL out;
};

void check_absent(const char* name, TL extra) {
  for (const at::Tensor& tensor : extra) {
    TORCH_CHECK(!tensor.defined() || tensor.numel() == 0, "GroupedMatmul: ", name, " is not supported here");
  }
}

at::Tensor only(TL list) {
  if (list.empty() || !list[0].defined() || list[0].numel() == 0) return {};
  TORCH_CHECK(list.size() == 1, "GroupedMatmul: ", list.size(), " tensors where one is supported here");
  return list[0];
}

// Stacked matrices [E, K, N] of any of the forms a weight may have; int4 as int8.
at::Tensor matrices(const at::Tensor& given) {
  at::Tensor stacked = given;
  if (given.dim() == 5) {  // blocks of FRACTAL_NZ
    const auto d = given.sizes();
    stacked = given.permute({0, 2, 3, 1, 4}).reshape({d[0], d[2] * d[3], d[1] * d[4]});
  }
  if (stacked.scalar_type() != at::kInt) return stacked;
  const auto bytes = stacked.contiguous().view(at::kChar).to(at::kInt);
  const auto low = at::bitwise_and(bytes, 15), high = at::bitwise_and(at::bitwise_right_shift(bytes, 4), 15);
  const auto both = at::stack({low, high}, -1).flatten(-2);
  return at::where(both >= 8, both - 16, both).to(at::kChar);
}

std::vector<int64_t> row_counts(const Grouped& g, int64_t experts) {
  TORCH_CHECK(g.group_list.scalar_type() == at::kLong && g.group_list.dim() == 1 && g.group_list.numel() == experts,
              "GroupedMatmul: groupList must be INT64 [", experts, "]");
  TORCH_CHECK(g.list_type == 0 || g.list_type == 1, "GroupedMatmul: groupListType ", g.list_type, " (0 or 1)");
  TORCH_CHECK(g.list_type == 0 || experts > 1, "GroupedMatmul: groupListType 1 for a single group");
  std::vector<int64_t> counts;
  const auto list = g.group_list.contiguous();
  const int64_t* values = list.data_ptr<int64_t>();
  int64_t total = 0;
  for (int64_t i = 0; i < experts; ++i) {
    counts.push_back(g.list_type == 0 && i > 0 ? values[i] - values[i - 1] : values[i]);
    total += counts.back();
    TORCH_CHECK(counts.back() >= 0 && total <= g.x[0].size(0), "GroupedMatmul: groups of more rows than x");
  }
  return counts;
}

// 16-bit products are accumulated in float32 and rounded once, as the matrix unit does. Rows come in
// whole blocks, so that a row's bits do not depend on how many other rows its expert has.
at::Tensor plain_product(const at::Tensor& rows, const at::Tensor& weight) {
  const int64_t count = rows.size(0), rest = (kBlockRows - count % kBlockRows) % kBlockRows;
  const auto blocks = at::constant_pad_nd(rows.to(at::kFloat), {0, 0, 0, rest});
  return at::mm(blocks, weight.to(at::kFloat)).narrow(0, 0, count);
}

// Products of int8 are exact in float64.
at::Tensor exact_product(const at::Tensor& rows, const at::Tensor& weight) {
  return at::mm(rows.to(at::kDouble), weight.to(at::kDouble));
}

// x and weight of one floating-point type.
void check_plain(const Grouped& g, const at::Tensor& bias) {
  const auto type = g.x[0].scalar_type();
  TORCH_CHECK(at::isFloatingType(type) && g.weight[0].scalar_type() == type && g.out[0].scalar_type() == type,
              "GroupedMatmul: x, weight and out must have one type, FLOAT, FLOAT16 or BFLOAT16");
  check_absent("scale without int8", g.scale);
  check_absent("perTokenScale without int8", g.per_token);
  const auto wanted = type == at::kHalf ? at::kHalf : at::kFloat;
  TORCH_CHECK(!bias.defined() || bias.scalar_type() == wanted, "GroupedMatmul: bias must be ", wanted);
}

// Types of out that go with the scale's type; no scale: the integers themselves.
void check_int8(const Grouped& g, const at::Tensor& scale, const at::Tensor& per_token, const at::Tensor& bias) {
  const auto out = g.out[0].scalar_type();
  TORCH_CHECK(!bias.defined(), "GroupedMatmul: bias with int8 weights is not supported here");
  if (!scale.defined()) {
    TORCH_CHECK(out == at::kInt && !per_token.defined(), "GroupedMatmul: int8 without scale gives INT32");
    return;
  }
  const bool wide = scale.scalar_type() == at::kFloat && (out == at::kHalf || out == at::kBFloat16);
  TORCH_CHECK(wide || (scale.scalar_type() == at::kBFloat16 && out == at::kBFloat16),
              "GroupedMatmul: scale ", scale.scalar_type(), " with out ", out);
}

void check_int4(const Grouped& g, const at::Tensor& weight, const at::Tensor& scale, const at::Tensor& per_token,
                const at::Tensor& bias) {
  const int64_t experts = weight.size(0), depth = weight.size(1), width = weight.size(2);
  TORCH_CHECK(depth % kGroupSize == 0 && depth <= kDepthLimit && width % 8 == 0, "GroupedMatmul: int4 weights of ",
              depth, " rows, ", width, " columns (rows in 256s up to 18432, columns in 8s)");
  TORCH_CHECK(scale.defined() && (scale.scalar_type() == at::kUInt64 || scale.scalar_type() == at::kLong) &&
              scale.sizes() == at::IntArrayRef({experts, depth / kGroupSize, width}),
              "GroupedMatmul: scale of int4 weights must be UINT64 [E, K/256, N]");
  TORCH_CHECK(bias.defined() && bias.scalar_type() == at::kFloat && bias.sizes() == at::IntArrayRef({experts, width}),
              "GroupedMatmul: bias of int4 weights must be FLOAT [E, N]");
  TORCH_CHECK(per_token.defined(), "GroupedMatmul: int4 weights need perTokenScale");
  const auto out = g.out[0].scalar_type();
  TORCH_CHECK(out == at::kHalf || out == at::kBFloat16, "GroupedMatmul: int4 weights give FLOAT16 or BFLOAT16");
}

at::Tensor float_bits(const at::Tensor& scale) {
  return scale.view(at::kLong).to(at::kInt).view(at::kFloat);  // the low word
}

// ((x - 8) . w * scale + bias), the scale being one for each 256 rows of the weight.
at::Tensor int4_product(const at::Tensor& rows, const at::Tensor& weight, const at::Tensor& scale,
                        const at::Tensor& bias) {
  auto total = at::zeros({rows.size(0), weight.size(1)}, at::kFloat);
  for (int64_t group = 0; group < scale.size(0); ++group) {
    const auto part = rows.narrow(1, group * kGroupSize, kGroupSize).to(at::kDouble) - 8;
    total = total + exact_product(part, weight.narrow(0, group * kGroupSize, kGroupSize)).to(at::kFloat) * scale[group];
  }
  return total + bias;
}

void grouped_matmul(const Grouped& g) {
  TORCH_CHECK(g.group_type == 0 && (g.split_item == 2 || g.split_item == 3) && g.x.size() == 1 && g.out.size() == 1 &&
              g.weight.size() == 1 && g.group_list.defined(),
              "GroupedMatmul: only one x, weight and y, split along the rows by a tensor, is supported here");
  check_absent("offset", g.offset);
  const auto& x = g.x[0];
  const bool packed = g.weight[0].scalar_type() == at::kInt, integers = x.scalar_type() == at::kChar;
  const auto weight = matrices(g.weight[0]);
  TORCH_CHECK(x.dim() == 2 && weight.dim() == 3 && x.size(1) == weight.size(1) &&
              g.out[0].sizes() == at::IntArrayRef({x.size(0), weight.size(2)}),
              "GroupedMatmul: x [M, K], weight [E, K, N], y [M, N] do not fit");
  TORCH_CHECK(x.size(1) < kInnerLimit && weight.size(2) < kInnerLimit, "GroupedMatmul: a last dimension of 65536 or more");
  TORCH_CHECK(integers == (weight.scalar_type() == at::kChar), "GroupedMatmul: integer x with other weights");
  const auto bias = only(g.bias), scale = only(g.scale), per_token = only(g.per_token);
  const int64_t experts = weight.size(0);
  TORCH_CHECK(!per_token.defined() || (per_token.scalar_type() == at::kFloat &&
              per_token.sizes() == at::IntArrayRef({x.size(0)})), "GroupedMatmul: perTokenScale must be FLOAT [M]");
  at::Tensor scales = scale;
  if (packed) {
    check_int4(g, weight, scale, per_token, bias);
    scales = float_bits(scale);
  } else if (integers) {
    check_int8(g, scale, per_token, bias);
    TORCH_CHECK(!scale.defined() || scale.sizes() == at::IntArrayRef({experts, weight.size(2)}),
                "GroupedMatmul: scale must be [E, N]");
  } else {
    check_plain(g, bias);
  }
  int64_t start = 0;
  const auto counts = row_counts(g, experts);
  for (int64_t i = 0; i < experts; ++i) {
    const int64_t count = counts[static_cast<size_t>(i)];
    if (count == 0) continue;
    const auto rows = x.narrow(0, start, count), matrix = weight.select(0, i);
    at::Tensor result;
    if (packed) {
      result = int4_product(rows, matrix, scales.select(0, i), bias.select(0, i));
    } else if (integers) {
      result = exact_product(rows, matrix);
      if (scales.defined()) result = result.to(at::kFloat) * scales.select(0, i).to(at::kFloat);
    } else {
      result = plain_product(rows, matrix);
      if (bias.defined()) result = result + bias.select(0, i).to(at::kFloat);
    }
    if (per_token.defined()) result = result * per_token.narrow(0, start, count).unsqueeze(-1);
    g.out[0].narrow(0, start, count).copy_(result);
    start += count;
  }
}

}  // namespace

// clang-format off
#define LISTS TL x, TL weight, TL bias, TL scale, TL offset, TL antiquant_scale, TL antiquant_offset, TL per_token, \
  T group_list, TL activation_input, TL activation_scale, TL activation_offset, int64_t split_item, int64_t group_type, \
  int64_t list_type, int64_t act_type
#define BODY check_absent("antiquantScale", antiquant_scale); check_absent("antiquantOffset", antiquant_offset); \
  check_absent("activationInput", activation_input); check_absent("activationQuantScale", activation_scale); \
  check_absent("activationQuantOffset", activation_offset); \
  TORCH_CHECK(act_type == 0, "GroupedMatmul: actType ", act_type, " is not supported here"); \
  grouped_matmul({x, weight, bias, scale, offset, per_token, group_list, split_item, group_type, list_type, out})

ACLNN(GroupedMatmulV4, (LISTS, TL out, TL, TL), BODY)
ACLNN(GroupedMatmulV5, (LISTS, IA, TL out, TL, TL), BODY)
ACLNN(GroupedMatmulWeightNz, (LISTS, IA, int64_t group_size, TL out, TL, TL),
      TORCH_CHECK(weight.size() == 1 && weight[0].dim() == 5, "GroupedMatmulWeightNz: weight must be one [E, K, N] in FRACTAL_NZ");
      TORCH_CHECK(group_size == (weight[0].scalar_type() == at::kInt ? kGroupSize : 0), "GroupedMatmulWeightNz: quantGroupSize ", group_size);
      BODY)
// clang-format on
