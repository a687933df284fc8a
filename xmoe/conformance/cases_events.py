# SPDX-License-Identifier: Apache-2.0
"""Events: what a wait waits for, and what it does not."""

from __future__ import annotations

import time

from xmoe.conformance.case import case, require
from xmoe.conformance.cases_streams import BYTES, TIMEOUTS
from xmoe.conformance.session import TIMEOUT_S, Session, milliseconds, until
from xmoe.errors import AclError
from xmoe.kernels.acl.handles import AclEvent


@case(
    "event.orders_streams",
    "work behind a wait starts after the event's recording",
    "LaunchFence, executor edges",
)
def orders_streams(s: Session) -> str:
    one, two = s.stream(), s.stream()
    source, target = s.memory(BYTES), s.memory(BYTES)
    event = s.event()
    s.fill(source, 1, one)
    one.synchronize(TIMEOUT_S)
    gate = s.gate(one)
    s.fill(source, 2, one)
    event.record(one)
    two.wait_event(event)
    s.copy(target, source, two)
    time.sleep(0.05)
    gate.open()
    two.synchronize(TIMEOUT_S)
    got = s.value(target)
    require(got == 2, f"the copy behind the wait saw {got}")
    return "the copy on the second stream saw the write of the first"


@case("event.wait_returns", "aclrtStreamWaitEvent does not block the host", "executor")
def wait_returns(s: Session) -> str:
    one, two, event = s.stream(), s.stream(), s.event()
    gate = s.gate(one)
    event.record(one)
    begin = time.perf_counter()
    two.wait_event(event)
    took = time.perf_counter() - begin
    reached = event.query()
    gate.open()
    two.synchronize(TIMEOUT_S)
    require(took < 1 and not reached, f"returned after {took:.2f} s, event reached: {reached}")
    return f"returned after {took * 1000:.2f} ms while the event was not reached"


@case(
    "event.wait_unrecorded",
    "a wait for an event that was never recorded does nothing",
    "executor's first steps",
)
def wait_unrecorded(s: Session) -> str:
    stream, memory = s.stream(), s.memory(BYTES)
    begin = time.perf_counter()
    stream.wait_event(s.event())
    s.fill(memory, 4, stream)
    stream.synchronize(5.0)
    require(s.value(memory) == 4, f"memory holds {s.value(memory)}")
    return f"the stream went on; {milliseconds(begin)}"


@case(
    "event.wait_takes_generation",
    "a wait is for the recording that was there when it was called, not for a later one",
    "LaunchFence with one event per stream",
)
def wait_takes_generation(s: Session) -> str:
    one, two, event, memory = s.stream(), s.stream(), s.event(), s.memory(BYTES)
    event.record(one)
    one.synchronize(TIMEOUT_S)
    two.wait_event(event)
    gate = s.gate(one)
    event.record(one)
    s.fill(memory, 6, two)
    two.synchronize(5.0)
    got, reached = s.value(memory), event.query()
    gate.open()
    require(got == 6 and not reached, f"memory {got}, second recording reached: {reached}")
    return "the second recording, still open, did not hold the first one's wait"


@case("event.rerecord", "recording again makes the event open again", "event pool")
def rerecord(s: Session) -> str:
    stream, event = s.stream(), s.event()
    event.record(stream)
    event.synchronize(TIMEOUT_S)
    first = event.query()
    gate = s.gate(stream)
    event.record(stream)
    second = event.query()
    gate.open()
    event.synchronize(TIMEOUT_S)
    third = event.query()
    require((first, second, third) == (True, False, True), f"reached: {first}, {second}, {third}")
    return "reached, open again, reached"


@case(
    "event.query",
    "aclrtQueryEventStatus does not block and turns true with the work before it",
    "drain, LaunchFence",
)
def query(s: Session) -> str:
    stream, event = s.stream(), s.event()
    gate = s.gate(stream)
    event.record(stream)
    begin = time.perf_counter()
    before = event.query()
    took = milliseconds(begin)
    gate.open()
    require(not before and until(event.query), f"reached before: {before}, after: {event.query()}")
    return f"asked in {took}"


@case(
    "event.synchronize_timeout",
    "a wait with a limit for an event gives up with a code of its own",
    "fence_timeout_s",
)
def synchronize_timeout(s: Session) -> str:
    s.acl("aclrtSynchronizeEventWithTimeout")
    stream, event = s.stream(), s.event()
    gate = s.gate(stream)
    event.record(stream)
    begin, code = time.perf_counter(), 0
    try:
        event.synchronize(0.1)
    except AclError as error:
        code = error.code
    took = time.perf_counter() - begin
    gate.open()
    event.synchronize(TIMEOUT_S)
    require(code in TIMEOUTS and took < 5, f"code {code} after {took:.2f} s")
    return f"code {code} after {took:.2f} s for a limit of 0.1 s"


@case(
    "event.destroyed_while_queued",
    "an event may be destroyed while a wait for it is queued",
    "executor",
)
def destroyed_while_queued(s: Session) -> str:
    one, two, memory = s.stream(), s.stream(), s.memory(BYTES)
    gate = s.gate(one)
    with AclEvent(s.runtime) as event:
        event.record(one)
        two.wait_event(event)
    s.fill(memory, 8, two)
    time.sleep(0.05)
    before = s.value(memory)
    gate.open()
    two.synchronize(TIMEOUT_S)
    require(before != 8 and s.value(memory) == 8, f"memory {before}, then {s.value(memory)}")
    return "the wait held until the first stream went on"


@case("event.many", "one event may be recorded a thousand times", "event pool")
def many(s: Session) -> str:
    one, two, event = s.stream(), s.stream(), s.event()
    for _ in range(1000):
        event.record(one)
        two.wait_event(event)
    two.synchronize(TIMEOUT_S)
    require(event.query(), "the last recording is not reached after the wait for it")
    return "1000 recordings and waits"
