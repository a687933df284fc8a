# SPDX-License-Identifier: Apache-2.0
"""FusedMoE in chunks through the overlapping executor: the same bits as in one piece."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from xmoe.config import XmoeConfig
from xmoe.ranks import RankContext, RanksFailed, run_ranks
from xmoe.runner import MoeRunner
from xmoe.types import ExpertWeights, MoeShape

SHAPE = MoeShape(hidden=64, intermediate=32, num_experts=8, topk=2)
DEADLINE_S = 60.0
# Ranks with nothing, with fewer tokens than there are chunks, and one call without any.
COUNTS = ([0, 17], [40, 3], [0, 0], [1, 1])


def weights(rank: int, size: int) -> ExpertWeights:
    make = torch.Generator().manual_seed(11)
    gate_up = torch.randn(8, 64, 64, generator=make) * 0.1
    down = torch.randn(8, 32, 64, generator=make) * 0.1
    mine = slice(rank * 8 // size, (rank + 1) * 8 // size)
    return ExpertWeights(gate_up[mine].bfloat16().contiguous(), down[mine].bfloat16().contiguous())


def batch(rank: int, tokens: int, routing: str) -> tuple[torch.Tensor, ...]:
    make = torch.Generator().manual_seed(100 * tokens + rank)
    hidden = torch.randn(tokens, 64, generator=make).bfloat16()
    ids = torch.rand(tokens, 8, generator=make).topk(2, dim=1).indices
    if routing == "one":
        ids = torch.tensor([[7, -1]]).repeat(tokens, 1)
    return hidden, ids, torch.rand(tokens, 2, generator=make)


def outputs(context: RankContext, streams: str, chunk: int, routing: str) -> Any:
    group = context.init_process_group(DEADLINE_S)
    settings = {"mode": "off", "split_streams": streams, "split_chunk_tokens": chunk}
    config = XmoeConfig.from_mapping({**settings, "step_timeout_s": DEADLINE_S})
    with MoeRunner.create(SHAPE, config, group=group) as runner:
        layer = runner.layer(weights(context.rank, context.size), 0)
        found = []
        for counts in COUNTS:
            mine = batch(context.rank, counts[context.rank], routing)
            found.append(layer(*mine).view(torch.int16).numpy().copy())
        options = runner._executor.options
        return found, options.mode.value, runner._transport._sequence


@pytest.mark.parametrize("routing", ["mixed", "one"])
def test_chunks_give_the_same_bits(routing: str) -> None:
    serial = run_ranks(outputs, 2, "serial", 128, routing, silence_s=DEADLINE_S)
    overlap = run_ranks(outputs, 2, "overlap", 4, routing, silence_s=DEADLINE_S)
    assert [one[1:] for one in serial] == [("serial", 4)] * 2
    # 17, 40, 0 and 1 tokens at most, 4 a chunk: 5, 10, 1 and 1 dispatches on both ranks.
    assert [one[1:] for one in overlap] == [("overlap", 17)] * 2
    for left, right in zip(serial, overlap, strict=True):
        for one, two in zip(left[0], right[0], strict=True):
            np.testing.assert_array_equal(one, two)


def bad_then_good(context: RankContext) -> Any:
    """Rank 1 has a bad id in its last chunk: one error on both ranks, and the runner goes on."""
    group = context.init_process_group(DEADLINE_S)
    settings = {"mode": "off", "split_streams": "overlap", "split_chunk_tokens": 4}
    settings |= {"validate_ids": "checked"}
    config = XmoeConfig.from_mapping({**settings, "step_timeout_s": DEADLINE_S})
    with MoeRunner.create(SHAPE, config, group=group) as runner:
        layer = runner.layer(weights(context.rank, context.size), 0)
        hidden, ids, scale = batch(context.rank, 12, "mixed")
        wrong = ids.clone()
        if context.rank == 1:
            wrong[-1, 0] = 99
        try:
            layer(hidden, wrong, scale)
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        return said, layer(hidden, ids, scale).float().numpy()


def test_an_item_refused_half_way_through_the_chunks_is_one_error_and_no_end() -> None:
    results = run_ranks(bad_then_good, 2, silence_s=DEADLINE_S)
    assert all(said.startswith("ConfigError") and "99" in said for said, _ in results)
    assert all(np.isfinite(output).all() for _, output in results)


def test_a_setting_that_differs_is_found_before_anything_runs() -> None:
    def differ(context: RankContext) -> None:
        outputs(context, "overlap", 4 + context.rank, "mixed")

    with pytest.raises(RanksFailed, match="RankDisagreement"):
        run_ranks(differ, 2, silence_s=DEADLINE_S)
