# SPDX-License-Identifier: Apache-2.0
"""Launches of MegaMoe over the whole group: values, counts, mask, order, bits, executors."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from xmoe.comm.window import context_bytes
from xmoe.conformance.case import NotHere, case, require
from xmoe.conformance.cases_group import HIDDEN, MAX_ROWS, GroupSession
from xmoe.conformance.phase_one import variant_of
from xmoe.conformance.session import TIMEOUT_S, Array, Session
from xmoe.errors import AclError
from xmoe.kernels.acl.handles import AclStream, DeviceMemory
from xmoe.kernels.acl.op import PreparedCall, launch, prepare
from xmoe.kernels.acl.variants import FLT_MAX, GE_DTYPE_UNDEFINED, NEUTRAL
from xmoe.reference import bf16_error_bound, moe_reference, tokens_per_expert

INTER, LOCAL = 1024, 2
_RELIES = "MegaMoe"


def to_bf16(values: Array) -> Array:
    """Bits of the nearest bfloat16, ties to even; uint16."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(bits: Array) -> Array:
    return (bits.astype(np.uint32) << 16).view(np.float32)


@cache
def expert(number: int) -> tuple[Array, Array]:
    """Bits of one expert's weights [H, 2I] and [I, H], the same on all ranks."""
    rng = np.random.default_rng(1000 + number)
    first = rng.standard_normal((HIDDEN, 2 * INTER), np.float32) / np.float32(HIDDEN**0.5)
    second = rng.standard_normal((INTER, HIDDEN), np.float32) / np.float32(INTER**0.5)
    return to_bf16(first), to_bf16(second)


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


def check_values(y: Array, batch: Batch, num_experts: int, clamp: float | None = None) -> str:
    """Every element within the bound that the operator's rounding points allow."""
    experts = [expert(n) for n in range(num_experts)]
    gate_up, down = (np.stack([from_bf16(e[part]) for e in experts]) for part in (0, 1))
    inputs = (from_bf16(batch.x), batch.ids.astype(np.int64), batch.weights, gate_up, down)
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


@case(
    "mega_moe.values",
    "y is the weighted sum of the experts within the documented roundings",
    _RELIES,
    ranks=True,
)
def values(s: GroupSession) -> str:
    op = operator(s)
    batch = Batch.random(s.rank, 5, 3, op.num_experts)
    y, _, _ = op.run(batch, s.stream())
    return check_values(y, batch, op.num_experts)


@case("mega_moe.one_row", "one row per rank is enough", "decode", ranks=True)
def one_row(s: GroupSession) -> str:
    op = operator(s)
    batch = Batch.random(s.rank, 1, 1, op.num_experts, 1)
    y, _, _ = op.run(batch, s.stream())
    return check_values(y, batch, op.num_experts)


@case(
    "mega_moe.clamp",
    "a clamp bounds the gate above and the up projection on both sides",
    _RELIES,
    ranks=True,
)
def clamp(s: GroupSession) -> str:
    op = operator(s)
    if not any(variant_of(s).has(k) for k in ("activationClamp", "activationParams")):
        raise NotHere("this ABI variant has no clamp")
    batch = Batch.random(s.rank, 4, 2, op.num_experts, 2)
    y, _, _ = op.run(batch, s.stream(), clamp=0.5)
    return check_values(y, batch, op.num_experts, 0.5)


@case(
    "mega_moe.counts",
    "expert_token_nums counts the rows of all ranks for each local expert",
    "overflow detection",
    ranks=True,
)
def counts(s: GroupSession) -> str:
    op = operator(s)

    def ids_of(rank: int) -> Array:
        return Batch.random(rank, 7, 2, op.num_experts, 3).ids

    _, got, _ = op.run(Batch.random(s.rank, 7, 2, op.num_experts, 3), s.stream())
    want = all_counts(s, ids_of)
    require(got.tolist() == want.tolist(), f"counted {got.tolist()}, sent {want.tolist()}")
    return f"rank {s.rank}: {got.tolist()}"


@case(
    "mega_moe.equal_bits",
    "the same input gives the same bits each time",
    "repeatability",
    ranks=True,
)
def equal_bits(s: GroupSession) -> str:
    op, stream = operator(s), s.stream()
    batch = Batch.random(s.rank, 16, 4, op.num_experts, 4)
    seen = {op.run(batch, stream)[0].tobytes() for _ in range(5)}
    require(len(seen) == 1, f"{len(seen)} different results of 5")
    return "5 launches"


@case(
    "mega_moe.batch_invariant",
    "a row's bits do not depend on the other rows",
    "repeatability",
    ranks=True,
)
def batch_invariant(s: GroupSession) -> str:
    op, stream = operator(s), s.stream()
    batch = Batch.random(s.rank, 16, 4, op.num_experts, 5)
    whole, _, _ = op.run(batch, stream)
    few, _, _ = op.run(Batch(batch.x[:3], batch.ids[:3], batch.weights[:3]), stream)
    require(bool((whole[:3] == few).all()), "the first 3 of 16 rows differ from 3 rows alone")
    return "3 rows alone equal the first 3 of 16"


@case(
    "mega_moe.back_to_back",
    "launches queued one after the other in one stream do not disturb each other",
    "LaunchFence",
    ranks=True,
)
def back_to_back(s: GroupSession) -> str:
    op, stream = operator(s), s.stream()
    batches = [Batch.random(s.rank, 1 + n % 4, 2, op.num_experts, 10 + n) for n in range(12)]
    launches = [op.make(batch) for batch in batches]
    for one in launches:
        one.queue(stream)
    stream.synchronize(TIMEOUT_S)
    for one, batch in zip(launches, batches, strict=True):
        check_values(op.read(one)[0], batch, op.num_experts)
    return f"{len(launches)} launches of 1 to 4 rows, synchronised once"


@case(
    "mega_moe.two_streams_fenced",
    "launches on two streams that wait for one another's event are in order",
    "LaunchFence",
    ranks=True,
)
def two_streams_fenced(s: GroupSession) -> str:
    op, streams, event = operator(s), [s.stream(), s.stream()], s.event()
    batches = [Batch.random(s.rank, 2, 2, op.num_experts, 30 + n) for n in range(8)]
    launches = [op.make(batch) for batch in batches]
    for number, one in enumerate(launches):
        stream = streams[number % 2]
        if number:
            stream.wait_event(event)
        one.queue(stream)
        event.record(stream)
    for stream in streams:
        stream.synchronize(TIMEOUT_S)
    for one, batch in zip(launches, batches, strict=True):
        check_values(op.read(one)[0], batch, op.num_experts)
    return f"{len(launches)} launches on two streams, one event"


@case(
    "mega_moe.asynchronous",
    "the launch returns while its stream still waits",
    "executor",
    ranks=True,
)
def asynchronous(s: GroupSession) -> str:
    op, stream = operator(s), s.stream()
    batch = Batch.random(s.rank, 2, 2, op.num_experts, 40)
    one = op.make(batch)
    gate = s.gate(stream)
    one.queue(stream)
    before, _ = op.read(one)
    gate.open()
    stream.synchronize(TIMEOUT_S)
    require(bool((before == 0x7FC0).all()), "y was written before the stream was let go")
    return f"returned before the work; {check_values(op.read(one)[0], batch, op.num_experts)}"


@case(
    "mega_moe.descriptors_may_go",
    "descriptors may be destroyed once phase two has returned",
    "MegaMoe.launch",
    ranks=True,
)
def descriptors_may_go(s: GroupSession) -> str:
    op, stream = operator(s), s.stream()
    batch = Batch.random(s.rank, 2, 2, op.num_experts, 41)
    one = op.make(batch)
    gate = s.gate(stream)
    one.queue(stream)
    one.descriptors.close()
    gate.open()
    stream.synchronize(TIMEOUT_S)
    return check_values(op.read(one)[0], batch, op.num_experts)


@case("mega_moe.executor_once", "an op_executor that was launched is used up", "op", ranks=True)
def executor_once(s: GroupSession) -> str:
    if not s.soft:
        raise NotHere(
            "a vendor's CANN frees it after phase two; asking again would use freed memory"
        )
    op, stream = operator(s), s.stream()
    one = op.make(Batch.random(s.rank, 1, 1, op.num_experts, 42))
    handle = one.call.op_executor
    one.queue(stream)
    stream.synchronize(TIMEOUT_S)
    symbols, native = s.runtime.mega_moe, s.runtime.native.lib
    again = getattr(native, f"mega_moe_launch__{variant_of(s).id}")(
        s.ffi.cast("void*", symbols.launch_addr),
        one.workspace.pointer,
        one.call.workspace_bytes,
        handle,
        stream.pointer,
    )
    require(again != 0, "a second launch was accepted")
    return f"a second launch gives {again}: {s.text()[:90]!r}"


@case(
    "mega_moe.repeatable",
    "a repeatable op_executor may be launched again with new values in the same memory",
    "launch plans",
    ranks=True,
)
def repeatable(s: GroupSession) -> str:
    op, stream = operator(s), s.stream()
    batch = Batch.random(s.rank, 3, 2, op.num_experts, 43)
    one = op.make(batch, repeatable=True)
    outputs = []
    for _ in range(3):
        one.queue(stream)
        stream.synchronize(TIMEOUT_S)
        outputs.append(op.read(one)[0].tobytes())
    other = Batch.random(s.rank, 3, 2, op.num_experts, 44)
    one.ids.write(other.ids.tobytes())
    one.queue(stream)
    stream.synchronize(TIMEOUT_S)
    require(len(set(outputs)) == 1, "three launches of one op_executor differ")
    mixed = Batch(batch.x, other.ids, batch.weights)
    return f"4 launches; {check_values(op.read(one)[0], mixed, op.num_experts)}"


def _masked(s: GroupSession, rank: int, num_experts: int) -> tuple[Batch, Array]:
    batch = Batch.random(rank, 6, 2, num_experts, 50)
    mask = np.ones(6, np.int8)
    mask[1 + rank % 3 :: 3] = 0
    return batch, mask


@case(
    "mega_moe.mask_rows",
    "rows that the mask switches off do not change the others",
    "padding=mask",
    ranks=True,
)
def mask_rows(s: GroupSession) -> str:
    op = operator(s)
    batch, mask = _masked(s, s.rank, op.num_experts)
    y, _, _ = op.run(batch, s.stream(), mask=mask)
    live = mask != 0
    kept = Batch(batch.x[live], batch.ids[live], batch.weights[live])
    return f"{int(live.sum())} of 6 rows live; {check_values(y[live], kept, op.num_experts)}"


@case(
    "mega_moe.mask_counts",
    "rows that the mask switches off are not counted",
    "padding=mask",
    ranks=True,
)
def mask_counts(s: GroupSession) -> str:
    op = operator(s)
    batch, mask = _masked(s, s.rank, op.num_experts)
    _, got, _ = op.run(batch, s.stream(), mask=mask)

    def ids_of(rank: int) -> Array:
        other, active = _masked(s, rank, op.num_experts)
        return np.asarray(other.ids[active != 0])

    want = all_counts(s, ids_of)
    require(got.tolist() == want.tolist(), f"counted {got.tolist()}, live {want.tolist()}")
    return f"rank {s.rank}: {got.tolist()}"


@case(
    "mega_moe.mask_rewrites_ids",
    "with a mask the operator writes EP * E over the ids of rows that "
    "are off, in the caller's tensor",
    "MegaMoe clones the ids",
    ranks=True,
)
def mask_rewrites_ids(s: GroupSession) -> str:
    op = operator(s)
    batch, mask = _masked(s, s.rank, op.num_experts)
    _, _, one = op.run(batch, s.stream(), mask=mask)
    ids = s.read(one.ids, np.int32, batch.ids.size).reshape(batch.ids.shape)
    off, live = ids[mask == 0], mask != 0
    require(bool((ids[live] == batch.ids[live]).all()), "ids of live rows changed")
    require(bool((off == op.num_experts).all()), f"ids of rows that are off: {off.tolist()}")
    return f"live rows kept; rows that are off hold {op.num_experts}"


@case("mega_moe.no_mask_keeps_ids", "without a mask the ids are left alone", "MegaMoe", ranks=True)
def no_mask_keeps_ids(s: GroupSession) -> str:
    op = operator(s)
    batch = Batch.random(s.rank, 4, 2, op.num_experts, 60)
    _, _, one = op.run(batch, s.stream())
    got = s.read(one.ids, np.int32, batch.ids.size)
    require(got.tolist() == batch.ids.reshape(-1).tolist(), "the ids changed")
    return "unchanged"


@case(
    "mega_moe.skewed", "all rows of all ranks may go to one expert", "max_recv_tokens=0", ranks=True
)
def skewed(s: GroupSession) -> str:
    op = operator(s)
    batch = Batch.random(s.rank, MAX_ROWS, 1, op.num_experts, 61)
    batch = Batch(batch.x, np.full_like(batch.ids, op.num_experts - 1), batch.weights)
    y, got, _ = op.run(batch, s.stream())
    want = [0, MAX_ROWS * s.size] if s.rank == s.size - 1 else [0, 0]
    require(got.tolist() == want, f"counted {got.tolist()}, wanted {want}")
    return f"{MAX_ROWS * s.size} rows; {check_values(y, batch, op.num_experts)}"


@case(
    "error.late_and_sticky",
    "work that fails on the device is reported by a later wait, and by "
    "every one after it; the launch itself succeeds",
    "resource.failed",
    harmful=True,
)
def late_and_sticky(s: Session) -> str:
    from xmoe.conformance.phase_one import Sizes

    sizes = Sizes()
    zero = s.array(np.zeros(4100, np.int32))  # a context that points nowhere
    variant = variant_of(s)
    memory = {
        key: s.memory(4 << 20)
        for key in ("x", "topkIds", "topkWeights", "weight", "yOut", "expertTokenNumsOut")
    }
    args: dict[str, Any] = dict(sizes.arguments())
    args["context"] = s.tensor(zero, (4100,), "int32")
    for key in ("x", "topkIds", "topkWeights", "yOut", "expertTokenNumsOut"):
        memory[key].write(bytes(4096))
        args[key] = s.tensor(memory[key], args[key].shape, args[key].dtype)
    for key in ("weight1", "weight2"):
        shape = args[key][0].shape
        args[key] = s.tensors([memory["weight"]] * len(args[key]), shape, "bfloat16")
    wanted = {k: args[k] if k in args else NEUTRAL[k][0] for k in variant.keys()}
    stream = s.stream()
    codes = []
    with prepare(s.runtime, s.runtime.mega_moe, wanted) as call:
        launch(call, s.memory(max(64, call.workspace_bytes)), stream)
        for _ in range(2):
            try:
                stream.synchronize(TIMEOUT_S)
                codes.append(0)
            except AclError as error:
                codes.append(error.code)
    require(
        507000 <= codes[0] < 508000 and codes[1] != 0,
        f"the first wait gave {codes[0]}, the second {codes[1]}",
    )
    return f"the launch returned 0, the waits {codes[0]} and {codes[1]}"
