# SPDX-License-Identifier: Apache-2.0
"""What the loader of a model needs of the kernels: weights in the form asked for, and a router."""

from __future__ import annotations

from torch import Tensor

from xmoe.kernels.acl.quant_modes import quant_mode
from xmoe.kernels.capability import NpuOperators, npu_operators
from xmoe.kernels.ops.quant import quantise_experts
from xmoe.kernels.ops.router import select_experts
from xmoe.types import ExpertWeights, quant_name


def known_quant(quant: object) -> str:
    """The canonical name. Raises ConfigError for a quantisation that cannot be prepared here."""
    return quant_mode(quant_name(quant)).name


def prepared(weights: ExpertWeights, quant: str) -> ExpertWeights:
    """A layer's unquantised experts in the form that `quant` names; "none": as they are. Local.

    Raises:
        ConfigError: sizes that the form does not allow, weights that are not finite.
    """
    return quantise_experts(weights.gate_up, weights.down, quant)


def choose_experts(logits: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    """Softmax routing of [T, E] logits: topk_ids int32 [T, K], renormalised weights float32 [T, K].

    By torch_npu's gating operator for npu tensors, where there is one.
    """
    operators = npu_operators() if logits.device.type == "npu" else NpuOperators()
    return select_experts(logits, topk, operators=operators)
