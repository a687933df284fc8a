// SPDX-License-Identifier: Apache-2.0
// The second half of connectors.cpp: an aborted group, arguments and batch_info that fit nothing.
#pragma once

namespace {

constexpr std::array<int64_t, 7> kAbsurd = {INT64_MIN, INT64_MIN + 1, -1,       0,
                                            int64_t{1} << 40, int64_t{1} << 62, INT64_MAX};

// Every number of `right` made absurd, one after the other: an error, or an executor to destroy.
template <size_t N, class Prepare>
void numbers_of(const std::array<int64_t, N>& right, const Prepare& prepare) {
  for (size_t i = 0; i < N; ++i) {
    for (const int64_t value : kAbsurd) {
      std::array<int64_t, N> wrong = right;
      wrong[i] = value;
      uint64_t size = 0;
      aclOpExecutor* executor = nullptr;
      const aclnnStatus status = prepare(wrong, &size, &executor);
      CHECK(status != 0 || aclDestroyAclOpExecutor(executor) == 0);
    }
  }
}

void absurd_numbers(const Side& side) {
  const Tensor x(rows(kTokens, 1), {kTokens, kHidden}, ACL_BF16);
  const Tensor one(std::vector<uint16_t>(1), {1}, ACL_BF16);
  const Tensor ids(routing(0), {kTokens, kTopk}, ACL_INT32);
  const Tensor info(std::vector<int64_t>(11), {11}, ACL_INT64);
  const Tensor batch(std::vector<int32_t>(1), {1}, ACL_INT32);
  const Tensor mask(std::vector<uint8_t>(4), {4}, ACL_BOOL);
  T a = x.tensor, c = side.args.tensor;
  char* g = side.name();
  numbers_of<8>({kTokens, kHidden, kTopk, 1, kRanks - 1, side.rank, 4, 0},
                [&](const auto& n, uint64_t* size, aclOpExecutor** made) {
                  return aclnnA2eGetWorkspaceSize(a, nullptr, nullptr, n[0], n[1], n[2], n[3], n[4],
                                                  n[5], g, n[6], n[7], a, nullptr, nullptr,
                                                  batch.tensor, mask.tensor, size, made);
                });
  numbers_of<7>({kTokens, kHidden, kTopk, 1, kRanks - 1, side.rank, 4},
                [&](const auto& n, uint64_t* size, aclOpExecutor** made) {
                  return aclnnE2aGetWorkspaceSize(a, batch.tensor, n[0], n[1], n[2], n[3], n[4], n[5],
                                                  g, n[6], a, size, made);
                });
  numbers_of<12>({kMaxSeq, kTokens, kHidden, kTopk, kFfn, kAttn, kExperts, side.rank, kRanks, 0, 1, 0},
                 [&](const auto& n, uint64_t* size, aclOpExecutor** made) {
                   aclOpExecutor* other = nullptr;
                   const aclnnStatus older = aclnnXsdUmdkAsyncDispatchSendGetWorkspaceSize(
                       a, ids.tensor, c, 0, n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7], n[8],
                       n[9], n[10], n[11], g, size, &other);
                   CHECK(older != 0 || aclDestroyAclOpExecutor(other) == 0);
                   return aclnnAfdAsyncDispatchSendGetWorkspaceSize(
                       a, ids.tensor, c, 0, n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7], n[8],
                       n[9], n[10], n[11], g, nullptr, size, made);
                 });
  numbers_of<10>({kMaxSeq, kHidden, kTopk, kFfn, kAttn, kExperts, side.rank, kRanks, 1, 0},
                 [&](const auto& n, uint64_t* size, aclOpExecutor** made) {
                   aclOpExecutor* other = nullptr;
                   const aclnnStatus older = aclnnXsdUmdkAsyncDispatchRecvGetWorkspaceSize(
                       one.tensor, c, 0, n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7], n[8], n[9],
                       g, a, a, a, a, info.tensor, info.tensor, info.tensor, size, &other);
                   CHECK(older != 0 || aclDestroyAclOpExecutor(other) == 0);
                   return aclnnAfdAsyncDispatchRecvGetWorkspaceSize(
                       one.tensor, c, 0, n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7], n[8], n[9],
                       g, a, a, info.tensor, info.tensor, size, made);
                 });
  numbers_of<9>({kMaxSeq, kHidden, kTopk, kFfn, kAttn, kExperts, side.rank, kRanks, 1},
                [&](const auto& n, uint64_t* size, aclOpExecutor** made) {
                  aclOpExecutor* other = nullptr;
                  const aclnnStatus older = aclnnXsdUmdkAsyncCombineSendGetWorkspaceSize(
                      a, a, c, info.tensor, 0, n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7], n[8],
                      g, size, &other);
                  CHECK(older != 0 || aclDestroyAclOpExecutor(other) == 0);
                  return aclnnAfdAsyncCombineSendGetWorkspaceSize(
                      a, c, info.tensor, 0, n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7], n[8], g,
                      nullptr, size, made);
                });
  numbers_of<8>({kTokens, kHidden, kTopk, kFfn, kAttn, kExperts, side.rank, kRanks},
                [&](const auto& n, uint64_t* size, aclOpExecutor** made) {
                  return aclnnAfdAsyncCombineRecvGetWorkspaceSize(
                      one.tensor, ids.tensor, a, c, 0, n[0], n[1], n[2], n[3], n[4], n[5], n[6],
                      n[7], g, a, size, made);
                });
  numbers_of<8>({kMaxSeq, kHidden, kTopk, kAttn, kExperts, 1, 0, 0},
                [&](const auto& n, uint64_t*, aclOpExecutor**) {
                  const int32_t ready = xsdCamDispatchReady(g, n[0], n[1], n[2], n[3], n[4], n[5],
                                                            n[6], n[7]);
                  const bool right = n[0] == kMaxSeq && n[1] == kHidden && n[2] == kTopk &&
                                     n[3] == kAttn && n[4] == kExperts && n[5] == 1 && n[6] == 0;
                  CHECK(ready == (right && side.rank >= kAttn ? 0 : -1));
                  return 1;
                });
  CHECK(xsdCamDispatchReady(g, kMaxSeq, kHidden, kTopk, kAttn, INT64_MIN, 1, 0, 1) == -1);
}

// Pointers that are no tensors of this device, or no longer.
void stray_tensors(const Side& side) {
  const Tensor batch(std::vector<int32_t>(1), {1}, ACL_INT32);
  aclTensor* dead = describe(batch.memory, {1}, ACL_INT32);
  CHECK(aclDestroyTensor(dead) == 0);
  for (const aclTensor* stray : {reinterpret_cast<T>(uintptr_t{0x1234560}), T{dead}}) {
    uint64_t size = 0;
    aclOpExecutor* executor = nullptr;
    CHECK(aclnnE2aGetWorkspaceSize(stray, stray, kTokens, kHidden, kTopk, 1, kRanks - 1, side.rank,
                                   side.name(), 4, stray, &size, &executor) == 161002);
    CHECK(aclnnAfdAsyncDispatchSendGetWorkspaceSize(
              stray, stray, stray, 0, kMaxSeq, kTokens, kHidden, kTopk, kFfn, kAttn, kExperts, 0,
              kRanks, 0, 1, 0, side.name(), nullptr, &size, &executor) == 161002);
    CHECK(executor == nullptr);
  }
  CHECK(xsdCamCounters(side.comm.name, nullptr) == 1);
}

// Row counts of any size move no more rows than there are.
void strange_counts(const Side& side) {
  const Tensor x(std::vector<float>{1, 2, 3, 4}, {4, 1}, ACL_FLOAT);
  auto prepare = [&](const Tensor& counts, const Tensor& out, uint64_t* size, aclOpExecutor** made) {
    return aclnnXsdTimedKernelGetWorkspaceSize(x.tensor, nullptr, counts.tensor, nullptr, 1, 0, 0, 0,
                                               10, 1, 0, out.tensor, size, made);
  };
  const std::vector<std::pair<std::vector<int64_t>, std::vector<float>>> cases = {
      {{1, 0, 2}, {10, 24, 36, -1}},
      {{INT64_MAX, INT64_MAX, 1}, {10, 20, 30, 40}},
      {{INT64_MIN, INT64_MIN, 2}, {12, 24, -1, -1}},
      {{1, -5, 1}, {10, 24, -1, -1}}};
  for (const auto& [counts, want] : cases) {
    const Tensor given(counts, {static_cast<int64_t>(counts.size())}, ACL_INT64);
    const Tensor out(std::vector<float>(4, -1.0f), {4, 1}, ACL_FLOAT);
    launch(aclnnXsdTimedKernel, side.stream, [&](uint64_t* size, aclOpExecutor** made) {
      return prepare(given, out, size, made);
    });
    CHECK(side.stream.wait() == 0);
    CHECK(std::memcmp(out.memory.data, want.data(), 16) == 0);
  }
  const Tensor none(std::vector<int64_t>(1), {0}, ACL_INT64);
  const Tensor out(std::vector<float>(4), {4, 1}, ACL_FLOAT);
  uint64_t size = 0;
  aclOpExecutor* executor = nullptr;
  CHECK(prepare(none, out, &size, &executor) == 161002 && executor == nullptr);
}

// A batch_info that dispatch_recv never made: the kernel says so, whatever word it is.
void strange_info(const Side& side) {
  const Tensor x(rows(kCapacity, 1), {kCapacity, kHidden}, ACL_BF16);
  const std::vector<int64_t> right = {1, 0, 0, 0, kExperts - 1, 0, 1, 0, 0, 0};
  for (size_t i = 1; i < right.size(); ++i) {
    if (i == 2) continue;  // the layer, any number
    for (const int64_t value : kAbsurd) {
      if (value == 0) continue;
      if (i == 1 && value == -1) continue;  // the stop item
      std::vector<int64_t> wrong = right;
      wrong[i] = value;
      const Stream stream;
      const Tensor info(wrong, {10}, ACL_INT64);
      launch(aclnnAfdAsyncCombineSend, stream, [&](uint64_t* size, aclOpExecutor** made) {
        return aclnnAfdAsyncCombineSendGetWorkspaceSize(
            x.tensor, side.args.tensor, info.tensor, 0, kMaxSeq, kHidden, kTopk, kFfn, kAttn,
            kExperts, side.rank, kRanks, 1, side.name(), nullptr, size, made);
      });
      CHECK(stream.wait() == kFault);
    }
  }
}

// A group is aborted while its FFN ranks wait for a dispatch that never comes.
void abort_group(const Side& side) {
  const Tensor x(std::vector<uint16_t>(kCapacity * kHidden), {kCapacity, kHidden}, ACL_BF16);
  const Tensor scale(std::vector<float>(1), {1}, ACL_FLOAT);
  const Tensor one(std::vector<uint16_t>(1), {1}, ACL_BF16);
  const Tensor info(std::vector<int64_t>(10), {10}, ACL_INT64);
  const Tensor counts(std::vector<int64_t>(kExperts), {kExperts}, ACL_INT64);
  if (side.rank < kAttn) {
    usleep(20000);
    CHECK(xsdCamAbort(side.comm.name, 5) == 0);
  } else {
    launch(aclnnAfdAsyncDispatchRecv, side.stream, [&](uint64_t* size, aclOpExecutor** made) {
      return aclnnAfdAsyncDispatchRecvGetWorkspaceSize(
          one.tensor, side.args.tensor, 0, kMaxSeq, kHidden, kTopk, kFfn, kAttn, kExperts,
          side.rank, kRanks, 1, 0, side.name(), x.tensor, scale.tensor, info.tensor, counts.tensor,
          size, made);
    });
    CHECK(side.stream.wait() == kRemote);
  }
  CHECK(xsdCamAbortState(side.comm.name) == (5 << 16 | 1));
  CHECK(xsdCamDispatchReady(side.comm.name, kMaxSeq, kHidden, kTopk, kAttn, kExperts, 1, 0, 0) == -2);
  CHECK(xsdCamAbort("no such group", 1) == 1 && xsdCamAbortState("no such group") == -1);
}

void misuse(Shared* shared, uint32_t rank) {
  const Comm comm(shared, kAborted, rank);
  const Side side{comm, {kAborted, 0, 0}, rank, {}};
  absurd_numbers(side);
  stray_tensors(side);
  strange_counts(side);
  if (rank >= kAttn) strange_info(side);
  CHECK(HcclBarrier(comm.comm, side.stream.stream) == 0 && side.stream.wait() == 0);
  abort_group(side);
  const Stream after;
  CHECK(HcclBarrier(comm.comm, after.stream) == 0 && after.wait() == 0);
}

}  // namespace
