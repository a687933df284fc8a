// SPDX-License-Identifier: Apache-2.0
#include "window.h"

#include <chrono>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <thread>

namespace megamoe {
namespace {

using Long = long long;  // for printf

struct Condition {
  const uint32_t* word;
  bool any;  // anything but zero will do
  uint32_t want;
  const uint32_t* poison;  // ends the wait as well, nullptr when not strict
};

int holds(void* arg) {
  const Condition& c = *static_cast<Condition*>(arg);
  const uint32_t now = __atomic_load_n(c.word, __ATOMIC_ACQUIRE);
  if (c.any ? now != 0 : now == c.want) return 1;
  return c.poison != nullptr && __atomic_load_n(c.poison, __ATOMIC_ACQUIRE) != 0;
}

uint32_t toggle_bits(bool up) {
  const float value = up ? 1.0f : 0.0f;
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

}  // namespace

Window::~Window() {
  if (entered_) xsdWindowLeave(res_);
}

int Window::open(const Problem& problem) {
  problem_ = &problem;
  const View& context = problem.context;
  if (context.dims[0] < 4 || context.strides[0] != 1 || xsdCheckRange(context.data, 16) < 0 || xsdMapped(context.data, 16) == 0) {
    xsdTaskError(
        "aclnnMegaMoe: context has %lld int32 with stride %lld; it needs at least 4, contiguous, in "
        "memory that is there",
        Long(context.dims[0]), Long(context.strides[0]));
    return kException;
  }
  // Offset 8 of the context block is the only field the A3 kernel reads.
  std::memcpy(&res_, context.data + 8, sizeof res_);
  const int code = xsdWindowEnter(res_);
  if (code != 0) return code;
  entered_ = true;

  const int64_t ranks = problem.ranks;
  if (res_->size != static_cast<uint32_t>(ranks)) {
    return abort(kException, "ep_world_size=%lld, but the context belongs to a group of %u ranks",
                 Long(ranks), res_->size);
  }
  const int64_t bytes = static_cast<int64_t>(res_->window_bytes);
  layout_.sent_row_bytes = row_stride(problem.hidden, problem.quant);
  layout_.result_row_bytes = problem.hidden * 2;
  layout_.a = kReservedBytes;
  layout_.d = layout_.a + static_cast<uint64_t>(sent_bytes(problem.tokens, problem.topk,
                                                           problem.hidden, problem.quant));
  const int64_t end =
      static_cast<int64_t>(layout_.d) + problem.tokens * problem.topk * layout_.result_row_bytes;
  const int64_t flags = (bytes - ranks * static_cast<int64_t>(kLineBytes)) / 512 * 512;
  const int64_t tpe = flags - tpe_bytes(ranks);
  if (end > tpe)  // on hardware an access outside the window
    return abort(
        kException, "the window has %lld bytes, this launch needs %lld; cclBufferSize said %lld",
        Long(bytes), Long(window_need(problem.tokens, problem.topk, problem.hidden, ranks, problem.quant)),
        Long(problem.ccl_buffer_size));
  layout_.flags = static_cast<uint64_t>(flags);
  layout_.tpe = static_cast<uint64_t>(tpe);
  layout_.tpe_row_ints = align_up(ranks * problem.local_experts + 1, kLineInts);
  if (!xsdSettings()->strict) return 0;
  if (problem.ccl_buffer_size / 2 > bytes)
    return abort(kException, "cclBufferSize=%lld, but the communicator's buffer has %lld bytes",
                 Long(problem.ccl_buffer_size), Long(2 * bytes));
  const int dirty = poisoned(true);
  return dirty != 0 ? dirty : check_barrier_kind();
}

WindowHeader* Window::header(int64_t rank) const {
  static_assert(sizeof(WindowHeader) <= 4096, "the header keeps to one page");
  return reinterpret_cast<WindowHeader*>(base(rank) + kReservedBytes - 4096);
}

char* Window::sent(int64_t rank, int64_t row) const {
  return base(rank) + layout_.a + static_cast<uint64_t>(row * layout_.sent_row_bytes);
}

uint16_t* Window::result(int64_t rank, int64_t row) const {
  return reinterpret_cast<uint16_t*>(base(rank) + layout_.d +
                                     static_cast<uint64_t>(row * layout_.result_row_bytes));
}

int32_t* Window::tpe_row(int64_t rank, int64_t source) const {
  return reinterpret_cast<int32_t*>(base(rank) + layout_.tpe) + source * layout_.tpe_row_ints;
}

uint32_t* Window::flag(int64_t owner, int64_t writer) const {
  return reinterpret_cast<uint32_t*>(base(owner) + layout_.flags +
                                     static_cast<uint64_t>(writer) * kLineBytes);
}

int Window::abort(int code, const char* fmt, ...) {
  char text[448];
  va_list args;
  va_start(args, fmt);
  std::vsnprintf(text, sizeof text, fmt, args);
  va_end(args);
  xsdTaskError("aclnnMegaMoe, rank %u: %s", res_->rank, text);
  if (xsdSettings()->strict) poison_all(text);
  return code;
}

void Window::poison_all(const char* text) {
  if (res_->window_bytes < kReservedBytes) return;  // too small to hold the header
  for (uint32_t r = 0; r < res_->size; ++r) {
    WindowHeader* h = header(r);
    uint32_t healthy = 0;  // the first reason stays: later ones are its consequences
    if (!__atomic_compare_exchange_n(&h->poison, &healthy, 1u, false, __ATOMIC_ACQ_REL,
                                     __ATOMIC_ACQUIRE))
      continue;
    h->culprit = static_cast<int32_t>(res_->rank);
    std::snprintf(h->reason, sizeof h->reason, "%s", text);
    __atomic_store_n(&h->poison, 2u, __ATOMIC_RELEASE);
  }
}

int Window::poisoned(bool at_start) const {
  const WindowHeader* h = header(rank());
  uint32_t state = __atomic_load_n(&h->poison, __ATOMIC_ACQUIRE);
  if (state == 0) return 0;
  // The reason follows at once, unless its writer dies meanwhile.
  for (int tries = 0; state == 1 && tries < 100; ++tries) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    state = __atomic_load_n(&h->poison, __ATOMIC_ACQUIRE);
  }
  const char* reason = state == 2 ? h->reason : "(reason not written yet)";
  const int culprit = state == 2 ? h->culprit : -1;
  if (at_start) {
    xsdTaskError(
        "aclnnMegaMoe, rank %u: the window is dirty since rank %d aborted a launch: %s; rebuild "
        "the "
        "communicator, or zero the whole buffer on every rank",
        res_->rank, culprit, reason);
  } else {
    xsdTaskError("aclnnMegaMoe, rank %u: suspected remote error, rank %d aborted this launch: %s",
                 res_->rank, culprit, reason);
  }
  return culprit == static_cast<int>(res_->rank) ? kException : kRemoteError;
}

LaunchShape Window::shape() const {
  const Problem& p = *problem_;
  return {p.tokens,        p.hidden,   p.topk,           p.inter,
          p.local_experts, p.max_recv, p.moe_expert_num, static_cast<int64_t>(res_->window_bytes),
          p.quant == Quant::kNone ? 16 : static_cast<int64_t>(p.quant)};
}

void Window::publish_shape() {
  // Plain store: the release of the counts that follow publishes it.
  header(rank())->shape = shape();
}

int Window::check_shapes() {
  static const char* const names[] = {
      "bs",         "H", "K", "I", "experts per rank", "max_recv_token_num", "moe_expert_num",
      "window size", "bits of a weight"};
  constexpr int fields = static_cast<int>(sizeof names / sizeof names[0]);
  static_assert(sizeof(LaunchShape) == fields * sizeof(int64_t), "one name per field");
  int64_t mine[fields], theirs[fields];
  const LaunchShape own = shape();
  std::memcpy(mine, &own, sizeof own);
  for (int64_t peer = 0; peer < problem_->ranks; ++peer) {
    std::memcpy(theirs, &header(peer)->shape, sizeof own);
    for (int i = 0; i < fields; ++i) {
      if (mine[i] == theirs[i]) continue;
      return abort(kException,
                   "%s=%lld here but %lld on rank %lld; it must be equal on all ranks, or window "
                   "offsets differ and results are corrupted",
                   names[i], Long(mine[i]), Long(theirs[i]), Long(peer));
    }
  }
  return 0;
}

int Window::wait(const uint32_t* word, bool any, uint32_t want, int64_t peer) {
  const bool strict = xsdSettings()->strict;
  Condition condition = {word, any, want, strict ? &header(rank())->poison : nullptr};
  const int code = xsdWaitPeer(res_, static_cast<uint32_t>(peer), holds, &condition);
  if (code != 0) {
    // The peers hear the cause: this rank may have waited for another one than the one that died.
    if (strict) poison_all(xsdTaskErrorText());
    return code;
  }
  // The wait also ends when a peer aborts; then the word itself may still be missing.
  condition.poison = nullptr;
  return holds(&condition) ? 0 : poisoned(false);
}

int Window::wait_counts(int64_t source) {
  const int32_t* row = tpe_row(rank(), source);
  for (int64_t i = 0; i < layout_.tpe_row_ints; i += kLineInts) {
    const int code = wait(reinterpret_cast<const uint32_t*>(row + i), true, 0, source);
    if (code != 0) return code;
  }
  return 0;
}

int Window::check_barrier_kind() {
  uint32_t* kind = &header(rank())->barrier;
  const uint32_t mine = problem_->quant == Quant::kInt8 ? 2 : 1;
  if (*kind == 0) *kind = mine;
  if (*kind == mine) return 0;
  return abort(kException,
               "the window's flags are in use for launches with %s weights, this one has %s; the two "
               "kinds synchronise by different words. Use a communicator of its own for each",
               *kind == 2 ? "int8" : "bf16 or int4", mine == 2 ? "int8" : "bf16 or int4");
}

int Window::barrier() {
  return problem_->quant == Quant::kInt8 ? counter_barrier() : toggle_barrier();
}

int Window::toggle_barrier() {
  // One barrier per launch, and a launch's counts arrive only after its sender has left the
  // previous barrier: no rank can run a second toggle past a peer that has not yet seen the first.
  // The second word of the own slot keeps the state from launch to launch.
  uint32_t* state = flag(rank(), rank()) + 1;
  const uint32_t want = toggle_bits(*state == 0);
  *state = want;
  for (int64_t i = 0; i < problem_->ranks; ++i) {
    const int64_t peer = (rank() + i) % problem_->ranks;
    __atomic_store_n(flag(peer, rank()), want, __ATOMIC_RELEASE);
  }
  for (int64_t peer = 0; peer < problem_->ranks; ++peer) {
    const int code = wait(flag(rank(), peer), false, want, peer);
    if (code != 0) return code;
  }
  return 0;
}

int Window::counter_barrier() {
  // Slots of 64 bytes, one per peer, and behind them this rank's own number of barriers. The
  // operator also accepts a peer that is one ahead; here none can be, as in toggle_barrier.
  char* flags = base(rank()) + layout_.flags;
  const auto slot = [](char* from, int64_t index) {
    return reinterpret_cast<uint32_t*>(from + index * 64);
  };
  const uint32_t want = ++*slot(flags, problem_->ranks);
  for (int64_t i = 0; i < problem_->ranks; ++i) {
    const int64_t peer = (rank() + i) % problem_->ranks;
    __atomic_store_n(slot(base(peer) + layout_.flags, rank()), want, __ATOMIC_RELEASE);
  }
  for (int64_t peer = 0; peer < problem_->ranks; ++peer) {
    const int code = wait(slot(flags, peer), false, want, peer);
    if (code != 0) return code;
  }
  return 0;
}

}  // namespace megamoe
