# SPDX-License-Identifier: Apache-2.0
"""The CAM operators over the C ABI: contiguous tensors of one device, raw stream handles.

With CPU tensors this is the host adaptor. `xmoe.kernels.ops.cam.torch_ops` makes torch operators of
it for npu tensors. Every launch goes through a compiled plan, so that a call describes no tensor
that was described before.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from xmoe.kernels.acl.native_plan import NUMBER, SECOND, TOKENS, StepTensor
from xmoe.kernels.acl.op_plan import OpPlan, Parameter
from xmoe.kernels.ops.cam.binding import CamLibrary, PlanCache
from xmoe.kernels.ops.cam.protocols import A2EOutput, DispatchItem
from xmoe.kernels.ops.cam.topology import (
    CamAsyncTopology,
    CamP2PTopology,
    receive_capacity,
    refuse,
    require,
)

_HALF = (torch.bfloat16, torch.float16)
_INT32, _INT64, _FLOAT = (torch.int32,), (torch.int64,), (torch.float32,)
Shape = tuple[int | None, ...]


def _fits(value: Tensor, dtypes: Sequence[torch.dtype], shape: Shape) -> bool:
    got = value.shape
    if len(got) != len(shape) or value.dtype not in dtypes:
        return False
    for have, want in zip(got, shape, strict=True):
        if have != want and want is not None:
            return False
    return value.is_contiguous() and not value.requires_grad


class _Operators:
    """What both connectors' operators share: checks of tensors, plans, constant arguments."""

    def __init__(
        self, library: CamLibrary, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        require("dtype", dtype, dtype in _HALF, "bfloat16, float16", "pass the model dtype")
        self._library = library
        self._dtype = dtype
        self._device = torch.device(device)
        self._plans = PlanCache()

    def _empty(self, *shape: int, of: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=of or self._dtype, device=self._device)

    def _check(
        self, what: str, value: Tensor, dtypes: Sequence[torch.dtype], shape: Shape
    ) -> Tensor:
        """ConfigError unless `value` has one of `dtypes`, this shape (None: any size) and this
        device, is contiguous, and carries no gradient."""
        if _fits(value, dtypes, shape) and value.device == self._device:
            return value
        wanted = "x".join("any" if s is None else str(s) for s in shape)
        refuse(
            what,
            f"{value.dtype} {tuple(value.shape)} on {value.device} "
            f"contiguous={value.is_contiguous()} requires_grad={value.requires_grad}",
            f"{' or '.join(str(d) for d in dtypes)} of shape {wanted} on {self._device}, "
            "contiguous, without gradient",
            "convert it before the launch",
        )

    def _constant(self, tensor: Tensor) -> Parameter:
        return tensor.data_ptr(), str(tensor.dtype), tensor.numel()


def _given(name: str, dtype: torch.dtype, *shape: int | str, optional: bool = False) -> StepTensor:
    """An input. Inputs may share memory: nobody writes to them."""
    return StepTensor(name, str(dtype), shape, optional=optional, may_share=True)


def _made(name: str, dtype: torch.dtype, *shape: int | str) -> StepTensor:
    return StepTensor(name, str(dtype), shape, is_output=True)


def _check_side(op: str, is_ffn: bool, wants_ffn: bool, rank: int) -> None:
    if is_ffn != wants_ffn:
        side = "an FFN" if wants_ffn else "an Attention"
        refuse(f"{op} on rank", rank, f"{side} rank", "call it on the other role")


class HostCamP2POps(_Operators):
    """`CamP2POps` over the C ABI. `dtype` is the model's; the torch operators fix bfloat16."""

    def __init__(
        self,
        library: CamLibrary,
        topology: CamP2PTopology,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(library, dtype, device)
        self._topology = topology
        self._dummy = torch.zeros(1, 1, dtype=dtype, device=self._device)

    @property
    def topology(self) -> CamP2PTopology:
        """This rank's place."""
        return self._topology

    def a2e(
        self,
        group: str,
        hidden_states: Tensor | None,
        num_tokens: int,
        *,
        stream: int,
        out: A2EOutput | None = None,
    ) -> A2EOutput:
        """See `CamP2POps.a2e`. Asynchronous. Raises ConfigError or AclError before anything is
        queued."""
        t = self._topology
        _check_rows(t, "num_tokens", num_tokens)
        sent = hidden_states
        if not t.is_ffn:
            if sent is None:
                refuse("hidden_states", None, "the rows to send", "pass them")
            self._check("hidden_states", sent, _HALF, (num_tokens, t.hidden))
        dtype = self._dtype if sent is None else sent.dtype
        if out is None:
            out = self.empty_a2e(num_tokens)
        rows, width = (num_tokens, t.hidden) if t.is_ffn else (1, 1)
        self._check("out.hidden_states", out.hidden_states, _HALF, (rows, width))
        ids, scales = out.sim_expert_ids, out.sim_scales
        self._check("out.sim_expert_ids", ids, _INT32, (rows, None))
        self._check("out.sim_scales", scales, _FLOAT, tuple(ids.shape))
        sizes, mask = out.atten_batch_size, out.x_active_mask
        self._check("out.atten_batch_size", sizes, _INT32, (t.ratio,))
        self._check("out.x_active_mask", mask, (torch.bool,), (None,))
        made = out.hidden_states.dtype
        key = ("a2e", group, dtype, made, ids.shape[1], mask.shape[0])
        plan = self._plans.get(key, lambda: self._a2e_plan(group, dtype, out))
        plan.launch(
            num_tokens,
            0,
            0,
            stream,
            0 if sent is None or t.is_ffn else sent.data_ptr(),
            out.hidden_states.data_ptr(),
            ids.data_ptr(),
            scales.data_ptr(),
            sizes.data_ptr(),
            mask.data_ptr(),
        )
        return out

    def _a2e_plan(self, group: str, dtype: torch.dtype, out: A2EOutput) -> OpPlan:
        t = self._topology
        rows: tuple[int | str, int] = (TOKENS, t.hidden) if t.is_ffn else (1, 1)
        pairs = (rows[0], out.sim_expert_ids.shape[1])
        outputs = (
            _made("out.hidden_states", out.hidden_states.dtype, *rows),
            _made("out.sim_expert_ids", torch.int32, *pairs),
            _made("out.sim_scales", torch.float32, *pairs),
            _made("out.atten_batch_size", torch.int32, t.ratio),
            _made("out.x_active_mask", torch.bool, out.x_active_mask.shape[0]),
        )
        sent = _given("hidden_states", dtype, TOKENS, t.hidden, optional=True)
        numbers = (TOKENS, t.hidden, t.topk, t.ffn_size, t.attn_size, t.rank)
        return self._library.plan(
            "aclnnA2e", (sent, None, None, *numbers, group, t.aiv_num, 0, *outputs)
        )

    def empty_a2e(self, num_tokens: int) -> A2EOutput:
        """Uninitialised outputs for `a2e` that a caller may own and pass as `out`."""
        t = self._topology
        rows, width = (num_tokens, t.hidden) if t.is_ffn else (1, 1)
        return A2EOutput(
            self._empty(rows, width),
            self._empty(rows, t.topk, of=torch.int32),
            self._empty(rows, t.topk, of=torch.float32),
            self._empty(t.ratio, of=torch.int32),
            self._empty(t.ratio, of=torch.bool),
        )

    def e2a(
        self, group: str, hidden_states: Tensor, atten_batch_size: Tensor, *, stream: int
    ) -> Tensor:
        """See `CamP2POps.e2a`. Asynchronous. Raises ConfigError or AclError before anything is
        queued."""
        t = self._topology
        self._check("hidden_states", hidden_states, _HALF, (None, t.hidden))
        self._check("atten_batch_size", atten_batch_size, _INT32, (t.ratio,))
        rows = hidden_states.shape[0]
        _check_rows(t, "rows of hidden_states", rows)
        result = self._dummy if t.is_ffn else self._empty(rows, t.hidden)
        key = ("e2a", group, hidden_states.dtype)
        plan = self._plans.get(key, lambda: self._e2a_plan(group, hidden_states.dtype))
        addresses = (hidden_states.data_ptr(), atten_batch_size.data_ptr(), result.data_ptr())
        plan.launch(rows, 0, 0, stream, *addresses)
        return result

    def _e2a_plan(self, group: str, dtype: torch.dtype) -> OpPlan:
        t = self._topology
        rows: tuple[int | str, int] = (1, 1) if t.is_ffn else (TOKENS, t.hidden)
        parameters = (
            _given("hidden_states", dtype, TOKENS, t.hidden),
            _given("atten_batch_size", torch.int32, t.ratio),
            *(TOKENS, t.hidden, t.topk, t.ffn_size, t.attn_size, t.rank),
            *(group, t.aiv_num),
            _made("result", self._dtype, *rows),
        )
        return self._library.plan("aclnnE2a", parameters)


def _check_rows(t: CamP2PTopology, what: str, rows: int) -> None:
    if rows < 1:
        refuse(what, rows, "1 or more", "never send an empty stage")
    if t.is_ffn and rows % t.ratio:
        refuse(
            what,
            rows,
            f"a multiple of {t.ratio} (Attention ranks per FFN rank)",
            "pad all Attention peers to the same number of rows, and send as many back",
        )


class HostCamAsyncOps(_Operators):
    """`CamAsyncOps` over the C ABI.

    `shared_expert=False` is the plugin-owned routed-only set (aclnnAfdAsync*). True is the older
    set, whose library is closed: only the software device has it, under names of its own, and where
    it sends shared rows is that device's assumption.
    """

    def __init__(
        self,
        library: CamLibrary,
        topology: CamAsyncTopology,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
        *,
        shared_expert: bool = False,
    ) -> None:
        super().__init__(library, dtype, device)
        self._topology = topology
        self._shared = shared_expert
        self._prefix = "aclnnXsdUmdkAsync" if shared_expert else "aclnnAfdAsync"
        # Placeholders of the ABI; the operators read neither.
        self._comm_args = torch.zeros(1, dtype=torch.float16, device=self._device)
        self._anchor = torch.zeros(1, dtype=dtype, device=self._device)
        self._result = torch.zeros(1, dtype=torch.int8, device=self._device)

    @property
    def topology(self) -> CamAsyncTopology:
        """This rank's place."""
        return self._topology

    @property
    def shared_expert(self) -> bool:
        """Whether items carry a shared expert."""
        return self._shared

    def dispatch_send(
        self, group: str, hidden_states: Tensor, topk_ids: Tensor, layer: int, *, stream: int
    ) -> None:
        """See `CamAsyncOps.dispatch_send`. Asynchronous; the arguments stay alive until the stream
        passed."""
        t = self._topology
        _check_side("dispatch_send", t.is_ffn, False, t.rank)
        tokens = hidden_states.shape[0]
        if not 1 <= tokens <= t.max_tokens_per_rank:
            refuse(
                "num_tokens",
                tokens,
                f"1 to {t.max_tokens_per_rank} (max_seq_len / tp_size)",
                "split the batch, or send one padding row instead of none",
            )
        if layer < 0:
            refuse("layer", layer, "0 or more", "pass the layer index")
        self._check("hidden_states", hidden_states, _HALF, (tokens, t.hidden))
        self._check("topk_ids", topk_ids, _INT32, (tokens, t.topk))
        key = ("dispatch_send", group, hidden_states.dtype)
        plan = self._plans.get(key, lambda: self._dispatch_send_plan(group, key[2]))
        plan.launch(tokens, 0, layer, stream, hidden_states.data_ptr(), topk_ids.data_ptr())

    def _dispatch_send_plan(self, group: str, dtype: torch.dtype) -> OpPlan:
        t = self._topology
        parameters = (
            _given("hidden_states", dtype, TOKENS, t.hidden),
            _given("topk_ids", torch.int32, TOKENS, t.topk),
            self._constant(self._comm_args),
            *(0, t.max_seq_len, TOKENS, t.hidden, t.topk, t.ffn_size, t.attn_size),
            *(t.experts_per_rank, t.rank, t.world_size, NUMBER, t.tp_size, int(t.dynamic_quant)),
            group,
            *self._result_of_a_send(),
        )
        return self._library.plan(self._prefix + "DispatchSend", parameters)

    def _result_of_a_send(self) -> tuple[Parameter, ...]:
        """The newer set's sends have an output that says nothing."""
        return () if self._shared else (self._constant(self._result),)

    def empty_item(self, capacity: int | None = None) -> DispatchItem:
        """Uninitialised receive outputs a slot may own. `capacity` must equal the operator's
        (default: `receive_capacity()`); memory is touched only where rows arrive."""
        t = self._topology
        rows = receive_capacity() if capacity is None else capacity
        dtype = torch.int8 if t.dynamic_quant else self._dtype
        scales = rows if t.dynamic_quant else 1

        def shared(*shape: int, of: torch.dtype) -> Tensor | None:
            return self._empty(*shape, of=of) if self._shared else None

        return DispatchItem(
            self._empty(rows, t.hidden, of=dtype),
            self._empty(scales, of=torch.float32),
            self._empty(t.info_length(self._shared), of=torch.int64),
            self._empty(t.experts_per_rank, of=torch.int64),
            shared(rows, t.hidden, of=dtype),
            shared(scales, of=torch.float32),
            shared(1, of=torch.int64),
        )

    def dispatch_recv(
        self,
        group: str,
        *,
        stream: int,
        out: DispatchItem | None = None,
        stop: Tensor | None = None,
    ) -> DispatchItem:
        """See `CamAsyncOps.dispatch_recv`. Asynchronous; keep `stop` alive like the outputs."""
        t = self._topology
        _check_side("dispatch_recv", t.is_ffn, True, t.rank)
        if stop is not None:
            if not t.dynamic_quant or self._shared:
                refuse("stop", "given", "routed-only operators with dynamic_quant", "leave it out")
            self._check("stop", stop, _HALF, (16,))
        item = self.empty_item() if out is None else out
        dtypes = (torch.int8,) if t.dynamic_quant else _HALF
        rows = item.hidden_states.shape[0]
        outputs = [self._check("out.hidden_states", item.hidden_states, dtypes, (rows, t.hidden))]
        scales = (rows if t.dynamic_quant else 1,)
        if self._shared:
            outputs += self._shared_outputs(item, rows)
        else:
            outputs.append(self._check("out.scales", item.scales, _FLOAT, scales))
        length = (t.info_length(self._shared),)
        outputs.append(self._check("out.batch_info", item.batch_info, _INT64, length))
        counts = (t.experts_per_rank,)
        outputs.append(self._check("out.tokens_per_expert", item.tokens_per_expert, _INT64, counts))
        if item.shared_count is not None and self._shared:
            outputs.append(self._check("out.shared_count", item.shared_count, _INT64, (1,)))
        anchor = self._anchor if stop is None else stop
        key = ("dispatch_recv", group, outputs[0].dtype, stop is None, anchor.dtype)
        plan = self._plans.get(key, lambda: self._dispatch_recv_plan(group, outputs, anchor))
        addresses = [one.data_ptr() for one in outputs]
        plan.launch(rows, 0, 0, stream, anchor.data_ptr(), *addresses)
        return item

    def _shared_outputs(self, item: DispatchItem, rows: int) -> list[Tensor]:
        """The shared expert's rows, both scales."""
        t = self._topology
        shared, scales = item.shared_hidden_states, item.shared_scales
        if shared is None or scales is None or item.shared_count is None:
            refuse("out", "without a shared expert", "as empty_item makes it", "use that")
        dtype, length = (item.hidden_states.dtype,), (rows if t.dynamic_quant else 1,)
        return [
            self._check("out.shared_hidden_states", shared, dtype, (rows, t.hidden)),
            self._check("out.scales", item.scales, _FLOAT, length),
            self._check("out.shared_scales", scales, _FLOAT, length),
        ]

    def _dispatch_recv_plan(self, group: str, outputs: Sequence[Tensor], anchor: Tensor) -> OpPlan:
        t = self._topology
        rows, each = (TOKENS, t.hidden), TOKENS if t.dynamic_quant else 1
        shapes: list[tuple[int | str, ...]] = [rows, (each,)]
        if self._shared:
            shapes = [rows, rows, (each,), (each,)]
        shapes += [(t.info_length(self._shared),), (t.experts_per_rank,), (1,)]
        made = [
            _made(f"output {number + 1}", one.dtype, *shape)
            for number, (one, shape) in enumerate(zip(outputs, shapes, strict=False))
        ]
        parameters = (
            _given("stop", anchor.dtype, anchor.numel()),
            self._constant(self._comm_args),
            *(0, t.max_seq_len, t.hidden, t.topk, t.ffn_size, t.attn_size, t.experts_per_rank),
            *(t.rank, t.world_size, t.tp_size, int(t.dynamic_quant)),
            group,
            *made,
        )
        return self._library.plan(self._prefix + "DispatchRecv", parameters)

    def combine_send(
        self,
        group: str,
        expert_out: Tensor,
        batch_info: Tensor,
        *,
        stream: int,
        shared_out: Tensor | None = None,
    ) -> None:
        """See `CamAsyncOps.combine_send`. Asynchronous; the arguments stay alive until the stream
        passed."""
        t = self._topology
        _check_side("combine_send", t.is_ffn, True, t.rank)
        self._check("expert_out", expert_out, _HALF, (None, t.hidden))
        rows, shared_rows = expert_out.shape[0], 0
        if rows < 1:
            refuse("rows of expert_out", rows, "1 or more", "send one zero row when none is routed")
        self._check("batch_info", batch_info, _INT64, (t.info_length(self._shared),))
        if self._shared != (shared_out is not None):
            refuse(
                "shared_out",
                None if shared_out is None else "given",
                "given for the operator set with a shared expert, else None",
                "pass what the operator set wants",
            )
        addresses = [expert_out.data_ptr(), batch_info.data_ptr()]
        if shared_out is not None:
            self._check("shared_out", shared_out, (expert_out.dtype,), (None, t.hidden))
            shared_rows = shared_out.shape[0]
            addresses.insert(1, shared_out.data_ptr())
        key = ("combine_send", group, expert_out.dtype)
        plan = self._plans.get(key, lambda: self._combine_send_plan(group, expert_out.dtype))
        plan.launch(rows, shared_rows, 0, stream, *addresses)

    def _combine_send_plan(self, group: str, dtype: torch.dtype) -> OpPlan:
        t = self._topology
        rows = [_given("expert_out", dtype, TOKENS, t.hidden)]
        if self._shared:
            rows.append(_given("shared_out", dtype, SECOND, t.hidden))
        parameters = (
            *rows,
            self._constant(self._comm_args),
            _given("batch_info", torch.int64, t.info_length(self._shared)),
            *(0, t.max_seq_len, t.hidden, t.topk, t.ffn_size, t.attn_size, t.experts_per_rank),
            *(t.rank, t.world_size, t.tp_size),
            group,
            *self._result_of_a_send(),
        )
        return self._library.plan(self._prefix + "CombineSend", parameters)

    def combine_recv(
        self, group: str, topk_ids: Tensor, topk_weights: Tensor, *, stream: int
    ) -> Tensor:
        """See `CamAsyncOps.combine_recv`. Asynchronous; the result is valid once the stream
        passed."""
        t = self._topology
        _check_side("combine_recv", t.is_ffn, False, t.rank)
        self._check("topk_ids", topk_ids, _INT32, (None, t.topk))
        tokens = topk_ids.shape[0]
        self._check("topk_weights", topk_weights, _FLOAT, (tokens, t.topk))
        result = self._empty(tokens, t.hidden)
        key = ("combine_recv", group)
        plan = self._plans.get(key, lambda: self._combine_recv_plan(group))
        addresses = (topk_ids.data_ptr(), topk_weights.data_ptr(), result.data_ptr())
        plan.launch(tokens, 0, 0, stream, *addresses)
        return result

    def _combine_recv_plan(self, group: str) -> OpPlan:
        t = self._topology
        parameters = (
            self._constant(self._anchor),
            _given("topk_ids", torch.int32, TOKENS, t.topk),
            _given("topk_weights", torch.float32, TOKENS, t.topk),
            self._constant(self._comm_args),
            *(0, TOKENS, t.hidden, t.topk, t.ffn_size, t.attn_size, t.experts_per_rank),
            *(t.rank, t.world_size),
            group,
            _made("result", self._dtype, TOKENS, t.hidden),
        )
        return self._library.plan(self._prefix + "CombineRecv", parameters)
