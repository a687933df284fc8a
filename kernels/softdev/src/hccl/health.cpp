// SPDX-License-Identifier: Apache-2.0
// Health of a group: dead peers, the abort word, and waits that always end.
#include <poll.h>
#include <sched.h>

#include <thread>

#include "group.h"

namespace xsd {
namespace {

using Clock = std::chrono::steady_clock;

// Abort word: reason in bits 24-31, reporting rank + 1 in bits 12-23, rank it is about + 1 in bits
// 0-11.
uint32_t make_word(AbortReason reason, uint32_t by, uint32_t about) {
  return (static_cast<uint32_t>(reason) << 24) | ((by + 1) << 12) | ((about + 1) & 0xfff);
}

}  // namespace

std::string describe_abort(uint32_t word, uint32_t own_rank, uint32_t own_size,
                           const Header* header) {
  const auto reason = static_cast<AbortReason>(word >> 24);
  const uint32_t by = ((word >> 12) & 0xfff) - 1, about = (word & 0xfff) - 1;
  auto name = [&](uint32_t rank) {
    if (rank >= own_size) return std::string("a rank");
    std::string text = "rank " + std::to_string(rank);
    if (rank == own_rank) return text + " (this one)";
    return text + " (process " + std::to_string(header->ranks[rank].pid.load()) + ")";
  };
  switch (reason) {
    case AbortReason::kDied:
      return "suspected remote error: " + name(about) + " died";
    case AbortReason::kTimeout:
      return "suspected remote error: " + name(by) + " waited too long for " + name(about);
    case AbortReason::kMismatch:
      return name(by) + " found another collective or other sizes on " + name(about);
    case AbortReason::kSetup:
      return name(by) + " gave up the set-up because of " + name(about);
    case AbortReason::kWindowBusy:
      return name(by) + " had two launches at a time on one window";
    default:
      return "the group was aborted (word " + std::to_string(word) + ")";
  }
}

void Group::abort(AbortReason reason, uint32_t about) {
  uint32_t healthy = 0;
  abort_word().compare_exchange_strong(healthy, make_word(reason, rank_, about));
}

bool Group::gone(uint32_t rank) {
  RankSlot& other = slot(rank);
  if (other.state.load() != static_cast<uint32_t>(RankState::kAttached)) return false;
  if (pid_files_[rank] >= 0) {
    pollfd query{pid_files_[rank], POLLIN, 0};
    if (::poll(&query, 1, 0) <= 0) return false;
  } else if (!process_gone(other.pid.load(), other.started.load())) {
    return false;
  }
  // It may have left in good order just before it ended.
  return other.state.load() == static_cast<uint32_t>(RankState::kAttached);
}

uint32_t Group::check() {
  std::lock_guard<std::mutex> lock(check_mutex_);
  if (closing() || pid_files_.empty()) return 0;
  const uint32_t word = abort_word().load();
  if (word != 0) return word;
  const int32_t own = slot(rank_).pid.load();
  for (uint32_t r = 0; r < size_; ++r) {
    if (slot(r).pid.load() != own && gone(r)) {
      abort(AbortReason::kDied, r);
      break;
    }
  }
  return abort_word().load();
}

int Group::report_abort(const char* what) {
  const uint32_t word = abort_word().load();
  xsdTaskError("%s: %s", what, describe_abort(word, rank_, size_, header()).c_str());
  switch (static_cast<AbortReason>(word >> 24)) {
    case AbortReason::kMismatch:
      return kAicpuException;
    case AbortReason::kWindowBusy:
      return kVectorException;
    default:
      return kSuspectRemote;
  }
}

int Group::wait(uint32_t peer, const char* what, const std::function<bool()>& ready) {
  const auto start = Clock::now();
  const auto limit = std::chrono::milliseconds(xsdSettings()->wait_timeout_ms);
  auto next_check = start + std::chrono::milliseconds(2);
  for (uint64_t spin = 0;; ++spin) {
    if (ready()) return 0;
    // More ranks than cores: give the processor away at once, and sleep when it takes long.
    if (spin < 256) {
      sched_yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(spin < 2048 ? 20 : 200));
    }
    if (closing()) {
      xsdTaskError("%s: the communicator was destroyed while it was in use", what);
      return kSuspectRemote;
    }
    const auto now = Clock::now();
    if (now < next_check) continue;
    next_check = now + std::chrono::milliseconds(5);
    const bool left =
        peer < size_ && slot(peer).state.load() == static_cast<uint32_t>(RankState::kLeft);
    const uint32_t word = check();
    // What it waited for may have happened just before the peer ended.
    if ((left || word != 0) && ready()) return 0;
    if (word != 0) return report_abort(what);
    if (left) {
      xsdTaskError("%s: suspected remote error: rank %u left the communicator", what, peer);
      return kSuspectRemote;
    }
    if (now - start >= limit) {
      if (ready()) return 0;
      abort(AbortReason::kTimeout, peer < size_ ? peer : kMaxRanks);
      xsdTaskError("%s: no answer from rank %d within %u ms (XSD_WAIT_TIMEOUT_MS)", what,
                   peer < size_ ? static_cast<int>(peer) : -1, xsdSettings()->wait_timeout_ms);
      return kVectorTimeout;
    }
  }
}

}  // namespace xsd
