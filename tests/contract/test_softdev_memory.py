# SPDX-License-Identifier: Apache-2.0
"""Memory of the software device: poison, guard words, copies, what happens to freed memory."""

from __future__ import annotations

import ctypes as C
import threading

from support.softdev import D2D, D2H, H2D, H2H, child, device, error


def _bytes(pointer: C.c_void_p, count: int) -> bytes:
    assert pointer.value is not None
    return C.string_at(pointer.value, count)


def _poison() -> list[object]:
    api = device()
    pointer = api.malloc(1000)
    out: list[object] = [_bytes(pointer, 1000) == b"\xcd" * 1000, (pointer.value or 0) % 512]
    C.memset(pointer, 7, 1000)
    api.aclrtFree(pointer)
    out.append(_bytes(pointer, 1000) == b"\xcd" * 1000)  # still readable, as poison
    host = api.malloc_host(100)
    out.append(_bytes(host, 100) == b"\xcd" * 100)
    api.aclrtFreeHost(host)
    return out


def test_memory_is_poisoned_when_handed_out_and_when_freed():
    assert child(_poison) == [True, 0, True, True]


def _guards() -> list[tuple[int, str]]:
    api = device()
    out = []
    for offset in (0, 63, -1):
        pointer = api.malloc(100)
        at = (pointer.value or 0) + (100 + offset if offset >= 0 else offset)
        C.memset(at, 0, 1)
        out.append((api.status("aclrtFree", pointer), error()))
    pointer = api.malloc(100)
    out.append((api.status("aclrtFree", pointer), ""))
    out.append((api.status("aclrtFree", pointer), error()))
    out.append((api.status("aclrtFree", C.c_void_p((pointer.value or 0) + 8)), error()))
    return out


def test_guard_words_are_verified_on_free():
    first, last, front, good, twice, inner = child(_guards)
    for (code, text), where in ((first, "offset 100"), (last, "offset 163"), (front, "offset -1")):
        assert code == 507053 and where in text and "100 bytes" in text
    assert good == (0, "")
    assert twice[0] == inner[0] == 107000 and "not the start of a live allocation" in twice[1]


def _ranges() -> list[int]:
    api = device()
    pointer = api.malloc(100).value or 0
    freed = api.malloc(100)
    api.aclrtFree(freed)
    host = C.create_string_buffer(100)
    check = api.libs[0].xsdCheckRange
    out = []
    for address, size in (
        (pointer, 100), (pointer + 50, 50), (pointer, 101), (pointer + 100, 1), (pointer - 1, 2),
        (pointer - 600, 700), (C.addressof(host), 100), (freed.value or 0, 1), (2**64 - 8, 16),
        (0, 0),
    ):  # fmt: skip
        out.append(check(C.c_void_p(address), C.c_uint64(size)))
    return out


def test_check_range():
    assert child(_ranges) == [1, 1, -1, -1, -1, -1, 0, -1, -1, 0]


def _copies() -> list[object]:
    api = device()
    data = bytes(range(256))
    source = C.create_string_buffer(data, 256)
    a, b = api.malloc(256), api.malloc(256)
    target = C.create_string_buffer(256)
    stream = api.stream()
    n = C.c_size_t(256)
    api.aclrtMemcpyAsync(a, n, source, n, H2D, stream)
    api.aclrtMemcpyAsync(b, n, a, n, D2D, stream)
    api.aclrtMemsetAsync(a, n, 0x11, C.c_size_t(10), stream)
    api.aclrtMemcpyAsync(target, n, b, n, D2H, stream)
    api.aclrtSynchronizeStream(stream)
    out: list[object] = [target.raw == data, _bytes(a, 12) == b"\x11" * 10 + data[10:12]]
    api.aclrtMemset(b, n, 0x22, n)
    api.aclrtMemcpy(target, n, b, n, D2H)
    out.append(target.raw == b"\x22" * 256)
    for room, count in ((10, 11), (256, 257)):
        out.append(
            api.status("aclrtMemcpy", b, C.c_size_t(room), source, C.c_size_t(count), H2D) != 0
        )
    return out


def test_copies_and_fills():
    assert child(_copies) == [True] * 5


def _staging() -> list[bytes]:
    """The source changes between the call and the copy."""
    api = device()
    stream = api.stream()
    out = []
    n = C.c_size_t(4)
    pageable = C.create_string_buffer(b"old!", 4)
    pinned = api.malloc_host(4)
    C.memmove(pinned, b"old!", 4)
    for source in (pageable, pinned):
        gate = threading.Event()
        target = api.malloc(4)
        api.task(stream, lambda gate=gate: 0 if gate.wait(20) else 7)
        api.aclrtMemcpyAsync(target, n, source, n, H2D, stream)
        C.memmove(source, b"new!", 4)
        gate.set()
        api.aclrtSynchronizeStream(stream)
        out.append(_bytes(target, 4))
    return out


def test_pageable_sources_are_read_at_once_and_pinned_ones_later():
    assert child(_staging) == [b"old!", b"new!"]


def _kinds() -> list[int]:
    api = device()
    host, dev = api.malloc_host(64), api.malloc(64)
    plain = C.create_string_buffer(64)
    n = C.c_size_t(64)
    stream = api.stream()
    out = []
    for target, source, kind in (
        (dev, dev, H2D), (host, dev, D2D), (dev, host, D2D), (host, host, H2H), (plain, plain, D2D),
        (dev, plain, H2D), (plain, dev, D2H), (dev, plain, 99), (None, plain, H2D),
        (dev, None, H2D),
    ):  # fmt: skip
        out.append(api.status("aclrtMemcpyAsync", target, n, source, n, kind, stream))
    api.aclrtSynchronizeStream(stream)
    return out


def test_copy_kinds_are_checked_against_the_memory():
    """Memory the device did not hand out may stand for either side."""
    wrong = 107016
    assert child(_kinds) == [wrong, wrong, wrong, 0, 0, 0, 0, 107000, 107000, 107000]
    assert child(_kinds, env={"XSD_STRICT": "0"}) == [0] * 7 + [107000] * 3


def _freed_while_queued() -> tuple[int, str]:
    api = device()
    stream, gate = api.stream(), threading.Event()
    target, source = api.malloc(1 << 20), C.create_string_buffer(1 << 20)
    n = C.c_size_t(1 << 20)
    api.task(stream, lambda: 0 if gate.wait(20) else 7)
    api.aclrtMemcpyAsync(target, n, source, n, H2D, stream)
    api.aclrtFree(target)
    gate.set()
    return api.status("aclrtSynchronizeStream", stream), error()


def test_freeing_memory_of_a_queued_copy_is_found():
    code, text = child(_freed_while_queued)
    assert code == 507053 and "freed before it ran" in text


def _full() -> list[int]:
    api = device()
    free, total = C.c_size_t(), C.c_size_t()
    api.aclrtGetMemInfo(1, C.byref(free), C.byref(total))
    out = [total.value, free.value]
    held = api.malloc(600_000)
    out.append(api.status("aclrtMalloc", C.byref(C.c_void_p()), C.c_size_t(600_000), 0))
    api.aclrtGetMemInfo(1, C.byref(free), C.byref(total))
    out.append(free.value)
    api.aclrtFree(held)
    out.append(api.status("aclrtMalloc", C.byref(C.c_void_p()), C.c_size_t(600_000), 0))
    out.append(api.status("aclrtMalloc", C.byref(C.c_void_p()), C.c_size_t(0), 0))
    out.append(api.status("aclrtMalloc", None, C.c_size_t(8), 0))
    out.append(api.status("aclrtMalloc", C.byref(C.c_void_p()), C.c_size_t(2**64 - 1), 0))
    return out


def test_memory_runs_out_at_the_set_size():
    expected = [1_000_000, 1_000_000, 207001, 400_000, 0, 107000, 107000, 207001]
    assert child(_full, env={"XSD_MEMORY_BYTES": "1000000"}) == expected


def _large() -> bool:
    """Blocks above the quarantine size go back at once; those held by a task stay until it ran."""
    api = device()
    stream, gate = api.stream(), threading.Event()
    big = api.malloc(64 << 20)
    api.task(stream, lambda: 0 if gate.wait(20) else 7)
    n = C.c_size_t(64 << 20)
    api.aclrtMemsetAsync(big, n, 1, n, stream)
    api.aclrtFree(big)
    for _ in range(20):
        api.aclrtFree(api.malloc(64 << 20))
    gate.set()
    code = api.status("aclrtSynchronizeStream", stream)
    with open("/proc/self/statm", encoding="ascii") as file:
        resident = int(file.read().split()[1]) * 4096
    assert resident < 400 << 20, resident
    return code == 507053


def test_large_blocks_return_to_the_system():
    assert child(_large)
