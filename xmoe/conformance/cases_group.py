# SPDX-License-Identifier: Apache-2.0
"""Communicators, windows and collectives: cases of all ranks together."""

from __future__ import annotations

import os
import struct
from typing import Any

import numpy as np

from xmoe.comm.hccl import HcclCommunicator, make_root_info
from xmoe.comm.window import WINDOW_ALIGNMENT_BYTES, context_bytes
from xmoe.conformance.case import case, require
from xmoe.conformance.session import TIMEOUT_S, Array, Session
from xmoe.kernels.acl.handles import AclStream, DeviceMemory
from xmoe.kernels.acl.status import check
from xmoe.layout import WindowSpec, min_hccl_buffsize_mb
from xmoe.ranks import RankContext

FP32, INT32, INT8, BF16 = 4, 2, 0, 11  # HcclDataType
SUM, MAX = 0, 2  # HcclReduceOp
COUNT = 1000
MAX_ROWS, TOPK_MAX, HIDDEN = 64, 4, 1024


class GroupSession(Session):
    """A rank of the group, with two communicators: one for collectives, one for the operator."""

    def __init__(self, device: str | None, context: RankContext, tensors: str = "acl") -> None:
        super().__init__(device, context.rank, tensors)
        self.rank, self.size = context.rank, context.size
        self._context = context
        self._store: Any = None
        self._comms: dict[str, HcclCommunicator] = {}

    def share(self, key: str, value: bytes | None) -> bytes:
        """Rank 0's value on all ranks, through a file store."""
        if self._store is None:
            import torch.distributed as dist

            self._store = dist.FileStore(self._context.store_path, self.size)  # type: ignore[attr-defined]
        if value is not None:
            self._store.set(key, value)
        return bytes(self._store.get(key))

    def comm(self, name: str = "collectives") -> HcclCommunicator:
        """A communicator that lives as long as the session. COLLECTIVE at first use."""
        if name not in self._comms:
            root = self.share(name, make_root_info(self.runtime) if self.rank == 0 else None)
            buffer_mb = self.buffer_mb if name == "operator" else None
            self._comms[name] = HcclCommunicator(
                self.runtime, self.size, self.rank, root, buffer_mb
            )
        return self._comms[name]

    @property
    def buffer_mb(self) -> int:
        """Of one half of the operator's window."""
        spec = WindowSpec(MAX_ROWS, HIDDEN, TOPK_MAX, self.size, 2)
        return min_hccl_buffsize_mb("A3", spec) + 1

    def handle(self, name: str = "collectives") -> Any:
        """The raw HcclComm."""
        return self.comm(name)._comm

    def close(self) -> None:
        super().close()
        for comm in self._comms.values():
            comm.close()
        self._comms.clear()

    def collective(
        self, call: str, stream: AclStream, *arguments: Any, name: str = "collectives"
    ) -> None:
        """Queue one collective; communicator and stream are its last two arguments."""
        status = self.hccl(call)(*arguments, self.handle(name), stream.pointer)
        check(self.runtime, status, call)

    def result(self, stream: AclStream, memory: DeviceMemory, dtype: Any, count: int) -> Array:
        stream.synchronize(TIMEOUT_S)
        return self.read(memory, dtype, count)


@case(
    "comm.rank_and_size",
    "a communicator knows its rank and size",
    "MegaMoeCommResource",
    ranks=True,
)
def rank_and_size(s: GroupSession) -> str:
    s.comm().verify()
    return f"rank {s.rank} of {s.size}"


@case(
    "comm.found_by_name",
    "HcclCommGetHandleWithName finds a communicator by its name",
    "MegaMoeCommResource",
    ranks=True,
)
def found_by_name(s: GroupSession) -> str:
    name, out = s.comm().name(), s.ffi.new("HcclComm*")
    code = s.hccl("HcclCommGetHandleWithName")(s.ffi.new("char[]", name.encode()), out)
    same = code == 0 and out[0] == s.handle()
    require(name != "" and same, f"name {name!r}, code {code}, same handle: {same}")
    return f"{name!r}"


@case(
    "comm.two_at_once",
    "a process may hold several communicators over the same ranks",
    "target and draft model",
    ranks=True,
)
def two_at_once(s: GroupSession) -> str:
    names = [s.comm().name(), s.comm("operator").name()]
    require(len(set(names)) == 2, f"names {names}")
    return f"{names[0]!r} and {names[1]!r}"


@case(
    "window.sizes",
    "the buffer reported is twice the size asked for one half",
    "policy, WindowTooSmall",
    ranks=True,
)
def window_sizes(s: GroupSession) -> str:
    own = s.comm("operator").spans()[s.rank]
    asked = 2 * s.buffer_mb << 20
    require(own.size_bytes == asked, f"{own.size_bytes} bytes for {s.buffer_mb} MiB a half")
    return f"{own.size_bytes} bytes for {s.buffer_mb} MiB a half"


@case(
    "window.spans",
    "every rank's buffer is mapped here: not null, aligned to 512 bytes, apart, "
    "and no smaller than the own one",
    "check_spans",
    ranks=True,
)
def window_spans(s: GroupSession) -> str:
    spans = s.comm("operator").spans()
    own = spans[s.rank].size_bytes
    for span in spans:
        require(span.address != 0, f"rank {span.rank} has a null address")
        require(span.address % WINDOW_ALIGNMENT_BYTES == 0, f"{span.address:#x} is not aligned")
        require(span.size_bytes >= own, f"rank {span.rank} has {span.size_bytes} of {own} bytes")
    ordered = sorted(spans, key=lambda one: one.address)
    for one, two in zip(ordered, ordered[1:], strict=False):
        require(one.address + own <= two.address, f"ranks {one.rank} and {two.rank} overlap")
    more = sorted({span.size_bytes - own for span in spans if span.rank != s.rank})
    return f"{len(spans)} buffers; peers report {more} bytes more than the own"


@case(
    "window.visible",
    "what a rank writes into its buffer, a peer reads at the address it has for it",
    "the operator",
    ranks=True,
)
def window_visible(s: GroupSession) -> str:
    spans = s.comm("operator").spans()
    offset, peer = 1 << 20, (s.rank + 1) % s.size  # inside the reserved 10 MiB
    stream, mark = s.stream(), s.array(np.full(64, s.rank + 1, np.uint8))
    copy, seen = s.acl("aclrtMemcpyAsync"), s.memory(64)

    def at(rank: int) -> Any:
        return s.ffi.cast("void*", spans[rank].address + offset)

    check(s.runtime, copy(at(s.rank), 64, mark.pointer, 64, 3, stream.pointer), "aclrtMemcpyAsync")
    s.collective("HcclBarrier", stream)
    check(s.runtime, copy(seen.pointer, 64, at(peer), 64, 3, stream.pointer), "aclrtMemcpyAsync")
    s.collective("HcclBarrier", stream)
    got = s.result(stream, seen, np.uint8, 64)
    require(bool((got == peer + 1).all()), f"rank {peer}'s window holds {sorted(set(got))}")
    return f"rank {s.rank} read rank {peer}'s mark"


@case(
    "context.made",
    "HcclCreateOpResCtx gives an address that belongs to the communicator",
    "MegaMoeCommResource",
    ranks=True,
)
def context_made(s: GroupSession) -> str:
    address = s.comm("operator").create_context()
    packed = context_bytes(s.rank, address, s.comm("operator").spans())
    rank, _, kfc = struct.unpack_from("<IIQ", packed)
    require((rank, kfc) == (s.rank, address) and len(packed) == 16400, "the structure is wrong")
    return f"address {address:#x}; structure of {len(packed)} bytes"


@case("collective.all_reduce", "HcclAllReduce adds over all ranks", "fused path", ranks=True)
def all_reduce(s: GroupSession) -> str:
    stream, out = s.stream(), s.memory(4 * COUNT)
    source = s.array(np.arange(COUNT, dtype=np.float32) + s.rank)
    s.collective("HcclAllReduce", stream, source.pointer, out.pointer, COUNT, FP32, SUM)
    got = s.result(stream, out, np.float32, COUNT)
    want = s.size * np.arange(COUNT) + s.size * (s.size - 1) / 2
    require(bool((got == want).all()), f"first values {got[:4]}, wanted {want[:4]}")
    return f"{COUNT} float32"


@case("collective.max_int32", "HcclAllReduce takes the largest int32", "agreement", ranks=True)
def max_int32(s: GroupSession) -> str:
    stream, out = s.stream(), s.memory(64)
    source = s.array(np.array([s.rank, -s.rank, 2**31 - 1 - s.rank], np.int32))
    s.collective("HcclAllReduce", stream, source.pointer, out.pointer, 3, INT32, MAX)
    got = s.result(stream, out, np.int32, 3).tolist()
    require(got == [s.size - 1, 0, 2**31 - 1], f"got {got}")
    return str(got)


@case(
    "collective.all_gather",
    "HcclAllGather puts the ranks' parts in rank order",
    "fused path",
    ranks=True,
)
def all_gather(s: GroupSession) -> str:
    stream, out = s.stream(), s.memory(4 * COUNT * s.size)
    source = s.array(np.full(COUNT, s.rank, np.int32))
    s.collective("HcclAllGather", stream, source.pointer, out.pointer, COUNT, INT32)
    got = s.result(stream, out, np.int32, COUNT * s.size)
    require(bool((got == np.repeat(np.arange(s.size), COUNT)).all()), "parts are out of order")
    return f"{s.size} parts of {COUNT}"


@case(
    "collective.reduce_scatter",
    "HcclReduceScatter leaves rank r the r-th part of the sum",
    "fused path",
    ranks=True,
)
def reduce_scatter(s: GroupSession) -> str:
    stream, out = s.stream(), s.memory(4 * COUNT)
    source = s.array(np.repeat(np.arange(s.size, dtype=np.float32), COUNT))
    s.collective("HcclReduceScatter", stream, source.pointer, out.pointer, COUNT, FP32, SUM)
    got = s.result(stream, out, np.float32, COUNT)
    require(bool((got == s.size * s.rank).all()), f"rank {s.rank} has {got[:4]}")
    return f"{COUNT} float32 per rank"


@case("collective.broadcast", "HcclBroadcast hands out the root's values", "start-up", ranks=True)
def broadcast(s: GroupSession) -> str:
    stream, root = s.stream(), s.size - 1
    memory = s.array(np.full(COUNT, s.rank, np.int32))
    s.collective("HcclBroadcast", stream, memory.pointer, COUNT, INT32, root)
    got = s.result(stream, memory, np.int32, COUNT)
    require(bool((got == root).all()), f"got {got[:4]}")
    return f"from rank {root}"


@case(
    "collective.all_to_all_v",
    "HcclAlltoAllV sends parts of any length, empty ones too",
    "fused path",
    ranks=True,
)
def all_to_all_v(s: GroupSession) -> str:
    # Rank a sends b * 3 elements of value 100 a + b to rank b; so rank 0 gets nothing.
    sends = np.arange(s.size, dtype=np.uint64) * 3
    receives = np.full(s.size, 3 * s.rank, np.uint64)
    offsets = [
        np.concatenate([[0], np.cumsum(n)[:-1]]).astype(np.uint64) for n in (sends, receives)
    ]
    data = np.concatenate([np.full(3 * b, 100 * s.rank + b, np.int32) for b in range(s.size)])
    stream, source, out = s.stream(), s.array(data), s.memory(4 * COUNT)
    at = [s.ffi.from_buffer(array) for array in (sends, offsets[0], receives, offsets[1])]
    s.collective(
        "HcclAlltoAllV",
        stream,
        source.pointer,
        at[0],
        at[1],
        INT32,
        out.pointer,
        at[2],
        at[3],
        INT32,
    )
    total = 3 * s.rank * s.size
    got = s.result(stream, out, np.int32, max(1, total))[:total]
    want = np.repeat(100 * np.arange(s.size) + s.rank, 3 * s.rank)
    require(bool((got == want).all()), f"got {got[:8]}, wanted {want[:8]}")
    return f"{total} elements received"


@case(
    "collective.stream_order",
    "a collective takes its place in the stream",
    "fused path",
    ranks=True,
)
def stream_order(s: GroupSession) -> str:
    stream, source, out = s.stream(), s.memory(4 * COUNT), s.memory(4 * COUNT * s.size)
    s.fill(source, s.rank + 1, stream)
    s.collective("HcclAllGather", stream, source.pointer, out.pointer, 4 * COUNT, INT8)
    s.fill(source, 0xFF, stream)
    got = s.result(stream, out, np.uint8, 4 * COUNT * s.size)
    require(
        bool((got == np.repeat(np.arange(s.size) + 1, 4 * COUNT)).all()),
        "it saw a later or an earlier write",
    )
    return "it saw the write before it and not the one behind it"


@case(
    "collective.repeatable_bits",
    "the same reduction gives the same bits each time",
    "repeatability",
    ranks=True,
)
def repeatable_bits(s: GroupSession) -> str:
    stream = s.stream()
    source = s.array(np.random.default_rng(s.rank).standard_normal(COUNT).astype(np.float32))
    outs = [s.memory(4 * COUNT) for _ in range(5)]
    for out in outs:
        s.collective("HcclAllReduce", stream, source.pointer, out.pointer, COUNT, FP32, SUM)
    stream.synchronize(TIMEOUT_S)
    kinds = len({out.read(4 * COUNT) for out in outs})
    require(kinds == 1, f"{kinds} different results of 5")
    return f"5 reductions of {COUNT} float32; process {os.getpid()}"
