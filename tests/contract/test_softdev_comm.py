# SPDX-License-Identifier: Apache-2.0
"""Communicators, windows and collectives of the software device, over forked processes."""

from __future__ import annotations

import ctypes as C
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support import softdev
from support.forked import fork_ranks
from support.softdev import ALGORITHM, HCCL, MAX, MIN, PROD, SUM, context_of, error, join


def _pointer(array: np.ndarray[Any, Any]) -> C.c_void_p:
    return C.c_void_p(array.ctypes.data)


def _windows(rank: int, folder: Path, size: int) -> dict[str, Any]:
    api, comm = join(rank, size, folder, mib=2, name=f"group{rank}")
    own, bytes_ = C.c_void_p(), C.c_uint64()
    api.HcclGetHcclBuffer(comm, C.byref(own), C.byref(bytes_))
    assert bytes_.value == 4 << 20 and own.value
    ranks = C.c_uint32()
    api.HcclGetRankSize(comm, C.byref(ranks))
    assert ranks.value == size
    api.HcclGetRankId(comm, C.byref(ranks))
    assert ranks.value == rank
    context = context_of(api, comm)
    assert (context.rank, context.size, context.window_bytes) == (rank, size, 2 << 20)
    assert context.window[rank] == own.value
    assert C.addressof(context_of(api, comm)) == C.addressof(context)  # asked again: the same one
    # Fresh windows are zero; each rank then marks both ends of every window, also beyond the local
    # payload where the longer remote span ends.
    assert C.string_at(own.value, 64) == bytes(64)
    stream = api.stream()
    api.HcclBarrier(comm, stream)
    api.aclrtSynchronizeStream(stream)
    for peer in range(size):
        if peer == rank:
            continue
        remote, span = C.c_void_p(), C.c_uint64()
        api.HcclGetRemoteIpcHcclBuf(comm, C.c_uint64(peer), C.byref(remote), C.byref(span))
        assert remote.value == context.window[peer]
        assert span.value == bytes_.value + (1 << 20)
        C.memset(remote.value + rank, 100 + rank, 1)
        C.memset(remote.value + span.value - 64 + rank, 50 + rank, 1)
    api.HcclBarrier(comm, stream)
    api.aclrtSynchronizeStream(stream)
    marks = [100 + peer if peer != rank else 0 for peer in range(size)]
    ends = [50 + peer if peer != rank else 0 for peer in range(size)]
    assert list(C.string_at(own.value, size)) == marks
    assert list(C.string_at(own.value + bytes_.value + (1 << 20) - 64, size)) == ends
    name = C.create_string_buffer(128)
    api.HcclGetCommName(comm, name)
    found = C.c_void_p()
    for call in ("HcclCommGetHandleWithName", "HcomGetCommHandleByGroup"):
        getattr(api, call)(name, C.byref(found))
        assert found.value == comm.value
    missing = api.status("HcclCommGetHandleWithName", b"nobody", C.byref(found))
    api.HcclCommDestroy(comm)
    return {"name": name.value.decode(), "missing": missing, "twice": _twice(api, comm)}


def _twice(api: softdev.Api, comm: C.c_void_p) -> int:
    return api.status("HcclCommDestroy", comm)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_windows_are_shared_by_all_ranks(size):
    ended = fork_ranks(_windows, size, size)
    assert [e.value["name"] for e in ended] == [f"group{r}" for r in range(size)]
    assert {(e.value["missing"], e.value["twice"]) for e in ended} == {(6, 1)}


def _numbers(rank: int, count: int, dtype: str) -> np.ndarray[Any, Any]:
    rng = np.random.default_rng(rank)
    if dtype in ("fp32", "fp16", "bf16"):
        values = rng.standard_normal(count).astype(np.float32)
        if dtype == "fp16":
            return values.astype(np.float16)
        return _to_bf16(values) if dtype == "bf16" else values
    return rng.integers(-3, 4, count).astype(dtype)


def _to_bf16(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    raw = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    return ((raw + 0x7FFF + ((raw >> 16) & 1)) >> 16).astype(np.uint16)


def _from_bf16(raw: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return (raw.astype(np.uint32) << 16).view(np.float32)


def _expected(parts: list[np.ndarray[Any, Any]], dtype: str, op: int) -> np.ndarray[Any, Any]:
    """The reduction in rank order; 16-bit floats in float32, rounded once."""
    wide = [_from_bf16(p) if dtype == "bf16" else p for p in parts]
    if dtype == "fp16":
        wide = [p.astype(np.float32) for p in parts]
    total = wide[0].copy()
    for part in wide[1:]:
        if op == SUM:
            total = total + part
        elif op == PROD:
            total = total * part
        else:
            total = np.maximum(total, part) if op == MAX else np.minimum(total, part)
    if dtype == "bf16":
        return _to_bf16(total)
    return total.astype(np.float16) if dtype == "fp16" else total


def _reductions(rank: int, folder: Path, size: int, counts: list[int]) -> bool:
    api, comm = join(rank, size, folder)
    stream = api.stream()
    for dtype in ("fp32", "bf16", "fp16", "int8", "int32", "int64"):
        for op in (SUM, PROD, MAX, MIN):
            for count in counts:
                parts = [_numbers(r, count * size, dtype) for r in range(size)]
                out, piece = np.zeros_like(parts[0]), np.zeros_like(parts[0][:count])
                n, code = C.c_uint64(count * size), HCCL[dtype]
                mine = _pointer(parts[rank])
                api.HcclAllReduce(mine, _pointer(out), n, code, op, comm, stream)
                api.HcclReduceScatter(
                    mine, _pointer(piece), C.c_uint64(count), code, op, comm, stream
                )
                api.aclrtSynchronizeStream(stream)
                want = _expected(parts, dtype, op)
                np.testing.assert_array_equal(out, want, f"{dtype} {op} {count}")
                np.testing.assert_array_equal(piece, want[rank * count : (rank + 1) * count])
    api.HcclCommDestroy(comm)
    return True


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_reductions_are_exact_and_in_rank_order(size):
    fork_ranks(_reductions, size, size, [1, 1001])


def _special_floats(rank: int, folder: Path) -> bool:
    """Every 16-bit pattern survives a reduction of one rank, and the edges of fp16 round well."""
    api, comm = join(rank, 1, folder)
    stream = api.stream()
    patterns = np.arange(65536, dtype=np.uint16)
    for dtype, is_nan in (
        ("fp16", np.isnan(patterns.view(np.float16))),
        ("bf16", np.isnan(_from_bf16(patterns))),
    ):
        out = np.zeros_like(patterns)
        n = C.c_uint64(65536)
        api.HcclAllReduce(_pointer(patterns), _pointer(out), n, HCCL[dtype], SUM, comm, stream)
        api.aclrtSynchronizeStream(stream)
        np.testing.assert_array_equal(out[~is_nan], patterns[~is_nan])
        again = np.isnan(out.view(np.float16)) if dtype == "fp16" else np.isnan(_from_bf16(out))
        np.testing.assert_array_equal(again, is_nan)
    return True


def test_sixteen_bit_floats_are_kept():
    fork_ranks(_special_floats, 1)


def _moves(rank: int, folder: Path, size: int, count: int) -> bool:
    api, comm = join(rank, size, folder)
    stream = api.stream()
    n = C.c_uint64(count)
    sent = [np.random.default_rng(r).integers(0, 256, count * size, np.uint8) for r in range(size)]
    mine = sent[rank]
    gathered = np.zeros(count * size * size, np.uint8)
    total = C.c_uint64(count * size)
    api.HcclAllGather(_pointer(mine), _pointer(gathered), total, HCCL["uint8"], comm, stream)
    swapped = np.zeros(count * size, np.uint8)
    u8 = HCCL["uint8"]
    api.HcclAlltoAll(_pointer(mine), n, u8, _pointer(swapped), n, u8, comm, stream)
    root = size - 1
    cast = mine.copy()
    api.HcclBroadcast(_pointer(cast), total, u8, C.c_uint32(root), comm, stream)
    api.aclrtSynchronizeStream(stream)
    np.testing.assert_array_equal(gathered, np.concatenate(sent))
    want = np.concatenate([sent[r][rank * count : (rank + 1) * count] for r in range(size)])
    np.testing.assert_array_equal(swapped, want)
    np.testing.assert_array_equal(cast, sent[root])
    api.HcclCommDestroy(comm)
    return True


@pytest.mark.parametrize(("size", "count"), [(2, 1), (4, 1000), (8, 300_000)])
def test_gather_exchange_and_broadcast(size, count):
    fork_ranks(_moves, size, size, count)


def _ragged(rank: int, folder: Path, size: int) -> bool:
    """Every pair has its own length, some zero, displacements in reverse order."""
    api, comm = join(rank, size, folder)
    stream = api.stream()

    def length(source: int, target: int) -> int:
        return 0 if (source + target) % 3 == 0 else 40_000 * source + 7 * target + 1

    def layout(lengths: list[int]) -> tuple[Any, Any, np.ndarray[Any, Any], list[int]]:
        places, at = [0] * size, 0
        for r in reversed(range(size)):
            places[r] = at
            at += lengths[r]
        buffer = np.zeros(max(1, at), np.int32)
        return softdev.array64(lengths), softdev.array64(places), buffer, places

    def content(source: int, target: int) -> np.ndarray[Any, Any]:
        return np.arange(length(source, target), dtype=np.int32) + source * 1000003 + target

    send_n, send_at, send, places = layout([length(rank, r) for r in range(size)])
    for r in range(size):
        send[places[r] : places[r] + length(rank, r)] = content(rank, r)
    recv_n, recv_at, recv, places = layout([length(r, rank) for r in range(size)])
    i32 = HCCL["int32"]
    api.HcclAlltoAllV(
        _pointer(send), send_n, send_at, i32, _pointer(recv), recv_n, recv_at, i32, comm, stream
    )
    for i in range(size):
        send_n[i] = recv_n[i] = -1  # read at call time
    api.aclrtSynchronizeStream(stream)
    for r in range(size):
        got = recv[places[r] : places[r] + length(r, rank)]
        np.testing.assert_array_equal(got, content(r, rank))
    api.HcclCommDestroy(comm)
    return True


@pytest.mark.parametrize("size", [2, 4, 8])
def test_all_to_all_with_lengths_of_each_pair(size):
    fork_ranks(_ragged, size, size)


def _several(rank: int, folder: Path, size: int) -> int:
    """Several groups at a time in one process, used from two streams, and many after another."""
    api, first = join(rank, size, folder, tag="a")
    _, second = join(rank, size, folder, tag="b")
    streams = [api.stream(), api.stream()]
    value = np.full(3, rank + 1, np.int64)
    outs = [np.zeros(3, np.int64), np.zeros(3, np.int64)]
    n = C.c_uint64(3)
    for comm, stream, out in zip((first, second), streams, outs, strict=True):
        for _ in range(20):
            api.HcclAllReduce(_pointer(value), _pointer(out), n, HCCL["int64"], SUM, comm, stream)
    api.aclrtSynchronizeDevice()
    total = size * (size + 1) // 2
    assert [list(out) for out in outs] == [[total] * 3] * 2
    api.HcclCommDestroy(first)
    api.HcclAllReduce(_pointer(value), _pointer(outs[1]), n, HCCL["int64"], MAX, second, streams[0])
    api.aclrtSynchronizeStream(streams[0])
    assert list(outs[1]) == [size] * 3
    api.HcclCommDestroy(second)
    before = len(os.listdir("/proc/self/fd"))
    for i in range(10):
        _, comm = join(rank, size, folder, tag=f"many{i}")
        api.HcclCommDestroy(comm)
    assert len(os.listdir("/proc/self/fd")) == before
    return True


def test_several_communicators_in_one_process():
    fork_ranks(_several, 4, 4, env={"XSD_DELAY_SEED": "5", "XSD_DELAY_MAX_US": "500"})


def _refusals(rank: int, folder: Path) -> list[tuple[int, str]]:
    api, comm = join(rank, 1, folder, name="one")
    out = []

    def note(code: int) -> None:
        out.append((code, error()))

    root = softdev.root_info(0, folder, "again")
    made, config = C.c_void_p(), softdev.config(1, "one")
    init = "HcclCommInitRootInfoConfig"
    note(api.status(init, 1, C.byref(root), 0, C.byref(config), C.byref(made)))
    config.name, config.magic = b"two", 5
    note(api.status(init, 1, C.byref(root), 0, C.byref(config), C.byref(made)))
    config.magic, config.buffer_mib = 0xF0F0F0F0, 0
    note(api.status(init, 1, C.byref(root), 0, C.byref(config), C.byref(made)))
    note(api.status(init, 1, C.byref(softdev.RootInfo()), 0, C.byref(config), C.byref(made)))
    note(api.status(init, 2, C.byref(root), 2, C.byref(config), C.byref(made)))
    data = np.zeros(8, np.uint8)
    p, n, stream = _pointer(data), C.c_uint64(8), api.stream()
    note(api.status("HcclAllReduce", p, p, n, HCCL["uint8"], SUM, comm, stream))
    note(api.status("HcclAllReduce", p, p, n, HCCL["int8"], 9, comm, stream))
    note(api.status("HcclAllReduce", None, p, n, HCCL["int8"], SUM, comm, stream))
    note(api.status("HcclAllGather", p, p, n, 99, comm, stream))
    note(api.status("HcclBroadcast", p, n, HCCL["int8"], C.c_uint32(1), comm, stream))
    small = api.malloc(4)
    note(api.status("HcclAllGather", p, small, n, HCCL["int8"], comm, stream))
    buffer, size = C.c_void_p(), C.c_uint64()
    for peer in (0, 1):
        note(
            api.status(
                "HcclGetRemoteIpcHcclBuf", comm, C.c_uint64(peer), C.byref(buffer), C.byref(size)
            )
        )
    api.HcclCommDestroy(comm)
    return out


def test_wrong_arguments_are_refused_with_a_text():
    out = fork_ranks(_refusals, 1)[0].value
    expected = [
        (1, "named one already"), (1, "magicWord"), (1, "hcclBufferSize 0"), (1, "HcclGetRootInfo"),
        (1, "rank 2 of 2"), (5, "cannot be reduced"), (1, "operation 9"), (2, "sendBuf is null"),
        (5, "data type 99"), (1, "root 1 of 1"), (1, "recvBuf"), (1, "not a peer"),
        (1, "not a peer"),
    ]  # fmt: skip
    assert len(out) == len(expected)
    for (code, text), (want_code, want_text) in zip(out, expected, strict=True):
        assert code == want_code and want_text in text, (code, text, want_text)


def _kfc(rank: int, folder: Path) -> list[int]:
    api, comm = join(rank, 1, folder)
    args, made = C.c_void_p(), C.c_void_p()
    out = []

    def create(op_type: int) -> int:
        return api.status("HcclCreateOpResCtx", comm, C.c_uint8(op_type), args, C.byref(made))

    api.HcclKfcAllocOpArgs(C.byref(args))
    out.append(create(8))  # engine not set
    out.append(api.status("HcclKfcOpArgsSetCommEngine", args, C.c_uint8(6)))
    api.HcclKfcOpArgsSetCommEngine(args, C.c_uint8(2))
    out.append(create(8))  # AICPU: not here
    api.HcclKfcOpArgsSetCommEngine(args, C.c_uint8(4))
    out.append(create(8))  # algorithm not set
    for text in (b"", b"=level0:x", b"AlltoAll", b"AlltoAll=fullmesh", b"AlltoAll=level0:"):
        out.append(api.status("HcclKfcOpArgsSetAlgConfig", args, text))
    api.HcclKfcOpArgsSetAlgConfig(args, ALGORITHM)
    out += [create(18), create(7), create(8)]
    api.HcclKfcFreeOpArgs(args)
    out += [create(8), api.status("HcclKfcFreeOpArgs", args)]
    api.HcclCommDestroy(comm)
    return out


def test_kernel_contexts_check_their_arguments():
    out = fork_ranks(_kfc, 1)[0].value
    assert out == [5, 1, 5, 1, 1, 1, 1, 1, 1, 1, 5, 0, 1, 1]


def _buffer_size(rank: int, folder: Path) -> int:
    api = softdev.device(0)
    root, comm = softdev.root_info(0, folder), C.c_void_p()
    api.HcclCommInitRootInfo(1, C.byref(root), 0, C.byref(comm))
    buffer, size = C.c_void_p(), C.c_uint64()
    api.HcclGetHcclBuffer(comm, C.byref(buffer), C.byref(size))
    return size.value >> 20


@pytest.mark.parametrize(("setting", "mib"), [("", 400), ("64", 128)])
def test_buffer_size_from_the_environment(setting, mib):
    assert fork_ranks(_buffer_size, 1, env={"HCCL_BUFFSIZE": setting})[0].value == mib
