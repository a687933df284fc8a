# SPDX-License-Identifier: Apache-2.0
"""Events of the software device: a wait is for the recording that was there when it was called."""

from __future__ import annotations

import ctypes as C
import os
import threading
import time

from support.softdev import child, device


def _unrecorded() -> list[int]:
    api = device()
    stream, event = api.stream(), api.event()
    out = [api.status("aclrtStreamWaitEvent", stream, event)]
    out.append(api.status("aclrtSynchronizeEvent", event))
    out.append(int(api.event_done(event)))
    out.append(api.status("aclrtSynchronizeStream", stream))
    return out


def test_waiting_for_an_unrecorded_event_does_nothing():
    assert child(_unrecorded) == [0, 0, 0, 0]


def _captured() -> list[str]:
    api = device()
    seen: list[str] = []
    gates = [threading.Event(), threading.Event()]
    first, second, waiter = api.stream(), api.stream(), api.stream()
    event = api.event()
    api.task(first, lambda: 0 if gates[0].wait(20) else 7)
    api.aclrtRecordEvent(event, first)
    api.aclrtStreamWaitEvent(waiter, event)
    api.task(waiter, lambda: seen.append("waiter"))
    # Recorded again on a stream that is far from done: the waiter does not care.
    api.task(second, lambda: 0 if gates[1].wait(20) else 7)
    api.aclrtRecordEvent(event, second)
    gates[0].set()
    api.aclrtSynchronizeStream(waiter)
    seen.append(f"event done {api.event_done(event)}")
    gates[1].set()
    api.aclrtSynchronizeEvent(event)
    seen.append(f"event done {api.event_done(event)}")
    return seen


def test_a_wait_captures_the_recording_seen_at_call_time():
    assert child(_captured) == ["waiter", "event done False", "event done True"]


def _newer_first() -> list[str]:
    """A later recording that fires first does not let go of a wait for the earlier one."""
    api = device()
    seen: list[str] = []
    gate = threading.Event()
    slow, quick, waiter = api.stream(), api.stream(), api.stream()
    event = api.event()
    api.task(slow, lambda: 0 if gate.wait(20) else 7)
    api.aclrtRecordEvent(event, slow)
    api.aclrtStreamWaitEvent(waiter, event)
    api.task(waiter, lambda: seen.append("waiter"))
    api.aclrtRecordEvent(event, quick)
    api.aclrtSynchronizeEvent(event)
    time.sleep(0.05)
    seen.append("second fired")
    gate.set()
    api.aclrtSynchronizeStream(waiter)
    return seen


def test_generations_are_not_mixed_up():
    assert child(_newer_first) == ["second fired", "waiter"]


def _destroyed() -> list[int]:
    api = device()
    seen: list[int] = []
    gate = threading.Event()
    stream, waiter = api.stream(), api.stream()
    event = api.event()
    api.task(stream, lambda: 0 if gate.wait(20) else 7)
    api.aclrtRecordEvent(event, stream)
    api.aclrtStreamWaitEvent(waiter, event)
    api.task(waiter, lambda: seen.append(1))
    seen.append(api.status("aclrtDestroyEvent", event))
    seen.append(api.status("aclrtDestroyEvent", event))
    seen.append(api.status("aclrtRecordEvent", event, stream))
    gate.set()
    api.aclrtSynchronizeStream(waiter)
    return seen


def test_an_event_may_be_destroyed_while_queued():
    assert child(_destroyed) == [0, 107017, 107017, 1]


def _ping_pong() -> list[int]:
    """Two streams that alternate through one event each stay in step over many rounds."""
    api = device()
    seen: list[int] = []
    streams = [api.stream(), api.stream()]
    events = [api.event(), api.event()]
    for i in range(100):
        mine, other = i % 2, 1 - i % 2
        api.aclrtStreamWaitEvent(streams[mine], events[other])
        api.task(streams[mine], lambda i=i: seen.append(i))
        api.aclrtRecordEvent(events[mine], streams[mine])
    api.aclrtSynchronizeDevice()
    return seen


def test_events_order_two_streams():
    env = {"XSD_DELAY_SEED": "11", "XSD_DELAY_MAX_US": "400"}
    assert child(_ping_pong, env=env) == list(range(100))


def _elapsed() -> list[object]:
    api = device()
    stream = api.stream()
    start, end = api.event(), api.event()
    ms = C.c_float()
    out: list[object] = [api.status("aclrtEventElapsedTime", C.byref(ms), start, end)]
    api.aclrtRecordEvent(start, stream)
    api.task(stream, lambda: time.sleep(0.03))
    api.aclrtRecordEvent(end, stream)
    out.append(api.status("aclrtEventElapsedTime", C.byref(ms), start, end))
    api.aclrtSynchronizeEvent(end)
    api.aclrtEventElapsedTime(C.byref(ms), start, end)
    out.append(ms.value >= 25)
    out.append(api.status("aclrtEventElapsedTime", C.byref(ms), end, start))
    untimed = C.c_void_p()
    api.aclrtCreateEventWithFlag(C.byref(untimed), 1)  # ACL_EVENT_SYNC
    out.append(api.status("aclrtEventElapsedTime", C.byref(ms), start, untimed))
    return out


def test_elapsed_time():
    assert child(_elapsed) == [507006, 507006, True, 107007, 107006]


def _many() -> int:
    """Creating, recording and destroying from many threads at a time."""
    api = device()
    stream = api.stream()
    failures: list[int] = []

    def churn() -> None:
        api.aclrtSetDevice(0)
        for _ in range(200):
            event = api.event()
            failures.append(api.status("aclrtRecordEvent", event, stream))
            failures.append(api.status("aclrtStreamWaitEvent", stream, event))
            failures.append(api.status("aclrtDestroyEvent", event))

    threads = [threading.Thread(target=churn) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    api.aclrtSynchronizeStream(stream)
    return sum(failures)


def test_events_from_many_threads():
    assert child(_many) == 0


class TaskEntry(C.Structure):
    """XsdTaskEntry of xsd.h."""

    _fields_ = [
        ("name", C.c_char * 32),
        ("stream", C.c_uint64),
        ("device", C.c_uint32),
        ("status", C.c_uint32),
        ("start_ns", C.c_uint64),
        ("end_ns", C.c_uint64),
    ]


def _traced_wait() -> tuple[list[bytes], bool]:
    api = device()
    gate = threading.Event()
    blocked, waiter, event = api.stream(), api.stream(), api.event()
    api.libs[0].xsdTaskTraceEnable(1)
    api.task(blocked, lambda: 0 if gate.wait(20) else 7)
    api.aclrtRecordEvent(event, blocked)
    api.aclrtStreamWaitEvent(waiter, event)
    queued = time.monotonic_ns()
    time.sleep(0.002)
    gate.set()
    api.aclrtSynchronizeStream(waiter)
    entries, dropped = (TaskEntry * 8)(), C.c_uint64()
    count = api.libs[0].xsdTaskTraceRead(entries, 8, C.byref(dropped))
    found = {entry.name: entry for entry in entries[:count]}
    wait, record = found[b"event wait"], found[b"event record"]
    return sorted(found), wait.start_ns <= queued and wait.end_ns >= record.start_ns


def test_a_wait_is_traced_from_its_turn_to_the_event():
    assert child(_traced_wait) == ([b"event record", b"event wait", b"test"], True)


def _fired_waits(trace: bool) -> int:
    """Tasks that the device counts for a stream whose only task is a wait for a fired event."""
    api = device()
    done, waiter, event = api.stream(), api.stream(), api.event()
    api.aclrtRecordEvent(event, done)
    api.aclrtSynchronizeEvent(event)
    api.libs[0].xsdTaskTraceEnable(int(trace))
    api.aclrtStreamWaitEvent(waiter, event)
    api.aclrtSynchronizeStream(waiter)
    entries, dropped = (TaskEntry * 8)(), C.c_uint64()
    return int(api.libs[0].xsdTaskTraceRead(entries, 8, C.byref(dropped)))


def test_a_trace_shows_a_wait_for_a_fired_event_too():
    assert [child(_fired_waits, trace) for trace in (True, False)] == [1, 0]


def _workers_of_fired_waits() -> int:
    """Threads that such a wait starts: a stream's worker comes with its first task."""
    api = device()
    done, waiter, event = api.stream(), api.stream(), api.event()
    api.aclrtRecordEvent(event, done)
    api.aclrtSynchronizeEvent(event)
    before = len(os.listdir("/proc/self/task"))
    api.aclrtStreamWaitEvent(waiter, event)
    return len(os.listdir("/proc/self/task")) - before


def test_with_delays_a_stream_has_the_same_tasks_in_every_run():
    delays = {"XSD_DELAY_SEED": "1", "XSD_DELAY_MAX_US": "10"}
    started = [child(_workers_of_fired_waits, env=env) for env in (delays, {"XSD_DELAY_SEED": "0"})]
    assert started == [1, 0]
