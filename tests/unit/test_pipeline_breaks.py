# SPDX-License-Identifier: Apache-2.0
"""An exception at any point of a step, on either side, under random device schedules: the loop ends
with it, tells its peers, issues nothing more, and gives back or keeps everything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.mock_stream import MockNpu, World
from support.pipeline import MockAsync, MockAttention, MockAttentionOps, MockP2P, PlusOne
from xmoe.errors import XmoeError
from xmoe.kernels.ops.cam.topology import CamAsyncTopology, CamP2PTopology
from xmoe.multistream import MultistreamConfig, PipelineShape, RecvGate, StreamMode
from xmoe.pipeline.adapters.base import StepPlan
from xmoe.pipeline.adapters.camasync_attention import CamAsyncAttentionAdapter
from xmoe.pipeline.adapters.camasync_ffn import CamAsyncFfnAdapter
from xmoe.pipeline.adapters.camp2p import CamP2PAttentionAdapter, CamP2PFfnAdapter
from xmoe.pipeline.attention import AttentionLoop
from xmoe.pipeline.ffn import FfnLoop, RoleLoop

LAYERS = 3
GROUPS = ("g0", "g1")
MODES = st.sampled_from([StreamMode.SERIAL, StreamMode.OVERLAP])
many = settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])


class Broken(Exception):
    """Nothing that the loops know."""


class Breaker:
    """Raises at call number `at` of everything that a loop calls, before or after the call."""

    def __init__(self, at: int, after: bool) -> None:
        self.left = at
        self.after = after
        self.happened = False

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kw: Any) -> Any:
            self.left -= 1
            if self.left == 0 and not self.after:
                self.happened = True
                raise Broken
            made = call(*args, **kw)
            if self.left == 0:
                self.happened = True
                raise Broken
            return made

        return wrapped

    def put(self, owner: Any, *names: str) -> None:
        for name in names:
            setattr(owner, name, self.around(getattr(owner, name)))


class Aborter:
    """The peers' waits end when a group is aborted."""

    def __init__(self, ops: Any) -> None:
        self.ops = ops
        self.calls: list[str] = []

    def abort(self, group: str, reason: int = 1) -> None:
        self.calls.append(group)
        self.ops.alive = False


def config_of(mode: StreamMode, slots: int, p2p: bool) -> MultistreamConfig:
    return MultistreamConfig(
        mode=mode, max_inflight=slots, roles=frozenset({"ffn", "attention"}),
        recv_gate=RecvGate.NONE if p2p else RecvGate.READY_PROBE, wait_timeout_s=0.02,
        shutdown_timeout_s=0.01, memory_budget_bytes=1 << 20,
    )  # fmt: skip


def ffn(seed: int, mode: StreamMode, slots: int, p2p: bool, breaker: Breaker) -> Any:
    device = MockNpu(World(seed))
    if p2p:
        ops: Any = MockP2P(device, GROUPS, LAYERS)
        aborter = Aborter(ops)
        adapter: Any = CamP2PFfnAdapter(ops, GROUPS, 2, aborter=aborter)
        shape = PipelineShape(1, 1, LAYERS, stages=2, channels=GROUPS)
        plan, names = StepPlan(LAYERS, (2, 2)), ("a2e", "e2a")
    else:
        ops = MockAsync(device, 2, LAYERS)
        aborter = Aborter(ops)
        adapter = CamAsyncFfnAdapter(
            ops, "afd", gate=RecvGate.READY_PROBE, probe=ops, capacity=8, aborter=aborter
        )
        shape = PipelineShape(2, 1, LAYERS, stages=2, attention_groups=2, slot_bytes=64)
        plan = StepPlan(LAYERS, (2,), dispatches=2 * LAYERS)
        names = ("ready", "dispatch_recv", "combine_send")
        breaker.put(adapter, "_metadata")
    model = PlusOne(device, ops)
    breaker.put(ops, *names)
    breaker.put(model, "compute")
    loop = FfnLoop(device, adapter, model, config_of(mode, slots, p2p), shape)
    return loop, ops, aborter, lambda: loop.run_step(plan)


def attention(seed: int, mode: StreamMode, slots: int, p2p: bool, breaker: Breaker) -> Any:
    device = MockNpu(World(seed))
    if p2p:
        ops = MockAttentionOps(device, CamP2PTopology(1, 1, 1, hidden=4))
        groups: tuple[str, ...] = GROUPS
        aborter = Aborter(ops)
        adapter: Any = CamP2PAttentionAdapter(ops, GROUPS, aborter=aborter)
        names = ("a2e", "e2a")
    else:
        ops = MockAttentionOps(device, CamAsyncTopology(1, 1, 0, 4, 1, 2, max_seq_len=8))
        groups = ("afd",)
        aborter = Aborter(ops)
        adapter = CamAsyncAttentionAdapter(ops, "afd", stages=2, probe=object(), aborter=aborter)
        names = ("dispatch_send", "combine_recv")
    shape = PipelineShape(1, 1, LAYERS, stages=2, channels=groups)
    model = MockAttention(device, None if p2p else 1)
    breaker.put(ops, *names)
    breaker.put(model, "compute")
    loop = AttentionLoop(device, adapter, model, config_of(mode, slots, p2p), shape)
    batches = [torch.zeros(2, 4, dtype=torch.bfloat16) for _ in range(2)]
    return loop, ops, aborter, lambda: loop.run_step(StepPlan(LAYERS, (2, 2)), batches)


@many
@given(
    st.integers(0, 10**6), MODES, st.integers(1, 4), st.booleans(), st.integers(1, 40),
    st.booleans(), st.sampled_from([ffn, attention]),
)  # fmt: skip
def test_a_loop_ends_with_what_broke_it(seed, mode, slots, p2p, at, after, side):
    breaker = Breaker(at, after)
    loop, ops, aborter, step = side(seed, mode, slots, p2p, breaker)
    device: MockNpu = ops.device
    try:
        step()
        assert not breaker.happened
    except Broken:
        check_over(loop, device, aborter, step)
    close(loop)
    device.world.until(lambda: False)
    assert device.world.problems == []


def check_over(loop: RoleLoop, device: MockNpu, aborter: Aborter, step: Callable[[], Any]) -> None:
    assert isinstance(loop.executor.failed, Broken)
    assert len(aborter.calls) == len(set(aborter.calls)) >= 1
    launched = device.launches()
    with pytest.raises(XmoeError, match="first failure"):
        step()
    assert device.launches() == launched


def close(loop: RoleLoop) -> None:
    """Twice: nothing is raised after a failure, and nothing is lost track of."""
    loop.close()
    loop.close()
    if loop.executor.failed is None:
        assert loop.executor.leaks() == () and loop.executor.quarantined == 0
