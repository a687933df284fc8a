# SPDX-License-Identifier: Apache-2.0
"""FusedMoE, the split path: recv (dispatch), compute (grouped product) and send (combine).

The three phases are items of the shared executor: one item a call in serial mode, chunks of it with
overlap. On npu tensors torch's operators follow the current stream, so each phase makes its own
stream current, and memory needs care that CPU tensors do not:

    the caller's tensors   recv waits for the caller's stream; the host returns after the last chunk
    between two phases     what compute made is kept until the item's completion was observed: the
                           allocator would give it to the next item's compute at once
    results                the streams write to their memory again only in the next call, after what
                           the caller's stream had to do until then
    collectives            HCCL runs a group's in order of issue, which is the same on all ranks

In serial mode on npu tensors everything follows the caller's stream. The host waits here for the
end of the call before, whose slot and memory a call takes over; what a dispatch waits for stands in
`xmoe.comm.transport`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from xmoe.comm.transport import CollectiveTransport
from xmoe.config import XmoeConfig
from xmoe.executor import Phase, PhaseContext, PhaseKind, StreamExecutor, WorkItem, prefetch
from xmoe.kernels.capability import NpuOperators
from xmoe.kernels.device import Device, Event
from xmoe.kernels.npu_device import make_current
from xmoe.kernels.ops.fused_moe import SplitExperts
from xmoe.multistream import StreamMode
from xmoe.types import ExpertWeights, MoeShape, TokenBatch


@dataclass(frozen=True)
class SplitPath:
    """What the split path of all layers of one runner has in common."""

    shape: MoeShape
    config: XmoeConfig
    device: Device
    executor: StreamExecutor
    transport: CollectiveTransport
    operators: NpuOperators

    def experts(self, weights: ExpertWeights) -> SplitExperts:
        """One layer's experts. Local. Raises ConfigError: this device cannot be deterministic."""
        return SplitExperts(
            weights,
            activation=self.shape.activation,
            clamp=self.shape.activation_clamp,
            layout=self.shape.gate_up_layout,
            deterministic=self.config.deterministic,
            operators=self.operators,
        )

    def run(
        self,
        experts: SplitExperts,
        batch: TokenBatch,
        counts: Sequence[int],
        index: int,
        problem: Exception | None = None,
    ) -> Tensor:
        """One layer call: [T, H], new memory. COLLECTIVE.

        The number of chunks comes from all ranks' counts, so it is the same everywhere; a rank
        whose chunk is empty dispatches it all the same.

        Args:
            counts: tokens of each rank. index: of the layer, for reports. problem: why this rank's
                batch cannot be taken; raised on all ranks before a row is sent.
        """
        on_npu = self.device.torch_device.type == "npu"
        if self.executor.options.mode is not StreamMode.OVERLAP:
            ticket = self.executor.submit(self._item(experts, batch, index, None, problem))
            # On the caller's own stream the result is in order already.
            values = ticket.context.values if on_npu else ticket.result()
            output: Tensor = values["output"]
            return output
        ready = None
        if on_npu:
            ready = self.device.create_event()
            ready.record(self.device.current_stream())
        count = max(1, -(-max(counts) // self.config.split_chunk_tokens))
        items = [self._item(experts, part, index, ready, problem) for part in chunks(batch, count)]
        try:
            tickets = prefetch(self.executor, items)
            outputs: list[Tensor] = [ticket.result()["output"] for ticket in tickets]
        finally:
            if ready is not None:
                ready.close()
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _item(
        self,
        experts: SplitExperts,
        batch: TokenBatch,
        index: int,
        ready: Event | None,
        problem: Exception | None,
    ) -> WorkItem:
        transport = self.transport

        def recv(context: PhaseContext) -> None:
            if ready is not None:
                context.stream.wait_event(ready)
            with make_current(context.stream):
                received = transport.dispatch(batch, problem)
            context.values["received"] = received

        def compute(context: PhaseContext) -> None:
            tokens, per_expert, handle = context.values.pop("received")
            with make_current(context.stream):
                computed = experts(tokens, per_expert)
            # The next item's compute would be given this memory while this item's send reads it.
            # What recv made is safe: the next recv to allocate waits for this item's end.
            context.keep(computed)
            context.values["computed"] = (computed, handle)

        def send(context: PhaseContext) -> None:
            with make_current(context.stream):
                context.values["output"] = transport.combine(*context.values.pop("computed"))

        phases = (
            Phase(PhaseKind.RECV, "fused_moe", recv),
            Phase(PhaseKind.COMPUTE, "experts", compute),
            Phase(PhaseKind.SEND, "fused_moe", send),
        )
        return WorkItem("fused_moe", index, phases)


def chunks(batch: TokenBatch, count: int) -> list[TokenBatch]:
    """`count` parts of the rows, as even as possible, some maybe empty."""
    hidden, ids, weights = batch.hidden_states, batch.topk_ids, batch.topk_weights
    if min(hidden.dim(), ids.dim(), weights.dim()) < 1:
        return [batch] * count  # no batch at all: dispatch refuses it, on every rank
    edges = [hidden.shape[0] * n // count for n in range(count + 1)]
    edges[-1] = max(hidden.shape[0], ids.shape[0], weights.shape[0])  # lets a mismatch show
    return [
        TokenBatch(hidden[a:b], ids[a:b], weights[a:b])
        for a, b in zip(edges, edges[1:], strict=False)
    ]
