# SPDX-License-Identifier: Apache-2.0
"""Launches of MegaMoe over the whole group: values, counts, mask, order, bits, executors."""

from __future__ import annotations

from typing import Any

import numpy as np

from xmoe.conformance.case import NotHere, case, require
from xmoe.conformance.cases_group import MAX_ROWS, GroupSession
from xmoe.conformance.operator import (
    Batch,
    all_counts,
    check_values,
    operator,
)
from xmoe.conformance.phase_one import Sizes, variant_of
from xmoe.conformance.session import TIMEOUT_S, Array, Session
from xmoe.errors import AclError
from xmoe.kernels.acl.op import launch, prepare
from xmoe.kernels.acl.variants import NEUTRAL

_RELIES = "MegaMoe"


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
    return check_values(y, batch)


@case("mega_moe.one_row", "one row per rank is enough", "decode", ranks=True)
def one_row(s: GroupSession) -> str:
    op = operator(s)
    batch = Batch.random(s.rank, 1, 1, op.num_experts, 1)
    y, _, _ = op.run(batch, s.stream())
    return check_values(y, batch)


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
    return check_values(y, batch, 0.5)


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
        check_values(op.read(one)[0], batch)
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
        check_values(op.read(one)[0], batch)
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
    return f"returned before the work; {check_values(op.read(one)[0], batch)}"


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
    return check_values(op.read(one)[0], batch)


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
    return f"4 launches; {check_values(op.read(one)[0], mixed)}"


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
    return f"{int(live.sum())} of 6 rows live; {check_values(y[live], kept)}"


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
    return f"{MAX_ROWS * s.size} rows; {check_values(y, batch)}"


@case(
    "error.late_and_sticky",
    "work that fails on the device is reported by a later wait, and by "
    "every one after it; the launch itself succeeds",
    "resource.failed",
    harmful=True,
)
def late_and_sticky(s: Session) -> str:
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
