# SPDX-License-Identifier: Apache-2.0
"""Guards of the executor and its loops that a good run never needs: each test fails without one."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from support.mock_stream import Kernel, MockEvent, MockNpu, World
from support.pipeline import MockAsync, MockP2P, PlusOne, item_of
from xmoe.errors import AclError, FenceTimeout, PeerLost, PipelineStopped, XmoeError
from xmoe.multistream import MultistreamConfig, PipelineShape, RecvGate, StreamMode
from xmoe.pipeline.adapters.base import StepPlan
from xmoe.pipeline.adapters.camasync_ffn import CamAsyncFfnAdapter
from xmoe.pipeline.adapters.camp2p import CamP2PFfnAdapter
from xmoe.pipeline.channels import ChannelRule
from xmoe.pipeline.executor import StreamExecutor
from xmoe.pipeline.ffn import FfnLoop
from xmoe.pipeline.items import Phase, PhaseKind, WorkItem
from xmoe.pipeline.options import ExecutorOptions

R, M, C, S = PhaseKind.RECV, PhaseKind.METADATA, PhaseKind.COMPUTE, PhaseKind.SEND
SERIAL, OVERLAP = StreamMode.SERIAL, StreamMode.OVERLAP


def make(device: MockNpu, **kw):
    known = ("on_stall", "on_failure", "translate", "channels")
    given = {key: kw.pop(key) for key in known if key in kw}
    options = {"mode": OVERLAP, "max_inflight": 2, "timeout_s": 0.05} | kw
    return StreamExecutor(device, ExecutorOptions(**options), **given)


# ---- the wait before a receive ----------------------------------------------------------------


def test_a_gate_that_never_opens_is_bounded_reported_and_final():
    device = MockNpu()
    heard, told = [], []
    executor = make(
        device, timeout_s=0.06, stall_warn_s=0.01, on_stall=heard.append,
        on_failure=lambda error, unsent: told.append(type(error)),
    )  # fmt: skip
    executor.submit(item_of(device, "first", R, C, S))
    with pytest.raises(FenceTimeout, match="second, layer 3.*nothing came for 0.06 s.*allowed"):
        executor.submit(item_of(device, "second", R, layer=3, gate=lambda: False))
    assert len(heard) == 1 and "the gate of second" in heard[0]
    assert told == [FenceTimeout] and isinstance(executor.failed, FenceTimeout)
    executor.close()


def test_a_gate_that_may_idle_waits_until_it_is_stopped():
    device = MockNpu()
    heard = []
    executor = make(device, timeout_s=0.02, stall_warn_s=0.01, on_stall=heard.append)
    timer = threading.Timer(0.1, executor.request_stop)
    timer.start()
    with pytest.raises(PipelineStopped, match="nothing was issued"):
        executor.submit(item_of(device, "i", R, gate=lambda: False, may_idle=True))
    timer.join()
    assert heard == [] and executor.failed is None
    executor.close()


class Aborter:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def abort(self, group: str, reason: int = 1) -> None:
        self.calls.append(group)


def async_loop(ops: MockAsync, aborter: Aborter | None = None, alive=None, **settings) -> FfnLoop:
    adapter = CamAsyncFfnAdapter(
        ops, "afd", gate=RecvGate.READY_PROBE, probe=ops, capacity=8, aborter=aborter, alive=alive
    )
    config = MultistreamConfig(
        mode=OVERLAP, recv_gate=RecvGate.READY_PROBE, memory_budget_bytes=1 << 20,
        **{"wait_timeout_s": 0.05} | settings,
    )  # fmt: skip
    shape = PipelineShape(len(ops.flag), 1, 4, attention_groups=len(ops.flag), slot_bytes=64)
    return FfnLoop(ops.device, adapter, PlusOne(ops.device, ops), config, shape)


def test_a_peer_that_lives_but_never_sends_ends_the_step_and_is_told():
    ops, aborter = MockAsync(MockNpu(World(4)), 1, 4), Aborter()
    ops.alive = False
    loop = async_loop(ops, aborter)
    with pytest.raises(FenceTimeout, match="nothing came"):
        loop.run_step(StepPlan(4, (2,), dispatches=4))
    assert aborter.calls == ["afd"]
    loop.close()


def test_a_loop_without_a_count_may_idle_beyond_the_time_limit():
    ops = MockAsync(MockNpu(World(4)), 1, 4)
    ops.alive = False
    loop = async_loop(ops, wait_timeout_s=0.02)
    timer = threading.Timer(0.1, loop.stop)
    timer.start()
    assert loop.serve(StepPlan(4, (2,))) == 0 and loop.executor.failed is None
    timer.join()
    loop.close()


def test_a_dead_peer_is_noticed_while_idle():
    ops = MockAsync(MockNpu(World(4)), 1, 4)
    ops.alive = False

    def alive() -> None:
        raise PeerLost("rank 0 is gone")

    loop = async_loop(ops, alive=alive, wait_timeout_s=20.0)
    with pytest.raises(PeerLost, match="rank 0 is gone"):
        loop.run_step(StepPlan(4, (2,), dispatches=4))
    loop.close()


# ---- failures of one stream ---------------------------------------------------------------------


class OneBadStream(MockNpu):
    """Like the software device: what a stream's events mark was reached, and is an error."""

    bad = 0

    def create_event(self) -> MockEvent:
        device, event = self, super().create_event()
        record, synchronize = event.record, event.synchronize

        def recorded(stream) -> None:
            event.handle = stream.handle()
            record(stream)

        def synchronized(timeout_s: float) -> None:
            synchronize(timeout_s)
            if event.handle == device.bad:
                raise AclError("aclrtSynchronizeEvent", 507035, "VECTOR_CORE_EXCEPTION", "")

        event.record, event.synchronize = recorded, synchronized
        return event


@pytest.mark.parametrize("hangs", [True, False])
@pytest.mark.parametrize("late", [False, True])
def test_an_earlier_phase_that_failed_is_reported(late, hangs):
    """At once, or only when the host has waited for a while; whether the last phase hangs for that
    reason, or looks done all the same."""
    device = OneBadStream()
    device.bad = 1  # recv
    executor = make(device, timeout_s=5.0, shutdown_timeout_s=0.02)
    go = [] if late else [1]

    def recv(context) -> None:
        device.launch(context.stream.handle(), Kernel("recv", ready=lambda: bool(go)))

    def send(context) -> None:
        device.launch(context.stream.handle(), Kernel("send", ready=lambda: not hangs))

    ticket = executor.submit(WorkItem("i", 0, (Phase(R, "c", recv), Phase(S, "c", send))))
    timer = threading.Timer(0.1, lambda: go.append(1))
    timer.start()
    with pytest.raises(AclError, match="507035"):
        ticket.result()
    timer.join()
    executor.close()
    assert executor.quarantined == int(hangs)


def test_what_was_observed_is_not_waited_for_in_its_later_use():
    """i0 of group g is over, i2 of group h has its slot and events now: i3 of g does not wait."""
    device = MockNpu()
    rules = tuple(ChannelRule(name, 1, exclusive=True) for name in "gh")
    with make(device, channels=rules) as executor:
        for name, channel in (("i0", "g"), ("i1", "h")):
            executor.submit(item_of(device, name, R, C, S, channel=channel)).result()
        assert executor.submit(item_of(device, "i2", R, C, S, channel="h")).context.slot == 0
        before = len(device.log)
        executor.submit(item_of(device, "i3", R, C, S, channel="g"))
        asked = device.log[before : device.log.index(("launch", 1, "i3.recv"))]
        assert asked == [("wait", 1, 5)]  # the slot's own former item: the send of i1


# ---- the FFN loop -----------------------------------------------------------------------------


def p2p_loop(layers: int = 3, **settings) -> tuple[FfnLoop, MockP2P, CamP2PFfnAdapter]:
    device = MockNpu(World(2))
    ops = MockP2P(device, ("g0", "g1"), layers)
    adapter = CamP2PFfnAdapter(ops, ("g0", "g1"), 8)
    config = MultistreamConfig(
        mode=OVERLAP, wait_timeout_s=0.05, shutdown_timeout_s=0.02, **settings
    )
    shape = PipelineShape(1, 1, layers, stages=2, channels=("g0", "g1"))
    return FfnLoop(device, adapter, PlusOne(device, ops), config, shape), ops, adapter


def breaks(loop: FfnLoop, at: int, error: BaseException, also=lambda: None) -> None:
    """The model raises at its item number `at`."""
    compute, calls = loop._model._model.compute, []

    def broken(item, out, stream) -> None:
        calls.append(item)
        if len(calls) == at:
            also()
            raise error
        compute(item, out, stream)

    loop._model._model.compute = broken


def test_a_stop_between_two_items_keeps_what_was_issued():
    loop, ops, _ = p2p_loop()
    calls = []
    compute = loop._model._model.compute

    def stopping(item, out, stream) -> None:
        calls.append(item)
        if len(calls) == 2:
            loop.stop()
        compute(item, out, stream)

    loop._model._model.compute = stopping
    with pytest.raises(PipelineStopped, match="between two items"):
        loop.run_step(StepPlan(3, (2, 2)))
    assert loop.items == 2 and loop.executor.failed is None
    loop.close()
    assert sum(ops.answered.values()) == 2 and ops.world.problems == []


@pytest.mark.parametrize("failed", [False, True])
def test_what_is_pending_at_the_end_is_an_error_of_a_good_loop_only(failed):
    loop, _, adapter = p2p_loop()
    if failed:
        breaks(loop, 1, AclError("launch", 507014, "", ""))
        with pytest.raises(AclError):
            loop.run_step(StepPlan(3, (2, 2)))
    adapter.leftovers = lambda: ("stage 0: layer 1",)
    if failed:
        loop.close()
    else:
        with pytest.raises(XmoeError, match="closed with stage 0: layer 1"):
            loop.close()


@pytest.mark.parametrize(
    "error", [AclError("launch", 507014, "", ""), PipelineStopped("asked to")], ids=["acl", "stop"]
)
def test_nothing_is_answered_after_a_device_error_or_a_stop(error):
    loop, ops, _ = p2p_loop()
    breaks(loop, 2, error)
    with pytest.raises(type(error)):
        loop.run_step(StepPlan(3, (2, 2)))
    assert ops.issued == {"g0": 1, "g1": 0}
    loop.close()


def test_nothing_is_answered_when_a_send_failed():
    """Whether it was queued is not known, and one launch too many hangs the peer for good."""
    loop, ops, _ = p2p_loop()
    send = ops.e2a

    def broken(group, *args, **kw):
        if group == "g1":
            ops.e2a = send
            raise RuntimeError("send broke")
        return send(group, *args, **kw)

    ops.e2a = broken
    with pytest.raises(RuntimeError, match="send broke"):
        loop.run_step(StepPlan(3, (2, 2)))
    assert ops.issued == {"g0": 1, "g1": 0} and ops.received == {"g0": 1, "g1": 1}
    loop.close()


def test_nothing_is_answered_while_a_receive_still_spins():
    loop, ops, _ = p2p_loop()
    ops.alive = False  # the peer never sends
    breaks(loop, 1, ValueError("bad layer"))
    with pytest.raises(ValueError, match="bad layer"):
        loop.run_step(StepPlan(3, (2, 2)))
    assert ops.issued == {"g0": 0, "g1": 0} and not loop._model.poisoned
    loop.close()
    assert loop.executor.quarantined == 1


def test_answering_ends_when_the_rest_never_comes():
    ops = MockAsync(MockNpu(World(4)), 1, 4)
    ops.rows = lambda group, layer: 2
    loop = async_loop(ops)

    def gone() -> None:
        ops.alive = False

    breaks(loop, 2, ValueError("bad layer"), gone)
    with pytest.raises(ValueError, match="bad layer") as caught:
        loop.run_step(StepPlan(4, (2,), dispatches=4))
    assert any("nothing came for 0.05 s" in note for note in caught.value.__notes__)
    assert len(ops.answers) == 2  # also the one that failed
    loop.close()


@pytest.mark.parametrize("kind", ["cpu", "npu"])
def test_a_loop_on_a_host_queue_trusts_no_stream_after_a_device_error(kind):
    """torch_npu's: launches and records vanish then, so an empty stream proves nothing."""
    loop, ops, _ = p2p_loop()
    device = ops.device
    device.torch_device = SimpleNamespace(type=kind)
    breaks(loop, 2, AclError("launch", 507014, "", ""))
    with pytest.raises(AclError):
        loop.run_step(StepPlan(3, (2, 2)))
    asked = device.stream_syncs
    loop.close()
    assert (device.stream_syncs == asked) == (kind == "npu")
    assert (loop.executor.quarantined > 0) == (kind == "npu")
