# SPDX-License-Identifier: Apache-2.0
"""The choice of experts from a router's logits. Local; any device; no wait for it."""

from __future__ import annotations

import torch
from torch import Tensor

from xmoe.errors import ConfigError
from xmoe.kernels.capability import NpuOperators

_NO_OPERATORS = NpuOperators()


def select_experts(
    logits: Tensor,
    topk: int,
    *,
    renormalize: bool = True,
    operators: NpuOperators = _NO_OPERATORS,
) -> tuple[Tensor, Tensor]:
    """Softmax router that keeps a bad row to itself.

    NaN and infinities are replaced by 0 before the choice, ties go to the lowest id, so each row
    gets K distinct ids whatever it holds. The weights of such a row are NaN: its output is NaN in
    that row and nowhere else. Good rows do not depend on bad ones.

    Args:
        logits: [T, E] any float type.
        operators: npu_moe_gating_top_k_softmax makes the choice where it is there; its documents
            leave open which of two equal probabilities comes first.

    Returns:
        topk_ids [T, K] int32, topk_weights [T, K] float32.
    """
    if not 1 <= topk <= logits.shape[1]:
        raise ConfigError(
            f"select_experts: topk={topk}; allowed: 1..{logits.shape[1]}; next: check the model "
            "configuration"
        )
    scores = logits.to(torch.float32)
    bad = ~torch.isfinite(scores).all(dim=1, keepdim=True)
    usable = torch.where(torch.isfinite(scores), scores, 0.0)
    if operators.gating_top_k_softmax and usable.numel():
        weights, ids, _ = torch.ops.npu.npu_moe_gating_top_k_softmax(usable, None, topk)
    else:
        # A stable sort makes "lowest id first" a property, not an accident of topk's algorithm.
        best = torch.sort(torch.softmax(usable, dim=1), dim=1, descending=True, stable=True)
        weights, ids = best.values[:, :topk], best.indices[:, :topk]
    if renormalize:
        weights = weights / weights.sum(dim=1, keepdim=True)
    return ids.to(torch.int32).contiguous(), weights.masked_fill(bad, float("nan")).contiguous()
