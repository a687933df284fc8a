// SPDX-License-Identifier: Apache-2.0
// Many threads on shared streams, events, memory, executors and communicators, to be run under
// thread, address and undefined-behaviour sanitizers. Ranks are threads here: those tools do not
// follow forks.
#include <thread>

#include "common.h"
#include "xsd.h"

namespace {

constexpr int kThreads = 6;
constexpr int kRounds = 60;
constexpr int kRanks = 4;

int count_up(void* ctx) {
  static_cast<std::atomic<int>*>(ctx)->fetch_add(1);
  return 0;
}

int fail_late(void*) {
  xsdTaskError("on purpose");
  return 507035;
}

int fill_workspace(void* ctx, void* workspace, uint64_t bytes) {
  std::memset(workspace, 1, bytes);
  static_cast<std::atomic<int>*>(ctx)->fetch_add(1);
  return 0;
}

void use_executor(aclrtStream stream, std::atomic<int>* ran) {
  void* workspace = nullptr;
  CHECK(aclrtMalloc(&workspace, 512, 0) == 0);
  aclOpExecutor* executor = xsdExecutorCreate("op", 512, fill_workspace, ran, nullptr);
  CHECK(xsdExecutorLaunch("op", workspace, 512, executor, stream) == 0);
  CHECK(xsdExecutorLaunch("op", workspace, 512, executor, stream) != 0);
  CHECK(aclrtSynchronizeStream(stream) == 0);
  CHECK(aclrtFree(workspace) == 0);
}

void use_tensors() {
  const int64_t shape[] = {4, 8}, strides[] = {8, 1};
  void* data = nullptr;
  CHECK(aclrtMalloc(&data, 128, 0) == 0);
  std::vector<const aclTensor*> members;
  for (int i = 0; i < 3; ++i) {
    members.push_back(
        aclCreateTensor(shape, 2, ACL_FLOAT, strides, 0, ACL_FORMAT_ND, shape, 2, data));
    CHECK(members.back() != nullptr);
  }
  aclTensorList* list = aclCreateTensorList(members.data(), members.size());
  CHECK(list != nullptr && aclDestroyTensor(members[0]) != 0);
  CHECK(aclDestroyTensorList(list) == 0 && aclDestroyTensorList(list) != 0);
  CHECK(aclrtFree(data) == 0);
}

void use_copies(aclrtStream stream) {
  void *device = nullptr, *pinned = nullptr;
  CHECK(aclrtMalloc(&device, 256, 0) == 0 && aclrtMallocHost(&pinned, 256) == 0);
  std::memset(pinned, 3, 256);
  CHECK(aclrtMemcpyAsync(device, 256, pinned, 256, ACL_MEMCPY_HOST_TO_DEVICE, stream) == 0);
  CHECK(aclrtMemsetAsync(device, 256, 4, 8, stream) == 0);
  CHECK(aclrtSynchronizeStream(stream) == 0);
  CHECK(static_cast<unsigned char*>(device)[8] == 3);
  CHECK(aclrtFree(device) == 0 && aclrtFreeHost(pinned) == 0);
}

// Own streams and one stream shared by all threads, ordered by events that are destroyed at once.
void work(aclrtStream shared, std::atomic<int>* ran, std::atomic<int>* expected) {
  CHECK(aclrtSetDevice(0) == 0);
  for (int round = 0; round < kRounds; ++round) {
    aclrtStream own = nullptr;
    aclrtEvent event = nullptr;
    CHECK(aclrtCreateStream(&own) == 0 && aclrtCreateEvent(&event) == 0);
    CHECK(xsdStreamEnqueue(shared, "count", count_up, ran, nullptr) == 0);
    CHECK(aclrtRecordEvent(event, shared) == 0 && aclrtStreamWaitEvent(own, event) == 0);
    CHECK(aclrtRecordEvent(event, own) == 0 && aclrtStreamWaitEvent(shared, event) == 0);
    CHECK(xsdStreamEnqueue(own, "count", count_up, ran, nullptr) == 0);
    CHECK(aclrtSynchronizeEvent(event) == 0 && aclrtDestroyEvent(event) == 0);
    use_executor(own, ran);
    use_tensors();
    use_copies(own);
    if (round % 10 == 9) {
      CHECK(xsdStreamEnqueue(own, "fail", fail_late, nullptr, nullptr) == 0);
      CHECK(xsdStreamEnqueue(own, "skipped", count_up, ran, nullptr) == 0);
      CHECK(aclrtSynchronizeStream(own) == 507035);
    }
    CHECK(aclrtDestroyStream(own) == 0 && aclrtDestroyStream(own) != 0);
    expected->fetch_add(3);
  }
}

struct Flag {
  std::atomic<uint32_t>* word;
  uint32_t wanted;
};

int flag_is_set(void* arg) {
  const auto* flag = static_cast<const Flag*>(arg);
  return flag->word->load(std::memory_order_acquire) == flag->wanted ? 1 : 0;
}

// A ring of flags through the windows, as an operator would do it.
int ring(void* ctx) {
  const auto* context = static_cast<const XsdOpResCtx*>(ctx);
  if (int code = xsdWindowEnter(context)) return code;
  const uint32_t next = (context->rank + 1) % context->size;
  const uint32_t before = (context->rank + context->size - 1) % context->size;
  auto* theirs = reinterpret_cast<std::atomic<uint32_t>*>(context->window[next]);
  auto* mine = reinterpret_cast<std::atomic<uint32_t>*>(context->window[context->rank]);
  const uint32_t turn = mine[16].load() + 1;
  mine[16].store(turn);
  theirs[0].store(turn, std::memory_order_release);
  Flag flag{mine, turn};
  const int code = xsdWaitPeer(context, before, flag_is_set, &flag);
  xsdWindowLeave(context);
  return code;
}

void run_rank(const HcclRootInfo* root, uint32_t rank) {
  CHECK(aclrtSetDevice(static_cast<int32_t>(rank)) == 0);
  HcclComm comm = nullptr;
  CHECK(HcclCommInitRootInfo(kRanks, root, rank, &comm) == 0);
  void *args = nullptr, *context = nullptr;
  char algorithm[] = "AlltoAll=level0:fullmesh;level1:pairwise";
  CHECK(HcclKfcAllocOpArgs(&args) == 0 && HcclKfcOpArgsSetCommEngine(args, 4) == 0);
  CHECK(HcclKfcOpArgsSetAlgConfig(args, algorithm) == 0);
  CHECK(HcclCreateOpResCtx(comm, 8, args, &context) == 0 && HcclKfcFreeOpArgs(args) == 0);
  aclrtStream stream = nullptr;
  CHECK(aclrtCreateStream(&stream) == 0);
  std::vector<float> in(1000, static_cast<float>(rank)), out(1000), all(1000 * kRanks);
  for (int round = 0; round < 20; ++round) {
    CHECK(HcclAllReduce(in.data(), out.data(), in.size(), HCCL_DATA_TYPE_FP32, HCCL_REDUCE_SUM,
                        comm, stream) == 0);
    CHECK(HcclAllGather(in.data(), all.data(), in.size(), HCCL_DATA_TYPE_FP32, comm, stream) == 0);
    CHECK(xsdStreamEnqueue(stream, "ring", ring, context, nullptr) == 0);
    CHECK(HcclBarrier(comm, stream) == 0);
    CHECK(aclrtSynchronizeStream(stream) == 0);
    CHECK(out[999] == 6.0f && all[3500] == 3.0f);
  }
  CHECK(aclrtDestroyStream(stream) == 0);
  CHECK(HcclCommDestroy(comm) == 0 && HcclCommDestroy(comm) != 0);
}

}  // namespace

int main() {
  CHECK(aclInit(nullptr) == 0 && aclrtSetDevice(0) == 0);
  aclrtStream shared = nullptr;
  CHECK(aclrtCreateStream(&shared) == 0);
  std::atomic<int> ran{0}, expected{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) threads.emplace_back(work, shared, &ran, &expected);
  for (auto& thread : threads) thread.join();
  CHECK(aclrtSynchronizeDevice() == 0);
  CHECK(ran.load() == expected.load());
  threads.clear();
  HcclRootInfo root;
  CHECK(HcclGetRootInfo(&root) == 0);
  for (uint32_t rank = 0; rank < kRanks; ++rank) threads.emplace_back(run_rank, &root, rank);
  for (auto& thread : threads) thread.join();
  CHECK(aclFinalize() == 0);
  std::puts("done");
  return 0;
}
