// SPDX-License-Identifier: Apache-2.0
// Streams: the calls. How their tasks are run is in queue.cpp.
#include <algorithm>
#include <cstdio>

#include "internal.h"

namespace xsd {
namespace {

int create(aclrtStream* out, const char* call) {
  if (int code = enter()) return code;
  if (out == nullptr) return fail(kParamInvalid, "EE1003: %s: stream is null", call);
  auto context = current_context();
  if (context == nullptr) return kContextNull;
  *out = reinterpret_cast<void*>(make_stream(context)->id);
  return kOk;
}

int destroy(aclrtStream handle, bool drop, const char* call) {
  if (int code = enter()) return code;
  auto stream = streams().find(handle);
  if (stream == nullptr) {
    return fail(kInvalidHandle, "EE1003: %s: %p is not a live stream", call, handle);
  }
  if (on_worker_of(stream->id)) {
    return fail(kParamInvalid, "EE1003: %s: called by a task of this same stream", call);
  }
  if (streams().take(handle) == nullptr) {
    return fail(kInvalidHandle, "EE1003: %s: %p is not a live stream", call, handle);
  }
  stop_stream(stream, drop);
  return kOk;
}

int synchronize_handle(aclrtStream handle, int64_t timeout_ms, const char* call) {
  if (int code = enter()) return code;
  if (timeout_ms < -1) {
    return fail(kParamInvalid, "EE1003: %s: timeout %lld (-1 or more milliseconds)", call,
                static_cast<long long>(timeout_ms));
  }
  std::shared_ptr<Stream> stream;
  if (int code = resolve_stream(handle, &stream)) return code;
  count(kStreamWaits);
  return synchronize(stream, timeout_ms);
}

int synchronize_device(int64_t timeout_ms) {
  if (int code = enter()) return code;
  if (timeout_ms < -1) return fail(kParamInvalid, "EE1003: timeout below -1 milliseconds");
  auto context = current_context();
  if (context == nullptr) return kContextNull;
  count(kDeviceWaits);
  const auto start = Clock::now();
  int first = kOk;
  std::string text;
  for (auto& stream : streams().all()) {
    if (stream->context->device != context->device) continue;
    int64_t left = timeout_ms;
    if (timeout_ms >= 0) {
      const auto spent =
          std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - start);
      left = std::max<int64_t>(0, timeout_ms - spent.count());
    }
    const int code = synchronize(stream, left);
    if (code != kOk && first == kOk) {
      first = code;
      const char* message = aclGetRecentErrMsg();
      text = message == nullptr ? "" : message;
    }
  }
  if (first != kOk) xsdSetError("%s", text.c_str());
  return first;
}

}  // namespace

Registry<Stream>& streams() {
  static auto& registry = *new Registry<Stream>(0x5802);
  return registry;
}

std::shared_ptr<Stream> make_stream(const std::shared_ptr<Context>& context) {
  auto stream = std::make_shared<Stream>();
  stream->context = context;
  streams().add(stream);
  return stream;
}

int resolve_stream(aclrtStream handle, std::shared_ptr<Stream>* out) {
  auto context = current_context();
  if (context == nullptr) return kContextNull;
  if (handle == nullptr) {
    std::lock_guard<std::mutex> lock(context->mutex);
    if (context->default_stream == nullptr) context->default_stream = make_stream(context);
    *out = context->default_stream;
    return kOk;
  }
  *out = streams().find(handle);
  if (*out == nullptr) {
    return fail(kInvalidHandle, "EE1003: %p is not a live stream", handle);
  }
  if ((*out)->context != context) {
    return fail(
        kStreamContext,
        "EE1002: stream %p belongs to another context (device %d) than the one this thread has "
        "set (device %d)",
        handle, (*out)->context->device, context->device);
  }
  return kOk;
}

void stop_streams_of(const std::shared_ptr<Context>& context) {
  for (auto& stream : streams().all()) {
    if (stream->context == context && streams().take(reinterpret_cast<void*>(stream->id))) {
      stop_stream(stream, false);
    }
  }
  std::lock_guard<std::mutex> lock(context->mutex);
  context->default_stream = nullptr;
}

}  // namespace xsd

using namespace xsd;

int xsdStreamEnqueue(aclrtStream handle, const char* name, xsdTaskFn run, void* ctx,
                     xsdReleaseFn release) {
  auto let_go = [release, ctx] {
    if (release != nullptr) release(ctx);
  };
  std::shared_ptr<Stream> stream;
  int code = enter();
  if (code == kOk && run == nullptr)
    code = fail(kParamInvalid, "EE1003: a task without a function");
  if (code == kOk) code = resolve_stream(handle, &stream);
  if (code != kOk) {
    let_go();
    return code;
  }
  Task task;
  task.name = name == nullptr ? "task" : name;
  task.run = [run, ctx] { return run(ctx); };
  task.release = let_go;
  return enqueue(stream, std::move(task));
}

aclError aclrtCreateStream(aclrtStream* out) { return create(out, "aclrtCreateStream"); }

aclError aclrtCreateStreamWithConfig(aclrtStream* out, uint32_t, uint32_t) {
  return create(out, "aclrtCreateStreamWithConfig");  // no priorities here: all workers are equal
}

aclError aclrtDestroyStream(aclrtStream stream) {
  return destroy(stream, false, "aclrtDestroyStream");
}

aclError aclrtDestroyStreamForce(aclrtStream stream) {
  return destroy(stream, true, "aclrtDestroyStreamForce");
}

aclError aclrtSynchronizeStream(aclrtStream stream) {
  return synchronize_handle(stream, -1, "aclrtSynchronizeStream");
}

aclError aclrtSynchronizeStreamWithTimeout(aclrtStream stream, int32_t timeout) {
  return synchronize_handle(stream, timeout, "aclrtSynchronizeStreamWithTimeout");
}

aclError aclrtSynchronizeDevice() { return synchronize_device(-1); }

aclError aclrtSynchronizeDeviceWithTimeout(int32_t timeout) { return synchronize_device(timeout); }

aclError aclrtStreamQuery(aclrtStream handle, aclrtStreamStatus* status) {
  if (int code = enter()) return code;
  if (status == nullptr) return fail(kParamInvalid, "EE1003: aclrtStreamQuery: status is null");
  std::shared_ptr<Stream> stream;
  if (int code = resolve_stream(handle, &stream)) return code;
  {
    std::lock_guard<std::mutex> lock(stream->mutex);
    const bool idle = stream->completed == stream->submitted;
    *status = idle ? ACL_STREAM_STATUS_COMPLETE : ACL_STREAM_STATUS_NOT_READY;
    if (!idle) return kOk;
  }
  return report_failure(stream, "aclrtStreamQuery");
}

aclError aclrtStreamGetId(aclrtStream handle, int32_t* id) {
  if (int code = enter()) return code;
  if (id == nullptr) return fail(kParamInvalid, "EE1003: aclrtStreamGetId: streamId is null");
  std::shared_ptr<Stream> stream;
  if (int code = resolve_stream(handle, &stream)) return code;
  *id = stream_number(stream->id);
  return kOk;
}
