# SPDX-License-Identifier: Apache-2.0
"""The routed part of a MoE layer in float64: the oracle both product paths are compared with.

It shares no code with them and imports numpy only. It has no rounding mode on purpose: an oracle
that imitates a kernel's rounding would agree with that kernel's mistakes. How far a bf16 path may
be from it is stated by `bf16_error_bound` and `BF16_ROW_TOLERANCE` instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Float64 = npt.NDArray[np.float64]

#: Unit roundoff of bfloat16: 8 bits of significand, round to nearest.
BF16_ROUNDOFF = 2.0**-9

#: Unit roundoff of float32.
FP32_ROUNDOFF = 2.0**-24

#: Unit roundoff of float16, and half the distance of its smallest values.
FP16_ROUNDOFF = 2.0**-11
FP16_SMALLEST = 2.0**-25

#: Accepted max |y - reference| of one token, relative to max |reference| of that token, for paths
#: that multiply bf16 by bf16, add in float32 and store each stage in bf16.
#:
#: An expert's output passes four bf16 roundings in a row (first product, activation, second
#: product, final sum), each at most 2**-9 relative to the value rounded. The errors of the I
#: intermediate values are independent, so their sum over I grows as its square root, like a sum of
#: terms of mixed sign does: relative to the row they stay near 2**-9 each. If all four fell the
#: same way the row would be off by 4 * 2**-9 = 2**-7; cancellation between the K experts of a token
#: can make the row smaller than its terms, for which a factor of two is left. This is a judgement
#: for ordinary values, not a proof (`bf16_error_bound` is one). A wrong index is off by about 1.
BF16_ROW_TOLERANCE = 2.0**-6

#: The same for paths that turn tokens and activations into int8, compared with the reference on the
#: *dequantised* weights, so that only the activations' rounding counts.
#:
#: One value is off by up to half a step, max/127 of its row; evenly spread that is a deviation of
#: max/(127 * sqrt(12)) = max/440. An output sums H or I such errors with the same weights as the
#: values themselves, so relative to the output's own deviation the error is (max/rms)/440. Rows of
#: 1024 ordinary values have max/rms near 3.5, products of two such values, which the activation
#: gives, near 10: together sqrt(3.5**2 + 10**2)/440 = 2.4 %, and the largest error of a row stands
#: to its largest value as the deviations do. Twice that is left for rows that cancel between
#: experts. A judgement, as above; `int8_error_bound` is the proof. A wrong index is off by about 1.
INT8_ROW_TOLERANCE = 2.0**-4


def moe_reference(
    x: Array,
    topk_ids: Array,
    topk_weights: Array,
    gate_up: Array,
    down: Array,
    activation_clamp: float | None = None,
    activation: str = "swiglu",
) -> Float64:
    """Computes `y[t] = sum_k w[t, k] * (act(gate) * up) @ down[e]`, float64, k rising. Local.

    Args:
        x: [T, H] tokens; any real dtype, read as float64.
        topk_ids: [T, K] integer ids of experts; -1 = slot unused, contributes nothing.
        topk_weights: [T, K].
        gate_up: [E, H, 2I]; columns [0, I) are the gate, [I, 2I) the up projection.
        down: [E, I, H].
        activation_clamp: c > 0 bounds gate to (-inf, c] and up to [-c, c]; None or 0 = no bound.
        activation: "swiglu" (or silu, swish), "geglu" (gelu), "geglu_tanh" (gelu_pytorch_tanh).

    Returns:
        y [T, H] float64, a new array.

    Raises:
        ValueError: shapes do not fit together, an id is outside -1..E-1, or the activation is not
            one of these.
    """
    tokens, ids, weights, experts = _checked(x, topk_ids, topk_weights, gate_up, down)
    if activation not in _GATES:
        raise ValueError(f"activation {activation!r} is unknown; known are {', '.join(_GATES)}")
    y = np.zeros(tokens.shape, dtype=np.float64)
    hidden_by_expert = _outputs_by_expert(
        tokens, ids, experts, gate_up, down, activation_clamp, _GATES[activation]
    )
    for k in range(ids.shape[1]):
        for expert, (rows, outputs) in hidden_by_expert.items():
            chosen = ids[rows, k] == expert
            y[rows[chosen]] += weights[rows[chosen], k, None] * outputs[chosen]
    return y


def tokens_per_expert(topk_ids: Array, num_experts: int) -> npt.NDArray[np.int64]:
    """Counts the slots that name each expert: [E] int64. Slots of -1 count nowhere. Local."""
    ids = np.asarray(topk_ids).reshape(-1)
    return np.bincount(ids[ids >= 0], minlength=num_experts).astype(np.int64)


def row_errors(y: Array, reference: Array) -> Float64:
    """Returns max |y - reference| / max |reference| of each row, [T] float64. Local.

    A row whose reference is all zero gives 0 when `y` is zero too and infinity otherwise; a NaN in
    `y` gives infinity, so that `<=` with a tolerance is a complete check.
    """
    got = np.asarray(y, dtype=np.float64)
    want = np.asarray(reference, dtype=np.float64)
    if got.shape != want.shape:
        raise ValueError(
            f"y has shape {got.shape}, the reference {want.shape}; both must be [T, H] of one batch"
        )
    difference = np.nan_to_num(np.abs(got - want), nan=np.inf, posinf=np.inf).max(axis=1, initial=0)
    scale = np.abs(want).max(axis=1, initial=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        relative = difference / scale
    return np.where(difference == 0, 0.0, np.where(scale == 0, np.inf, relative))


def bf16_error_bound(
    x: Array,
    topk_ids: Array,
    topk_weights: Array,
    gate_up: Array,
    down: Array,
    activation_clamp: float | None = None,
) -> Float64:
    """Returns a bound on |y - reference| of each element, [T, H] float64, never exceeded. Local.

    For paths that multiply bf16 inputs, add in float32 in any order and round to bf16 after the
    first product, the activation, the second product and the weighted sum. Arguments as for
    `moe_reference`. With u = 2**-9 and v = 2**-24:

    - first product g: |dg| <= u|g| + H v (|x| @ |W1|)
    - silu has slope at most 1.1, and both halves are read after rounding:
      |da| <= 1.1 |dgate| (|up| + |dup|) + |silu(gate)| |dup| + (u + 8v) |a|, where 8v is the
      activation's own float32 arithmetic; a clamp never enlarges a difference
    - second product r: |dr| <= |da| @ |W2| + I v (|a| @ |W2|) + u|r|
    - sum: |dy| <= sum_k |w| |dr| + K v sum_k |w r| + u|y|

    Second-order terms are covered by a factor 1 + 2**-6. Errors that cancel are not counted as
    such, so the bound is several times wider than what is seen; `BF16_ROW_TOLERANCE` is the sharper
    everyday limit.
    """
    tokens, ids, weights, experts = _checked(x, topk_ids, topk_weights, gate_up, down)
    u, v = BF16_ROUNDOFF, FP32_ROUNDOFF
    hidden, topk = tokens.shape[1], ids.shape[1]
    inter = np.asarray(down).shape[1]
    bound = np.zeros(tokens.shape, dtype=np.float64)
    magnitude = np.zeros(tokens.shape, dtype=np.float64)
    for expert in experts:
        rows, slots = np.nonzero(ids == expert)
        if rows.size == 0:
            continue
        w1 = np.asarray(gate_up[expert], dtype=np.float64)
        w2 = np.abs(np.asarray(down[expert], dtype=np.float64))
        first = tokens[rows] @ w1
        d_first = u * np.abs(first) + hidden * v * (np.abs(tokens[rows]) @ np.abs(w1))
        gate, up = _clamped(first[:, :inter], first[:, inter:], activation_clamp)
        d_gate, d_up = d_first[:, :inter], d_first[:, inter:]
        act = _silu(gate) * up
        d_act = 1.1 * d_gate * (np.abs(up) + d_up) + np.abs(_silu(gate)) * d_up
        d_act += (u + 8 * v) * np.abs(act)
        out = np.abs(act @ np.asarray(down[expert], dtype=np.float64))
        d_out = d_act @ w2 + inter * v * (np.abs(act) @ w2) + u * out
        scale = np.abs(weights[rows, slots, None])
        np.add.at(bound, rows, scale * (d_out + topk * v * out))
        np.add.at(magnitude, rows, scale * out)
    return np.asarray((bound + u * (magnitude + bound)) * (1 + 2.0**-6), dtype=np.float64)


def int8_error_bound(
    x: Array,
    topk_ids: Array,
    topk_weights: Array,
    gate_up: Array,
    down: Array,
    activation_clamp: float | None = None,
    *,
    int4_weights: bool = False,
) -> Float64:
    """Returns a bound on |y - reference| of each element, [T, H] float64, never exceeded. Local.

    For the integer modes; gate_up and down are the dequantised weights, the other arguments as for
    `moe_reference`. It assumes that no product leaves float16's range. With s = max|x| / 127 of a
    row and C the column sums of |W|:

    - x is off by 0.57 s: half a step, and 1/16 for the quotient's cut to float16. So the exact
      product is off by 0.57 s C
    - it is then rounded to float16 (h = 2**-11, or 2**-25 absolute) before it is multiplied by s.
      With int4 weights the two halves of x, |high| <= |x|/(16 s) + 1.04 and |low| <= 8, are rounded
      apart, the first then multiplied by 16; the float32 bias 8 C joins them
    - the activation's error as in `bf16_error_bound`, plus 0.51 s2 with s2 = max(|a| + |da|) / 127
    - the second product like the first, then bf16; the sum as in `bf16_error_bound`

    As there, errors that cancel are not counted as such: the bound is far wider than what is seen.
    """
    tokens, ids, weights, experts = _checked(x, topk_ids, topk_weights, gate_up, down)
    u, v = BF16_ROUNDOFF, FP32_ROUNDOFF
    topk, inter = ids.shape[1], np.asarray(down).shape[1]
    bound = np.zeros(tokens.shape, dtype=np.float64)
    magnitude = np.zeros(tokens.shape, dtype=np.float64)
    for expert in experts:
        rows, slots = np.nonzero(ids == expert)
        if rows.size == 0:
            continue
        w1 = np.asarray(gate_up[expert], dtype=np.float64)
        w2 = np.asarray(down[expert], dtype=np.float64)
        own = tokens[rows]
        step = np.abs(own).max(axis=1, keepdims=True) / 127
        first, d_first = _int8_product(own, 0.57 * step, step, w1, int4_weights)
        gate, up = _clamped(first[:, :inter], first[:, inter:], activation_clamp)
        d_gate, d_up = d_first[:, :inter], d_first[:, inter:]
        act = _silu(gate) * up
        d_act = 1.1 * d_gate * (np.abs(up) + d_up) + np.abs(_silu(gate)) * d_up
        d_act += 8 * v * np.abs(act)
        step = (np.abs(act) + d_act).max(axis=1, keepdims=True) / 127
        out, d_out = _int8_product(act, d_act + 0.51 * step, step, w2, int4_weights)
        d_out += u * (np.abs(out) + d_out)
        scale = np.abs(weights[rows, slots, None])
        np.add.at(bound, rows, scale * (d_out + topk * v * np.abs(out)))
        np.add.at(magnitude, rows, scale * np.abs(out))
    return np.asarray((bound + u * (magnitude + bound)) * (1 + 2.0**-6), dtype=np.float64)


def _int8_product(
    values: Float64, error: Float64, step: Float64, weight: Float64, int4_weights: bool
) -> tuple[Float64, Float64]:
    """The exact product, and how far the computed one may be: `values` carry `error`."""
    size = np.abs(weight)
    columns = size.sum(axis=0)
    h, v = FP16_ROUNDOFF, FP32_ROUNDOFF
    exact = values @ weight
    carried = error * columns if error.shape[1] == 1 else error @ size
    if int4_weights:
        parts = np.abs(values) @ size + carried + (16 * 1.04 + 8 + 8) * step * columns
        rounding = (h + 6 * v) * parts + 17 * FP16_SMALLEST * step
    else:
        rounding = (h + 4 * v) * (np.abs(exact) + carried) + FP16_SMALLEST * step
    return np.asarray(exact, dtype=np.float64), np.asarray(carried + rounding, dtype=np.float64)


def _outputs_by_expert(
    tokens: Float64,
    ids: npt.NDArray[np.int64],
    experts: range,
    gate_up: Array,
    down: Array,
    clamp: float | None,
    gate_of: Callable[[Float64], Float64],
) -> dict[int, tuple[npt.NDArray[np.intp], Float64]]:
    """For each expert in use: the rows that name it and its output for each of them."""
    result = {}
    for expert in experts:
        rows = np.nonzero((ids == expert).any(axis=1))[0]
        if rows.size == 0:
            continue
        w2 = np.asarray(down[expert], dtype=np.float64)
        first = tokens[rows] @ np.asarray(gate_up[expert], dtype=np.float64)
        gate, up = _clamped(first[:, : w2.shape[0]], first[:, w2.shape[0] :], clamp)
        result[expert] = (rows, np.asarray((gate_of(gate) * up) @ w2, dtype=np.float64))
    return result


def _silu(value: Float64) -> Float64:
    with np.errstate(over="ignore"):  # exp(-value) may be inf: value / inf = 0 is the right limit
        return np.asarray(value / (1.0 + np.exp(-value)), dtype=np.float64)


def _gelu(value: Float64) -> Float64:
    return np.asarray(0.5 * value * (1.0 + _erf(value / math.sqrt(2.0))), dtype=np.float64)


def _gelu_tanh(value: Float64) -> Float64:
    inner = math.sqrt(2.0 / math.pi) * (value + 0.044715 * value**3)
    return np.asarray(0.5 * value * (1.0 + np.tanh(inner)), dtype=np.float64)


_erf = np.vectorize(math.erf, otypes=[np.float64])
_GATES: dict[str, Callable[[Float64], Float64]] = {
    **dict.fromkeys(("swiglu", "silu", "swish"), _silu),
    **dict.fromkeys(("geglu", "gelu"), _gelu),
    **dict.fromkeys(("geglu_tanh", "gelu_pytorch_tanh"), _gelu_tanh),
}


def _clamped(gate: Float64, up: Float64, clamp: float | None) -> tuple[Float64, Float64]:
    if not clamp:
        return gate, up
    return np.minimum(gate, clamp), np.clip(up, -clamp, clamp)


def _checked(
    x: Array, topk_ids: Array, topk_weights: Array, gate_up: Array, down: Array
) -> tuple[Float64, npt.NDArray[np.int64], Float64, range]:
    tokens = np.asarray(x, dtype=np.float64)
    ids = np.asarray(topk_ids).astype(np.int64)
    weights = np.asarray(topk_weights, dtype=np.float64)
    shapes = (tokens.shape, ids.shape, weights.shape, gate_up.shape, down.shape)
    fits = (
        [len(shape) for shape in shapes] == [2, 2, 2, 3, 3]
        and ids.shape == weights.shape
        and ids.shape[0] == tokens.shape[0]
        and gate_up.shape[0] == down.shape[0]
        and gate_up.shape[1] == down.shape[2] == tokens.shape[1]
        and gate_up.shape[2] == 2 * down.shape[1]
    )
    if not fits:
        raise ValueError(
            "shapes x, topk_ids, topk_weights, gate_up, down = "
            f"{', '.join(str(shape) for shape in shapes)} do not fit together; "
            "wanted [T, H], [T, K], [T, K], [E, H, 2I], [E, I, H]"
        )
    num_experts = gate_up.shape[0]
    if ids.size and (ids.min() < -1 or ids.max() >= num_experts):
        raise ValueError(
            f"topk_ids holds {ids.min()}..{ids.max()}; allowed are -1 (unused) and "
            f"0..{num_experts - 1}"
        )
    return tokens, ids, weights, range(num_experts)
