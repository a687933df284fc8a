# SPDX-License-Identifier: Apache-2.0
"""The CAM operators on the host adaptor: plain CPU tensors, raw stream handles, the C ABI below."""

from __future__ import annotations

import torch
from torch import Tensor

from xmoe.kernels.ops.cam.binding import CamLibrary
from xmoe.kernels.ops.cam.protocols import A2EOutput, DispatchItem
from xmoe.kernels.ops.cam.topology import (
    CamAsyncTopology,
    CamP2PTopology,
    receive_capacity,
    require,
)

_HALF = (torch.bfloat16, torch.float16)


def check_tensor(
    what: str, value: Tensor, dtypes: tuple[torch.dtype, ...], shape: tuple[int | None, ...]
) -> None:
    """ConfigError unless `value` has one of `dtypes`, this shape (None: any size), is contiguous,
    and carries no gradient."""
    fits = len(shape) == value.dim() and all(
        want is None or want == got for want, got in zip(shape, value.shape, strict=True)
    )
    ok = value.dtype in dtypes and fits and value.is_contiguous() and not value.requires_grad
    wanted = "x".join("any" if s is None else str(s) for s in shape)
    require(
        what,
        f"{value.dtype} {tuple(value.shape)} contiguous={value.is_contiguous()} "
        f"requires_grad={value.requires_grad}",
        ok,
        f"{' or '.join(str(d) for d in dtypes)} of shape {wanted}, contiguous, without gradient",
        "convert it before the launch",
    )


def _check_side(op: str, is_ffn: bool, wants_ffn: bool, rank: int) -> None:
    side = "an FFN" if wants_ffn else "an Attention"
    require(f"{op} on rank", rank, is_ffn == wants_ffn, f"{side} rank", "call it on the other role")


class HostCamP2POps:
    """`CamP2POps` over the C ABI. `dtype` is the model's; the torch operators fix bfloat16."""

    def __init__(self, library: CamLibrary, dtype: torch.dtype = torch.bfloat16) -> None:
        require("dtype", dtype, dtype in _HALF, "bfloat16, float16", "pass the model dtype")
        self._library = library
        self._dtype = dtype
        self._dummy = torch.zeros(1, 1, dtype=dtype)

    def a2e(
        self,
        topology: CamP2PTopology,
        group: str,
        hidden_states: Tensor | None,
        num_tokens: int,
        *,
        stream: int,
        out: A2EOutput | None = None,
    ) -> A2EOutput:
        """See `CamP2POps.a2e`. Asynchronous. Raises ConfigError or AclError before anything is
        queued."""
        t = topology
        require("num_tokens", num_tokens, num_tokens >= 1, "1 or more", "never send an empty stage")
        if t.is_ffn:
            require(
                "num_tokens",
                num_tokens,
                num_tokens % t.ratio == 0,
                f"a multiple of {t.ratio} (Attention ranks per FFN rank)",
                "pad all Attention peers to the same number of rows",
            )
        else:
            if hidden_states is None:
                require("hidden_states", None, False, "the rows to send", "pass them")
            else:
                check_tensor("hidden_states", hidden_states, _HALF, (num_tokens, t.hidden))
        if out is None:
            out = self.empty_a2e(t, num_tokens)
        args = (
            hidden_states,
            None,
            None,
            num_tokens,
            t.hidden,
            t.topk,
            t.ffn_size,
            t.attn_size,
            t.rank,
            group,
            t.aiv_num,
            0,
            out.hidden_states,
            out.sim_expert_ids,
            out.sim_scales,
            out.atten_batch_size,
            out.x_active_mask,
        )
        self._library.launch("aclnnA2e", args, stream)
        return out

    def empty_a2e(self, topology: CamP2PTopology, num_tokens: int) -> A2EOutput:
        """Uninitialised outputs for `a2e` that a caller may own and pass as `out`."""
        t = topology
        shape = (num_tokens, t.hidden) if t.is_ffn else (1, 1)
        rows = num_tokens if t.is_ffn else 1
        return A2EOutput(
            torch.empty(shape, dtype=self._dtype),
            torch.empty(rows, t.topk, dtype=torch.int32),
            torch.empty(rows, t.topk, dtype=torch.float32),
            torch.empty(t.ratio, dtype=torch.int32),
            torch.empty(t.ratio, dtype=torch.bool),
        )

    def e2a(
        self,
        topology: CamP2PTopology,
        group: str,
        hidden_states: Tensor,
        atten_batch_size: Tensor,
        *,
        stream: int,
        out: Tensor | None = None,
    ) -> Tensor:
        """See `CamP2POps.e2a`. Asynchronous. Raises ConfigError or AclError before anything is
        queued."""
        t = topology
        check_tensor("hidden_states", hidden_states, _HALF, (None, t.hidden))
        check_tensor("atten_batch_size", atten_batch_size, (torch.int32,), (t.ratio,))
        rows = hidden_states.shape[0]
        require("rows of hidden_states", rows, rows >= 1, "1 or more", "never send an empty stage")
        if t.is_ffn:
            require(
                "rows of hidden_states",
                rows,
                rows % t.ratio == 0,
                f"a multiple of {t.ratio}",
                "send back as many rows as a2e received",
            )
            result = self._dummy
        else:
            result = torch.empty_like(hidden_states) if out is None else out
            check_tensor("out", result, _HALF, (rows, t.hidden))
        args = (
            hidden_states,
            atten_batch_size,
            rows,
            t.hidden,
            t.topk,
            t.ffn_size,
            t.attn_size,
            t.rank,
            group,
            t.aiv_num,
            result,
        )
        self._library.launch("aclnnE2a", args, stream)
        return result


class HostCamAsyncOps:
    """`CamAsyncOps` over the C ABI.

    `shared_expert=False` is the plugin-owned routed-only set (aclnnAfdAsync*). True is the older
    set, whose library is closed: only the software device has it, under names of its own, and where
    it sends shared rows is that device's assumption.
    """

    def __init__(
        self,
        library: CamLibrary,
        dtype: torch.dtype = torch.bfloat16,
        *,
        shared_expert: bool = False,
    ) -> None:
        require("dtype", dtype, dtype in _HALF, "bfloat16, float16", "pass the model dtype")
        self._library = library
        self._dtype = dtype
        self._shared = shared_expert
        self._prefix = "aclnnXsdUmdkAsync" if shared_expert else "aclnnAfdAsync"
        # Placeholders of the ABI; the operators read neither.
        self._comm_args = torch.zeros(1, dtype=torch.float16)
        self._anchor = torch.zeros(1, dtype=dtype)
        self._result = torch.zeros(1, dtype=torch.int8)

    @property
    def shared_expert(self) -> bool:
        """Whether items carry a shared expert."""
        return self._shared

    def dispatch_send(
        self,
        topology: CamAsyncTopology,
        group: str,
        hidden_states: Tensor,
        topk_ids: Tensor,
        layer: int,
        *,
        stream: int,
    ) -> None:
        """See `CamAsyncOps.dispatch_send`. Asynchronous; the arguments stay alive until the stream
        passed."""
        t = topology
        _check_side("dispatch_send", t.is_ffn, False, t.rank)
        tokens = hidden_states.shape[0]
        require(
            "num_tokens",
            tokens,
            1 <= tokens <= t.max_tokens_per_rank,
            f"1 to {t.max_tokens_per_rank} (max_seq_len / tp_size)",
            "split the batch, or send one padding row instead of none",
        )
        require("layer", layer, layer >= 0, "0 or more", "pass the layer index")
        check_tensor("hidden_states", hidden_states, _HALF, (None, t.hidden))
        check_tensor("topk_ids", topk_ids, (torch.int32,), (tokens, t.topk))
        args: list[object] = [hidden_states, topk_ids, self._comm_args, 0, t.max_seq_len, tokens]
        args += [t.hidden, t.topk, t.ffn_size, t.attn_size, t.experts_per_rank, t.rank]
        args += [t.world_size, layer, t.tp_size, int(t.dynamic_quant), group]
        if not self._shared:
            args.append(self._result)
        self._library.launch(self._prefix + "DispatchSend", args, stream)

    def empty_item(self, topology: CamAsyncTopology, capacity: int | None = None) -> DispatchItem:
        """Uninitialised receive outputs a slot may own. `capacity` must equal the operator's
        (default: `receive_capacity()`); memory is touched only where rows arrive."""
        t = topology
        rows = receive_capacity() if capacity is None else capacity
        dtype = torch.int8 if t.dynamic_quant else self._dtype
        scales = rows if t.dynamic_quant else 1

        def shared(*shape: int, of: torch.dtype) -> Tensor | None:
            return torch.empty(shape, dtype=of) if self._shared else None

        return DispatchItem(
            torch.empty(rows, t.hidden, dtype=dtype),
            torch.empty(scales, dtype=torch.float32),
            torch.empty(t.info_length(self._shared), dtype=torch.int64),
            torch.empty(t.experts_per_rank, dtype=torch.int64),
            shared(rows, t.hidden, of=dtype),
            shared(scales, of=torch.float32),
            shared(1, of=torch.int64),
        )

    def dispatch_recv(
        self,
        topology: CamAsyncTopology,
        group: str,
        *,
        stream: int,
        out: DispatchItem | None = None,
        stop: Tensor | None = None,
    ) -> DispatchItem:
        """See `CamAsyncOps.dispatch_recv`. Asynchronous; keep `stop` alive like the outputs."""
        t = topology
        _check_side("dispatch_recv", t.is_ffn, True, t.rank)
        if stop is not None:
            allowed = t.dynamic_quant and not self._shared
            require(
                "stop", "given", allowed, "routed-only operators with dynamic_quant", "leave it out"
            )
            check_tensor("stop", stop, _HALF, (16,))
        item = self.empty_item(t) if out is None else out
        anchor = self._anchor if stop is None else stop
        sizes = (t.hidden, t.topk, t.ffn_size, t.attn_size, t.experts_per_rank)
        tail = (t.rank, t.world_size, t.tp_size, int(t.dynamic_quant), group)
        head = (anchor, self._comm_args, 0, t.max_seq_len, *sizes, *tail)
        outputs: tuple[Tensor | None, ...]
        if self._shared:
            outputs = (
                item.hidden_states,
                item.shared_hidden_states,
                item.scales,
                item.shared_scales,
                item.batch_info,
                item.tokens_per_expert,
                item.shared_count,
            )
        else:
            outputs = (item.hidden_states, item.scales, item.batch_info, item.tokens_per_expert)
        self._library.launch(self._prefix + "DispatchRecv", (*head, *outputs), stream)
        return item

    def combine_send(
        self,
        topology: CamAsyncTopology,
        group: str,
        expert_out: Tensor,
        batch_info: Tensor,
        *,
        stream: int,
        shared_out: Tensor | None = None,
    ) -> None:
        """See `CamAsyncOps.combine_send`. Asynchronous; the arguments stay alive until the stream
        passed."""
        t = topology
        _check_side("combine_send", t.is_ffn, True, t.rank)
        check_tensor("expert_out", expert_out, _HALF, (None, t.hidden))
        rows = expert_out.shape[0]
        require(
            "rows of expert_out",
            rows,
            rows >= 1,
            "1 or more",
            "send one zero row when none is routed",
        )
        check_tensor("batch_info", batch_info, (torch.int64,), (t.info_length(self._shared),))
        require(
            "shared_out",
            None if shared_out is None else "given",
            self._shared == (shared_out is not None),
            "given for the operator set with a shared expert, else None",
            "pass what the operator set wants",
        )
        args: list[object] = [expert_out]
        if shared_out is not None:
            check_tensor("shared_out", shared_out, _HALF, (None, t.hidden))
            args.append(shared_out)
        args += [self._comm_args, batch_info, 0, t.max_seq_len, t.hidden, t.topk, t.ffn_size]
        args += [t.attn_size, t.experts_per_rank, t.rank, t.world_size, t.tp_size, group]
        if not self._shared:
            args.append(self._result)
        self._library.launch(self._prefix + "CombineSend", args, stream)

    def combine_recv(
        self,
        topology: CamAsyncTopology,
        group: str,
        topk_ids: Tensor,
        topk_weights: Tensor,
        *,
        stream: int,
        out: Tensor | None = None,
    ) -> Tensor:
        """See `CamAsyncOps.combine_recv`. Asynchronous; the result is valid once the stream
        passed."""
        t = topology
        _check_side("combine_recv", t.is_ffn, False, t.rank)
        check_tensor("topk_ids", topk_ids, (torch.int32,), (None, t.topk))
        tokens = topk_ids.shape[0]
        check_tensor("topk_weights", topk_weights, (torch.float32,), (tokens, t.topk))
        result = torch.empty(tokens, t.hidden, dtype=self._dtype) if out is None else out
        check_tensor("out", result, _HALF, (tokens, t.hidden))
        args = (
            self._anchor,
            topk_ids,
            topk_weights,
            self._comm_args,
            0,
            tokens,
            t.hidden,
            t.topk,
            t.ffn_size,
            t.attn_size,
            t.experts_per_rank,
            t.rank,
            t.world_size,
            group,
            result,
        )
        self._library.launch(self._prefix + "CombineRecv", args, stream)
        return result
