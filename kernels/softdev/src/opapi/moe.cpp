// SPDX-License-Identifier: Apache-2.0
// The operators of torch_npu's fused MoE path. Unquantised forms; what is not implemented is refused by
// name, not approximated.
#include <algorithm>

#include "opapi.h"

using namespace xsd::op;

namespace {

constexpr int64_t kBlockRows = 32;

// 16-bit products are accumulated in float32 and rounded once, as the matrix unit does. Rows come in
// whole blocks, so that a row's bits do not depend on how many other rows its expert has.
at::Tensor product(const at::Tensor& rows, const at::Tensor& weight) {
  const int64_t count = rows.size(0), rest = (kBlockRows - count % kBlockRows) % kBlockRows;
  const auto blocks = at::constant_pad_nd(rows.to(at::kFloat), {0, 0, 0, rest});
  return at::mm(blocks, weight.to(at::kFloat)).narrow(0, 0, count).to(rows.scalar_type());
}

struct Grouped {
  TL x, weight, bias;
  T group_list;
  int64_t split_item, group_type, list_type;
  TL out;
};

void check_plain(const char* name, TL extra) {
  for (const at::Tensor& tensor : extra) {
    TORCH_CHECK(!tensor.defined() || tensor.numel() == 0, "GroupedMatmul: ", name, " is not supported here");
  }
}

std::vector<int64_t> row_counts(const Grouped& g, size_t experts) {
  std::vector<int64_t> counts;
  const auto list = g.group_list.to(at::kLong).contiguous();
  const int64_t* values = list.data_ptr<int64_t>();
  for (size_t i = 0; i < experts; ++i) {
    const int64_t before = g.list_type == 0 && i > 0 ? values[i - 1] : 0;
    counts.push_back(values[i] - before);
  }
  return counts;
}

void grouped_matmul(const Grouped& g) {
  TORCH_CHECK(g.group_type == 0 && g.x.size() == 1 && g.out.size() == 1 && g.group_list.defined(),
              "GroupedMatmul: only one x and one y, split along the rows by a tensor, is supported here");
  TORCH_CHECK(g.list_type == 0 || g.list_type == 1, "GroupedMatmul: groupListType ", g.list_type, " (0 or 1)");
  const bool stacked = g.weight.size() == 1 && g.weight[0].dim() == 3;
  const size_t experts = stacked ? static_cast<size_t>(g.weight[0].size(0)) : g.weight.size();
  TORCH_CHECK(g.group_list.numel() == static_cast<int64_t>(experts), "GroupedMatmul: ", g.group_list.numel(),
              " groups for ", experts, " weights");
  int64_t start = 0;
  const auto counts = row_counts(g, experts);
  for (size_t i = 0; i < experts; ++i) {
    TORCH_CHECK(counts[i] >= 0 && start + counts[i] <= g.x[0].size(0), "GroupedMatmul: groups of more rows than x");
    if (counts[i] == 0) continue;
    const auto weight = stacked ? g.weight[0].select(0, static_cast<int64_t>(i)) : g.weight[i];
    auto result = product(g.x[0].narrow(0, start, counts[i]), weight);
    if (!g.bias.empty() && g.bias[0].defined() && g.bias[0].numel() > 0) {
      result = result + (stacked ? g.bias[0].select(0, static_cast<int64_t>(i)) : g.bias[i]);
    }
    g.out[0].narrow(0, start, counts[i]).copy_(result);
    start += counts[i];
  }
}

void swiglu(T x, int64_t dim, T out) {
  const auto halves = at::chunk(x.to(at::kFloat), 2, dim);
  out.copy_(at::silu(halves[0]) * halves[1]);
}

void gating(T x, T finished, int64_t k, T weights, T ids, T row_ids) {
  auto [values, indices] = at::topk(at::softmax(x.to(at::kFloat), -1), k, -1);
  weights.copy_(values);
  ids.copy_(indices);
  if (finished.defined() && finished.numel() > 0) ids.masked_fill_(finished.unsqueeze(-1), at::Scalar(x.size(-1)));
  if (row_ids.defined()) {
    const int64_t rows = ids.size(0);
    row_ids.copy_(at::arange(rows * k).reshape({k, rows}).t());
  }
}

struct Routing {
  T x, expert_ids;
  int64_t active, capacity, experts, drop_pad, count_kind;
  T rows, places, counts;
};

// Rows in expert order; places[t * K + j] says where the j-th choice of token t went.
void init_routing(const Routing& r) {
  TORCH_CHECK(r.drop_pad == 0, "MoeInitRoutingV2: dropPadMode 1 is not supported here");
  const int64_t tokens = r.expert_ids.size(0), k = r.expert_ids.size(1);
  const auto flat = r.expert_ids.to(at::kLong).flatten();
  auto [sorted, order] = at::sort(flat, true, 0, false);
  const int64_t active = r.active > 0 ? std::min(r.active, tokens * k) : tokens * k;
  r.rows.narrow(0, 0, active).copy_(r.x.index_select(0, at::floor_divide(order, k).narrow(0, 0, active)));
  auto places = at::empty({tokens * k}, at::kLong);
  places.index_put_({order}, at::arange(tokens * k));
  r.places.copy_(places);
  if (!r.counts.defined() || r.counts.numel() == 0 || r.count_kind == 0) return;
  const auto counts = at::bincount(flat, {}, r.experts);
  r.counts.copy_(r.count_kind == 1 ? at::cumsum(counts, 0) : counts);
}

void unpermute(T rows, T places, T weights, bool padded, T out) {
  TORCH_CHECK(!padded, "MoeTokenUnpermute: paddedMode is not supported here");
  const int64_t k = weights.defined() ? weights.size(1) : 1;
  const int64_t tokens = places.numel() / k;
  const auto picked = rows.index_select(0, places.to(at::kLong)).reshape({tokens, k, rows.size(-1)});
  auto total = at::zeros({tokens, rows.size(-1)}, at::kFloat);
  for (int64_t j = 0; j < k; ++j) {
    auto term = picked.select(1, j).to(at::kFloat);
    if (weights.defined()) term = term * weights.select(1, j).to(at::kFloat).unsqueeze(-1);
    total = total + term;
  }
  out.copy_(total);
}

}  // namespace

// clang-format off
#define QUANT_LISTS TL scale, TL offset, TL antiquant_scale, TL antiquant_offset, TL per_token_scale
#define CHECK_PLAIN check_plain("scale", scale); check_plain("offset", offset); \
  check_plain("antiquantScale", antiquant_scale); check_plain("antiquantOffset", antiquant_offset); \
  check_plain("perTokenScale", per_token_scale); \
  TORCH_CHECK(act_type == 0, "GroupedMatmul: actType ", act_type, " is not supported here")

ACLNN(GroupedMatmulV4, (TL x, TL weight, TL bias, QUANT_LISTS, T group_list, TL, TL, TL, int64_t split_item, int64_t group_type,
                        int64_t list_type, int64_t act_type, TL out, TL, TL),
      CHECK_PLAIN; grouped_matmul({x, weight, bias, group_list, split_item, group_type, list_type, out}))
ACLNN(GroupedMatmulV5, (TL x, TL weight, TL bias, QUANT_LISTS, T group_list, TL, TL, TL, int64_t split_item, int64_t group_type,
                        int64_t list_type, int64_t act_type, IA, TL out, TL, TL),
      CHECK_PLAIN; grouped_matmul({x, weight, bias, group_list, split_item, group_type, list_type, out}))
ACLNN(SwiGlu, (T x, int64_t dim, T out), swiglu(x, dim, out))
ACLNN(MoeGatingTopKSoftmax, (T x, T finished, int64_t k, T weights, T ids, T row_ids), gating(x, finished, k, weights, ids, row_ids))
ACLNN(MoeInitRoutingV2, (T x, T expert_ids, int64_t active, int64_t capacity, int64_t experts, int64_t drop_pad, int64_t count_kind,
                         bool, T rows, T places, T counts, T),
      init_routing({x, expert_ids, active, capacity, experts, drop_pad, count_kind, rows, places, counts}))
ACLNN(MoeInitRoutingV3, (T x, T expert_ids, T scale, T offset, int64_t active, int64_t capacity, int64_t experts, int64_t drop_pad,
                         int64_t count_type, bool count, int64_t quant_mode, IA range, int64_t place_type, T rows, T places, T counts, T),
      TORCH_CHECK(!scale.defined() && !offset.defined() && quant_mode == -1, "MoeInitRoutingV3: quantisation is not supported here");
      TORCH_CHECK(place_type == 0, "MoeInitRoutingV3: rowIdxType ", place_type, " is not supported here");
      TORCH_CHECK(range.empty() || (range[0] == 0 && range[1] == experts), "MoeInitRoutingV3: only all experts are supported here");
      TORCH_CHECK(!count || count_type < 2, "MoeInitRoutingV3: expertTokensNumType ", count_type, " is not supported here");
      init_routing({x, expert_ids, active, capacity, experts, drop_pad, count ? count_type + 1 : 0, rows, places, counts}))
ACLNN(MoeTokenUnpermute, (T rows, T places, T weights, bool padded, IA, T out), unpermute(rows, places, weights, padded, out))
// clang-format on
