# SPDX-License-Identifier: Apache-2.0
"""The connectors' operators over the whole group: values, counters, credit, item fields, scales."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from xmoe.conformance.cam import (
    HIDDEN,
    LOCAL,
    TOPK,
    CamAsync,
    CamP2P,
    Item,
    Routed,
    cam_async,
    camp2p,
)
from xmoe.conformance.case import NotHere, case, require
from xmoe.conformance.cases_group import GroupSession
from xmoe.conformance.operator import from_bf16, to_bf16
from xmoe.conformance.session import TIMEOUT_S, Array
from xmoe.kernels.acl.handles import AclStream

ROUNDS = 12
BatchOf = Callable[[int, int], Routed]  # of an Attention rank and a layer


# ---- a2e and e2a


def payload(rank: int, number: int, rows: int) -> Array:
    """Bits of small whole numbers, different for each rank and round."""
    values = np.random.default_rng([rank, number]).integers(-60, 61, (rows, HIDDEN))
    return to_bf16(values.astype(np.float32))


def answer_of(bits: Array) -> Array:
    """What the FFN ranks send back: plain torch's 2 x + 1, as bits."""
    x = torch.from_numpy(bits.astype(np.int16)).view(torch.bfloat16)
    return (x * 2 + 1).view(torch.int16).numpy().astype(np.uint16)


def exchange(lanes: Sequence[CamP2P], rounds: int, stream: AclStream) -> str:
    """a2e on each lane, then e2a on each, `rounds` times; each round has other rows, and another
    number of them. Attention queues all of it before it waits."""
    s, t = lanes[0].s, lanes[0].place
    sent: list[tuple[Array, Any]] = []
    for number in range(rounds):
        rows = 1 + 7 * number % 16
        calls = [(lane, number * len(lanes) + at) for at, lane in enumerate(lanes)]
        if t.is_ffn:
            total = rows * t.ratio
            arrived = [(lane, tag, lane.a2e(total, stream)) for lane, tag in calls]
            stream.synchronize(TIMEOUT_S)
            for lane, tag, memory in arrived:
                got = lane.rows(memory, total)
                want = np.concatenate([payload(p, tag, rows) for p in t.attention_peers()])
                wrong = int((got != want).any(axis=1).sum())
                require(wrong == 0, f"round {number}: {wrong} of {total} rows arrived changed")
                lane.e2a(total, stream, s.array(answer_of(got)))
            stream.synchronize(TIMEOUT_S)
            continue
        inputs = [(lane, payload(s.rank, tag, rows)) for lane, tag in calls]
        held = [(lane, bits, s.array(bits)) for lane, bits in inputs]
        for lane, _, x in held:
            lane.a2e(rows, stream, x)
        sent += [(bits, lane.e2a(rows, stream, x)) for lane, bits, x in held]
    stream.synchronize(TIMEOUT_S)
    for at, (bits, memory) in enumerate(sent):
        same = np.array_equal(lanes[0].rows(memory, len(bits)), answer_of(bits))
        require(same, f"exchange {at} brought back other values than torch computes")
    return f"{rounds * len(lanes)} exchanges of {t.ffn_size} FFN and {t.attn_size} Attention ranks"


@case(
    "camp2p.round_trip",
    "a2e brings an FFN rank the rows of its Attention ranks in their order, e2a brings each its "
    "own back, bit for bit; nobody reads attenBatchSize",
    "CAMP2P adapter",
    ranks=True,
)
def p2p_round_trip(s: GroupSession) -> str:
    return exchange([camp2p(s)], 1, s.stream())


@case(
    "camp2p.alternates",
    "launch counters of a2e and e2a stay equal on both roles while they alternate, whatever the "
    "number of rows",
    "CAMP2P adapter, order of one channel",
    ranks=True,
)
def p2p_alternates(s: GroupSession) -> str:
    return exchange([camp2p(s)], ROUNDS, s.stream())


@case(
    "camp2p.two_groups",
    "every communicator has its counters and its buffer: a second a2e may go out on another one "
    "before the e2a of the first",
    "CAMP2P adapter, two stages",
    ranks=True,
)
def p2p_two_groups(s: GroupSession) -> str:
    return exchange([camp2p(s), camp2p(s, 1)], ROUNDS // 2, s.stream())


@case(
    "camp2p.stream_order",
    "a2e takes its place in the caller's stream, and its call returns before it runs",
    "executor",
    ranks=True,
)
def p2p_stream_order(s: GroupSession) -> str:
    lane, stream, rows = camp2p(s), s.stream(), 3
    if lane.place.is_ffn:
        total = rows * lane.place.ratio
        memory = lane.a2e(total, stream)
        stream.synchronize(TIMEOUT_S)
        held = sorted({int(v) for v in lane.rows(memory, total).ravel()})
        lane.e2a(total, stream, memory)
        stream.synchronize(TIMEOUT_S)
        require(held == [0x3F3F], f"the rows that arrived hold {[hex(v) for v in held]}")
    else:
        x = s.array(np.zeros((rows, HIDDEN), np.uint16))
        gate = s.gate(stream)
        s.fill(x, 0x3F, stream)
        lane.a2e(rows, stream, x)
        gate.open()
        lane.e2a(rows, stream, x)
        stream.synchronize(TIMEOUT_S)
    return "it sent what the work before it in the stream had written"


# ---- the four asynchronous operators


def served(s: GroupSession, op: CamAsync, layers: Sequence[int], batch_of: BatchOf) -> list[Item]:
    """One dispatch and combine per layer. Attention queues all of them, waits, and holds each
    result against float64; FFN answers, and returns its items for further questions."""
    stream, t = s.stream(), op.place
    # No FFN rank may take an item of this case for one of the case before it.
    s.collective("HcclBarrier", stream)
    stream.synchronize(TIMEOUT_S)
    if t.is_ffn:
        return op.serve(len(layers) * t.attn_size, stream)
    results = []
    for layer in layers:
        batch = batch_of(s.rank, layer)
        op.dispatch(batch, layer, stream)
        results.append((layer, batch, op.combine(batch, stream)))
    stream.synchronize(TIMEOUT_S)
    for layer, batch, memory in results:
        got = from_bf16(s.read(memory, np.uint16, batch.x.size).reshape(batch.x.shape))
        want, bound = batch.combined(op.quantised)
        worst = float((np.abs(got - want) / bound).max())
        require(worst <= 1, f"layer {layer}: an element is off by {worst:.2f} times the bound")
    return []


def everywhere(s: GroupSession) -> BatchOf:
    """Routed to all experts of the group."""
    return lambda rank, layer: Routed.random(rank, layer, 0, LOCAL * (s.size // 2))


@case(
    "cam_async.weighted_sum",
    "dispatch and combine bring back the sum over k of weight times the expert's row; FFN ranks "
    "send their rows unweighted",
    "CAMAsync adapter",
    ranks=True,
)
def async_weighted_sum(s: GroupSession) -> str:
    served(s, cam_async(s), [0], everywhere(s))
    return "within the roundings of one row per expert and of the sum, against float64"


@case(
    "cam_async.credit",
    "a dispatch may follow as soon as the combine of the one before it is queued behind it: "
    "combine_recv returns the credit, and the next one finds clean flags and statistics",
    "CAMAsync adapter, one dispatch outstanding",
    ranks=True,
)
def async_credit(s: GroupSession) -> str:
    items = served(s, cam_async(s), range(ROUNDS), everywhere(s))
    for rank in sorted({one.info[1] for one in items}):
        seen = [one.info[2] for one in items if one.info[1] == rank and one.info[4] == LOCAL - 1]
        require(seen == list(range(ROUNDS)), f"layers of Attention rank {rank} came as {seen}")
    return f"{ROUNDS} dispatches in a row per Attention rank, in order"


@case(
    "cam_async.item_fields",
    "batch_info holds rows, Attention rank, layer, first and last slot, rows sent to lower FFN "
    "ranks and the rows of each slot; rows lie by expert",
    "CAMAsync adapter, FFN compute",
    ranks=True,
)
def async_item_fields(s: GroupSession) -> str:
    op, layers = cam_async(s), (5, 61, 3)
    items = served(s, op, layers, everywhere(s))
    for item in items:
        check_item(op, item, everywhere(s))
    if op.place.is_ffn:
        seen = sorted((one.info[1], one.info[2]) for one in items if one.info[4] == LOCAL - 1)
        want = sorted((r, layer) for r in range(op.place.attn_size) for layer in layers)
        require(seen == want, f"items of {seen}, wanted {want}")
    return f"{len(layers)} layers of {op.place.attn_size} Attention ranks; {5 + 1 + LOCAL} words"


def check_item(op: CamAsync, item: Item, batch_of: BatchOf) -> None:
    """Words, counts and rows of one item against the batch it names."""
    total, rank, layer, first, last, below, *slots = item.info
    known = 0 <= rank < op.place.attn_size and 0 <= first <= last < LOCAL
    require(known, f"batch_info {item.info}")
    batch = batch_of(rank, layer)
    mine = [batch.arriving(op.first_expert + n) for n in range(LOCAL)]
    counts = [len(rows) for rows in mine]
    require((slots, total) == (counts, sum(counts)), f"batch_info {item.info}, rows are {counts}")
    lower = int((batch.ids < op.first_expert).sum())
    require(below == lower, f"{below} rows below this rank, wanted {lower}")
    here = [n if first <= at <= last else 0 for at, n in enumerate(counts)]
    require(item.counts == here, f"counts {item.counts}, wanted {here}")
    ends = np.cumsum(here)
    for at, rows in enumerate(mine):
        if not here[at]:
            continue
        got = item.rows[ends[at] - here[at] : ends[at]]
        # Which of an expert's rows is first is left open.
        same = sorted(map(bytes, got)) == sorted(map(bytes, batch.x[rows]))
        require(op.quantised or same, f"the rows of slot {at} are not those that were sent to it")


@case(
    "cam_async.empty_experts",
    "experts that get no row have a count of zero and take no room",
    "FFN compute",
    ranks=True,
)
def async_empty_experts(s: GroupSession) -> str:
    def batch_of(rank: int, layer: int) -> Routed:
        # Two experts of each FFN rank in turn; the others of it get nothing.
        first = LOCAL * (layer % (s.size // 2)) + (layer + rank) % (LOCAL - 1)
        return Routed.random(rank, layer, first, first + TOPK)

    op = cam_async(s)
    for item in served(s, op, range(ROUNDS), batch_of):
        check_item(op, item, batch_of)
    return f"{TOPK} experts used in each of {ROUNDS} dispatches"


@case(
    "cam_async.empty_ranks",
    "an FFN rank to which no row was routed gets an item all the same, of zero rows, and combine "
    "waits for its answer",
    "CAMAsync adapter, FFN compute",
    ranks=True,
)
def async_empty_ranks(s: GroupSession) -> str:
    op = cam_async(s)
    if op.place.ffn_size < 2:
        raise NotHere("2 ranks have one FFN rank, which every row goes to; it needs 4 or more")

    def batch_of(rank: int, layer: int) -> Routed:
        first = LOCAL * (layer % op.place.ffn_size)
        return Routed.random(rank, layer, first, first + LOCAL)

    layers = range(2 * op.place.ffn_size)
    items = served(s, op, layers, batch_of)
    for item in items:
        check_item(op, item, batch_of)
    if op.place.is_ffn:
        empty = sum(one.info[0] == 0 for one in items)
        want = 2 * (op.place.ffn_size - 1) * op.place.attn_size
        require(empty == want, f"{empty} items without rows, wanted {want}")
    return f"{op.place.ffn_size - 1} of {op.place.ffn_size} FFN ranks empty in each dispatch"


def with_zero_row(s: GroupSession) -> BatchOf:
    """As `everywhere`, with large, small and zero rows."""

    def batch_of(rank: int, layer: int) -> Routed:
        batch = Routed.random(rank, layer, 0, LOCAL * (s.size // 2), rows=9)
        size = np.float32(4) ** np.arange(-4, 5, dtype=np.float32)
        size[3] = 0
        return Routed(to_bf16(from_bf16(batch.x) * size[:, None]), batch.ids, batch.weights)

    return batch_of


@case(
    "cam_async.quant_scale",
    "with dynamic quantisation a row travels as int8 with one float32 scale, max|x| / 127, and "
    "int8 times scale is the row within half a step; a zero row is zero",
    "CAMAsync adapter, FFN compute",
    ranks=True,
)
def async_quant_scale(s: GroupSession) -> str:
    op, batch_of = cam_async(s, quantised=True), with_zero_row(s)
    for item in served(s, op, range(3), batch_of):
        check_item(op, item, batch_of)
        batch = batch_of(item.info[1], item.info[2])
        require(bool(np.isfinite(item.scales).all()), "a scale is not finite")
        values = item.rows.astype(np.float64) * item.scales[:, None].astype(np.float64)
        ends = np.cumsum(item.counts)
        for slot, count in enumerate(item.counts):
            here = slice(ends[slot] - count, ends[slot])
            if count:
                sent = from_bf16(batch.x[batch.arriving(op.first_expert + slot)])
                check_scales(sent.astype(np.float64), values[here], item.scales[here])
    return "scales of 9 rows over 8 powers of 4, one of them zero; sums within half a step"


def check_scales(sent: Array, values: Array, scales: Array) -> None:
    """Every row that was sent has one that arrived, whose scale and values fit it."""
    for row in sent:
        want = float(np.abs(row).max() / 127)
        off = np.abs(values - row).max(axis=1)
        at = int(off.argmin())
        error = abs(float(scales[at]) - want)
        require(error <= 1e-6 * want, f"scale {scales[at]}, wanted {want}")
        require(off[at] <= 0.501 * want, f"a row is off by {off[at]:.3g}, its scale is {want:.3g}")


@case(
    "cam_async.stop",
    "a stop buffer that is set ends a receive with an item of Attention rank -1, and combine_send "
    "of that item sends nothing",
    "shutdown of the FFN loop",
    ranks=True,
)
def async_stop(s: GroupSession) -> str:
    op = cam_async(s, quantised=True)
    if op.place.is_ffn:
        stream = s.stream()
        item = op.receive(stream, stop=True)
        op.answer(item, stream)
        require(item.info[1] == -1, f"batch_info {item.info}")
    # Work goes on behind it: nothing was sent that a combine could take for its own.
    served(s, op, [1, 2], with_zero_row(s))
    return "an item of rank -1; the dispatches behind it came back whole"
