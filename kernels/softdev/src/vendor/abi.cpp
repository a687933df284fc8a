// SPDX-License-Identifier: Apache-2.0
// The exported functions. The symbol names never changed while the parameter list grew, so one
// library exports exactly one variant, chosen when it is compiled: -DXSD_MEGAMOE_VARIANT=A ... J. B
// (26 parameters) is CANN 9.1.0. Each #if below is one step of that history.
#include <cfloat>
#include <cstdarg>
#include <cstdio>
#include <memory>

#include "mega_moe.h"

#define XSD_NUMBER_A 1
#define XSD_NUMBER_B 2
#define XSD_NUMBER_C 3
#define XSD_NUMBER_D 4
#define XSD_NUMBER_E 5
#define XSD_NUMBER_F 6
#define XSD_NUMBER_G 7
#define XSD_NUMBER_H 8
#define XSD_NUMBER_I 9
#define XSD_NUMBER_J 10

#ifndef XSD_MEGAMOE_VARIANT
#define XSD_MEGAMOE_VARIANT B
#endif

#define XSD_JOIN2(a, b) a##b
#define XSD_JOIN(a, b) XSD_JOIN2(a, b)
#define XSD_TEXT2(a) #a
#define XSD_TEXT(a) XSD_TEXT2(a)
#define VARIANT XSD_JOIN(XSD_NUMBER_, XSD_MEGAMOE_VARIANT)
#define SINCE(letter) (VARIANT >= XSD_NUMBER_##letter)
#if VARIANT == 0
#error "XSD_MEGAMOE_VARIANT must be one of A, B, C, D, E, F, G, H, I, J"
#endif

namespace megamoe {

aclnnStatus fail(aclnnStatus status, const char* fmt, ...) {
  char text[768];
  va_list args;
  va_start(args, fmt);
  std::vsnprintf(text, sizeof text, fmt, args);
  va_end(args);
  xsdSetError("EZ1001: aclnnMegaMoeGetWorkspaceSize: %s", text);
  return status;
}

namespace {

struct Required {
  const void* pointer;
  const char* name;
};

aclnnStatus check_pointers(const std::vector<Required>& required) {
  for (const Required& one : required) {
    if (one.pointer == nullptr) return fail(kNullPointer, "%s must not be nullptr.", one.name);
  }
  return kOk;
}

// From variant B on. No pointer is read before these pass.
[[maybe_unused]] aclnnStatus check_integers(const Args& args) {
  if (args.moe_expert_num <= 0)
    return fail(kInvalid, "moeExpertNum=%lld must be greater than 0.",
                static_cast<long long>(args.moe_expert_num));
  if (args.ep_world_size <= 0)
    return fail(kInvalid, "epWorldSize=%lld must be greater than 0.",
                static_cast<long long>(args.ep_world_size));
  if (args.max_recv_token_num < 0)
    return fail(kInvalid,
                "maxRecvTokenNum=%lld must not be negative (0 = all rows that can arrive).",
                static_cast<long long>(args.max_recv_token_num));
  return kOk;
}

// Followed are context, the small tensors, the weights and both outputs. The optional inputs behind
// them are not: no source says how absent ones are counted.
void* clone_problem(const void* problem) {
  return new Problem(*static_cast<const Problem*>(problem));
}

// The bytes from the first element to the end of the last one.
uint64_t extent(const View& view) {
  if (view.dims[0] == 0 || view.dims[1] == 0) return 0;
  if (view.item_bytes == 0) return static_cast<uint64_t>(view.dims[0] * view.dims[1]) / 2;  // int4
  const int64_t last =
      (view.dims[0] - 1) * view.strides[0] + (view.dims[1] - 1) * view.strides[1];
  return static_cast<uint64_t>((last + 1) * view.item_bytes);
}

int move_tensor(void* ctx, int is_output, uint64_t index, void* address) {
  auto& problem = *static_cast<Problem*>(ctx);
  View* inputs[] = {&problem.context, &problem.x, &problem.topk_ids, &problem.topk_weights};
  View* outputs[] = {&problem.y, &problem.expert_token_nums};
  const uint64_t local = problem.weight1.size();
  View* view = nullptr;
  if (is_output != 0) {
    if (index < 2) view = outputs[index];
  } else if (index < 4) {
    view = inputs[index];
  } else if (index < 4 + local) {
    view = &problem.weight1[index - 4];
  } else if (index < 4 + 2 * local) {
    view = &problem.weight2[index - 4 - local];
  }
  if (view == nullptr) return 0;
  // The caller's tensor was looked at; this executor may read more there than that one has.
  if (xsdCheckRange(address, extent(*view)) < 0) return -1;
  view->data = static_cast<char*>(address);
  return 1;
}

constexpr XsdRebind kRebind = {clone_problem, move_tensor};

void release_problem(void* problem) { delete static_cast<Problem*>(problem); }

aclnnStatus create(const Args& args, uint64_t* workspace_size, aclOpExecutor** executor) {
  if (workspace_size == nullptr || executor == nullptr)
    return fail(kNullPointer, "%s must not be nullptr.",
                workspace_size == nullptr ? "workspaceSize" : "executor");
  // The operator's wrapper creates an executor only when it finds NULL and otherwise uses whatever
  // the pointer holds, so a caller that forgets to clear it crashes there. Here it gets an error.
  if (*executor != nullptr)
    return fail(kExecutor,
                "*executor holds %p on entry; it must be NULL. Initialise it before each call.",
                static_cast<void*>(*executor));
  auto problem = std::make_unique<Problem>();
  const aclnnStatus status = tile(args, problem.get());
  if (status != kOk) return status;
  const uint64_t bytes = problem->plan.bytes;
  aclOpExecutor* made =
      xsdExecutorCreate("aclnnMegaMoe", bytes, run, problem.get(), release_problem);
  if (made == nullptr) return fail(kExecutor, "no executor could be created.");
  problem.release();
  xsdExecutorSetRebind(made, &kRebind);
  *workspace_size = bytes;
  *executor = made;
  return kOk;
}

}  // namespace
}  // namespace megamoe

// The ABI of this build, for tests of callers that must find it out by other means.
XSD_API const char* xsdMegaMoeVariant() { return XSD_TEXT(XSD_MEGAMOE_VARIANT); }

XSD_API aclnnStatus aclnnMegaMoeGetWorkspaceSize(
    const aclTensor* context, const aclTensor* x, const aclTensor* topkIds,
    const aclTensor* topkWeights, const aclTensorList* weight1, const aclTensorList* weight2,
    const aclTensorList* weightScales1Optional, const aclTensorList* weightScales2Optional,
#if SINCE(B)
    const aclTensorList* bias1Optional, const aclTensorList* bias2Optional,
#endif
    const aclTensor* xActiveMaskOptional,
#if VARIANT == XSD_NUMBER_A || SINCE(J)
    const aclTensor* scalesOptional,
#endif
#if SINCE(E)
    const aclTensorList* sharedWeight1Optional, const aclTensorList* sharedWeight2Optional,
    const aclTensorList* sharedWeightScales1Optional,
    const aclTensorList* sharedWeightScales2Optional, const aclTensorList* sharedBias1Optional,
    const aclTensorList* sharedBias2Optional,
#endif
#if SINCE(H)
    const aclTensor* maskBufferOptional,
#endif
    int64_t moeExpertNum, int64_t epWorldSize, int64_t cclBufferSize, int64_t maxRecvTokenNum,
    int64_t dispatchQuantMode, int64_t dispatchQuantOutDtype,
#if SINCE(I)
    int64_t sharedExpertQuantOutDtype,
#endif
    int64_t combineQuantMode, const char* commAlg, int64_t numMaxTokensPerRank,
#if SINCE(B)
    const char* activation,
#if SINCE(G)
    const aclFloatArray* activationParams,
#else
    float activationClamp,
#endif
#endif
#if SINCE(C)
    int64_t topoType,
#endif
#if SINCE(D)
    int64_t rankNumPerServer,
#endif
#if SINCE(F)
    int64_t topkWeightsType,
#endif
    aclTensor* yOut, aclTensor* expertTokenNumsOut, uint64_t* workspaceSize,
    aclOpExecutor** executor) {
  const aclnnStatus missing = megamoe::check_pointers({
      {context, "context"},
      {x, "x"},
      {topkIds, "topkIds"},
      {topkWeights, "topkWeights"},
      {weight1, "weight1"},
      {weight2, "weight2"},
#if SINCE(G)
      {activation, "activation"},
      {activationParams, "activationParams"},
#endif
      {yOut, "yOut"},
      {expertTokenNumsOut, "expertTokenNumsOut"},
  });
  if (missing != megamoe::kOk) return missing;

  megamoe::Args args;
  args.context = context;
  args.x = x;
  args.topk_ids = topkIds;
  args.topk_weights = topkWeights;
  args.weight1 = weight1;
  args.weight2 = weight2;
  args.weight_scales1 = weightScales1Optional;
  args.weight_scales2 = weightScales2Optional;
  args.x_active_mask = xActiveMaskOptional;
  args.moe_expert_num = moeExpertNum;
  args.ep_world_size = epWorldSize;
  args.ccl_buffer_size = cclBufferSize;
  args.max_recv_token_num = maxRecvTokenNum;
  args.dispatch_quant_mode = dispatchQuantMode;
  args.dispatch_quant_out_dtype = dispatchQuantOutDtype;
  args.combine_quant_mode = combineQuantMode;
  args.comm_alg = commAlg;
  args.y = yOut;
  args.expert_token_nums = expertTokenNumsOut;
#if SINCE(B)
  args.bias1 = bias1Optional;
  args.bias2 = bias2Optional;
  args.activation = activation;
#endif
#if VARIANT == XSD_NUMBER_A || SINCE(J)
  args.scales = scalesOptional;
#endif
#if SINCE(E)
  const aclTensorList* shared[6] = {sharedWeight1Optional,       sharedWeight2Optional,
                                    sharedWeightScales1Optional, sharedWeightScales2Optional,
                                    sharedBias1Optional,         sharedBias2Optional};
  for (int i = 0; i < 6; ++i) args.shared[i] = shared[i];
#endif
#if SINCE(H)
  args.mask_buffer = maskBufferOptional;
  args.num_max_tokens_per_rank = numMaxTokensPerRank;
#else
  // The wrapper of variants before H takes this number and forwards 0.
  (void)numMaxTokensPerRank;
#endif
#if SINCE(I)
  args.shared_expert_quant_out_dtype = sharedExpertQuantOutDtype;
#endif
#if SINCE(C)
  args.topo_type = topoType;
#endif
#if SINCE(D)
  args.rank_num_per_server = rankNumPerServer;
#endif
#if SINCE(F)
  args.topk_weights_type = topkWeightsType;
#endif
#if SINCE(B)
  const aclnnStatus integers = megamoe::check_integers(args);
  if (integers != megamoe::kOk) return integers;
#endif
#if SINCE(G)
  if (xsdFloatArrayAlive(activationParams) == 0)
    return megamoe::fail(megamoe::kInvalid, "activationParams=%p is not a live aclFloatArray.",
                         static_cast<const void*>(activationParams));
  args.num_activation_params = static_cast<int64_t>(activationParams->values.size());
  if (args.num_activation_params > 0) args.activation_clamp = activationParams->values[0];
#elif SINCE(B)
  args.activation_clamp = activationClamp;
#endif
  return megamoe::create(args, workspaceSize, executor);
}

XSD_API aclnnStatus aclnnMegaMoe(void* workspace, uint64_t workspaceSize, aclOpExecutor* executor,
                                 aclrtStream stream) {
  return xsdExecutorLaunch("aclnnMegaMoe", workspace, workspaceSize, executor, stream);
}
