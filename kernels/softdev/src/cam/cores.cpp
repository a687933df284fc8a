// SPDX-License-Identifier: Apache-2.0
// Core occupancy: a kernel starts only when all its cores are free, and keeps them while it spins.
// That is what makes a posted receive on all vector cores starve every other vector kernel.
#include <sys/prctl.h>
#include <time.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <list>
#include <map>
#include <mutex>

#include "cam.h"

namespace cam {
namespace {
struct Pool {
  std::mutex mutex;
  std::condition_variable changed;
  Cores free = device_cores();
  std::list<const void*> queue;  // order of arrival: nobody overtakes
};
Pool& pool(int32_t device) {
  static std::mutex mutex;
  static std::map<int32_t, Pool>* pools = new std::map<int32_t, Pool>;  // outlives worker threads
  std::lock_guard<std::mutex> lock(mutex);
  return (*pools)[device];
}

struct Trace {
  std::mutex mutex;
  bool on = false;
  uint64_t dropped = 0;
  std::vector<TraceEntry> entries;
};
constexpr size_t kTraceMax = 1u << 18;
Trace& trace() {
  static Trace* t = new Trace;
  return *t;
}
}  // namespace

uint64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<uint64_t>(t.tv_sec) * 1000000000u + static_cast<uint64_t>(t.tv_nsec);
}

void sleep_until(uint64_t end) {
  static thread_local bool exact = false;
  if (!exact) {
    prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0);  // the default slack of 50 us would blur short kernels
    exact = true;
  }
  timespec t{static_cast<time_t>(end / 1000000000u), static_cast<long>(end % 1000000000u)};
  while (now_ns() < end) clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, nullptr);
}

namespace {
uint32_t number(const char* name, const char* text, uint32_t fallback, long top = 1024) {
  if (text == nullptr || *text == '\0') return fallback;
  char* end = nullptr;
  const long value = std::strtol(text, &end, 10);
  if (*end == '\0' && value > 0 && value <= top) return static_cast<uint32_t>(value);
  // A setting that is silently ignored would make a test prove nothing.
  std::fprintf(stderr, "software device: %s=%s is not a whole number from 1 to %ld; using %u\n",
               name, text, top, fallback);
  return fallback;
}
}  // namespace

namespace {
std::atomic<uint32_t> g_recv{0}, g_send{0};  // of xsdCamSetCores, 0: not set
}  // namespace

// Read at every launch: a test or probe may change the partition between two launches.
uint32_t cores_setting(const char* name, uint32_t fallback) {
  uint32_t set = 0;
  if (std::strcmp(name, "XSD_CAM_DISPATCH_RECV_CORES") == 0) set = g_recv.load();
  if (std::strcmp(name, "XSD_CAM_COMBINE_SEND_CORES") == 0) set = g_send.load();
  if (set != 0) return set;
  const char* text = std::getenv(name);
  if (text != nullptr && std::strcmp(text, "all") == 0) return device_cores().vector;
  return number(name, text, fallback);
}

Cores device_cores() {
  static const Cores cores{number("XSD_AIV_COUNT", std::getenv("XSD_AIV_COUNT"), 48),
                           number("XSD_AIC_COUNT", std::getenv("XSD_AIC_COUNT"), 24)};
  return cores;
}

int take_cores(int32_t device, Cores want, const uint32_t* abort) {
  Pool& p = pool(device);
  Cores all = device_cores();
  if (want.vector > all.vector || want.cube > all.cube) return kTaskFault;
  if (want.vector == 0 && want.cube == 0) return 0;
  std::unique_lock<std::mutex> lock(p.mutex);
  p.queue.push_back(&want);
  auto mine = std::prev(p.queue.end());
  auto fits = [&] {
    return p.queue.front() == &want && p.free.vector >= want.vector && p.free.cube >= want.cube;
  };
  while (!fits()) {
    if (abort != nullptr && load32(abort) != 0) {
      p.queue.erase(mine);
      p.changed.notify_all();
      return kTaskRemote;
    }
    p.changed.wait_for(lock, std::chrono::milliseconds(20));  // the abort word has no notifier
  }
  p.queue.erase(mine);
  p.free.vector -= want.vector;
  p.free.cube -= want.cube;
  p.changed.notify_all();
  return 0;
}

void give_cores(int32_t device, Cores had) {
  Pool& p = pool(device);
  std::lock_guard<std::mutex> lock(p.mutex);
  p.free.vector += had.vector;
  p.free.cube += had.cube;
  p.changed.notify_all();
}

Run::Run(const char* op, const Group* group, int32_t device, Cores cores)
    : group_(group), device_(device), cores_(cores) {
  std::strncpy(entry_.op, op, sizeof entry_.op - 1);
  if (group != nullptr) std::strncpy(entry_.group, group->name.c_str(), sizeof entry_.group - 1);
  entry_.tag = entry_.peer = -1;
  entry_.stream = xsdCurrentStream();
  entry_.device = static_cast<uint32_t>(device);
  entry_.vector_cores = cores.vector;
  entry_.cube_cores = cores.cube;
  entry_.start_ns = now_ns();
  if (group != nullptr && (hold_ = xsdWindowHold(group->comm)) == nullptr) {
    xsdTaskError("%s: the communicator of group %s was destroyed", op, group->name.c_str());
    status_ = kTaskRemote;
  } else {
    start(group == nullptr ? nullptr : &group->own()->abort_word);
  }
  entry_.cores_ns = entry_.ready_ns = now_ns();
}

void Run::start(const uint32_t* abort) {
  status_ = take_cores(device_, cores_, abort);
  held_ = status_ == 0;
  if (status_ == kTaskFault) {
    xsdTaskError("%s needs %u vector and %u cube cores; the device has %u and %u", entry_.op,
                 cores_.vector, cores_.cube, device_cores().vector, device_cores().cube);
  } else if (abort != nullptr && load32(abort) != 0) {  // nothing starts any more
    xsdTaskError("%s on group %s: aborted before the kernel started", entry_.op, entry_.group);
    status_ = kTaskRemote;
  } else if (abort != nullptr) {
    status_ = xsdWindowCheck(hold_, entry_.op);
  }
}

void Run::moved(uint64_t bytes) {
  const char* text = std::getenv("XSD_CAM_COPY_MBPS");
  if (text == nullptr || *text == '\0') return;
  moved_ += bytes;
  const uint64_t rate = number("XSD_CAM_COPY_MBPS", text, 1u << 20, 1u << 20);
  sleep_until(entry_.ready_ns + moved_ * 1000 / rate);
}

int Run::done(int status) {
  status_ = status;
  return status;
}

Run::~Run() {
  if (held_) give_cores(device_, cores_);
  if (hold_ != nullptr) xsdWindowRelease(hold_);
  entry_.end_ns = now_ns();
  entry_.status = static_cast<uint32_t>(status_);
  Trace& t = trace();
  std::lock_guard<std::mutex> lock(t.mutex);
  if (!t.on) return;
  if (t.entries.size() < kTraceMax) {
    t.entries.push_back(entry_);
  } else {
    ++t.dropped;
  }
}

}  // namespace cam

// ---- the software device's own interface: nothing like it exists on an NPU
// ------------------------
using cam::TraceEntry;

XSD_API void xsdCamTraceEnable(int on) {
  auto& t = cam::trace();
  std::lock_guard<std::mutex> lock(t.mutex);
  t.on = on != 0;
}

// Moves up to `capacity` entries out, oldest first. Returns how many; *dropped counts lost ones.
XSD_API uint32_t xsdCamTraceRead(TraceEntry* out, uint32_t capacity, uint64_t* dropped) {
  auto& t = cam::trace();
  std::lock_guard<std::mutex> lock(t.mutex);
  size_t n = t.entries.size() < capacity ? t.entries.size() : capacity;
  std::memcpy(static_cast<void*>(out), t.entries.data(), n * sizeof(TraceEntry));
  t.entries.erase(t.entries.begin(), t.entries.begin() + static_cast<std::ptrdiff_t>(n));
  if (dropped != nullptr) *dropped = t.dropped;
  return static_cast<uint32_t>(n);
}

XSD_API void xsdCamFreeCores(int32_t device, uint32_t* vector, uint32_t* cube) {
  auto& p = cam::pool(device);
  std::lock_guard<std::mutex> lock(p.mutex);
  *vector = p.free.vector;
  *cube = p.free.cube;
}

XSD_API int xsdCamSetCores(uint32_t dispatch_recv, uint32_t combine_send) {
  const uint32_t all = cam::device_cores().vector;
  if (dispatch_recv > all || combine_send > all) return 1;
  cam::g_recv.store(dispatch_recv);
  cam::g_send.store(combine_send);
  return 0;
}
