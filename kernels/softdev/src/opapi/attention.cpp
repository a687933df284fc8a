// SPDX-License-Identifier: Apache-2.0
// Attention without gradients. Source: ops-transformer, attention/flash_attention_score/docs
// (aclnnFlashAttentionScore). Only what scaled_dot_product_attention asks for.
#include <limits>

#include "opapi.h"

using namespace xsd::op;

namespace {

constexpr int64_t kNoMask = 0, kLeftUpCausal = 2;

struct Attention {
  T query, key, value, mask;
  double scale, keep;
  int64_t before, after, heads;
  Text layout;
  int64_t sparse;
  T most, sum, out;
};

void attention(const Attention& a) {
  TORCH_CHECK(a.layout == "BNSD" && a.query.dim() == 4, "FlashAttentionScore: layout ", a.layout, " is not supported here");
  TORCH_CHECK(a.keep == 1.0, "FlashAttentionScore: dropout is not supported here");
  TORCH_CHECK(a.sparse == kNoMask || a.sparse == kLeftUpCausal, "FlashAttentionScore: sparseMode ", a.sparse, " is not supported here");
  const auto type = a.query.scalar_type();
  TORCH_CHECK((type == at::kHalf || type == at::kBFloat16 || type == at::kFloat) && a.key.scalar_type() == type && a.value.scalar_type() == type,
              "FlashAttentionScore: query, key and value must have one type, FLOAT16, BFLOAT16 or FLOAT");
  TORCH_CHECK(a.heads == a.query.size(1) && a.heads % a.key.size(1) == 0, "FlashAttentionScore: ", a.heads, " heads for ", a.key.size(1));
  const int64_t rows = a.query.size(2), columns = a.key.size(2);
  const bool causal = a.sparse == kLeftUpCausal;
  std::optional<at::Tensor> keep;
  if (causal) {
    TORCH_CHECK(a.after == 0, "FlashAttentionScore: nextTokens ", a.after, " with a causal mask");
    keep = at::ones({rows, columns}, at::kBool).tril();
  } else {
    TORCH_CHECK(a.before >= columns && a.after >= columns, "FlashAttentionScore: windows are not supported here");
    if (a.mask.defined()) {
      TORCH_CHECK((a.mask.scalar_type() == at::kBool || a.mask.scalar_type() == at::kByte) && a.mask.size(-1) == columns &&
                  a.mask.size(-2) == rows, "FlashAttentionScore: attenMask must be BOOL or UINT8 [.., Sq, Skv]");
      keep = a.mask.to(at::kBool).logical_not();  // 1 leaves an element out
    }
  }
  // The host's own operator, so that both devices give the same bits.
  const auto scale = std::optional<double>(a.scale);
  a.out.copy_(at::scaled_dot_product_attention(a.query, a.key, a.value, causal ? std::nullopt : keep, 0.0, causal, scale, true));
  if (!a.most.defined() || a.most.numel() == 0) return;
  const auto keys = a.key.to(at::kFloat).repeat_interleave(a.heads / a.key.size(1), 1);
  auto scores = at::matmul(a.query.to(at::kFloat), keys.transpose(-1, -2)) * a.scale;
  if (keep) scores = scores.masked_fill(keep->logical_not(), -std::numeric_limits<float>::infinity());
  const auto most = std::get<0>(scores.max(-1, true));
  a.most.copy_(most.expand(a.most.sizes()));
  a.sum.copy_(at::exp(scores - most).sum(-1, true).expand(a.sum.sizes()));
}

}  // namespace

// clang-format off
ACLNN(FlashAttentionScore, (T query, T key, T value, T shift, T drop, T padding, T mask, IA prefix, double scale, double keep,
                            int64_t before, int64_t after, int64_t heads, Text layout, int64_t, int64_t sparse, T most, T sum, T, T out),
      TORCH_CHECK(!shift.defined() && !padding.defined() && prefix.empty() && (!drop.defined() || drop.numel() == 0),
                  "FlashAttentionScore: realShift, dropMask, paddingMask and prefix are not supported here");
      attention({query, key, value, mask, scale, keep, before, after, heads, layout, sparse, most, sum, out}))
// clang-format on
