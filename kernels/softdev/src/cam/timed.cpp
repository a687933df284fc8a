// SPDX-License-Identifier: Apache-2.0
// The software device's own functions of this library: a timed compute kernel for tests, probes
// and benchmarks, the readiness probe, the abort word and counters. An NPU has none of them.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "async.h"
#include "cam.h"

namespace cam {
namespace {

// TEST KERNEL: holds cores for a time; if tensors are given, row r of expert e becomes
// x * (alpha + beta * e), so that misrouted rows show in the result. With batch_info the layer is
// read from it when the kernel runs, and alpha grows by gamma * (layer mod 4).
struct Timed {
  int32_t device;
  Cores cores;
  uint64_t nanoseconds;
  int64_t tag;
  View x, scales, counts, info, out;
  double alpha, beta, gamma;
  int run();
  void transform();
};

void Timed::transform() {
  const int64_t width = out.dims[1];
  const int64_t* per_expert = reinterpret_cast<const int64_t*>(counts.data);
  auto of = [&](int64_t e) { return std::max(per_expert[e], int64_t{0}); };
  int64_t rows = out.dims[0], expert = 0, left = 0;
  if (counts.data != nullptr) {
    rows = 0;
    for (int64_t e = 0; e < counts.dims[0]; ++e) rows += std::min(of(e), out.dims[0] - rows);
    left = of(0);
  }
  for (int64_t r = 0; r < rows; ++r) {
    while (counts.data != nullptr && left == 0) left = of(++expert);
    --left;
    float factor = static_cast<float>(alpha) +
                   static_cast<float>(beta) * static_cast<float>(expert);
    if (x.dtype == ACL_INT8) factor *= to_float(scales.data, ACL_FLOAT, r);
    for (int64_t c = r * width; c < (r + 1) * width; ++c) {
      from_float(out.data, out.dtype, c, to_float(x.data, x.dtype, c) * factor);
    }
  }
}

int Timed::run() {
  Run r("aclnnXsdTimedKernel", nullptr, device, cores);
  r.tag(tag);
  if (r.status() != 0) return r.status();
  if (info.data != nullptr) {
    const int64_t layer = reinterpret_cast<const int64_t*>(info.data)[2];
    alpha += gamma * static_cast<double>(((layer % 4) + 4) % 4);
    r.tag(layer);
  }
  const uint64_t begin = now_ns();
  if (out.data != nullptr) transform();
  sleep_until(begin + nanoseconds);
  return r.done(0);
}

}  // namespace
}  // namespace cam

using cam::Args;

// x, scales (float32, only for int8 x), counts (int64 per expert), batchInfo and out may all be
// NULL.
XSD_API aclnnStatus aclnnXsdTimedKernelGetWorkspaceSize(
    const aclTensor* x, const aclTensor* scales, const aclTensor* counts,
    const aclTensor* batchInfo, int64_t vectorCores, int64_t cubeCores, int64_t microseconds,
    int64_t tag, double alpha, double beta, double gamma, const aclTensor* out,
    uint64_t* workspaceSize, aclOpExecutor** executor) {
  const char* op = "aclnnXsdTimedKernel";
  Args args(op);
  args.range("vectorCores", vectorCores, 0, cam::device_cores().vector);
  args.range("cubeCores", cubeCores, 0, cam::device_cores().cube);
  args.range("microseconds", microseconds, 0, 60000000);
  args.require((x == nullptr) == (out == nullptr), "x and out must be given together");
  auto k = std::make_unique<cam::Timed>();
  if (x != nullptr) {
    k->x = args.tensor(x, "x", {ACL_BF16, ACL_FLOAT16, ACL_FLOAT, ACL_INT8}, {-1, -1});
    k->out = args.tensor(out, "out", {ACL_BF16, ACL_FLOAT16, ACL_FLOAT}, k->x.dims);
    if (counts != nullptr) {
      k->counts = args.tensor(counts, "counts", {ACL_INT64}, {-1});
      args.require(k->counts.numel() > 0, "counts must have one element for each expert");
    }
    if (k->x.dtype == ACL_INT8)
      k->scales = args.tensor(scales, "scales", {ACL_FLOAT}, {k->x.dims[0]});
  }
  if (batchInfo != nullptr) {
    k->info = args.tensor(batchInfo, "batchInfo", {ACL_INT64}, {-1});
    args.require(k->info.numel() >= 3, "batchInfo must be as dispatch_recv makes it");
  }
  int status = args.status();
  k->device = cam::calling_device(op, &status);
  if (status != 0) return status;
  k->cores = {static_cast<uint32_t>(vectorCores), static_cast<uint32_t>(cubeCores)};
  k->nanoseconds = static_cast<uint64_t>(microseconds) * 1000;
  k->tag = tag;
  k->alpha = alpha;
  k->beta = beta;
  k->gamma = gamma;
  return cam::make_executor(op, std::move(k), workspaceSize, executor);
}

XSD_API aclnnStatus aclnnXsdTimedKernel(void* workspace, uint64_t workspaceSize,
                                        aclOpExecutor* executor, aclrtStream stream) {
  return xsdExecutorLaunch("aclnnXsdTimedKernel", workspace, workspaceSize, executor, stream);
}

// How many Attention groups (of tpSize ranks) have a dispatch waiting in this FFN rank's window.
// Takes no cores and no stream; negative: the group is unknown or a number does not fit it (-1), or
// it is aborted (-2). Groups whose
// chunks are half taken count as ready.
XSD_API int32_t xsdCamDispatchReady(const char* group, int64_t maxSeqLen, int64_t hiddenSize,
                                    int64_t topk, int64_t attnRankNum, int64_t slots,
                                    int64_t tpSize, int64_t dynamicQuant, int64_t sharedExpert) {
  cam::Group g;
  const char* op = "xsdCamDispatchReady";
  if (cam::find_group(op, group, &g) != 0) return -1;
  if (cam::load32(&g.own()->abort_word) != 0) return -2;
  cam::AsyncShape shape;
  shape.max_seq = maxSeqLen;
  shape.hidden = hiddenSize;
  shape.topk = topk;
  shape.slots = slots;
  shape.tp = tpSize;
  shape.quant = dynamicQuant;
  shape.shared = sharedExpert == 1;
  shape.attn = attnRankNum;
  shape.rank = g.rank;
  Args args(op);
  args.range("attnRankNum", attnRankNum, 1, static_cast<int64_t>(g.size) - 1);
  args.range("slots", slots, 1, 1 << 16);
  if (args.status() != 0) return -1;
  shape.ffn = static_cast<int64_t>(g.size) - attnRankNum;
  cam::check_shape(args, shape, false);
  args.range("maxSeqLen", maxSeqLen, tpSize, cam::kMaxSeq);
  if (args.status() != 0) return -1;
  cam::FfnLayout layout(shape);
  if (layout.bytes * static_cast<uint64_t>(attnRankNum) + 32 > g.window_bytes) return -1;
  int32_t ready = 0;
  for (int64_t first = 0; first + tpSize <= attnRankNum; first += tpSize) {
    bool all = true;
    for (int64_t j = 0; j < tpSize; ++j) {
      all &= cam::load64(g.window[g.rank] + layout.slot(first + j)) != 0;
    }
    ready += all;
  }
  return ready;
}

// Release every kernel of the group that spins or waits for cores, on all ranks; the group stays
// unusable until its communicator is made anew. Returns 0, or 1 when the group is unknown.
XSD_API int32_t xsdCamAbort(const char* group, uint32_t reason) {
  cam::Group g;
  if (cam::find_group("xsdCamAbort", group, &g) != 0) return 1;
  for (uint32_t r = 0; r < g.size; ++r) {
    cam::store32(&g.control(r)->abort_word, (reason << 16) | (g.rank + 1));
  }
  return 0;
}

// 0 = healthy, -1 = unknown group, else (reason << 16) | (aborting rank + 1).
XSD_API int64_t xsdCamAbortState(const char* group) {
  cam::Group g;
  if (cam::find_group("xsdCamAbortState", group, &g) != 0) return -1;
  return cam::load32(&g.own()->abort_word);
}

// This rank's counters: credit, order and overlap violations, dispatches outstanding.
XSD_API int32_t xsdCamCounters(const char* group, uint32_t out[4]) {
  cam::Group g;
  if (out == nullptr || cam::find_group("xsdCamCounters", group, &g) != 0) return 1;
  cam::Control* own = g.own();
  out[0] = cam::load32(&own->credit_violations);
  out[1] = cam::load32(&own->order_violations);
  out[2] = cam::load32(&own->overlap_violations);
  out[3] = cam::load32(&own->outstanding);
  return 0;
}
