# SPDX-License-Identifier: Apache-2.0
"""Communication of two groups on two streams, queued in another order on each rank; and an operator
that needs all cores while something holds one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.cam_ranks import cam_rank
from support.ranks import run_ranks, values
from xmoe.comm.hccl import HcclCommunicator, make_root_info
from xmoe.config import XmoeConfig
from xmoe.errors import AclError
from xmoe.kernels.acl.handles import AclStream
from xmoe.kernels.acl.loader import load
from xmoe.kernels.acl.status import check
from xmoe.kernels.acl.toolkit import find_toolkit
from xmoe.kernels.device import HostDevice
from xmoe.kernels.ops.cam.host import HostCamAsyncOps
from xmoe.kernels.ops.cam.topology import CamAsyncTopology
from xmoe.reference import BF16_ROW_TOLERANCE, moe_reference, row_errors
from xmoe.runner import MoeRunner
from xmoe.types import ExpertWeights, MoeShape

pytestmark = pytest.mark.ep

SHAPE = MoeShape(hidden=1024, intermediate=512, num_experts=8, topk=2)
STEPS, COUNT, FLOAT32, SUM = 12, 4096, 4, 0
STREAM_TIMEOUT = 507046
Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def weights() -> tuple[torch.Tensor, torch.Tensor]:
    make = torch.Generator().manual_seed(6)
    gate_up = torch.randn(8, SHAPE.hidden, 2 * SHAPE.intermediate, generator=make)
    down = torch.randn(8, SHAPE.intermediate, SHAPE.hidden, generator=make)
    return (gate_up * 0.03).bfloat16(), (down * 0.04).bfloat16()


def batch(rank: int, step: int) -> Batch:
    make = torch.Generator().manual_seed(100 * step + rank)
    hidden = torch.randn(3, SHAPE.hidden, generator=make).bfloat16()
    ids = torch.rand(3, SHAPE.num_experts, generator=make).topk(SHAPE.topk, dim=1).indices
    return hidden, ids, torch.rand(3, SHAPE.topk, generator=make)


def crossed(rank: int, group: Any) -> Any:
    """A shared expert's sum over pairs of ranks, beside the experts of all four."""
    import torch.distributed as dist

    runtime = load(find_toolkit("soft"))
    device = HostDevice(runtime, rank)
    config = XmoeConfig.from_mapping({"mode": "on", "step_timeout_s": 20.0})
    runner = MoeRunner.create(SHAPE, config, group=group, device=device)
    layer = runner.layer(ExpertWeights(*(p[2 * rank : 2 * rank + 2].clone() for p in weights())), 0)
    outputs = []
    with device.bind(), AclStream(runtime) as beside:
        roots: list[Any] = [None] * 4
        dist.all_gather_object(roots, make_root_info(runtime) if rank % 2 == 0 else None)
        pair = HcclCommunicator(runtime, 2, rank % 2, roots[rank - rank % 2], None)
        held = []
        for step in range(STEPS):
            given = np.full(COUNT, 10 * step + rank, np.float32)
            result = np.zeros(COUNT, np.float32)
            held.append((given, result))
            source, target = (runtime.ffi.from_buffer(a) for a in (given, result))

            def reduce(source: Any = source, target: Any = target) -> None:
                status = runtime.hccl.HcclAllReduce(
                    source, target, COUNT, FLOAT32, SUM, pair._comm, beside.pointer
                )
                check(runtime, status, "HcclAllReduce")

            def run(step: int = step) -> None:
                outputs.append(layer(*batch(rank, step)))

            for act in (reduce, run) if (rank + step) % 2 else (run, reduce):
                act()
        beside.synchronize(20.0)
        sums = [result.tolist() for _, result in held]
        pair.close()
    runner.close()
    device.close()
    return outputs, sums


def test_sums_over_pairs_beside_the_experts_in_opposite_order() -> None:
    env = {"XSD_DELAY_SEED": "4", "XSD_DELAY_MAX_US": "2000"}
    gate_up, down = (part.double().numpy() for part in weights())
    outs = values(run_ranks(crossed, 4, env=env, deadline_s=60))
    for rank, (outputs, sums) in enumerate(outs):
        first = rank - rank % 2
        assert sums == [[20.0 * step + 2 * first + 1] * COUNT for step in range(STEPS)]
        for step, output in enumerate(outputs):
            hidden, ids, share = batch(rank, step)
            want = moe_reference(hidden.double().numpy(), ids.numpy(), share.numpy(), gate_up, down)
            assert (row_errors(output.double().numpy(), want) <= BF16_ROW_TOLERANCE).all()


# ---- an operator on all cores, and a task on one of them


def one_core_taken(rank: int, _: Any, folder: str, milliseconds: int) -> Any:
    with cam_rank(rank, 2, folder) as one:
        group = one.communicator("afd")
        place = CamAsyncTopology(1, 1, rank, 16, 2, 4, max_seq_len=32)
        ops, stream, other = HostCamAsyncOps(one.library, place), one.stream(), one.stream()
        if not place.is_ffn:
            x = torch.ones(4, 16, dtype=torch.bfloat16)
            ids = torch.tensor([[0, 1], [1, 2], [2, 3], [3, 0]], dtype=torch.int32)
            ops.dispatch_send(group, x, ids, 3, stream=stream)
            one.sync(stream)
            one.mark("sent")
            one.meet("seen")
            return None
        one.meet("sent")
        one.soft.timed_kernel(stream=other, microseconds=1000 * milliseconds, vector_cores=1)
        while one.soft.free_cores(rank)[0] == 8:
            pass
        item = ops.dispatch_recv(group, stream=stream)  # needs all eight
        code, text = 0, ""
        try:
            one.sync(stream, 500)
        except AclError as error:
            code, text = error.code, error.detail
        finished = int(item.batch_info[2]) if code == 0 else -1
        one.sync(other)
        one.sync(stream)
        one.mark("seen")
        return code, text, finished, int(item.batch_info[2]), one.soft.free_cores(rank)[0]


ALL_CORES = {"XSD_AIV_COUNT": "8", "BATCH_SIZE_FACTOR": "0.001"}


def test_an_operator_on_all_cores_waits_for_the_last_one(tmp_path: Path) -> None:
    args = (str(tmp_path), 50)
    _, found = values(run_ranks(one_core_taken, 2, *args, group=False, env=ALL_CORES))
    assert found == (0, "", 3, 3, 8)


def test_a_wait_for_a_taken_core_is_bounded_and_loses_nothing(tmp_path: Path) -> None:
    args = (str(tmp_path), 2000)
    _, found = values(run_ranks(one_core_taken, 2, *args, group=False, env=ALL_CORES))
    code, text, finished, layer, free = found
    assert code == STREAM_TIMEOUT and "0 of 1 tasks" in text
    assert (finished, layer, free) == (-1, 3, 8)
