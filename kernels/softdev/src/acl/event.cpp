// SPDX-License-Identifier: Apache-2.0
// Events. Every recording is an object of its own, numbered by the event's generation counter.
#include <cstdio>

#include "internal.h"

namespace xsd {
namespace {

// Flags of acl_rt.h that decide whether an event carries a time.
constexpr uint32_t kTimeLine = 0x8;
constexpr uint32_t kPlainEvent = kTimeLine;  // aclrtCreateEvent, as documented, can be timed

int create(aclrtEvent* out, uint32_t flags, const char* call) {
  if (int code = enter()) return code;
  if (out == nullptr) return fail(kParamInvalid, "EE1003: %s: event is null", call);
  auto event = std::make_shared<Event>();
  event->flags = flags;
  *out = events().add(std::move(event));
  return kOk;
}

std::shared_ptr<Event> find_event(aclrtEvent handle, const char* call) {
  auto event = events().find(handle);
  if (event == nullptr) xsdSetError("EE1003: %s: %p is not a live event", call, handle);
  return event;
}

std::shared_ptr<Recording> latest(const std::shared_ptr<Event>& event) {
  std::lock_guard<std::mutex> lock(event->mutex);
  return event->last;
}

// False when it has not fired in time. timeout_ms < 0 = for ever.
bool wait_for(Recording& recording, int64_t timeout_ms) {
  if (look_for(recording.done)) return true;
  auto done = [&] { return recording.done.load(); };
  std::unique_lock<std::mutex> lock(recording.mutex);
  if (timeout_ms >= 0) {
    return recording.fired.wait_for(lock, std::chrono::milliseconds(timeout_ms), done);
  }
  recording.fired.wait(lock, done);
  return true;
}

int synchronize_event(aclrtEvent handle, int64_t timeout_ms, const char* call) {
  if (xsdForked()) return kInternal;
  if (timeout_ms < -1) {
    return fail(kParamInvalid, "EE1003: %s: timeout %lld (-1 or more milliseconds)", call,
                static_cast<long long>(timeout_ms));
  }
  auto event = find_event(handle, call);
  if (event == nullptr) return kInvalidHandle;
  auto recording = latest(event);
  if (recording == nullptr) return kOk;  // never recorded: nothing to wait for
  count(kEventWaits);
  if (!recording->done && on_worker_of(recording->stream_id)) {
    return fail(kParamInvalid, "EE1003: %s: called by a task of the stream that would fire it",
                call);
  }
  if (!wait_for(*recording, timeout_ms)) {
    return fail(kEventSyncTimeout, "EE9999: %s: not fired after %lld ms", call,
                static_cast<long long>(timeout_ms));
  }
  if (recording->error == 0) return kOk;
  return fail(recording->error, "EE9999: %s: %.900s", call, recording->text.c_str());
}

}  // namespace

Registry<Event>& events() {
  static auto& registry = *new Registry<Event>(0x5803);
  return registry;
}

}  // namespace xsd

using namespace xsd;

aclError aclrtCreateEvent(aclrtEvent* out) { return create(out, kPlainEvent, "aclrtCreateEvent"); }

aclError aclrtCreateEventWithFlag(aclrtEvent* out, uint32_t flag) {
  return create(out, flag, "aclrtCreateEventWithFlag");
}

aclError aclrtCreateEventExWithFlag(aclrtEvent* out, uint32_t flag) {
  return create(out, flag, "aclrtCreateEventExWithFlag");
}

aclError aclrtDestroyEvent(aclrtEvent handle) {
  if (xsdForked()) return kInternal;
  if (events().take(handle) == nullptr) {
    return fail(kInvalidHandle, "EE1003: aclrtDestroyEvent: %p is not a live event", handle);
  }
  return kOk;  // queued recordings and waits keep what they need
}

aclError aclrtRecordEvent(aclrtEvent handle, aclrtStream stream_handle) {
  if (int code = enter()) return code;
  auto event = find_event(handle, "aclrtRecordEvent");
  if (event == nullptr) return kInvalidHandle;
  std::shared_ptr<Stream> stream;
  if (int code = resolve_stream(stream_handle, &stream)) return code;
  auto recording = std::make_shared<Recording>();
  recording->stream_id = stream->id;
  // Held while queuing: of two threads that record, the later generation is also queued later.
  std::lock_guard<std::mutex> lock(event->mutex);
  recording->generation = event->generation + 1;
  Task task;
  task.name = "event record";
  task.always = task.brief = true;
  task.fires = recording;
  const int code = enqueue(stream, std::move(task));
  if (code != kOk) return code;
  event->generation = recording->generation;
  event->last = recording;
  return kOk;
}

aclError aclrtStreamWaitEvent(aclrtStream stream_handle, aclrtEvent handle) {
  if (int code = enter()) return code;
  auto event = find_event(handle, "aclrtStreamWaitEvent");
  if (event == nullptr) return kInvalidHandle;
  std::shared_ptr<Stream> stream;
  if (int code = resolve_stream(stream_handle, &stream)) return code;
  auto recording = latest(event);
  // The same stream passes its own earlier recording by order alone.
  if (recording == nullptr || recording->stream_id == stream->id) return kOk;
  // What has fired holds nobody up: only traces want to see it, and delays the same tasks each time.
  if (recording->done && !tracing() && settings()->delay_seed == 0) return kOk;
  Task task;
  task.name = "event wait";
  task.brief = true;
  task.waits = std::move(recording);
  return enqueue(stream, std::move(task));
}

aclError aclrtQueryEventStatus(aclrtEvent handle, aclrtEventRecordedStatus* status) {
  if (xsdForked()) return kInternal;
  if (status == nullptr)
    return fail(kParamInvalid, "EE1003: aclrtQueryEventStatus: status is null");
  auto event = find_event(handle, "aclrtQueryEventStatus");
  if (event == nullptr) return kInvalidHandle;
  auto recording = latest(event);
  const bool done = recording != nullptr && recording->done;
  *status = done ? ACL_EVENT_RECORDED_STATUS_COMPLETE : ACL_EVENT_RECORDED_STATUS_NOT_READY;
  return kOk;
}

aclError aclrtSynchronizeEvent(aclrtEvent event) {
  return synchronize_event(event, -1, "aclrtSynchronizeEvent");
}

aclError aclrtSynchronizeEventWithTimeout(aclrtEvent event, int32_t timeout) {
  return synchronize_event(event, timeout, "aclrtSynchronizeEventWithTimeout");
}

aclError aclrtEventElapsedTime(float* ms, aclrtEvent start_handle, aclrtEvent end_handle) {
  if (xsdForked()) return kInternal;
  if (ms == nullptr) return fail(kParamInvalid, "EE1003: aclrtEventElapsedTime: ms is null");
  auto start = find_event(start_handle, "aclrtEventElapsedTime");
  if (start == nullptr) return kInvalidHandle;
  auto end = find_event(end_handle, "aclrtEventElapsedTime");
  if (end == nullptr) return kInvalidHandle;
  if ((start->flags & kTimeLine) == 0 || (end->flags & kTimeLine) == 0) {
    return fail(kTimestampInvalid,
                "EE1003: aclrtEventElapsedTime: an event was made without ACL_EVENT_TIME_LINE");
  }
  Clock::time_point times[2];
  const std::shared_ptr<Event> pair[2] = {start, end};
  for (int i = 0; i < 2; ++i) {
    auto recording = latest(pair[i]);
    if (recording == nullptr) {
      return fail(kEventNotComplete,
                  "EE1003: aclrtEventElapsedTime: the %s event was never recorded",
                  i == 0 ? "start" : "end");
    }
    if (!recording->done) {
      return fail(kEventNotComplete,
                  "EE1003: aclrtEventElapsedTime: the %s event has not fired yet",
                  i == 0 ? "start" : "end");
    }
    times[i] = recording->when;
  }
  if (times[1] < times[0]) {
    return fail(kTimestampReversal, "EE1003: aclrtEventElapsedTime: end fired before start");
  }
  *ms = std::chrono::duration<float, std::milli>(times[1] - times[0]).count();
  return kOk;
}
