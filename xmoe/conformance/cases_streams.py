# SPDX-License-Identifier: Apache-2.0
"""Devices, threads, streams, error texts and errors that come late."""

from __future__ import annotations

import time

from xmoe.conformance.case import case, require
from xmoe.conformance.session import COMPLETE, NOT_READY, TIMEOUT_S, Session, milliseconds
from xmoe.errors import AclError
from xmoe.kernels.acl.status import REPEAT_INITIALIZE

TIMEOUTS = (107019, 107020, 507046, 507047)
BYTES = 1 << 16


@case("device.second_init", "a second aclInit answers 100002 and does no harm", "device, doctor")
def second_init(s: Session) -> str:
    code = s.acl("aclInit")(s.ffi.NULL)
    require(code == REPEAT_INITIALIZE, f"the second aclInit answered {code}: {s.text()}")
    s.memory(64)
    return f"answered {code}; memory can still be allocated"


@case("device.count", "aclrtGetDeviceCount counts the devices a rank may take", "ranks")
def count(s: Session) -> str:
    out = s.ffi.new("uint32_t*")
    code = s.acl("aclrtGetDeviceCount")(out)
    require(code == 0 and out[0] > s.index, f"code {code}, {out[0]} devices")
    return f"{out[0]} devices"


@case("device.soc", "aclrtGetSocName names a chip of a known family", "policy")
def soc(s: Session) -> str:
    name = str(s.ffi.string(s.acl("aclrtGetSocName")()).decode())
    require(name.startswith("Ascend"), f"the chip is called {name!r}")
    return name


@case(
    "device.per_thread",
    "a new thread has no device: aclrtGetDevice fails, context is none",
    "HostDevice.bind",
)
def per_thread(s: Session) -> str:
    def look() -> tuple[int, int]:
        out, context = s.ffi.new("int32_t*"), s.ffi.new("aclrtContext*")
        return s.acl("aclrtGetDevice")(out), s.acl("aclrtGetCurrentContext")(context)

    mine, theirs = look(), s.in_thread(look)
    require(mine == (0, 0) and all(theirs), f"this thread {mine}, new thread {theirs}")
    return f"a new thread gets {theirs[0]} and {theirs[1]}"


@case(
    "device.context_shared",
    "a thread that takes over a context uses the same device's streams",
    "HostDevice.bind",
)
def context_shared(s: Session) -> str:
    context = s.ffi.new("aclrtContext*")
    require(s.acl("aclrtGetCurrentContext")(context) == 0, "no current context")
    stream, memory = s.stream(), s.memory(BYTES)

    def elsewhere() -> int:
        code = int(s.acl("aclrtSetCurrentContext")(context[0]))
        s.fill(memory, 5, stream)
        stream.synchronize(TIMEOUT_S)
        return code

    code = s.in_thread(elsewhere)
    require(code == 0 and s.value(memory) == 5, f"code {code}, memory {s.value(memory)}")
    return "queued and synchronised from another thread"


@case(
    "stream.asynchronous",
    "a launch returns while earlier work of its stream still waits",
    "executor, every launch",
)
def asynchronous(s: Session) -> str:
    stream, memory = s.stream(), s.memory(BYTES)
    s.fill(memory, 1, stream)
    stream.synchronize(TIMEOUT_S)
    gate = s.gate(stream)
    begin = time.perf_counter()
    s.fill(memory, 2, stream)
    took = milliseconds(begin)
    time.sleep(0.05)
    before = s.value(memory)
    gate.open()
    stream.synchronize(TIMEOUT_S)
    after = s.value(memory)
    require((before, after) == (1, 2), f"memory held {before} before, {after} after")
    return f"returned after {took}; done only after the stream was let go"


@case(
    "stream.fifo", "work of one stream happens in the order of the calls", "executor, LaunchFence"
)
def fifo(s: Session) -> str:
    stream, source = s.stream(), s.memory(BYTES)
    targets = [s.memory(BYTES) for _ in range(8)]
    for number, target in enumerate(targets):
        s.fill(source, number + 1, stream)
        s.copy(target, source, stream)
    stream.synchronize(TIMEOUT_S)
    got = [s.value(target) for target in targets]
    require(got == list(range(1, 9)), f"copies hold {got}")
    return "8 writes and copies queued back to back, each copy saw its own write"


@case("stream.independent", "a blocked stream does not hold up another one", "executor")
def independent(s: Session) -> str:
    one, two, memory = s.stream(), s.stream(), s.memory(BYTES)
    gate = s.gate(one)
    s.fill(memory, 7, two)
    two.synchronize(5.0)
    held = s.value(memory)
    gate.open()
    require(held == 7, f"memory holds {held}")
    return "the other stream ended while the first was blocked"


@case("stream.query", "aclrtStreamQuery says 1 while work is left and 0 once it is done", "drain")
def query(s: Session) -> str:
    stream, status = s.stream(), s.ffi.new("int32_t*")
    gate = s.gate(stream)
    codes = [s.acl("aclrtStreamQuery")(stream.pointer, status)]
    busy = int(status[0])
    gate.open()
    stream.synchronize(TIMEOUT_S)
    codes.append(s.acl("aclrtStreamQuery")(stream.pointer, status))
    require(
        codes == [0, 0] and (busy, status[0]) == (NOT_READY, COMPLETE),
        f"codes {codes}, status {busy} then {status[0]}",
    )
    return f"{busy} then {status[0]}"


@case(
    "stream.synchronize_timeout",
    "a wait with a limit gives up with a code of its own, and the stream goes on",
    "step_timeout_s",
)
def synchronize_timeout(s: Session) -> str:
    stream, memory = s.stream(), s.memory(BYTES)
    gate = s.gate(stream)
    s.fill(memory, 3, stream)
    begin = time.perf_counter()
    try:
        stream.synchronize(0.1)
        code = 0
    except AclError as error:
        code = error.code
    took = time.perf_counter() - begin
    gate.open()
    stream.synchronize(TIMEOUT_S)
    require(
        code in TIMEOUTS and took < 5 and s.value(memory) == 3,
        f"code {code} after {took:.2f} s, memory {s.value(memory)}; wanted one of {TIMEOUTS}",
    )
    return f"code {code} after {took:.2f} s for a limit of 0.1 s; the work was done afterwards"


@case("stream.synchronize_device", "aclrtSynchronizeDevice waits for all streams", "shutdown")
def synchronize_device(s: Session) -> str:
    memories = [s.memory(1 << 20) for _ in range(3)]
    for number, memory in enumerate(memories):
        s.fill(memory, number + 1, s.stream())
    code = s.acl("aclrtSynchronizeDevice")()
    got = [s.value(memory) for memory in memories]
    require(code == 0 and got == [1, 2, 3], f"code {code}, memory {got}")
    return "3 streams"


@case("stream.default", "the null stream is a stream of the current device", "npu adaptor")
def default(s: Session) -> str:
    memory = s.memory(BYTES)
    code = s.acl("aclrtMemsetAsync")(memory.pointer, BYTES, 9, BYTES, s.ffi.NULL)
    wait = s.acl("aclrtSynchronizeStream")(s.ffi.NULL)
    require((code, wait) == (0, 0) and s.value(memory) == 9, f"codes {code}, {wait}")
    return "queued and synchronised"


@case("error.text", "a failed call leaves a text, which reading drops", "status.check")
def text(s: Session) -> str:
    s.text()
    code = s.acl("aclrtSetDevice")(1 << 20)
    first, second = s.text(), s.text()
    require(code != 0 and first != "" and second == "", f"code {code}, texts {first!r}, {second!r}")
    return f"code {code}: {first[:100]!r}, then nothing"


@case("error.text_per_thread", "the text belongs to the thread whose call failed", "status.check")
def text_per_thread(s: Session) -> str:
    s.text()
    s.acl("aclrtSetDevice")(1 << 20)
    other, own = s.in_thread(s.text), s.text()
    require(other == "" and own != "", f"another thread saw {other!r}, this one {own!r}")
    return "another thread sees nothing"
