// SPDX-License-Identifier: Apache-2.0
// What the test programs share: checks, bf16, device memory, tensors, forked ranks.
#pragma once

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <vector>

#include "acl_rt.h"
#include "aclnn_base.h"
#include "hccl.h"

#define CHECK(condition)                                                       \
  do {                                                                         \
    if (!(condition)) {                                                        \
      const char* text = aclGetRecentErrMsg();                                 \
      std::fprintf(stderr, "%s:%d: %s (%s)\n", __FILE__, __LINE__, #condition, \
                   text == nullptr ? "no text" : text);                        \
      std::abort();                                                            \
    }                                                                          \
  } while (false)

inline uint16_t narrow(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

inline float widen(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return value;
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

inline aclTensor* describe(const Memory& memory, std::vector<int64_t> shape, aclDataType dtype,
                    aclFormat format = ACL_FORMAT_ND) {
  std::vector<int64_t> strides(shape.size(), 1);
  for (size_t i = shape.size() - 1; i > 0; --i) strides[i - 1] = strides[i] * shape[i];
  aclTensor* made = aclCreateTensor(shape.data(), shape.size(), dtype, strides.data(), 0, format,
                                    shape.data(), shape.size(), memory.data);
  CHECK(made != nullptr);
  return made;
}

inline aclTensorList* list(const std::vector<Memory>& memories, const std::vector<int64_t>& shape,
                    aclDataType dtype, aclFormat format = ACL_FORMAT_ND) {
  std::vector<const aclTensor*> members;
  for (const Memory& one : memories) members.push_back(describe(one, shape, dtype, format));
  aclTensorList* made = aclCreateTensorList(members.data(), members.size());
  CHECK(made != nullptr);
  return made;
}

// One communicator per forked rank; rank 0 makes the root info and the others wait for it.
struct RootInfo {
  std::atomic<int> ready{0};
  HcclRootInfo root;

  HcclComm join(uint32_t rank, uint32_t ranks) {
    if (rank == 0) {
      CHECK(HcclGetRootInfo(&root) == 0);
      ready.store(1, std::memory_order_release);
    }
    while (ready.load(std::memory_order_acquire) == 0) usleep(1000);
    HcclComm comm = nullptr;
    CHECK(HcclCommInitRootInfo(ranks, &root, rank, &comm) == 0);
    return comm;
  }
};

// Runs rank(shared, number) in processes forked before anything of the device is used; the exit
// code of main. `Shared` is memory of all of them.
template <class Shared, class Rank>
int fork_ranks(uint32_t ranks, const Rank& rank) {
  void* place = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS,
                     -1, 0);
  if (place == MAP_FAILED) return 2;
  auto* shared = new (place) Shared{};
  std::vector<pid_t> children;
  for (uint32_t number = 0; number < ranks; ++number) {
    const pid_t pid = fork();
    if (pid == 0) {
      rank(shared, number);
      std::exit(0);
    }
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
