# SPDX-License-Identifier: Apache-2.0
"""Guards of the executor and its loops that a good run never needs: each test fails without one."""

from __future__ import annotations

import threading

import pytest

from support.mock_stream import MockNpu, World
from support.pipeline import MockAsync, PlusOne, item_of
from xmoe.errors import FenceTimeout, PipelineStopped
from xmoe.multistream import MultistreamConfig, PipelineShape, RecvGate, StreamMode
from xmoe.pipeline.adapters.base import StepPlan
from xmoe.pipeline.adapters.camasync import CamAsyncFfnAdapter
from xmoe.pipeline.executor import StreamExecutor
from xmoe.pipeline.ffn import FfnLoop
from xmoe.pipeline.items import PhaseKind
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


def async_loop(ops: MockAsync, aborter: Aborter | None = None, **settings) -> FfnLoop:
    adapter = CamAsyncFfnAdapter(
        ops, "afd", gate=RecvGate.READY_PROBE, probe=ops, capacity=8, aborter=aborter
    )
    config = MultistreamConfig(
        mode=OVERLAP, recv_gate=RecvGate.READY_PROBE, memory_budget_bytes=1 << 20,
        **{"wait_timeout_s": 0.05} | settings,
    )  # fmt: skip
    shape = PipelineShape(len(ops.flag), 1, 4, attention_groups=len(ops.flag), recv_bytes=64)
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
