# SPDX-License-Identifier: Apache-2.0
"""Adapters, loops and executor under random device schedules; every guard is removed once.

What is watched is in `support.pipeline`: a buffer that is received into before its item was sent, a
group with two kernels at once, an answer with another item's rows, more than one unanswered
dispatch, and whether everything ends.
"""

from __future__ import annotations

import gc
import sys

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.mock_stream import Kernel, MockEvent, MockNpu, MockStream, World
from support.pipeline import (
    MockAsync,
    MockAttention,
    MockAttentionOps,
    MockCopy,
    MockP2P,
    PlusOne,
    item_of,
)
from xmoe.errors import FenceTimeout, PipelineStopped, XmoeError
from xmoe.kernels.device import InlineDevice
from xmoe.kernels.ops.cam.topology import CamAsyncTopology, CamP2PTopology
from xmoe.multistream import (
    HostFence,
    MetadataRead,
    MultistreamConfig,
    PipelineShape,
    RecvGate,
    StreamMode,
)
from xmoe.pipeline.adapters.base import StepPlan
from xmoe.pipeline.adapters.camasync_attention import CamAsyncAttentionAdapter
from xmoe.pipeline.adapters.camasync_ffn import CamAsyncFfnAdapter
from xmoe.pipeline.adapters.camp2p import CamP2PAttentionAdapter, CamP2PFfnAdapter
from xmoe.pipeline.attention import AttentionLoop
from xmoe.pipeline.channels import ChannelRule
from xmoe.pipeline.executor import StreamExecutor
from xmoe.pipeline.ffn import FfnLoop
from xmoe.pipeline.items import Phase, PhaseKind, WorkItem
from xmoe.pipeline.options import ExecutorOptions

R, C, S = PhaseKind.RECV, PhaseKind.COMPUTE, PhaseKind.SEND
MODES = st.sampled_from([StreamMode.SERIAL, StreamMode.OVERLAP])
FENCES = st.sampled_from(list(HostFence))
many = settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
GROUPS = ("g0", "g1")


def p2p_loop(seed, layers, mode, slots, fence=HostFence.STEP, timeout_s=0.05):
    device = MockNpu(World(seed))
    ops = MockP2P(device, GROUPS, layers)
    model = PlusOne(device, ops)
    adapter = CamP2PFfnAdapter(ops, GROUPS, 2)
    config = MultistreamConfig(
        mode=mode, max_inflight=slots, fence=fence, wait_timeout_s=timeout_s,
        shutdown_timeout_s=0.01, trace=True,
    )  # fmt: skip
    shape = PipelineShape(1, 1, layers, stages=2, channels=GROUPS)
    return FfnLoop(device, adapter, model, config, shape), ops, model


def async_loop(
    seed, groups, layers, mode, slots, chunks=1, gate=True, timeout_s=0.05,
    read=MetadataRead.BLOCKING,
):  # fmt: skip
    device = MockNpu(World(seed))
    ops = MockAsync(device, groups, layers, chunks=chunks)
    model = PlusOne(device, ops)
    overlap = mode is StreamMode.OVERLAP and gate
    kind = RecvGate.READY_PROBE if overlap else RecvGate.NONE
    adapter = CamAsyncFfnAdapter(
        ops, "afd", gate=kind, probe=ops, capacity=8, metadata_read=read,
        host_copy=lambda: MockCopy(device),
    )  # fmt: skip
    config = MultistreamConfig(
        mode=mode, max_inflight=slots, recv_gate=RecvGate.READY_PROBE, wait_timeout_s=timeout_s,
        shutdown_timeout_s=0.01, memory_budget_bytes=1 << 20, metadata_read=read,
    )  # fmt: skip
    shape = PipelineShape(groups, 1, layers, attention_groups=groups, slot_bytes=64)
    return FfnLoop(device, adapter, model, config, shape), ops, model


@many
@given(st.integers(0, 10**6), st.integers(1, 6), MODES, st.integers(1, 4), FENCES)
def test_camp2p_keeps_its_rules(seed, layers, mode, slots, fence):
    loop, ops, model = p2p_loop(seed, layers, mode, slots, fence)
    loop.run_step(StepPlan(layers, (2, 2)))
    loop.close()
    assert ops.world.problems == []
    assert ops.answered == {"g0": layers, "g1": layers}
    assert model.layers == [layer for layer in range(layers) for _ in GROUPS]
    assert loop.executor.leaks() == () and ops.memory.owner == {}


@many
@given(
    st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 5), MODES, st.integers(1, 4),
    st.sampled_from([1, 2]), st.sampled_from(list(MetadataRead)),
)  # fmt: skip
def test_camasync_keeps_its_rules(seed, groups, layers, mode, slots, chunks, read):
    if read is MetadataRead.DEVICE:
        chunks = 1  # the adapter refuses receives that may come in parts
    loop, ops, _ = async_loop(seed, groups, layers, mode, slots, chunks, read=read)
    loop.run_step(StepPlan(layers, (2,), dispatches=groups * layers))
    loop.close()
    assert ops.world.problems == []
    assert sorted(ops.answers) == [(g, n) for g in range(groups) for n in range(layers)]
    for g in range(groups):  # and each group's in order
        assert [n for who, n in ops.answers if who == g] == list(range(layers))
    assert loop.executor.leaks() == () and ops.memory.owner == {}


@many
@given(st.integers(0, 10**6), st.integers(1, 5), MODES, st.sampled_from([1, 2]), st.booleans())
def test_attention_never_has_two_unanswered_dispatches(seed, layers, mode, stages, p2p):
    device = MockNpu(World(seed))
    if p2p:
        ops = MockAttentionOps(device, CamP2PTopology(1, 1, 1, hidden=4))
        stages, names = 2, GROUPS
        adapter = CamP2PAttentionAdapter(ops, GROUPS)
    else:
        ops = MockAttentionOps(device, CamAsyncTopology(1, 1, 0, 4, 1, 2, max_seq_len=8))
        names = ("afd",)
        adapter = CamAsyncAttentionAdapter(ops, "afd", stages=stages, probe=object())
    overlap_both = mode is StreamMode.OVERLAP and stages == 2
    config = MultistreamConfig(
        mode=mode if overlap_both else StreamMode.SERIAL,
        roles=frozenset({"ffn", "attention"}),
        recv_gate=RecvGate.NONE if p2p else RecvGate.READY_PROBE,
        wait_timeout_s=0.05,
    )
    shape = PipelineShape(1, 1, layers, stages=stages, channels=names)
    loop = AttentionLoop(device, adapter, MockAttention(device, None if p2p else 1), config, shape)
    batches = [torch.zeros(2, 4, dtype=torch.bfloat16) for _ in range(stages)]
    outputs = loop.run_step(StepPlan(layers, (2,) * stages), batches)
    loop.close()
    assert len(outputs) == stages and device.world.problems == []
    names = device.launches()
    if not p2p and stages == 2 and layers > 1:
        assert names[:8] == ["A0.0", "S.0", "A1.0", "R", "S.0", "A0.1", "R", "S.1"]
    assert set(ops.outstanding.values()) == {0}


@many
@given(st.integers(0, 10**6), MODES, st.integers(1, 4), st.integers(0, 400), st.booleans())
def test_shutdown_at_any_point_terminates(seed, mode, slots, after, p2p):
    """Peers die after some actions; the loop is told to stop. It ends, whatever was under way."""
    if p2p:
        loop, ops, _ = p2p_loop(seed, 4, mode, slots, timeout_s=0.02)
        plan = StepPlan(4, (2, 2))
    else:
        loop, ops, _ = async_loop(seed, 2, 4, mode, slots, timeout_s=0.02)
        plan = StepPlan(4, (2,), dispatches=8)
    counted = 0
    step = ops.world.step

    def count() -> bool:
        nonlocal counted
        counted += 1
        if counted >= after:
            ops.alive = False
            loop.stop()
        return step()

    ops.world.step = count
    try:
        loop.run_step(plan)
    except (PipelineStopped, FenceTimeout):
        pass
    try:
        loop.executor.close()
    except XmoeError:
        pass
    loop.executor.close()
    assert ops.world.problems == []
    if loop.executor.failed is None:
        assert loop.executor.leaks() == ()


# ---- the guards are what keeps the rules -----------------------------------------------------


def runs(make, count: int = 40) -> list[str]:
    """Violations and failures over many seeds."""
    found = []
    for seed in range(count):
        loop, ops, plan = make(seed)
        try:
            loop.run_step(plan)
            loop.close()
        except XmoeError as error:
            found.append(f"{type(error).__name__}: {error}")
            loop.executor.close()
        ops.world.until(lambda: False)  # what nobody waited for happens as well
        found += ops.world.problems
    return found


def p2p_case(seed):
    loop, ops, _ = p2p_loop(seed, 4, StreamMode.OVERLAP, 4)
    return loop, ops, StepPlan(4, (2, 2))


def async_case(seed, gate=True):
    loop, ops, _ = async_loop(seed, 3, 3, StreamMode.OVERLAP, 2, gate=gate)
    return loop, ops, StepPlan(3, (2,), dispatches=9)


def test_with_all_guards_nothing_is_found():
    assert runs(p2p_case, 20) == [] and runs(async_case, 20) == []


def test_without_exclusive_channels_two_kernels_of_a_group_run_at_once(monkeypatch):
    def rules(self):
        return tuple(ChannelRule(group) for group in GROUPS)

    monkeypatch.setattr(CamP2PFfnAdapter, "channels", rules)
    assert any("runs beside" in text for text in runs(p2p_case))


def test_without_data_edges_a_phase_reads_too_early(monkeypatch):
    monkeypatch.setattr(MockStream, "wait_event", lambda self, event: None)
    found = runs(p2p_case)
    assert any("carries" in text for text in found) and any("sent" in text for text in found)


def test_without_observed_sends_a_buffer_is_received_into_again(monkeypatch):
    """The slot comes back when its item was issued, and nobody waits for its send."""
    monkeypatch.setattr(MockEvent, "synchronize", lambda self, timeout_s: None)
    monkeypatch.setattr(MockStream, "wait_event", lambda self, event: None)

    def rules(self):
        return tuple(ChannelRule(group) for group in GROUPS)

    monkeypatch.setattr(CamP2PFfnAdapter, "channels", rules)

    def case(seed):
        loop, ops, _ = p2p_loop(seed, 4, StreamMode.OVERLAP, 1)
        return loop, ops, StepPlan(4, (2, 2))

    assert any("overwrites" in text for text in runs(case))


def test_without_the_gate_receive_starves_compute():
    """All cores: a receive that waits keeps compute and send from running, which it waits for."""
    device = MockNpu(World(1))
    ops = MockAsync(device, 1, 3)
    adapter = CamAsyncFfnAdapter(ops, "afd", probe=ops, capacity=8)
    found = []
    for seed in range(20):
        device = MockNpu(World(seed))
        ops = MockAsync(device, 1, 3)
        adapter = CamAsyncFfnAdapter(ops, "afd", probe=ops, capacity=8)
        options = ExecutorOptions(StreamMode.OVERLAP, 2, timeout_s=0.01, shutdown_timeout_s=0.01)
        executor = StreamExecutor(device, options, channels=adapter.channels())
        model = PlusOne(device, ops)
        try:
            for _ in range(3):
                executor.submit(adapter.item(model))
        except FenceTimeout as error:
            found.append(str(error))
        if executor.failed is None:
            executor.drain()
        executor.close()
    assert found and all("phase recv" in text for text in found)


def test_without_the_credit_rule_attention_dispatches_twice(monkeypatch):
    def rules(self):
        return (ChannelRule("afd"),)

    def outstanding() -> list[str]:
        device = MockNpu(World(5))
        ops = MockAttentionOps(device, CamAsyncTopology(1, 1, 0, 4, 1, 2, max_seq_len=8))
        adapter = CamAsyncAttentionAdapter(ops, "afd", stages=2, probe=object())
        adapter.interleaves = False  # the order of issue that ignores the shared credit
        config = MultistreamConfig(mode=StreamMode.SERIAL, wait_timeout_s=0.05)
        shape = PipelineShape(1, 1, 3, stages=2, channels=("afd",))
        loop = AttentionLoop(device, adapter, MockAttention(device, 1), config, shape)
        batches = [torch.zeros(2, 4, dtype=torch.bfloat16) for _ in range(2)]
        try:
            loop.run_step(StepPlan(3, (2, 2)), batches)
        except XmoeError as error:
            device.world.problems.append(str(error))
        loop.executor.close()
        return device.world.problems

    monkeypatch.setattr(CamAsyncAttentionAdapter, "interleaves", False)
    assert any("1 unanswered at most" in text for text in outstanding())  # refused at issue
    monkeypatch.setattr(CamAsyncAttentionAdapter, "channels", rules)
    assert any("2 unanswered in afd" in text for text in outstanding())  # happens on the device


def test_without_generations_a_wait_would_be_dropped():
    """The device says nothing: the wait is gone and the query says done."""
    device = MockNpu()
    stream = device.create_stream()
    event = device.create_event()
    stream.wait_event(event)
    assert device.dropped_waits == 1
    executor = StreamExecutor(device, ExecutorOptions(StreamMode.OVERLAP, 2))
    ticket = executor.begin(item_of(device, "i", R, C))
    executor.issue(ticket)
    (_, lease) = ticket.recorded[0]
    lease.stream = None  # as if its recording had been lost
    with pytest.raises(XmoeError, match="waited for while it is not recorded"):
        executor.issue(ticket)
    assert device.dropped_waits == 1


# ---- lifetime, soak ---------------------------------------------------------------------------


class Poisoned:
    """Released memory: a kernel that still uses it says so."""

    def __init__(self) -> None:
        self.freed = False

    def close(self) -> None:
        self.freed = True


@many
@given(st.integers(0, 10**6), MODES, st.integers(1, 4), st.integers(1, 12))
def test_memory_is_not_released_under_a_kernel(seed, mode, slots, count):
    world = World(seed)
    device = MockNpu(world)

    def phases(memory: Poisoned) -> tuple[Phase, ...]:
        def run(context) -> None:
            context.own(memory)

            def use() -> None:
                if memory.freed:
                    world.violation("used after it was released")

            device.launch(context.stream.handle(), Kernel("k", 8, use, finish=use))

        return tuple(Phase(kind, "c", run) for kind in (R, C, S))

    options = ExecutorOptions(mode, slots, timeout_s=0.05)
    held = [Poisoned() for _ in range(count)]
    with StreamExecutor(device, options) as executor:
        for memory in held:
            executor.submit(WorkItem("i", 0, phases(memory)))
    assert world.problems == [] and all(memory.freed for memory in held)


@pytest.mark.parametrize("kind", ["mock", "inline"])
def test_ten_thousand_items_in_flat_memory(kind):
    device = MockNpu() if kind == "mock" else InlineDevice()
    options = ExecutorOptions(StreamMode.OVERLAP, 4, timeout_s=1.0)
    executor = StreamExecutor(device, options)
    phases = tuple(Phase(k, "c", lambda context: context.keep(bytearray(64))) for k in (R, C, S))
    sizes = []
    with executor.session():
        for n in range(10_000):
            executor.submit(WorkItem("i", n, phases))
            if kind == "mock":
                device.log.clear()
            if n in (2_000, 9_999):
                executor.drain()
                gc.collect()
                sizes.append((sys.getallocatedblocks(), len(gc.get_objects())))
    assert all(after - before < 100 for before, after in zip(*sizes, strict=True)), sizes
    if kind == "mock":
        assert len(device.events) <= 12 and device.device_syncs == 0
    executor.close()
    assert executor.leaks() == ()
