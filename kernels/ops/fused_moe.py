# SPDX-License-Identifier: Apache-2.0
"""Arithmetic of the FusedMoE fallback: sort, expert MLP, weighted sum.

The three steps are what the split path puts into its recv, compute and send phases; moving rows
between ranks is the transport's affair. torch operators do all of it on any device. On npu tensors
torch_npu's own do those steps that `NpuOperators` lists, from the same inputs to the same outputs.
Rounding points, the same as the fused operator's unquantised form (integer weights: see quant_mlp
and npu_quant):

    gate_up product   float32 accumulation, rounded to the model type
    activation        float32 on the rounded values, rounded to the model type
    down product      float32 accumulation, rounded to the model type
    weighted sum      float32, k = 0 .. K-1 in this order, a multiplication and an addition each,
                      rounded to the model type once at the end

In deterministic mode a token's output is a function of the token, its experts and their weights
only: not of the other tokens, their number, or the EP size.

torch_npu's documents state sums and products, not where they round. On the software device the
bytes are equal; on an NPU they may differ in a last bit, and in the sign of a zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

import torch
from torch import Tensor

from xmoe.kernels.capability import NpuOperators
from xmoe.kernels.ops.activation import gated_activation
from xmoe.kernels.ops.grouped_matmul import (
    grouped_matmul,
    host_counts,
    require_independent_rows,
)
from xmoe.kernels.ops.npu_quant import GatedMlp, NpuIntegerExperts, fits_operators
from xmoe.kernels.ops.quant_mlp import quantised_expert_mlp
from xmoe.types import ExpertWeights

_NO_OPERATORS = NpuOperators()


class _How(TypedDict):
    deterministic: bool
    operators: NpuOperators


@dataclass(frozen=True)
class RoutedRows:
    """Every (token, slot) pair's row in expert order; unused slots come last. All on one device.

    rows: [T*K, H], sorted by expert, then by t * K + k. places: int32 [T*K], where slot t * K + k
        went. counts: int64 [E], used slots of each expert; rows[:counts.sum()] are theirs.
    """

    rows: Tensor
    places: Tensor
    counts: Tensor


def route_rows(
    hidden_states: Tensor,
    topk_ids: Tensor,
    num_experts: int,
    operators: NpuOperators = _NO_OPERATORS,
) -> RoutedRows:
    """Copy each slot's row to its place in expert order, stably. Local, no wait for the device.

    Args:
        hidden_states: [T, H].
        topk_ids: int32 [T, K] in [-1, E); -1 slots go to the end.
    """
    topk = topk_ids.shape[1]
    # Unused slots are one more expert, so that every slot has a place.
    keys = torch.where(topk_ids < 0, num_experts, topk_ids)
    if operators.init_routing and keys.numel():
        # The range is given: torch_npu remembers the first call's when it is left out.
        rows, places, counts, _ = torch.ops.npu.npu_moe_init_routing_v2(
            hidden_states.contiguous(), keys.to(torch.int32), active_num=keys.numel(),
            expert_num=num_experts + 1, drop_pad_mode=0, expert_tokens_num_type=1,
            expert_tokens_num_flag=True, quant_mode=-1, active_expert_range=[0, num_experts + 1],
            row_idx_type=0,
        )  # fmt: skip
        return RoutedRows(rows, places, counts[:num_experts])
    flat = keys.reshape(-1).to(torch.int64)
    order = torch.argsort(flat, stable=True)
    places = torch.empty_like(order)
    places[order] = torch.arange(flat.numel(), device=flat.device)
    counts = torch.bincount(flat, minlength=num_experts + 1)[:num_experts]
    rows = hidden_states.index_select(0, order // max(1, topk))
    return RoutedRows(rows, places.to(torch.int32), counts)


def sum_rows(
    rows: Tensor,
    places: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    operators: NpuOperators = _NO_OPERATORS,
) -> Tensor:
    """Each token's weighted sum over its slots: [T, H] in the type of `rows`, new memory. Local.

    Args:
        rows: [T*K, H], ordered as `route_rows` did; rows of unused slots are zeros.
        topk_weights: float32 [T, K], 0 for unused slots.
    """
    if operators.token_unpermute and rows.numel():
        summed: Tensor = torch.ops.npu.npu_moe_token_unpermute(rows, places, topk_weights)
        return summed
    slots = rows.index_select(0, places.to(torch.int64))
    return weighted_sum(slots.view(*topk_ids.shape, rows.shape[1]), topk_ids, topk_weights)


class SplitExperts:
    """One layer's experts on the split path; what runs them is settled here, before any step.

    Args:
        weights: of this rank; held, not copied.
        operators: those of the weights' device.

    Raises:
        ConfigError: deterministic, and the device's operator cannot be.
    """

    def __init__(
        self,
        weights: ExpertWeights,
        *,
        activation: str = "swiglu",
        clamp: float | None = None,
        layout: str = "concatenated",
        deterministic: bool = True,
        operators: NpuOperators = _NO_OPERATORS,
    ) -> None:
        self._weights = weights
        self._how: GatedMlp = {"activation": activation, "clamp": clamp, "layout": layout}
        self._deterministic = deterministic
        self._operators = operators
        self._integers: NpuIntegerExperts | None = None
        if weights.quant == "none":
            if deterministic:
                require_independent_rows(weights.gate_up, operators)
                require_independent_rows(weights.down, operators)
        elif operators.integers and fits_operators(weights):
            self._integers = NpuIntegerExperts(weights, operators, **self._how)

    def __call__(self, recv_tokens: Tensor, tokens_per_expert: Sequence[int] | Tensor) -> Tensor:
        """As `expert_mlp`."""
        if self._integers is not None:
            return self._integers(recv_tokens, tokens_per_expert)
        return expert_mlp(
            recv_tokens, tokens_per_expert, self._weights, deterministic=self._deterministic,
            operators=self._operators, **self._how,
        )  # fmt: skip


def expert_mlp(
    recv_tokens: Tensor,
    tokens_per_expert: Sequence[int] | Tensor,
    weights: ExpertWeights,
    *,
    activation: str = "swiglu",
    clamp: float | None = None,
    layout: str = "concatenated",
    deterministic: bool = True,
    operators: NpuOperators = _NO_OPERATORS,
) -> Tensor:
    """Each row through its expert: down(act(gate) * up). Local.

    Args:
        recv_tokens: [R, H] sorted by local expert.
        tokens_per_expert: L integers, or int64 [L] on any device.
        weights: gate_up [L, H, 2I], down [L, I, H]; or integer ones, for which `deterministic` does
            not matter: their products are exact.

    Returns:
        [R, H], new memory, not yet weighted.
    """
    if weights.quant != "none":
        return quantised_expert_mlp(
            recv_tokens, host_counts(tokens_per_expert), weights, activation=activation,
            clamp=clamp, layout=layout,
        )  # fmt: skip
    how: _How = {"deterministic": deterministic, "operators": operators}
    gate_up = grouped_matmul(recv_tokens, tokens_per_expert, weights.gate_up, **how)
    hidden = gated_activation(gate_up, activation, clamp, layout, operators)
    return grouped_matmul(hidden, tokens_per_expert, weights.down, **how)


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
