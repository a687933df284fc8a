// SPDX-License-Identifier: Apache-2.0
// C functions of the asynchronous operators.
//
// aclnnAfdAsync*: the plugin-owned routed-only set (argument order: afd-plugin
// csrc/npu/pybind/torch_binding_cam_async.cpp, read 2026-10).
// aclnnXsdUmdkAsync*: the older set with a shared expert. Its wheel is closed: argument order is
// that of its torch operators, symbol names and the shared expert's placement are this device's
// own.
#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "async_kernels.h"

namespace cam {

int64_t recv_capacity(int* status, const char* op) {
  float factor = 1.0f;
  const char* text = std::getenv("BATCH_SIZE_FACTOR");
  if (text != nullptr) {
    char* end = nullptr;
    const float value = std::strtof(text, &end);
    if (end != text) factor = value;  // text that is no number counts as 1.0, as in the source
  }
  const int64_t rows = static_cast<int64_t>(static_cast<float>(kMaxSeq) * factor);
  if (*status == 0 && !(factor > 0.0f && factor <= 1.0f && rows > 0)) {
    xsdSetError(
        "%s: BATCH_SIZE_FACTOR is \"%s\"; allowed: a number in (0, 1] that leaves at least one row",
        op, text);
    *status = kErrTiling;
  }
  return rows;
}

void check_shape(Args& args, const AsyncShape& s, bool attention) {
  args.range("hiddenSize", s.hidden, 1, 1 << 20);
  args.range("moeRankNum", s.ffn, 1, 1024);
  args.range("attnRankNum", s.attn, 1, 1024);
  args.range("routeExpertNumPerMoe", s.routed(), 1, 4096);
  if (args.status() != 0) return;
  args.range("topk", s.topk, 1, s.ffn * s.routed());
  args.range("tpSize", s.tp, 1, s.attn);
  args.require(s.tp < 1 || s.attn % s.tp == 0, "tpSize must divide attnRankNum");
  args.range("dynamicQuant", s.quant, 0, 1);
  args.range("layerIndex", s.layer, 0, 1 << 30);
  args.range("rank", s.rank, attention ? 0 : s.attn, attention ? s.attn - 1 : s.attn + s.ffn - 1);
}

namespace {

void bind(Args& args, AsyncKernel* k, const char* group, int64_t world) {
  args.require(world == k->shape.attn + k->shape.ffn, "worldSize must be attnRankNum + moeRankNum");
  args.group(group, &k->group);
  args.require(args.status() != 0 || (k->group.size == world && k->group.rank == k->shape.rank),
               "rank and worldSize must be the communicator's rank and size");
}

void check_ffn_window(Args& args, AsyncKernel* k) {
  args.range("maxSeqLen", k->shape.max_seq, k->shape.tp, kMaxSeq);
  args.require(k->shape.max_seq / k->shape.tp <= 65536,
               "maxSeqLen / tpSize above 65536 overflows uint16 indices");
  if (args.status() != 0) return;
  FfnLayout layout(k->shape);
  args.window(layout.bytes * static_cast<uint64_t>(k->shape.attn) + 32, k->group,
              "FFN receive area");
}

template <typename T>
int finish(Args& args, std::unique_ptr<T> k, uint64_t* workspace, aclOpExecutor** executor) {
  const char* op = k->name;
  int status = args.status();
  k->device = calling_device(op, &status);
  return status != 0 ? status : make_executor(op, std::move(k), workspace, executor);
}

const std::vector<aclDataType> kHalf = {ACL_BF16, ACL_FLOAT16};

struct SendArgs {
  const aclTensor *x, *ids, *comm;
  const char* group;
  int64_t world;
};
int dispatch_send(const char* op, AsyncShape s, SendArgs a, uint64_t* workspace,
                  aclOpExecutor** executor) {
  Args args(op);
  auto k = std::make_unique<DispatchSend>();
  k->name = op;
  k->shape = s;
  check_shape(args, s, true);
  if (args.status() != 0) return args.status();
  args.range("batchSize", s.batch, 1, s.tp > 0 ? s.max_seq / s.tp : 0);
  k->x = args.tensor(a.x, "x", kHalf, {s.batch, s.hidden});
  k->ids = args.tensor(a.ids, "expertIds", {ACL_INT32}, {s.batch, s.topk});
  args.tensor(a.comm, "commArgs", {ACL_FLOAT16}, {});
  bind(args, k.get(), a.group, a.world);
  check_ffn_window(args, k.get());
  if (args.status() == 0) args.window(AttnLayout(s).bytes, k->group, "Attention result area");
  return finish(args, std::move(k), workspace, executor);
}

struct RecvArgs {
  const aclTensor *anchor, *comm, *x, *scales, *info, *counts, *x_shared, *scales_shared,
      *shared_count;
  const char* group;
  int64_t world;
};
int dispatch_recv(const char* op, AsyncShape s, RecvArgs a, uint64_t* workspace,
                  aclOpExecutor** executor) {
  Args args(op);
  auto k = std::make_unique<DispatchRecv>();
  k->name = op;
  k->shape = s;
  check_shape(args, s, false);
  if (args.status() != 0) return args.status();
  int status = 0;
  const int64_t rows = k->capacity = recv_capacity(&status, op);
  if (status != 0) return status;
  const aclDataType row_type = s.quant ? ACL_INT8 : ACL_BF16;
  k->anchor = args.tensor(a.anchor, "x", kHalf, {-1});
  const int64_t anchor = k->anchor.numel();
  args.require(anchor == 1 || (anchor == 16 && s.quant == 1 && s.shared == 0),
               "x must be a one-element anchor, or with dynamicQuant=1 a 16-element stop buffer");
  args.tensor(a.comm, "commArgs", {ACL_FLOAT16}, {});
  std::vector<aclDataType> types = s.quant ? std::vector<aclDataType>{row_type} : kHalf;
  k->x = args.tensor(a.x, "expandX", types, {rows, s.hidden});
  k->scales = args.tensor(a.scales, "dynamicScales", {ACL_FLOAT}, {s.quant ? rows : 1});
  k->info = args.tensor(a.info, "batchInfo", {ACL_INT64}, {s.info_count()});
  k->counts = args.tensor(a.counts, "epRecvCountRouted", {ACL_INT64}, {s.routed()});
  if (s.shared) {
    k->x_shared = args.tensor(a.x_shared, "expandXShared", types, {rows, s.hidden});
    k->scales_shared =
        args.tensor(a.scales_shared, "dynamicScalesShared", {ACL_FLOAT}, {s.quant ? rows : 1});
    k->shared_count = args.tensor(a.shared_count, "epRecvCountShared", {ACL_INT64}, {1});
  }
  bind(args, k.get(), a.group, a.world);
  check_ffn_window(args, k.get());
  return finish(args, std::move(k), workspace, executor);
}

struct CombineArgs {
  const aclTensor *x, *x_shared, *comm, *info;
  const char* group;
  int64_t world;
};
int combine_send(const char* op, AsyncShape s, CombineArgs a, uint64_t* workspace,
                 aclOpExecutor** executor) {
  Args args(op);
  auto k = std::make_unique<CombineSend>();
  k->name = op;
  k->shape = s;
  check_shape(args, s, false);
  if (args.status() != 0) return args.status();
  k->x = args.tensor(a.x, "expandX", kHalf, {-1, s.hidden});
  if (s.shared) k->x_shared = args.tensor(a.x_shared, "expandXShared", kHalf, {-1, s.hidden});
  args.tensor(a.comm, "commArgs", {ACL_FLOAT16}, {});
  k->info = args.tensor(a.info, "batchInfo", {ACL_INT64}, {s.info_count()});
  bind(args, k.get(), a.group, a.world);
  if (args.status() == 0) args.window(AttnLayout(s).bytes, k->group, "Attention result area");
  return finish(args, std::move(k), workspace, executor);
}

struct GatherArgs {
  const aclTensor *anchor, *ids, *weights, *comm, *out;
  const char* group;
  int64_t world;
};
int combine_recv(const char* op, AsyncShape s, GatherArgs a, uint64_t* workspace,
                 aclOpExecutor** executor) {
  Args args(op);
  auto k = std::make_unique<CombineRecv>();
  k->name = op;
  k->shape = s;
  check_shape(args, s, true);
  if (args.status() != 0) return args.status();
  args.range("batchSize", s.batch, 1, kMaxSeq);
  args.tensor(a.anchor, "expandX", kHalf, {1});
  k->ids = args.tensor(a.ids, "expertIds", {ACL_INT32}, {s.batch, s.topk});
  k->weights = args.tensor(a.weights, "expertScales", {ACL_FLOAT}, {s.batch, s.topk});
  args.tensor(a.comm, "commArgs", {ACL_FLOAT16}, {});
  k->out = args.tensor(a.out, "out", kHalf, {s.batch, s.hidden});
  bind(args, k.get(), a.group, a.world);
  if (args.status() == 0) args.window(AttnLayout(s).bytes, k->group, "Attention result area");
  return finish(args, std::move(k), workspace, executor);
}

AsyncShape make_shape(int64_t shared, int64_t hidden, int64_t topk, int64_t ffn, int64_t attn,
                      int64_t routed, int64_t rank) {
  AsyncShape s;
  s.shared = shared;
  s.hidden = hidden;
  s.topk = topk;
  s.ffn = ffn;
  s.attn = attn;
  s.slots = std::min(routed, INT64_MAX - shared) + shared;  // check_shape says if it is absurd
  s.rank = rank;
  return s;
}

}  // namespace
}  // namespace cam

#define CAM_PHASE_TWO(op)                                                                  \
  XSD_API aclnnStatus op(void* workspace, uint64_t workspaceSize, aclOpExecutor* executor, \
                         aclrtStream stream) {                                             \
    return xsdExecutorLaunch(#op, workspace, workspaceSize, executor, stream);             \
  }

XSD_API aclnnStatus aclnnAfdAsyncDispatchSendGetWorkspaceSize(
    const aclTensor* x, const aclTensor* expertIds, const aclTensor* commArgs, int64_t magic,
    int64_t maxSeqLen, int64_t batchSize, int64_t hiddenSize, int64_t topk, int64_t moeRankNum,
    int64_t attnRankNum, int64_t routeExpertNumPerMoe, int64_t attnRankId, int64_t worldSize,
    int64_t layerIndex, int64_t tpSize, int64_t dynamicQuant, char* groupName, const aclTensor* out,
    uint64_t* workspaceSize, aclOpExecutor** executor) {
  (void)magic, (void)out;
  auto s = cam::make_shape(0, hiddenSize, topk, moeRankNum, attnRankNum, routeExpertNumPerMoe,
                           attnRankId);
  s.max_seq = maxSeqLen;
  s.batch = batchSize;
  s.layer = layerIndex;
  s.tp = tpSize;
  s.quant = dynamicQuant;
  return cam::dispatch_send("aclnnAfdAsyncDispatchSend", s,
                            {x, expertIds, commArgs, groupName, worldSize}, workspaceSize,
                            executor);
}
CAM_PHASE_TWO(aclnnAfdAsyncDispatchSend)

XSD_API aclnnStatus aclnnAfdAsyncDispatchRecvGetWorkspaceSize(
    const aclTensor* x, const aclTensor* commArgs, int64_t magic, int64_t maxSeqLen,
    int64_t hiddenSize, int64_t topk, int64_t moeRankNum, int64_t attnRankNum,
    int64_t routeExpertNumPerMoe, int64_t moeRankId, int64_t worldSize, int64_t tpSize,
    int64_t dynamicQuant, char* groupName, const aclTensor* expandX, const aclTensor* dynamicScales,
    const aclTensor* batchInfo, const aclTensor* epRecvCountRouted, uint64_t* workspaceSize,
    aclOpExecutor** executor) {
  (void)magic;
  auto s = cam::make_shape(0, hiddenSize, topk, moeRankNum, attnRankNum, routeExpertNumPerMoe,
                           moeRankId);
  s.max_seq = maxSeqLen;
  s.tp = tpSize;
  s.quant = dynamicQuant;
  return cam::dispatch_recv("aclnnAfdAsyncDispatchRecv", s,
                            {x, commArgs, expandX, dynamicScales, batchInfo, epRecvCountRouted,
                             nullptr, nullptr, nullptr, groupName, worldSize},
                            workspaceSize, executor);
}
CAM_PHASE_TWO(aclnnAfdAsyncDispatchRecv)

XSD_API aclnnStatus aclnnAfdAsyncCombineSendGetWorkspaceSize(
    const aclTensor* expandX, const aclTensor* commArgs, const aclTensor* batchInfo, int64_t magic,
    int64_t maxSeqLen, int64_t hiddenSize, int64_t topk, int64_t moeRankNum, int64_t attnRankNum,
    int64_t routeExpertNumPerMoe, int64_t moeRankId, int64_t worldSize, int64_t tpSize,
    char* groupName, const aclTensor* out, uint64_t* workspaceSize, aclOpExecutor** executor) {
  (void)magic, (void)out;
  auto s = cam::make_shape(0, hiddenSize, topk, moeRankNum, attnRankNum, routeExpertNumPerMoe,
                           moeRankId);
  s.max_seq = maxSeqLen;
  s.tp = tpSize;
  return cam::combine_send("aclnnAfdAsyncCombineSend", s,
                           {expandX, nullptr, commArgs, batchInfo, groupName, worldSize},
                           workspaceSize, executor);
}
CAM_PHASE_TWO(aclnnAfdAsyncCombineSend)

XSD_API aclnnStatus aclnnAfdAsyncCombineRecvGetWorkspaceSize(
    const aclTensor* expandX, const aclTensor* expertIds, const aclTensor* expertScales,
    const aclTensor* commArgs, int64_t magic, int64_t batchSize, int64_t hiddenSize, int64_t topk,
    int64_t moeRankNum, int64_t attnRankNum, int64_t routeExpertNumPerMoe, int64_t attnRankId,
    int64_t worldSize, char* groupName, const aclTensor* out, uint64_t* workspaceSize,
    aclOpExecutor** executor) {
  (void)magic;
  auto s = cam::make_shape(0, hiddenSize, topk, moeRankNum, attnRankNum, routeExpertNumPerMoe,
                           attnRankId);
  s.batch = batchSize;
  return cam::combine_recv("aclnnAfdAsyncCombineRecv", s,
                           {expandX, expertIds, expertScales, commArgs, out, groupName, worldSize},
                           workspaceSize, executor);
}
CAM_PHASE_TWO(aclnnAfdAsyncCombineRecv)

// ---- the older set: one shared expert per FFN rank in slot 0
// -------------------------------------
XSD_API aclnnStatus aclnnXsdUmdkAsyncDispatchSendGetWorkspaceSize(
    const aclTensor* x, const aclTensor* topkIds, const aclTensor* commArgs, int64_t commId,
    int64_t maxSeqLen, int64_t batch, int64_t hidden, int64_t topk, int64_t ffnRanks,
    int64_t attnRanks, int64_t expertPerRank, int64_t rank, int64_t world, int64_t layer,
    int64_t tp, int64_t dynamicQuant, char* group, uint64_t* workspaceSize,
    aclOpExecutor** executor) {
  (void)commId;
  auto s = cam::make_shape(1, hidden, topk, ffnRanks, attnRanks, expertPerRank, rank);
  s.max_seq = maxSeqLen;
  s.batch = batch;
  s.layer = layer;
  s.tp = tp;
  s.quant = dynamicQuant;
  return cam::dispatch_send("aclnnXsdUmdkAsyncDispatchSend", s,
                            {x, topkIds, commArgs, group, world}, workspaceSize, executor);
}
CAM_PHASE_TWO(aclnnXsdUmdkAsyncDispatchSend)

XSD_API aclnnStatus aclnnXsdUmdkAsyncDispatchRecvGetWorkspaceSize(
    const aclTensor* placeholder, const aclTensor* commArgs, int64_t commId, int64_t batch,
    int64_t hidden, int64_t topk, int64_t ffnRanks, int64_t attnRanks, int64_t expertPerRank,
    int64_t rank, int64_t world, int64_t tp, int64_t dynamicQuant, char* group, const aclTensor* x,
    const aclTensor* xShared, const aclTensor* scales, const aclTensor* scalesShared,
    const aclTensor* batchInfo, const aclTensor* expertCounts, const aclTensor* sharedCount,
    uint64_t* workspaceSize, aclOpExecutor** executor) {
  (void)commId;
  auto s = cam::make_shape(1, hidden, topk, ffnRanks, attnRanks, expertPerRank, rank);
  s.max_seq = batch;
  s.tp = tp;
  s.quant = dynamicQuant;
  return cam::dispatch_recv("aclnnXsdUmdkAsyncDispatchRecv", s,
                            {placeholder, commArgs, x, scales, batchInfo, expertCounts, xShared,
                             scalesShared, sharedCount, group, world},
                            workspaceSize, executor);
}
CAM_PHASE_TWO(aclnnXsdUmdkAsyncDispatchRecv)

XSD_API aclnnStatus aclnnXsdUmdkAsyncCombineSendGetWorkspaceSize(
    const aclTensor* x, const aclTensor* xShared, const aclTensor* commArgs,
    const aclTensor* batchInfo, int64_t commId, int64_t batch, int64_t hidden, int64_t topk,
    int64_t ffnRanks, int64_t attnRanks, int64_t expertPerRank, int64_t rank, int64_t world,
    int64_t tp, char* group, uint64_t* workspaceSize, aclOpExecutor** executor) {
  (void)commId;
  auto s = cam::make_shape(1, hidden, topk, ffnRanks, attnRanks, expertPerRank, rank);
  s.max_seq = batch;
  s.tp = tp;
  return cam::combine_send("aclnnXsdUmdkAsyncCombineSend", s,
                           {x, xShared, commArgs, batchInfo, group, world}, workspaceSize,
                           executor);
}
CAM_PHASE_TWO(aclnnXsdUmdkAsyncCombineSend)

XSD_API aclnnStatus aclnnXsdUmdkAsyncCombineRecvGetWorkspaceSize(
    const aclTensor* placeholder, const aclTensor* topkIds, const aclTensor* topkWeights,
    const aclTensor* commArgs, int64_t commId, int64_t batch, int64_t hidden, int64_t topk,
    int64_t ffnRanks, int64_t attnRanks, int64_t expertPerRank, int64_t rank, int64_t world,
    char* group, const aclTensor* out, uint64_t* workspaceSize, aclOpExecutor** executor) {
  (void)commId;
  auto s = cam::make_shape(1, hidden, topk, ffnRanks, attnRanks, expertPerRank, rank);
  s.batch = batch;
  return cam::combine_recv("aclnnXsdUmdkAsyncCombineRecv", s,
                           {placeholder, topkIds, topkWeights, commArgs, out, group, world},
                           workspaceSize, executor);
}
CAM_PHASE_TWO(aclnnXsdUmdkAsyncCombineRecv)
