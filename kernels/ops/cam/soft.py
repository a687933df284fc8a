# SPDX-License-Identifier: Apache-2.0
"""What only the software device has: the readiness probe, the abort word, counters, kernel traces
and the timed test kernel. For gates, probes, tests and benchmarks; no operator library on an NPU
exports these, and `available()` says so. Times are this machine's, never an operator's."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from xmoe.errors import CommError, PeerLost
from xmoe.kernels.acl.native_plan import NUMBER, TOKENS, StepTensor
from xmoe.kernels.ops.cam.binding import CamLibrary, PlanCache
from xmoe.kernels.ops.cam.topology import CamAsyncTopology, refuse, require

_TRACE_BYTES = 32 + 32 + 8 + 4 * 4 + 8 * 6
_TASK_BYTES = 32 + 8 + 2 * 4 + 2 * 8


@dataclass(frozen=True)
class CamCounters:
    """One rank's counters in one group. The violations are what hardware never reports."""

    credit_violations: int
    order_violations: int
    overlap_violations: int
    outstanding: int


@dataclass(frozen=True)
class KernelTrace:
    """One kernel's run, CLOCK_MONOTONIC nanoseconds.

    start..cores: waiting for cores; cores..ready: spinning for a peer with the cores held;
    ready..end: work. `tag` is the layer, or what the caller gave a timed kernel. `peer` is the
    first Attention rank of an item, -1 where there is none; `stream` the stream's number.
    """

    op: str
    group: str
    tag: int
    device: int
    vector_cores: int
    cube_cores: int
    status: int
    start_ns: int
    cores_ns: int
    ready_ns: int
    end_ns: int
    peer: int = -1
    stream: int = 0


@dataclass(frozen=True)
class TaskTrace:
    """One task of a stream, CLOCK_MONOTONIC nanoseconds: a kernel, copy, event record or wait.

    `stream` is the stream's number.
    """

    name: str
    stream: int
    device: int
    status: int
    start_ns: int
    end_ns: int


@dataclass(frozen=True)
class HostWaits:
    """How often this process waited for a whole device, a stream, an event."""

    device: int
    stream: int
    event: int


class SoftCam:
    """The software device's own functions."""

    def __init__(self, library: CamLibrary, *, shared_expert: bool = False) -> None:
        self._library = library
        self._shared = int(shared_expert)
        self._plans = PlanCache()

    @staticmethod
    def available(library: CamLibrary) -> bool:
        """Whether `library` belongs to the software device."""
        return library.has("xsdCamDispatchReady")

    def ready(self, topology: CamAsyncTopology, group: str) -> int:
        """Attention groups with a dispatch waiting in this rank's window. Host only; no cores.

        Raises:
            PeerLost: another rank aborted the group. CommError: this one did, or it does not exist
                here.
        """
        t = topology
        count = self._library.plain("xsdCamDispatchReady")(
            group.encode(),
            t.max_seq_len,
            t.hidden,
            t.topk,
            t.attn_size,
            t.experts_per_rank + self._shared,
            t.tp_size,
            int(t.dynamic_quant),
            self._shared,
        )
        if count == -2:
            state = self.abort_state(group)
            rank, reason = (state & 0xFFFF) - 1, state >> 16
            raise (CommError if rank == t.rank else PeerLost)(
                f"group {group!r} was aborted by rank {rank} (reason {reason}); allowed: a healthy "
                "group; next: look at that rank's own error, then create a new communicator"
            )
        if count < 0:
            raise CommError(
                f"group {group!r} has no window for {t}; allowed: the name of a communicator of "
                f"this process with a large enough buffer; create it first"
            )
        return int(count)

    def abort(self, group: str, reason: int = 1) -> None:
        """Release all kernels of the group that spin or wait for cores, on every rank. Terminal."""
        require("reason", reason, 1 <= reason <= 0xFFFF, "1 to 65535", "choose another")
        if self._library.plain("xsdCamAbort")(group.encode(), reason) != 0:
            raise CommError(f"group {group!r} is unknown in this process; nothing was aborted")

    def abort_state(self, group: str) -> int:
        """0 = healthy, else (reason << 16) | (aborting rank + 1); -1 = unknown group."""
        return int(self._library.plain("xsdCamAbortState")(group.encode()))

    def counters(self, group: str) -> CamCounters:
        """This rank's counters in `group`."""
        values = self._library.ffi.new("uint32_t[4]")
        if self._library.plain("xsdCamCounters")(group.encode(), values) != 0:
            raise CommError(f"group {group!r} is unknown in this process; create it first")
        return CamCounters(*(int(v) for v in values))

    def free_cores(self, device: int) -> tuple[int, int]:
        """(vector, cube) cores that no kernel of this process holds on `device` now."""
        values = self._library.ffi.new("uint32_t[2]")
        self._library.plain("xsdCamFreeCores")(device, values, values + 1)
        return int(values[0]), int(values[1])

    def set_cores(self, dispatch_recv: int | None, combine_send: int | None) -> None:
        """Vector cores that these operators launch on from now on, in this process; None: the
        device's own choice."""
        if self._library.plain("xsdCamSetCores")(dispatch_recv or 0, combine_send or 0) != 0:
            refuse("cores", (dispatch_recv, combine_send), "up to the device's own", "correct them")

    def trace(self, on: bool) -> None:
        """Start or stop recording kernels of this process."""
        self._library.plain("xsdCamTraceEnable")(int(on))

    def read_trace(self, capacity: int = 4096) -> list[KernelTrace]:
        """Take up to `capacity` recorded kernels, in the order in which they ended."""
        ffi = self._library.ffi
        buffer = ffi.new("char[]", _TRACE_BYTES * capacity)
        dropped = ffi.new("uint64_t*")
        read = self._library.plain("xsdCamTraceRead")
        count = read(ffi.cast("void*", buffer), capacity, dropped)
        if dropped[0]:
            raise CommError(f"{dropped[0]} trace entries were lost; read the trace more often")
        data = bytes(ffi.buffer(buffer, _TRACE_BYTES * count))
        return [_entry(data[i : i + _TRACE_BYTES]) for i in range(0, len(data), _TRACE_BYTES)]

    def trace_tasks(self, on: bool) -> None:
        """Start or stop recording every task of this process's streams."""
        self._library.base("xsdTaskTraceEnable", "void(*)(int)", "acl")(int(on))

    def read_tasks(self, capacity: int = 1 << 14) -> list[TaskTrace]:
        """Take up to `capacity` recorded tasks, in the order in which they ended."""
        ffi = self._library.ffi
        buffer = ffi.new("char[]", _TASK_BYTES * capacity)
        dropped = ffi.new("uint64_t*")
        ctype = "uint32_t(*)(void*, uint32_t, uint64_t*)"
        read = self._library.base("xsdTaskTraceRead", ctype, "acl")
        count = read(ffi.cast("void*", buffer), capacity, dropped)
        if dropped[0]:
            raise CommError(f"{dropped[0]} trace entries were lost; read the trace more often")
        data = bytes(ffi.buffer(buffer, _TASK_BYTES * count))
        found = struct.iter_unpack("=32sQ2I2Q", data)
        return [TaskTrace(name.split(b"\0")[0].decode(), *rest) for name, *rest in found]

    def stream_number(self, stream: int) -> int:
        """The number by which traces name a stream."""
        ffi = self._library.ffi
        number = ffi.new("int32_t*")
        get = self._library.base("aclrtStreamGetId", "int32_t(*)(void*, int32_t*)", "acl")
        self._library.check(get(ffi.cast("void*", stream), number), "aclrtStreamGetId")
        return int(number[0])

    def host_waits(self) -> HostWaits:
        """How often this process has waited so far; the device counts."""
        values = self._library.ffi.new("uint64_t[3]")
        self._library.base("xsdCounters", "void(*)(uint64_t*)", "acl")(values)
        return HostWaits(*(int(value) for value in values))

    def timed_kernel(
        self,
        *,
        stream: int,
        microseconds: int,
        vector_cores: int = 0,
        cube_cores: int = 0,
        tag: int = -1,
        rows: Tensor | None = None,
        scales: Tensor | None = None,
        tokens_per_expert: Tensor | None = None,
        out: Tensor | None = None,
        alpha: float = 1.0,
        beta: float = 0.0,
        batch_info: Tensor | None = None,
        gamma: float = 0.0,
    ) -> None:
        """TEST KERNEL: hold cores for a time. With rows [R, H] and out [R, H]: row r of local
        expert e (by `tokens_per_expert`, int64) becomes row * (alpha + beta * e), int8 rows times
        their scale; rows beyond the counts are left alone. With `batch_info`, int64, the layer is
        read from batch_info[2] when the kernel runs: it is the tag, and alpha grows by gamma *
        (layer mod 4). Asynchronous."""
        tensors = (rows, scales, tokens_per_expert, batch_info, out)
        for one in tensors:
            require("timed kernel tensor", one, one is None or one.is_contiguous(),
                    "contiguous", "use .contiguous()")  # fmt: skip
        if rows is not None and out is not None:
            require("out", tuple(out.shape), out.shape == rows.shape,
                    f"the shape of rows, {tuple(rows.shape)}", "correct it")  # fmt: skip
        shapes = tuple(None if one is None else (one.dtype, one.shape[1:]) for one in tensors)
        lengths = tuple(0 if one is None else one.shape[0] for one in tensors[2:4])
        numbers = (vector_cores, cube_cores, microseconds)
        plan = self._plans.get(
            (shapes, numbers, lengths, alpha, beta, gamma),
            lambda: self._library.plan(
                "aclnnXsdTimedKernel",
                (
                    *_tensors(tensors[:4]), *numbers, NUMBER, alpha, beta, gamma,
                    *_tensors(tensors[4:]),
                ),
            ),
        )  # fmt: skip
        addresses = [one.data_ptr() for one in tensors if one is not None]
        plan.launch(0 if rows is None else rows.shape[0], 0, tag, stream, *addresses)


def _tensors(given: Sequence[Tensor | None]) -> list[StepTensor | None]:
    """As the timed kernel's plan has them; sizes of rows come with each launch."""
    found: list[StepTensor | None] = []
    for one in given:
        if one is None:
            found.append(None)
            continue
        fixed = one.dtype is torch.int64  # counts and batch_info
        shape = tuple(one.shape) if fixed else (TOKENS, *one.shape[1:])
        found.append(StepTensor("rows", str(one.dtype), shape, may_share=True))
    return found


def _entry(data: bytes) -> KernelTrace:
    op, group, tag, *rest = struct.unpack("=32s32sq4I4QqQ", data)
    text = (op.split(b"\0")[0].decode(), group.split(b"\0")[0].decode())
    return KernelTrace(*text, tag, *rest)
