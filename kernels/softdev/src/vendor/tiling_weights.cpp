// SPDX-License-Identifier: Apache-2.0
#include <cstdio>

#include "quant.h"
#include "tiling.h"

namespace megamoe {
namespace {

using Long = long long;  // for printf

}  // namespace

aclnnStatus Tiling::weights() {
  aclnnStatus s;
  if ((s = live(args_.weight1, "weight1")) != kOk || (s = live(args_.weight2, "weight2")) != kOk)
    return s;
  p_.local_experts = static_cast<int64_t>(args_.weight1->items.size());
  if ((s = range("experts per rank (length of weight1)", p_.local_experts, 1,
                 limits_->local_experts_max)) != kOk)
    return s;
  if ((s = same("length of weight2", static_cast<int64_t>(args_.weight2->items.size()),
                "length of weight1", p_.local_experts)) != kOk)
    return s;
  p_.weight1.resize(static_cast<size_t>(p_.local_experts));
  p_.weight2.resize(static_cast<size_t>(p_.local_experts));
  if ((s = weight_type()) != kOk) return s;
  for (size_t e = 0; e < p_.weight1.size(); ++e) {
    if ((s = one_weight(args_.weight1->items[e], "weight1", e, &p_.weight1[e])) != kOk) return s;
    if ((s = one_weight(args_.weight2->items[e], "weight2", e, &p_.weight2[e])) != kOk) return s;
    if (e == 0) {
      p_.inter = p_.weight2[0].dims[0];
      if ((s = range("I (rows of weight2[0])", p_.inter, limits_->inter_min, limits_->inter_max,
                     limits_->inter_step)) != kOk)
        return s;
    }
    if ((s = same("weight1 rows", p_.weight1[e].dims[0], "H", p_.hidden)) != kOk) return s;
    if ((s = same("weight1 columns", p_.weight1[e].dims[1], "2*I", 2 * p_.inter)) != kOk)
      return s;
    if ((s = same("weight2 rows", p_.weight2[e].dims[0], "I", p_.inter)) != kOk) return s;
    if ((s = same("weight2 columns", p_.weight2[e].dims[1], "H", p_.hidden)) != kOk) return s;
  }
  return kOk;
}

aclnnStatus Tiling::live(const aclTensorList* list, const char* name) {
  if (xsdTensorListAlive(list) != 0) return kOk;
  return fail(kInvalid, "%s=%p is not a live aclTensorList.", name,
              static_cast<const void*>(list));
}

// What the weights are is read from their type; the first one decides.
aclnnStatus Tiling::weight_type() {
  const aclTensor* first = args_.weight1->items[0];
  if (xsdTensorAlive(first) == 0)
    return fail(kInvalid, "weight1[0]=%p is not a live aclTensor.",
                static_cast<const void*>(first));
  switch (first->dtype) {
    case ACL_BF16:
      return kOk;
    case ACL_INT8:
      p_.quant = Quant::kInt8;
      break;
    case ACL_INT4:
    case ACL_INT32:
      p_.quant = Quant::kInt4;
      break;
    case ACL_FLOAT8_E5M2:
    case ACL_FLOAT8_E4M3FN:
    case ACL_FLOAT4_E2M1:
      return fail(kTiling,
                  "weight1[0] has data type %d: MXFP weights (A8W8-FP, A8W4-FP, A4W4-FP) belong to "
                  "Ascend950, this library has no kernel for them.",
                  static_cast<int>(first->dtype));
    default:
      return fail(kTiling,
                  "weight1[0] has data type %d; allowed: BF16 (27), INT8 (2), INT4 (29), or INT32 "
                  "(3) holding eight INT4.",
                  static_cast<int>(first->dtype));
  }
  const char* unknown = read_quant_settings(&p_.settings);
  return unknown == nullptr ? kOk
                            : fail(kTiling, "the software device's setting %s has another value.",
                                   unknown);
}

aclnnStatus Tiling::one_weight(const aclTensor* tensor, const char* list, size_t index, View* out) {
  char name[32];
  std::snprintf(name, sizeof name, "%s[%zu]", list, index);
  aclnnStatus s = view(tensor, name, 2, out);
  out->name = list;
  if (s != kOk) return s;
  // The wrapper presents INT32 as eight INT4 in FRACTAL_NZ, whatever format it was given.
  const bool packed = p_.quant == Quant::kInt4 && out->dtype == ACL_INT32;
  const aclDataType wanted = p_.quant == Quant::kNone    ? ACL_BF16
                             : p_.quant == Quant::kInt8  ? ACL_INT8
                             : packed                    ? ACL_INT32
                                                         : ACL_INT4;
  if (out->dtype != wanted)
    return fail(kTiling, "%s has data type %d, but weight1[0] makes it %s weights.", name,
                static_cast<int>(out->dtype), mode_name());
  const aclFormat format = p_.quant == Quant::kNone ? ACL_FORMAT_ND : ACL_FORMAT_FRACTAL_NZ;
  if (!packed && tensor->format != format)
    return fail(kTiling, "%s has format %d; %s weights must be %s (%d).", name,
                static_cast<int>(tensor->format), mode_name(),
                format == ACL_FORMAT_ND ? "ND" : "FRACTAL_NZ", static_cast<int>(format));
  // The operator reads weights as contiguous whatever their strides say.
  if (xsdSettings()->strict && !out->contiguous())
    return fail(kTiling,
                "%s has strides [%lld, %lld] for shape [%lld, %lld]: weights must be contiguous.",
                name, Long(out->strides[0]), Long(out->strides[1]), Long(out->dims[0]),
                Long(out->dims[1]));
  if (packed) {
    out->dims[1] *= 8;
    out->dtype = ACL_INT4;
    out->item_bytes = 0;
  }
  out->strides[0] = out->dims[1];
  out->strides[1] = 1;
  return kOk;
}

const char* Tiling::mode_name() const {
  return p_.quant == Quant::kNone ? "BF16" : p_.quant == Quant::kInt8 ? "INT8" : "INT4";
}

// A list whose tensors are all empty means "absent": the wrapper itself builds such dummies.
bool Tiling::present(const aclTensorList* list) {
  if (list == nullptr) return false;
  if (xsdTensorListAlive(list) == 0)
    return true;  // not a list at all: certainly not an empty one
  for (const aclTensor* tensor : list->items)
    if (present(tensor)) return true;
  return false;
}

bool Tiling::present(const aclTensor* tensor) {
  if (tensor == nullptr) return false;
  if (xsdTensorAlive(tensor) == 0) return true;
  for (int64_t dim : tensor->view_dims)
    if (dim == 0) return false;
  return true;
}

aclnnStatus Tiling::optionals() {
  const char* const shared[6] = {"sharedWeight1",       "sharedWeight2", "sharedWeightScales1",
                                 "sharedWeightScales2", "sharedBias1",   "sharedBias2"};
  for (int i = 0; i < 6; ++i)
    if (present(args_.shared[i]))
      return fail(kTiling, "%s is given; this library has no shared experts, pass NULL.",
                  shared[i]);
  if (present(args_.mask_buffer))
    return fail(kTiling, "maskBuffer is given; this library cannot skip ranks, pass NULL.");
  if (present(args_.scales))
    return fail(kTiling, "scales is given; it belongs to pre-quantised x, pass NULL.");
  aclnnStatus s;
  if ((s = column_lists()) != kOk) return s;
  if (!present(args_.x_active_mask)) return kOk;
  if ((s = view(args_.x_active_mask, "x_active_mask", 1, &p_.mask)) != kOk) return s;
  if ((s = dtype(p_.mask, ACL_INT8, "INT8 (2)")) != kOk) return s;
  p_.has_mask = true;
  return same("length of x_active_mask", p_.mask.dims[0], "bs", p_.tokens);
}

// Scales and biases: one tensor per expert, one element per column of its weight.
aclnnStatus Tiling::column_lists() {
  const struct {
    const aclTensorList* list;
    const char* name;
    bool wanted;
    aclDataType dtype;
    const char* type_name;
    int64_t columns;
    std::vector<View>* out;
  } lists[4] = {
      {args_.weight_scales1, "weightScales1", p_.quant != Quant::kNone, ACL_UINT64, "UINT64 (10)",
       2 * p_.inter, &p_.scales1},
      {args_.weight_scales2, "weightScales2", p_.quant != Quant::kNone, ACL_UINT64, "UINT64 (10)",
       p_.hidden, &p_.scales2},
      {args_.bias1, "bias1", p_.quant == Quant::kInt4, ACL_FLOAT, "FLOAT (0)", 2 * p_.inter,
       &p_.bias1},
      {args_.bias2, "bias2", p_.quant == Quant::kInt4, ACL_FLOAT, "FLOAT (0)", p_.hidden,
       &p_.bias2}};
  for (const auto& one : lists) {
    if (!present(one.list)) {
      if (!one.wanted) continue;
      return fail(kTiling, "%s is absent; %s weights need it: %lld tensors of %s [%lld].", one.name,
                  mode_name(), Long(p_.local_experts), one.type_name, Long(one.columns));
    }
    if (!one.wanted)
      return fail(kTiling, "%s is given; it must be absent for %s weights.", one.name, mode_name());
    aclnnStatus s;
    if ((s = live(one.list, one.name)) != kOk) return s;
    char length[48];
    std::snprintf(length, sizeof length, "length of %s", one.name);
    if ((s = same(length, static_cast<int64_t>(one.list->items.size()), "length of weight1",
                  p_.local_experts)) != kOk)
      return s;
    one.out->resize(one.list->items.size());
    for (size_t e = 0; e < one.out->size(); ++e) {
      View& v = (*one.out)[e];
      char name[32];
      std::snprintf(name, sizeof name, "%s[%zu]", one.name, e);
      if ((s = view(one.list->items[e], name, 1, &v)) != kOk) return s;
      v.name = one.name;
      if (v.dtype != one.dtype)
        return fail(kTiling, "%s has data type %d; allowed: %s.", name, static_cast<int>(v.dtype),
                    one.type_name);
      // The operator checks the length of biases only and would read past shorter scales.
      if ((s = same(name, v.dims[0], "columns of its weight", one.columns)) != kOk) return s;
      if (v.strides[0] != 1)
        return fail(kTiling, "%s has stride %lld: it must be contiguous.", name, Long(v.strides[0]));
    }
  }
  return kOk;
}

}  // namespace megamoe
