// SPDX-License-Identifier: Apache-2.0
// Streams: a first-in first-out queue and one worker thread each, started with the first task.
#include <signal.h>

#include <algorithm>
#include <cstdio>
#include <system_error>

#include "internal.h"

namespace xsd {
namespace {

thread_local uint64_t t_worker_of = 0;

void run_task(const std::shared_ptr<Stream>& stream, Task& task, uint64_t turn) {
  bool skip;
  {
    std::lock_guard<std::mutex> lock(stream->mutex);
    skip = (stream->error != 0 || stream->dropping) && !task.always;
  }
  if (!skip) {
    xsdDelay(static_cast<uint32_t>((stream->id >> 4) * 131 + turn));
    take_task_error();  // a text left by an earlier task is not this one's
    const uint64_t start = trace_begin();
    const int code = task.run();
    trace_end(*stream, task.name, start, code);
    if (code != 0) {
      const std::string text = take_task_error();
      std::lock_guard<std::mutex> lock(stream->mutex);
      if (stream->error == 0) {
        stream->error = code;
        stream->error_text = "task " + task.name + " failed with device error " +
                             std::to_string(code) + (text.empty() ? "" : ": " + text);
      }
    }
  }
  if (task.release) task.release();
}

void work(std::shared_ptr<Stream> stream) {
  t_worker_of = stream->id;
  std::unique_lock<std::mutex> lock(stream->mutex);
  for (uint64_t turn = 0;; ++turn) {
    stream->work.wait(lock, [&] { return stream->stopping || !stream->queue.empty(); });
    if (stream->queue.empty()) return;
    Task task = std::move(stream->queue.front());
    stream->queue.pop_front();
    lock.unlock();
    run_task(stream, task, turn);
    task = Task{};  // frees what the task held before it counts as done
    lock.lock();
    ++stream->completed;
    stream->done.notify_all();
  }
}

// Signals stay with the threads of the program, so that an interrupt wakes the one that handles it.
bool start_worker(const std::shared_ptr<Stream>& stream) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  bool started = true;
  try {
    stream->worker = std::thread(work, stream);
  } catch (const std::system_error&) {
    started = false;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return started;
}

int report_failure(const std::shared_ptr<Stream>& stream, const char* call) {
  std::lock_guard<std::mutex> lock(stream->mutex);
  if (stream->error == 0) return kOk;
  return fail(stream->error, "EE9999: %s: %.900s", call, stream->error_text.c_str());
}

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

bool on_worker_of(uint64_t stream_id) { return t_worker_of != 0 && t_worker_of == stream_id; }

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

int enqueue(const std::shared_ptr<Stream>& stream, Task task) {
  {
    std::lock_guard<std::mutex> lock(stream->mutex);
    if (!stream->stopping && !stream->started) stream->started = start_worker(stream);
    if (!stream->stopping && stream->started) {
      stream->queue.push_back(std::move(task));
      ++stream->submitted;
      stream->work.notify_one();
      return kOk;
    }
  }
  if (task.release) task.release();
  return fail(
      kInvalidHandle,
      "EE1003: task %s: its stream is being destroyed or has no thread (the system gave none)",
      task.name.c_str());
}

int synchronize(const std::shared_ptr<Stream>& stream, int64_t timeout_ms) {
  if (on_worker_of(stream->id)) {
    return fail(
        kParamInvalid,
        "EE1003: synchronize called by a task of this same stream: it would wait for itself");
  }
  {
    std::unique_lock<std::mutex> lock(stream->mutex);
    const uint64_t target = stream->submitted;
    auto reached = [&] { return stream->completed >= target; };
    if (timeout_ms < 0) {
      stream->done.wait(lock, reached);
    } else if (!stream->done.wait_for(lock, std::chrono::milliseconds(timeout_ms), reached)) {
      return fail(
          kStreamSyncTimeout, "EE9999: stream not done after %lld ms (%llu of %llu tasks are)",
          static_cast<long long>(timeout_ms), static_cast<unsigned long long>(stream->completed),
          static_cast<unsigned long long>(target));
    }
  }
  return report_failure(stream, "synchronize");
}

void stop_stream(const std::shared_ptr<Stream>& stream, bool drop) {
  std::thread worker;
  {
    std::lock_guard<std::mutex> lock(stream->mutex);
    stream->stopping = true;
    if (drop) stream->dropping = true;
    worker = std::move(stream->worker);
  }
  stream->work.notify_all();
  if (worker.joinable()) {
    // A callback that ends its own context cannot wait for itself.
    if (on_worker_of(stream->id)) {
      worker.detach();
    } else {
      worker.join();
    }
  }
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

uint64_t xsdCurrentStream() {
  return t_worker_of == 0 ? 0 : static_cast<uint64_t>(stream_number(t_worker_of));
}

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
