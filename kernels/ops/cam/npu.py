# SPDX-License-Identifier: Apache-2.0
"""The operator protocols over the torch operators: npu tensors, the vendor's own registration where
there is one. Each call makes its outputs anew, on the stream it is given."""

from __future__ import annotations

import torch
from torch import Tensor

from xmoe.kernels.ops.cam.protocols import A2EOutput, DispatchItem
from xmoe.kernels.ops.cam.topology import CamAsyncTopology, CamP2PTopology, refuse, require
from xmoe.kernels.ops.cam.torch_ops import item_of, operator
from xmoe.kernels.ops.torch_stream import on_stream


def _refuse_outputs(given: object) -> None:
    if given is not None:
        refuse("out", "given", "None, torch operators have no form with outputs", "leave it out")


class NpuCamP2POps:
    """`CamP2POps` by afd_ascend::a2e and e2a. bfloat16 only, as the operators fix it."""

    def __init__(self, topology: CamP2PTopology, device: torch.device) -> None:
        self._topology = topology
        self._device = device
        self._a2e = operator("afd_ascend::a2e")
        self._e2a = operator("afd_ascend::e2a")
        types = (torch.bfloat16, torch.int32, torch.float32)
        self._nothing = tuple(torch.empty(0, dtype=one, device=device) for one in types)

    @property
    def topology(self) -> CamP2PTopology:
        """This rank's place."""
        return self._topology

    def empty_a2e(self, num_tokens: int) -> None:
        """See `CamP2POps.empty_a2e`: each call makes its own."""

    def _place(self, rows: int, group: str) -> tuple[int | str, ...]:
        t = self._topology
        return rows, t.hidden, t.topk, t.ffn_size, t.attn_size, t.rank, group, t.aiv_num

    def a2e(
        self,
        group: str,
        hidden_states: Tensor | None,
        num_tokens: int,
        *,
        stream: int,
        out: A2EOutput | None = None,
    ) -> A2EOutput:
        """See `CamP2POps.a2e`. Asynchronous."""
        _refuse_outputs(out)
        require("num_tokens", num_tokens, num_tokens >= 1, "1 or more", "never send an empty stage")
        x, *absent = self._nothing
        if not self._topology.is_ffn:
            if hidden_states is None or hidden_states.shape[0] != num_tokens:
                refuse("hidden_states", hidden_states, f"{num_tokens} rows to send", "pass them")
            x = hidden_states
        with on_stream(self._device, stream):
            return A2EOutput(*self._a2e(x, *absent, *self._place(num_tokens, group), 0))

    def e2a(
        self, group: str, hidden_states: Tensor, atten_batch_size: Tensor, *, stream: int
    ) -> Tensor:
        """See `CamP2POps.e2a`. Asynchronous."""
        place = self._place(hidden_states.shape[0], group)
        with on_stream(self._device, stream):
            result: Tensor = self._e2a(hidden_states, atten_batch_size, *place)
        return result


class NpuCamAsyncOps:
    """`CamAsyncOps` by afd_ascend::afd_async_*; with a shared expert, umdk_cam_op_lib::async_*."""

    def __init__(
        self,
        topology: CamAsyncTopology,
        device: torch.device,
        dtype: torch.dtype = torch.bfloat16,
        *,
        shared_expert: bool = False,
    ) -> None:
        self._topology = topology
        self._device = device
        self._shared = shared_expert
        prefix = "umdk_cam_op_lib::async_" if shared_expert else "afd_ascend::afd_async_"
        self._dispatch_send = operator(prefix + "dispatch_send")
        self._dispatch_recv = operator(prefix + "dispatch_recv")
        self._combine_send = operator(prefix + "combine_send")
        self._combine_recv = operator(prefix + "combine_recv")
        # Placeholders of the ABI; the operators read neither.
        self._comm = torch.zeros(1, dtype=torch.float16, device=device)
        self._anchor = torch.zeros(1, dtype=dtype, device=device)
        t = topology
        self._sizes = (t.hidden, t.topk, t.ffn_size, t.attn_size, t.experts_per_rank)
        self._ranks = (t.rank, t.world_size)

    @property
    def topology(self) -> CamAsyncTopology:
        """This rank's place."""
        return self._topology

    @property
    def shared_expert(self) -> bool:
        """Whether items carry a shared expert."""
        return self._shared

    def empty_item(self, capacity: int | None = None) -> None:
        """See `CamAsyncOps.empty_item`: each receive makes its own."""

    def dispatch_send(
        self, group: str, hidden_states: Tensor, topk_ids: Tensor, layer: int, *, stream: int
    ) -> None:
        """See `CamAsyncOps.dispatch_send`. Asynchronous."""
        t = self._topology
        tokens = (0, t.max_seq_len, hidden_states.shape[0])
        tail = (layer, t.tp_size, int(t.dynamic_quant), group)
        with on_stream(self._device, stream):
            self._dispatch_send(
                hidden_states, topk_ids, self._comm, *tokens, *self._sizes, *self._ranks, *tail
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
        _refuse_outputs(out)
        t = self._topology
        anchor = self._anchor if stop is None else stop
        tail = (t.tp_size, int(t.dynamic_quant), group)
        with on_stream(self._device, stream):
            made = self._dispatch_recv(
                anchor, self._comm, 0, t.max_seq_len, *self._sizes, *self._ranks, *tail
            )
        return item_of(list(made))

    def combine_send(
        self,
        group: str,
        expert_out: Tensor,
        batch_info: Tensor,
        *,
        stream: int,
        shared_out: Tensor | None = None,
    ) -> None:
        """See `CamAsyncOps.combine_send`. Asynchronous."""
        if self._shared != (shared_out is not None):
            refuse("shared_out", None, "given for the operator set with a shared expert", "correct")
        t = self._topology
        rows = (expert_out,) if shared_out is None else (expert_out, shared_out)
        tail = (t.tp_size, group)
        with on_stream(self._device, stream):
            self._combine_send(
                *rows, self._comm, batch_info, 0, t.max_seq_len, *self._sizes, *self._ranks, *tail
            )

    def combine_recv(
        self, group: str, topk_ids: Tensor, topk_weights: Tensor, *, stream: int
    ) -> Tensor:
        """See `CamAsyncOps.combine_recv`. Asynchronous."""
        tokens = (0, topk_ids.shape[0])
        with on_stream(self._device, stream):
            result: Tensor = self._combine_recv(
                self._anchor, topk_ids, topk_weights, self._comm, *tokens, *self._sizes,
                *self._ranks, group,
            )  # fmt: skip
        return result
