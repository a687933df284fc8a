// SPDX-License-Identifier: Apache-2.0
// The operator over a group of processes, to be run under sanitizers: launches with and without a
// mask, with bf16 and int8 weights, repeated op_executors, refused calls, and a rank that leaves.
//
//   mega_moe RANKS ROUNDS
//
// Processes are forked before anything of the device is used.
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cfloat>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "acl_rt.h"
#include "aclnn_base.h"
#include "hccl.h"

extern "C" {
aclnnStatus aclnnMegaMoeGetWorkspaceSize(
    const aclTensor* context, const aclTensor* x, const aclTensor* ids, const aclTensor* weights,
    const aclTensorList* weight1, const aclTensorList* weight2, const aclTensorList* scales1,
    const aclTensorList* scales2, const aclTensorList* bias1, const aclTensorList* bias2,
    const aclTensor* mask, int64_t experts, int64_t ranks, int64_t buffer, int64_t max_recv,
    int64_t quant, int64_t out_dtype, int64_t combine, const char* comm_alg, int64_t max_tokens,
    const char* activation, float clamp, aclTensor* y, aclTensor* counts, uint64_t* size,
    aclOpExecutor** executor);
aclnnStatus aclnnMegaMoe(void* workspace, uint64_t size, aclOpExecutor* executor,
                         aclrtStream stream);
}

namespace {

constexpr int64_t kHidden = 1024, kInter = 512, kLocal = 2, kTopk = 2, kTokens = 3;
constexpr int kRemoteError = 507057;

#define CHECK(condition)                                                       \
  do {                                                                         \
    if (!(condition)) {                                                        \
      const char* text = aclGetRecentErrMsg();                                 \
      std::fprintf(stderr, "%s:%d: %s (%s)\n", __FILE__, __LINE__, #condition, \
                   text == nullptr ? "no text" : text);                        \
      std::abort();                                                            \
    }                                                                          \
  } while (false)

struct Shared {
  std::atomic<int> ready[2];
  HcclRootInfo root[2];
};

uint16_t narrow(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

float widen(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}

// A small generator of its own: the same numbers on every rank and platform.
struct Random {
  uint64_t state;
  float next() {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    return static_cast<float>(static_cast<int32_t>(state >> 33) - (1 << 30)) / (1 << 30);
  }
};

std::vector<uint16_t> numbers(uint64_t seed, int64_t count, float scale) {
  Random random{seed * 2654435761u + 1};
  std::vector<uint16_t> made(static_cast<size_t>(count));
  for (uint16_t& one : made) one = narrow(random.next() * scale);
  return made;
}

std::vector<uint16_t> weight1(int64_t expert) {
  return numbers(100 + static_cast<uint64_t>(expert), kHidden * 2 * kInter, 0.05f);
}
std::vector<uint16_t> weight2(int64_t expert) {
  return numbers(900 + static_cast<uint64_t>(expert), kInter * kHidden, 0.05f);
}

// Device memory with the bytes of a vector.
struct Memory {
  void* data = nullptr;
  template <class T>
  explicit Memory(const std::vector<T>& values) : Memory(values.size() * sizeof(T)) {
    CHECK(aclrtMemcpy(data, values.size() * sizeof(T), values.data(), values.size() * sizeof(T),
                      ACL_MEMCPY_HOST_TO_DEVICE) == 0);
  }
  explicit Memory(size_t bytes) { CHECK(aclrtMalloc(&data, bytes, 0) == 0); }
  Memory(Memory&& other) noexcept : data(other.data) { other.data = nullptr; }
  Memory(const Memory&) = delete;
  ~Memory() {
    if (data != nullptr) aclrtFree(data);
  }
};

aclTensor* describe(const Memory& memory, std::vector<int64_t> shape, aclDataType dtype,
                    aclFormat format = ACL_FORMAT_ND) {
  std::vector<int64_t> strides(shape.size(), 1);
  for (size_t i = shape.size() - 1; i > 0; --i) strides[i - 1] = strides[i] * shape[i];
  aclTensor* made = aclCreateTensor(shape.data(), shape.size(), dtype, strides.data(), 0, format,
                                    shape.data(), shape.size(), memory.data);
  CHECK(made != nullptr);
  return made;
}

aclTensorList* list(const std::vector<Memory>& memories, const std::vector<int64_t>& shape,
                    aclDataType dtype, aclFormat format = ACL_FORMAT_ND) {
  std::vector<const aclTensor*> members;
  for (const Memory& one : memories) members.push_back(describe(one, shape, dtype, format));
  aclTensorList* made = aclCreateTensorList(members.data(), members.size());
  CHECK(made != nullptr);
  return made;
}

struct Group {
  HcclComm comm = nullptr;
  uint64_t buffer_bytes = 0;
  std::vector<int32_t> context;

  Group(Shared* shared, int which, uint32_t rank, uint32_t ranks) : context(4100, 0) {
    if (rank == 0) {
      CHECK(HcclGetRootInfo(&shared->root[which]) == 0);
      shared->ready[which].store(1, std::memory_order_release);
    }
    while (shared->ready[which].load(std::memory_order_acquire) == 0) usleep(1000);
    CHECK(HcclCommInitRootInfo(ranks, &shared->root[which], rank, &comm) == 0);
    void *args = nullptr, *made = nullptr, *window = nullptr;
    char algorithm[] = "AlltoAll=level0:fullmesh;level1:pairwise";
    CHECK(HcclKfcAllocOpArgs(&args) == 0 && HcclKfcOpArgsSetCommEngine(args, 4) == 0);
    CHECK(HcclKfcOpArgsSetAlgConfig(args, algorithm) == 0);
    CHECK(HcclCreateOpResCtx(comm, 8, args, &made) == 0 && HcclKfcFreeOpArgs(args) == 0);
    CHECK(HcclGetHcclBuffer(comm, &window, &buffer_bytes) == 0);
    const auto address = reinterpret_cast<uint64_t>(made);
    std::memcpy(&context[2], &address, sizeof address);
  }
  ~Group() { CHECK(HcclCommDestroy(comm) == 0); }
  Group(const Group&) = delete;
};

// One rank's arguments. `quantised`: int8 weights with one scale per column.
struct Layer {
  std::vector<Memory> memory1, memory2, scale1, scale2;
  aclTensorList *weight1 = nullptr, *weight2 = nullptr, *scales1 = nullptr, *scales2 = nullptr;

  Layer(uint32_t rank, bool quantised) {
    for (int64_t e = 0; e < kLocal; ++e) {
      const int64_t expert = rank * kLocal + e;
      if (!quantised) {
        memory1.emplace_back(::weight1(expert));
        memory2.emplace_back(::weight2(expert));
        continue;
      }
      memory1.emplace_back(std::vector<int8_t>(kHidden * 2 * kInter, static_cast<int8_t>(e + 1)));
      memory2.emplace_back(std::vector<int8_t>(kInter * kHidden, static_cast<int8_t>(-e)));
      scale1.emplace_back(std::vector<uint64_t>(2 * kInter, 0x3a000000));
      scale2.emplace_back(std::vector<uint64_t>(kHidden, 0x3a000000));
    }
    const aclDataType dtype = quantised ? ACL_INT8 : ACL_BF16;
    const aclFormat format = quantised ? ACL_FORMAT_FRACTAL_NZ : ACL_FORMAT_ND;
    weight1 = list(memory1, {kHidden, 2 * kInter}, dtype, format);
    weight2 = list(memory2, {kInter, kHidden}, dtype, format);
    if (!quantised) return;
    scales1 = list(scale1, {2 * kInter}, ACL_UINT64);
    scales2 = list(scale2, {kHidden}, ACL_UINT64);
  }
  ~Layer() {
    CHECK(aclDestroyTensorList(weight1) == 0 && aclDestroyTensorList(weight2) == 0);
    if (scales1 != nullptr)
      CHECK(aclDestroyTensorList(scales1) == 0 && aclDestroyTensorList(scales2) == 0);
  }
  Layer(const Layer&) = delete;
};

struct Batch {
  std::vector<uint16_t> x;
  std::vector<int32_t> ids;
  std::vector<float> weights;

  Batch(uint32_t rank, uint32_t ranks, uint64_t seed)
      : x(numbers(seed * 64 + rank, kTokens * kHidden, 1.0f)), weights(kTokens * kTopk, 0.5f) {
    const auto experts = static_cast<int32_t>(ranks * kLocal);
    for (int64_t t = 0; t < kTokens; ++t)
      for (int64_t k = 0; k < kTopk; ++k)
        ids.push_back(static_cast<int32_t>(rank + static_cast<uint32_t>(3 * t + k)) % experts);
  }
};

struct Launch {
  Memory context, x, ids, weights, mask, y, counts;
  std::vector<aclTensor*> tensors;
  uint64_t size = 0;
  aclOpExecutor* executor = nullptr;
  std::vector<Memory> workspace;

  Launch(const Group& group, const Layer& layer, const Batch& batch, uint32_t ranks, bool masked,
         bool quantised)
      : context(group.context),
        x(batch.x),
        ids(batch.ids),
        weights(batch.weights),
        mask(std::vector<int8_t>{1, 0, 1}),
        y(kTokens * kHidden * 2),
        counts(kLocal * 4) {
    tensors = {describe(context, {4100}, ACL_INT32),
               describe(x, {kTokens, kHidden}, ACL_BF16),
               describe(ids, {kTokens, kTopk}, ACL_INT32),
               describe(weights, {kTokens, kTopk}, ACL_FLOAT),
               describe(mask, {kTokens}, ACL_INT8),
               describe(y, {kTokens, kHidden}, ACL_BF16),
               describe(counts, {kLocal}, ACL_INT32)};
    CHECK(prepare(group, layer, ranks, masked, quantised, tensors[1]) == 0);
    workspace.emplace_back(static_cast<size_t>(size) + 64);
  }

  aclnnStatus prepare(const Group& group, const Layer& layer, uint32_t ranks, bool masked,
                      bool quantised, const aclTensor* input) {
    executor = nullptr;
    return aclnnMegaMoeGetWorkspaceSize(
        tensors[0], input, tensors[2], tensors[3], layer.weight1, layer.weight2, layer.scales1,
        layer.scales2, nullptr, nullptr, masked ? tensors[4] : nullptr, ranks * kLocal, ranks,
        static_cast<int64_t>(group.buffer_bytes), 0, quantised ? 2 : 0, quantised ? 2 : 28, 0, "",
        0, "swiglu", FLT_MAX, tensors[5], tensors[6], &size, &executor);
  }

  void queue(aclrtStream stream) {
    CHECK(aclnnMegaMoe(workspace[0].data, size + 64, executor, stream) == 0);
  }

  std::vector<uint16_t> result() const {
    const auto* values = static_cast<const uint16_t*>(y.data);
    return std::vector<uint16_t>(values, values + kTokens * kHidden);
  }

  ~Launch() {
    for (aclTensor* tensor : tensors) CHECK(aclDestroyTensor(tensor) == 0);
  }
  Launch(const Launch&) = delete;
};

// The first token's row, in double and without any rounding in between.
void check_values(const Batch& batch, const std::vector<uint16_t>& y) {
  std::vector<double> want(kHidden, 0.0), act(kInter);
  for (int64_t k = 0; k < kTopk; ++k) {
    const std::vector<uint16_t> first = weight1(batch.ids[static_cast<size_t>(k)]);
    const std::vector<uint16_t> second = weight2(batch.ids[static_cast<size_t>(k)]);
    for (int64_t i = 0; i < kInter; ++i) {
      double gate = 0, up = 0;
      for (int64_t h = 0; h < kHidden; ++h) {
        const double value = widen(batch.x[static_cast<size_t>(h)]);
        gate += value * widen(first[static_cast<size_t>(h * 2 * kInter + i)]);
        up += value * widen(first[static_cast<size_t>(h * 2 * kInter + kInter + i)]);
      }
      act[static_cast<size_t>(i)] = gate / (1 + std::exp(-gate)) * up;
    }
    for (int64_t i = 0; i < kInter; ++i)
      for (int64_t h = 0; h < kHidden; ++h)
        want[static_cast<size_t>(h)] += 0.5 * act[static_cast<size_t>(i)] *
                                        widen(second[static_cast<size_t>(i * kHidden + h)]);
  }
  double scale = 0, error = 0;
  for (int64_t h = 0; h < kHidden; ++h) {
    const auto at = static_cast<size_t>(h);
    scale = std::fmax(scale, std::fabs(want[at]));
    error = std::fmax(error, std::fabs(want[at] - widen(y[at])));
  }
  CHECK(error <= scale / 32);
}

void check_refusals(const Group& group, const Layer& layer, Launch& launch, uint32_t ranks,
                    aclrtStream stream) {
  aclOpExecutor* used = launch.executor;
  CHECK(aclnnMegaMoe(launch.workspace[0].data, launch.size, used, stream) != 0);  // used up
  CHECK(launch.prepare(group, layer, ranks, false, false, nullptr) == 161001);
  const auto* stray = reinterpret_cast<const aclTensor*>(uintptr_t{0x1234567});
  CHECK(launch.prepare(group, layer, ranks, false, false, stray) == 161002);
  CHECK(launch.prepare(group, layer, 3, false, false, launch.tensors[1]) == 561002);
  CHECK(launch.executor == nullptr);
  CHECK(launch.prepare(group, layer, ranks, false, false, launch.tensors[1]) == 0);
  CHECK(aclnnMegaMoe(nullptr, 0, launch.executor, stream) != 0);
  CHECK(aclDestroyAclOpExecutor(launch.executor) == 0);
  CHECK(aclDestroyAclOpExecutor(launch.executor) != 0);
}

void run_rounds(const Group& group, uint32_t rank, uint32_t ranks, int rounds, bool quantised) {
  Layer layer(rank, quantised);
  aclrtStream stream = nullptr;
  CHECK(aclrtCreateStream(&stream) == 0);
  std::vector<uint16_t> before;
  for (int round = 0; round < rounds; ++round) {
    const Batch batch(rank, ranks, 1);
    Launch plain(group, layer, batch, ranks, false, quantised);
    Launch masked(group, layer, batch, ranks, true, quantised);
    Launch again(group, layer, batch, ranks, false, quantised);
    CHECK(aclSetAclOpExecutorRepeatable(again.executor) == 0);
    plain.queue(stream);
    masked.queue(stream);
    again.queue(stream);
    again.queue(stream);
    CHECK(aclrtSynchronizeStream(stream) == 0);
    CHECK(aclDestroyAclOpExecutor(again.executor) == 0);
    const std::vector<uint16_t> y = plain.result();
    CHECK(y == again.result() && (before.empty() || y == before));
    CHECK(std::memcmp(y.data(), masked.y.data, kHidden * 2) == 0);
    if (!quantised && round == 0) check_values(batch, y);
    if (!quantised) check_refusals(group, layer, plain, ranks, stream);
    before = y;
  }
  CHECK(aclrtDestroyStream(stream) == 0);
}

// The last rank goes without a word; the others must learn of it, not wait.
void lose_a_rank(const Group& group, uint32_t rank, uint32_t ranks) {
  if (rank == ranks - 1) _exit(0);
  Layer layer(rank, false);
  aclrtStream stream = nullptr;
  CHECK(aclrtCreateStream(&stream) == 0);
  Launch launch(group, layer, Batch(rank, ranks, 2), ranks, false, false);
  launch.queue(stream);
  CHECK(aclrtSynchronizeStream(stream) == kRemoteError);
  CHECK(aclrtDestroyStream(stream) == 0);
}

int run_rank(Shared* shared, uint32_t rank, uint32_t ranks, int rounds) {
  CHECK(aclInit(nullptr) == 0 && aclrtSetDevice(static_cast<int32_t>(rank)) == 0);
  {
    // Two windows: the two kinds of launch use different flags and must not share one.
    Group plain(shared, 0, rank, ranks), quantised(shared, 1, rank, ranks);
    run_rounds(plain, rank, ranks, rounds, false);
    run_rounds(quantised, rank, ranks, 1, true);
    lose_a_rank(plain, rank, ranks);
  }
  CHECK(aclFinalize() == 0);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const auto ranks = static_cast<uint32_t>(argc > 1 ? std::atoi(argv[1]) : 4);
  const int rounds = argc > 2 ? std::atoi(argv[2]) : 2;
  void* place = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS,
                     -1, 0);
  if (place == MAP_FAILED) return 2;
  auto* shared = new (place) Shared{};
  std::vector<pid_t> children;
  for (uint32_t rank = 0; rank < ranks; ++rank) {
    const pid_t pid = fork();
    if (pid == 0) std::exit(run_rank(shared, rank, ranks, rounds));
    children.push_back(pid);
  }
  int bad = 0;
  for (pid_t pid : children) {
    int status = 0;
    waitpid(pid, &status, 0);
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) ++bad;
  }
  if (bad == 0) std::puts("done");
  return bad == 0 ? 0 : 1;
}
