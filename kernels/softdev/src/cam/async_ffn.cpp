// SPDX-License-Identifier: Apache-2.0
// The FFN side of the asynchronous operators: dispatch_recv and combine_send.
//
// dispatch_recv takes all vector cores and spins. It reads and writes window state (cursor, chunk
// flags), so receives of one rank must follow one another on one stream. The device, not the host,
// decides which Attention group comes next: arrival, then a round-robin cursor.
#include <cstring>

#include "async_kernels.h"

namespace cam {

bool DispatchRecv::stopped() const {  // graph-stop buffer: 16 half words read as 4 int64
  return anchor.numel() == 16 && load64(anchor.data) != 0;
}

namespace {
struct GroupWait {
  const char* window;
  const AsyncShape* shape;
  uint64_t slot_bytes;
  int64_t cursor;
  int64_t* chosen;
  const char* stop;  // null: no stop buffer
};
int group_ready(void* p) {
  auto* w = static_cast<GroupWait*>(p);
  if (w->stop != nullptr && load64(w->stop) != 0) return 1;
  const int64_t attn = w->shape->attn, tp = w->shape->tp;
  for (int64_t g = 0; g < attn / tp; ++g) {
    const int64_t first = (w->cursor + g * tp) % attn;
    bool all = true;
    for (int64_t j = tp; j > 0 && all; --j) {
      all = load64(w->window + w->slot_bytes * static_cast<uint64_t>(first + j - 1)) != 0;
    }
    if (all) {
      *w->chosen = first;
      return 1;
    }
  }
  return 0;
}
}  // namespace

int DispatchRecv::choose(const Run& run) {
  FfnLayout layout(shape);
  const char* window = group.window[group.rank];
  int64_t cursor = load64(window + group.window_bytes - 32);
  if (cursor < 0 || cursor >= shape.attn) cursor = 0;
  GroupWait wait{window, &shape, layout.bytes,
                 cursor, &first, anchor.numel() == 16 ? anchor.data : nullptr};
  return spin(run, XSD_ANY_PEER, "a dispatch of any Attention group", group_ready, &wait);
}

// The longest run of whole experts not yet taken that fits the capacity.
int DispatchRecv::chunk(int64_t* start, int64_t* end) {
  FfnLayout layout(shape);
  const char* window = group.window[group.rank];
  per_slot.assign(static_cast<size_t>(shape.slots), 0);
  per_tp.clear();
  for (int64_t i = 0; i < shape.tp; ++i) {
    const char* counts_at = window + layout.slot(first + i) + layout.counts;
    for (int64_t s = 0; s < shape.slots; ++s) {
      per_tp.push_back(load32(counts_at + 4 * s));
      per_slot[static_cast<size_t>(s)] += per_tp.back();
    }
  }
  const char* taken = window + layout.slot(first) + layout.chunk;
  *start = *end = -1;
  int64_t rows = 0;
  for (int64_t s = 0; s < shape.slots; ++s) {
    if (load32(taken + 4 * s) != 0) continue;
    if (rows + per_slot[static_cast<size_t>(s)] > capacity) break;
    if (*start < 0) *start = s;
    *end = s;
    rows += per_slot[static_cast<size_t>(s)];
  }
  if (*start >= 0) return 0;
  // The real kernel gives up without a word here and leaves its outputs as they were.
  xsdTaskError(
      "%s on group %s: one expert's rows do not fit the receive capacity of %lld rows; raise "
      "BATCH_SIZE_FACTOR or lower the token limit",
      name, group.name.c_str(), static_cast<long long>(capacity));
  return kTaskFault;
}

// Rows by expert, then by TP rank, then in the sender's order.
uint64_t DispatchRecv::copy_rows(int64_t start, int64_t end) {
  FfnLayout layout(shape);
  char* window = group.window[group.rank];
  const uint64_t width = static_cast<uint64_t>(shape.hidden) * (shape.quant ? 1 : 2);
  std::vector<uint64_t> done(static_cast<size_t>(shape.tp), 0);
  for (int64_t i = 0; i < shape.tp; ++i) {
    for (int64_t s = 0; s < start; ++s) {
      done[static_cast<size_t>(i)] += per_tp[static_cast<size_t>(i * shape.slots + s)];
    }
  }
  uint64_t row = 0, shared_row = 0;
  for (int64_t s = start; s <= end; ++s) {
    const bool is_shared = s < shape.shared;
    for (int64_t i = 0; i < shape.tp; ++i) {
      const char* slot = window + layout.slot(first + i);
      for (uint32_t n = 0; n < per_tp[static_cast<size_t>(i * shape.slots + s)]; ++n) {
        uint16_t at;
        std::memcpy(&at, slot + layout.index + 2 * done[static_cast<size_t>(i)]++, 2);
        const char* token = slot + layout.tokens + layout.token_bytes * at;
        const uint64_t to = is_shared ? shared_row++ : row++;
        std::memcpy((is_shared ? x_shared : x).data + to * width, token, width);
        if (shape.quant)
          std::memcpy((is_shared ? scales_shared : scales).data + 4 * to, token + shape.hidden, 4);
      }
    }
  }
  return (row + shared_row) * width;
}

void DispatchRecv::publish(int64_t start, int64_t end) {
  FfnLayout layout(shape);
  char* window = group.window[group.rank];
  auto* words = reinterpret_cast<int64_t*>(info.data);
  auto* out = reinterpret_cast<int64_t*>(counts.data);
  int64_t total = 0;
  for (int64_t s = 0; s < shape.slots; ++s) {
    const int64_t rows = per_slot[static_cast<size_t>(s)];
    const int64_t here = s >= start && s <= end ? rows : 0;  // only this chunk's experts
    total += rows;
    if (s >= shape.shared) out[s - shape.shared] = here;
    if (s < shape.shared) *reinterpret_cast<int64_t*>(shared_count.data) = here;
  }
  words[0] = total;
  words[1] = first;
  words[2] = load64(window + layout.slot(first) + 8 * kLayer);
  words[3] = start;
  words[4] = end;
  for (int64_t i = 0; i < shape.tp; ++i) {
    words[5 + i] = load64(window + layout.slot(first + i) + 8 * kPrefix);
    for (int64_t s = 0; s < shape.slots; ++s) {
      words[5 + shape.tp + i * shape.slots + s] = per_tp[static_cast<size_t>(i * shape.slots + s)];
    }
  }
  const bool last = end == shape.slots - 1;
  for (int64_t i = 0; i < shape.tp; ++i) {
    char* slot = window + layout.slot(first + i);
    for (int64_t s = 0; s < shape.slots; ++s) {
      if (last || s <= end)
        store32(slot + layout.chunk + 4 * static_cast<uint64_t>(s), last ? 0 : 1);
    }
  }
  xsdDelay(0xca21);
  for (int64_t i = 0; last && i < shape.tp; ++i) store64(window + layout.slot(first + i), 0);
  store64(window + group.window_bytes - 32, last ? (first + shape.tp) % shape.attn : first);
}

// Shutdown item: Attention rank -1, one zero row for expert 0; combine_send skips it.
void DispatchRecv::emit_stop() {
  std::memset(x.data, 0, static_cast<uint64_t>(shape.hidden));
  const float one = 1.0f;
  std::memcpy(scales.data, &one, 4);
  std::memset(info.data, 0, static_cast<size_t>(info.numel()) * 8);
  std::memset(counts.data, 0, static_cast<size_t>(counts.numel()) * 8);
  reinterpret_cast<int64_t*>(counts.data)[0] = 1;
  auto* words = reinterpret_cast<int64_t*>(info.data);
  words[0] = 1;
  words[1] = -1;
  words[2] = load64(anchor.data + 8);
}

int DispatchRecv::run() {
  const uint32_t cores = cores_setting("XSD_CAM_DISPATCH_RECV_CORES", device_cores().vector);
  Run r(name, &group, device, Cores{cores, 0});
  if (r.status() != 0) return r.status();
  Control* own = group.own();
  const uint32_t others = __atomic_fetch_add(&own->recv_busy, 1, __ATOMIC_ACQ_REL);
  int status = 0;
  if (others != 0 && xsdSettings()->strict) {
    xsdTaskError(
        "%s on group %s: another receive of this rank is running; receives share one stream", name,
        group.name.c_str());
    status = kTaskFault;
  }
  if (status == 0) status = choose(r);
  r.ready();
  if (status == 0 && stopped()) {
    emit_stop();
  } else if (status == 0) {
    int64_t start, end;
    status = chunk(&start, &end);
    if (status == 0) {
      r.peer(first);
      r.moved(copy_rows(start, end));
      publish(start, end);
      r.tag(reinterpret_cast<int64_t*>(info.data)[2]);
    }
  }
  __atomic_fetch_sub(&own->recv_busy, 1, __ATOMIC_ACQ_REL);
  return r.done(status);
}

int CombineSend::push(const int64_t* words, Run& run) {
  AttnLayout layout(shape);
  const int64_t first = words[1], start = words[3], end = words[4];
  if (first < 0 || first > shape.attn - shape.tp || start < 0 || end < start ||
      end >= shape.slots) {
    xsdTaskError(
        "%s: batch_info names rank %lld, experts %lld..%lld; it must come from dispatch_recv", name,
        static_cast<long long>(first), static_cast<long long>(start), static_cast<long long>(end));
    return kTaskFault;
  }
  const int64_t* counts = words + 5 + shape.tp;
  const uint64_t width = static_cast<uint64_t>(shape.hidden) * 2;
  // No row number may exceed what a window has, or the sums below would lead out of it.
  const auto room = static_cast<int64_t>((group.window_bytes - layout.rows) / width);
  for (int64_t i = 5; i < shape.info_count(); ++i) {
    if (words[i] >= 0 && words[i] <= room) continue;
    xsdTaskError("%s: word %lld of batch_info is %lld; allowed: 0..%lld; it must come from "
                 "dispatch_recv",
                 name, static_cast<long long>(i), static_cast<long long>(words[i]),
                 static_cast<long long>(room));
    return kTaskFault;
  }
  std::vector<uint64_t> at(static_cast<size_t>(shape.tp));
  for (int64_t i = 0; i < shape.tp; ++i) {
    at[static_cast<size_t>(i)] = static_cast<uint64_t>(words[5 + i]);
    for (int64_t s = 0; s < start; ++s)
      at[static_cast<size_t>(i)] += static_cast<uint64_t>(counts[i * shape.slots + s]);
  }
  int64_t row = 0, shared_row = 0;
  for (int64_t s = start; s <= end; ++s) {
    const View& from = s < shape.shared ? x_shared : x;
    int64_t* next = s < shape.shared ? &shared_row : &row;
    for (int64_t i = 0; i < shape.tp; ++i) {
      const int64_t rows = counts[i * shape.slots + s];
      char* to = group.window[first + i] + layout.rows + at[static_cast<size_t>(i)] * width;
      const uint64_t used =
          layout.rows + (at[static_cast<size_t>(i)] + static_cast<uint64_t>(rows)) * width;
      if (rows < 0 || *next + rows > from.dims[0] || used > group.window_bytes) {
        xsdTaskError(
            "%s: %lld rows of expert slot %lld do not fit the %lld input rows or the window", name,
            static_cast<long long>(rows), static_cast<long long>(s),
            static_cast<long long>(from.dims[0]));
        return kTaskFault;
      }
      std::memcpy(to, from.data + static_cast<uint64_t>(*next) * width,
                  static_cast<uint64_t>(rows) * width);
      *next += rows;
      at[static_cast<size_t>(i)] += static_cast<uint64_t>(rows);
    }
  }
  run.moved(static_cast<uint64_t>(row + shared_row) * width);
  if (end != shape.slots - 1) return 0;  // only the last chunk reports
  xsdDelay(0xca31);
  for (int64_t i = 0; i < shape.tp; ++i) {
    store32(group.window[first + i] + layout.status +
                4 * static_cast<uint64_t>(shape.rank - shape.attn),
            static_cast<uint32_t>(words[5 + i]) + 1);
  }
  return 0;
}

int CombineSend::run() {
  Run r(name, &group, device, Cores{cores_setting("XSD_CAM_COMBINE_SEND_CORES", 8), 0});
  if (r.status() != 0) return r.status();
  const auto* words = reinterpret_cast<const int64_t*>(info.data);
  r.tag(words[2]);
  if (words[1] == -1) return r.done(0);  // shutdown item
  r.peer(words[1]);
  return r.done(push(words, r));
}

}  // namespace cam
