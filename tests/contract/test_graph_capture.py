# SPDX-License-Identifier: Apache-2.0
"""One rank captures a graph, the others call eagerly: it is refused there, and nothing is lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from support.ranks import run_ranks, values
from xmoe.config import XmoeConfig
from xmoe.errors import ConfigError
from xmoe.kernels.acl.loader import load
from xmoe.kernels.acl.toolkit import find_toolkit
from xmoe.kernels.device import HostDevice
from xmoe.reference import BF16_ROW_TOLERANCE, moe_reference, row_errors
from xmoe.runner import MoeRunner
from xmoe.types import ExpertWeights, MoeShape

pytestmark = pytest.mark.ep

SHAPE = MoeShape(hidden=1024, intermediate=512, num_experts=8, topk=2)
PATTERNS = [(8, 8), (1, 3), (8, 0), (9, 1)]  # local tokens of both ranks, one pattern a step
Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def weights() -> tuple[torch.Tensor, torch.Tensor]:
    make = torch.Generator().manual_seed(7)
    gate_up = torch.randn(8, SHAPE.hidden, 2 * SHAPE.intermediate, generator=make)
    down = torch.randn(8, SHAPE.intermediate, SHAPE.hidden, generator=make)
    return (gate_up * 0.03).bfloat16(), (down * 0.04).bfloat16()


def batch(rank: int, step: int) -> Batch:
    make, tokens = torch.Generator().manual_seed(100 * step + rank), PATTERNS[step][rank]
    hidden = torch.randn(tokens, SHAPE.hidden, generator=make).bfloat16()
    ids = torch.rand(tokens, SHAPE.num_experts, generator=make).topk(SHAPE.topk, dim=1).indices
    return hidden, ids, torch.rand(tokens, SHAPE.topk, generator=make)


class Capturing(HostDevice):
    """The software device has no graphs."""

    captured = False

    def capturing(self) -> bool:
        return self.captured


def partly(rank: int, group: Any, mode: str) -> Any:
    device = Capturing(load(find_toolkit("soft")), rank)
    config = XmoeConfig.from_mapping({"mode": mode, "step_timeout_s": 20.0})
    runner = MoeRunner.create(SHAPE, config, group=group, device=device)
    mine = slice(4 * rank, 4 * rank + 4)
    layer = runner.layer(ExpertWeights(*(p[mine].clone() for p in weights())), 0)
    outputs, refused = [], []
    for step in range(len(PATTERNS)):
        device.captured = rank == step % 2
        with runner.step(PATTERNS[step][rank]):
            if device.captured:
                before = dict(runner.launches)
                with pytest.raises(ConfigError) as caught:
                    layer(*batch(rank, step))
                refused.append((str(caught.value), runner.launches == before))
                device.captured = False  # as the message says: outside the graph
            outputs.append(layer(*batch(rank, step)))
    launches = sum(runner.launches.values())
    runner.close()
    device.close()
    return outputs, refused, launches


@pytest.mark.parametrize("mode", ["on", "off"])
def test_ranks_never_mix_a_captured_and_an_eager_call(mode: str) -> None:
    gate_up, down = (part.double().numpy() for part in weights())
    for rank, (outputs, refused, launches) in enumerate(values(run_ranks(partly, 2, mode))):
        assert len(refused) == 2 and all(untouched for _, untouched in refused)
        for text, _ in refused:
            assert "is captured into a graph" in text and "next: " in text
        assert launches == len(PATTERNS)
        for step, output in enumerate(outputs):
            hidden, ids, share = batch(rank, step)
            want = moe_reference(hidden.double().numpy(), ids.numpy(), share.numpy(), gate_up, down)
            assert output.shape == hidden.shape
            assert (row_errors(output.double().numpy(), want) <= BF16_ROW_TOLERANCE).all()
