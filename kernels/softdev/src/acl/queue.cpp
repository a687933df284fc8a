// SPDX-License-Identifier: Apache-2.0
// How streams run their tasks: first in, first out, one thread at a time.
//
// Every stream has a worker thread, started with the first task. Waking a thread takes longer than
// most tasks, so a worker is woken only for what may take long. Brief tasks (events, small copies)
// are run by whoever is awake: the worker that fired the event they waited for, or the one on duty.
//
//   idle      nothing is queued
//   due       the worker is to go on
//   parked    the next task waits for a recording that has not fired; no thread is blocked by that
//   running   the thread whose turn it is goes from task to task
//
// With seeded delays no task is brief: a pause would hold up other streams.
#include <signal.h>

#include <system_error>

#include "internal.h"

namespace xsd {
namespace {

constexpr int kHelp = 32;  // tasks of other streams in a row, then their own workers have to go on
constexpr auto kLook = std::chrono::microseconds(4);  // longer takes more from running tasks

thread_local uint64_t t_worker_of = 0;
// Streams whose turn this thread has, because it fired what they had waited for.
thread_local std::vector<std::shared_ptr<Stream>> t_due;

// Workers woken so far. Who looks goes to sleep when it changes: the woken one needs a processor.
std::atomic<uint32_t> g_woken{0};

// A worker without work is on duty for a moment before it sleeps, one of a process at a time: more
// of them would keep each other, and the host, from the processor.
struct Duty {
  std::mutex mutex;
  bool taken = false;
  std::vector<std::shared_ptr<Stream>> offered;  // their turn is the worker's who is on duty
  std::atomic<bool> some{false};
};
Duty& duty() {
  static auto& d = *new Duty;  // outlives worker threads
  return d;
}

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// A host thread looks too before it sleeps, again one at a time.
std::atomic<bool> g_host_looks{false};

template <typename Ready>
bool look(Ready ready) {
  if (ready()) return true;
  if (g_host_looks.exchange(true)) return false;
  const auto limit = Clock::now() + kLook;
  const uint32_t woken = g_woken;
  bool found = false;
  while (!found && woken == g_woken && Clock::now() < limit) {
    for (int i = 0; i < 16 && !(found = ready()); ++i) pause();
  }
  g_host_looks = false;
  return found;
}

bool skipped(const Stream& stream, const Task& task) {
  return (stream.error != 0 || stream.dropping) && !task.always;
}

void hand_to_worker(Stream& stream) {  // under its mutex
  stream.parked_for = nullptr;
  stream.turn = Turn::kDue;
  ++g_woken;
  stream.work.notify_one();
}

// Leaves the stream, whose turn the caller has, to the worker on duty, or else to its own. Outside
// its mutex: who is on duty takes it at once.
void offer(const std::shared_ptr<Stream>& stream) {
  {
    std::unique_lock<std::mutex> lock(duty().mutex);
    if (!duty().taken) {
      lock.unlock();
      std::lock_guard<std::mutex> mine(stream->mutex);
      return hand_to_worker(*stream);
    }
    duty().offered.push_back(stream);
  }
  duty().some = true;
}

// Leaves the stream to whoever fires the recording; false when that has happened. Under its mutex.
bool park(const std::shared_ptr<Stream>& stream, Task& task) {
  Recording& recording = *task.waits;
  std::lock_guard<std::mutex> lock(recording.mutex);
  if (recording.done) return false;
  if (task.begun == 0) task.begun = trace_begin();
  recording.parked.push_back(stream);
  stream->parked_for = &recording;
  stream->turn = Turn::kParked;
  return true;
}

void fail_stream(Stream& stream, const Task& task, int code) {
  const std::string text = take_task_error();
  std::lock_guard<std::mutex> lock(stream.mutex);
  if (stream.error != 0) return;
  stream.error_text = "task " + task.name + " failed with device error " + std::to_string(code) +
                      (text.empty() ? "" : ": " + text);
  stream.error = code;
}

void run_task(Stream& stream, Task& task) {
  const uint64_t number = stream.count++;
  if (!skipped(stream, task)) {
    xsdDelay(static_cast<uint32_t>((stream.id >> 4) * 131 + number));
    const uint64_t start = task.begun != 0 ? task.begun : trace_begin();
    int code = 0;
    if (task.fires != nullptr) {
      fire(stream, task.fires);
    } else if (task.run) {
      take_task_error();  // a text left by an earlier task is not this one's
      code = task.run();
    }
    trace_end(stream, task.name, start, code);
    if (code != 0) fail_stream(stream, task, code);
  }
  if (task.release) task.release();
}

void count_completed(Stream& stream) {
  if (++stream.completed < stream.wanted) return;
  {
    std::lock_guard<std::mutex> lock(stream.mutex);
    stream.wanted = Stream::kNobody;  // who wants more says so when it wakes
  }
  stream.done.notify_all();
}

// The next task to run; null when the turn was given away. `own`: by the stream's own worker, else
// `help` more tasks at most.
Task* next_task(const std::shared_ptr<Stream>& stream, bool own, int help) {
  if (stream->at == stream->batch.size()) {
    stream->batch.clear();
    stream->at = 0;
    std::lock_guard<std::mutex> lock(stream->mutex);
    if (stream->queue.empty()) {
      stream->turn = Turn::kIdle;
      if (stream->stopping) stream->work.notify_one();
      return nullptr;
    }
    stream->batch.swap(stream->queue);
  }
  Task& task = stream->batch[stream->at];
  const bool skip = skipped(*stream, task);
  const bool over = !own && (help == 0 || !(skip || task.brief));
  if (!over && (skip || task.waits == nullptr || task.waits->done)) return &task;
  std::lock_guard<std::mutex> lock(stream->mutex);
  if (!over) return park(stream, task) ? nullptr : &task;
  hand_to_worker(*stream);
  return nullptr;
}

void finish_task(Stream& stream, Task& task) {
  run_task(stream, task);
  task = Task{};  // frees what the task held before it counts as done
  ++stream.at;
  count_completed(stream);
}

void help_others() {
  int help = kHelp;
  while (!t_due.empty()) {
    const auto stream = std::move(t_due.back());
    t_due.pop_back();
    while (Task* task = next_task(stream, false, help)) {
      finish_task(*stream, *task);
      --help;
    }
  }
}

void go_on(const std::shared_ptr<Stream>& stream) {
  while (Task* task = next_task(stream, true, 0)) {
    // What this thread has made due comes before a task that may take long.
    if (!task->brief) help_others();
    finish_task(*stream, *task);
  }
  help_others();
}

// Gives the streams that may still be offered to their own workers.
void end_duty() {
  std::vector<std::shared_ptr<Stream>> left;
  {
    std::lock_guard<std::mutex> lock(duty().mutex);
    duty().taken = false;
    duty().some = false;
    left.swap(duty().offered);
  }
  for (auto& stream : left) {
    std::lock_guard<std::mutex> lock(stream->mutex);
    hand_to_worker(*stream);
  }
}

void be_on_duty(const Stream& own) {
  {
    std::lock_guard<std::mutex> lock(duty().mutex);
    if (duty().taken) return;
    duty().taken = true;
  }
  auto limit = Clock::now() + kLook;
  const uint32_t woken = g_woken;
  while (own.turn != Turn::kDue && !own.stopping && woken == g_woken && Clock::now() < limit) {
    for (int i = 0; i < 16 && !duty().some && own.turn != Turn::kDue; ++i) pause();
    if (!duty().some) continue;
    {
      std::lock_guard<std::mutex> lock(duty().mutex);
      t_due.swap(duty().offered);
      duty().some = false;
    }
    help_others();
    limit = Clock::now() + kLook;
  }
  end_duty();
}

void work(std::shared_ptr<Stream> stream) {
  t_worker_of = stream->id;
  for (;;) {
    be_on_duty(*stream);
    {
      std::unique_lock<std::mutex> lock(stream->mutex);
      stream->work.wait(lock, [&] {
        return stream->turn == Turn::kDue || (stream->stopping && stream->turn == Turn::kIdle);
      });
      if (stream->turn == Turn::kIdle) return;
      stream->turn = Turn::kRunning;
    }
    go_on(stream);
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

}  // namespace

bool on_worker_of(uint64_t stream_id) { return t_worker_of != 0 && t_worker_of == stream_id; }

bool look_for(const std::atomic<bool>& flag) {
  return look([&] { return flag.load(); });
}

void fire(Stream& stream, const std::shared_ptr<Recording>& recording) {
  std::vector<std::shared_ptr<Stream>> parked;
  {
    std::string text;
    if (stream.error != 0) {
      std::lock_guard<std::mutex> lock(stream.mutex);
      text = stream.error_text;
    }
    std::lock_guard<std::mutex> lock(recording->mutex);
    recording->error = stream.error;
    recording->text = std::move(text);
    recording->when = Clock::now();
    recording->done = true;
    parked.swap(recording->parked);
    recording->fired.notify_all();
  }
  for (auto& waiting : parked) {
    std::lock_guard<std::mutex> lock(waiting->mutex);
    if (waiting->parked_for != recording.get()) continue;  // dropped meanwhile
    waiting->parked_for = nullptr;
    waiting->turn = Turn::kRunning;
    t_due.push_back(waiting);
  }
}

int enqueue(const std::shared_ptr<Stream>& stream, Task task) {
  if (settings()->delay_seed != 0) task.brief = false;
  std::unique_lock<std::mutex> lock(stream->mutex);
  if (!stream->stopping && !stream->started) stream->started = start_worker(stream);
  if (stream->stopping || !stream->started) {
    lock.unlock();
    if (task.release) task.release();
    return fail(
        kInvalidHandle,
        "EE1003: task %s: its stream is being destroyed or has no thread (the system gave none)",
        task.name.c_str());
  }
  stream->queue.push_back(std::move(task));
  ++stream->submitted;
  if (stream->turn != Turn::kIdle) return kOk;
  Task& first = stream->queue.back();
  if (!first.brief) {
    hand_to_worker(*stream);
    return kOk;
  }
  if (first.waits != nullptr && !skipped(*stream, first) && park(stream, first)) return kOk;
  stream->turn = Turn::kRunning;
  lock.unlock();
  offer(stream);
  return kOk;
}

int report_failure(const std::shared_ptr<Stream>& stream, const char* call) {
  if (stream->error == 0) return kOk;
  std::lock_guard<std::mutex> lock(stream->mutex);
  return fail(stream->error, "EE9999: %s: %.900s", call, stream->error_text.c_str());
}

int synchronize(const std::shared_ptr<Stream>& stream, int64_t timeout_ms) {
  if (on_worker_of(stream->id)) {
    return fail(
        kParamInvalid,
        "EE1003: synchronize called by a task of this same stream: it would wait for itself");
  }
  const uint64_t target = stream->submitted;
  auto reached = [&] { return stream->completed >= target; };
  bool in_time = look(reached);
  if (!in_time) {
    // Said under the mutex and before it looks again: the worker counts first and then asks.
    const auto said = [&] {
      if (target < stream->wanted) stream->wanted = target;
      return reached();
    };
    std::unique_lock<std::mutex> lock(stream->mutex);
    if (timeout_ms < 0) {
      stream->done.wait(lock, said);
      in_time = true;
    } else {
      in_time = stream->done.wait_for(lock, std::chrono::milliseconds(timeout_ms), said);
    }
  }
  if (in_time) return report_failure(stream, "synchronize");
  return fail(kStreamSyncTimeout, "EE9999: stream not done after %lld ms (%llu of %llu tasks are)",
              static_cast<long long>(timeout_ms),
              static_cast<unsigned long long>(stream->completed.load()),
              static_cast<unsigned long long>(target));
}

void stop_stream(const std::shared_ptr<Stream>& stream, bool drop) {
  std::thread worker;
  {
    std::lock_guard<std::mutex> lock(stream->mutex);
    stream->stopping = true;
    if (drop) {
      stream->dropping = true;
      if (stream->turn == Turn::kParked) hand_to_worker(*stream);  // what it waits for may never come
    }
    worker = std::move(stream->worker);
  }
  stream->work.notify_all();
  if (!worker.joinable()) return;
  // A callback that ends its own context cannot wait for itself.
  if (on_worker_of(stream->id)) {
    worker.detach();
  } else {
    worker.join();
  }
}

}  // namespace xsd

using namespace xsd;

uint64_t xsdCurrentStream() {
  return t_worker_of == 0 ? 0 : static_cast<uint64_t>(stream_number(t_worker_of));
}
