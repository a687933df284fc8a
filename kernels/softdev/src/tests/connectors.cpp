// SPDX-License-Identifier: Apache-2.0
// The connectors' operators between three forked ranks, to be run under sanitizers: a2e and e2a, the
// four asynchronous ones of both sets with their chunks, stop item, readiness and abort, and
// arguments that fit nothing. Values are whole numbers, so that sums are exact; quantised rows are
// compared with double.
#include <algorithm>
#include <array>
#include <climits>
#include <cmath>
#include <memory>
#include <utility>

#include "common.h"
#include "xsd.h"

extern "C" {
using T = const aclTensor*;
using I = int64_t;
using Launch = aclnnStatus (*)(void*, uint64_t, aclOpExecutor*, aclrtStream);
aclnnStatus aclnnA2eGetWorkspaceSize(T, T, T, I, I, I, I, I, I, char*, I, I, T, T, T, T, T,
                                     uint64_t*, aclOpExecutor**);
aclnnStatus aclnnE2aGetWorkspaceSize(T, T, I, I, I, I, I, I, char*, I, T, uint64_t*,
                                     aclOpExecutor**);
aclnnStatus aclnnAfdAsyncDispatchSendGetWorkspaceSize(T, T, T, I, I, I, I, I, I, I, I, I, I, I, I,
                                                      I, char*, T, uint64_t*, aclOpExecutor**);
aclnnStatus aclnnAfdAsyncDispatchRecvGetWorkspaceSize(T, T, I, I, I, I, I, I, I, I, I, I, I, char*,
                                                      T, T, T, T, uint64_t*, aclOpExecutor**);
aclnnStatus aclnnAfdAsyncCombineSendGetWorkspaceSize(T, T, T, I, I, I, I, I, I, I, I, I, I, char*,
                                                     T, uint64_t*, aclOpExecutor**);
aclnnStatus aclnnAfdAsyncCombineRecvGetWorkspaceSize(T, T, T, T, I, I, I, I, I, I, I, I, I, char*,
                                                     T, uint64_t*, aclOpExecutor**);
aclnnStatus aclnnXsdUmdkAsyncDispatchSendGetWorkspaceSize(T, T, T, I, I, I, I, I, I, I, I, I, I, I,
                                                          I, I, char*, uint64_t*, aclOpExecutor**);
aclnnStatus aclnnXsdUmdkAsyncDispatchRecvGetWorkspaceSize(T, T, I, I, I, I, I, I, I, I, I, I, I,
                                                          char*, T, T, T, T, T, T, T, uint64_t*,
                                                          aclOpExecutor**);
aclnnStatus aclnnXsdUmdkAsyncCombineSendGetWorkspaceSize(T, T, T, T, I, I, I, I, I, I, I, I, I, I,
                                                         char*, uint64_t*, aclOpExecutor**);
aclnnStatus aclnnXsdUmdkAsyncCombineRecvGetWorkspaceSize(T, T, T, T, I, I, I, I, I, I, I, I, I,
                                                         char*, T, uint64_t*, aclOpExecutor**);
aclnnStatus aclnnXsdTimedKernelGetWorkspaceSize(T, T, T, T, I, I, I, I, double, double, double, T,
                                                uint64_t*, aclOpExecutor**);
aclnnStatus aclnnXsdTimedKernel(void*, uint64_t, aclOpExecutor*, aclrtStream);
aclnnStatus aclnnA2e(void*, uint64_t, aclOpExecutor*, aclrtStream);
aclnnStatus aclnnE2a(void*, uint64_t, aclOpExecutor*, aclrtStream);
aclnnStatus aclnnAfdAsyncDispatchSend(void*, uint64_t, aclOpExecutor*, aclrtStream);
aclnnStatus aclnnAfdAsyncDispatchRecv(void*, uint64_t, aclOpExecutor*, aclrtStream);
aclnnStatus aclnnAfdAsyncCombineSend(void*, uint64_t, aclOpExecutor*, aclrtStream);
aclnnStatus aclnnAfdAsyncCombineRecv(void*, uint64_t, aclOpExecutor*, aclrtStream);
aclnnStatus aclnnXsdUmdkAsyncDispatchSend(void*, uint64_t, aclOpExecutor*, aclrtStream);
aclnnStatus aclnnXsdUmdkAsyncDispatchRecv(void*, uint64_t, aclOpExecutor*, aclrtStream);
aclnnStatus aclnnXsdUmdkAsyncCombineSend(void*, uint64_t, aclOpExecutor*, aclrtStream);
aclnnStatus aclnnXsdUmdkAsyncCombineRecv(void*, uint64_t, aclOpExecutor*, aclrtStream);
int32_t xsdCamDispatchReady(const char*, I, I, I, I, I, I, I, I);
int32_t xsdCamAbort(const char*, uint32_t);
int64_t xsdCamAbortState(const char*);
int32_t xsdCamCounters(const char*, uint32_t[4]);
}

namespace {

constexpr uint32_t kRanks = 3;
constexpr int64_t kHidden = 48, kTopk = 3, kTokens = 10, kExperts = 4;  // of an FFN rank
constexpr int64_t kAttn = 1, kFfn = 2, kMaxSeq = 16;  // asynchronous: Attention first
constexpr int64_t kCapacity = 20;
constexpr int kFault = 507035, kRemote = 507057;
enum { kPairs, kRouted, kQuantised, kShared, kAborted, kGroups };

struct Shared {
  RootInfo info[kGroups];
};

struct Comm {
  HcclComm comm;
  char name[128];
  Comm(Shared* shared, int which, uint32_t rank) : comm(shared->info[which].join(rank, kRanks)) {
    CHECK(HcclGetCommName(comm, name) == 0);
  }
  ~Comm() { CHECK(HcclCommDestroy(comm) == 0); }
  Comm(const Comm&) = delete;
};

struct Stream {
  aclrtStream stream = nullptr;
  Stream() { CHECK(aclrtCreateStream(&stream) == 0); }
  ~Stream() { CHECK(aclrtDestroyStream(stream) == 0); }
  Stream(const Stream&) = delete;
  int wait() const { return aclrtSynchronizeStream(stream); }
};

// A tensor with memory of its own, of exactly its size.
struct Tensor {
  Memory memory;
  aclTensor* tensor;
  template <class E>
  Tensor(const std::vector<E>& values, const std::vector<int64_t>& shape, aclDataType dtype)
      : memory(values), tensor(describe(memory, shape, dtype)) {}
  ~Tensor() { CHECK(aclDestroyTensor(tensor) == 0); }
  Tensor(const Tensor&) = delete;
  template <class E>
  E* at() const {
    return static_cast<E*>(memory.data);
  }
};

template <class Prepare>
void launch(Launch run, const Stream& stream, const Prepare& prepare) {
  uint64_t size = 1;
  aclOpExecutor* executor = nullptr;
  CHECK(prepare(&size, &executor) == 0 && size == 0);
  CHECK(run(nullptr, 0, executor, stream.stream) == 0);
}

std::vector<uint16_t> rows(int64_t count, int64_t seed) {
  std::vector<uint16_t> made;
  for (int64_t i = 0; i < count * kHidden; ++i)
    made.push_back(narrow(static_cast<float>((seed * 11 + i * 7) % 33 - 16)));
  return made;
}

// ---- a2e and e2a: rank 0 is FFN, the others are its Attention ranks -----------------------------

void pairs(Shared* shared, uint32_t rank) {
  const Comm comm(shared, kPairs, rank);
  const Stream stream;
  const int64_t peers = kRanks - 1, mine = rank == 0 ? peers * kTokens : kTokens;
  const Tensor batch(std::vector<int32_t>(1), {1}, ACL_INT32);
  const Tensor mask(std::vector<uint8_t>(4), {4}, ACL_BOOL);
  auto* name = const_cast<char*>(comm.name);
  for (int64_t round = 0; round < 4; ++round) {
    const Tensor x(rows(mine, rank + 10 * round), {mine, kHidden}, ACL_BF16);
    const Tensor out(std::vector<uint16_t>(static_cast<size_t>(mine * kHidden), 0x7fc0),
                     {mine, kHidden}, ACL_BF16);
    auto a2e = [&](uint64_t* size, aclOpExecutor** made) {
      return aclnnA2eGetWorkspaceSize(x.tensor, nullptr, nullptr, mine, kHidden, kTopk, 1, peers,
                                      rank, name, 4, 0, out.tensor, nullptr, nullptr, batch.tensor,
                                      mask.tensor, size, made);
    };
    auto e2a = [&](uint64_t* size, aclOpExecutor** made) {
      return aclnnE2aGetWorkspaceSize(out.tensor, batch.tensor, mine, kHidden, kTopk, 1, peers, rank,
                                      name, 4, out.tensor, size, made);
    };
    launch(aclnnA2e, stream, a2e);
    if (rank == 0) {
      CHECK(stream.wait() == 0);
      for (int64_t peer = 1; peer <= peers; ++peer) {
        uint16_t* part = out.at<uint16_t>() + (peer - 1) * kTokens * kHidden;
        const std::vector<uint16_t> want = rows(kTokens, peer + 10 * round);
        CHECK(std::memcmp(part, want.data(), want.size() * 2) == 0);
        for (size_t i = 0; i < want.size(); ++i)
          part[i] = narrow(2 * widen(part[i]) + static_cast<float>(peer));
      }
    }
    launch(aclnnE2a, stream, e2a);
    CHECK(stream.wait() == 0);
    if (rank == 0) continue;
    for (int64_t i = 0; i < kTokens * kHidden; ++i)
      CHECK(widen(out.at<uint16_t>()[i]) ==
            2 * widen(x.at<uint16_t>()[i]) + static_cast<float>(rank));
  }
  uint32_t counters[4] = {9, 9, 9, 9};
  CHECK(xsdCamCounters(comm.name, counters) == 0 && counters[1] == 0 && counters[2] == 0);
  CHECK(HcclBarrier(comm.comm, stream.stream) == 0 && stream.wait() == 0);
}

// ---- the asynchronous operators: rank 0 is Attention, the others are FFN ------------------------

struct Set {
  int group;
  int64_t quant, shared;
  int64_t slots() const { return kExperts + shared; }
};

// Layer 1 sends everything to the last FFN rank, whose rows then come in two chunks.
std::vector<int32_t> routing(int64_t layer) {
  std::vector<int32_t> ids;
  for (int64_t t = 0; t < kTokens; ++t)
    for (int64_t k = 0; k < kTopk; ++k)
      ids.push_back(static_cast<int32_t>(layer == 1 ? kExperts + (t + k) % kExperts
                                                    : (t + 3 * k) % (kFfn * kExperts)));
  return ids;
}
double weight(int64_t token, int64_t k) {
  return k == token % 3 ? 1.0 : 0.25 * static_cast<double>(k + 1);
}
double factor(int64_t expert) { return static_cast<double>(expert + 1); }
constexpr double kSharedFactor = 9;

struct Side {
  const Comm& comm;
  const Set set;
  const int64_t rank;
  const Stream stream;
  const Tensor args{std::vector<uint16_t>(8), {8}, ACL_FLOAT16};
  char* name() const { return const_cast<char*>(comm.name); }
};

void attention(const Side& side, int64_t layer) {
  const int64_t quant = side.set.quant;
  const bool older = side.set.shared != 0;
  const std::vector<int32_t> ids = routing(layer);
  std::vector<float> weights;
  for (int64_t t = 0; t < kTokens; ++t)
    for (int64_t k = 0; k < kTopk; ++k) weights.push_back(static_cast<float>(weight(t, k)));
  const Tensor x(rows(kTokens, layer), {kTokens, kHidden}, ACL_BF16);
  const Tensor chosen(ids, {kTokens, kTopk}, ACL_INT32);
  const Tensor scales(weights, {kTokens, kTopk}, ACL_FLOAT);
  const Tensor anchor(std::vector<uint16_t>(1), {1}, ACL_BF16);
  const Tensor out(std::vector<uint16_t>(kTokens * kHidden, 0x7fc0), {kTokens, kHidden}, ACL_BF16);
  launch(older ? aclnnXsdUmdkAsyncDispatchSend : aclnnAfdAsyncDispatchSend, side.stream,
         [&](uint64_t* size, aclOpExecutor** made) {
           return older ? aclnnXsdUmdkAsyncDispatchSendGetWorkspaceSize(
                              x.tensor, chosen.tensor, side.args.tensor, 0, kMaxSeq, kTokens,
                              kHidden, kTopk, kFfn, kAttn, kExperts, side.rank, kRanks, layer, 1,
                              quant, side.name(), size, made)
                        : aclnnAfdAsyncDispatchSendGetWorkspaceSize(
                              x.tensor, chosen.tensor, side.args.tensor, 0, kMaxSeq, kTokens,
                              kHidden, kTopk, kFfn, kAttn, kExperts, side.rank, kRanks, layer, 1,
                              quant, side.name(), nullptr, size, made);
         });
  launch(older ? aclnnXsdUmdkAsyncCombineRecv : aclnnAfdAsyncCombineRecv, side.stream,
         [&](uint64_t* size, aclOpExecutor** made) {
           auto prepare = older ? aclnnXsdUmdkAsyncCombineRecvGetWorkspaceSize
                                : aclnnAfdAsyncCombineRecvGetWorkspaceSize;
           return prepare(anchor.tensor, chosen.tensor, scales.tensor, side.args.tensor, 0, kTokens,
                          kHidden, kTopk, kFfn, kAttn, kExperts, side.rank, kRanks, side.name(),
                          out.tensor, size, made);
         });
  CHECK(side.stream.wait() == 0);
  for (int64_t t = 0; t < kTokens; ++t) {
    double sum = older ? kSharedFactor : 0;
    for (int64_t k = 0; k < kTopk; ++k)
      sum += weight(t, k) * factor(ids[static_cast<size_t>(t * kTopk + k)]);
    for (int64_t h = 0; h < kHidden; ++h) {
      const double want = sum * widen(x.at<uint16_t>()[t * kHidden + h]);
      const float got = widen(out.at<uint16_t>()[t * kHidden + h]);
      if (quant == 0)
        CHECK(got == widen(narrow(static_cast<float>(want))));
      else  // half a step of 127 to 16, and bf16 twice
        CHECK(std::fabs(got - want) <= sum * 16 / 254 + std::fabs(want) / 128 + 1e-6);
    }
  }
}

// Row by row what an FFN rank must have got for its slots start..end, with the tokens' own values;
// writes what the experts make of it.
void experts(const Side& side, const int64_t* info, const int64_t* counts, const void* x,
             const float* scales, const void* x_shared, const float* scales_shared, uint16_t* out,
             uint16_t* out_shared) {
  const int64_t ffn = side.rank - kAttn, layer = info[2];
  const std::vector<int32_t> ids = routing(layer);
  const std::vector<uint16_t> tokens = rows(kTokens, layer);
  int64_t row = 0, shared_row = 0;
  for (int64_t slot = 0; slot < side.set.slots(); ++slot) {
    const bool is_shared = slot < side.set.shared;
    const int64_t expert = ffn * kExperts + slot - side.set.shared;
    const double times = is_shared ? kSharedFactor : factor(expert);
    const int64_t before = is_shared ? shared_row : row;
    for (int64_t t = 0; t < kTokens && slot >= info[3] && slot <= info[4]; ++t) {
      bool here = is_shared && t * kFfn / kTokens == ffn;
      for (int64_t k = 0; k < kTopk && !is_shared; ++k)
        here |= ids[static_cast<size_t>(t * kTopk + k)] == expert;
      if (!here) continue;
      const int64_t at = is_shared ? shared_row++ : row++;
      for (int64_t h = 0; h < kHidden; ++h) {
        const double want = widen(tokens[static_cast<size_t>(t * kHidden + h)]);
        const auto place = static_cast<size_t>(at * kHidden + h);
        double got;
        if (side.set.quant == 0) {
          got = widen(static_cast<const uint16_t*>(is_shared ? x_shared : x)[place]);
          CHECK(got == want);
        } else {
          got = static_cast<double>(static_cast<const int8_t*>(is_shared ? x_shared : x)[place]) *
                (is_shared ? scales_shared : scales)[at];
          CHECK(std::fabs(got - want) <= 16.0 / 254 + 1e-6);
        }
        (is_shared ? out_shared : out)[place] = narrow(static_cast<float>(got * times));
      }
    }
    if (!is_shared) CHECK(counts[slot - side.set.shared] == row - before);
  }
}

// Serves one chunk; true when it was the layer's last.
bool serve(const Side& side, int64_t layer, bool stop) {
  const int64_t quant = side.set.quant, slots = side.set.slots();
  const bool older = side.set.shared != 0;
  const size_t items = kCapacity * kHidden;
  const aclDataType type = quant != 0 ? ACL_INT8 : ACL_BF16;
  auto row_tensor = [&] {
    const std::vector<int64_t> shape = {kCapacity, kHidden};
    return quant != 0 ? std::make_unique<Tensor>(std::vector<int8_t>(items), shape, type)
                      : std::make_unique<Tensor>(std::vector<uint16_t>(items), shape, type);
  };
  const auto x = row_tensor(), x_shared = row_tensor();
  const int64_t scaled = quant != 0 ? kCapacity : 1;
  const std::vector<float> no_scales(static_cast<size_t>(scaled));
  const Tensor scales(no_scales, {scaled}, ACL_FLOAT), scales_shared(no_scales, {scaled}, ACL_FLOAT);
  const Tensor info(std::vector<int64_t>(static_cast<size_t>(6 + slots)), {6 + slots}, ACL_INT64);
  const Tensor counts(std::vector<int64_t>(kExperts, -1), {kExperts}, ACL_INT64);
  const Tensor shared_count(std::vector<int64_t>(1, -1), {1}, ACL_INT64);
  const Tensor one(std::vector<uint16_t>(1), {1}, ACL_BF16);
  const Tensor buffer(std::vector<int64_t>{stop ? 1 : 0, 77, 0, 0}, {16}, ACL_FLOAT16);
  const aclTensor* anchor = quant != 0 && !older ? buffer.tensor : one.tensor;
  if (!stop) {
    int32_t ready = 0;
    while ((ready = xsdCamDispatchReady(side.comm.name, kMaxSeq, kHidden, kTopk, kAttn, slots, 1,
                                        quant, side.set.shared)) == 0)
      usleep(200);
    CHECK(ready == 1);
  }
  launch(older ? aclnnXsdUmdkAsyncDispatchRecv : aclnnAfdAsyncDispatchRecv, side.stream,
         [&](uint64_t* size, aclOpExecutor** made) {
           return older ? aclnnXsdUmdkAsyncDispatchRecvGetWorkspaceSize(
                              anchor, side.args.tensor, 0, kMaxSeq, kHidden, kTopk, kFfn, kAttn,
                              kExperts, side.rank, kRanks, 1, quant, side.name(), x->tensor,
                              x_shared->tensor, scales.tensor, scales_shared.tensor, info.tensor,
                              counts.tensor, shared_count.tensor, size, made)
                        : aclnnAfdAsyncDispatchRecvGetWorkspaceSize(
                              anchor, side.args.tensor, 0, kMaxSeq, kHidden, kTopk, kFfn, kAttn,
                              kExperts, side.rank, kRanks, 1, quant, side.name(), x->tensor,
                              scales.tensor, info.tensor, counts.tensor, size, made);
         });
  CHECK(side.stream.wait() == 0);
  const auto* words = info.at<int64_t>();
  const Tensor out(std::vector<uint16_t>(items), {kCapacity, kHidden}, ACL_BF16);
  const Tensor out_shared(std::vector<uint16_t>(items), {kCapacity, kHidden}, ACL_BF16);
  if (stop) {
    CHECK(words[0] == 1 && words[1] == -1 && words[2] == 77 && counts.at<int64_t>()[0] == 1);
  } else {
    CHECK(words[1] == 0 && words[2] == layer && words[3] >= 0 && words[4] < slots);
    experts(side, words, counts.at<int64_t>(), x->memory.data, scales.at<float>(),
            x_shared->memory.data, scales_shared.at<float>(), out.at<uint16_t>(),
            out_shared.at<uint16_t>());
  }
  launch(older ? aclnnXsdUmdkAsyncCombineSend : aclnnAfdAsyncCombineSend, side.stream,
         [&](uint64_t* size, aclOpExecutor** made) {
           return older ? aclnnXsdUmdkAsyncCombineSendGetWorkspaceSize(
                              out.tensor, out_shared.tensor, side.args.tensor, info.tensor, 0,
                              kMaxSeq, kHidden, kTopk, kFfn, kAttn, kExperts, side.rank, kRanks, 1,
                              side.name(), size, made)
                        : aclnnAfdAsyncCombineSendGetWorkspaceSize(
                              out.tensor, side.args.tensor, info.tensor, 0, kMaxSeq, kHidden,
                              kTopk, kFfn, kAttn, kExperts, side.rank, kRanks, 1, side.name(),
                              nullptr, size, made);
         });
  CHECK(side.stream.wait() == 0);
  return words[4] == slots - 1;
}

void layers(Shared* shared, uint32_t rank, Set set) {
  const Comm comm(shared, set.group, rank);
  const Side side{comm, set, rank, {}};
  for (int64_t layer = 0; layer < 4; ++layer) {
    if (rank < kAttn) {
      attention(side, layer);
      continue;
    }
    int chunks = 1;
    while (!serve(side, layer, false)) ++chunks;
    CHECK(chunks == (layer == 1 && rank == kRanks - 1 ? 2 : 1));
  }
  if (rank >= kAttn && set.group == kQuantised) serve(side, -1, true);
  uint32_t counters[4] = {9, 9, 9, 9};
  CHECK(xsdCamCounters(comm.name, counters) == 0);
  for (uint32_t count : counters) CHECK(count == 0);
  CHECK(xsdCamAbortState(comm.name) == 0);
  CHECK(HcclBarrier(comm.comm, side.stream.stream) == 0 && side.stream.wait() == 0);
}

}  // namespace

#include "connectors_misuse.h"

int main() {
  setenv("BATCH_SIZE_FACTOR", "0.0000763", 1);  // kCapacity of 262144 rows
  return fork_ranks<Shared>(kRanks, [](Shared* shared, uint32_t rank) {
    CHECK(aclInit(nullptr) == 0 && aclrtSetDevice(static_cast<int32_t>(rank)) == 0);
    pairs(shared, rank);
    layers(shared, rank, {kRouted, 0, 0});
    layers(shared, rank, {kQuantised, 1, 0});
    layers(shared, rank, {kShared, 0, 1});
    misuse(shared, rank);
    CHECK(aclFinalize() == 0);
  });
}
