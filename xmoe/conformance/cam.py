# SPDX-License-Identifier: Apache-2.0
"""The connectors' operators over device memory, and batches with known answers, for their cases.

Argument lists are written out here once more, as they are for MegaMoe: what the product's own
classes would send to a device is what the cases are to judge, and those take torch's tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from xmoe.conformance.case import NotHere
from xmoe.conformance.cases_group import GroupSession
from xmoe.conformance.operator import from_bf16, to_bf16
from xmoe.conformance.session import TIMEOUT_S, Array
from xmoe.errors import SymbolMissing
from xmoe.kernels.acl.handles import AclStream, DeviceMemory
from xmoe.kernels.acl.native_plan import NUMBER, TOKENS, StepTensor
from xmoe.kernels.acl.op_plan import OpPlan, Parameter
from xmoe.kernels.ops.cam.binding import CamLibrary, open_cam
from xmoe.kernels.ops.cam.topology import CamAsyncTopology, CamP2PTopology, receive_capacity

HIDDEN, TOPK, LOCAL, CORES, MAX_ROWS = 128, 2, 4, 8, 32
ROUNDING = 2.0**-8
"""Largest relative error of one rounding to bfloat16."""
_STOP_WORDS = 4


def library(s: GroupSession, *ops: str) -> CamLibrary:
    """The one that holds these operators; the case is skipped where there is none."""
    try:
        found = open_cam(s.runtime.toolkit, ops[0] + "GetWorkspaceSize")
    except SymbolMissing as error:
        raise NotHere(str(error)) from error
    for name in (n for op in ops for n in (op, op + "GetWorkspaceSize")):
        if not found.has(name):
            raise NotHere(f"{found.path} has CAM operators, but does not export {name}")
    return found


class _Operators:
    """Plans over the memory of a session. Everything lasts as long as the session."""

    def __init__(self, s: GroupSession, comm: str, *ops: str) -> None:
        self.s = s
        self._library = library(s, *ops)
        self.group = s.comm(comm).name()

    def _plan(self, op: str, *parameters: Parameter) -> OpPlan:
        return self.s.stack.enter_context(self._library.plan(op, parameters))

    def _launch(
        self,
        plan: OpPlan,
        rows: int,
        stream: AclStream,
        *memories: DeviceMemory | None,
        number: int = 0,
    ) -> None:
        plan.launch(rows, 0, number, stream.read(), *(self._address(one) for one in memories))

    def _address(self, memory: DeviceMemory | None) -> int:
        ffi = self.s.ffi
        return 0 if memory is None else int(ffi.cast("uintptr_t", ffi.cast("void*", memory.handle)))

    def _constant(self, dtype: str) -> tuple[int, str, int]:
        """A placeholder of the ABI, of one element."""
        return self._address(self.s.array(np.zeros(1, np.int32))), dtype, 1


def _given(name: str, dtype: str, *shape: int | str, optional: bool = False) -> StepTensor:
    return StepTensor(name, dtype, shape, optional=optional, may_share=True)


def _made(name: str, dtype: str, *shape: int | str) -> StepTensor:
    return StepTensor(name, dtype, shape, is_output=True)


# ---- a2e and e2a


class CamP2P(_Operators):
    """a2e and e2a of one rank: one FFN rank for three Attention ranks, for one when there are two.

    Rows are bits of bfloat16 [T, HIDDEN].
    """

    def __init__(self, s: GroupSession, comm: str) -> None:
        super().__init__(s, comm, "aclnnA2e", "aclnnE2a")
        ffn = max(1, s.size // 4)
        self.place = t = CamP2PTopology(ffn, s.size - ffn, s.rank, HIDDEN, TOPK, CORES)
        numbers = (TOKENS, HIDDEN, TOPK, t.ffn_size, t.attn_size, t.rank)
        rows: tuple[int | str, int] = (TOKENS, HIDDEN) if t.is_ffn else (1, 1)
        back: tuple[int | str, int] = (1, 1) if t.is_ffn else (TOKENS, HIDDEN)
        self._a2e = self._plan(
            "aclnnA2e",
            _given("x", "bfloat16", TOKENS, HIDDEN, optional=True),
            *(None, None, *numbers, self.group, CORES, 0),
            _made("expandXOut", "bfloat16", *rows),
            _made("simulateExpertIdsOut", "int32", rows[0], TOPK),
            _made("simulateExpertScalesOut", "float32", rows[0], TOPK),
            _made("attenBatchSize", "int32", t.ratio),
            _made("xActiveMaskOut", "bool", t.ratio),
        )
        self._e2a = self._plan(
            "aclnnE2a",
            _given("expandX", "bfloat16", TOKENS, HIDDEN),
            _given("attenBatchSize", "int32", t.ratio),
            *(*numbers, self.group, CORES),
            _made("out", "bfloat16", *back),
        )
        # Neither operator reads it, and the first does not write it; so it says nothing true.
        self._sizes = s.array(np.full(t.ratio, -77, np.int32))

    def a2e(self, rows: int, stream: AclStream, x: DeviceMemory | None = None) -> DeviceMemory:
        """Queue a2e. FFN: `rows` of all its peers together; returns the memory they arrive in."""
        s = self.s
        out = s.array(np.full((rows if self.place.is_ffn else 1, HIDDEN), 0x7FC0, np.uint16))
        ids, scales = s.memory(4 * rows * TOPK + 64), s.memory(4 * rows * TOPK + 64)
        self._launch(self._a2e, rows, stream, x, out, ids, scales, self._sizes, s.memory(64))
        return out

    def e2a(self, rows: int, stream: AclStream, x: DeviceMemory) -> DeviceMemory:
        """Queue e2a. Attention: `x` gives the number of rows only; returns where they arrive."""
        out = self.s.array(np.full((rows, HIDDEN), 0x7FC0, np.uint16))
        self._launch(self._e2a, rows, stream, x, self._sizes, out)
        return out

    def rows(self, memory: DeviceMemory, rows: int) -> Array:
        return self.s.read(memory, np.uint16, rows * HIDDEN).reshape(rows, HIDDEN)


# ---- the four asynchronous operators


@dataclass(frozen=True)
class Routed:
    """One dispatch: x bits [T, HIDDEN], ids [T, TOPK] int32, weights [T, TOPK] float32."""

    x: Array
    ids: Array
    weights: Array

    @classmethod
    def random(cls, rank: int, layer: int, first: int, last: int, rows: int = 0) -> Routed:
        """Routed to the experts first..last-1 only. One to MAX_ROWS rows unless given."""
        rng = np.random.default_rng([rank, layer])
        rows = rows or 1 + (5 * rank + 11 * layer) % MAX_ROWS
        order = np.argsort(rng.random((rows, last - first)), axis=1)[:, :TOPK]
        x = to_bf16(rng.standard_normal((rows, HIDDEN), np.float32))
        return cls(x, (order + first).astype(np.int32), rng.random((rows, TOPK), np.float32))

    def arriving(self, expert: int) -> Array:
        """Numbers of the rows that this expert gets, in the sender's order."""
        return np.nonzero((self.ids == expert).any(axis=1))[0]

    def combined(self, quantised: bool) -> tuple[Array, Array]:
        """sum_k w * factor * x in float64, and the error that the roundings allow. [T, HIDDEN]."""
        x = from_bf16(self.x).astype(np.float64)
        share = (self.weights.astype(np.float64) * factor(self.ids)).sum(1, keepdims=True)
        want, size = share * x, share * np.abs(x)
        bound = 2.01 * ROUNDING * size
        if quantised:  # half a step of int8 at each expert
            bound = bound + share * np.abs(x).max(1, keepdims=True) / 127 * 0.51
        return want, bound + 1e-6 * size + 1e-30


def factor(expert: Any) -> Any:
    """What the made-up expert multiplies a row with."""
    return 1 + np.asarray(expert, np.float64) / 8


@dataclass(frozen=True)
class Item:
    """What one receive brought. rows: bits [n, HIDDEN], or int8 with scales float32 [n]."""

    rows: Array
    scales: Array
    info: list[int]
    counts: list[int]


class CamAsync(_Operators):
    """The four operators of one rank; as many FFN as Attention ranks, LOCAL experts on each."""

    def __init__(self, s: GroupSession, comm: str, quantised: bool) -> None:
        names = [
            f"aclnnAfdAsync{n}"
            for n in ("DispatchSend", "DispatchRecv", "CombineSend", "CombineRecv")
        ]
        super().__init__(s, comm, *names)
        half = s.size // 2
        self.place = t = CamAsyncTopology(
            half, half, s.rank, HIDDEN, TOPK, LOCAL, MAX_ROWS, 1, quantised
        )
        self.quantised = quantised
        words = t.info_length(shared=False)
        unused, result = self._constant("float16"), self._constant("int8")
        ranks = (t.ffn_size, t.attn_size, LOCAL)
        mine, quant = (t.rank, t.world_size), int(quantised)
        if not t.is_ffn:
            self._send = self._plan(
                names[0],
                _given("x", "bfloat16", TOKENS, HIDDEN),
                _given("expertIds", "int32", TOKENS, TOPK),
                *(unused, 0, MAX_ROWS, TOKENS, HIDDEN, TOPK, *ranks, *mine, NUMBER, 1, quant),
                *(self.group, result),
            )
            self._recv = self._plan(
                names[3],
                self._constant("bfloat16"),
                _given("expertIds", "int32", TOKENS, TOPK),
                _given("weights", "float32", TOKENS, TOPK),
                *(unused, 0, TOKENS, HIDDEN, TOPK, *ranks, *mine, self.group),
                _made("out", "bfloat16", TOKENS, HIDDEN),
            )
            return
        self._capacity = receive_capacity()
        self._width = np.int8 if quantised else np.uint16
        self._stop = s.array(np.zeros(_STOP_WORDS, np.int64))
        self._out = (
            s.memory(self._capacity * HIDDEN * np.dtype(self._width).itemsize),
            s.memory(4 * self._capacity if quantised else 64),
            s.array(np.full(words, -1, np.int64)),
            s.array(np.full(LOCAL, -1, np.int64)),
        )
        self._recv = self._plan(
            names[1],
            _given("stop", "bfloat16", 4 * _STOP_WORDS if quantised else 1),
            *(unused, 0, MAX_ROWS, HIDDEN, TOPK, *ranks, *mine, 1, quant, self.group),
            _made("expandXOut", "int8" if quantised else "bfloat16", TOKENS, HIDDEN),
            _made("scales", "float32", TOKENS if quantised else 1),
            _made("batchInfo", "int64", words),
            _made("expertCounts", "int64", LOCAL),
        )
        self._send = self._plan(
            names[2],
            _given("expertOut", "bfloat16", TOKENS, HIDDEN),
            unused,
            _given("batchInfo", "int64", words),
            *(0, MAX_ROWS, HIDDEN, TOPK, *ranks, *mine, 1, self.group, result),
        )

    @property
    def first_expert(self) -> int:
        """Number of this FFN rank's slot 0 among all experts."""
        return (self.place.rank - self.place.attn_size) * LOCAL

    # Attention

    def dispatch(self, batch: Routed, layer: int, stream: AclStream) -> None:
        """Queue a dispatch."""
        x, ids = self.s.array(batch.x), self.s.array(batch.ids)
        self._launch(self._send, len(batch.x), stream, x, ids, number=layer)

    def combine(self, batch: Routed, stream: AclStream) -> DeviceMemory:
        """Queue the receive of its result."""
        out = self.s.array(np.full((len(batch.x), HIDDEN), 0x7FC0, np.uint16))
        ids, weights = self.s.array(batch.ids), self.s.array(batch.weights)
        self._launch(self._recv, len(batch.x), stream, ids, weights, out)
        return out

    # FFN

    def receive(self, stream: AclStream, stop: bool = False) -> Item:
        """Wait for the next item; with `stop`, after the stop buffer was set."""
        self._stop.write(np.array([int(stop), 0, 0, 0], np.int64).tobytes())
        self._launch(self._recv, self._capacity, stream, self._stop, *self._out)
        stream.synchronize(TIMEOUT_S)
        rows, scales, info, counts = self._out
        found = self.s.read(counts, np.int64, LOCAL).tolist()
        n = min(max(0, sum(found)), self._capacity)
        return Item(
            self.s.read(rows, self._width, n * HIDDEN).reshape(n, HIDDEN),
            self.s.read(scales, np.float32, n) if self.quantised else np.ones(n, np.float32),
            self.s.read(info, np.int64, self.place.info_length(shared=False)).tolist(),
            found,
        )

    def answer(self, item: Item, stream: AclStream) -> None:
        """Send the item's rows back, each times its expert's factor; a zero row when there is none.
        The words of the item go back from where the receive left them."""
        values = item.rows if self.quantised else from_bf16(item.rows)
        local = np.repeat(np.arange(LOCAL), item.counts)
        each = factor(self.first_expert + local) * item.scales.astype(np.float64)
        out = np.zeros((max(1, len(values)), HIDDEN), np.float32)
        out[: len(values)] = values.astype(np.float64) * each[:, None]
        self._launch(self._send, len(out), stream, self.s.array(to_bf16(out)), self._out[2])
        stream.synchronize(TIMEOUT_S)

    def serve(self, dispatches: int, stream: AclStream) -> list[Item]:
        """Receive and answer until that many dispatches were finished."""
        items: list[Item] = []
        finished = 0
        while finished < dispatches:
            items.append(self.receive(stream))
            self.answer(items[-1], stream)
            finished += items[-1].info[4] == LOCAL - 1
        return items


def _lasting(s: GroupSession, key: str, make: Callable[[], Any]) -> Any:
    made = s.__dict__.setdefault("_cam", {})
    if key not in made:
        with s.lasting():
            made[key] = make()
    return made[key]


def camp2p(s: GroupSession, number: int = 0) -> CamP2P:
    """a2e and e2a over a communicator of their own, made at first use. COLLECTIVE then."""
    made: CamP2P = _lasting(s, f"p2p{number}", lambda: CamP2P(s, f"camp2p{number}"))
    return made


def cam_async(s: GroupSession, quantised: bool = False) -> CamAsync:
    """The four operators over a communicator of their own, made at first use. COLLECTIVE then."""
    name = f"cam_async{int(quantised)}"
    made: CamAsync = _lasting(s, name, lambda: CamAsync(s, name, quantised))
    return made
