// SPDX-License-Identifier: Apache-2.0
// Coming together: the shared file, attaching to it, waiting for the others, leaving.
#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <thread>

#include "group.h"

namespace xsd {
namespace {

using Clock = std::chrono::steady_clock;
constexpr uint64_t kMagic = 0x58534447524f5550ULL;
constexpr uint64_t kPage = 4096;
constexpr uint64_t kWindowAlign = 2u << 20;

uint64_t round_up(uint64_t value, uint64_t step) { return (value + step - 1) / step * step; }

int open_process(int32_t pid) {
#ifdef SYS_pidfd_open
  return static_cast<int>(::syscall(SYS_pidfd_open, pid, 0));
#else
  (void)pid;
  return -1;
#endif
}

// Removes the name, but only while it still means this file.
void unlink_own(const std::string& path, int file) {
  struct stat own{}, named{};
  if (::fstat(file, &own) == 0 && ::stat(path.c_str(), &named) == 0 && own.st_ino == named.st_ino &&
      own.st_dev == named.st_dev) {
    ::unlink(path.c_str());
  }
}

// Under the lock: room for what collectives of this group will touch. The windows stay sparse.
bool has_room(const std::string& path, uint32_t size) {
  struct statvfs facts{};
  const std::string directory = path.substr(0, path.rfind('/'));
  if (::statvfs(directory.c_str(), &facts) != 0) return true;
  const uint64_t need = (size + 1) * kChunkBytes + sizeof(Header);
  return static_cast<uint64_t>(facts.f_bavail) * facts.f_bsize >= need;
}

}  // namespace

Group::~Group() {
  leave();
  for (int file : pid_files_) {
    if (file >= 0) ::close(file);
  }
}

void Group::layout() {
  counts_at_ = round_up(sizeof(Header), kPage);
  chunks_at_ = round_up(counts_at_ + uint64_t{8} * size_ * size_, kPage);
  windows_at_ = round_up(chunks_at_ + (size_ + 1) * kChunkBytes, kWindowAlign);
  bytes_ = windows_at_ + size_ * round_up(2 * half_bytes_ + kRemoteExtra, kWindowAlign);
}

unsigned char* Group::window(uint32_t rank) const {
  return base_ + windows_at_ + rank * round_up(2 * half_bytes_ + kRemoteExtra, kWindowAlign);
}

uint64_t* Group::counts(uint32_t rank) const {
  return reinterpret_cast<uint64_t*>(base_ + counts_at_) + uint64_t{rank} * size_;
}

// With the file locked: makes or checks the header and takes this rank's place.
HcclResult Group::attach(int file, const std::string& path) {
  struct stat facts{};
  if (::fstat(file, &facts) != 0) return hccl_fail(HCCL_E_SYSCALL, "cannot read %s", path.c_str());
  if (facts.st_nlink == 0) {
    return hccl_fail(HCCL_E_UNAVAIL, "the group of this root info failed or was complete before");
  }
  const bool first = facts.st_size == 0;
  if (first && !has_room(path, size_)) {
    return hccl_fail(HCCL_E_MEMORY, "no room for a group of %u in %s; set XSD_SHM_DIR", size_,
                     path.c_str());
  }
  const uint64_t wanted = first ? bytes_ : static_cast<uint64_t>(facts.st_size);
  if (first && ::ftruncate(file, static_cast<off_t>(bytes_)) != 0) {
    return hccl_fail(HCCL_E_MEMORY, "cannot size %s: %s", path.c_str(), std::strerror(errno));
  }
  void* mapped = ::mmap(nullptr, wanted, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (mapped == MAP_FAILED) {
    return hccl_fail(HCCL_E_MEMORY, "cannot map %llu bytes of %s: %s",
                     static_cast<unsigned long long>(wanted), path.c_str(), std::strerror(errno));
  }
  base_ = static_cast<unsigned char*>(mapped);
  Header& head = *header();
  if (first) {
    head.size = size_;
    head.half_bytes = half_bytes_;
    head.total_bytes = bytes_;
    head.magic.store(kMagic);
  }
  if (head.magic.load() != kMagic || head.size != size_ || head.half_bytes != half_bytes_) {
    const HcclResult code = hccl_fail(
        HCCL_E_PARA, "rank %u joins with %u ranks and %llu MiB, its group has %u and %llu MiB",
        rank_, size_, static_cast<unsigned long long>(half_bytes_ >> 20), head.size,
        static_cast<unsigned long long>(head.half_bytes >> 20));
    bytes_ = wanted;
    if (decide_setup(SetupState::kFailed)) abort(AbortReason::kSetup, rank_);
    return code;
  }
  if (head.setup.load() != static_cast<uint32_t>(SetupState::kGathering)) {
    return hccl_fail(HCCL_E_REMOTE, "the group of this root info failed: %s",
                     describe_abort(abort_word().load(), rank_, size_, header()).c_str());
  }
  RankSlot& mine = head.ranks[rank_];
  if (mine.state.load() != static_cast<uint32_t>(RankState::kAbsent)) {
    const HcclResult code =
        hccl_fail(HCCL_E_PARA, "rank %u is taken by process %d already", rank_, mine.pid.load());
    if (decide_setup(SetupState::kFailed)) abort(AbortReason::kSetup, rank_);
    return code;
  }
  mine.pid.store(::getpid());
  mine.started.store(process_start(::getpid()));
  mine.state.store(static_cast<uint32_t>(RankState::kAttached));
  joined_ = true;
  if (head.attached.fetch_add(1) + 1 == size_) {
    unlink_own(path, file);  // everybody has it: from here on no death can leave a file behind
    decide_setup(SetupState::kComplete);
  }
  return HCCL_SUCCESS;
}

// True when this call decided it.
bool Group::decide_setup(SetupState outcome) {
  auto undecided = static_cast<uint32_t>(SetupState::kGathering);
  return header()->setup.compare_exchange_strong(undecided, static_cast<uint32_t>(outcome));
}

HcclResult Group::wait_for_all(const std::string& path, int64_t timeout_ms) {
  const auto start = Clock::now();
  for (;;) {
    const auto setup = static_cast<SetupState>(header()->setup.load());
    if (setup == SetupState::kComplete) return HCCL_SUCCESS;
    if (setup == SetupState::kFailed && abort_word().load() != 0) {
      return hccl_fail(HCCL_E_REMOTE, "the group did not come together: %s",
                       describe_abort(abort_word().load(), rank_, size_, header()).c_str());
    }
    uint32_t missing = 0, first_missing = kMaxRanks;
    for (uint32_t r = 0; r < size_; ++r) {
      const RankSlot& other = slot(r);
      if (other.state.load() == static_cast<uint32_t>(RankState::kAbsent)) {
        if (missing++ == 0) first_missing = r;
      } else if (process_gone(other.pid.load(), other.started.load()) &&
                 decide_setup(SetupState::kFailed)) {
        abort(AbortReason::kDied, r);
      }
    }
    if (Clock::now() - start >= std::chrono::milliseconds(timeout_ms) && missing > 0 &&
        decide_setup(SetupState::kFailed)) {
      abort(AbortReason::kSetup, first_missing);
      return hccl_fail(HCCL_E_TIMEOUT,
                       "after %lld ms %u of %u ranks are missing, first rank %u (group %s; "
                       "HCCL_CONNECT_TIMEOUT sets the limit in seconds)",
                       static_cast<long long>(timeout_ms), missing, size_, first_missing,
                       path.c_str());
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
}

HcclResult Group::open(const std::string& path, uint32_t size, uint32_t rank, uint64_t half_bytes,
                       int64_t timeout_ms) {
  size_ = size;
  rank_ = rank;
  half_bytes_ = half_bytes;
  layout();
  const int file = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (file < 0) {
    return hccl_fail(HCCL_E_SYSCALL, "cannot open %s: %s (XSD_SHM_DIR names the directory)",
                     path.c_str(), std::strerror(errno));
  }
  ::flock(file, LOCK_EX);
  HcclResult code = attach(file, path);
  ::flock(file, LOCK_UN);
  if (code == HCCL_SUCCESS) {
    code = wait_for_all(path, timeout_ms);
  }
  if (code != HCCL_SUCCESS) {
    unlink_own(path, file);
    ::close(file);
    leave();
    return code;
  }
  ::close(file);
  pid_files_.assign(size_, -1);
  for (uint32_t r = 0; r < size_; ++r) {
    if (slot(r).pid.load() != ::getpid()) pid_files_[r] = open_process(slot(r).pid.load());
  }
  return HCCL_SUCCESS;
}

void Group::say_left() {
  if (joined_) slot(rank_).state.store(static_cast<uint32_t>(RankState::kLeft));
}

void Group::leave() {
  if (left_ || base_ == nullptr) return;
  left_ = true;
  closing_.store(true);
  say_left();
  void* kept = ::mmap(base_, bytes_, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  if (kept != MAP_FAILED) {
    abort_word().store(static_cast<uint32_t>(AbortReason::kOther) << 24);
  }
}

}  // namespace xsd
