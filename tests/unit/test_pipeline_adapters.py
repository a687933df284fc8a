# SPDX-License-Identifier: Apache-2.0
"""What the adapters do by themselves: groups, transfer states, FIFO, chunks, empty items, abort."""

from __future__ import annotations

import pytest
import torch

from support.mock_stream import MockNpu, World
from support.pipeline import (
    MockAsync,
    MockAttention,
    MockAttentionOps,
    MockCopy,
    MockP2P,
    PlusOne,
)
from xmoe.errors import CommError, ConfigError, PeerLost, XmoeError
from xmoe.kernels.ops.cam.protocols import DispatchItem
from xmoe.kernels.ops.cam.topology import CamAsyncTopology, CamP2PTopology
from xmoe.multistream import (
    MetadataRead,
    MultistreamConfig,
    PipelineShape,
    RecvGate,
    StreamMode,
)
from xmoe.pipeline.adapters.base import UNKNOWN_LAYER, AttentionOutput, StepPlan
from xmoe.pipeline.adapters.camasync import AFDAsyncTransferState
from xmoe.pipeline.adapters.camasync_attention import CamAsyncAttentionAdapter
from xmoe.pipeline.adapters.camasync_ffn import CamAsyncFfnAdapter, ItemHead
from xmoe.pipeline.adapters.camp2p import (
    CamP2PAttentionAdapter,
    CamP2PFfnAdapter,
    CAMP2PTransferState,
)
from xmoe.pipeline.attention import AttentionLoop
from xmoe.pipeline.executor import StreamExecutor
from xmoe.pipeline.ffn import FfnLoop
from xmoe.pipeline.options import ExecutorOptions

GROUPS = ("g0", "g1")


class Aborter:
    def __init__(self, broken: bool = False) -> None:
        self.calls: list[tuple[str, int]] = []
        self.broken = broken

    def abort(self, group: str, reason: int = 1) -> None:
        self.calls.append((group, reason))
        if self.broken:
            raise CommError(f"{group} is unknown")


def p2p_ffn(ratio: int = 1, **kw):
    device = MockNpu(World(2))
    ops = MockP2P(device, GROUPS, 4, CamP2PTopology(1, ratio, 0, hidden=4, topk=2))
    return device, ops, CamP2PFfnAdapter(ops, GROUPS, 8, **kw)


P2P_ATTENTION = CamP2PTopology(1, 1, 1, hidden=4)
ASYNC_ATTENTION = CamAsyncTopology(1, 1, 0, 4, 1, 2, max_seq_len=8)


def test_a_stage_has_its_own_group_or_none():
    _, _, adapter = p2p_ffn()
    assert [adapter.group_of(stage) for stage in (0, 1)] == ["g0", "g1"]
    for stage in (-1, 2, 7):
        with pytest.raises(ConfigError, match=f"stage {stage}; allowed: 0 to 1"):
            adapter.group_of(stage)
    for groups in ((), ("a", "a"), ("a", "")):
        with pytest.raises(ConfigError, match="a distinct name for each stage"):
            CamP2PFfnAdapter(adapter._ops, groups, 8)


def test_rows_that_cannot_be_split_evenly_are_refused():
    device, _, adapter = p2p_ffn(ratio=2)
    model = PlusOne(device, adapter._ops)
    for rows in (0, 3, 10):
        with pytest.raises(ConfigError, match="multiple of 2 up to 8"):
            adapter.item(0, 0, rows, model)
    assert [item.stage for item in adapter.items(StepPlan(1, (2, 3)), model)] == [0, 1]


def test_adapters_are_for_one_role():
    device, ops, adapter = p2p_ffn()
    with pytest.raises(ConfigError, match="FFN ranks come first"):
        CamP2PAttentionAdapter(ops, GROUPS)
    with pytest.raises(ConfigError, match="Attention ranks come first"):
        CamAsyncFfnAdapter(MockAsync(device, 1, 1, rank=0), "afd")


def test_the_p2p_state_lives_from_receive_to_send():
    device, ops, adapter = p2p_ffn()
    options = ExecutorOptions(StreamMode.OVERLAP, 2, timeout_s=0.05)
    with StreamExecutor(device, options, channels=adapter.channels()) as executor:
        values = executor.submit(adapter.item(0, 1, 2, PlusOne(device, ops))).result()
    state = values["state"]
    assert isinstance(state, CAMP2PTransferState)
    assert (state.aiv_num, state.batch_size, state.h, state.k) == (8, 2, 4, 2)
    assert state.cam_p2p_ep_name == "g1" and state.atten_batch_size is not None


def test_buffers_belong_to_slots_and_are_used_again():
    device, ops, adapter = p2p_ffn()
    options = ExecutorOptions(StreamMode.OVERLAP, 2, timeout_s=0.05)
    with StreamExecutor(device, options, channels=adapter.channels()) as executor:
        for layer in range(4):
            for stage in (0, 1):
                executor.submit(adapter.item(layer, stage, 2, PlusOne(device, ops)))
    assert sorted(adapter._slots) == [0, 1] and ops.world.problems == []


def test_attention_pairs_every_e2a_with_its_a2e():
    device = MockNpu()
    ops = MockAttentionOps(device, P2P_ATTENTION)
    adapter = CamP2PAttentionAdapter(ops, GROUPS)
    executor = StreamExecutor(device, ExecutorOptions(timeout_s=0.05))
    plan, rows = StepPlan(3, (2, 2)), torch.zeros(2, 4, dtype=torch.bfloat16)
    model = MockAttention(device)
    executor.submit(adapter.item(plan, 0, 0, rows, model))
    assert adapter.leftovers() == ("stage 0: layer 0",)
    with pytest.raises(CommError, match="e2a of layer 1, but layer 0 was sent"):
        executor.submit(adapter.item(plan, 2, 0, rows, model))
    executor.close()


# ---- CAMAsync ---------------------------------------------------------------------------------


def attention_side(stages: int = 1):
    device = MockNpu()
    ops = MockAttentionOps(device, ASYNC_ATTENTION, limit=9)
    adapter = CamAsyncAttentionAdapter(ops, "afd", stages=stages)
    return device, ops, adapter, StreamExecutor(device, ExecutorOptions(timeout_s=0.05))


def test_a_dispatch_that_fails_leaves_no_entry_behind():
    """Reserve, launch, commit: otherwise every later combine would take the one before its own."""
    device, ops, adapter, executor = attention_side()
    plan, rows = StepPlan(3, (2,)), torch.zeros(2, 4, dtype=torch.bfloat16)
    model = MockAttention(device, 1)
    ops.fail_next = True
    with pytest.raises(RuntimeError, match="launch refused"):
        executor.submit(adapter.item(plan, 0, 0, rows, model))
    executor.close()
    assert adapter.leftovers() == ()
    again = StreamExecutor(device, ExecutorOptions(timeout_s=0.05))
    again.submit(adapter.item(plan, 0, 0, rows, model))
    assert adapter.leftovers() == ("stage 0: layer 0",)
    ops.fail_next = True  # a combine that fails keeps its entry: it was not answered
    with pytest.raises(RuntimeError):
        again.submit(adapter.item(plan, 1, 0, rows, model))
    assert adapter.leftovers() == ("stage 0: layer 0",)
    again.close()


def test_a_combine_takes_the_dispatch_of_its_own_layer():
    device, _, adapter, executor = attention_side()
    plan, rows = StepPlan(3, (2,)), torch.zeros(2, 4, dtype=torch.bfloat16)
    model = MockAttention(device, 1)
    executor.submit(adapter.item(plan, 0, 0, rows, model))
    with pytest.raises(CommError, match="combine of layer 1, but layer 0 is pending"):
        executor.submit(adapter.item(plan, 2, 0, rows, model))
    executor.close()
    with pytest.raises(ConfigError, match="stage 1; allowed: 0 to 0"):
        adapter.item(plan, 0, 1, rows, model)


def test_attention_without_routing_is_refused():
    device, _, adapter, executor = attention_side()
    plan, rows = StepPlan(1, (2,)), torch.zeros(2, 4, dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match="gave no topk_ids"):
        executor.submit(adapter.item(plan, 0, 0, rows, MockAttention(device, None)))
    executor.close()


class QuantAsync(MockAsync):
    """int8 rows with a scale each."""

    def empty_item(self, topology, capacity=None) -> DispatchItem:
        item = super().empty_item(capacity)
        item.hidden_states = item.hidden_states.to(torch.int8)
        return item


def served(quant: bool, read: MetadataRead):
    """Six dispatches through three streams; rows of group 0: 0, 1, 2 in turn."""
    device = MockNpu(World(4))
    ops = (QuantAsync if quant else MockAsync)(device, 1, 6, dynamic_quant=quant)
    adapter = CamAsyncFfnAdapter(
        ops, "afd", gate=RecvGate.READY_PROBE, probe=ops, capacity=8, metadata_read=read,
        host_copy=lambda: MockCopy(device),
    )  # fmt: skip
    model = PlusOne(device, ops)
    found = []
    options = ExecutorOptions(StreamMode.OVERLAP, 2, timeout_s=0.05)
    with StreamExecutor(device, options, channels=adapter.channels()) as executor:
        for item in adapter.items(StepPlan(6, (2,), dispatches=6), model):
            found.append(dict(executor.submit(item).result()))
    assert ops.world.problems == [] and ops.answers == [(0, layer) for layer in range(6)]
    assert adapter.finished == 6 and adapter.leftovers() == ()
    return adapter, model, found


@pytest.mark.parametrize("read", [MetadataRead.BLOCKING, MetadataRead.PINNED_ASYNC])
@pytest.mark.parametrize("quant", [False, True])
def test_items_without_rows_are_answered_with_a_row_of_the_model_type(quant, read):
    """int8 is refused by combine_send (and by its mock)."""
    adapter, model, found = served(quant, read)
    states = [values["state"] for values in found]
    assert model.layers == [1, 2, 4, 5]  # nothing was computed where nothing came
    assert all(isinstance(state, AFDAsyncTransferState) for state in states)
    assert [state.layer_idx for state in states] == list(range(6))
    scales = [None if s.dynamic_scales is None else len(s.dynamic_scales) for s in states]
    assert scales == ([0, 1, 2, 0, 1, 2] if quant else [None] * 6)
    assert adapter.metadata_reads == 6


def test_metadata_that_stays_on_the_device_is_not_read():
    adapter, model, found = served(True, MetadataRead.DEVICE)
    assert adapter.metadata_reads == 0 and found == [{}] * 6
    assert model.layers == [UNKNOWN_LAYER] * 6  # every item, also one without rows
    given = model.items[0]
    assert given.batch_info is not None and given.tokens_per_expert is not None
    assert given.hidden_states.shape[0] == 8 and given.scales is not None


def test_metadata_reads_that_cannot_work_are_refused():
    device = MockNpu(World(4))
    ops = MockAsync(device, 1, 1)
    with pytest.raises(ConfigError, match="up to 8 rows of a dispatch do not fit a receive of 7"):
        CamAsyncFfnAdapter(ops, "afd", capacity=7, metadata_read=MetadataRead.DEVICE)
    with pytest.raises(ConfigError, match="no pinned memory was given"):
        CamAsyncFfnAdapter(ops, "afd", capacity=8, metadata_read=MetadataRead.PINNED_ASYNC)
    adapter = CamAsyncFfnAdapter(ops, "afd", capacity=7, probe=ops)
    shape = PipelineShape(1, 1, 1)
    settings = {"mode": StreamMode.SERIAL, "metadata_read": MetadataRead.DEVICE}
    config = MultistreamConfig(**settings)
    (problem,) = config.problems(adapter.capabilities, shape)
    assert "readable here: blocking" in problem and "which part is the last" in problem
    _, _, p2p = p2p_ffn()
    (problem,) = config.problems(p2p.capabilities, shape)
    assert "shapes are known in advance" in problem
    adapter = CamAsyncFfnAdapter(ops, "afd", capacity=8)
    model = PlusOne(device, ops)
    model.device_metadata = False
    with pytest.raises(ConfigError, match="PlusOne, which wants layer and rows from the host"):
        FfnLoop(device, adapter, model, config, shape)
    assert device.streams == []


def test_the_head_counts_the_rows_of_its_own_experts():
    """Two TP ranks, three experts: counts of the whole dispatch lie behind five words and two
    prefixes."""
    t = CamAsyncTopology(2, 1, 2, 4, 1, 3, max_seq_len=8, tp_size=2)
    info = [21, 0, 7, 1, 2, 100, 200, 1, 2, 3, 4, 5, 6]
    assert ItemHead.of(info, t, False) == ItemHead(0, 7, 1, 2, 2 + 3 + 5 + 6)
    shared = [28, 0, 7, 0, 1, 100, 200, 1, 2, 3, 4, 5, 6, 7, 8]  # slot 0 is the shared expert
    assert ItemHead.of(shared, t, True) == ItemHead(0, 7, 0, 1, 2 + 6, 1 + 5)
    assert ItemHead.of([1, -1, 9, *[0] * 10], t, False) == ItemHead(-1, 9, 0, 0, 0)


class Stop:
    """A stop buffer that brings the shutdown item."""

    def __init__(self, ops: MockAsync) -> None:
        self.ops = ops
        self.tensor = torch.zeros(16, dtype=torch.bfloat16)

    def write(self, stream: int) -> None:
        self.ops.stop = True


def test_with_a_gate_no_receive_waits_so_the_stop_buffer_is_left_alone():
    """It would take the place of a dispatch that is already there."""
    device = MockNpu(World(4))
    ops = MockAsync(device, 1, 1, dynamic_quant=True)
    gated = CamAsyncFfnAdapter(
        ops, "afd", gate=RecvGate.READY_PROBE, probe=ops, capacity=8, stop=Stop(ops)
    )
    assert gated.stop(0) is False and ops.stop is False
    assert CamAsyncFfnAdapter(ops, "afd", capacity=8).stop(0) is False
    assert CamAsyncFfnAdapter(ops, "afd", capacity=8, stop=Stop(ops)).stop(0) is True and ops.stop


@pytest.mark.parametrize("read", list(MetadataRead))
def test_a_stop_buffer_ends_a_receive_that_waits(read):
    """The peer never sends: the receive holds all cores until the buffer is written."""
    device = MockNpu(World(4))
    ops = MockAsync(device, 1, 0, dynamic_quant=True)
    adapter = CamAsyncFfnAdapter(
        ops, "afd", probe=ops, capacity=8, metadata_read=read, stop=Stop(ops),
        host_copy=lambda: MockCopy(device),
    )  # fmt: skip
    config = MultistreamConfig(mode=StreamMode.SERIAL, wait_timeout_s=0.5, metadata_read=read)
    shape = PipelineShape(1, 1, 9, slot_bytes=64)
    loop = FfnLoop(device, adapter, PlusOne(device, ops), config, shape)
    taken = adapter._recv

    def stop_then(context) -> None:
        taken(context)
        loop.stop()

    adapter._recv = stop_then
    assert loop.serve(StepPlan(9, (2,))) == 1
    assert adapter.stopped and loop.executor.failed is None and not loop.executor.stopping
    made = len(device.streams)
    loop.close()
    loop.stop()  # a late one, of another thread: nothing is made any more
    assert len(device.streams) == made and not loop.executor.stopping
    assert ops.world.problems == [] and ops.answers == []


def test_a_stop_needs_a_stream_that_no_receive_is_queued_on():
    """A stream pool goes round: beyond its size a "new" stream is one of the executor's."""
    device = MockNpu(World(4), pool=1)
    ops = MockAsync(device, 1, 0, dynamic_quant=True)
    adapter = CamAsyncFfnAdapter(ops, "afd", capacity=8, stop=Stop(ops), gate=RecvGate.NONE)
    config = MultistreamConfig(mode=StreamMode.SERIAL, wait_timeout_s=0.5)
    shape = PipelineShape(1, 1, 9, slot_bytes=64)
    with pytest.raises(ConfigError, match="stop buffer's stream.*a stream of its own"):
        FfnLoop(device, adapter, PlusOne(device, ops), config, shape)
    assert len(device.streams) == 2 and all(stream.closed for stream in device.streams)


def test_parts_of_two_dispatches_must_not_mix():
    device = MockNpu(World(4))
    ops = MockAsync(device, 2, 2, chunks=2)
    adapter = CamAsyncFfnAdapter(ops, "afd", gate=RecvGate.READY_PROBE, probe=ops, capacity=8)
    executor = StreamExecutor(device, ExecutorOptions(StreamMode.OVERLAP, 2, timeout_s=0.05))
    model = PlusOne(device, ops)
    executor.submit(adapter.item(model))
    assert adapter.leftovers() and adapter.finished == 0
    ops.part = 0  # as if another receive had taken the rest
    ops.flag[0], ops.flag[1] = ops.flag[1], ops.flag[0]
    with pytest.raises(CommError, match="after the unfinished"):
        executor.submit(adapter.item(model))
    executor.close()


def test_the_operators_own_shutdown_item_ends_the_loop():
    device = MockNpu(World(4))
    ops = MockAsync(device, 1, 9)
    adapter = CamAsyncFfnAdapter(ops, "afd", gate=RecvGate.READY_PROBE, probe=ops, capacity=8)
    config = MultistreamConfig(
        mode=StreamMode.OVERLAP, recv_gate=RecvGate.READY_PROBE, memory_budget_bytes=1000,
        wait_timeout_s=0.05,
    )  # fmt: skip
    shape = PipelineShape(1, 1, 9, slot_bytes=64)
    loop = FfnLoop(device, adapter, PlusOne(device, ops), config, shape)
    read = adapter._metadata

    def stop_item(context) -> None:
        if adapter.finished == 2:
            adapter._buffers(context.slot).received.batch_info[1] = -1
            adapter._buffers(context.slot).received.tokens_per_expert.zero_()
        read(context)

    adapter._metadata = stop_item
    assert loop.serve(StepPlan(9, (2,))) == 3
    assert adapter.stopped and adapter.finished == 2


def test_abort_reaches_every_group_once():
    aborter = Aborter()
    _, _, adapter = p2p_ffn(aborter=aborter)
    assert adapter.capabilities.peer_abort and adapter.abort(3) and adapter.abort(4)
    assert aborter.calls == [("g0", 3), ("g1", 3)]
    _, _, mute = p2p_ffn()
    assert not mute.capabilities.peer_abort and mute.abort(1) is False
    broken = Aborter(broken=True)
    _, _, adapter = p2p_ffn(aborter=broken)
    with pytest.raises(CommError, match="g0 is unknown; g1 is unknown"):
        adapter.abort(1)
    assert len(broken.calls) == 2  # the second group was tried all the same


def test_a_failing_loop_tells_its_peers_and_a_good_one_does_not():
    for broken in (False, True):
        aborter = Aborter()
        device, ops, adapter = p2p_ffn(aborter=aborter)
        config = MultistreamConfig(mode=StreamMode.OVERLAP, wait_timeout_s=0.05)
        shape = PipelineShape(1, 1, 2, stages=2, channels=GROUPS)
        model = PlusOne(device, ops)
        if broken:
            model.compute = lambda *args: 1 / 0
        loop = FfnLoop(device, adapter, model, config, shape)
        if broken:
            with pytest.raises(ZeroDivisionError):
                loop.run_step(StepPlan(2, (2, 2)))
            assert aborter.calls == [("g0", 1), ("g1", 1)]
            with pytest.raises(XmoeError, match="first failure"):
                loop.run_step(StepPlan(2, (2, 2)))
        else:
            loop.run_step(StepPlan(2, (2, 2)))
            assert aborter.calls == []
        loop.close()


@pytest.mark.parametrize("connector", ["camp2p", "camasync"])
def test_without_an_abort_word_the_rest_of_the_step_is_answered_with_nan(connector):
    """The peers' kernels spin without a limit: each of them gets its answer, and it is NaN."""
    if connector == "camp2p":
        device, ops, adapter = p2p_ffn()
        shape = PipelineShape(1, 1, 4, stages=2, channels=GROUPS)
        config = MultistreamConfig(mode=StreamMode.OVERLAP, wait_timeout_s=0.05)
        plan = StepPlan(4, (2, 2))
    else:
        device = MockNpu(World(4))
        ops = MockAsync(device, 2, 4)
        ops.rows = lambda group, layer: 2
        adapter = CamAsyncFfnAdapter(ops, "afd", gate=RecvGate.READY_PROBE, probe=ops, capacity=8)
        shape = PipelineShape(2, 1, 4, attention_groups=2, slot_bytes=64)
        config = MultistreamConfig(
            mode=StreamMode.OVERLAP, recv_gate=RecvGate.READY_PROBE, memory_budget_bytes=1000,
            wait_timeout_s=0.05,
        )  # fmt: skip
        plan = StepPlan(4, (2,), dispatches=8)
    model = PlusOne(device, ops)
    compute = model.compute
    calls = []

    def breaks(item, out, stream) -> None:
        calls.append(out)
        if len(calls) == 3:
            raise ValueError("bad layer")
        compute(item, out, stream)

    model.compute = breaks
    loop = FfnLoop(device, adapter, model, config, shape)
    with pytest.raises(ValueError, match="bad layer"):
        loop.run_step(plan)
    answered = sum(ops.answered.values()) if connector == "camp2p" else len(ops.answers)
    assert answered == 8 and len(calls) == 3
    poisoned = [value != value for value in ops.values]
    assert poisoned == [False] * 2 + [True] * 6
    loop.close()


def test_attention_takes_nan_for_a_failed_peer():
    device = MockNpu()
    adapter = CamP2PAttentionAdapter(MockAttentionOps(device, P2P_ATTENTION), GROUPS)
    config = MultistreamConfig(mode=StreamMode.SERIAL, wait_timeout_s=0.05)
    shape = PipelineShape(1, 1, 1, stages=1, channels=GROUPS)
    loop = AttentionLoop(device, adapter, MockAttention(device), config, shape)
    rows = torch.zeros(2, 4, dtype=torch.bfloat16)
    assert len(loop.run_step(StepPlan(1, (2,)), [rows])) == 1
    with pytest.raises(PeerLost, match="holds NaN"):
        loop.run_step(StepPlan(1, (2,)), [rows * float("nan")])
    with pytest.raises(ConfigError, match="plan fewer stages"):
        loop.run_step(StepPlan(1, (0,)), [rows[:0]])
    loop.close()


def test_unsupported_settings_make_no_stream():
    device, ops, adapter = p2p_ffn()
    config = MultistreamConfig(mode=StreamMode.OVERLAP)
    shape = PipelineShape(1, 1, 2, stages=1, channels=("g0",))
    with pytest.raises(ConfigError, match="overlap with one stage"):
        FfnLoop(device, adapter, PlusOne(device, ops), config, shape)
    assert device.streams == []


def test_attention_output_is_a_plain_value():
    rows = torch.zeros(1, 4)
    assert AttentionOutput(rows).topk_ids is None
