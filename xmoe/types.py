# SPDX-License-Identifier: Apache-2.0
"""Plain values shared by all layers. Standard library only; torch for annotations.

Dimension letters used in every docstring of this project:

    T  tokens on this rank            H  hidden size
    K  experts per token (top-k)      I  intermediate size of one expert
    E  routed experts of the model    L  experts held by one rank (E / P)
    P  ranks of the EP group          R  rows a rank receives
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class Mode(str, enum.Enum):
    """What the user asked for."""

    OFF = "off"
    AUTO = "auto"
    ON = "on"


class Path(str, enum.Enum):
    """What runs."""

    MEGA_MOE = "mega_moe"
    FUSED_MOE = "fused_moe"


class FenceMode(str, enum.Enum):
    """How launches that share one communication resource are ordered."""

    STREAM = "stream"
    HOST = "host"
    OFF = "off"


@dataclass(frozen=True)
class MoeShape:
    """What a model's MoE layers look like; the same on every rank.

    `num_experts` counts routed experts; `num_redundant_experts` are physical replicas per rank.
    `activation` is the field's name for the gated activation ("swiglu" is silu(gate) * up).
    `activation_clamp` is None when the model has none. `quant` is "none", "w8a8", "w4a8" or an MXFP
    name; the other spellings of "none" are accepted and replaced by it.
    """

    hidden: int
    intermediate: int
    num_experts: int
    topk: int
    dtype: str = "bfloat16"
    activation: str = "swiglu"
    activation_clamp: float | None = None
    gate_up_layout: str = "concatenated"
    quant: str = "none"
    num_redundant_experts: int = 0

    def __post_init__(self) -> None:
        # Checkpoints and engines spell "not quantised" as None, "", "none" or an enum's NONE
        # member. One spelling from here on; an unknown name is refused by the policy, not here.
        value: object = getattr(self.quant, "value", self.quant)
        if value is None or str(value).lower() in ("", "none"):
            value = "none"
        elif getattr(self.quant, "name", "") == "NONE":
            value = "none"
        object.__setattr__(self, "quant", str(value).lower())


@dataclass(frozen=True)
class TokenBatch:
    """One layer's input on this rank.

    hidden_states [T, H] model dtype; topk_ids [T, K] int32 global expert ids, -1 = slot unused;
    topk_weights [T, K] float32.
    """

    hidden_states: Tensor
    topk_ids: Tensor
    topk_weights: Tensor


@dataclass(frozen=True)
class ExpertWeights:
    """Routed experts of one layer held by this rank, stored once for both paths.

    gate_up [L, H, 2I]: columns [0, I) gate, [I, 2I) up. down [L, I, H]. Both contiguous.
    """

    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True)
class CommHandle:
    """What an operator needs to know of a communication resource; valid until that closes."""

    group_name: str
    ep_rank: int
    ep_size: int
    ccl_buffer_bytes: int
    context: Tensor
