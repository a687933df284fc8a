// SPDX-License-Identifier: Apache-2.0
// Gating, routing, activation and the sum over experts of torch_npu's fused MoE path. What is not
// implemented is refused by name, not approximated. Source: ops-transformer, docs below moe/, and
// op-plugin's of npu_moe_init_routing_v2.
#include <limits>

#include "opapi.h"

using namespace xsd::op;

namespace {

constexpr int64_t kMostK = 1024, kMostSummed = 512, kMostExperts = 10240, kMostKeyed = 5120;

bool is_float(const at::Tensor& tensor) {
  const auto type = tensor.scalar_type();
  return type == at::kFloat || type == at::kHalf || type == at::kBFloat16;
}

void swiglu(T x, int64_t dim, T out) {
  TORCH_CHECK(is_float(x) && x.numel() > 0 && x.size(dim) % 2 == 0, "SwiGlu: x must be FLOAT, FLOAT16 or BFLOAT16, not empty, even in dim");
  const auto halves = at::chunk(x.to(at::kFloat), 2, dim);
  out.copy_(at::silu(halves[0]) * halves[1]);
}

void gating(T x, T finished, int64_t k, T weights, T ids, T row_ids) {
  TORCH_CHECK(is_float(x) && (x.dim() == 2 || x.dim() == 3) && k > 0 && k <= x.size(-1) && k <= kMostK,
              "MoeGatingTopKSoftmax: x must be 2-D or 3-D FLOAT, FLOAT16 or BFLOAT16 with 0 < k <= its last dimension, k <= 1024");
  TORCH_CHECK(weights.scalar_type() == x.scalar_type() && ids.scalar_type() == at::kInt && row_ids.scalar_type() == at::kInt,
              "MoeGatingTopKSoftmax: y must have x's type, expertIdx and rowIdx INT32");
  auto [values, indices] = at::topk(at::softmax(x.to(at::kFloat), -1), k, -1);
  weights.copy_(values);
  ids.copy_(indices);
  if (finished.defined() && finished.numel() > 0) ids.masked_fill_(finished.unsqueeze(-1), at::Scalar(x.size(-1)));
  const int64_t rows = ids.numel() / k;
  row_ids.copy_(at::arange(rows * k).reshape({k, rows}).t().reshape(row_ids.sizes()));
}

struct Routing {
  T x, expert_ids;
  int64_t active, experts, drop_pad, count_type;
  int64_t first, end;  // experts whose slots are wanted
  int64_t place_type;
  T rows, places, counts;
};

// Slots of wanted experts in expert order, then the others, whose rows are not written.
void init_routing(const char* op, const Routing& r) {
  TORCH_CHECK(r.x.dim() == 2 && (is_float(r.x) || r.x.scalar_type() == at::kChar) && r.expert_ids.dim() == 2 &&
              r.expert_ids.scalar_type() == at::kInt && r.expert_ids.size(0) == r.x.size(0), op,
              ": x must be [T, H] FLOAT, FLOAT16, BFLOAT16 or INT8, expertIdx INT32 [T, K]");
  const int64_t tokens = r.expert_ids.size(0), k = r.expert_ids.size(1);
  TORCH_CHECK(r.drop_pad == 0, op, ": dropPadMode ", r.drop_pad, " is not supported here");
  TORCH_CHECK(r.active == tokens * k, op, ": activeNum ", r.active, " for ", tokens * k, " slots; releases want them equal");
  TORCH_CHECK(r.experts > 0 && r.experts <= (r.count_type == 2 ? kMostKeyed : kMostExperts) && 0 <= r.first && r.first < r.end &&
              r.end <= r.experts, op, ": experts ", r.first, "..", r.end, " of ", r.experts);
  const auto flat = r.expert_ids.to(at::kLong).flatten();
  TORCH_CHECK(flat.numel() == 0 || flat.max().item<int64_t>() < r.experts, op, ": an expert id is not below ", r.experts);
  const auto wanted = flat.ge(r.first).logical_and(flat.lt(r.end));
  const auto keys = at::where(wanted, flat, at::full({}, std::numeric_limits<int32_t>::max(), at::kLong));
  const auto order = std::get<1>(at::sort(keys, true, 0, false));
  const int64_t used = wanted.sum().item<int64_t>();
  const auto first = order.narrow(0, 0, used);
  r.rows.narrow(0, 0, used).copy_(r.x.index_select(0, at::floor_divide(first, k)));
  if (r.place_type == 1) {  // where each row comes from; the rest is not written
    r.places.narrow(0, 0, used).copy_(first);
  } else {  // where each slot went
    auto places = at::full({tokens * k}, -1, at::kLong);
    places.index_put_({first}, at::arange(used));
    r.places.copy_(places);
  }
  const auto counts = at::bincount(keys.index({wanted}) - r.first, {}, r.end - r.first);
  if (r.count_type == 1) {
    r.counts.copy_(counts);
    return;
  }
  const auto held = counts.nonzero().flatten();
  auto pairs = at::zeros(r.counts.sizes(), at::kLong);
  pairs.narrow(0, 0, held.numel()).copy_(at::stack({held + r.first, counts.index_select(0, held)}, 1));
  r.counts.copy_(pairs);
}

void unpermute(T rows, T places, T weights, bool padded, T out) {
  TORCH_CHECK(!padded, "MoeTokenUnpermute: paddedMode is not supported here");
  const int64_t k = weights.defined() ? weights.size(1) : 1, slots = places.numel();
  TORCH_CHECK(is_float(rows) && rows.dim() == 2 && places.dim() == 1 && places.scalar_type() == at::kInt && rows.size(0) == slots &&
              slots % k == 0 && k <= kMostSummed && (!weights.defined() || (is_float(weights) && weights.size(0) == slots / k)),
              "MoeTokenUnpermute: tokens [T*K, H], INT32 indices [T*K], probs [T, K] with K <= 512 do not fit");
  const auto index = places.to(at::kLong);
  TORCH_CHECK(slots == 0 || (index.min().item<int64_t>() >= 0 && index.max().item<int64_t>() < slots &&
              at::bincount(index, {}, slots).max().item<int64_t>() == 1), "MoeTokenUnpermute: indices must be 0..T*K-1, each once");
  const auto picked = rows.index_select(0, index).reshape({slots / k, k, rows.size(1)});
  auto total = at::zeros({slots / k, rows.size(1)}, at::kFloat);
  for (int64_t j = 0; j < k; ++j) {
    auto term = picked.select(1, j).to(at::kFloat);
    if (weights.defined()) term = term * weights.select(1, j).to(at::kFloat).unsqueeze(-1);
    total = total + term;
  }
  out.copy_(total);
}

}  // namespace

// clang-format off
ACLNN(SwiGlu, (T x, int64_t dim, T out), swiglu(x, dim, out))
ACLNN(MoeGatingTopKSoftmax, (T x, T finished, int64_t k, T weights, T ids, T row_ids), gating(x, finished, k, weights, ids, row_ids))
ACLNN(MoeInitRoutingV3, (T x, T expert_ids, T scale, T offset, int64_t active, int64_t, int64_t experts, int64_t drop_pad,
                         int64_t count_type, bool count, int64_t quant_mode, IA range, int64_t place_type, T rows, T places, T counts, T),
      TORCH_CHECK(!scale.defined() && !offset.defined() && quant_mode == -1, "MoeInitRoutingV3: quantisation is not supported here");
      TORCH_CHECK(place_type == 0 || place_type == 1, "MoeInitRoutingV3: rowIdxType ", place_type, " (0 or 1)");
      TORCH_CHECK(range.size() == 2, "MoeInitRoutingV3: activeExpertRange must hold two numbers");
      TORCH_CHECK(count && (count_type == 1 || count_type == 2), "MoeInitRoutingV3: expertTokensNumType ", count_type,
                  ", flag ", count, "; releases up to 9.1 want the counts, as type 1 or 2");
      init_routing("MoeInitRoutingV3", {x, expert_ids, active, experts, drop_pad, count_type, range[0], range[1], place_type, rows, places, counts}))
ACLNN(MoeTokenUnpermute, (T rows, T places, T weights, bool padded, IA, T out), unpermute(rows, places, weights, padded, out))
// clang-format on
