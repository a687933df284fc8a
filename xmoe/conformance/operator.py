# SPDX-License-Identifier: Apache-2.0
"""The operator over device memory, and batches with known answers, for the conformance cases."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from xmoe.comm.window import context_bytes
from xmoe.conformance.case import require
from xmoe.conformance.cases_group import HIDDEN, GroupSession
from xmoe.conformance.phase_one import variant_of
from xmoe.conformance.session import TIMEOUT_S, Array
from xmoe.kernels.acl.handles import AclStream, DeviceMemory
from xmoe.kernels.acl.op import PreparedCall, launch, prepare
from xmoe.kernels.acl.variants import FLT_MAX, GE_DTYPE_UNDEFINED, NEUTRAL
from xmoe.reference import bf16_error_bound, moe_reference, tokens_per_expert

INTER, LOCAL = 1024, 2


def to_bf16(values: Array) -> Array:
    """Bits of the nearest bfloat16, ties to even; uint16."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(bits: Array) -> Array:
    return (bits.astype(np.uint32) << 16).view(np.float32)


@cache
def _values() -> tuple[Array, Array]:
    """Bits of random weights [H, 2I] and [I, H], the same on all ranks."""
    rng = np.random.default_rng(1000)
    first = rng.standard_normal((HIDDEN, 2 * INTER), np.float32) / np.float32(HIDDEN**0.5)
    second = rng.standard_normal((INTER, HIDDEN), np.float32) / np.float32(INTER**0.5)
    return to_bf16(first), to_bf16(second)


def expert(number: int) -> tuple[Array, Array]:
    """Bits of one expert's weights [H, 2I] and [I, H], the same on all ranks.

    Every expert holds the same random values, each shifted by another distance: to draw them anew
    for all experts on all ranks takes longer than the cases.
    """
    first, second = (np.roll(values.reshape(-1), 7919 * number) for values in _values())
    return first.reshape(HIDDEN, 2 * INTER), second.reshape(INTER, HIDDEN)


@dataclass(frozen=True)
class Batch:
    """One rank's input: x bits [T, H], topk_ids [T, K] int32, topk_weights [T, K] float32."""

    x: Array
    ids: Array
    weights: Array

    @classmethod
    def random(cls, rank: int, rows: int, topk: int, num_experts: int, seed: int = 0) -> Batch:
        rng = np.random.default_rng(7919 * seed + rank)
        ids = np.argsort(rng.random((rows, num_experts)), axis=1)[:, :topk].astype(np.int32)
        weights = rng.random((rows, topk), np.float32)
        x = to_bf16(rng.standard_normal((rows, HIDDEN), np.float32))
        return cls(x, ids, weights / weights.sum(axis=1, keepdims=True))


class Launch:
    """Device memory of one launch and its prepared call."""

    def __init__(self, y: DeviceMemory, counts: DeviceMemory, ids: DeviceMemory) -> None:
        self.y, self.counts, self.ids = y, counts, ids
        self.descriptors = contextlib.ExitStack()
        self.rows = 0
        self.call: PreparedCall
        self.workspace: DeviceMemory

    def queue(self, stream: AclStream) -> None:
        launch(self.call, self.workspace, stream)


def plain_arguments(num_experts: int, ranks: int, ccl_bytes: int) -> dict[str, Any]:
    """The arguments that are neither tensors nor a clamp."""
    return {
        "weightScales1Optional": None,
        "weightScales2Optional": None,
        "moeExpertNum": num_experts,
        "epWorldSize": ranks,
        "cclBufferSize": ccl_bytes,
        "maxRecvTokenNum": 0,
        "dispatchQuantMode": 0,
        "dispatchQuantOutDtype": GE_DTYPE_UNDEFINED,
        "combineQuantMode": 0,
        "commAlg": "",
        "numMaxTokensPerRank": 0,
        "activation": "swiglu",
    }


class Operator:
    """The operator on one rank of a group."""

    def __init__(self, session: GroupSession) -> None:
        variant_of(session)
        self.s = session
        self.num_experts = LOCAL * session.size
        comm = session.comm("operator")
        spans = comm.spans()
        packed = context_bytes(session.rank, comm.create_context(), spans)
        self.ccl_bytes = spans[session.rank].size_bytes
        self.context = session.array(np.frombuffer(packed, np.int32))
        mine = range(session.rank * LOCAL, (session.rank + 1) * LOCAL)
        self.weights = [[session.array(expert(n)[part]) for n in mine] for part in (0, 1)]

    def make(
        self,
        batch: Batch,
        *,
        mask: Array | None = None,
        clamp: float = FLT_MAX,
        repeatable: bool = False,
    ) -> Launch:
        """Memory and phase one of a launch. Outputs start as NaN and -1."""
        s, (rows, topk) = self.s, batch.ids.shape
        y = s.array(np.full(batch.x.shape, 0x7FC0, np.uint16))
        one = Launch(y, s.array(np.full(LOCAL, -1, np.int32)), s.array(batch.ids))
        one.rows = rows
        x, weights = s.array(batch.x), s.array(batch.weights)
        active = None if mask is None else s.array(mask.astype(np.int8))
        outer, s.stack = s.stack, s.stack.enter_context(one.descriptors)
        try:
            args: dict[str, Any] = {
                "context": s.tensor(self.context, (4100,), "int32"),
                "x": s.tensor(x, (rows, HIDDEN), "bfloat16"),
                "topkIds": s.tensor(one.ids, (rows, topk), "int32"),
                "topkWeights": s.tensor(weights, (rows, topk), "float32"),
                "weight1": s.tensors(self.weights[0], (HIDDEN, 2 * INTER), "bfloat16"),
                "weight2": s.tensors(self.weights[1], (INTER, HIDDEN), "bfloat16"),
                "xActiveMaskOptional": None
                if active is None
                else s.tensor(active, (rows,), "int8"),
                "yOut": s.tensor(y, (rows, HIDDEN), "bfloat16"),
                "expertTokenNumsOut": s.tensor(one.counts, (LOCAL,), "int32"),
            }
        finally:
            s.stack = outer
        args |= plain_arguments(self.num_experts, s.size, self.ccl_bytes)
        args |= {"activationClamp": clamp, "activationParams": (clamp,)}
        wanted = {k: args[k] if k in args else NEUTRAL[k][0] for k in variant_of(s).keys()}
        one.call = prepare(s.runtime, s.runtime.mega_moe, wanted, repeatable=repeatable)
        s.stack.enter_context(one.call)
        one.workspace = s.memory(max(64, one.call.workspace_bytes))
        return one

    def run(self, batch: Batch, stream: AclStream, **how: Any) -> tuple[Array, Array, Launch]:
        """One launch to its end: y bits [T, H], counts [LOCAL]."""
        one = self.make(batch, **how)
        one.queue(stream)
        stream.synchronize(TIMEOUT_S)
        return *self.read(one), one

    def read(self, one: Launch) -> tuple[Array, Array]:
        y = self.s.read(one.y, np.uint16, one.rows * HIDDEN).reshape(one.rows, HIDDEN)
        return y, self.s.read(one.counts, np.int32, LOCAL)


def operator(s: GroupSession) -> Operator:
    """The group's operator, made at first use. COLLECTIVE then."""
    made: Operator | None = s.__dict__.get("_operator")
    if made is None:
        with s.lasting():
            made = s.__dict__["_operator"] = Operator(s)
    return made


def check_values(y: Array, batch: Batch, clamp: float | None = None) -> str:
    """Every element within the bound that the operator's rounding points allow."""
    # Only of the experts that are named: all of them, on 16 ranks, take gigabytes and minutes.
    named, ids = np.unique(batch.ids, return_inverse=True)
    experts = [expert(int(n)) for n in named]
    gate_up, down = (np.stack([from_bf16(e[part]) for e in experts]) for part in (0, 1))
    ids = ids.reshape(batch.ids.shape).astype(np.int64)
    inputs = (from_bf16(batch.x), ids, batch.weights, gate_up, down)
    want, bound = moe_reference(*inputs, clamp), bf16_error_bound(*inputs, clamp)
    error = np.abs(from_bf16(y).astype(np.float64) - want)
    require(bool(np.isfinite(error).all()), "y holds values that are not finite")
    worst = float((error / np.maximum(bound, 1e-30)).max())
    require(worst <= 1, f"an element is off by {worst:.2f} times the bound")
    return f"largest error {worst:.3f} of the bound"


def all_counts(s: GroupSession, ids_of: Any) -> Array:
    """This rank's expected counts, from all ranks' ids."""
    total = sum(tokens_per_expert(ids_of(rank), LOCAL * s.size) for rank in range(s.size))
    return np.asarray(total)[s.rank * LOCAL : (s.rank + 1) * LOCAL]
