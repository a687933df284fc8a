// SPDX-License-Identifier: Apache-2.0
// Objects of libascendcl, shared between its source files only.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "../common/registry.h"
#include "acl_rt.h"
#include "xsd.h"

namespace xsd {

// ACL status codes, CANN 9.1 (acl_base_rt.h, rt_error_codes.h).
enum : int {
  kOk = 0,
  kInvalidFile = 100003,
  kUninitialized = 100001,
  kRepeatInit = 100002,
  kRepeatSubscribe = 100033,
  kStreamNotSubscribed = 100034,
  kThreadNotSubscribed = 100035,
  kRepeatFinalize = 100037,
  kParamInvalid = 107000,
  kInvalidDevice = 107001,
  kContextNull = 107002,
  kStreamContext = 107003,
  kTimestampInvalid = 107006,
  kTimestampReversal = 107007,
  kInvalidMemoryType = 107016,
  kInvalidHandle = 107017,
  kNotSupported = 207000,
  kMemoryAllocation = 207001,
  kInternal = 500000,
  kEventNotComplete = 507006,
  kReportTimeout = 507012,
  kVectorException = 507035,
  kStreamSyncTimeout = 507046,
  kEventSyncTimeout = 507047,
  kDeviceMemory = 507053,
};

using Clock = std::chrono::steady_clock;

struct Stream;

// One recording of an event. Waiters hold the recording they saw, so recording the event again or
// destroying it changes nothing for them.
struct Recording {
  uint64_t generation = 0;
  uint64_t stream_id = 0;
  std::mutex mutex;
  std::condition_variable fired;                 // for host threads
  std::vector<std::shared_ptr<Stream>> parked;   // streams whose next task waits for it
  std::atomic<bool> done{false};                 // what is below does not change afterwards
  int error = 0;                                 // of the stream, at the time it fired
  std::string text;
  Clock::time_point when;
};

struct Event {
  uint64_t id = 0;
  uint32_t flags = 0;
  std::mutex mutex;
  uint64_t generation = 0;
  std::shared_ptr<Recording> last;  // null until recorded
};

// What a task is: a function, an event's recording, or a wait for one.
struct Task {
  std::string name;
  std::function<int()> run;       // returns a device error code, 0 = fine
  std::function<void()> release;  // always called once
  std::shared_ptr<Recording> fires, waits;
  bool always = false;   // also on a failed stream, and when dropped (events must fire)
  bool brief = false;    // ends at once by itself, whatever others do; see queue.cpp
  uint64_t begun = 0;    // trace time at which a wait came to the head of its stream
};

struct Context;

// Tasks are run by one thread at a time; see queue.cpp.
enum class Turn { kIdle, kDue, kParked, kRunning };

struct Stream {
  static constexpr uint64_t kNobody = ~0ull;
  uint64_t id = 0;
  std::shared_ptr<Context> context;
  std::mutex mutex;
  std::condition_variable work, done;
  std::vector<Task> queue;
  std::atomic<Turn> turn{Turn::kIdle};     // changed under the mutex
  const Recording* parked_for = nullptr;   // while parked
  std::atomic<uint64_t> submitted{0}, completed{0};
  std::atomic<uint64_t> wanted{kNobody};   // count that a host thread waits for with `done`
  std::atomic<int> error{0};               // sticky
  std::string error_text;
  std::atomic<bool> stopping{false}, dropping{false};
  bool started = false;
  uint64_t report_thread = 0;  // subscribed callback thread, 0 = none
  std::thread worker;
  // Of the thread whose turn it is: tasks taken from the queue, and how far it has come.
  std::vector<Task> batch;
  size_t at = 0;
  uint64_t count = 0;
};

struct Context {
  uint64_t id = 0;
  int32_t device = 0;
  bool primary = false;
  std::mutex mutex;
  std::shared_ptr<Stream> default_stream;  // made on first use
};

struct Settings : XsdSettings {
  int32_t device_count;   // XSD_DEVICE_COUNT
  uint64_t memory_bytes;  // XSD_MEMORY_BYTES, per device
};
const Settings* settings();

// Common start of every call that needs the device: refuses a forked child, marks the device used.
int enter();
int fail(int code, const char* format, ...) __attribute__((format(printf, 2, 3)));

Registry<Stream>& streams();
Registry<Event>& events();
Registry<Context>& contexts();

// The calling thread's context, null (and an error text) when there is none or it was destroyed.
std::shared_ptr<Context> current_context();
// Stream for a handle given by a caller in the current context; null handle = default stream.
int resolve_stream(aclrtStream handle, std::shared_ptr<Stream>* out);
std::shared_ptr<Stream> make_stream(const std::shared_ptr<Context>& context);
// Queues a task; on a stream that is being destroyed it is refused (and released).
int enqueue(const std::shared_ptr<Stream>& stream, Task task);
// The error of a stream that has failed.
int report_failure(const std::shared_ptr<Stream>& stream, const char* call);
// Waits until what was submitted so far is done. timeout_ms < 0 = for ever.
int synchronize(const std::shared_ptr<Stream>& stream, int64_t timeout_ms);
void stop_stream(const std::shared_ptr<Stream>& stream, bool drop);
void stop_streams_of(const std::shared_ptr<Context>& context);
bool on_worker_of(uint64_t stream_id);
// A recording came up on its stream.
void fire(Stream& stream, const std::shared_ptr<Recording>& recording);
// Whether the flag comes up within the moment that a host thread looks before it sleeps.
bool look_for(const std::atomic<bool>& flag);
inline int32_t stream_number(uint64_t id) { return static_cast<int32_t>((id >> 4) & 0x7fffffff); }

enum Counter : uint32_t { kDeviceWaits, kStreamWaits, kEventWaits };
void count(Counter what);
bool tracing();
uint64_t trace_begin();  // 0 while tracing is off
void trace_end(const Stream& stream, const std::string& name, uint64_t start, int status);
std::string take_task_error();
int report_callback(const std::shared_ptr<Stream>& stream, aclrtCallback fn, void* data,
                    bool block);

// Does the range lie in memory of aclrtMallocHost?
bool is_pinned(const void* ptr, uint64_t bytes);

}  // namespace xsd
