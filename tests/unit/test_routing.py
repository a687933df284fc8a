# SPDX-License-Identifier: Apache-2.0
"""Ids, padding, the gated activations, and matrix products that do not depend on their company."""

from __future__ import annotations

import pytest
import torch

from xmoe.errors import ConfigError
from xmoe.kernels.ops.activation import gated_activation
from xmoe.kernels.ops.fused_moe import weighted_sum
from xmoe.kernels.ops.grouped_matmul import grouped_matmul, row_multiple
from xmoe.kernels.ops.routing import (
    check_ids,
    clean_ids,
    fill_unused,
    pad_batch,
    padding_counts,
    select_experts,
    unpad,
)
from xmoe.types import TokenBatch


def _batch(ids, hidden=8, dtype=torch.bfloat16, id_dtype=torch.int32):
    ids = torch.tensor(ids, dtype=id_dtype)
    return TokenBatch(torch.ones(ids.shape[0], hidden, dtype=dtype), ids, torch.ones(ids.shape))


@pytest.mark.parametrize("bad", [-7, 8, 9, 10**6, 2**31 - 1, 2**32 + 1, -(2**32) - 1])
def test_out_of_range_ids_are_found_before_narrowing(bad):
    batch = _batch([[0, 1], [2, bad]], id_dtype=torch.int64)
    found = check_ids(batch.topk_ids, 8)
    assert found.out_of_range == 1 and found.duplicated == 0
    assert str(bad) in found.sentence(8) and "row 1, slot 1" in found.sentence(8)
    cleaned, dropped = clean_ids(batch, 8)
    assert dropped == 1 and cleaned.topk_ids.tolist() == [[0, 1], [2, -1]]
    assert cleaned.topk_ids.dtype == torch.int32 and cleaned.topk_weights[1, 1] == 0


def test_unused_slots_are_no_problem_and_repeats_are():
    assert not check_ids(torch.tensor([[-1, -1], [3, -1]]), 4)
    assert not check_ids(torch.empty(0, 8, dtype=torch.int32), 4)
    found = check_ids(torch.tensor([[3, 3, 3], [1, 2, 1]]), 4)
    assert found.duplicated == 3 and found.out_of_range == 0
    cleaned, dropped = clean_ids(_batch([[3, 3, 3], [1, 2, 1]]), 4)
    assert dropped == 3 and cleaned.topk_ids.tolist() == [[3, -1, -1], [1, 2, -1]]


@pytest.mark.parametrize("experts,topk", [(4, 4), (5, 4), (16, 4), (300, 8)])
def test_filled_rows_are_distinct(experts, topk):
    g = torch.Generator().manual_seed(0)
    ids = torch.stack([torch.randperm(experts, generator=g)[:topk] for _ in range(200)])
    ids[torch.rand(ids.shape, generator=g) < 0.5] = -1
    filled = fill_unused(ids.to(torch.int32), experts)
    assert filled.dtype == torch.int32 and not check_ids(filled, experts)
    assert ((filled >= 0) & ((filled == ids) | (ids < 0))).all()
    with pytest.raises(ConfigError, match="topk"):
        fill_unused(torch.full((1, 4), -1, dtype=torch.int32), 3)


@pytest.mark.parametrize("padding", ["zero_weight", "mask"])
@pytest.mark.parametrize("tokens", [0, 1, 3, 6])
def test_padding(padding, tokens):
    ids = [[0, 1], [5, -1], [-1, -1], [2, 3], [4, 5], [1, 0]][:tokens]
    batch = (
        _batch(ids)
        if ids
        else TokenBatch(
            torch.empty(0, 8, dtype=torch.bfloat16),
            torch.empty(0, 2, dtype=torch.int32),
            torch.empty(0, 2),
        )
    )
    padded = pad_batch(batch, 6, padding, num_experts=6)
    inner = padded.batch
    assert inner.hidden_states.shape == (6, 8) and inner.topk_ids.shape == (6, 2)
    assert not check_ids(inner.topk_ids, 6) and (inner.topk_ids >= 0).all()
    assert (inner.hidden_states[tokens:] == 0).all() and (inner.topk_weights[tokens:] == 0).all()
    assert inner.topk_ids.data_ptr() != batch.topk_ids.data_ptr()
    if tokens > 2:
        assert inner.topk_weights[1].tolist() == [1, 0] and inner.topk_weights[2].tolist() == [0, 0]
    if padding == "mask":
        assert padded.mask.dtype == torch.int8 and padded.mask.sum() >= 1
        if tokens == 0:
            assert padded.mask.tolist() == [1, 0, 0, 0, 0, 0]
        elif tokens == 3:
            assert padded.mask.tolist() == [1, 1, 0, 0, 0, 0]
    else:
        assert padded.mask is None
    poisoned = torch.full((6, 8), float("nan"))
    out = unpad(poisoned, padded)
    assert out.shape == (tokens, 8) and (not tokens or out.data_ptr() != poisoned.data_ptr())
    if padding == "mask" and tokens > 2:
        assert (out[2] == 0).all() and out[0].isnan().all()


def test_padding_refuses():
    batch = _batch([[0, 1], [1, 2]])
    with pytest.raises(ConfigError, match="capacity=1"):
        pad_batch(batch, 1, num_experts=4)
    with pytest.raises(ConfigError, match="zero_weight, mask"):
        pad_batch(batch, 2, "none", num_experts=4)


@pytest.mark.parametrize("padding", ["zero_weight", "mask"])
def test_padding_counts_match_what_padding_adds(padding):
    tokens, capacity = [0, 2, 5], 5
    added = torch.zeros(7, dtype=torch.int64)
    for count in tokens:
        ids = torch.tensor([[0, 1, 2]] * count, dtype=torch.int32).reshape(count, 3)
        batch = TokenBatch(torch.ones(count, 4), ids, torch.ones(count, 3))
        padded = pad_batch(batch, capacity, padding, num_experts=7)
        rows = padded.batch.topk_ids[count:]
        if padded.mask is not None:
            rows = rows[padded.mask[count:] == 1]
        added += torch.bincount(rows.flatten().long(), minlength=7)
    assert torch.equal(added, padding_counts(tokens, capacity, 3, padding, num_experts=7))


def test_router_keeps_bad_rows_to_themselves():
    """V6.1."""
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 16, generator=g)
    clean_ids_, clean_weights, bad = select_experts(logits, 4)
    assert bad == 0
    logits[0], logits[2], logits[4] = float("nan"), float("inf"), float("-inf")
    logits[5] = 1.5
    ids, weights, bad = select_experts(logits, 4)
    assert bad == 3 and not check_ids(ids, 16)
    for row in (0, 2, 4, 5):
        assert ids[row].tolist() == [0, 1, 2, 3]
    for row in (1, 3):
        assert torch.equal(ids[row], clean_ids_[row])
        assert torch.equal(weights[row], clean_weights[row])
    assert weights[[0, 2, 4]].isnan().all() and weights[5].tolist() == [0.25] * 4
    with pytest.raises(ConfigError):
        select_experts(logits, 17)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_do_not_depend_on_their_company(dtype):
    g = torch.Generator().manual_seed(0)
    weight = (torch.randn(1, 80, 48, generator=g) / 8).to(dtype)
    rows = torch.randn(70, 80, generator=g).to(dtype)
    whole = grouped_matmul(rows, [70], weight)
    assert row_multiple(80, 48, dtype, torch.device("cpu")) != 0
    for count in (1, 2, 3, 4, 5, 7, 16, 33, 69):
        for start in (0, 1, 70 - count):
            part = grouped_matmul(rows[start : start + count], [count], weight)
            assert torch.equal(part, whole[start : start + count])
    exact = rows.double() @ weight[0].double()
    assert torch.allclose(whole.double(), exact, rtol=1e-2, atol=1e-2)
    acts = gated_activation(whole)
    for count in (1, 2, 3, 5):
        assert torch.equal(gated_activation(whole[:count]), acts[:count])


def test_grouped_matmul_takes_each_rows_expert():
    weight = torch.stack([torch.eye(3) * (e + 1) for e in range(4)])
    rows = torch.ones(5, 3)
    out = grouped_matmul(rows, [2, 0, 1, 2], weight)
    assert out[:, 0].tolist() == [1, 1, 3, 4, 4]
    assert grouped_matmul(rows[:0], [0, 0, 0, 0], weight).shape == (0, 3)
    for counts, w in (([5, 0, 0], weight), ([4, 0, 0, 0], weight), ([5, 0, 0, 0], weight.double())):
        with pytest.raises(ConfigError):
            grouped_matmul(rows, counts, w)


def test_activations_and_clamp():
    gate = torch.tensor([[-20.0, -1.0, 0.5, 20.0]])
    up = torch.tensor([[20.0, -20.0, 1.0, 3.0]])
    joined = torch.cat([gate, up], dim=1)
    mixed = torch.stack([gate, up], dim=2).reshape(1, 8)
    clamped = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    for name, function in (
        ("swiglu", torch.nn.functional.silu),
        ("silu", torch.nn.functional.silu),
        ("geglu", torch.nn.functional.gelu),
        ("gelu_pytorch_tanh", lambda g: torch.nn.functional.gelu(g, approximate="tanh")),
    ):
        assert torch.allclose(gated_activation(joined, name), function(gate) * up)
        assert torch.allclose(
            gated_activation(mixed, name, layout="interleaved"), function(gate) * up
        )
        want = function(clamped[0]) * clamped[1]
        assert torch.allclose(gated_activation(joined, name, clamp=7.0), want)
    with pytest.raises(ConfigError, match="relu2"):
        gated_activation(joined, "relu2")
    with pytest.raises(ConfigError, match="gate_up_layout"):
        gated_activation(joined, layout="stacked")


def test_weighted_sum_leaves_unused_slots_out():
    outputs = torch.tensor([[[1.0], [float("nan")]], [[2.0], [3.0]]])
    ids = torch.tensor([[0, -1], [1, 2]], dtype=torch.int32)
    weights = torch.tensor([[0.5, float("nan")], [1.0, 2.0]])
    assert weighted_sum(outputs, ids, weights).flatten().tolist() == [0.5, 8.0]
