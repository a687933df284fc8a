// SPDX-License-Identifier: Apache-2.0
// What this device saw: a trace of every task on every stream, and counters of host waits. Nothing
// like it is in the ACL runtime; an NPU's profiler answers the same questions.
#include <time.h>

#include <cstring>

#include "internal.h"

namespace xsd {
namespace {
struct Trace {
  std::atomic<bool> on{false};
  std::mutex mutex;
  uint64_t dropped = 0;
  std::vector<XsdTaskEntry> entries;
};
constexpr size_t kTraceMax = 1u << 18;
Trace& trace() {
  static auto& t = *new Trace;  // outlives worker threads
  return t;
}
std::atomic<uint64_t> g_counts[XSD_COUNTERS];
}  // namespace

void count(Counter what) { g_counts[what].fetch_add(1, std::memory_order_relaxed); }

bool tracing() { return trace().on.load(std::memory_order_relaxed); }

uint64_t trace_begin() {
  if (!tracing()) return 0;
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<uint64_t>(t.tv_sec) * 1000000000u + static_cast<uint64_t>(t.tv_nsec);
}

void trace_end(const Stream& stream, const std::string& name, uint64_t start, int status) {
  const uint64_t end = trace_begin();
  if (start == 0 || end == 0) return;
  Trace& t = trace();
  std::lock_guard<std::mutex> lock(t.mutex);
  if (t.entries.size() >= kTraceMax) {
    ++t.dropped;
    return;
  }
  XsdTaskEntry entry{};
  std::strncpy(entry.name, name.c_str(), sizeof entry.name - 1);
  entry.stream = stream_number(stream.id);
  entry.device = static_cast<uint32_t>(stream.context->device);
  entry.status = static_cast<uint32_t>(status);
  entry.start_ns = start;
  entry.end_ns = end;
  t.entries.push_back(entry);
}

}  // namespace xsd

using namespace xsd;

void xsdTaskTraceEnable(int on) { trace().on = on != 0; }

uint32_t xsdTaskTraceRead(XsdTaskEntry* out, uint32_t capacity, uint64_t* dropped) {
  Trace& t = trace();
  std::lock_guard<std::mutex> lock(t.mutex);
  const size_t n = t.entries.size() < capacity ? t.entries.size() : capacity;
  if (n != 0) std::memcpy(static_cast<void*>(out), t.entries.data(), n * sizeof(XsdTaskEntry));
  t.entries.erase(t.entries.begin(), t.entries.begin() + static_cast<std::ptrdiff_t>(n));
  if (dropped != nullptr) *dropped = t.dropped;
  return static_cast<uint32_t>(n);
}

void xsdCounters(uint64_t out[XSD_COUNTERS]) {
  for (uint32_t i = 0; i < XSD_COUNTERS; ++i) out[i] = g_counts[i].load(std::memory_order_relaxed);
}
