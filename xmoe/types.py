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
from dataclasses import dataclass, field
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


def quant_name(value: object) -> str:
    """One spelling of a quantisation's name; None, "", "none" and an enum's NONE are "none".

    Checkpoints and engines spell "not quantised" in all these ways. An unknown name is refused by
    the policy and by whoever would have to compute with it, not here.
    """
    if getattr(value, "name", "") == "NONE":
        return "none"
    value = getattr(value, "value", value)
    return "none" if value is None or value == "" else str(value).lower()


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
        object.__setattr__(self, "quant", quant_name(self.quant))


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

    Unquantised: gate_up [L, H, 2I], columns [0, I) gate and [I, 2I) up; down [L, I, H]; both
    contiguous, and nothing else.

    quant "w8a8" or "w4a8", made by `xmoe.kernels.ops.quant.quantise_experts`: gate_up and down hold
    the same matrices in blocks of FRACTAL_NZ, int8 [L, N/32, K/16, 16, 32] for a matrix [K, N], or
    int32 [L, N/64, K/16, 16, 8] with eight int4 in each element. gate_up_scales int64 [L, 2I] and
    down_scales int64 [L, H]: float32 bits in the low word. gate_up_bias and down_bias: float32 of
    the same shapes, w4a8 only. int4_encoding: "twos_complement" or "offset_binary".
    """

    gate_up: Tensor
    down: Tensor
    quant: str = "none"
    gate_up_scales: Tensor | None = None
    down_scales: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    int4_encoding: str = "twos_complement"

    def __post_init__(self) -> None:
        object.__setattr__(self, "quant", quant_name(self.quant))

    @property
    def num_local_experts(self) -> int:
        """L."""
        return int(self.gate_up.shape[0])

    @property
    def hidden(self) -> int:
        """H."""
        if self.gate_up.dim() == 5:
            return int(self.gate_up.shape[2] * self.gate_up.shape[3])
        return int(self.gate_up.shape[1])

    @property
    def intermediate(self) -> int:
        """I."""
        if self.down.dim() == 5:
            return int(self.down.shape[2] * self.down.shape[3])
        return int(self.down.shape[1])


class Validity:
    """Whether something borrowed may still be used. Its owner sets `valid` to False, for good."""

    __slots__ = ("valid",)

    def __init__(self) -> None:
        self.valid = True


@dataclass(frozen=True)
class CommHandle:
    """What an operator needs to know of a communication resource; valid until that closes."""

    group_name: str
    ep_rank: int
    ep_size: int
    ccl_buffer_bytes: int
    context: Tensor
    validity: Validity = field(default_factory=Validity, compare=False, repr=False)
