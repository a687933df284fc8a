// SPDX-License-Identifier: Apache-2.0
// aclnnA2e and aclnnE2a: Attention to FFN and back, over one window buffer per group.
//
// Each launch of either operator on a rank adds one to that rank's counter ("magic") of every
// block. A flag carries the sender's counter and is compared for equality with the receiver's own,
// in a spin without end. So both roles must launch the same total order, with one block count.
// Source: afd-plugin csrc/npu/ascend_kernels/{a2e,e2a}, a2e.h as read 2026-10; world order is FFN
// first: ranks [0, F) are FFN, [F, F+A) are Attention.
#include <cstring>

#include "cam.h"

namespace cam {
namespace {

struct Shape {
  int64_t batch, hidden, topk, ffn, attn, rank, aiv;
  bool sender_is_attention() const { return rank >= ffn; }
  int64_t ratio() const { return attn > ffn ? (attn + ffn - 1) / ffn : 1; }
  int64_t peers() const {  // Attention ranks of this FFN rank
    int64_t n = ratio();
    if (ffn != 1 && attn > ffn && attn % ffn != 0 && rank % ffn >= attn % ffn) --n;
    return n;
  }
  int64_t recv_batch() const { return batch / ratio(); }
};

constexpr uint64_t kRankStep = 512;
// Where the rows of one rank start: the ids and scales of the gated form are laid out before them.
uint64_t data_offset(int64_t rank, int64_t rows, int64_t topk) {
  return kIpcDataOffset + static_cast<uint64_t>(rank) * kRankStep +
         static_cast<uint64_t>(4 + rows * topk * 8);
}
uint64_t flag_offset(int64_t owner, uint64_t index) {
  return static_cast<uint64_t>(owner) * kRankStep + index * 32;
}

struct Kernel {
  Shape shape;
  Group group;
  int32_t device;
  View in, out;
  bool is_e2a;
  const char* name() const { return is_e2a ? "aclnnE2a" : "aclnnA2e"; }
  int run();

 private:
  std::vector<uint32_t> magics_;
  void count_launch();
  int check_entry();
  int wait_flag(const char* flag, int64_t peer);
  void set_flag(char* flag);
  int a2e();
  int e2a();
  Run* run_ = nullptr;
};

// The counter table ends at the data offset, so its place depends on the block count: two
// operators launched with different counts do not see each other's counters.
void Kernel::count_launch() {
  char* table = group.window[group.rank] + kIpcDataOffset - shape.aiv * 32;
  magics_.clear();
  for (int64_t b = 0; b < shape.aiv; ++b) {
    magics_.push_back(
        __atomic_add_fetch(reinterpret_cast<uint32_t*>(table + b * 32), 1, __ATOMIC_ACQ_REL));
  }
}

struct FlagWait {
  const char* flag;
  const std::vector<uint32_t>* magics;
};
int flag_equals(void* p) {
  auto* w = static_cast<FlagWait*>(p);
  uint32_t seen = load32(w->flag + 4);
  for (uint32_t magic : *w->magics) {
    if (seen != magic) return 0;
  }
  return 1;
}
int Kernel::wait_flag(const char* flag, int64_t peer) {
  FlagWait wait{flag, &magics_};
  std::string text = "rows of rank " + std::to_string(peer) + " (flag of launch " +
                     std::to_string(magics_[0]) + ", seen " + std::to_string(load32(flag + 4)) +
                     " at the start)";
  const int status = spin(*run_, static_cast<uint32_t>(peer), text.c_str(), flag_equals, &wait);
  run_->ready();
  return status;
}
void Kernel::set_flag(char* flag) {
  xsdDelay(0xca01);
  for (uint32_t magic : magics_)
    store32(flag + 4, magic);  // every block writes; the last one stays
}

// What the hardware never reports: two kernels of one group at once race for the counter.
int Kernel::check_entry() {
  Control* own = group.own();
  uint32_t before = __atomic_fetch_add(&own->camp2p_busy, 1, __ATOMIC_ACQ_REL);
  if (before != 0) {
    __atomic_fetch_add(&own->overlap_violations, 1, __ATOMIC_RELAXED);
    if (xsdSettings()->strict) {
      xsdTaskError(
          "%s on group %s, rank %u: another a2e or e2a of this group is still running; order send "
          "before the group's next receive",
          name(), group.name.c_str(), group.rank);
      return kTaskFault;
    }
  }
  uint32_t op = is_e2a ? 2 : 1;
  if (__atomic_exchange_n(&own->last_op, op, __ATOMIC_ACQ_REL) == op) {
    __atomic_fetch_add(&own->order_violations, 1, __ATOMIC_RELAXED);
  }
  return 0;
}

int Kernel::run() {
  // Waiting for cores comes first: a kernel that has none cannot count its launch.
  Run r(name(), &group, device, Cores{static_cast<uint32_t>(shape.aiv), 0});
  if (r.status() != 0) return r.status();
  run_ = &r;
  int status = check_entry();
  if (status == 0) {
    count_launch();
    xsdDelay(0xca02);
    status = is_e2a ? e2a() : a2e();
  }
  __atomic_fetch_sub(&group.own()->camp2p_busy, 1, __ATOMIC_ACQ_REL);
  return r.done(status);
}

int Kernel::a2e() {
  const uint64_t row_bytes = static_cast<uint64_t>(shape.hidden) * 2;
  if (shape.sender_is_attention()) {
    char* to = group.window[group.rank] + data_offset(shape.rank, shape.batch, shape.topk);
    std::memcpy(to, in.data, static_cast<uint64_t>(shape.batch) * row_bytes);
    run_->moved(static_cast<uint64_t>(shape.batch) * row_bytes);
    const int64_t ffn = shape.rank % shape.ffn;
    const uint64_t index = static_cast<uint64_t>(3 * shape.ratio() + shape.rank / shape.ffn - 1);
    set_flag(group.window[ffn] + flag_offset(ffn, index));
    return 0;
  }
  const int64_t rows = shape.recv_batch();
  for (int64_t i = 0; i < shape.peers(); ++i) {
    const int64_t peer = shape.rank + (i + 1) * shape.ffn;
    int status =
        wait_flag(group.window[group.rank] +
                      flag_offset(shape.rank, static_cast<uint64_t>(3 * shape.ratio() + i)),
                  peer);
    if (status != 0) return status;
    std::memcpy(out.data + static_cast<uint64_t>(i * rows) * row_bytes,
                group.window[peer] + data_offset(peer, rows, shape.topk),
                static_cast<uint64_t>(rows) * row_bytes);
    run_->moved(static_cast<uint64_t>(rows) * row_bytes);
  }
  return 0;
}

int Kernel::e2a() {
  const uint64_t row_bytes = static_cast<uint64_t>(shape.hidden) * 2;
  if (shape.sender_is_attention()) {
    int status =
        wait_flag(group.window[group.rank] + flag_offset(shape.rank, 5), shape.rank % shape.ffn);
    if (status != 0) return status;
    std::memcpy(out.data,
                group.window[group.rank] + data_offset(shape.rank, shape.batch, shape.topk),
                static_cast<uint64_t>(shape.batch) * row_bytes);
    run_->moved(static_cast<uint64_t>(shape.batch) * row_bytes);
    return 0;
  }
  const int64_t rows = shape.recv_batch();
  for (int64_t i = 0; i < shape.peers(); ++i) {
    const int64_t peer = shape.rank + (i + 1) * shape.ffn;
    std::memcpy(group.window[peer] + data_offset(peer, rows, shape.topk),
                in.data + static_cast<uint64_t>(i * rows) * row_bytes,
                static_cast<uint64_t>(rows) * row_bytes);
    run_->moved(static_cast<uint64_t>(rows) * row_bytes);
    set_flag(group.window[peer] + flag_offset(peer, 5));
  }
  return 0;
}

int prepare(const char* op, Args& args, Kernel* k, const char* group) {
  args.range("batchSize", k->shape.batch, 1, 1 << 20);
  args.range("hiddenSize", k->shape.hidden, 1, 1 << 20);
  args.range("topk", k->shape.topk, 1, 64);
  args.range("expertRankSize", k->shape.ffn, 1, 1024);
  args.range("attentionRankSize", k->shape.attn, k->shape.ffn, 1024);
  if (args.status() != 0) return args.status();  // below, sums of numbers that were checked
  args.range("rank", k->shape.rank, 0, k->shape.ffn + k->shape.attn - 1);
  args.range("aivNum", k->shape.aiv, 1, device_cores().vector);
  args.group(group, &k->group);
  if (args.status() != 0) return args.status();
  args.require(
      k->group.size == k->shape.ffn + k->shape.attn && k->group.rank == k->shape.rank,
      "rank and expertRankSize + attentionRankSize must be the communicator's rank and size");
  const int64_t top = k->shape.ffn + k->shape.attn - 1;
  const int64_t rows = k->shape.sender_is_attention() ? k->shape.batch : k->shape.recv_batch();
  args.window(
      data_offset(top, rows, k->shape.topk) + static_cast<uint64_t>(rows * k->shape.hidden) * 2,
      k->group, "payload");
  int status = args.status();
  k->device = calling_device(op, &status);
  return status;
}

}  // namespace
}  // namespace cam

using cam::Args;
using cam::Kernel;

// Inputs expertIds and scales and the outputs after expandXOut are not touched with computeGate 0,
// which is the only mode here; the real kernels leave attenBatchSize and xActiveMaskOut unwritten.
XSD_API aclnnStatus aclnnA2eGetWorkspaceSize(
    const aclTensor* x, const aclTensor* expertIds, const aclTensor* scales, int64_t batchSize,
    int64_t hiddenSize, int64_t topk, int64_t expertRankSize, int64_t attentionRankSize,
    int64_t rank, char* groupEp, int64_t aivNum, int64_t computeGate, const aclTensor* expandXOut,
    const aclTensor* simulateExpertIdsOut, const aclTensor* simulateExpertScalesOut,
    const aclTensor* attenBatchSize, const aclTensor* xActiveMaskOut, uint64_t* workspaceSize,
    aclOpExecutor** executor) {
  (void)expertIds, (void)scales, (void)simulateExpertIdsOut, (void)simulateExpertScalesOut;
  const char* op = "aclnnA2e";
  Args args(op);
  auto k = std::make_unique<Kernel>();
  k->is_e2a = false;
  k->shape = {batchSize, hiddenSize, topk, expertRankSize, attentionRankSize, rank, aivNum};
  args.require(computeGate == 0, "computeGate must be 0: the gated form is not built");
  args.tensor(attenBatchSize, "attenBatchSize", {ACL_INT32}, {-1});
  args.tensor(xActiveMaskOut, "xActiveMaskOut", {ACL_BOOL}, {-1});
  int status = cam::prepare(op, args, k.get(), groupEp);
  if (status != 0) return status;
  if (k->shape.sender_is_attention()) {
    k->in = args.tensor(x, "x", {ACL_BF16, ACL_FLOAT16}, {batchSize, hiddenSize});
  } else {
    k->out =
        args.tensor(expandXOut, "expandXOut", {ACL_BF16, ACL_FLOAT16}, {batchSize, hiddenSize});
  }
  return args.status() != 0 ? args.status()
                            : cam::make_executor(op, std::move(k), workspaceSize, executor);
}

XSD_API aclnnStatus aclnnA2e(void* workspace, uint64_t workspaceSize, aclOpExecutor* executor,
                             aclrtStream stream) {
  return xsdExecutorLaunch("aclnnA2e", workspace, workspaceSize, executor, stream);
}

XSD_API aclnnStatus aclnnE2aGetWorkspaceSize(const aclTensor* expandX,
                                             const aclTensor* attenBatchSize, int64_t batchSize,
                                             int64_t hiddenSize, int64_t topk,
                                             int64_t expertRankSize, int64_t attentionRankSize,
                                             int64_t rank, char* groupEp, int64_t aivNum,
                                             const aclTensor* out, uint64_t* workspaceSize,
                                             aclOpExecutor** executor) {
  const char* op = "aclnnE2a";
  Args args(op);
  auto k = std::make_unique<Kernel>();
  k->is_e2a = true;
  k->shape = {batchSize, hiddenSize, topk, expertRankSize, attentionRankSize, rank, aivNum};
  args.tensor(attenBatchSize, "attenBatchSize", {ACL_INT32}, {-1});
  int status = cam::prepare(op, args, k.get(), groupEp);
  if (status != 0) return status;
  if (k->shape.sender_is_attention()) {
    k->out = args.tensor(out, "out", {ACL_BF16, ACL_FLOAT16}, {batchSize, hiddenSize});
  } else {
    k->in = args.tensor(expandX, "expandX", {ACL_BF16, ACL_FLOAT16}, {batchSize, hiddenSize});
  }
  return args.status() != 0 ? args.status()
                            : cam::make_executor(op, std::move(k), workspaceSize, executor);
}

XSD_API aclnnStatus aclnnE2a(void* workspace, uint64_t workspaceSize, aclOpExecutor* executor,
                             aclrtStream stream) {
  return xsdExecutorLaunch("aclnnE2a", workspace, workspaceSize, executor, stream);
}
