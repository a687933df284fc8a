# SPDX-License-Identifier: Apache-2.0
"""A model made of timed test kernels: runs the loops where there is no real one.

FFN: a row of global expert e becomes row * (0.9 + 0.05 * (layer mod 4) + 0.1 * e / E); without a
gate on this side e is 0. Attention: row * (1.0 or 1.0625). So a row that went to a wrong expert,
layer or stage shows in the result. Kernels hold cores for a given time; that time is ours, no
operator's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from xmoe.kernels.ops.cam.soft import SoftCam
from xmoe.kernels.ops.torch_stream import on_stream
from xmoe.pipeline.adapters.base import UNKNOWN_LAYER, AttentionOutput, FfnInput

_BASE, _EACH_LAYER, _EXPERTS, _SHARED = 0.9, 0.05, 0.1, 3.0


def expert_factor(layer: int, expert: int, num_experts: int) -> float:
    """What the FFN multiplies a row of `expert` by."""
    return _BASE + _EACH_LAYER * (layer % 4) + _EXPERTS * expert / num_experts


def attention_factor(layer: int, stage: int) -> float:
    """What Attention multiplies a row by."""
    return 1.0 if (layer + stage) % 2 else 1.0625


@dataclass(frozen=True)
class SyntheticFfn:
    """Experts [first_expert, ...) of `num_experts`."""

    kernels: SoftCam
    num_experts: int
    first_expert: int = 0
    microseconds: int = 100
    vector_cores: int = 8
    device_metadata: bool = True

    def compute(self, item: FfnInput, out: Tensor, stream: int) -> None:
        """See FfnModel. Where the host does not know the layer, the kernel reads it."""
        share = _EXPERTS / self.num_experts
        unread = item.layer == UNKNOWN_LAYER
        base, each = _BASE + share * self.first_expert, _EACH_LAYER
        if item.shared:
            base, each = _SHARED, 0.0
        counted = item.tokens_per_expert is not None
        self.kernels.timed_kernel(
            stream=stream,
            microseconds=self.microseconds,
            vector_cores=self.vector_cores,
            tag=item.layer,
            rows=item.hidden_states,
            scales=item.scales,
            tokens_per_expert=item.tokens_per_expert,
            out=out,
            # The same sum as the kernel's own, so that both give the same bits.
            alpha=base if unread else base + each * (item.layer % 4),
            beta=share if counted and not item.shared else 0.0,
            batch_info=item.batch_info if unread else None,
            gamma=each if unread else 0.0,
        )


def route(
    seed: int, layer: int, stage: int, tokens: int, topk: int, num_experts: int, routing: str
) -> tuple[Tensor, Tensor]:
    """topk_ids int32 and topk_weights float32 of one batch: "mixed", "skewed", "one" or "low".

    skewed: most tokens to a few experts; one: all to the last; low: all to the first `topk`, so
    that the FFN ranks above have none.
    """
    generator = torch.Generator().manual_seed(seed * 7919 + layer * 31 + stage)
    score = torch.rand(tokens, num_experts, generator=generator)
    if routing == "skewed":
        score -= torch.arange(num_experts) * 0.2
    ids = score.argsort(dim=1, descending=True)[:, :topk].to(torch.int32)
    if routing == "low":
        ids = torch.arange(topk, dtype=torch.int32).repeat(tokens, 1)
    elif routing == "one":
        ids = torch.full_like(ids, num_experts - 1)
    weights = torch.rand(tokens, topk, generator=generator) + 0.5
    return ids.contiguous(), (weights / weights.sum(dim=1, keepdim=True)).contiguous()


@dataclass(frozen=True)
class SyntheticAttention:
    """Multiplies rows, and routes them where the connector's gate is on this side."""

    kernels: SoftCam
    seed: int
    topk: int
    num_experts: int
    gate: bool
    routing: str = "mixed"
    microseconds: int = 100
    vector_cores: int = 8

    def compute(
        self, hidden_states: Tensor, layer: int, stage: int, stream: int
    ) -> AttentionOutput:
        """See AttentionModel."""
        device = hidden_states.device
        with on_stream(device, stream):
            out = torch.empty_like(hidden_states)
        self.kernels.timed_kernel(
            stream=stream,
            microseconds=self.microseconds,
            vector_cores=self.vector_cores,
            tag=layer,
            rows=hidden_states,
            out=out,
            alpha=attention_factor(layer, stage),
        )
        if not self.gate:
            return AttentionOutput(out)
        tokens = hidden_states.shape[0]
        ids, weights = route(
            self.seed, layer, stage, tokens, self.topk, self.num_experts, self.routing
        )
        with on_stream(device, stream):
            return AttentionOutput(out, ids.to(device), weights.to(device))
