# SPDX-License-Identifier: Apache-2.0
"""The split path's steps on CPU tensors, against loops: router, rows in expert order, their sum."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from xmoe.errors import ConfigError
from xmoe.kernels.ops.fused_moe import SplitExperts, expert_mlp, route_rows, sum_rows
from xmoe.kernels.ops.npu_quant import fits_operators
from xmoe.kernels.ops.quant import quantise_experts
from xmoe.kernels.ops.router import select_experts
from xmoe.kernels.ops.routing import check_ids
from xmoe.types import ExpertWeights


@pytest.mark.parametrize("tokens", [0, 1, 7])
def test_rows_go_to_their_expert_and_come_back(tokens: int) -> None:
    make = torch.Generator().manual_seed(tokens)
    hidden = torch.randn(tokens, 8, generator=make)
    ids = torch.rand(tokens, 5, generator=make).topk(3, dim=1).indices.to(torch.int32)
    ids[torch.rand(tokens, 3, generator=make) < 0.3] = -1
    weights = torch.rand(tokens, 3, generator=make).masked_fill(ids < 0, 0.0)
    routed = route_rows(hidden, ids, 5)
    want = sorted(
        (expert if expert >= 0 else 5, slot) for slot, expert in enumerate(ids.flatten().tolist())
    )
    assert routed.places.tolist() == [want.index((e, s)) for s, e in
                                      sorted((s, e) for e, s in want)]  # fmt: skip
    assert torch.equal(routed.rows, hidden[[slot // 3 for _, slot in want]])
    assert routed.counts.tolist() == [sum(e == expert for e, _ in want) for expert in range(5)]
    assert routed.places.dtype == torch.int32 and routed.counts.dtype == torch.int64
    used = int(routed.counts.sum())
    rows = routed.rows * 2
    rows[used:] = 0
    total = sum_rows(rows, routed.places, ids, weights)
    by_loop = np.zeros((tokens, 8))
    for token in range(tokens):
        for slot in range(3):
            by_loop[token] += float(weights[token, slot]) * 2 * hidden[token].double().numpy()
    np.testing.assert_allclose(total.double().numpy(), by_loop, rtol=1e-5, atol=1e-6)


def test_counts_may_be_a_tensor() -> None:
    make = torch.Generator().manual_seed(1)
    weights = ExpertWeights(
        torch.randn(3, 8, 12, generator=make), torch.randn(3, 6, 8, generator=make)
    )
    rows = torch.randn(5, 8, generator=make)
    want = expert_mlp(rows, [2, 0, 3], weights)
    assert torch.equal(SplitExperts(weights)(rows, torch.tensor([2, 0, 3])), want)


def test_which_integer_weights_the_operators_take() -> None:
    def made(hidden: int, inter: int, quant: str, encoding: str = "twos_complement") -> bool:
        gate_up, down = torch.ones(1, hidden, 2 * inter), torch.ones(1, inter, hidden)
        return fits_operators(quantise_experts(gate_up, down, quant, int4_encoding=encoding))

    assert made(64, 64, "w8a8") and made(256, 512, "w4a8")
    assert not made(256, 64, "w4a8") and not made(320, 256, "w4a8")
    assert not made(256, 256, "w4a8", "offset_binary")


def test_router_keeps_bad_rows_to_themselves() -> None:
    logits = torch.randn(6, 16, generator=torch.Generator().manual_seed(0))
    good_ids, good_weights = select_experts(logits, 4)
    logits[0], logits[2], logits[4] = float("nan"), float("inf"), float("-inf")
    logits[5] = 1.5
    ids, weights = select_experts(logits, 4)
    assert not check_ids(ids, 16)
    for row in (0, 2, 4, 5):
        assert ids[row].tolist() == [0, 1, 2, 3]
    for row in (1, 3):
        assert torch.equal(ids[row], good_ids[row])
        assert torch.equal(weights[row], good_weights[row])
    assert weights[[0, 2, 4]].isnan().all() and weights[5].tolist() == [0.25] * 4
    with pytest.raises(ConfigError, match=r"topk=17.*1\.\.16"):
        select_experts(logits, 17)
