# SPDX-License-Identifier: Apache-2.0
"""What becomes of a batch in a launch's rows, against a row-by-row model in plain Python."""

from __future__ import annotations

import random

import pytest
import torch

from xmoe.errors import ConfigError
from xmoe.kernels.ops.launch_rows import LaunchRows
from xmoe.types import TokenBatch

HIDDEN = 8


def _rows(capacity: int = 6, topk: int = 2, experts: int = 6, padding: str = "zero_weight"):
    return LaunchRows(capacity, HIDDEN, topk, experts, local_experts=experts, padding=padding)


def _batch(ids, id_dtype=torch.int64, weight_dtype=torch.float32, topk=2) -> TokenBatch:
    ids = torch.tensor(ids, dtype=torch.int64).reshape(-1, topk).to(id_dtype)
    weights = torch.arange(1, ids.numel() + 1).reshape(ids.shape).to(weight_dtype)
    return TokenBatch(torch.ones(ids.shape[0], HIDDEN, dtype=torch.bfloat16), ids, weights)


def _model(ids: list[int], weights: list[float], experts: int) -> tuple[list, int]:
    """(usable (id, weight) pairs of one row in slot order, how many slots count as bad)."""
    used: list[tuple[int, float]] = []
    bad = 0
    for expert, weight in zip(ids, weights, strict=True):
        if 0 <= expert < experts and expert not in [e for e, _ in used]:
            used.append((expert, weight))
        elif expert != -1:
            bad += 1
    return used, bad


def _check(launch: TokenBatch, batch: TokenBatch, experts: int) -> int:
    tokens, topk = batch.topk_ids.shape
    assert launch.topk_ids.dtype is torch.int32 and launch.topk_weights.dtype is torch.float32
    bad = 0
    for row, (ids, weights) in enumerate(
        zip(launch.topk_ids.tolist(), launch.topk_weights.tolist(), strict=True)
    ):
        assert len(set(ids)) == topk and min(ids) >= 0 and max(ids) < experts
        used: list[tuple[int, float]] = []
        if row < tokens:
            own = batch.topk_ids[row].tolist(), batch.topk_weights[row].tolist()
            used, found = _model(*own, experts)
            bad += found
            assert torch.equal(launch.hidden_states[row], batch.hidden_states[row])
        else:
            assert not launch.hidden_states[row].any()
        assert list(zip(ids, weights, strict=True))[: len(used)] == used
        assert weights[len(used) :] == [0.0] * (topk - len(used))
    return bad


@pytest.mark.parametrize("experts,topk", [(1, 1), (4, 4), (5, 4), (16, 4), (300, 8)])
@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
def test_any_ids_give_rows_that_may_be_launched(experts, topk, id_dtype):
    """Bad ids in every slot, one call after the other with other token counts."""
    pick = random.Random(experts * topk)
    strange = [-1, -1, -2, -7, experts, experts + 1, 10**6, 2**31 - 1]
    if id_dtype is torch.int64:
        strange += [2**31, 2**32, 2**32 + 1, -(2**32) - 1, 2**63 - 1, -(2**63)]
    rows = _rows(40, topk, experts)
    expected = 0
    for tokens in (40, 3, 0, 17, 17, 1, 40):
        ids = [
            [pick.choice(strange) if pick.random() < 0.4 else pick.randrange(experts)
             for _ in range(topk)]
            for _ in range(tokens)
        ]  # fmt: skip
        batch = _batch(ids, id_dtype, topk=topk)
        launch, mask, _ = rows.fill(batch, 40)
        assert mask is None
        expected += _check(launch, batch, experts)
        assert rows.dropped() == expected
    assert expected > 20


@pytest.mark.parametrize("tokens", [0, 1, 2, 3, 6])
def test_mask(tokens):
    rows = _rows(padding="mask")
    # Also what an operator leaves behind in the ids of masked rows.
    for before in (6, 4):
        launch, mask, _ = rows.fill(_batch([[0, 1]] * before), 6)
        launch.topk_ids[mask == 0] = 12
    batch = _batch([[0, 1], [-1, -1], [5, -1], [2, 3], [9, 9], [1, 0]][:tokens])
    launch, mask, _ = rows.fill(batch, 6)
    assert _check(launch, batch, 6) == (2 if tokens == 6 else 0)
    assert mask.dtype is torch.int8
    # Row 0 always lives, since a launch without a live row is not allowed.
    assert mask.tolist() == [1, *[int(row < tokens and row not in (1, 4)) for row in range(1, 6)]]


@pytest.mark.parametrize("padding", ["zero_weight", "mask"])
def test_rows_without_a_usable_slot_come_back_as_zero(padding):
    rows = _rows(padding=padding)
    batch = _batch([[0, 1], [-1, -1], [7, -3]])
    rows.fill(batch, 5)
    rows.output.fill_(float("nan"))
    out = torch.full((3, HIDDEN), 7.0, dtype=torch.bfloat16)
    assert rows.finish(out) is out
    assert out[0].isnan().all() and not out[1:].any()
    rows.output.fill_(1.0)
    assert rows.finish(out)[0].eq(1.0).all()
    rows.fill(None, 5)
    empty = torch.empty(0, HIDDEN, dtype=torch.bfloat16)
    assert rows.finish(empty).shape == (0, HIDDEN)


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_weights_of_unusable_slots_do_not_matter(weight_dtype):
    rows = _rows()
    batch = _batch([[0, -1], [8, 3]], weight_dtype=weight_dtype)
    batch.topk_weights[0, 1] = batch.topk_weights[1, 0] = float("nan")
    launch, _, _ = rows.fill(batch, 2)
    assert launch.topk_weights.tolist() == [[1.0, 0.0], [4.0, 0.0]]
    assert launch.topk_ids[:, 0].tolist() == [0, 3]


@pytest.mark.parametrize("padding", ["zero_weight", "mask"])
def test_the_memory_stays_the_same(padding):
    """Nothing is made anew, whatever the number of tokens; and views are kept, a bounded number."""
    rows = _rows(200, padding=padding)
    held = [tensor.data_ptr() for tensor in rows.tensors]
    assert len(held) > 15
    seen = set()
    for _ in range(2):
        for tokens in range(150):
            launch, mask, _ = rows.fill(_batch([[0, 1]] * tokens), 150)
            seen.add((launch.hidden_states.data_ptr(), launch.topk_ids.data_ptr(),
                      launch.topk_weights.data_ptr()))  # fmt: skip
            assert len(rows._views) <= 64
    assert len(seen) == 1 and [tensor.data_ptr() for tensor in rows.tensors] == held
    again, _, _ = rows.fill(_batch([[0, 1]] * tokens), 150)
    assert again is launch


def test_refusals():
    for bad in ({"capacity": 0}, {"topk": 7}, {"topk": 0}):
        with pytest.raises(ConfigError, match="launch rows"):
            _rows(**bad)
    with pytest.raises(ConfigError, match="zero_weight, mask"):
        _rows(padding="none")
    rows = _rows()
    for tokens, launched in ((3, 2), (2, 7), (0, 0)):
        with pytest.raises(ConfigError, match=f"{tokens} tokens in {launched} rows"):
            rows.fill(_batch([[0, 1]] * tokens), launched)
