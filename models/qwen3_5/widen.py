# SPDX-License-Identifier: Apache-2.0
"""Exact widening: a narrow model as a wider one that computes the same function.

The operator accepts hidden sizes from 1024 and intermediate sizes from 512 on. A narrow model runs
there after padding with zeros:

* hidden H -> H': every weight that reads or writes the hidden state gets zero columns or rows, so
  the added part of the state is always zero;
* a norm over the hidden state divides by the root of the mean square, which the zeros make smaller
  by H/H'. Its scale is multiplied by sqrt(H/H') and its epsilon by H/H', which undoes that;
* intermediate I -> I': the added gate and up columns give silu(0) * 0 = 0.

What is per head stays as it is. Scales are kept in float32: 1 + w is near 1/2 after widening by
four, and bf16 would lose the small w.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from xmoe.errors import ConfigError
from xmoe.models.qwen3_5.config import text_config
from xmoe.types import MoeShape

if TYPE_CHECKING:
    from torch import Tensor

_COLUMNS = (
    "embed_tokens.weight", "lm_head.weight", "mlp.gate.weight", "shared_expert.gate_proj.weight",
    "shared_expert.up_proj.weight", "shared_expert_gate.weight", "self_attn.q_proj.weight",
    "self_attn.k_proj.weight", "self_attn.v_proj.weight", "linear_attn.in_proj_qkv.weight",
    "linear_attn.in_proj_z.weight", "linear_attn.in_proj_b.weight", "linear_attn.in_proj_a.weight",
)  # fmt: skip
_ROWS = (
    "self_attn.o_proj.weight", "self_attn.o_proj.bias", "linear_attn.out_proj.weight",
    "shared_expert.down_proj.weight",
)  # fmt: skip
_KEPT = (
    "self_attn.q_norm.weight", "self_attn.k_norm.weight", "self_attn.q_proj.bias",
    "self_attn.k_proj.bias", "self_attn.v_proj.bias", "linear_attn.conv1d.weight",
    "linear_attn.dt_bias", "linear_attn.A_log", "linear_attn.norm.weight",
)  # fmt: skip


@dataclass(frozen=True)
class Widening:
    """Old and new sizes."""

    hidden: int
    wide_hidden: int
    intermediate: int
    wide_intermediate: int

    @property
    def mean_factor(self) -> float:
        """By how much the mean square over the hidden state shrinks: H / H'."""
        return self.hidden / self.wide_hidden


def is_hidden_norm(name: str) -> bool:
    """Tells the norms over the hidden state from those over a head."""
    return name == "model.norm.weight" or name.endswith("layernorm.weight")


def plan_widening(shape: MoeShape, target: tuple[int, int] | None) -> Widening | None:
    """What has to grow so that the model has at least the target sizes.

    Args:
        shape: the model as stored.
        target: least (hidden, intermediate), or None.

    Returns:
        None when nothing has to grow.

    Raises:
        ConfigError: a size below 1.
    """
    if target is None:
        return None
    if min(target) < 1:
        raise ConfigError(
            f"widen is {target}; two positive sizes (hidden, intermediate) are allowed; "
            "use None to keep the sizes"
        )
    plan = Widening(
        shape.hidden,
        max(shape.hidden, target[0]),
        shape.intermediate,
        max(shape.intermediate, target[1]),
    )
    same = plan.hidden == plan.wide_hidden and plan.intermediate == plan.wide_intermediate
    return None if same else plan


def widened_shape(shape: MoeShape, plan: Widening | None) -> MoeShape:
    """The shape that the layers see."""
    if plan is None:
        return shape
    return replace(shape, hidden=plan.wide_hidden, intermediate=plan.wide_intermediate)


def widened_config(config: Mapping[str, Any], plan: Widening | None) -> dict[str, Any]:
    """The text config with the new sizes. `rms_norm_eps` stays: it also serves the per-head norms;
    the hidden norms take `eps * mean_factor`."""
    text = text_config(config)
    if plan is not None:
        text["hidden_size"] = plan.wide_hidden
        text["moe_intermediate_size"] = plan.wide_intermediate
    return text


def widen_tensor(name: str, tensor: Tensor, plan: Widening | None) -> Tensor:
    """Widens one tensor that is no routed expert.

    Args:
        name: canonical name.
        tensor: as stored, or converted.

    Returns:
        A new tensor, or the same one when it does not grow.
    """
    if plan is None or plan.hidden == plan.wide_hidden:
        return tensor
    import torch

    extra = plan.wide_hidden - plan.hidden
    if is_hidden_norm(name):
        scale = tensor if tensor.dtype == torch.float64 else tensor.float()
        wide = torch.zeros(plan.wide_hidden, dtype=scale.dtype)
        wide[: plan.hidden] = (1.0 + scale) * math.sqrt(plan.mean_factor) - 1.0
        return wide
    if name.endswith(_COLUMNS):
        return torch.nn.functional.pad(tensor, (0, extra))
    if name.endswith(_ROWS):
        after = (0, extra) if tensor.dim() == 1 else (0, 0, 0, extra)
        return torch.nn.functional.pad(tensor, after)
    if name.endswith(_KEPT):
        return tensor
    raise ConfigError(
        f"{name} has no widening rule; known are the tensors of Qwen3.5-MoE; load without widening"
    )
