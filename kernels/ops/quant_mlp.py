# SPDX-License-Identifier: Apache-2.0
"""Expert arithmetic of the split path with integer weights, from the very tensors MegaMoe reads.

Rounding points are the fused operator's:

    tokens       s = max|x| / 127; x / s cut to fp16, then to an integer, halves away from 0
    products     exact integers; times the column's scale in float32, rounded to fp16
    w8a8         value * s
    w4a8         q = 16 * high + low + 8; ((16 * high part + low part) + bias) * s
    activation   float32, then s2 = max|a| / 127 and a * (127 / max|a|) to the nearest even integer
    output       float32, rounded once to the model type

A row of zeros has scale 0 and stays zero; a NaN makes its row NaN. Only exp may differ from the
fused operator's in its last bit. A row's result depends on that row and its expert alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from xmoe.errors import ConfigError
from xmoe.kernels.ops.activation import gated_activation
from xmoe.kernels.ops.quant import decode_scales, unpack_int4
from xmoe.types import ExpertWeights

# float32 holds every integer up to 2**24, and 1024 products of two int8 sum to no more: a product
# over at most this depth is exact in float32 in whatever order it is added up.
_EXACT_DEPTH = 1024


def quantised_expert_mlp(
    recv_tokens: Tensor,
    tokens_per_expert: Sequence[int],
    weights: ExpertWeights,
    *,
    activation: str = "swiglu",
    clamp: float | None = None,
    layout: str = "concatenated",
) -> Tensor:
    """Each row through its expert, as `expert_mlp`. Local.

    Args:
        recv_tokens: [R, H] model dtype, sorted by local expert.
        tokens_per_expert: L host integers that sum to R.
        weights: w8a8 or w4a8.

    Returns:
        [R, H] in the type of `recv_tokens`, new memory, not yet weighted.
    """
    hidden = weights.hidden
    if len(tokens_per_expert) != weights.num_local_experts or recv_tokens.shape[1] != hidden:
        raise ConfigError(
            f"rows {list(recv_tokens.shape)} for {len(tokens_per_expert)} experts, weights of "
            f"{weights.num_local_experts} with H={hidden}; allowed: equal; next: check the dispatch"
        )
    output = recv_tokens.new_empty(recv_tokens.shape)
    q, scale = quantise_tokens(recv_tokens)
    start = 0
    for expert, count in enumerate(tokens_per_expert):
        if count == 0:
            continue
        rows = slice(start, start + count)
        first = _product(q[rows], scale[rows], weights, expert, "gate_up")
        act = gated_activation(first, activation, clamp, layout)
        out = _product(*quantise_activation(act), weights, expert, "down")
        output[rows] = out.to(output.dtype)
        start += count
    return output


def quantise_tokens(x: Tensor) -> tuple[Tensor, Tensor]:
    """(integers as float32 [R, H], scale float32 [R, 1]) of tokens."""
    x = x.to(torch.float32)
    scale = _largest(x) / 127
    quotient = x / scale
    # Keep fp16's 11 significant bits; a quotient too small for them rounds to 0 either way.
    cut = (quotient.view(torch.int32) & ~0x1FFF).view(torch.float32)
    cut = torch.where(torch.isfinite(quotient), cut, quotient)
    return _to_int8(torch.copysign(torch.floor(cut.abs() + 0.5), cut)), scale


def quantise_activation(a: Tensor) -> tuple[Tensor, Tensor]:
    """(integers as float32 [R, I], scale float32 [R, 1]) of activations."""
    most = _largest(a)
    factor = torch.where(most > 0, 127 / most, torch.zeros_like(most))
    return _to_int8(torch.round(a * factor)), most / 127


def _largest(rows: Tensor) -> Tensor:
    return rows.abs().amax(dim=1, keepdim=True)


def _to_int8(rounded: Tensor) -> Tensor:
    # A NaN becomes 0 and the rest saturates, as in the vector unit; the row's scale keeps the NaN.
    return torch.nan_to_num(rounded, nan=0.0, posinf=127.0, neginf=-128.0).clamp(-128, 127)


def _product(q: Tensor, scale: Tensor, weights: ExpertWeights, expert: int, which: str) -> Tensor:
    """float32 [R, N] of integers [R, K] with scales [R, 1] through one stored matrix."""
    stored = getattr(weights, which)[expert]
    column = decode_scales(getattr(weights, f"{which}_scales")[expert])
    if weights.quant == "w8a8":
        blocks = stored.flatten(1, 2)  # [N/32, K, 32]
        return _to_half(_integers(q, blocks), column) * scale
    packed = stored.view(torch.int8).flatten(1, 2)
    blocks = unpack_int4(packed, weights.int4_encoding)  # [N/64, K, 64]
    high = torch.floor(q / 16)
    low = q - 16 * high - 8
    bias = getattr(weights, f"{which}_bias")[expert]
    upper = _to_half(_integers(high, blocks), column) * 16
    lower = _to_half(_integers(low, blocks), column)
    total: Tensor = ((upper + lower) + bias) * scale
    return total


def _to_half(integers: Tensor, column: Tensor) -> Tensor:
    return (integers.to(torch.float32) * column).to(torch.float16).to(torch.float32)


def _integers(q: Tensor, blocks: Tensor) -> Tensor:
    """Exact int32 [R, N] of q [R, K] and weight blocks [N/W, K, W]."""
    total = torch.zeros(
        blocks.shape[0], q.shape[0], blocks.shape[2], dtype=torch.int32, device=q.device
    )
    for part, rows in zip(q.split(_EXACT_DEPTH, 1), blocks.split(_EXACT_DEPTH, 1), strict=True):
        total += (part.unsqueeze(0) @ rows.to(torch.float32)).to(torch.int32)
    return total.transpose(0, 1).flatten(1)
