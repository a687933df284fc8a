// SPDX-License-Identifier: Apache-2.0
// One communicator's shared memory: who is in it, whether it is healthy, and the mapped windows.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "hccl.h"
#include "xsd.h"

namespace xsd {

constexpr uint32_t kMaxRanks = XSD_MAX_RANKS;
constexpr uint64_t kChunkBytes = 512u << 10;  // per rank, for collectives
constexpr uint64_t kRemoteExtra = 1u
                                  << 20;  // a peer's span is reported this much longer than it is

// Device codes of rt_error_codes.h.
constexpr int kAicpuException = 507018;
constexpr int kVectorTimeout = 507034;
constexpr int kVectorException = 507035;
constexpr int kSuspectRemote = 507057;

enum class RankState : uint32_t { kAbsent = 0, kAttached = 1, kLeft = 2 };

enum class SetupState : uint32_t { kGathering = 0, kComplete = 1, kFailed = 2 };

enum class AbortReason : uint32_t {
  kNone = 0,
  kDied = 1,        // `about` is gone
  kTimeout = 2,     // `by` waited too long for `about`
  kMismatch = 3,    // `by` called something else than `about`
  kSetup = 4,       // the group never came together
  kWindowBusy = 5,  // `by` launched twice at a time on its window
  kOther = 255
};

struct alignas(64) RankSlot {
  std::atomic<int32_t> pid;
  std::atomic<uint64_t> started;  // of the process, so that a reused pid is noticed
  std::atomic<uint32_t> state;
  std::atomic<uint64_t> phase;  // barriers passed or entered
  uint64_t signature[4];        // of the collective it is in: written before, read after a barrier
};

struct Header {
  std::atomic<uint64_t> magic;
  uint32_t size;
  uint64_t half_bytes;
  uint64_t total_bytes;
  std::atomic<uint32_t> attached;
  std::atomic<uint32_t> setup;  // SetupState: decided once, so that all ranks agree on the outcome
  alignas(64) std::atomic<uint32_t> abort_word;  // 0 = healthy
  RankSlot ranks[kMaxRanks];
};

class Group {
 public:
  ~Group();

  // Attaches to the file, creating it when first, and waits for all ranks. Sets the error text.
  HcclResult open(const std::string& path, uint32_t size, uint32_t rank, uint64_t half_bytes,
                  int64_t timeout_ms);
  // Says goodbye and gives the shared pages back; addresses stay valid (private zero pages), so
  // that late users of them do not crash. Idempotent.
  void leave();
  void say_left();  // only the first half: the others know, the memory stays

  uint32_t size() const { return size_; }
  uint32_t rank() const { return rank_; }
  uint64_t half_bytes() const { return half_bytes_; }
  unsigned char* window(uint32_t rank) const;
  unsigned char* chunk(uint32_t rank) const { return base_ + chunks_at_ + rank * kChunkBytes; }
  unsigned char* result() const { return base_ + chunks_at_ + size_ * kChunkBytes; }
  uint64_t* counts(uint32_t rank) const;
  RankSlot& slot(uint32_t rank) const { return header()->ranks[rank]; }
  std::atomic<uint32_t>& abort_word() const { return header()->abort_word; }

  // Looks for dead peers. Returns the abort word.
  uint32_t check();
  void abort(AbortReason reason, uint32_t about);
  // Device code and task text for the current abort word.
  int report_abort(const char* what);
  // Waits for something `peer` has to do (XSD_ANY_PEER: anyone). 0 or a device code with task text.
  int wait(uint32_t peer, const char* what, const std::function<bool()>& ready);
  void close_waits() { closing_.store(true); }
  bool closing() const { return closing_.load(); }

 private:
  Header* header() const { return reinterpret_cast<Header*>(base_); }
  bool gone(uint32_t rank);
  void layout();
  HcclResult attach(int file, const std::string& path);
  bool decide_setup(SetupState outcome);
  HcclResult wait_for_all(const std::string& path, int64_t timeout_ms);

  unsigned char* base_ = nullptr;
  uint64_t bytes_ = 0;
  uint64_t counts_at_ = 0, chunks_at_ = 0, windows_at_ = 0;
  uint32_t size_ = 0, rank_ = 0;
  uint64_t half_bytes_ = 0;
  bool left_ = false, joined_ = false;
  std::atomic<bool> closing_{false};
  std::mutex check_mutex_;
  std::vector<int> pid_files_;  // one pidfd per rank, -1 = own process or not available
};

// Text of an abort word.
std::string describe_abort(uint32_t word, uint32_t own_rank, uint32_t own_size,
                           const Header* header);
// Is the process gone (or a zombie, or another one under the same number)?
bool process_gone(int32_t pid, uint64_t started);
uint64_t process_start(int32_t pid);  // 0 = no such process
// Path for a new group, and removal of files that an earlier, killed group left behind.
std::string new_group_path();

HcclResult hccl_fail(HcclResult code, const char* format, ...)
    __attribute__((format(printf, 2, 3)));

}  // namespace xsd
