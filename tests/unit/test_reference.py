# SPDX-License-Identifier: Apache-2.0
"""The float64 oracle against numbers worked out by hand and its own definition in loops."""

from __future__ import annotations

import math

import numpy as np
import pytest

from xmoe.reference import bf16_error_bound, moe_reference, row_errors, tokens_per_expert


def test_two_experts_by_hand() -> None:
    # H = 1, I = 1. Expert 0: gate x, up 2x, down 3. Expert 1: gate -x, up x, down 1.
    gate_up = np.array([[[1.0, 2.0]], [[-1.0, 1.0]]])
    down = np.array([[[3.0]], [[1.0]]])
    y = moe_reference(
        np.array([[1.0], [2.0]]),
        np.array([[0, 1], [1, -1]]),
        np.array([[0.5, 0.25], [1.0, 9.0]]),
        gate_up,
        down,
    )
    first = 0.5 * 6 / (1 + math.exp(-1)) - 0.25 / (1 + math.exp(1))
    second = -4 / (1 + math.exp(2))
    assert np.allclose(y, [[first], [second]], rtol=1e-15)


def test_equals_plain_loops() -> None:
    rng = np.random.default_rng(0)
    tokens, hidden, inter, experts, topk, clamp = 6, 5, 4, 3, 2, 0.7
    x = rng.normal(size=(tokens, hidden))
    ids = rng.integers(-1, experts, (tokens, topk))
    weights = rng.random((tokens, topk))
    gate_up = rng.normal(size=(experts, hidden, 2 * inter))
    down = rng.normal(size=(experts, inter, hidden))
    want = np.zeros((tokens, hidden))
    for t in range(tokens):
        for k in range(topk):
            if ids[t, k] < 0:
                continue
            first = x[t] @ gate_up[ids[t, k]]
            for i in range(inter):
                gate = min(first[i], clamp)
                up = max(-clamp, min(first[inter + i], clamp))
                a = gate / (1 + math.exp(-gate)) * up
                want[t] += weights[t, k] * a * down[ids[t, k], i]
    got = moe_reference(x, ids, weights, gate_up, down, activation_clamp=clamp)
    assert np.allclose(got, want, rtol=1e-12)
    assert (tokens_per_expert(ids, experts) == [(ids == e).sum() for e in range(experts)]).all()
    assert (bf16_error_bound(x, ids, weights, gate_up, down, clamp) >= 0).all()


def test_row_of_unused_slots_is_zero() -> None:
    y = moe_reference(
        np.ones((1, 2)),
        np.full((1, 3), -1),
        np.ones((1, 3)),
        np.ones((2, 2, 2)),
        np.ones((2, 1, 2)),
    )
    assert not y.any()


@pytest.mark.parametrize("bad", [-2, 2, 2**40])
def test_id_out_of_range(bad: int) -> None:
    with pytest.raises(ValueError, match="topk_ids"):
        moe_reference(
            np.ones((1, 2)),
            np.array([[bad]], np.int64),
            np.ones((1, 1)),
            np.ones((2, 2, 2)),
            np.ones((2, 1, 2)),
        )


def test_shapes_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="do not fit together"):
        moe_reference(
            np.ones((1, 2)),
            np.zeros((1, 1), int),
            np.ones((1, 1)),
            np.ones((2, 2, 4)),
            np.ones((2, 1, 2)),
        )


def test_row_errors() -> None:
    want = np.array([[1.0, -4.0], [0.0, 0.0], [0.0, 0.0], [1.0, 1.0], [2.0, 0.0]])
    got = np.array([[1.0, -3.0], [0.0, 0.0], [0.1, 0.0], [np.nan, 1.0], [np.inf, 0.0]])
    assert row_errors(got, want).tolist() == [0.25, 0.0, math.inf, math.inf, math.inf]
