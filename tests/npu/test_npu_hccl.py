# SPDX-License-Identifier: Apache-2.0
"""ProcessGroupHCCL of the unmodified wheel, and MegaMoe over that group's own communicator."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from xmoe.config import XmoeConfig
from xmoe.ranks import RankContext, run_ranks
from xmoe.reference import BF16_ROW_TOLERANCE, moe_reference, row_errors
from xmoe.runner import MoeRunner
from xmoe.types import ExpertWeights, MoeShape, Path

DEADLINE_S = 120.0
SHAPE = MoeShape(hidden=1024, intermediate=512, num_experts=4, topk=2)


def _group(context: RankContext) -> Any:
    """gloo for host tensors, HCCL for device tensors, in one group."""
    import torch.distributed as dist
    import torch_npu  # noqa: F401

    torch.npu.set_device(context.rank)
    store = dist.FileStore(context.store_path, context.size)
    dist.init_process_group(
        "cpu:gloo,npu:hccl", store=store, rank=context.rank, world_size=context.size
    )
    return dist.group.WORLD


def _collectives(context: RankContext) -> dict[str, list[float]]:
    import torch.distributed as dist

    _group(context)
    device, rank, size = torch.device("npu", context.rank), context.rank, context.size
    found = {}
    value = torch.full((1000,), float(rank + 1), device=device)
    dist.all_reduce(value)
    found["all_reduce"] = value[:1].tolist()
    parts = [torch.empty(2, device=device) for _ in range(size)]
    dist.all_gather(parts, torch.full((2,), float(rank), device=device))
    found["all_gather"] = torch.cat(parts).tolist()
    mine = torch.empty(2, device=device)
    dist.reduce_scatter(mine, list(torch.arange(2.0 * size, device=device).chunk(size)))
    found["reduce_scatter"] = mine.tolist()
    got = torch.empty(size, device=device)
    dist.all_to_all_single(got, torch.arange(float(size), device=device) + 10 * rank)
    found["all_to_all"] = got.tolist()
    text = torch.full((3,), float(rank), device=device)
    dist.broadcast(text, src=1)
    found["broadcast"] = text.tolist()
    dist.barrier()
    host = torch.tensor([rank])
    dist.all_reduce(host)
    found["host"] = host.tolist()
    dist.destroy_process_group()
    return found


def test_collectives() -> None:
    for rank, found in enumerate(run_ranks(_collectives, 2, silence_s=DEADLINE_S)):
        assert found == {
            "all_reduce": [3.0],
            "all_gather": [0.0, 0.0, 1.0, 1.0],
            "reduce_scatter": [4.0 * rank, 4.0 * rank + 2],
            "all_to_all": [float(rank), 10.0 + rank],
            "broadcast": [1.0, 1.0, 1.0],
            "host": [1],
        }


def _fused(context: RankContext) -> tuple[Path, str]:
    import torch.distributed as dist

    group = _group(context)
    device = torch.device("npu", context.rank)
    make = torch.Generator().manual_seed(2)
    gate_up = (torch.randn(4, 1024, 1024, generator=make) * 0.03).bfloat16()
    down = (torch.randn(4, 512, 1024, generator=make) * 0.04).bfloat16()
    hidden = torch.randn(4, 1024, generator=make).bfloat16()
    ids = torch.rand(4, 4, generator=make).topk(2, dim=1).indices
    scales = torch.rand(4, 2, generator=make)
    mine = slice(2 * context.rank, 2 * context.rank + 2)
    weights = ExpertWeights(gate_up[mine].clone().to(device), down[mine].clone().to(device))
    config = XmoeConfig.from_mapping({"mode": "on", "step_timeout_s": DEADLINE_S})
    with MoeRunner.create(SHAPE, config, group=group, device=device) as runner:
        layer = runner.layer(weights, 0)
        output = layer(hidden.to(device), ids.to(device), scales.to(device)).cpu()
        assert runner._resource is not None
        name, path = runner._resource.handle.group_name, runner.decision.path
    backend = group._get_backend(torch.device("npu"))
    assert name == backend.get_hccl_comm_name(context.rank)
    dist.barrier()  # the group goes on after the runner is closed
    want = moe_reference(
        hidden.double().numpy(), ids.numpy(), scales.numpy(),
        gate_up.double().numpy(), down.double().numpy(),
    )  # fmt: skip
    assert (row_errors(output.double().numpy(), want) <= BF16_ROW_TOLERANCE).all()
    dist.destroy_process_group()
    return path, name


@pytest.mark.timeout(300)
def test_mega_moe_over_the_groups_own_communicator() -> None:
    results = run_ranks(_fused, 2, silence_s=DEADLINE_S)
    assert {path for path, _ in results} == {Path.MEGA_MOE}
    assert len({name for _, name in results}) == 1
