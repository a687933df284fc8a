# SPDX-License-Identifier: Apache-2.0
"""Streams of the software device: asynchrony, order, failures, callbacks.

The body of each test runs in a forked child: devices and settings belong to a process.
"""

from __future__ import annotations

import ctypes as C
import threading
import time

import pytest

from support.softdev import CALLBACK, Failed, child, device, error


def _async() -> list[str]:
    api = device()
    seen, gate = [], threading.Event()
    stream = api.stream()
    api.task(stream, lambda: seen.append("task") if gate.wait(20) else 7)
    seen.append("launched")
    status = C.c_int(-1)
    api.aclrtStreamQuery(stream, C.byref(status))
    assert status.value == 1  # not ready
    gate.set()
    api.aclrtSynchronizeStream(stream)
    api.aclrtStreamQuery(stream, C.byref(status))
    assert status.value == 0
    return seen


def test_a_launch_returns_before_the_work():
    assert child(_async) == ["launched", "task"]


def _fifo() -> list[int]:
    api = device()
    seen: list[int] = []
    stream = api.stream()
    for i in range(200):
        api.task(stream, lambda i=i: seen.append(i))
    api.aclrtSynchronizeStream(stream)
    return seen


@pytest.mark.parametrize("seed", ["0", "7"])
def test_one_stream_keeps_order(seed):
    env = {"XSD_DELAY_SEED": seed, "XSD_DELAY_MAX_US": "300"}
    assert child(_fifo, env=env) == list(range(200))


def _overlap() -> bool:
    api = device()
    both = threading.Barrier(2, timeout=20)
    streams = [api.stream(), api.stream()]
    for stream in streams:
        api.task(stream, lambda: 0 if both.wait() >= 0 else 7)
    for stream in streams:
        api.aclrtSynchronizeStream(stream)
    return True


def test_two_streams_overlap():
    assert child(_overlap)


def _delays(seed: str) -> list[int]:
    """Order in which two independent streams finish many tasks."""
    api = device()
    seen: list[int] = []
    streams = [api.stream(), api.stream()]
    for i in range(20):
        for which, stream in enumerate(streams):
            api.task(stream, lambda which=which, i=i: seen.append(100 * which + i))
    api.aclrtSynchronizeDevice()
    return [value // 100 for value in seen]


def test_seeded_delays_interleave_streams():
    env = {"XSD_DELAY_SEED": "3", "XSD_DELAY_MAX_US": "3000"}
    order = child(_delays, "3", env=env)
    assert order != [0, 1] * 20 and sorted(order) == [0] * 20 + [1] * 20


def _sticky() -> dict[str, object]:
    api = device()
    ran: list[str] = []
    stream, other, event = api.stream(), api.stream(), api.event()

    def broken() -> int:
        api.libs[0].xsdTaskError(b"rank %d died", 3)
        return 507057

    api.task(stream, broken, "all reduce")
    api.task(stream, lambda: ran.append("skipped"))
    api.aclrtRecordEvent(event, stream)
    api.aclrtStreamWaitEvent(other, event)
    api.task(other, lambda: ran.append("other"))
    out: dict[str, object] = {}
    out["first"] = (api.status("aclrtSynchronizeStream", stream), error())
    out["again"] = (api.status("aclrtSynchronizeStream", stream), error())
    out["event"] = (api.status("aclrtSynchronizeEvent", event), error())
    out["query"] = api.status("aclrtStreamQuery", stream, C.byref(C.c_int()))
    api.aclrtSynchronizeStream(other)  # the waiter was let go and is not failed itself
    out["device"] = (api.status("aclrtSynchronizeDevice"), error())
    out["ran"] = ran
    out["destroy"] = api.status("aclrtDestroyStream", stream)
    out["after"] = api.status("aclrtSynchronizeStream", stream)
    return out


def test_a_failed_task_fails_its_stream_for_good():
    out = child(_sticky)
    for key in ("first", "again", "event", "device"):
        code, text = out[key]
        assert code == 507057 and "all reduce" in text and "rank 3 died" in text, (key, code, text)
    assert out["query"] == 507057
    assert out["ran"] == ["other"]
    assert out["destroy"] == 0 and out["after"] == 107017


def _release() -> list[str]:
    from support.softdev import TASK

    api = device()
    seen: list[str] = []
    run = [TASK(lambda ctx, code=code: code) for code in (0, 507035, 0)]
    let_go = CALLBACK(lambda ctx: seen.append(f"released {ctx}"))
    stream = api.stream()
    for i, fn in enumerate(run):
        api.xsdStreamEnqueue(stream, b"t", fn, C.c_void_p(i + 1), let_go)
    api.status("aclrtSynchronizeStream", stream)
    refused = api.status("xsdStreamEnqueue", C.c_void_p(12345), b"t", run[0], C.c_void_p(9), let_go)
    assert refused == 107017
    return seen


def test_release_is_called_once_also_when_skipped_or_refused():
    assert child(_release) == [f"released {i}" for i in (1, 2, 3, 9)]


def _timeouts() -> list[tuple[int, str]]:
    api = device()
    gate = threading.Event()
    stream, event = api.stream(), api.event()
    api.task(stream, lambda: 0 if gate.wait(20) else 7)
    api.aclrtRecordEvent(event, stream)
    out = [(api.status("aclrtSynchronizeStreamWithTimeout", stream, ms), error()) for ms in (0, 20)]
    out.append((api.status("aclrtSynchronizeEventWithTimeout", event, 20), error()))
    out.append((api.status("aclrtSynchronizeDeviceWithTimeout", 20), error()))
    gate.set()
    api.aclrtSynchronizeStreamWithTimeout(stream, 20000)
    api.aclrtSynchronizeEventWithTimeout(event, 20000)
    out.append((api.status("aclrtSynchronizeStreamWithTimeout", stream, -2), error()))
    return out


def test_synchronize_with_timeout():
    codes = [code for code, text in child(_timeouts) if text]
    assert codes == [507046, 507046, 507047, 507046, 107000]


def _own_worker() -> list[int]:
    api = device()
    seen: list[int] = []
    stream, event = api.stream(), api.event()

    def inside() -> int:
        api.status("aclrtSetDevice", 0)  # a worker has no device of its own
        seen.append(api.status("aclrtSynchronizeStream", stream))
        seen.append(api.status("aclrtDestroyStream", stream))
        seen.append(api.status("aclrtSynchronizeEvent", event))
        return 0

    gate = threading.Event()
    api.task(stream, lambda: 0 if gate.wait(20) else 7)
    api.task(stream, inside)
    api.aclrtRecordEvent(event, stream)
    gate.set()
    api.aclrtSynchronizeStream(stream)
    return seen


def test_a_task_cannot_wait_for_its_own_stream():
    assert child(_own_worker) == [107000] * 3


def _destroy_drains() -> list[int]:
    api = device()
    seen: list[int] = []
    stream = api.stream()
    for i in range(20):
        api.task(stream, lambda i=i: (time.sleep(0.001), seen.append(i))[1])
    api.aclrtDestroyStream(stream)
    kept = len(seen)
    forced, event = api.stream(), api.event()
    started, gate = threading.Event(), threading.Event()
    api.task(forced, lambda: started.set() or (0 if gate.wait(20) else 7))
    api.task(forced, lambda: seen.append(99))
    api.aclrtRecordEvent(event, forced)
    started.wait(20)
    threading.Timer(0.05, gate.set).start()
    api.aclrtDestroyStreamForce(forced)
    api.aclrtSynchronizeEvent(event)  # fires although its stream was dropped
    return [kept, seen.count(99)]


def test_destroy_runs_what_is_queued_and_force_drops_it():
    assert child(_destroy_drains) == [20, 0]


def _parked_and_forced() -> list[int]:
    api = device()
    gate = threading.Event()
    blocked, parked, event = api.stream(), api.stream(), api.event()
    api.task(blocked, lambda: 0 if gate.wait(20) else 7)
    api.aclrtRecordEvent(event, blocked)
    api.aclrtStreamWaitEvent(parked, event)
    api.aclrtDestroyStreamForce(parked)  # what it waits for may never come
    gate.set()
    return [api.status("aclrtSynchronizeStream", blocked)]


def test_force_also_drops_a_wait():
    assert child(_parked_and_forced) == [0]


def _waits_of_a_failed_stream() -> list[int]:
    api = device()
    gate = threading.Event()
    blocked, failed, event = api.stream(), api.stream(), api.event()
    api.task(failed, lambda: 507035)
    out = [api.status("aclrtSynchronizeStream", failed)]
    api.task(blocked, lambda: 0 if gate.wait(20) else 7)
    api.aclrtRecordEvent(event, blocked)
    api.aclrtStreamWaitEvent(failed, event)
    out.append(api.status("aclrtSynchronizeStreamWithTimeout", failed, 5000))
    gate.set()
    return [*out, api.status("aclrtSynchronizeStream", blocked)]


def test_a_failed_stream_waits_for_nothing():
    assert child(_waits_of_a_failed_stream) == [507035, 507035, 0]


def _others_tasks() -> list[int]:
    """A stream's worker goes on with its own work although it has made 200,000 small tasks due."""
    api = device()
    gate, busy = threading.Event(), []
    mine, other, event = api.stream(), api.stream(), api.event()
    byte = C.create_string_buffer(1)
    api.task(mine, lambda: 0 if gate.wait(20) else 7)
    api.aclrtRecordEvent(event, mine)
    api.aclrtStreamWaitEvent(other, event)
    fill = api.libs[0].aclrtMemsetAsync
    for _ in range(200_000):
        fill(byte, C.c_size_t(1), 0, C.c_size_t(1), other)

    def look() -> int:
        status = C.c_int(-1)
        api.status("aclrtSetDevice", 0)
        api.status("aclrtStreamQuery", other, C.byref(status))
        busy.append(status.value)
        return 0

    api.task(mine, look)
    gate.set()
    api.aclrtSynchronizeStream(mine)
    api.aclrtSynchronizeStream(other)
    return busy


def test_small_tasks_of_another_stream_hold_nobody_up():
    assert child(_others_tasks) == [1]  # not ready


def _contexts() -> list[int]:
    api = device(0)
    out = [api.status("aclrtGetDevice", C.byref(C.c_int32()))]
    stream = api.stream()
    api.aclrtSetDevice(1)
    value = C.c_int32(-1)
    api.aclrtGetDevice(C.byref(value))
    out.append(value.value)
    out.append(api.status("aclrtSynchronizeStream", stream))  # of device 0
    out.append(api.status("aclrtSetDevice", 16))
    context = C.c_void_p()
    api.aclrtCreateContext(C.byref(context), 0)
    current = C.c_void_p()
    api.aclrtGetCurrentContext(C.byref(current))
    assert current.value == context.value
    out.append(api.status("aclrtDestroyContext", context))
    out.append(api.status("aclrtDestroyContext", context))
    out.append(api.status("aclrtGetDevice", C.byref(value)))
    other: list[int] = []

    def fresh_thread() -> None:
        other.append(api.status("aclrtGetDevice", C.byref(C.c_int32())))
        other.append(api.status("aclrtCreateStream", C.byref(C.c_void_p())))

    thread = threading.Thread(target=fresh_thread)
    thread.start()
    thread.join()
    return out + other


def test_devices_and_contexts_belong_to_threads():
    assert child(_contexts) == [0, 1, 107003, 107001, 0, 107002, 107002, 107002, 107002]


def _life() -> list[int]:
    api = device()
    out = [api.status("aclInit", None), api.status("aclInit", None)]
    out.append(api.status("aclInit", b"/no/such/file.json"))
    stream = api.stream()
    out += [api.status("aclFinalize"), api.status("aclFinalize")]
    out.append(api.status("aclrtSynchronizeStream", stream))
    return out


def test_init_and_finalize():
    assert child(_life) == [0, 100002, 100003, 0, 100037, 107002]


def _reset() -> list[int]:
    api = device()
    stream, seen = api.stream(), []
    api.task(stream, lambda: seen.append(1))
    out = [api.status("aclrtResetDevice", 0), len(seen)]
    out.append(api.status("aclrtGetDevice", C.byref(C.c_int32())))
    out.append(api.status("aclrtResetDevice", 0))
    api.aclrtSetDevice(0)
    out.append(api.status("aclrtSynchronizeStream", stream))
    return out


def test_reset_drains_and_ends_the_streams():
    assert child(_reset) == [0, 1, 107002, 107002, 107017]


def _host_func() -> list[str]:
    api = device()
    seen: list[str] = []
    fn = CALLBACK(lambda arg: seen.append(f"host {arg}"))
    stream = api.stream()
    api.task(stream, lambda: seen.append("before"))
    api.aclrtLaunchHostFunc(stream, fn, C.c_void_p(5))
    api.task(stream, lambda: seen.append("after"))
    api.aclrtSynchronizeStream(stream)
    return seen


def test_host_functions_run_in_stream_order():
    assert child(_host_func) == ["before", "host 5", "after"]


def _reports() -> list[object]:
    api = device()
    seen: list[object] = []
    stream, stop = api.stream(), threading.Event()
    fn = CALLBACK(lambda arg: (time.sleep(0.02), seen.append(threading.get_ident()))[1])
    seen.append(api.status("aclrtLaunchCallback", fn, None, 1, stream))  # nobody subscribed
    seen.append(api.status("aclrtProcessReport", 1))
    ready = threading.Event()

    def serve() -> None:
        ready.wait()
        while not stop.is_set():
            api.status("aclrtProcessReport", 20)

    thread = threading.Thread(target=serve)
    thread.start()
    tid = C.c_uint64(thread.ident or 0)  # pthread_self on this platform
    api.aclrtSubscribeReport(tid, stream)
    seen.append(api.status("aclrtSubscribeReport", tid, stream))
    ready.set()
    api.aclrtLaunchCallback(fn, None, 1, stream)
    api.task(stream, lambda: seen.append("after the callback"))
    api.aclrtSynchronizeStream(stream)
    stop.set()
    thread.join()
    api.aclrtUnSubscribeReport(tid, stream)
    seen.append(api.status("aclrtUnSubscribeReport", tid, stream))
    return ["thread" if value == thread.ident else value for value in seen]


def test_subscribed_thread_handles_blocking_callbacks():
    expected = [100034, 100035, 100033, "thread", "after the callback", 100034]
    assert child(_reports) == expected


def _report_timeout() -> tuple[int, str]:
    api = device()
    stream = api.stream()
    fn = CALLBACK(lambda arg: None)
    api.kept.append(fn)
    api.aclrtSubscribeReport(C.c_uint64(1), stream)
    api.aclrtLaunchCallback(fn, None, 1, stream)
    return api.status("aclrtSynchronizeStream", stream), error()


def test_a_blocking_callback_nobody_handles_ends():
    code, text = child(_report_timeout, env={"XSD_WAIT_TIMEOUT_MS": "100"})
    assert code == 507012 and "100 ms" in text


def _texts() -> list[str]:
    api = device()
    texts: list[str] = []
    api.status("aclrtSynchronizeStream", C.c_void_p(77))
    other: list[str] = []
    thread = threading.Thread(target=lambda: other.append(error()))
    thread.start()
    thread.join()
    texts += [other[0], error(), error()]
    with pytest.raises(Failed):
        api.aclrtSetDevice(-1)
    return texts


def test_error_text_is_the_threads_own_and_read_once():
    other, first, second = child(_texts)
    assert other == "" and "not a live stream" in first and second == ""
