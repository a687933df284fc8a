// SPDX-License-Identifier: Apache-2.0
// Host callbacks: reports handled by a subscribed thread, and functions run by the stream's worker.
#include <pthread.h>

#include <deque>
#include <map>

#include "internal.h"

namespace xsd {
namespace {

struct Report {
  aclrtCallback fn = nullptr;
  void* data = nullptr;
  std::mutex mutex;
  std::condition_variable finished;
  bool done = false;
};

struct ReportQueue {
  std::mutex mutex;
  std::condition_variable arrived;
  std::deque<std::shared_ptr<Report>> reports;
  uint32_t streams = 0;
};

std::mutex& table_mutex() {
  static auto& mutex = *new std::mutex;
  return mutex;
}

std::map<uint64_t, std::shared_ptr<ReportQueue>>& table() {
  static auto& map = *new std::map<uint64_t, std::shared_ptr<ReportQueue>>;
  return map;
}

std::shared_ptr<ReportQueue> queue_of(uint64_t thread) {
  std::lock_guard<std::mutex> lock(table_mutex());
  auto it = table().find(thread);
  return it == table().end() ? nullptr : it->second;
}

int wait_for_report(const std::shared_ptr<Report>& report) {
  const auto limit = std::chrono::milliseconds(xsdSettings()->wait_timeout_ms);
  std::unique_lock<std::mutex> lock(report->mutex);
  if (report->finished.wait_for(lock, limit, [&] { return report->done; })) return 0;
  xsdTaskError("the subscribed thread did not handle a blocking callback within %u ms",
               xsdSettings()->wait_timeout_ms);
  return kReportTimeout;
}

}  // namespace
}  // namespace xsd

using namespace xsd;

aclError aclrtSubscribeReport(uint64_t thread, aclrtStream handle) {
  if (int code = enter()) return code;
  std::shared_ptr<Stream> stream;
  if (int code = resolve_stream(handle, &stream)) return code;
  if (thread == 0) return fail(kParamInvalid, "EE1003: aclrtSubscribeReport: threadId is 0");
  std::lock_guard<std::mutex> lock(stream->mutex);
  if (stream->report_thread != 0) {
    return fail(kRepeatSubscribe, "EE1003: aclrtSubscribeReport: the stream has a thread already");
  }
  stream->report_thread = thread;
  std::lock_guard<std::mutex> table_lock(table_mutex());
  auto& queue = table()[thread];
  if (queue == nullptr) queue = std::make_shared<ReportQueue>();
  ++queue->streams;
  return kOk;
}

aclError aclrtUnSubscribeReport(uint64_t thread, aclrtStream handle) {
  if (int code = enter()) return code;
  std::shared_ptr<Stream> stream;
  if (int code = resolve_stream(handle, &stream)) return code;
  std::lock_guard<std::mutex> lock(stream->mutex);
  if (stream->report_thread == 0 || stream->report_thread != thread) {
    return fail(kStreamNotSubscribed,
                "EE1003: aclrtUnSubscribeReport: the stream has no such thread");
  }
  stream->report_thread = 0;
  std::lock_guard<std::mutex> table_lock(table_mutex());
  auto it = table().find(thread);
  if (it != table().end() && --it->second->streams == 0) table().erase(it);
  return kOk;
}

aclError aclrtLaunchCallback(aclrtCallback fn, void* data, aclrtCallbackBlockType block,
                             aclrtStream handle) {
  if (int code = enter()) return code;
  if (fn == nullptr) return fail(kParamInvalid, "EE1003: aclrtLaunchCallback: fn is null");
  if (block != ACL_CALLBACK_NO_BLOCK && block != ACL_CALLBACK_BLOCK) {
    return fail(kParamInvalid, "EE1003: aclrtLaunchCallback: blockType %d (0 or 1)",
                static_cast<int>(block));
  }
  std::shared_ptr<Stream> stream;
  if (int code = resolve_stream(handle, &stream)) return code;
  uint64_t thread;
  {
    std::lock_guard<std::mutex> lock(stream->mutex);
    thread = stream->report_thread;
  }
  auto queue = thread == 0 ? nullptr : queue_of(thread);
  if (queue == nullptr) {
    return fail(kStreamNotSubscribed,
                "EE1003: aclrtLaunchCallback: no thread is subscribed (aclrtSubscribeReport)");
  }
  auto report = std::make_shared<Report>();
  report->fn = fn;
  report->data = data;
  Task task;
  task.name = "host callback";
  task.run = [queue, report, block] {
    {
      std::lock_guard<std::mutex> lock(queue->mutex);
      queue->reports.push_back(report);
    }
    queue->arrived.notify_one();
    return block == ACL_CALLBACK_BLOCK ? wait_for_report(report) : 0;
  };
  return enqueue(stream, std::move(task));
}

aclError aclrtProcessReport(int32_t timeout) {
  if (int code = enter()) return code;
  if (timeout < -1) return fail(kParamInvalid, "EE1003: aclrtProcessReport: timeout %d", timeout);
  auto queue = queue_of(static_cast<uint64_t>(pthread_self()));
  if (queue == nullptr) {
    return fail(kThreadNotSubscribed,
                "EE1003: aclrtProcessReport: this thread has no subscription");
  }
  std::shared_ptr<Report> report;
  {
    std::unique_lock<std::mutex> lock(queue->mutex);
    auto some = [&] { return !queue->reports.empty(); };
    if (timeout < 0) {
      queue->arrived.wait(lock, some);
    } else if (!queue->arrived.wait_for(lock, std::chrono::milliseconds(timeout), some)) {
      return fail(kReportTimeout, "EE9999: aclrtProcessReport: no callback within %d ms", timeout);
    }
    report = queue->reports.front();
    queue->reports.pop_front();
  }
  report->fn(report->data);
  std::lock_guard<std::mutex> lock(report->mutex);
  report->done = true;
  report->finished.notify_all();
  return kOk;
}

aclError aclrtLaunchHostFunc(aclrtStream handle, aclrtHostFunc fn, void* args) {
  if (int code = enter()) return code;
  if (fn == nullptr) return fail(kParamInvalid, "EE1003: aclrtLaunchHostFunc: fn is null");
  std::shared_ptr<Stream> stream;
  if (int code = resolve_stream(handle, &stream)) return code;
  Task task;
  task.name = "host function";
  task.run = [fn, args] {
    fn(args);
    return 0;
  };
  return enqueue(stream, std::move(task));
}
