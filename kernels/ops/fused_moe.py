# SPDX-License-Identifier: Apache-2.0
"""Arithmetic of the FusedMoE fallback: sort, expert MLP, weighted sum. torch operators only.

The three steps are what the split path puts into its recv, compute and send phases; moving rows
between ranks is the transport's affair. Rounding points, the same as the fused operator's
unquantised form (integer weights: see quant_mlp):

    gate_up product   float32 accumulation, rounded to the model type
    activation        float32 on the rounded values, rounded to the model type
    down product      float32 accumulation, rounded to the model type
    weighted sum      float32, k = 0 .. K-1 in this order, a multiplication and an addition each,
                      rounded to the model type once at the end

In deterministic mode a token's output is a function of the token, its experts and their weights
only: not of the other tokens, their number, or the EP size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from xmoe.kernels.ops.activation import gated_activation
from xmoe.kernels.ops.grouped_matmul import grouped_matmul
from xmoe.kernels.ops.quant_mlp import quantised_expert_mlp
from xmoe.types import ExpertWeights


@dataclass(frozen=True)
class SortedSlots:
    """Used (token, slot) pairs in expert order.

    pairs: int64 [S], t * K + k, ordered by expert, then by t * K + k. counts: int64 [E] on the
        host.
    """

    pairs: Tensor
    counts: Tensor


def sort_slots(topk_ids: Tensor, num_experts: int) -> SortedSlots:
    """Order the used slots by expert, stably. Copies the counts to the host.

    Args:
        topk_ids: [T, K] ids in [-1, E); -1 slots are left out.
    """
    flat = topk_ids.reshape(-1).to(torch.int64)
    keys = torch.where(flat < 0, num_experts, flat)
    order = torch.argsort(keys, stable=True)
    counts = torch.bincount(keys, minlength=num_experts + 1)[:num_experts].cpu()
    return SortedSlots(order[: int(counts.sum())], counts)


def expert_mlp(
    recv_tokens: Tensor,
    tokens_per_expert: Sequence[int],
    weights: ExpertWeights,
    *,
    activation: str = "swiglu",
    clamp: float | None = None,
    layout: str = "concatenated",
    deterministic: bool = True,
) -> Tensor:
    """Each row through its expert: down(act(gate) * up). Local.

    Args:
        recv_tokens: [R, H] sorted by local expert.
        tokens_per_expert: L host integers.
        weights: gate_up [L, H, 2I], down [L, I, H]; or integer ones, for which `deterministic` does
            not matter: their products are exact.

    Returns:
        [R, H], new memory, not yet weighted.
    """
    if weights.quant != "none":
        return quantised_expert_mlp(
            recv_tokens, tokens_per_expert, weights, activation=activation, clamp=clamp,
            layout=layout,
        )  # fmt: skip
    gate_up = grouped_matmul(
        recv_tokens, tokens_per_expert, weights.gate_up, deterministic=deterministic
    )
    hidden = gated_activation(gate_up, activation, clamp, layout)
    return grouped_matmul(hidden, tokens_per_expert, weights.down, deterministic=deterministic)


def weighted_sum(slot_outputs: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
    """sum over k of topk_weights[t, k] * slot_outputs[t, k], unused slots left out. Local.

    Args:
        slot_outputs: [T, K, H]; what unused slots hold is not looked at.
        topk_weights: [T, K] float32.

    Returns:
        [T, H] in the type of `slot_outputs`.
    """
    num_tokens, topk, hidden = slot_outputs.shape
    total = torch.zeros(num_tokens, hidden, dtype=torch.float32, device=slot_outputs.device)
    used = topk_ids >= 0
    for k in range(topk):
        # Two roundings on purpose: a fused multiply-add would depend on where the element stands.
        term = slot_outputs[:, k].to(torch.float32) * topk_weights[:, k : k + 1]
        total = total + term.masked_fill(~used[:, k : k + 1], 0.0)
    return total.to(slot_outputs.dtype)
