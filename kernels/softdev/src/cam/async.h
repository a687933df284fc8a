// SPDX-License-Identifier: Apache-2.0
// Shapes and window layouts of the four asynchronous CAM operators. World order is Attention first:
// ranks [0, A) are Attention, [A, A+F) are FFN. One walk yields both size and offsets.
#pragma once

#include "cam.h"

namespace cam {

// "slots" are the local expert slots of one FFN rank: R routed ones, and in the older operator set
// one more, slot 0, for the shared expert.
struct AsyncShape {
  int64_t max_seq = 0, batch = 0, hidden = 0, topk = 0, ffn = 0, attn = 0, slots = 0, rank = 0,
          tp = 1;
  int64_t quant = 0, layer = 0;
  int64_t shared = 0;  // 1: slot 0 is the shared expert
  int64_t routed() const { return slots - shared; }
  int64_t info_count() const { return 5 + tp + slots * tp; }
};

constexpr int64_t kMaxSeq = 262144;
constexpr uint64_t kMaxAiv = 48;
int64_t recv_capacity(int* status, const char* op);  // floor(262144 * BATCH_SIZE_FACTOR)

// One Attention rank's slot in an FFN window: header, counts, chunk flags, tokens, token indices.
struct FfnLayout {
  uint64_t counts, chunk, tokens, index, bytes, token_bytes;
  explicit FfnLayout(const AsyncShape& s) {
    const uint64_t rows = static_cast<uint64_t>(s.max_seq / s.tp);
    token_bytes = static_cast<uint64_t>(s.quant ? s.hidden + 32 : s.hidden * 2);
    counts = align32(5 * 8);
    chunk = counts + align32(4 * static_cast<uint64_t>(s.slots));
    tokens = chunk + align32(4 * static_cast<uint64_t>(s.slots));
    index = tokens + align32(token_bytes * rows);
    bytes = index + align32(2 * rows * static_cast<uint64_t>(s.topk + s.shared));
  }
  uint64_t slot(int64_t attn_rank) const { return bytes * static_cast<uint64_t>(attn_rank); }
};
// Header words of a slot: [0] flag = rows + 1, [2] layer, [3] rows sent to lower FFN ranks.
enum HeaderWord { kFlag = 0, kLayer = 2, kPrefix = 3 };

// An Attention window: own statistics of the last dispatch, one status per FFN rank, result rows.
struct AttnLayout {
  uint64_t status, rows, bytes;
  explicit AttnLayout(const AsyncShape& s) {
    const uint64_t ffn = static_cast<uint64_t>(s.ffn);
    const uint64_t cells = ffn + ffn * static_cast<uint64_t>(s.slots);
    status = align32(4 * cells * kMaxAiv);
    rows = status + align32(4 * ffn);
    bytes = rows + static_cast<uint64_t>(s.batch * (s.topk + s.shared) * s.hidden) * 2;
  }
};

// Where a token's j-th copy goes: routed copies by id; the shared copy to one FFN rank, tokens
// being split over the FFN ranks in equal runs (the older set's rule is not public: an assumption).
struct Target {
  int64_t ffn, slot;
};
inline Target target(const AsyncShape& s, const int32_t* ids, int64_t token, int64_t j) {
  if (j == s.topk) return {token * s.ffn / s.batch, 0};
  const int64_t id = ids[token * s.topk + j];
  return {id / s.routed(), s.shared + id % s.routed()};
}

void check_shape(Args& args, const AsyncShape& s, bool attention);

}  // namespace cam
