// SPDX-License-Identifier: Apache-2.0
// The operator over a group of processes, to be run under sanitizers: launches with and without a
// mask, with bf16, int8 and int4 weights against double, repeated op_executors and such that move,
// refused calls, and a rank that leaves.
//
//   mega_moe RANKS ROUNDS
//
// Processes are forked before anything of the device is used.
#include <array>
#include <cfloat>
#include <cmath>

#include "common.h"
#include "xsd.h"

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

struct Shared {
  RootInfo info[2];
};

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

enum class Kind { kBf16, kInt8, kInt4 };

// One projection of one expert: what the operator gets, and what it means.
struct Matrix {
  int64_t rows, columns;
  std::vector<double> value;  // [rows, columns]
  std::vector<uint8_t> stored;
  std::vector<uint64_t> scale;
  std::vector<float> bias;

  Matrix(Kind kind, uint64_t seed, int64_t rows_, int64_t columns_)
      : rows(rows_), columns(columns_), value(static_cast<size_t>(rows_ * columns_)) {
    if (kind == Kind::kBf16) {
      const std::vector<uint16_t> plain = numbers(seed, rows * columns, 0.05f);
      stored.resize(plain.size() * 2);
      std::memcpy(stored.data(), plain.data(), stored.size());
      for (size_t i = 0; i < plain.size(); ++i) value[i] = widen(plain[i]);
      return;
    }
    // FRACTAL_NZ: groups of 32 bytes of all rows, one after the other.
    const bool int4 = kind == Kind::kInt4;
    const int64_t most = int4 ? 7 : 127, width = int4 ? 64 : 32;
    Random random{seed + 1};
    stored.resize(value.size() / (int4 ? 2 : 1));
    std::vector<double> sums(static_cast<size_t>(columns));
    for (int64_t n = 0; n < columns; ++n) {
      const float each = 0.05f / static_cast<float>(most) * (1.0f + 0.3f * random.next());
      uint32_t bits;
      std::memcpy(&bits, &each, sizeof bits);
      scale.push_back(bits);
      for (int64_t k = 0; k < rows; ++k) {
        const auto q = static_cast<int64_t>(random.next() * (static_cast<float>(most) + 0.99f));
        value[static_cast<size_t>(k * columns + n)] = static_cast<double>(q) * each;
        sums[static_cast<size_t>(n)] += static_cast<double>(q) * each;
        const auto place = static_cast<size_t>((n / width * rows + k) * width + n % width);
        if (int4)
          stored[place / 2] |= static_cast<uint8_t>((q & 15) << (place % 2 != 0 ? 4 : 0));
        else
          stored[place] = static_cast<uint8_t>(q);
      }
    }
    for (double sum : sums)
      if (int4) bias.push_back(static_cast<float>(8 * sum));
  }
};

Matrix weight1(Kind kind, int64_t expert) {
  return {kind, 100 + static_cast<uint64_t>(expert), kHidden, 2 * kInter};
}
Matrix weight2(Kind kind, int64_t expert) {
  return {kind, 900 + static_cast<uint64_t>(expert), kInter, kHidden};
}

struct Group {
  HcclComm comm = nullptr;
  uint64_t buffer_bytes = 0;
  std::vector<int32_t> context;

  Group(Shared* shared, int which, uint32_t rank, uint32_t ranks) : context(4100, 0) {
    comm = shared->info[which].join(rank, ranks);
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

// The lists of one projection of a rank's experts; those that the kind has not are null.
struct Weights {
  std::vector<Memory> stored, scale, bias;
  aclTensorList *weights = nullptr, *scales = nullptr, *biases = nullptr;

  Weights(Kind kind, const std::vector<Matrix>& experts) {
    const Matrix& first = experts[0];
    for (const Matrix& each : experts) {
      stored.emplace_back(each.stored);
      if (kind != Kind::kBf16) scale.emplace_back(each.scale);
      if (kind == Kind::kInt4) bias.emplace_back(each.bias);
    }
    const aclDataType dtype = kind == Kind::kBf16   ? ACL_BF16
                              : kind == Kind::kInt8 ? ACL_INT8
                                                    : ACL_INT4;
    weights = list(stored, {first.rows, first.columns}, dtype,
                   kind == Kind::kBf16 ? ACL_FORMAT_ND : ACL_FORMAT_FRACTAL_NZ);
    if (!scale.empty()) scales = list(scale, {first.columns}, ACL_UINT64);
    if (!bias.empty()) biases = list(bias, {first.columns}, ACL_FLOAT);
  }
  ~Weights() {
    for (aclTensorList* each : {weights, scales, biases})
      CHECK(each == nullptr || aclDestroyTensorList(each) == 0);
  }
  Weights(const Weights&) = delete;
};

std::vector<Matrix> local_experts(Kind kind, uint32_t rank, Matrix (*make)(Kind, int64_t)) {
  std::vector<Matrix> experts;
  for (int64_t e = 0; e < kLocal; ++e) experts.push_back(make(kind, rank * kLocal + e));
  return experts;
}

struct Layer {
  Kind kind;
  Weights first, second;

  Layer(uint32_t rank, Kind kind_)
      : kind(kind_),
        first(kind_, local_experts(kind_, rank, weight1)),
        second(kind_, local_experts(kind_, rank, weight2)) {}
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

  Launch(const Group& group, const Layer& layer, const Batch& batch, uint32_t ranks, bool masked)
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
    CHECK(prepare(group, layer, ranks, masked, tensors[1]) == 0);
    workspace.emplace_back(static_cast<size_t>(size) + 64);
  }

  aclnnStatus prepare(const Group& group, const Layer& layer, uint32_t ranks, bool masked,
                      const aclTensor* input) {
    return prepare(layer, masked, input,
                   {ranks * kLocal, ranks, static_cast<int64_t>(group.buffer_bytes), 0,
                    layer.kind == Kind::kBf16 ? 0 : 2, layer.kind == Kind::kBf16 ? 28 : 2, 0, 0});
  }

  // experts, ranks, buffer, maxRecv, quant mode, quant type, combine mode, tokens of a rank
  aclnnStatus prepare(const Layer& layer, bool masked, const aclTensor* input,
                      const std::array<int64_t, 8>& n) {
    executor = nullptr;
    return aclnnMegaMoeGetWorkspaceSize(
        tensors[0], input, tensors[2], tensors[3], layer.first.weights, layer.second.weights,
        layer.first.scales, layer.second.scales, layer.first.biases, layer.second.biases,
        masked ? tensors[4] : nullptr, n[0], n[1], n[2], n[3], n[4], n[5], n[6], "", n[7],
        "swiglu", FLT_MAX, tensors[5], tensors[6], &size, &executor);
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
void check_values(Kind kind, const Batch& batch, const std::vector<uint16_t>& y) {
  std::vector<double> want(kHidden, 0.0), act(kInter);
  for (int64_t k = 0; k < kTopk; ++k) {
    const Matrix first = weight1(kind, batch.ids[static_cast<size_t>(k)]);
    const Matrix second = weight2(kind, batch.ids[static_cast<size_t>(k)]);
    for (int64_t i = 0; i < kInter; ++i) {
      double gate = 0, up = 0;
      for (int64_t h = 0; h < kHidden; ++h) {
        const double value = widen(batch.x[static_cast<size_t>(h)]);
        gate += value * first.value[static_cast<size_t>(h * 2 * kInter + i)];
        up += value * first.value[static_cast<size_t>(h * 2 * kInter + kInter + i)];
      }
      act[static_cast<size_t>(i)] = gate / (1 + std::exp(-gate)) * up;
    }
    for (int64_t i = 0; i < kInter; ++i)
      for (int64_t h = 0; h < kHidden; ++h)
        want[static_cast<size_t>(h)] += 0.5 * act[static_cast<size_t>(i)] *
                                        second.value[static_cast<size_t>(i * kHidden + h)];
  }
  double scale = 0, error = 0;
  for (int64_t h = 0; h < kHidden; ++h) {
    const auto at = static_cast<size_t>(h);
    scale = std::fmax(scale, std::fabs(want[at]));
    CHECK(std::isfinite(widen(y[at])));  // fmax would pass over a NaN
    error = std::fmax(error, std::fabs(want[at] - widen(y[at])));
  }
  // Integer activations have 127 steps to their largest value.
  CHECK(error <= scale / (kind == Kind::kBf16 ? 64 : 24));
}

void check_refusals(const Group& group, const Layer& layer, Launch& launch, uint32_t ranks,
                    aclrtStream stream) {
  aclOpExecutor* used = launch.executor;
  CHECK(aclnnMegaMoe(launch.workspace[0].data, launch.size, used, stream) != 0);  // used up
  CHECK(launch.prepare(group, layer, ranks, false, nullptr) == 161001);
  const auto* stray = reinterpret_cast<const aclTensor*>(uintptr_t{0x1234567});
  CHECK(launch.prepare(group, layer, ranks, false, stray) == 161002);
  CHECK(launch.prepare(group, layer, 3, false, launch.tensors[1]) == 561002);
  CHECK(launch.executor == nullptr);
  CHECK(launch.prepare(group, layer, ranks, false, launch.tensors[1]) == 0);
  CHECK(aclnnMegaMoe(nullptr, 0, launch.executor, stream) != 0);
  CHECK(aclDestroyAclOpExecutor(launch.executor) == 0);
  CHECK(aclDestroyAclOpExecutor(launch.executor) != 0);
}

// Numbers that no product, sum or difference of survives are refused, or harmless.
void check_absurd(const Group& group, const Layer& layer, Launch& launch, uint32_t ranks) {
  const bool bf16 = layer.kind == Kind::kBf16;
  const std::array<int64_t, 8> right = {
      ranks * kLocal, ranks, static_cast<int64_t>(group.buffer_bytes), 0, bf16 ? 0 : 2,
      bf16 ? 28 : 2,  0,     0};
  for (size_t i = 0; i < right.size(); ++i) {
    for (const int64_t value : {INT64_MIN, INT64_MIN + 1, int64_t{-1}, int64_t{1} << 62, INT64_MAX}) {
      std::array<int64_t, 8> wrong = right;
      wrong[i] = value;
      const aclnnStatus status = launch.prepare(layer, false, launch.tensors[1], wrong);
      CHECK(status != 0 || aclDestroyAclOpExecutor(launch.executor) == 0);
      CHECK(status != 0 || i == 7 || (i == 3 && value > 0) || (i == 2 && value > 0));
    }
  }
}

// A kept executor follows its tensors; what is queued stays where it was.
void check_moves(const Group& group, const Layer& layer, uint32_t rank, uint32_t ranks,
                 aclrtStream stream) {
  const Batch one(rank, ranks, 1), two(rank, ranks, 2);
  Launch first(group, layer, one, ranks, false), second(group, layer, two, ranks, false);
  Launch kept(group, layer, one, ranks, false);
  const size_t bytes = kTokens * kHidden * 2;
  const Memory x(two.x), y(bytes), third(bytes), row(kHidden * 2);
  const Matrix copy = weight1(layer.kind, rank * kLocal);
  const Memory moved(copy.stored);
  CHECK(aclSetAclOpExecutorRepeatable(kept.executor) == 0);
  first.queue(stream);
  second.queue(stream);
  kept.queue(stream);
  CHECK(aclSetInputTensorAddr(kept.executor, 1, kept.tensors[1], x.data) == 0);
  CHECK(aclSetOutputTensorAddr(kept.executor, 0, kept.tensors[5], y.data) == 0);
  kept.queue(stream);
  CHECK(aclSetOutputTensorAddr(kept.executor, 0, kept.tensors[5], third.data) == 0);
  aclTensor* expert = layer.first.weights->items[0];
  CHECK(aclSetInputTensorAddr(kept.executor, 4, expert, moved.data) == 0);
  kept.queue(stream);
  // A tensor that fits its memory, but not what the executor reads there.
  aclTensor* small = describe(row, {1, kHidden}, ACL_BF16);
  CHECK(aclSetInputTensorAddr(kept.executor, 1, small, row.data) == 161002);
  CHECK(aclSetOutputTensorAddr(kept.executor, 0, small, row.data) == 161002);
  CHECK(aclSetInputTensorAddr(kept.executor, 4 + 2 * kLocal, small, x.data) == 161002);
  CHECK(aclSetOutputTensorAddr(kept.executor, 2, small, x.data) == 161002);
  CHECK(aclDestroyTensor(small) == 0);
  CHECK(aclrtSynchronizeStream(stream) == 0);
  CHECK(aclDestroyAclOpExecutor(kept.executor) == 0);
  CHECK(kept.result() == first.result());
  CHECK(std::memcmp(y.data, second.y.data, bytes) == 0);
  CHECK(std::memcmp(third.data, second.y.data, bytes) == 0);
  CHECK(aclSetRawTensorAddr(expert, layer.first.stored[0].data) == 0);
}

void run_rounds(const Group& group, uint32_t rank, uint32_t ranks, int rounds, Kind kind) {
  const Layer layer(rank, kind);
  aclrtStream stream = nullptr;
  CHECK(aclrtCreateStream(&stream) == 0);
  std::vector<uint16_t> before;
  for (int round = 0; round < rounds; ++round) {
    const Batch batch(rank, ranks, 1);
    Launch plain(group, layer, batch, ranks, false);
    Launch masked(group, layer, batch, ranks, true);
    Launch again(group, layer, batch, ranks, false);
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
    if (round == 0) check_values(kind, batch, y);
    check_refusals(group, layer, plain, ranks, stream);
    check_absurd(group, layer, plain, ranks);
    before = y;
  }
  check_moves(group, layer, rank, ranks, stream);
  CHECK(aclrtDestroyStream(stream) == 0);
}

// The last rank goes without a word; the others must learn of it, not wait.
void lose_a_rank(const Group& group, uint32_t rank, uint32_t ranks) {
  if (rank == ranks - 1) _exit(0);
  const Layer layer(rank, Kind::kBf16);
  aclrtStream stream = nullptr;
  CHECK(aclrtCreateStream(&stream) == 0);
  Launch launch(group, layer, Batch(rank, ranks, 2), ranks, false);
  launch.queue(stream);
  CHECK(aclrtSynchronizeStream(stream) == kRemoteError);
  CHECK(aclrtDestroyStream(stream) == 0);
}

void run_rank(Shared* shared, uint32_t rank, uint32_t ranks, int rounds) {
  CHECK(aclInit(nullptr) == 0 && aclrtSetDevice(static_cast<int32_t>(rank)) == 0);
  {
    // Two windows: launches with int8 weights use other flags and must not share one.
    Group plain(shared, 0, rank, ranks), counted(shared, 1, rank, ranks);
    run_rounds(plain, rank, ranks, rounds, Kind::kBf16);
    run_rounds(plain, rank, ranks, 1, Kind::kInt4);
    run_rounds(counted, rank, ranks, 1, Kind::kInt8);
    lose_a_rank(plain, rank, ranks);
  }
  CHECK(aclFinalize() == 0);
}

}  // namespace

int main(int argc, char** argv) {
  const auto ranks = static_cast<uint32_t>(argc > 1 ? std::atoi(argv[1]) : 4);
  const int rounds = argc > 2 ? std::atoi(argv[2]) : 2;
  return fork_ranks<Shared>(ranks, [&](Shared* shared, uint32_t rank) {
    run_rank(shared, rank, ranks, rounds);
  });
}
