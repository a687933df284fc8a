// SPDX-License-Identifier: Apache-2.0
// Phase one on the host. The order is the operator's: comm_alg, input shapes, attributes, outputs,
// platform, size of the communicator's buffer. The first violation is reported; all give 561002.
#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "tiling.h"
#include "window.h"

XSD_API const char* aclrtGetSocName();

namespace megamoe {
namespace {

#ifndef XSD_MEGAMOE_PROFILE
#define XSD_MEGAMOE_PROFILE "seed"
#endif

using Long = long long;  // for printf

const char* profile_name() {
  // Read once, as all settings of the software device are.
  static const char* const name = [] {
    const char* set = std::getenv("XSD_MEGAMOE_PROFILE");
    return set != nullptr && *set != '\0' ? set : XSD_MEGAMOE_PROFILE;
  }();
  return name;
}

// nullptr when the profile is unknown. An unlisted SoC gets the profile's first row, because the
// operator looks at the platform only after the shapes.
const Limits* find_limits() {
  const Limits* first = nullptr;
  for (const Limits& row : kLimits) {
    if (std::strcmp(row.profile, profile_name()) != 0) continue;
    if (std::strncmp(row.soc, soc_name(), std::strlen(row.soc)) == 0) return &row;
    if (first == nullptr) first = &row;
  }
  return first;
}

}  // namespace

const char* soc_name() {
  const char* soc = aclrtGetSocName();
  return soc == nullptr ? "" : soc;
}

aclnnStatus Tiling::operator()() {
  limits_ = find_limits();
  if (limits_ == nullptr)
    return fail(kTiling, "XSD_MEGAMOE_PROFILE=\"%s\" is not known (seed, 9.1.0).",
                profile_name());
  using Step = aclnnStatus (Tiling::*)();
  const Step steps[] = {&Tiling::comm_alg,   &Tiling::tokens,   &Tiling::weights,
                        &Tiling::optionals,  &Tiling::sizes,    &Tiling::quantisation,
                        &Tiling::activation, &Tiling::outputs,  &Tiling::platform,
                        &Tiling::ccl_size,   &Tiling::kernel,   &Tiling::workspace};
  for (Step step : steps) {
    const aclnnStatus status = (this->*step)();
    if (status != kOk) return status;
  }
  return kOk;
}

aclnnStatus Tiling::comm_alg() {
  if (args_.comm_alg == nullptr) return fail(kTiling, "comm_alg is null; pass an empty string.");
  if (args_.comm_alg[0] != '\0')
    return fail(kTiling, "comm_alg=\"%.64s\" is not accepted; the only value is an empty string.",
                args_.comm_alg);
  return kOk;
}

// Copies the description of a live tensor; says what is wrong with a dead or empty one.
aclnnStatus Tiling::view(const aclTensor* tensor, const char* name, size_t rank, View* out) {
  if (xsdTensorAlive(tensor) == 0)
    return fail(kInvalid, "%s=%p is not a live aclTensor.", name,
                static_cast<const void*>(tensor));
  if (tensor->view_dims.size() != rank)
    return fail(kTiling, "%s must be %zu-dimension, got %zu", name, rank,
                tensor->view_dims.size());
  out->name = name;
  out->dtype = tensor->dtype;
  const int64_t bits = static_cast<int64_t>(xsdDtypeBits(tensor->dtype));
  out->item_bytes = bits / 8;
  for (size_t i = 0; i < rank; ++i) {
    out->dims[i] = tensor->view_dims[i];
    out->strides[i] = tensor->strides[i];
  }
  if (out->dims[0] > 0 && out->dims[1] > 0 && tensor->data == nullptr)
    return fail(kInvalid, "%s has no data address.", name);
  out->data = static_cast<char*>(tensor->data) + tensor->offset * bits / 8;
  return kOk;
}

aclnnStatus Tiling::dtype(const View& view, aclDataType allowed, const char* text) {
  if (view.dtype == allowed) return kOk;
  return fail(kTiling, "%s has data type %d; allowed: %s.", view.name,
              static_cast<int>(view.dtype), text);
}

aclnnStatus Tiling::range(const char* what, int64_t value, int64_t low, int64_t high, int64_t step) {
  if (value >= low && value <= high && value % step == 0) return kOk;
  return fail(kTiling, "%s=%lld is not accepted: %lld..%lld in steps of %lld (profile %s, %s).",
              what, Long(value), Long(low), Long(high), Long(step), limits_->profile, soc_name());
}

aclnnStatus Tiling::tokens() {
  aclnnStatus s;
  if ((s = view(args_.context, "context", 1, &p_.context)) != kOk) return s;
  if ((s = dtype(p_.context, ACL_INT32, "INT32 (3)")) != kOk) return s;
  if ((s = view(args_.x, "x", 2, &p_.x)) != kOk) return s;
  if ((s = dtype(p_.x, ACL_BF16, "BF16 (27)")) != kOk) return s;
  p_.tokens = p_.x.dims[0];
  p_.hidden = p_.x.dims[1];
  if ((s = range("bs (rows of x)", p_.tokens, 1, limits_->tokens_max)) != kOk) return s;
  if ((s = range("H (columns of x)", p_.hidden, limits_->hidden_min, limits_->hidden_max,
                 limits_->hidden_step)) != kOk)
    return s;
  if ((s = view(args_.topk_ids, "topk_ids", 2, &p_.topk_ids)) != kOk) return s;
  if ((s = dtype(p_.topk_ids, ACL_INT32, "INT32 (3)")) != kOk) return s;
  p_.topk = p_.topk_ids.dims[1];
  if ((s = same("topk_ids rows", p_.topk_ids.dims[0], "bs", p_.tokens)) != kOk) return s;
  if ((s = range("K (columns of topk_ids)", p_.topk, 1, limits_->topk_max)) != kOk) return s;
  if ((s = view(args_.topk_weights, "topk_weights", 2, &p_.topk_weights)) != kOk) return s;
  if (p_.topk_weights.dtype != ACL_BF16 &&
      (s = dtype(p_.topk_weights, ACL_FLOAT, "FLOAT (0), BF16 (27)")) != kOk)
    return s;
  if ((s = same("topk_weights rows", p_.topk_weights.dims[0], "bs", p_.tokens)) != kOk) return s;
  return same("topk_weights columns", p_.topk_weights.dims[1], "K", p_.topk);
}

aclnnStatus Tiling::same(const char* what, int64_t value, const char* other, int64_t wanted) {
  if (value == wanted) return kOk;
  return fail(kTiling, "%s=%lld must equal %s=%lld.", what, Long(value), other, Long(wanted));
}

aclnnStatus Tiling::sizes() {
  aclnnStatus s;
  if ((s = range("moe_expert_num", args_.moe_expert_num, 1, limits_->experts_max)) != kOk)
    return s;
  const int64_t ep = args_.ep_world_size;
  if (ep < 2 || ep > limits_->ranks_max || (ep & (ep - 1)) != 0)
    return fail(kTiling,
                "ep_world_size=%lld is not accepted: powers of two in 2..%lld (profile %s, %s).",
                Long(ep), Long(limits_->ranks_max), limits_->profile, soc_name());
  if ((s = range("max_recv_token_num", args_.max_recv_token_num, 0, INT32_MAX)) != kOk) return s;
  const int64_t most = args_.num_max_tokens_per_rank;
  if (most != 0 && (most < p_.tokens || most > limits_->tokens_max))
    return fail(kTiling, "num_max_tokens_per_rank=%lld is not accepted: 0, or bs=%lld..%lld.",
                Long(most), Long(p_.tokens), Long(limits_->tokens_max));
  p_.ranks = ep;
  p_.moe_expert_num = args_.moe_expert_num;
  p_.ccl_buffer_size = args_.ccl_buffer_size;
  p_.max_recv = args_.max_recv_token_num;
  if (p_.max_recv == 0)
    p_.max_recv = p_.tokens * ep * (p_.topk < p_.local_experts ? p_.topk : p_.local_experts);
  return kOk;
}

aclnnStatus Tiling::quantisation() {
  const bool quantised = p_.quant != Quant::kNone;
  if (args_.dispatch_quant_mode != (quantised ? 2 : 0))
    return fail(kTiling, "dispatch_quant_mode=%lld is not accepted: %s for %s weights.",
                Long(args_.dispatch_quant_mode), quantised ? "2 (int8 per token)" : "0",
                mode_name());
  const int64_t type = args_.dispatch_quant_out_dtype;
  if (type != 28 && type != (quantised ? ACL_INT8 : ACL_BF16))
    return fail(kTiling, "dispatch_quant_out_dtype=%lld is not accepted: %s.", Long(type),
                quantised ? "2 (INT8)" : "28 (undefined) or 27 (BF16)");
  if (args_.combine_quant_mode != 0)
    return fail(kTiling, "combine_quant_mode=%lld is not accepted: 0.",
                Long(args_.combine_quant_mode));
  if (args_.topk_weights_type != 0)
    return fail(kTiling, "topk_weights_type=%lld is not accepted: 0.",
                Long(args_.topk_weights_type));
  return kOk;
}

aclnnStatus Tiling::activation() {
  if (args_.activation == nullptr) return fail(kTiling, "activation is null; pass \"swiglu\".");
  if (std::strcmp(args_.activation, "swiglu") != 0)
    return fail(kTiling, "activation=\"%.64s\" is not accepted: \"swiglu\".", args_.activation);
  if (args_.num_activation_params > 1)
    return fail(kTiling, "activation_params has %lld values; swiglu takes none or [clamp].",
                Long(args_.num_activation_params));
  const float clamp = args_.activation_clamp;
  if (std::isnan(clamp) || clamp < 0.0f)
    return fail(kTiling,
                "activation_clamp=%g is not accepted: 0 or greater (0 or FLT_MAX = no clamp).",
                static_cast<double>(clamp));
  p_.clamp = clamp >= FLT_MAX ? 0.0f : clamp;
  return kOk;
}

aclnnStatus Tiling::outputs() {
  aclnnStatus s;
  if ((s = view(args_.y, "y", 2, &p_.y)) != kOk) return s;
  if ((s = dtype(p_.y, ACL_BF16, "BF16 (27), as x")) != kOk) return s;
  if ((s = same("y rows", p_.y.dims[0], "bs", p_.tokens)) != kOk) return s;
  if ((s = same("y columns", p_.y.dims[1], "H", p_.hidden)) != kOk) return s;
  if ((s = view(args_.expert_token_nums, "expert_token_nums", 1, &p_.expert_token_nums)) != kOk)
    return s;
  if ((s = dtype(p_.expert_token_nums, ACL_INT32, "INT32 (3)")) != kOk) return s;
  return same("length of expert_token_nums", p_.expert_token_nums.dims[0], "experts per rank",
              p_.local_experts);
}

aclnnStatus Tiling::platform() {
  const char* soc = soc_name();
  if (std::strncmp(soc, "Ascend910_93", 12) == 0) return kOk;
  if (std::strncmp(soc, "Ascend910B", 10) == 0)
    return fail(kNoKernel,
                "no MegaMoe kernel for %s in this library: only Ascend910_93 is modelled.", soc);
  return fail(kTiling, "platform %s is not accepted: Ascend910_93, Ascend910B.", soc);
}

aclnnStatus Tiling::ccl_size() {
  const int64_t need = window_need(p_.tokens, p_.topk, p_.hidden, p_.ranks, p_.quant);
  if (p_.ccl_buffer_size / 2 >= need) return kOk;
  return fail(
      kTiling,
      "ccl_buffer_size=%lld is too small: bs=%lld, K=%lld, H=%lld, EP=%lld need %lld bytes "
      "(twice "
      "%lld). Create the communicator with a buffer of at least %lld MB (HCCL_BUFFSIZE) or "
      "pass fewer tokens.",
      Long(p_.ccl_buffer_size), Long(p_.tokens), Long(p_.topk), Long(p_.hidden), Long(p_.ranks),
      Long(2 * need), Long(need), Long((need + (1 << 20) - 1) >> 20));
}

// Choice of the kernel, after all other checks.
aclnnStatus Tiling::kernel() {
  if (p_.quant == Quant::kNone || args_.dispatch_quant_out_dtype == ACL_INT8) return kOk;
  return fail(kTiling, "dispatch_quant_out_dtype=%lld must be INT8 (2) in quant mode.",
              Long(args_.dispatch_quant_out_dtype));
}

aclnnStatus Tiling::workspace() {
  const uint64_t slots = static_cast<uint64_t>(p_.tokens * p_.topk);
  const uint64_t matrix = static_cast<uint64_t>(p_.ranks * (p_.ranks * p_.local_experts + 1));
  const uint64_t wide = static_cast<uint64_t>(std::max(p_.hidden, 2 * p_.inter));
  const uint64_t deep = static_cast<uint64_t>(std::max(p_.hidden, p_.inter));
  WorkspacePlan& plan = p_.plan;
  uint64_t end = 0;
  auto reserve = [&end](uint64_t bytes) {
    const uint64_t start = end;
    end = (end + bytes + 63) / 64 * 64;
    return start;
  };
  plan.ids = reserve(slots * 4);
  plan.position = reserve(slots * 4);
  plan.counts = reserve(matrix * 4);
  plan.first_row = reserve(matrix * 4);
  const bool quantised = p_.quant != Quant::kNone;
  if (!quantised)
    plan.gate_up =
        reserve(static_cast<uint64_t>(p_.max_recv) * static_cast<uint64_t>(2 * p_.inter) * 2);
  plan.tile_in = reserve(kTileRows * deep * 4);
  plan.tile_out = reserve(kTileRows * wide * 4);
  if (quantised) {
    plan.rows = reserve(2 * kTileRows * deep);
    plan.scales = reserve(kTileRows * 4);
    plan.sums = reserve(2 * kTileRows * wide * 4);
    if (p_.quant == Quant::kInt4) plan.group = reserve(64 * deep);
  }
  plan.bytes = end;
  return kOk;
}

aclnnStatus tile(const Args& args, Problem* problem) { return Tiling(args, problem)(); }

}  // namespace megamoe
