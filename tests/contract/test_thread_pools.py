# SPDX-License-Identifier: Apache-2.0
"""A pool of threads that two groups with different devices share, through the whole product."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from support.ranks import run_ranks, values
from xmoe.config import XmoeConfig
from xmoe.kernels.acl.loader import load
from xmoe.kernels.acl.toolkit import find_toolkit
from xmoe.kernels.device import HostDevice
from xmoe.kernels.ops.cam.binding import open_cam
from xmoe.kernels.ops.cam.soft import SoftCam
from xmoe.reference import BF16_ROW_TOLERANCE, moe_reference, row_errors
from xmoe.runner import MoeRunner
from xmoe.types import ExpertWeights, MoeShape

pytestmark = pytest.mark.ep

SHAPE = MoeShape(hidden=1024, intermediate=512, num_experts=8, topk=2)
THREADS, STEPS, ELSEWHERE = 3, 8, 9  # ELSEWHERE: a device of the threads' own
Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def weights() -> tuple[torch.Tensor, torch.Tensor]:
    make = torch.Generator().manual_seed(5)
    gate_up = torch.randn(8, SHAPE.hidden, 2 * SHAPE.intermediate, generator=make)
    down = torch.randn(8, SHAPE.intermediate, SHAPE.hidden, generator=make)
    return (gate_up * 0.03).bfloat16(), (down * 0.04).bfloat16()


def batch(rank: int, group: int, step: int) -> Batch:
    make = torch.Generator().manual_seed(1000 * step + 10 * rank + group)
    tokens = (step + rank + group) % 4  # none at times
    hidden = torch.randn(tokens, SHAPE.hidden, generator=make).bfloat16()
    ids = torch.rand(tokens, SHAPE.num_experts, generator=make).topk(SHAPE.topk, dim=1).indices
    return hidden, ids, torch.rand(tokens, SHAPE.topk, generator=make)


def pooled(rank: int, group: Any, bound: bool) -> Any:
    """Create, step, layer call, drain and close, each from whichever thread of the pool is free.

    bound: the threads have chosen a device of their own before.
    """
    import torch.distributed as dist

    runtime = load(find_toolkit("soft"))
    soft = SoftCam(open_cam(runtime.toolkit))
    groups = (group, dist.new_group([0, 1]))  # type: ignore[no-untyped-call]
    indices = (rank, rank + 4)
    config = XmoeConfig.from_mapping({"mode": "on", "step_timeout_s": 60.0})
    mine = slice(4 * rank, 4 * rank + 4)
    outputs: list[list[torch.Tensor]] = [[], []]
    moved: list[object] = []

    def current() -> int | None:
        out = runtime.ffi.new("int32_t*")
        return int(out[0]) if runtime.acl.aclrtGetDevice(out) == 0 else None

    def choose() -> None:
        if bound:
            runtime.acl.aclrtSetDevice(ELSEWHERE)

    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(THREADS, initializer=choose))

        def both(what: str, *functions: Any) -> list[Any]:
            """Both groups' calls at once, each in a thread that it does not choose."""

            def entered(function: Any) -> Any:
                before = current()
                made = function()
                # A thread that had no device keeps the first; no call can take it away again.
                if before is not None and current() != before:
                    moved.append((what, before, current()))
                return made

            return [one.result(60) for one in [pool.submit(entered, f) for f in functions]]

        devices = [HostDevice(runtime, index) for index in indices]
        runners = both(
            "create",
            *(
                lambda g=g, d=d: MoeRunner.create(SHAPE, config, group=g, device=d)
                for g, d in zip(groups, devices, strict=True)
            ),
        )
        experts = ExpertWeights(*(part[mine].clone() for part in weights()))
        layers = both("layer", *(lambda r=r: r.layer(experts, 0) for r in runners))
        soft.trace_tasks(True)
        for step in range(STEPS):

            def call(number: int, step: int = step) -> torch.Tensor:
                given = batch(rank, number, step)
                with runners[number].step(given[0].shape[0]):
                    return layers[number](*given)  # type: ignore[no-any-return]

            for number, output in enumerate(both("step", lambda: call(0), lambda: call(1))):
                outputs[number].append(output)
        both("drain", *(r.drain for r in runners))
        launches = [t.device for t in soft.read_tasks() if t.name == "aclnnMegaMoe"]
        soft.trace_tasks(False)
        both("close", *(r.close for r in runners))
        for device in devices:
            device.close()
    return outputs, moved, {index: launches.count(index) for index in {*launches, *indices}}


@pytest.mark.parametrize("bound", [True, False], ids=["threads_elsewhere", "threads_nowhere"])
def test_two_groups_with_different_devices_share_a_pool(bound: bool) -> None:
    gate_up, down = (part.double().numpy() for part in weights())
    for rank, (outputs, moved, launches) in enumerate(values(run_ranks(pooled, 2, bound))):
        assert moved == []
        assert launches == {rank: STEPS, rank + 4: STEPS}, "launches by device"
        for number in range(2):
            for step, output in enumerate(outputs[number]):
                hidden, ids, share = batch(rank, number, step)
                want = moe_reference(
                    hidden.double().numpy(), ids.numpy(), share.numpy(), gate_up, down
                )
                assert output.shape == hidden.shape
                assert (row_errors(output.double().numpy(), want) <= BF16_ROW_TOLERANCE).all()
