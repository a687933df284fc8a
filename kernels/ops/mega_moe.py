# SPDX-License-Identifier: Apache-2.0
"""The fused operator aclnnMegaMoe over torch tensors: bf16 weights, or int8 and int4 ones.

Everything the contract demands of tensors is checked here before the vendor is called: an error of
phase one comes on this rank only, while the other ranks wait in the exchange.

Source: ops-transformer 9.1.0, mc2/mega_moe (docs, op_api, arch22 tiling).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from xmoe.errors import CommError, ConfigError
from xmoe.kernels.acl.handles import DATA_ALIGNMENT_BYTES
from xmoe.kernels.acl.plan import STEP_TENSORS, LaunchPlan, Packed
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


@dataclass(slots=True)
class MegaMoeLaunch:
    """A queued launch. Hold it until the stream was synchronised: it keeps the inputs alive.

    hidden_states [T, H] and tokens_per_expert int32 [L] are written by then; rows that a mask
    switched off are undefined. tokens_per_expert counts every dispatched row of all ranks, padding
    included.
    """

    hidden_states: Tensor
    tokens_per_expert: Tensor
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
        reuse_executor: let the vendor's op_executor serve many launches of one shape. Only for
            operators known to allow it; the documents leave it open for aclnnMegaMoe.

    Weights and context are described once. When the memory behind one of these tensors changed
    (`tensor.data = ...`), the next launch describes it anew.
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
        reuse_executor: bool = False,
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
        self._topk_max = min(TOPK_MAX, num_experts)
        self._hidden, self._local = weights.hidden, weights.num_local_experts
        # Kept beside the plan: what a launch compares with, and makes its own like.
        self._bound = [
            (key, tensor, tensor.data_ptr(), tuple(tensor.shape), tensor.dtype)
            for key, tensor in _constant_tensors(handle, weights)
        ]
        self._counts_like = torch.empty(
            self._local, dtype=torch.int32, device=weights.gate_up.device
        )
        self._plan = LaunchPlan(
            runtime,
            self._symbols,
            self._constants(),
            hidden=self._hidden,
            local_experts=self._local,
            reuse_executor=reuse_executor,
        )

    @property
    def plan(self) -> LaunchPlan:
        """The compiled launch plan, for reports."""
        return self._plan

    def launch(
        self,
        batch: TokenBatch,
        stream: Stream,
        mask: Tensor | None = None,
        *,
        output: Tensor | None = None,
        counts: Tensor | None = None,
    ) -> MegaMoeLaunch:
        """Queue the operator on `stream` and return before it is done. COLLECTIVE.

        Every rank of the group launches with the same T, in the same order.

        Args:
            batch: hidden_states [T, H] bf16, topk_ids [T, K] int32 in [0, E) and distinct within a
                row, topk_weights [T, K] float32; contiguous, 32-byte aligned, unchanged until
                completion.
            mask: int8 [T], 1 = live, at least one live row; None for all. The operator writes to
                the ids when it has a mask: pass ids that nobody else reads.
            output: bf16 [T, H], counts: int32 [L]: what it writes; None makes new ones. Other
                memory than the inputs', contiguous and 32-byte aligned.

        Raises:
            ConfigError: a tensor is not what the contract demands, or the weights are gone; nothing
                was queued.
            CommError: the communication resource is closed.
            AclError: the vendor refused.
        """
        x, ids, weights = batch.hidden_states, batch.topk_ids, batch.topk_weights
        if not self._fits(x, ids, weights, mask):
            self._explain(batch, mask)
        self._refuse_if_stale()
        if output is None:
            output = torch.empty_like(x)
        elif output.dtype is not x.dtype or output.shape != x.shape or not output.is_contiguous():
            _require("output", output, x.dtype, tuple(x.shape))
        if counts is None:
            counts = torch.empty_like(self._counts_like)
        elif counts.dtype is not torch.int32 or counts.shape != (self._local,):
            _require("counts", counts, torch.int32, (self._local,))
        handle = stream.handle()
        tokens, topk = ids.shape
        self._plan.step(
            tokens,
            topk,
            x.data_ptr(),
            ids.data_ptr(),
            weights.data_ptr(),
            0 if mask is None else mask.data_ptr(),
            output.data_ptr(),
            counts.data_ptr(),
            handle,
            self._workspace.block(handle),
        )
        return MegaMoeLaunch(output, counts, (batch, ids, mask, self._weights, self._handle))

    def _refuse_if_stale(self) -> None:
        """The plan holds addresses: of the context, of the weights, of the library's functions."""
        if not self._handle.validity.valid:
            raise CommError(
                f"communication resource of {self._handle.group_name} is closed; allowed: launches "
                "before close(); next: acquire it again and make the operator anew"
            )
        if self._plan.symbols is not self._symbols:
            raise ConfigError(
                f"launch plan was made for ABI variant {self._plan.symbols.require_variant().id} "
                f"of {self._plan.symbols.library.path}, the operator now has "
                f"{self._symbols.require_variant().id} of {self._symbols.library.path}; allowed: "
                "one library for the operator's life; next: make the operator anew"
            )
        for index, (_, tensor, address, _, _) in enumerate(self._bound):
            if tensor.data_ptr() != address:
                self._follow(index)

    def _follow(self, index: int) -> None:
        """The memory of a constant tensor changed: describe the new one, or refuse."""
        key, tensor, _, shape, dtype = self._bound[index]
        address = tensor.data_ptr()
        if address == 0 or tuple(tensor.shape) != shape or tensor.dtype != dtype:
            raise ConfigError(
                f"{key} was {list(shape)} {dtype} and is now {list(tensor.shape)} {tensor.dtype}"
                f"{' without memory' if address == 0 else ''}; allowed: new memory of the same "
                "shape and type; next: load the weights back, or make the operator anew"
            )
        if not tensor.is_contiguous() or address % DATA_ALIGNMENT_BYTES:
            raise ConfigError(
                f"{key} moved to address {address:#x} with strides {list(tensor.stride())}; "
                f"allowed: contiguous memory at multiples of {DATA_ALIGNMENT_BYTES} bytes; next: "
                "copy it with .clone()"
            )
        self._plan.rebind(key, address)
        self._bound[index] = (key, tensor, address, shape, dtype)

    def _constants(self) -> dict[str, object]:
        """Values by parameter key; what the library's variant has beyond them gets its "not used"
        value.
        """
        mode = quant_mode(self._weights.quant)
        context = self._handle.context
        args: dict[str, object] = {
            "context": Packed(context.data_ptr(), tuple(context.shape), "int32", is_list=False),
            **_packed_weights(self._weights),
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
        }
        variant = self._symbols.require_variant()
        if variant.has("activationParams"):
            args["activationParams"] = (self._clamp,)
        else:
            args["activationClamp"] = self._clamp
        for key in variant.keys():
            if key not in args and key not in STEP_TENSORS:
                args[key] = NEUTRAL[key][0]
        return args

    def _fits(self, x: Tensor, ids: Tensor, weights: Tensor, mask: Tensor | None) -> bool:
        """Whether `_explain` has nothing to say; alignment and overlap are the plan's to check."""
        if ids.dim() != 2:
            return False
        tokens, topk = shape = ids.shape
        return (
            x.dtype is torch.bfloat16
            and ids.dtype is torch.int32
            and weights.dtype is torch.float32
            and x.shape == (tokens, self._hidden)
            and weights.shape == shape
            and 1 <= topk <= self._topk_max
            and tokens >= 1
            and x.is_contiguous()
            and ids.is_contiguous()
            and weights.is_contiguous()
            and (
                mask is None
                or (mask.dtype is torch.int8 and mask.shape == (tokens,) and mask.is_contiguous())
            )
        )

    def _explain(self, batch: TokenBatch, mask: Tensor | None) -> None:
        """Raise the ConfigError of a batch that does not fit."""
        self._check_batch(batch, mask)
        raise ConfigError(
            f"hidden_states {list(batch.hidden_states.shape)}, topk_ids "
            f"{list(batch.topk_ids.shape)}, topk_weights {list(batch.topk_weights.shape)} do not "
            f"belong together; allowed: [T, {self._hidden}], [T, K], [T, K]; next: check the batch"
        )

    def _check_batch(self, batch: TokenBatch, mask: Tensor | None) -> None:
        hidden = self._hidden
        num_tokens = batch.hidden_states.shape[0] if batch.hidden_states.dim() else 0
        topk = batch.topk_ids.shape[1] if batch.topk_ids.dim() == 2 else 0
        _require("hidden_states", batch.hidden_states, torch.bfloat16, (num_tokens, hidden))
        _require("topk_ids", batch.topk_ids, torch.int32, (num_tokens, topk))
        _require("topk_weights", batch.topk_weights, torch.float32, (num_tokens, topk))
        if not 1 <= topk <= self._topk_max:
            raise ConfigError(
                f"topk={topk}; allowed: 1..{self._topk_max}; next: check topk_ids' shape"
            )
        if num_tokens < 1:
            raise ConfigError(
                "a launch of 0 rows; allowed: 1 or more, the same number on every rank; next: pad "
                "the batch with LaunchRows"
            )
        if mask is not None:
            _require("mask", mask, torch.int8, (num_tokens,))

    def close(self) -> None:
        """Destroy the descriptors. After the last launch ended. Twice is harmless."""
        self._plan.close()


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


def _constant_tensors(handle: CommHandle, weights: ExpertWeights) -> Iterator[tuple[str, Tensor]]:
    """(parameter, tensor) of everything whose address the plan keeps."""
    yield "context", handle.context
    for key, tensor in (
        ("weight1", weights.gate_up),
        ("weight2", weights.down),
        ("weightScales1Optional", weights.gate_up_scales),
        ("weightScales2Optional", weights.down_scales),
        ("bias1Optional", weights.gate_up_bias),
        ("bias2Optional", weights.down_bias),
    ):
        if tensor is not None:
            yield key, tensor


def _packed_weights(weights: ExpertWeights) -> dict[str, Packed | None]:
    """The six list arguments, one view per expert. Weights are described as the matrices they are,
    whatever the order of their elements in memory.
    """
    mode = quant_mode(weights.quant)
    hidden, inter = weights.hidden, weights.intermediate
    per_element = 8 if mode.name == "w4a8" else 1

    def packed(
        tensor: Tensor | None, shape: tuple[int, ...], dtype: str, format: str = "ND"
    ) -> Packed | None:
        if tensor is None:
            return None
        step = tensor.stride(0) * tensor.element_size()
        return Packed(
            tensor.data_ptr(), shape, dtype, tensor.shape[0], step_bytes=step, format=format
        )

    wide = (hidden, 2 * inter // per_element)
    narrow = (inter, hidden // per_element)
    scale = mode.scale_dtype or ""
    return {
        "weight1": packed(weights.gate_up, wide, mode.weight_dtype, mode.weight_format),
        "weight2": packed(weights.down, narrow, mode.weight_dtype, mode.weight_format),
        "weightScales1Optional": packed(weights.gate_up_scales, (2 * inter,), scale),
        "weightScales2Optional": packed(weights.down_scales, (hidden,), scale),
        "bias1Optional": packed(weights.gate_up_bias, (2 * inter,), "float32"),
        "bias2Optional": packed(weights.down_bias, (hidden,), "float32"),
    }
