// SPDX-License-Identifier: Apache-2.0
// Collectives over ranks that are threads, against plain loops over what every rank sends; to be run
// under sanitizers. Buffers have exactly the size that is used.
//
//   collectives RANKS
#include <algorithm>
#include <cmath>
#include <thread>

#include "common.h"

namespace {

constexpr int kMismatch = 507018;
constexpr uint64_t kMany = 300000;  // more than one round of the device's 512 KiB

// Small whole numbers: sums and products of a few are exact in every type.
int value(uint32_t rank, uint64_t at) {
  return static_cast<int>((rank * 5 + at * 7) % 6) - 2;
}

double reduced(HcclReduceOp op, uint32_t ranks, uint64_t at) {
  double total = value(0, at);
  for (uint32_t r = 1; r < ranks; ++r) {
    const double next = value(r, at);
    total = op == HCCL_REDUCE_SUM    ? total + next
            : op == HCCL_REDUCE_PROD ? total * next
            : op == HCCL_REDUCE_MAX  ? std::fmax(total, next)
                                     : std::fmin(total, next);
  }
  return total;
}

struct Bf16 {
  uint16_t bits = 0;
  Bf16() = default;
  explicit Bf16(double value) : bits(narrow(static_cast<float>(value))) {}
  explicit operator double() const { return widen(bits); }
};

struct Ranks {
  HcclRootInfo root;
  uint32_t count;
};

struct Rank {
  uint32_t number, ranks;
  HcclComm comm = nullptr;
  aclrtStream stream = nullptr;

  Rank(const Ranks& group, uint32_t rank) : number(rank), ranks(group.count) {
    CHECK(aclrtSetDevice(static_cast<int32_t>(rank)) == 0);
    CHECK(HcclCommInitRootInfo(ranks, &group.root, rank, &comm) == 0);
    CHECK(aclrtCreateStream(&stream) == 0);
  }
  ~Rank() {
    CHECK(aclrtDestroyStream(stream) == 0);
    CHECK(HcclCommDestroy(comm) == 0);
  }
  Rank(const Rank&) = delete;
  void wait() const { CHECK(aclrtSynchronizeStream(stream) == 0); }

  template <class T>
  void reductions(HcclDataType type, uint64_t count) const {
    for (int kind = HCCL_REDUCE_SUM; kind <= HCCL_REDUCE_MIN; ++kind) {
      const auto op = static_cast<HcclReduceOp>(kind);
      std::vector<T> in(count * ranks), all(count), part(count);
      for (uint64_t i = 0; i < in.size(); ++i) in[i] = T(value(number, i));
      CHECK(HcclAllReduce(in.data(), all.data(), count, type, op, comm, stream) == 0);
      CHECK(HcclReduceScatter(in.data(), part.data(), count, type, op, comm, stream) == 0);
      wait();
      for (uint64_t i = 0; i < count; ++i) {
        CHECK(static_cast<double>(all[i]) == reduced(op, ranks, i));
        CHECK(static_cast<double>(part[i]) == reduced(op, ranks, number * count + i));
      }
      CHECK(HcclAllReduce(in.data(), in.data(), count, type, op, comm, stream) == 0);  // in place
      wait();
      for (uint64_t i = 0; i < count; ++i) CHECK(std::memcmp(&in[i], &all[i], sizeof(T)) == 0);
    }
  }

  // Device memory here: the guard words behind it are looked at when it is freed.
  void moves(uint64_t count) const {
    std::vector<int16_t> mine(count);
    for (uint64_t i = 0; i < count; ++i) mine[i] = static_cast<int16_t>(value(number, i));
    const Memory in(mine), all(count * ranks * 2), one(mine);
    const uint32_t root = ranks - 1;
    CHECK(HcclAllGather(in.data, all.data, count, HCCL_DATA_TYPE_INT16, comm, stream) == 0);
    CHECK(HcclBroadcast(one.data, count, HCCL_DATA_TYPE_INT16, root, comm, stream) == 0);
    wait();
    for (uint64_t i = 0; i < count; ++i) {
      CHECK(static_cast<const int16_t*>(one.data)[i] == value(root, i));
      for (uint32_t r = 0; r < ranks; ++r)
        CHECK(static_cast<const int16_t*>(all.data)[r * count + i] == value(r, i));
    }
  }

  void even_exchange(uint64_t count) const {
    std::vector<float> in(count * ranks), out(count * ranks);
    for (uint64_t i = 0; i < in.size(); ++i) in[i] = static_cast<float>(value(number, i));
    CHECK(HcclAlltoAll(in.data(), count, HCCL_DATA_TYPE_FP32, out.data(), count,
                       HCCL_DATA_TYPE_FP32, comm, stream) == 0);
    wait();
    for (uint32_t r = 0; r < ranks; ++r)
      for (uint64_t i = 0; i < count; ++i)
        CHECK(out[r * count + i] == static_cast<float>(value(r, number * count + i)));
  }

  // Rank r sends (3r + 2s) % 5 * unit elements to rank s; places in reverse order, with a gap of
  // one element that nobody may touch.
  void uneven_exchange(uint64_t unit) const {
    auto count = [&](uint32_t from, uint32_t to) { return (3 * from + 2 * to) % 5 * unit; };
    std::vector<uint64_t> send(ranks), send_at(ranks), receive(ranks), receive_at(ranks);
    uint64_t sent = 0, received = 0;
    for (uint32_t r = ranks; r-- > 0;) {
      send[r] = count(number, r);
      send_at[r] = sent;
      sent += send[r] + 1;
      receive[r] = count(r, number);
      receive_at[r] = received;
      received += receive[r] + 1;
    }
    std::vector<uint8_t> in(sent - 1, 250), out(received - 1, 251), want(received - 1, 251);
    for (uint32_t r = 0; r < ranks; ++r) {
      for (uint64_t i = 0; i < send[r]; ++i)
        in[send_at[r] + i] = static_cast<uint8_t>((number * 16 + r * 4 + i) % 199);
      for (uint64_t i = 0; i < receive[r]; ++i)
        want[receive_at[r] + i] = static_cast<uint8_t>((r * 16 + number * 4 + i) % 199);
    }
    CHECK(HcclAlltoAllV(in.data(), send.data(), send_at.data(), HCCL_DATA_TYPE_UINT8, out.data(),
                        receive.data(), receive_at.data(), HCCL_DATA_TYPE_UINT8, comm,
                        stream) == 0);
    // The arrays are read during the call.
    std::fill(send.begin(), send.end(), UINT64_MAX);
    std::fill(receive_at.begin(), receive_at.end(), UINT64_MAX);
    wait();
    CHECK(out == want);
  }

  void nothing() const {
    CHECK(HcclAllReduce(nullptr, nullptr, 0, HCCL_DATA_TYPE_FP32, HCCL_REDUCE_SUM, comm, stream) == 0);
    CHECK(HcclAllGather(nullptr, nullptr, 0, HCCL_DATA_TYPE_FP32, comm, stream) == 0);
    CHECK(HcclBroadcast(nullptr, 0, HCCL_DATA_TYPE_FP32, 0, comm, stream) == 0);
    CHECK(HcclReduceScatter(nullptr, nullptr, 0, HCCL_DATA_TYPE_FP32, HCCL_REDUCE_MAX, comm,
                            stream) == 0);
    CHECK(HcclAlltoAll(nullptr, 0, HCCL_DATA_TYPE_INT8, nullptr, 0, HCCL_DATA_TYPE_INT8, comm,
                       stream) == 0);
    CHECK(HcclBarrier(comm, stream) == 0);
    wait();
  }

  void refused() const {
    float one[2] = {1, 2};
    const uint64_t huge[8] = {UINT64_MAX, UINT64_MAX, UINT64_MAX, UINT64_MAX,
                              UINT64_MAX, UINT64_MAX, UINT64_MAX, UINT64_MAX};
    const Memory small(4);
    const auto no_type = static_cast<HcclDataType>(77);
    const auto no_op = static_cast<HcclReduceOp>(9);
    CHECK(HcclAllReduce(one, one, 1, no_type, HCCL_REDUCE_SUM, comm, stream) != 0);
    CHECK(HcclAllReduce(one, one, 1, HCCL_DATA_TYPE_FP32, no_op, comm, stream) != 0);
    CHECK(HcclAllReduce(one, one, UINT64_MAX, HCCL_DATA_TYPE_FP32, HCCL_REDUCE_SUM, comm, stream) !=
          0);
    CHECK(HcclAllReduce(one, one, 1, HCCL_DATA_TYPE_UINT8, HCCL_REDUCE_SUM, comm, stream) != 0);
    CHECK(HcclAllGather(one, small.data, 1, HCCL_DATA_TYPE_FP32, comm, stream) != 0);  // too small
    CHECK(HcclBroadcast(one, 1, HCCL_DATA_TYPE_FP32, ranks, comm, stream) != 0);
    CHECK(HcclBroadcast(nullptr, 1, HCCL_DATA_TYPE_FP32, 0, comm, stream) != 0);
    CHECK(HcclAlltoAll(one, UINT64_MAX, HCCL_DATA_TYPE_FP32, one, UINT64_MAX, HCCL_DATA_TYPE_FP32,
                       comm, stream) != 0);
    CHECK(HcclAlltoAllV(one, huge, huge, HCCL_DATA_TYPE_FP32, one, huge, huge, HCCL_DATA_TYPE_FP32,
                        comm, stream) != 0);
    CHECK(HcclAlltoAllV(one, nullptr, huge, HCCL_DATA_TYPE_FP32, one, huge, huge,
                        HCCL_DATA_TYPE_FP32, comm, stream) != 0);
    CHECK(HcclBarrier(reinterpret_cast<HcclComm>(uintptr_t{12345}), stream) != 0);
  }
};

void run_rank(const Ranks& group, uint32_t number) {
  const Rank rank(group, number);
  for (const uint64_t count : {uint64_t{1}, uint64_t{5}, uint64_t{1000}}) {
    rank.reductions<int8_t>(HCCL_DATA_TYPE_INT8, count);
    rank.reductions<int16_t>(HCCL_DATA_TYPE_INT16, count);
    rank.reductions<int32_t>(HCCL_DATA_TYPE_INT32, count);
    rank.reductions<int64_t>(HCCL_DATA_TYPE_INT64, count);
    rank.reductions<float>(HCCL_DATA_TYPE_FP32, count);
    rank.reductions<_Float16>(HCCL_DATA_TYPE_FP16, count);
    rank.reductions<Bf16>(HCCL_DATA_TYPE_BFP16, count);
    rank.moves(count);
    rank.even_exchange(count);
    rank.uneven_exchange(count);
  }
  rank.reductions<float>(HCCL_DATA_TYPE_FP32, kMany);
  rank.moves(kMany);
  rank.even_exchange(kMany / 2);
  rank.uneven_exchange(kMany / 2);
  rank.nothing();
  rank.refused();
  rank.moves(3);  // what was refused left nothing behind
}

// Other calls on one rank, or other sizes, fail on all ranks.
void disagree(const Ranks& group, uint32_t number) {
  const Rank rank(group, number);
  std::vector<float> in(8, 1.0f), out(8 * group.count);
  const uint64_t count = number == 0 ? 4 : 8;
  CHECK(HcclAllGather(in.data(), out.data(), count, HCCL_DATA_TYPE_FP32, rank.comm, rank.stream) == 0);
  CHECK(aclrtSynchronizeStream(rank.stream) == kMismatch);
  HcclResult error = 0;
  CHECK(HcclGetCommAsyncError(rank.comm, &error) == 0 && error == HCCL_E_PARA);
}

template <class Body>
void on_all_ranks(uint32_t count, const Body& body) {
  Ranks group{};
  group.count = count;
  CHECK(HcclGetRootInfo(&group.root) == 0);
  std::vector<std::thread> threads;
  for (uint32_t rank = 0; rank < count; ++rank)
    threads.emplace_back([&group, &body, rank] { body(group, rank); });
  for (auto& thread : threads) thread.join();
}

}  // namespace

int main(int argc, char** argv) {
  const auto ranks = static_cast<uint32_t>(argc > 1 ? std::atoi(argv[1]) : 2);
  CHECK(aclInit(nullptr) == 0 && aclrtSetDevice(0) == 0);
  on_all_ranks(ranks, run_rank);
  on_all_ranks(ranks, disagree);
  CHECK(aclFinalize() == 0);
  std::puts("done");
  return 0;
}
