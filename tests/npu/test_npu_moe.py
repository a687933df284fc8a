# SPDX-License-Identifier: Apache-2.0
"""The product over torch_npu: MegaMoe on the current stream, the split path, regressions."""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from xmoe.config import XmoeConfig
from xmoe.ranks import RankContext, run_ranks
from xmoe.reference import BF16_ROW_TOLERANCE, moe_reference, row_errors
from xmoe.regress.plan import add_arguments, plan_from_args
from xmoe.regress.rank import RankReport, run_rank
from xmoe.runner import MoeRunner
from xmoe.types import ExpertWeights, MoeShape, Path

SHAPE = MoeShape(hidden=1024, intermediate=512, num_experts=8, topk=2)
DEADLINE_S = 150.0


def _weights() -> tuple[torch.Tensor, torch.Tensor]:
    make = torch.Generator().manual_seed(11)
    gate_up = torch.randn(SHAPE.num_experts, SHAPE.hidden, 2 * SHAPE.intermediate, generator=make)
    down = torch.randn(SHAPE.num_experts, SHAPE.intermediate, SHAPE.hidden, generator=make)
    return (gate_up * 0.03).bfloat16(), (down * 0.04).bfloat16()


def _batch(rank: int, num_tokens: int) -> tuple[torch.Tensor, ...]:
    make = torch.Generator().manual_seed(rank)
    hidden = torch.randn(num_tokens, SHAPE.hidden, generator=make).bfloat16()
    ids = torch.rand(num_tokens, SHAPE.num_experts, generator=make).topk(SHAPE.topk, dim=1).indices
    return hidden, ids, torch.rand(num_tokens, SHAPE.topk, generator=make)


def _run(context: RankContext, device_name: str, mode: str, counts: list[int], steps: int) -> Any:
    group = context.init_process_group(DEADLINE_S)
    device = torch.device("cpu")
    if device_name == "npu":
        import torch_npu  # noqa: F401

        torch.npu.set_device(context.rank)
        device = torch.device("npu", context.rank)
    config = XmoeConfig.from_mapping({"mode": mode, "step_timeout_s": DEADLINE_S})
    gate_up, down = _weights()
    share = SHAPE.num_experts // context.size
    mine = slice(context.rank * share, (context.rank + 1) * share)
    weights = ExpertWeights(
        gate_up[mine].contiguous().to(device), down[mine].contiguous().to(device)
    )
    batch = _batch(context.rank, counts[context.rank])
    hidden, ids, scales = (tensor.to(device) for tensor in batch)
    with MoeRunner.create(SHAPE, config, group=group, device=device) as runner:
        layer = runner.layer(weights, 0)
        outputs = []
        for step in range(steps):
            context.report("step", step=step)
            # Queued torch operators before the launch: it must see their results.
            fresh = hidden.clone()
            for _ in range(3):
                fresh = fresh * 2 / 2
            outputs.append(layer(fresh, ids, scales))
        outputs = [output.cpu() for output in outputs]
        path = runner.decision.path
    want = moe_reference(
        batch[0].double().numpy(), batch[1].numpy(), batch[2].numpy(),
        gate_up.double().numpy(), down.double().numpy(),
    )  # fmt: skip
    for output in outputs:
        assert (row_errors(output.double().numpy(), want) <= BF16_ROW_TOLERANCE).all()
    return path, [output.view(torch.int16).numpy() for output in outputs]


@pytest.mark.parametrize("mode", ["on", "off"])
@pytest.mark.parametrize("counts", [[3, 5], [0, 4]])
def test_layer_equals_the_reference_and_the_host_bytes(mode: str, counts: list[int]) -> None:
    npu = run_ranks(_run, 2, "npu", mode, counts, 5, silence_s=DEADLINE_S)
    host = run_ranks(_run, 2, "host", mode, counts, 1, silence_s=DEADLINE_S)
    wanted = Path.MEGA_MOE if mode == "on" else Path.FUSED_MOE
    for (path, outputs), (_, expected) in zip(npu, host, strict=True):
        assert path is wanted
        for output in outputs:
            np.testing.assert_array_equal(output, expected[0])


def _regress(ep_size: int, device: str, attention: str | None) -> list[RankReport]:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    options = ["--ep", str(ep_size), "--rounds", "1", "--requests", str(ep_size)]
    options += ["--device", device] + (["--attention", attention] if attention else [])
    plan = plan_from_args(parser.parse_args(options))
    from xmoe.models.qwen3_5.engine_transformers import preload

    preload()
    with tempfile.TemporaryDirectory() as folder:
        plan = replace(plan, log_dir=folder, step_timeout_s=DEADLINE_S)
        return run_ranks(run_rank, ep_size, plan, silence_s=DEADLINE_S)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("ep_size", "attention"), [(2, None), (4, "eager")])
def test_regression_gives_the_bytes_of_the_host(ep_size: int, attention: str | None) -> None:
    """Answers, and what went into and came out of each captured MoE layer, on both paths."""
    npu, host = (_regress(ep_size, device, attention) for device in ("npu", "host"))
    for one, two in zip(npu, host, strict=True):
        assert one.outputs == two.outputs and one.captures
        for left, right in zip(one.captures, two.captures, strict=True):
            assert (left.path, left.layer, left.step) == (right.path, right.layer, right.step)
            for name in ("hidden_states", "topk_ids", "topk_weights", "output"):
                np.testing.assert_array_equal(getattr(left, name), getattr(right, name))
