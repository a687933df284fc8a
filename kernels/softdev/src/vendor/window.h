// SPDX-License-Identifier: Apache-2.0
// The peer-visible window of one rank, and waiting on it.
//
//   0          10 MiB              reserved; WindowHeader is in its last page
//   10 MiB     bs * K * row        rows sent by this rank, sorted by expert ("A"); peers pull
//   after A    bs * K * 4          integer modes only: kept free, scales are inside the rows
//   then       bs * K * H * 2      results, in the same order ("D"); peers push
//   tail       EP rows of int32    token-per-expert counts, one row per source rank ("TPE")
//   last       EP * 512            barrier flags, one 512-byte slot per peer
//
// A and D depend on bs, H and K, which must therefore be equal on all ranks. TPE and flags sit at
// the tail so that they do not. This layout reserves ceil128(EP*128 + 1) counts per TPE row, the
// amount the operator's own size check counts; its 9.1.0 kernel lays out one column block per row
// less, so that with 128 experts per rank the counts run into the flags.
//
// Rows are H bf16 values (2 * H bytes); with int8 weights H int8 and a scale, H + 32 bytes apart;
// with int4 weights H / 2 bytes of high parts, H / 2 of low parts and a scale, H + 512 bytes apart.
// The size check counts H + 512 in both integer modes.
#pragma once

#include "mega_moe.h"

namespace megamoe {

constexpr uint64_t kReservedBytes = 10ull << 20;
constexpr uint64_t kLineBytes = 512;
constexpr int64_t kLineInts = 128;
constexpr int32_t kCountTag = 0x800000;  // makes a count of zero visible to the poller

// Bytes one half of the communicator's buffer must have.
inline int64_t tpe_bytes(int64_t ranks) { return ranks * align_up(ranks * 128 + 1, 128) * 4; }
// Bytes of A and what follows it up to D.
inline int64_t sent_bytes(int64_t tokens, int64_t topk, int64_t hidden, Quant quant) {
  return tokens * topk * (quant == Quant::kNone ? 2 * hidden : hidden + 512 + 4);
}
inline int64_t window_need(int64_t tokens, int64_t topk, int64_t hidden, int64_t ranks,
                           Quant quant) {
  return tpe_bytes(ranks) + sent_bytes(tokens, topk, hidden, quant) + tokens * topk * hidden * 2 +
         ranks * static_cast<int64_t>(kLineBytes) + static_cast<int64_t>(kReservedBytes);
}
inline int64_t row_stride(int64_t hidden, Quant quant) {
  return quant == Quant::kNone ? 2 * hidden : hidden + (quant == Quant::kInt8 ? 32 : 512);
}

// What all ranks of a launch must agree on; compared in strict mode.
struct LaunchShape {
  int64_t tokens, hidden, topk, inter, local_experts, max_recv, moe_expert_num, window_bytes;
  int64_t weight_bits;
};

// The software device's own page inside the reserved region. All zero in a fresh window.
struct WindowHeader {
  uint32_t poison;    // 0 healthy, 1 being written, 2 a launch was aborted
  int32_t culprit;    // rank that aborted
  uint32_t barrier;   // kind of barrier the flags are in use for: 0 none yet, 1 toggle, 2 counter
  LaunchShape shape;  // of the owner's current launch
  char reason[512];
};

struct Layout {
  int64_t sent_row_bytes = 0, result_row_bytes = 0;
  uint64_t a = 0, d = 0, tpe = 0, flags = 0;
  int64_t tpe_row_ints = 0;
};

class Window {
 public:
  // 0, or a device code with the text set. Strict mode refuses a poisoned window, and one that
  // another launch is using, which stays so until the destructor runs.
  int open(const Problem& problem);
  Window() = default;
  Window(const Window&) = delete;
  Window& operator=(const Window&) = delete;
  ~Window();

  int64_t rank() const { return res_->rank; }
  char* sent(int64_t rank, int64_t row) const;        // row of A
  uint16_t* result(int64_t rank, int64_t row) const;  // row of D
  int32_t* tpe_row(int64_t rank, int64_t source) const;
  int64_t tpe_row_ints() const { return layout_.tpe_row_ints; }

  // Ends this launch with `code` and a text. Strict mode also marks every window of the group, so
  // that peers stop and later launches fail; the real protocol leaves peers spinning and flags
  // dirty.
  int abort(int code, const char* fmt, ...) __attribute__((format(printf, 3, 4)));

  void publish_shape();
  // Strict mode: a device code when the ranks' launches do not fit together.
  int check_shapes();
  // Wait until rank `source`'s counts have arrived.
  int wait_counts(int64_t source);
  // Barrier over all ranks: with int8 weights a counter per peer, otherwise a toggle. The two use
  // the same bytes differently, so a window serves one kind only; strict mode refuses the other.
  int barrier();

 private:
  char* base(int64_t rank) const { return reinterpret_cast<char*>(res_->window[rank]); }
  WindowHeader* header(int64_t rank) const;
  uint32_t* flag(int64_t owner, int64_t writer) const;
  LaunchShape shape() const;
  int wait(const uint32_t* word, bool any, uint32_t want, int64_t peer);
  int toggle_barrier();
  int counter_barrier();
  int check_barrier_kind();
  int poisoned(bool at_start) const;
  void poison_all(const char* text);

  const Problem* problem_ = nullptr;
  const XsdOpResCtx* res_ = nullptr;
  Layout layout_;
  bool entered_ = false;
};

}  // namespace megamoe
