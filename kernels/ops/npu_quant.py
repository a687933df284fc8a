# SPDX-License-Identifier: Apache-2.0
"""Experts with integer weights on torch_npu's operators: the split path of w8a8 and w4a8.

    w8a8   npu_dynamic_quant -> npu_grouped_matmul (int32) -> npu_dequant_swiglu_quant
           -> npu_grouped_matmul (scales of column and row, bf16)
    w4a8   npu_dynamic_quant -> npu_grouped_matmul (bf16) -> activation -> npu_dynamic_quant
           -> npu_grouped_matmul (bf16)

w8a8 takes the second form too when the activation is not a plain SwiGLU, or
npu_dequant_swiglu_quant is not there. The documents give the formulas, and bf16 as the type of an
output; between them these operators round elsewhere than MegaMoe does (no fp16 after a product), so
the results agree within what a quantisation step is worth, not in their bits.

The weights are the very memory MegaMoe reads: a second tensor of FRACTAL_NZ format stands on it.
Source: op-plugin, docs of the three operators; ops-transformer, gmm/grouped_matmul/docs
(aclnnGroupedMatmulWeightNz: A8W8, A8W4).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

import torch
from torch import Tensor

from xmoe.kernels.capability import NpuOperators
from xmoe.kernels.npu_device import torch_npu
from xmoe.kernels.ops.activation import gated_activation, is_plain_swiglu
from xmoe.kernels.ops.grouped_matmul import group_list, launch
from xmoe.kernels.ops.quant import decode_scales
from xmoe.types import ExpertWeights

_FRACTAL_NZ = 29  # aclFormat
_PER_WORD = 8  # int4 in an int32
# Bounds of A8W4: rows of a weight in groups of this many, and at most.
_GROUP, _DEPTH_LIMIT = 256, 18432
# npu_dequant_swiglu_quant with groups: columns in 64s, at most.
_WIDTH, _WIDTH_LIMIT = 64, 10496


class GatedMlp(TypedDict):
    """What an expert does between its two products."""

    activation: str
    clamp: float | None
    layout: str


def fits_operators(weights: ExpertWeights) -> bool:
    """Whether the operators' documents allow these sizes and this way to write an int4."""
    if weights.quant == "w8a8":
        return True
    depths = (weights.hidden, weights.intermediate)
    return weights.int4_encoding == "twos_complement" and all(
        depth % _GROUP == 0 and depth <= _DEPTH_LIMIT for depth in depths
    )


class NpuIntegerExperts:
    """One layer's experts over npu tensors; see the module's text.

    Args:
        weights: w8a8 or w4a8 on an npu, as `quantise_experts` makes them; held.
    """

    def __init__(
        self,
        weights: ExpertWeights,
        operators: NpuOperators,
        *,
        activation: str,
        clamp: float | None,
        layout: str,
    ) -> None:
        assert weights.gate_up_scales is not None and weights.down_scales is not None
        hidden, inter = weights.hidden, weights.intermediate
        self._held = weights
        self._operators = operators
        self._how: GatedMlp = {"activation": activation, "clamp": clamp, "layout": layout}
        # The fused step has no way to change its clamp or its halves' order.
        self._fused = (
            weights.quant == "w8a8"
            and operators.dequant_swiglu_quant
            and is_plain_swiglu(activation, clamp, layout)
            and inter % _WIDTH == 0
            and inter <= _WIDTH_LIMIT
        )
        self._stand_on_weights()
        if weights.quant == "w8a8":
            self._gate_up_scale = decode_scales(weights.gate_up_scales)
            self._first = {"scale": [self._gate_up_scale]}
            self._second = {"scale": [decode_scales(weights.down_scales)]}
        else:
            assert weights.gate_up_bias is not None and weights.down_bias is not None
            self._first = _int4_arguments(weights.gate_up_scales, weights.gate_up_bias, hidden)
            self._second = _int4_arguments(weights.down_scales, weights.down_bias, inter)

    def _stand_on_weights(self) -> None:
        held = self._held
        hidden, inter = held.hidden, held.intermediate
        self._gate_up = in_nz_format(held.gate_up, hidden, 2 * inter)
        self._down = in_nz_format(held.down, inter, hidden)

    def _moved(self) -> bool:
        """Weights that were given other memory: the old one may be somebody else's by now."""
        held = self._held
        return (
            held.gate_up.data_ptr() != self._gate_up.data_ptr()
            or held.down.data_ptr() != self._down.data_ptr()
        )

    def __call__(self, recv_tokens: Tensor, tokens_per_expert: Sequence[int] | Tensor) -> Tensor:
        """Each row through its expert; see `expert_mlp`. No wait for the device.

        Args:
            recv_tokens: [R, H] bf16 or fp16, sorted by local expert.
            tokens_per_expert: L integers that sum to R, or int64 [L] on the device.
        """
        if recv_tokens.shape[0] == 0:
            return recv_tokens.new_empty(recv_tokens.shape)
        if self._moved():
            self._stand_on_weights()
        ops, dtype = torch.ops.npu, recv_tokens.dtype
        groups = group_list(tokens_per_expert, recv_tokens.device)
        q, scale = ops.npu_dynamic_quant(recv_tokens.contiguous())
        if self._fused:
            integers = launch(q, self._gate_up, groups, output_dtype=torch.int32)
            q, scale = ops.npu_dequant_swiglu_quant(
                integers, weight_scale=self._gate_up_scale, activation_scale=scale.unsqueeze(1),
                group_index=groups, activate_left=True, quant_mode=1,
            )  # fmt: skip
        else:
            gate_up = self._product(q, self._gate_up, groups, scale, dtype, self._first)
            act = gated_activation(gate_up, operators=self._operators, **self._how)
            q, scale = ops.npu_dynamic_quant(act)
        return self._product(q, self._down, groups, scale, dtype, self._second)

    def _product(
        self,
        q: Tensor,
        weight: Tensor,
        groups: Tensor,
        scale: Tensor,
        dtype: torch.dtype,
        more: dict[str, list[Tensor]],
    ) -> Tensor:
        return launch(q, weight, groups, per_token_scale=[scale], output_dtype=dtype, **more)


def _int4_arguments(scales: Tensor, bias: Tensor, depth: int) -> dict[str, list[Tensor]]:
    """Scales [L, N] for each group of rows, all alike, and the bias that goes with int4."""
    local, columns = scales.shape
    grouped = scales.unsqueeze(1).expand(local, depth // _GROUP, columns).contiguous()
    return {"scale": [grouped], "bias": [bias]}


def in_nz_format(blocks: Tensor, rows: int, columns: int) -> Tensor:
    """A tensor [L, rows, columns] of FRACTAL_NZ format on the memory of `blocks`. Local.

    The way torch_npu 2.13 itself makes a tensor on memory that it got from elsewhere; casting the
    format would need a second copy of the weights. `blocks` must outlive the result.

    Args:
        blocks: int8, or int32 of eight int4 each; 5-D, contiguous, on an npu.
    """
    native = torch_npu()._C
    nbytes = blocks.numel() * blocks.element_size()
    storage = native._construct_storage_from_data_pointer(blocks.data_ptr(), blocks.device, nbytes)
    width = columns // (_PER_WORD if blocks.dtype == torch.int32 else 1)
    metadata = {
        "data_ptr": blocks.data_ptr(),
        "nbytes": nbytes,
        "device": blocks.device,
        "dtype": blocks.dtype,
        "size": [blocks.shape[0], rows, width],
        "stride": [rows * width, width, 1],
        "storage_offset": 0,
        "npu_format": _FRACTAL_NZ,
    }
    tensor: Tensor = native._construct_NPU_Tensor_From_Storage_And_Metadata(metadata, storage)
    return tensor
