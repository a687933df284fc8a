# SPDX-License-Identifier: Apache-2.0
"""Training-time replacements for the slow parts of the reference model; same mathematics.

* The chunked delta rule pads every sequence to 64 tokens and solves a triangular system, which
  takes three quarters of a step on a CPU. A sum has about 15 tokens: the whole sequence becomes
  one chunk that starts from an empty state, and the unit triangular matrix is inverted by a few
  batched products.
* The experts of the reference loop over a one-hot mask. Here pairs are sorted by expert once, and
  rows that are padding are left out.

The saved model never sees any of this: accuracy is measured with the untouched library.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

EXPERTS_NAME = "xmoe_training"


class Recorder:
    """What a training step adds to the forward pass: which rows matter, and router outputs.

    `rows` are the tokens that are not padding; `last_rows` those that are scored, the only ones
    for which the experts of the last layer can change anything.
    """

    def __init__(self) -> None:
        self.rows: Tensor | None = None
        self.last_rows: Tensor | None = None
        self.router: list[tuple[Tensor, Tensor]] = []

    def balance_loss(self, num_experts: int) -> Tensor:
        """The usual load-balancing loss: 1 when all experts get the same share."""
        total = torch.zeros(())
        for layer, (logits, ids) in enumerate(self.router):
            rows = self.last_rows if layer + 1 == len(self.router) else self.rows
            if rows is not None:
                logits, ids = logits.index_select(0, rows), ids[rows]
            share = torch.bincount(ids.flatten(), minlength=num_experts).float() / ids.numel()
            probability = logits.float().softmax(-1).mean(0)
            total = total + num_experts * (share * probability).sum()
        return total / max(len(self.router), 1)

    def router_z_loss(self) -> Tensor:
        """Keeps router logits small, so that bf16 rounding cannot change many choices."""
        total = torch.zeros(())
        for logits, _ in self.router:
            total = total + logits.float().logsumexp(-1).square().mean()
        return total / max(len(self.router), 1)


def one_chunk_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **_: Any
) -> tuple[Tensor, None]:
    """The gated delta rule over whole sequences that start from an empty state.

    Args:
        query: [B, S, heads, D]; normalised and scaled here.
        key: [B, S, heads, D]; normalised here.
        value: [B, S, value heads, Dv].
        g: [B, S, value heads]; logarithm of the decay.
        beta: [B, S, value heads].

    Returns:
        [B, S, value heads, Dv], and no state.
    """
    repeat = value.shape[2] // key.shape[2]
    query, key = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (query, key))
    query, key = (x.repeat_interleave(repeat, dim=2).transpose(1, 2).float() for x in (query, key))
    value, g, beta = (x.transpose(1, 2).float() for x in (value, g, beta))
    length = query.shape[2]
    total = g.cumsum(-1)
    above = torch.ones(length, length, dtype=torch.bool).triu(1)
    decay = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(above, float("-inf")).exp()
    keys = key.transpose(-1, -2)
    power = -((key * beta.unsqueeze(-1)) @ keys * decay).tril(-1)
    # (1 - N)^-1 = (1 + N)(1 + N^2)(1 + N^4)...: exact, since N^length = 0.
    solution = value * beta.unsqueeze(-1)
    reach = 1
    while reach < length:
        solution = solution + power @ solution
        reach *= 2
        if reach < length:
            power = power @ power
    scores = (query * query.shape[-1] ** -0.5) @ keys * decay
    return (scores @ solution).transpose(1, 2).to(query.dtype), None


class _SpreadRows(torch.autograd.Function):
    """Row `order[i] // topk` for every i. The gradient of plain indexing adds row by row; here
    `order` is a permutation, so the gradient is a gather and a sum."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, order: Tensor, inverse: Tensor, topk: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.topk = topk
        return hidden.index_select(0, order // topk)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (inverse,) = ctx.saved_tensors
        spread = grads[0].index_select(0, inverse)
        return spread.view(-1, ctx.topk, spread.shape[1]).sum(1), None, None, None


class _Permute(torch.autograd.Function):
    """`x[inverse]` whose gradient is `grad[order]`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return x.index_select(0, inverse)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (order,) = ctx.saved_tensors
        return grads[0].index_select(0, order), None, None


# `apply` has no annotations in torch.
_spread_rows: Callable[[Tensor, Tensor, Tensor, int], Tensor] = _SpreadRows.apply
_permute: Callable[[Tensor, Tensor, Tensor], Tensor] = _Permute.apply


def sorted_experts(module: Any, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Routed experts, each on the rows that chose it.

    Args:
        module: the experts module (`gate_up_proj` [E, 2I, H], `down_proj` [E, H, I]).
        hidden: [T, H].
        ids: [T, K].
        weights: [T, K].

    Returns:
        [T, H]
    """
    tokens, topk = ids.shape
    flat = ids.reshape(-1)
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat, minlength=module.num_experts).tolist()
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel())
    rows = _spread_rows(hidden, order, inverse, topk)
    outputs = []
    # unbind, not indexing: the gradient of an index is a full-size tensor per expert.
    for part, gate_up, down in zip(
        rows.split(counts), module.gate_up_proj.unbind(0), module.down_proj.unbind(0), strict=True
    ):
        gate, up = F.linear(part, gate_up).chunk(2, -1)
        outputs.append(F.linear(F.silu(gate) * up, down))
    result = _permute(torch.cat(outputs), order, inverse)
    return torch.bmm(weights.unsqueeze(1), result.view(tokens, topk, -1)).squeeze(1)


@contextlib.contextmanager
def fast_training(model: Any) -> Iterator[Recorder]:
    """Swaps the slow parts for the duration of the block and yields the recorder."""
    from transformers.integrations.moe import ExpertsInterface
    from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as library

    recorder = Recorder()
    last = model.model.layers[-1].mlp.experts
    reference = library.torch_chunk_gated_delta_rule

    def experts(module: Any, hidden: Tensor, ids: Tensor, weights: Tensor, **_: Any) -> Tensor:
        rows = recorder.last_rows if module is last else recorder.rows
        if rows is None:
            return sorted_experts(module, hidden, ids, weights)
        part = sorted_experts(
            module, hidden.index_select(0, rows), ids[rows], weights.index_select(0, rows)
        )
        return torch.zeros_like(hidden).index_copy(0, rows, part)

    def keep_router(_module: Any, _inputs: Any, output: Any) -> None:
        recorder.router.append((output[0], output[2]))

    hooks = [layer.mlp.gate.register_forward_hook(keep_router) for layer in model.model.layers]
    before = model.get_experts_implementation()
    ExpertsInterface.register(EXPERTS_NAME, experts)
    model.set_experts_implementation(EXPERTS_NAME)
    library.torch_chunk_gated_delta_rule = one_chunk_delta_rule
    try:
        yield recorder
    finally:
        library.torch_chunk_gated_delta_rule = reference
        for hook in hooks:
            hook.remove()
        model.set_experts_implementation(
            before.get("", "eager") if isinstance(before, dict) else before
        )
        ExpertsInterface._global_mapping.pop(EXPERTS_NAME, None)
