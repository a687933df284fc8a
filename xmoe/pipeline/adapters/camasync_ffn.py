# SPDX-License-Identifier: Apache-2.0
"""CAMAsync, FFN side: receive whatever is next, find out what it is, compute, answer."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from xmoe.errors import CommError, ConfigError
from xmoe.kernels.ops.cam.protocols import CamAsyncOps, DispatchItem, HostCopy, ReadinessProbe
from xmoe.kernels.ops.cam.topology import CamAsyncTopology
from xmoe.kernels.ops.torch_stream import on_stream
from xmoe.multistream import MetadataRead, RecvGate
from xmoe.pipeline.adapters.base import (
    UNKNOWN_LAYER,
    FfnInput,
    FfnModel,
    GroupAborter,
    StepPlan,
)
from xmoe.pipeline.adapters.camasync import AFDAsyncTransferState, CamAsyncAdapter
from xmoe.pipeline.channels import ChannelRule
from xmoe.pipeline.items import Phase, PhaseContext, PhaseKind, WorkItem


@dataclass(frozen=True)
class ItemHead:
    """The host's reading of one received item."""

    attention_rank: int
    layer: int
    first_expert: int
    last_expert: int
    num_tokens: int
    shared_tokens: int = 0

    @classmethod
    def of(cls, info: list[int], topology: CamAsyncTopology, shared: bool) -> ItemHead:
        """From batch_info: behind its five words and the prefixes come the counts of the whole
        dispatch, by TP rank, then expert slot; slot 0 is the shared expert where there is one."""
        rank, layer, first, last = info[1:5]
        if rank < 0:  # the operators' shutdown item carries nothing
            return cls(rank, layer, first, last, 0)
        width = topology.experts_per_rank + shared
        counts = info[5 + topology.tp_size :]
        rows = [sum(counts[slot::width]) for slot in range(first, last + 1)]
        own = rows[0] if shared and first == 0 else 0
        return cls(rank, layer, first, last, sum(rows) - own, own)


class StopBuffer(Protocol):
    """The operators' own way to end a receive that waits."""

    @property
    def tensor(self) -> Tensor:
        """What a receive is given in place of its placeholder."""

    def write(self, stream: int) -> None:
        """Set it, from the host, on a stream that no operator holds. Final."""


@dataclass
class _SlotBuffers:
    """`own`: what receives are told to fill; None where each makes its outputs anew. `copy`: pinned
    memory for metadata."""

    own: DispatchItem | None
    copy: HostCopy | None
    received: DispatchItem | None = None
    computed: Tensor | None = None
    shared: Tensor | None = None
    empty: Tensor | None = None

    @property
    def item(self) -> DispatchItem:
        """What the slot's receive brought."""
        assert self.received is not None
        return self.received


class _Posted:
    """A receive that may be under way: until its item is over, or a copy queued behind it was
    made."""

    def __init__(self, posted: set[_Posted], copy: HostCopy | None) -> None:
        self._all = posted
        self._copy = copy
        posted.add(self)

    @property
    def over(self) -> bool:
        return self._copy is not None and self._copy.arrived

    def close(self) -> None:
        self._all.discard(self)


class CamAsyncFfnAdapter(CamAsyncAdapter):
    """FFN side.

    Args:
        gate: whether a receive is posted only when something is there. `probe` answers that.
        metadata_read: blocking: the host reads batch_info once the receive is over. pinned_async:
            it is copied to pinned memory in the receive's stream, behind the receive. device: the
            host reads nothing, the model takes layer and rows from device tensors.
        host_copy: makes a slot's pinned memory. Without it, "device" behind a readiness probe
            knows that a receive is over only when its item is. stop: ends a receive that waits.
        capacity: rows of a receive output, the operators' own; None asks the operators.
        alive: called while idle; raises when a peer is gone.
    """

    def __init__(
        self,
        ops: CamAsyncOps,
        group: str,
        *,
        gate: RecvGate = RecvGate.NONE,
        probe: ReadinessProbe | None = None,
        aborter: GroupAborter | None = None,
        capacity: int | None = None,
        dtype: torch.dtype = torch.bfloat16,
        core_limits: bool = False,
        alive: Callable[[], None] | None = None,
        metadata_read: MetadataRead = MetadataRead.BLOCKING,
        host_copy: Callable[[], HostCopy] | None = None,
        stop: StopBuffer | None = None,
    ) -> None:
        super().__init__(
            ops,
            group,
            is_ffn=True,
            aborter=aborter,
            probe=probe,
            core_limits=core_limits,
            capacity=capacity,
            host_copy=host_copy is not None,
        )
        if gate is RecvGate.READY_PROBE and probe is None:
            raise ConfigError(
                'recv_gate="ready_probe" without a probe; allowed: an operator library that has '
                'one; next: recv_gate="core_partition", or mode="serial"'
            )
        self._gate = gate
        self._dtype = dtype
        self._alive = alive
        self._read = metadata_read
        self._host_copy = host_copy
        self._stop = stop
        self._idle = 0
        self._slots: dict[int, _SlotBuffers] = {}
        self._partial: ItemHead | None = None
        self._posted: set[_Posted] = set()
        self.finished = 0
        self.stopped = False
        self.metadata_reads = 0
        self.heads: deque[ItemHead] = deque(maxlen=1024)
        if metadata_read not in self.capabilities.metadata_reads:
            raise ConfigError(
                f'metadata_read="{metadata_read.value}" is not possible: '
                f"{'; '.join(self.capabilities.metadata_problems)}; allowed: "
                f"{', '.join(sorted(way.value for way in self.capabilities.metadata_reads))}; "
                "next: choose one of them"
            )

    def channels(self) -> tuple[ChannelRule, ...]:
        """Receives on one stream, sends on one stream in their order, the two side by side."""
        return (ChannelRule(self._group),)

    def items(self, plan: StepPlan, model: FfnModel) -> Iterator[WorkItem]:
        """Items until the step's dispatches are finished; a dispatch may come in several."""
        goal = None if plan.dispatches is None else self.finished + plan.dispatches
        while not self.stopped and (goal is None or self.finished < goal):
            yield self.item(model, may_idle=goal is None)

    def item(self, model: FfnModel, *, may_idle: bool = False) -> WorkItem:
        """Receive whatever is next, compute, send. `may_idle`: perhaps nothing is."""
        gate = self._ready if self._gate is RecvGate.READY_PROBE else None
        group = self._group
        phases = [
            Phase(PhaseKind.RECV, group, self._recv),
            Phase(PhaseKind.METADATA, group, self._metadata),
            Phase(PhaseKind.COMPUTE, "ffn", lambda context: self._compute(context, model)),
            Phase(PhaseKind.SEND, group, self._send),
        ]
        if self._read is MetadataRead.DEVICE:
            del phases[1]
        return WorkItem("camasync", UNKNOWN_LAYER, tuple(phases), gate=gate, may_idle=may_idle)

    def settled(self) -> None:
        """See FfnAdapter."""
        self._posted.clear()

    @property
    def stoppable(self) -> bool:
        """See FfnAdapter. Without a stop buffer nothing can; with a readiness probe no receive
        waits, so the loop can end between two items."""
        return self._stop is not None and self._gate is not RecvGate.READY_PROBE

    def stop(self, stream: int) -> bool:
        """See FfnAdapter and `stoppable`."""
        if self._stop is None or not self.stoppable:
            return False
        self._stop.write(stream)
        if self._read is MetadataRead.DEVICE:
            self.stopped = True  # nobody reads that an item is the shutdown item
        return True

    def _ready(self) -> bool:
        assert self._probe is not None
        # The probe still counts what a posted receive has not taken yet, and a receive posted for
        # nothing would hold all cores. Where the host reads the metadata that receive is over.
        waiting = sum(not receive.over for receive in self._posted)
        if self._probe.ready(self._topology, self._group) > waiting:
            self._idle = 0
            return True
        self._idle += 1
        if self._alive is not None and self._idle % 256 == 0:
            self._alive()
        return False

    def _recv(self, context: PhaseContext) -> None:
        buffers = self._buffers(context.slot)
        stop = None if self._stop is None else self._stop.tensor
        item = self._ops.dispatch_recv(
            self._group, stream=context.stream.handle(), out=buffers.own, stop=stop
        )
        buffers.received = item
        context.keep(buffers, item, stop)
        if buffers.copy is not None:
            # Read again: torch operators may have been queued on the host since.
            buffers.copy.queue(item.batch_info, context.stream.handle())
        if self._read is MetadataRead.DEVICE:
            context.own(_Posted(self._posted, buffers.copy))

    def _metadata(self, context: PhaseContext) -> None:
        """Host read, after the receive is over: who sent it, which layer, how many rows."""
        t, buffers = self._topology, self._buffers(context.slot)
        item = buffers.item
        info = item.batch_info.tolist() if buffers.copy is None else buffers.copy.read()
        self.metadata_reads += 1
        head = ItemHead.of(info, t, self._ops.shared_expert)
        self._check_order(head)
        tokens, shared, quant = head.num_tokens, head.shared_tokens, t.dynamic_quant
        context.layer = head.layer
        context.values["head"] = head
        context.values["state"] = AFDAsyncTransferState(
            max(1, info[0]),
            t.hidden,
            t.topk,
            head.layer,
            item.batch_info,
            item.tokens_per_expert,
            item.scales[:tokens] if quant else None,
            None if item.shared_hidden_states is None else item.shared_hidden_states[:shared],
            None if item.shared_scales is None or not quant else item.shared_scales[:shared],
        )
        self.heads.append(head)
        if head.attention_rank < 0:
            self.stopped = True  # the operators' own shutdown item; combine_send skips it
        elif head.last_expert == self._last_expert:
            self.finished += 1
            self._partial = None
        else:
            self._partial = head

    @property
    def _last_expert(self) -> int:
        return self._topology.experts_per_rank - 1 + int(self._ops.shared_expert)

    def _check_order(self, head: ItemHead) -> None:
        """A dispatch that comes in parts comes in one piece, in the order of its experts."""
        before = self._partial
        if before is None or head.attention_rank < 0:
            return
        same = (head.attention_rank, head.layer) == (before.attention_rank, before.layer)
        if not same or head.first_expert != before.last_expert + 1:
            raise CommError(
                f"received {head} after the unfinished {before}; allowed: the rest of the same "
                "dispatch; next: keep all receives of a group on one stream"
            )

    def _compute(self, context: PhaseContext, model: FfnModel) -> None:
        buffers, stream = self._buffers(context.slot), context.stream.handle()
        item = buffers.item
        self._make_outputs(buffers, stream)
        assert buffers.computed is not None
        if self._read is MetadataRead.DEVICE:
            self._compute_unread(context, model, stream)
            return
        head: ItemHead = context.values["head"]
        state: AFDAsyncTransferState = context.values["state"]
        rows = head.num_tokens
        if rows > 0:
            routed = FfnInput(
                item.hidden_states[:rows],
                head.layer,
                context.stage,
                state.dynamic_scales,
                state.group_list,
                batch_info=item.batch_info,
            )
            model.compute(routed, buffers.computed[:rows], stream)
        if head.shared_tokens > 0:
            assert state.expand_x_shared is not None and buffers.shared is not None
            rows_in, scales = state.expand_x_shared, state.dynamic_scales_shared
            shared = FfnInput(rows_in, head.layer, context.stage, scales, shared=True)
            model.compute(shared, buffers.shared[: head.shared_tokens], stream)

    def _compute_unread(self, context: PhaseContext, model: FfnModel, stream: int) -> None:
        """Over the whole receive buffers; device tensors say how much of them is filled."""
        buffers, quant = self._buffers(context.slot), self._topology.dynamic_quant
        item = buffers.item
        assert buffers.computed is not None
        routed = FfnInput(
            item.hidden_states,
            UNKNOWN_LAYER,
            context.stage,
            item.scales if quant else None,
            item.tokens_per_expert,
            batch_info=item.batch_info,
        )
        model.compute(routed, buffers.computed, stream)
        if item.shared_hidden_states is not None:
            assert buffers.shared is not None
            shared = FfnInput(
                item.shared_hidden_states,
                UNKNOWN_LAYER,
                context.stage,
                item.shared_scales if quant else None,
                item.shared_count,
                shared=True,
                batch_info=item.batch_info,
            )
            model.compute(shared, buffers.shared, stream)

    def _send(self, context: PhaseContext) -> None:
        """Answer every item, also one without a row: Attention waits for all FFN ranks."""
        buffers, stream = self._buffers(context.slot), context.stream.handle()
        rows, shared = buffers.computed, buffers.shared
        assert rows is not None
        if self._read is MetadataRead.DEVICE:
            self.finished += 1
        else:
            head: ItemHead = context.values["head"]
            rows = self._filled(buffers, rows, head.num_tokens, stream)
            if shared is not None:
                shared = self._filled(buffers, shared, head.shared_tokens, stream)
        info = buffers.item.batch_info
        self._ops.combine_send(self._group, rows, info, stream=stream, shared_out=shared)

    def _filled(self, buffers: _SlotBuffers, rows: Tensor, count: int, stream: int) -> Tensor:
        """The rows that were computed, or one zero row. Never the receive buffer as a stand-in:
        with quantisation it is int8, which combine_send refuses."""
        if count:
            return rows[:count]
        if buffers.empty is None:
            with on_stream(rows.device, stream):
                buffers.empty = torch.zeros(
                    1, self._topology.hidden, dtype=self._dtype, device=rows.device
                )
        return buffers.empty

    def _buffers(self, slot: int) -> _SlotBuffers:
        found = self._slots.get(slot)
        if found is None:
            copy = None
            # With "device" nobody reads the values: that they are there tells the gate something.
            gated = self._read is MetadataRead.DEVICE and self._gate is RecvGate.READY_PROBE
            if self._host_copy is not None and (gated or self._read is MetadataRead.PINNED_ASYNC):
                copy = self._host_copy()
            found = _SlotBuffers(self._ops.empty_item(self._capacity), copy)
            self._slots[slot] = found
        return found

    def _make_outputs(self, buffers: _SlotBuffers, stream: int) -> None:
        """Once for each slot; they belong to the stream that computes."""
        if buffers.computed is None:
            item = buffers.item

            with on_stream(item.hidden_states.device, stream):
                buffers.computed = torch.empty_like(item.hidden_states, dtype=self._dtype)
                if item.shared_hidden_states is not None:
                    buffers.shared = torch.empty_like(buffers.computed)

    def leftovers(self) -> tuple[str, ...]:
        """A dispatch of which a part is missing."""
        return () if self._partial is None else (f"unfinished {self._partial}",)
