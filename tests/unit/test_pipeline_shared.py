# SPDX-License-Identifier: Apache-2.0
"""The older operator set through the adapter: a receive brings rows of the shared expert too, and
either kind may be missing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from support.mock_stream import Kernel, MockNpu, World
from support.pipeline import MockAsync, PlusOne
from xmoe.kernels.ops.cam.protocols import DispatchItem
from xmoe.multistream import RecvGate, StreamMode
from xmoe.pipeline.adapters.base import StepPlan
from xmoe.pipeline.adapters.camasync import AFDAsyncTransferState, slot_bytes
from xmoe.pipeline.adapters.camasync_ffn import CamAsyncFfnAdapter
from xmoe.pipeline.executor import StreamExecutor
from xmoe.pipeline.options import ExecutorOptions

CAPACITY = 8
SHARED = 20  # what shared rows hold; routed ones hold the layer + 1


class SharedAsync(MockAsync):
    """Slot 0 is the shared expert, slots 1 and 2 the routed ones. `counts`: (routed, shared) rows
    of each layer's dispatch. In two parts, the first one ends with slot 1."""

    shared_expert = True

    def __init__(self, device: MockNpu, counts: list[tuple[int, int]], parts: int, quant: bool):
        super().__init__(device, 1, len(counts), chunks=parts, dynamic_quant=quant)
        self.counts = counts
        self.given: list[tuple[Tensor, Tensor]] = []

    def empty_item(self, capacity: int | None = None) -> DispatchItem:
        t, rows = self.topology, capacity or CAPACITY
        dtype = torch.int8 if t.dynamic_quant else torch.bfloat16
        scales = rows if t.dynamic_quant else 1

        def made() -> tuple[Tensor, Tensor]:
            return torch.zeros(rows, t.hidden, dtype=dtype), torch.ones(scales)

        (routed, s), (shared, shared_s) = made(), made()
        info = torch.zeros(t.info_length(True), dtype=torch.int64)
        counts, count = torch.zeros(self.experts, dtype=torch.int64), torch.zeros(1).long()
        return DispatchItem(routed, s, info, counts, shared, shared_s, count)

    def dispatch_recv(self, group, *, stream, out=None, stop=None) -> DispatchItem:
        assert out is not None

        def take() -> None:
            layer = self.flag[0]
            routed, shared = self.counts[layer]
            first, last = (0, 2) if self.chunks == 1 else ((0, 1), (2, 2))[self.part]
            self.part = (self.part + 1) % self.chunks
            if self.part == 0:
                self.flag[0] = -1
            whole = torch.tensor([shared, 0, routed])  # all routed rows are the last expert's
            out.batch_info[:6] = torch.tensor([routed + shared, 0, layer, first, last, 0])
            out.batch_info[6:] = whole
            out.tokens_per_expert[:] = whole[1:]
            out.hidden_states.fill_(layer + 1)
            out.shared_hidden_states.fill_(SHARED)
            out.shared_count[0] = shared if first == 0 else 0

        ready = lambda: self.flag[0] >= 0  # noqa: E731
        self.device.launch(stream, Kernel("recv", 48, ready=ready, finish=take))
        return out

    def combine_send(self, group, expert_out, batch_info, *, stream, shared_out=None) -> None:
        assert expert_out.dtype == shared_out.dtype == torch.bfloat16

        def finish() -> None:
            self.given.append((expert_out.float().clone(), shared_out.float().clone()))
            if batch_info[4] == 2:
                self.status[0] += 1
                self.answers.append((0, int(batch_info[2])))

        self.device.launch(stream, Kernel("send", 8, finish=finish))


CASES = [(2, 2), (2, 0), (0, 2), (0, 0)]


def served(parts: int, quant: bool):
    device = MockNpu(World(3))
    ops = SharedAsync(device, CASES, parts, quant)
    adapter = CamAsyncFfnAdapter(
        ops, "afd", gate=RecvGate.READY_PROBE, probe=ops, capacity=CAPACITY
    )
    model, found, finished = PlusOne(device, ops), [], []
    options = ExecutorOptions(StreamMode.OVERLAP, 2, timeout_s=0.5)
    with StreamExecutor(device, options, channels=adapter.channels()) as executor:
        for item in adapter.items(StepPlan(4, (2,), dispatches=4), model):
            ticket = executor.submit(item)
            finished.append(adapter.finished)
            found.append(dict(ticket.result())["state"])
    assert ops.answers == [(0, layer) for layer in range(4)] and adapter.leftovers() == ()
    return ops, adapter, found, finished


def rows(value: float, count: int) -> list[list[float]]:
    """`count` rows of a value, or the one zero row that stands for none."""
    return [[value] * 4] * count if count else [[0.0] * 4]


@pytest.mark.parametrize("quant", [False, True])
def test_routed_and_shared_rows_come_and_go_each_by_its_own_count(quant: bool) -> None:
    ops, _, states, finished = served(1, quant)
    assert finished == [1, 2, 3, 4]  # a dispatch ends with the last routed slot
    for layer, (routed, shared) in enumerate(CASES):
        got, got_shared = (one.tolist() for one in ops.given[layer])
        assert got == rows(layer + 2, routed) and got_shared == rows(SHARED + 1, shared)
        state: AFDAsyncTransferState = states[layer]
        assert state.batch_size == max(1, routed + shared) and state.layer_idx == layer
        assert state.expand_x_shared.shape == (shared, 4)
        scales = (state.dynamic_scales, state.dynamic_scales_shared)
        sizes = tuple(None if one is None else len(one) for one in scales)
        assert sizes == ((routed, shared) if quant else (None, None))


def test_the_model_computes_nothing_where_nothing_came() -> None:
    device = MockNpu(World(3))
    ops = SharedAsync(device, CASES, 1, False)
    adapter = CamAsyncFfnAdapter(
        ops, "afd", gate=RecvGate.READY_PROBE, probe=ops, capacity=CAPACITY
    )
    model, seen = PlusOne(device, ops), []
    compute = model.compute

    def noted(item, out, stream) -> None:
        seen.append(
            (item.layer, "shared" if item.shared else "routed", item.hidden_states.shape[0])
        )
        compute(item, out, stream)

    model.compute = noted
    options = ExecutorOptions(StreamMode.OVERLAP, 2, timeout_s=0.5)
    with StreamExecutor(device, options, channels=adapter.channels()) as executor:
        for item in adapter.items(StepPlan(4, (2,), dispatches=4), model):
            executor.submit(item)
    assert seen == [(0, "routed", 2), (0, "shared", 2), (1, "routed", 2), (2, "shared", 2)]


def test_a_dispatch_in_two_parts_ends_with_its_last_routed_slot() -> None:
    """Slots 0 and 1 first, with the shared rows; slot 2 then: the older set has one slot more."""
    ops, adapter, _, finished = served(2, False)
    assert finished == [0, 1, 1, 2, 2, 3, 3, 4]
    heads = [(head.num_tokens, head.shared_tokens) for head in adapter.heads]
    assert heads == [(0, 2), (2, 0), (0, 0), (2, 0), (0, 2), (0, 0), (0, 0), (0, 0)]
    assert len(ops.given) == 8


@pytest.mark.parametrize("quant", [False, True])
def test_a_slot_holds_what_the_budget_counts(quant: bool) -> None:
    ops, adapter, _, _ = served(1, quant)
    for buffers in adapter._slots.values():
        item = buffers.item
        held = [
            item.hidden_states, item.scales, item.batch_info, item.tokens_per_expert,
            item.shared_hidden_states, item.shared_scales, item.shared_count,
            buffers.computed, buffers.shared, buffers.empty,
        ]  # fmt: skip
        want = sum(one.nbytes for one in held)
        assert slot_bytes(ops.topology, capacity=CAPACITY, shared_expert=True) == want
