// SPDX-License-Identifier: Apache-2.0
// The Attention side of the asynchronous operators: dispatch_send and combine_recv.
//
// dispatch_send does not look whether a slot is free: an earlier dispatch that nobody consumed is
// overwritten, and so are the statistics combine_recv needs. One outstanding dispatch per Attention
// rank is the caller's duty; strict mode refuses a second one instead of corrupting the first.
#include <cmath>
#include <cstring>

#include "async_kernels.h"

namespace cam {

int DispatchSend::credit() {
  Control* own = group.own();
  bool pending = load32(&own->outstanding) != 0;
  FfnLayout layout(shape);
  for (int64_t f = 0; f < shape.ffn; ++f) {
    pending |= load64(group.window[shape.attn + f] + layout.slot(shape.rank)) != 0;
  }
  if (!pending) return 0;
  __atomic_fetch_add(&own->credit_violations, 1, __ATOMIC_RELAXED);
  if (!xsdSettings()->strict) return 0;
  xsdTaskError(
      "dispatch_send on group %s, rank %u, layer %lld: the previous dispatch has not been "
      "combined; one "
      "dispatch per Attention rank and group may be outstanding (hardware would overwrite it)",
      group.name.c_str(), group.rank, static_cast<long long>(shape.layer));
  return kTaskFault;
}

// Rows per (FFN rank, slot) and rows sent to lower FFN ranks, kept in the own window until
// combine_recv of this dispatch is done.
int DispatchSend::statistics() {
  const auto* ids_p = reinterpret_cast<const int32_t*>(ids.data);
  counts.assign(static_cast<size_t>(shape.ffn * shape.slots), 0);
  prefix.assign(static_cast<size_t>(shape.ffn), 0);
  for (int64_t t = 0; t < shape.batch; ++t) {
    for (int64_t j = 0; j < shape.topk; ++j) {
      const int64_t id = ids_p[t * shape.topk + j];
      if (id < 0 || id >= shape.ffn * shape.routed()) {
        xsdTaskError("dispatch_send: expert id %lld of token %lld is outside 0..%lld",
                     static_cast<long long>(id), static_cast<long long>(t),
                     static_cast<long long>(shape.ffn * shape.routed() - 1));
        return kTaskFault;
      }
    }
    for (int64_t j = 0; j < shape.topk + shape.shared; ++j) {
      const Target to = target(shape, ids_p, t, j);
      ++counts[static_cast<size_t>(to.ffn * shape.slots + to.slot)];
    }
  }
  uint32_t sum = 0;
  for (int64_t f = 0; f < shape.ffn; ++f) {
    prefix[static_cast<size_t>(f)] = sum;
    for (int64_t s = 0; s < shape.slots; ++s)
      sum += counts[static_cast<size_t>(f * shape.slots + s)];
  }
  char* stats = group.window[group.rank];
  std::memcpy(stats, prefix.data(), prefix.size() * 4);
  std::memcpy(stats + prefix.size() * 4, counts.data(), counts.size() * 4);
  return 0;
}

void DispatchSend::store_token(char* to, int64_t token) {
  const char* row = x.data + static_cast<uint64_t>(token * shape.hidden) * 2;
  if (shape.quant == 0) {
    std::memcpy(to, row, static_cast<uint64_t>(shape.hidden) * 2);
    return;
  }
  float top = 0.0f;
  for (int64_t c = 0; c < shape.hidden; ++c)
    top = std::fmax(top, std::fabs(to_float(row, x.dtype, c)));
  const float scale = top / 127.0f;
  for (int64_t c = 0; c < shape.hidden; ++c) {
    const float v = top == 0.0f ? 0.0f : to_float(row, x.dtype, c) / scale;
    to[c] = static_cast<char>(
        static_cast<int8_t>(std::lrint(std::fmin(127.0f, std::fmax(-127.0f, v)))));
  }
  std::memcpy(to + shape.hidden, &scale, 4);
}

void DispatchSend::write_slot(int64_t ffn, Run& run) {
  FfnLayout layout(shape);
  char* slot = group.window[shape.attn + ffn] + layout.slot(shape.rank);
  const auto* ids_p = reinterpret_cast<const int32_t*>(ids.data);
  std::vector<std::vector<uint16_t>> lists(static_cast<size_t>(shape.slots));
  uint16_t stored = 0;
  for (int64_t t = 0; t < shape.batch; ++t) {
    bool here = false;  // a token goes to one FFN rank once, however many of its experts live there
    for (int64_t j = 0; j < shape.topk + shape.shared; ++j) {
      const Target to = target(shape, ids_p, t, j);
      if (to.ffn != ffn) continue;
      if (!here) store_token(slot + layout.tokens + layout.token_bytes * stored, t);
      here = true;
      lists[static_cast<size_t>(to.slot)].push_back(stored);
    }
    stored = static_cast<uint16_t>(stored + here);
  }
  char* index = slot + layout.index;
  int64_t rows = 0;
  for (const auto& list : lists) {
    if (!list.empty()) std::memcpy(index + rows * 2, list.data(), list.size() * 2);
    rows += static_cast<int64_t>(list.size());
  }
  std::memcpy(slot + layout.counts, counts.data() + ffn * shape.slots,
              static_cast<size_t>(shape.slots) * 4);
  store64(slot + 8 * kLayer, shape.layer);
  store64(slot + 8 * kPrefix, prefix[static_cast<size_t>(ffn)]);
  run.moved(stored * layout.token_bytes);
  xsdDelay(0xca11);
  store64(slot + 8 * kFlag, rows + 1);  // last, and also when no row was routed here
}

int DispatchSend::run() {
  Run r(name, &group, device, Cores{cores_setting("XSD_CAM_DISPATCH_SEND_CORES", 8), 0});
  r.tag(shape.layer);
  if (r.status() != 0) return r.status();
  int status = credit();
  if (status == 0) status = statistics();
  if (status != 0) return r.done(status);
  store32(&group.own()->outstanding, load32(&group.own()->outstanding) + 1);
  for (int64_t f = 0; f < shape.ffn; ++f) write_slot(f, r);
  return r.done(0);
}

namespace {
struct StatusWait {
  const char* status;
  int64_t ffn;
};
int all_set(void* p) {
  auto* w = static_cast<StatusWait*>(p);
  for (int64_t f = 0; f < w->ffn; ++f) {
    if (load32(w->status + 4 * f) == 0) return 0;
  }
  return 1;
}
}  // namespace

// The row of a copy: its FFN rank's status - 1, plus the rows of that rank's lower slots, plus the
// copies of earlier tokens in the same slot.
void CombineRecv::gather() {
  AttnLayout layout(shape);
  char* window = group.window[group.rank];
  const auto* counts = reinterpret_cast<const uint32_t*>(window) + shape.ffn;
  const auto* ids_p = reinterpret_cast<const int32_t*>(ids.data);
  const auto* weight = reinterpret_cast<const float*>(weights.data);
  std::vector<uint64_t> next(static_cast<size_t>(shape.ffn * shape.slots));
  for (int64_t f = 0; f < shape.ffn; ++f) {
    uint64_t at = load32(window + layout.status + 4 * static_cast<uint64_t>(f)) - 1;
    for (int64_t s = 0; s < shape.slots; ++s) {
      next[static_cast<size_t>(f * shape.slots + s)] = at;
      at += counts[f * shape.slots + s];
    }
  }
  const uint64_t limit = static_cast<uint64_t>(shape.batch * (shape.topk + shape.shared));
  std::vector<float> sum(static_cast<size_t>(shape.hidden));
  for (int64_t t = 0; t < shape.batch; ++t) {
    std::fill(sum.begin(), sum.end(), 0.0f);
    for (int64_t j = 0; j < shape.topk + shape.shared; ++j) {
      const Target to = target(shape, ids_p, t, j);
      uint64_t row = next[static_cast<size_t>(to.ffn * shape.slots + to.slot)]++;
      if (row >= limit) row = limit - 1;  // overwritten statistics: wrong data, never a stray read
      const char* from = window + layout.rows + row * static_cast<uint64_t>(shape.hidden) * 2;
      const float w = j == shape.topk ? 1.0f : weight[t * shape.topk + j];
      for (int64_t c = 0; c < shape.hidden; ++c) {
        sum[static_cast<size_t>(c)] += w * to_float(from, out.dtype, c);
      }
    }
    for (int64_t c = 0; c < shape.hidden; ++c) {
      from_float(out.data, out.dtype, t * shape.hidden + c, sum[static_cast<size_t>(c)]);
    }
  }
}

int CombineRecv::run() {
  Run r(name, &group, device, Cores{cores_setting("XSD_CAM_COMBINE_RECV_CORES", 8), 0});
  if (r.status() != 0) return r.status();
  AttnLayout layout(shape);
  char* status = group.window[group.rank] + layout.status;
  StatusWait wait{status, shape.ffn};
  int code = spin(r, XSD_ANY_PEER, "the status of all FFN ranks", all_set, &wait);
  r.ready();
  if (code != 0) return r.done(code);
  const auto* ids_p = reinterpret_cast<const int32_t*>(ids.data);
  for (int64_t i = 0; i < shape.batch * shape.topk; ++i) {
    if (ids_p[i] < 0 || ids_p[i] >= shape.ffn * shape.routed()) {
      xsdTaskError("%s: expert id %d is outside 0..%lld", name, ids_p[i],
                   static_cast<long long>(shape.ffn * shape.routed() - 1));
      return r.done(kTaskFault);
    }
  }
  gather();
  r.moved(static_cast<uint64_t>(shape.batch * shape.topk * shape.hidden) * 2);
  for (int64_t f = 0; f < shape.ffn; ++f) store32(status + 4 * f, 0);
  Control* own = group.own();
  const uint32_t left = load32(&own->outstanding);
  store32(&own->outstanding, left == 0 ? 0 : left - 1);
  return r.done(0);
}

}  // namespace cam
