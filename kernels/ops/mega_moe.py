# SPDX-License-Identifier: Apache-2.0
"""The fused operator aclnnMegaMoe over torch tensors: bf16 weights, or int8 and int4 ones.

Everything the contract demands of tensors is checked here before the vendor is called: an error of
phase one comes on this rank only, while the other ranks wait in the exchange.

Source: ops-transformer 9.1.0, mc2/mega_moe (docs, op_api, arch22 tiling).
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from xmoe.errors import ConfigError
from xmoe.kernels.acl.handles import DATA_ALIGNMENT_BYTES, TensorDesc, TensorListDesc
from xmoe.kernels.acl.op import launch_mega_moe
from xmoe.kernels.acl.quant_modes import quant_mode
from xmoe.kernels.acl.variants import FLT_MAX, NEUTRAL
from xmoe.kernels.device import Stream
from xmoe.kernels.ops.activation import activation_name
from xmoe.kernels.ops.quant import check_experts
from xmoe.kernels.ops.workspace import WorkspaceCache
from xmoe.types import CommHandle, ExpertWeights, TokenBatch

if TYPE_CHECKING:
    from xmoe.kernels.acl.loader import Runtime
    from xmoe.kernels.acl.vendor import MegaMoeSymbols

CONTEXT_WORDS = 4100
TOPK_MAX = 16
LOCAL_EXPERTS_MAX = 128


@dataclass
class MegaMoeLaunch:
    """A queued launch. Hold it until the stream was synchronised: it keeps the inputs alive.

    hidden_states [T, H] and tokens_per_expert int32 [L] are written by then; rows that a mask
    switched off are undefined. tokens_per_expert counts every dispatched row of all ranks, padding
    included.
    """

    hidden_states: Tensor
    tokens_per_expert: Tensor
    workspace_bytes: int
    _inputs: tuple[object, ...] = field(repr=False)

    def close(self) -> None:
        """Drop the inputs. Only after completion."""
        self._inputs = ()


class MegaMoe:
    """One layer's experts behind the fused operator. Call with the device bound.

    Args:
        runtime: whose library is called. handle: the communication resource, which must outlive
            this.
        weights: bf16, or prepared by quantise_experts; read in place, never copied.
        num_experts: E, routed experts of the whole group.
        activation: "swiglu" (or its alias "silu"). activation_clamp: None for no clamp.
        workspace: shared by all layers of one resource.
        max_recv_tokens: rows this rank can receive; 0 lets the operator take its worst case, the
            only value that cannot lose rows.
    """

    def __init__(
        self,
        runtime: Runtime,
        handle: CommHandle,
        weights: ExpertWeights,
        num_experts: int,
        workspace: WorkspaceCache,
        *,
        symbols: MegaMoeSymbols | None = None,
        activation: str = "swiglu",
        activation_clamp: float | None = None,
        max_recv_tokens: int = 0,
    ) -> None:
        _check_weights(weights, num_experts, handle)
        if activation_name(activation) != "swiglu":
            raise ConfigError(
                f"activation={activation!r} is not one of aclnnMegaMoe's; allowed: swiglu; next: "
                "let the "
                'policy choose (mode="auto"), which takes the split path'
            )
        if activation_clamp is not None and not 0 <= activation_clamp < float("inf"):
            raise ConfigError(
                f"activation_clamp={activation_clamp}; allowed: None, or a finite number of 0 or "
                "more; next: correct the model's setting"
            )
        self._runtime = runtime
        self._symbols = runtime.mega_moe if symbols is None else symbols
        self._handle = handle
        self._weights = weights
        self._num_experts = num_experts
        self._workspace = workspace
        self._clamp = FLT_MAX if not activation_clamp else float(activation_clamp)
        self._max_recv_tokens = max_recv_tokens
        with contextlib.ExitStack() as undo:
            self._context = undo.enter_context(_describe(runtime, handle.context))
            self._lists = _describe_weights(runtime, weights, undo)
            undo.pop_all()

    def launch(
        self, batch: TokenBatch, stream: Stream, mask: Tensor | None = None
    ) -> MegaMoeLaunch:
        """Queue the operator on `stream` and return before it is done. COLLECTIVE.

        Every rank of the group launches with the same T, in the same order.

        Args:
            batch: hidden_states [T, H] bf16, topk_ids [T, K] int32 in [0, E) and distinct within a
                row, topk_weights [T, K] float32; contiguous, 32-byte aligned, unchanged until
                completion.
            mask: int8 [T], 1 = live, at least one live row; None for all. The operator writes to
                the ids when it has a mask, so it gets a copy of them.

        Raises:
            ConfigError: a tensor is not what the contract demands; nothing was queued.
            AclError: the vendor refused.
        """
        self._check_batch(batch, mask)
        ids = batch.topk_ids if mask is None else batch.topk_ids.clone()
        output = torch.empty_like(batch.hidden_states)
        counts = torch.empty(
            self._weights.num_local_experts, dtype=torch.int32, device=output.device
        )
        _check_distinct(
            hidden_states=batch.hidden_states,
            topk_ids=ids,
            topk_weights=batch.topk_weights,
            output=output,
            tokens_per_expert=counts,
        )
        tensors = {
            "x": batch.hidden_states,
            "topkIds": ids,
            "topkWeights": batch.topk_weights,
            "xActiveMaskOptional": mask,
            "yOut": output,
            "expertTokenNumsOut": counts,
        }
        described = {
            key: None if tensor is None else _describe(self._runtime, tensor)
            for key, tensor in tensors.items()
        }
        try:
            workspace_bytes = launch_mega_moe(
                self._runtime,
                self._symbols,
                self._arguments(described),
                stream.handle(),
                lambda nbytes: self._workspace.take(stream, nbytes),
            )
        finally:
            for one in described.values():
                if one is not None:
                    one.close()
        self._workspace.launched(stream)
        kept = (batch, ids, mask, self._weights, self._handle)
        return MegaMoeLaunch(output, counts, workspace_bytes, kept)

    def _arguments(self, described: dict[str, TensorDesc | None]) -> dict[str, object]:
        """Values by parameter key; what the library's variant has beyond them gets its "not used"
        value.
        """
        mode = quant_mode(self._weights.quant)
        args: dict[str, object] = {
            "context": self._context,
            **self._lists,
            "moeExpertNum": self._num_experts,
            "epWorldSize": self._handle.ep_size,
            "cclBufferSize": self._handle.ccl_buffer_bytes,
            "maxRecvTokenNum": self._max_recv_tokens,
            "dispatchQuantMode": mode.dispatch_quant_mode,
            "dispatchQuantOutDtype": mode.out_dtypes[0],
            "combineQuantMode": 0,
            "commAlg": "",
            # 0: 9.1.0 drops the value anyway, and later variants demand one number for all layers.
            "numMaxTokensPerRank": 0,
            "activation": "swiglu",
            **described,
        }
        variant = self._symbols.variant
        assert variant is not None  # symbols without one are refused by the two-phase call
        if variant.has("activationParams"):
            args["activationParams"] = (self._clamp,)
        else:
            args["activationClamp"] = self._clamp
        for key in variant.keys():
            if key not in args:
                args[key] = NEUTRAL[key][0]
        return args

    def _check_batch(self, batch: TokenBatch, mask: Tensor | None) -> None:
        hidden = self._weights.hidden
        num_tokens = batch.hidden_states.shape[0] if batch.hidden_states.dim() else 0
        topk = batch.topk_ids.shape[1] if batch.topk_ids.dim() == 2 else 0
        _require("hidden_states", batch.hidden_states, torch.bfloat16, (num_tokens, hidden))
        _require("topk_ids", batch.topk_ids, torch.int32, (num_tokens, topk))
        _require("topk_weights", batch.topk_weights, torch.float32, (num_tokens, topk))
        if not 1 <= topk <= min(TOPK_MAX, self._num_experts):
            raise ConfigError(
                f"topk={topk}; allowed: 1..{min(TOPK_MAX, self._num_experts)}; next: check "
                "topk_ids' shape"
            )
        if num_tokens < 1:
            raise ConfigError(
                "a launch of 0 rows; allowed: 1 or more, the same number on every rank; next: pad "
                "the batch with pad_batch"
            )
        if mask is not None:
            _require("mask", mask, torch.int8, (num_tokens,))

    def close(self) -> None:
        """Destroy the descriptors. After the last launch ended. Twice is harmless."""
        for one in (*self._lists.values(), self._context):
            if one is not None:
                one.close()


def _require(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Type, shape, contiguity and alignment of one tensor."""
    got = f"{name}: {list(tensor.shape)} {tensor.dtype}"
    if tensor.dtype != dtype or tuple(tensor.shape) != shape:
        raise ConfigError(
            f"{got}; allowed: {list(shape)} {dtype}; next: convert it before the launch, on every "
            "rank"
        )
    if not tensor.is_contiguous():
        raise ConfigError(
            f"{got} has strides {list(tensor.stride())}; allowed: contiguous; next: call "
            ".contiguous()"
        )
    if tensor.data_ptr() % DATA_ALIGNMENT_BYTES:
        raise ConfigError(
            f"{got} starts at address {tensor.data_ptr():#x}; allowed: multiples of "
            f"{DATA_ALIGNMENT_BYTES} bytes; next: copy the slice to memory of its own with .clone()"
        )


def _check_weights(weights: ExpertWeights, num_experts: int, handle: CommHandle) -> None:
    check_experts(weights)
    if weights.quant == "none":
        _check_bf16_weights(weights.gate_up, weights.down)
    local = weights.num_local_experts
    if not 1 <= local <= LOCAL_EXPERTS_MAX or local * handle.ep_size != num_experts:
        raise ConfigError(
            f"{local} local experts with num_experts={num_experts}, ep_size={handle.ep_size}; "
            f"allowed: num_experts / ep_size, at most {LOCAL_EXPERTS_MAX}; next: load this rank's "
            "share"
        )
    if tuple(handle.context.shape) != (CONTEXT_WORDS,) or handle.context.dtype != torch.int32:
        raise ConfigError(
            f"context: {list(handle.context.shape)} {handle.context.dtype}; allowed: "
            f"[{CONTEXT_WORDS}] torch.int32; next: take the handle from a MegaMoeCommResource"
        )


def _check_bf16_weights(gate_up: Tensor, down: Tensor) -> None:
    for name, tensor in (("gate_up", gate_up), ("down", down)):
        if tensor.dim() != 3:
            raise ConfigError(
                f"{name}: {list(tensor.shape)}; allowed: three dimensions, [L, H, 2I] for gate_up "
                "and [L, I, H] for down; next: stack the experts of this rank"
            )
        _require(name, tensor, torch.bfloat16, tuple(tensor.shape))
    local, hidden, double = gate_up.shape
    if tuple(down.shape) != (local, double // 2, hidden) or double % 2:
        raise ConfigError(
            f"gate_up {list(gate_up.shape)} and down {list(down.shape)} do not belong together; "
            "allowed: [L, H, 2I] and [L, I, H]; next: check the layout the weights were loaded in"
        )


def _check_distinct(**tensors: Tensor) -> None:
    """No two tensors may share memory: the operator reads inputs while it writes outputs."""
    spans = sorted(
        (tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size(), name)
        for name, tensor in tensors.items()
    )
    for (_, end, first), (start, _, second) in zip(spans, spans[1:], strict=False):
        if start < end:
            raise ConfigError(
                f"{first} and {second} share memory; allowed: separate tensors; next: clone one of "
                "them"
            )


def _describe(runtime: Runtime, tensor: Tensor) -> TensorDesc:
    return TensorDesc(
        runtime, tensor.data_ptr(), tuple(tensor.shape), dtype=str(tensor.dtype), format="ND"
    )


def _describe_weights(
    runtime: Runtime, weights: ExpertWeights, undo: contextlib.ExitStack
) -> dict[str, TensorListDesc | None]:
    """The six list arguments. Weights are described as the matrices they are, whatever the order
    of their elements in memory.
    """
    mode = quant_mode(weights.quant)
    hidden, inter = weights.hidden, weights.intermediate
    per_element = 8 if mode.name == "w4a8" else 1
    matrix = {"dtype": mode.weight_dtype, "format": mode.weight_format}
    column = {"dtype": mode.scale_dtype or "", "format": "ND"}
    bias = {"dtype": "float32", "format": "ND"}

    def described(
        packed: Tensor | None, shape: tuple[int, ...], how: dict[str, str]
    ) -> TensorListDesc | None:
        if packed is None:
            return None
        return undo.enter_context(_describe_experts(runtime, packed, shape, how))

    wide = (hidden, 2 * inter // per_element)
    narrow = (inter, hidden // per_element)
    return {
        "weight1": described(weights.gate_up, wide, matrix),
        "weight2": described(weights.down, narrow, matrix),
        "weightScales1Optional": described(weights.gate_up_scales, (2 * inter,), column),
        "weightScales2Optional": described(weights.down_scales, (hidden,), column),
        "bias1Optional": described(weights.gate_up_bias, (2 * inter,), bias),
        "bias2Optional": described(weights.down_bias, (hidden,), bias),
    }


def _describe_experts(
    runtime: Runtime, packed: Tensor, shape: tuple[int, ...], how: dict[str, str]
) -> TensorListDesc:
    """One view per expert: the operator takes a list, not a packed tensor."""
    with contextlib.ExitStack() as undo:
        views = [
            undo.enter_context(
                TensorDesc(
                    runtime, one.data_ptr(), shape, dtype=how["dtype"], format=how["format"]
                )
            )
            for one in packed.unbind()
        ]
        described = TensorListDesc(runtime, views)
        undo.pop_all()
        return described
