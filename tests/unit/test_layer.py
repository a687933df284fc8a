# SPDX-License-Identifier: Apache-2.0
"""What a layer refuses before anything is launched."""

from __future__ import annotations

import torch

from xmoe.layer import _problem
from xmoe.types import MoeShape, TokenBatch

SHAPE = MoeShape(hidden=8, intermediate=4, num_experts=4, topk=2)


def _batch(device: str = "cpu") -> TokenBatch:
    ids = torch.tensor([[0, 1], [2, 3]])
    hidden = torch.zeros(2, 8, dtype=torch.bfloat16, device=device)
    return TokenBatch(hidden, ids, torch.ones(2, 2))


def test_a_good_batch_is_accepted() -> None:
    assert _problem(_batch(), SHAPE, 2, torch.device("cpu"), "checked") is None


def test_tensors_elsewhere_than_the_weights_are_refused() -> None:
    problem = _problem(_batch("meta"), SHAPE, 2, torch.device("cpu"), "checked")
    assert "hidden_states on meta" in str(problem) and "allowed: cpu" in str(problem)


def test_other_rows_than_announced_are_refused() -> None:
    problem = _problem(_batch(), SHAPE, 3, torch.device("cpu"), "checked")
    assert "3 tokens were announced" in str(problem)
