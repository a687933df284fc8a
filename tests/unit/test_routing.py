# SPDX-License-Identifier: Apache-2.0
"""Ids, the gated activations, and matrix products that do not depend on their company."""

from __future__ import annotations

import pytest
import torch

from xmoe.errors import ConfigError
from xmoe.kernels.ops.activation import gated_activation
from xmoe.kernels.ops.fused_moe import weighted_sum
from xmoe.kernels.ops.grouped_matmul import grouped_matmul, row_multiple
from xmoe.kernels.ops.routing import check_ids, clean_ids
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
