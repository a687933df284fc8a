# SPDX-License-Identifier: Apache-2.0
"""CAMAsync: dispatch and combine in separate halves, items in the order in which the device finds
them.

What an FFN rank receives next, and for which layer, is known only when it is there; so an item has
a metadata phase. What protects the windows is a credit: an Attention rank has one unanswered
dispatch in a group, whatever its stages. No operator enforces it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from xmoe.errors import CommError, ConfigError
from xmoe.kernels.ops.cam.protocols import CamAsyncOps, DispatchItem, ReadinessProbe
from xmoe.kernels.ops.cam.topology import CamAsyncTopology
from xmoe.multistream import Capabilities, MetadataRead, RecvGate
from xmoe.pipeline.adapters.base import (
    Abort,
    AttentionModel,
    AttentionOutput,
    FfnInput,
    FfnModel,
    GroupAborter,
    StepPlan,
)
from xmoe.pipeline.channels import ChannelRule
from xmoe.pipeline.items import Phase, PhaseContext, PhaseKind, WorkItem


@dataclass(slots=True)
class AFDAsyncTransferState:
    """What travels from a receive to its send (FFN), or from a dispatch to its combine (Attention).

    Tensors are views; the slot owns their bases. `token_nums_rankid_layeridx` is batch_info,
    `group_list` the rows of each expert.
    """

    batch_size: int = 1
    hidden_size: int = 1
    topk: int = 1
    layer_idx: int = 0
    token_nums_rankid_layeridx: Tensor | None = None
    expert_token_nums_shared: Tensor | None = None
    group_list: Tensor | None = None
    dynamic_scales: Tensor | None = None
    expand_x_shared: Tensor | None = None
    dynamic_scales_shared: Tensor | None = None


@dataclass(frozen=True)
class ItemHead:
    """The host's reading of one received item."""

    attention_rank: int
    layer: int
    first_expert: int
    last_expert: int
    num_tokens: int
    shared_tokens: int = 0


class _CamAsync:
    """What both roles share."""

    def __init__(
        self,
        ops: CamAsyncOps,
        topology: CamAsyncTopology,
        group: str,
        *,
        is_ffn: bool,
        aborter: GroupAborter | None,
        probe: ReadinessProbe | None,
        core_limits: bool,
    ) -> None:
        if topology.is_ffn != is_ffn:
            raise ConfigError(
                f"rank {topology.rank} of {topology.attn_size} Attention and {topology.ffn_size} "
                "FFN ranks; allowed: the adapter of its own role; next: Attention ranks come first"
            )
        self._ops = ops
        self._topology = topology
        self._group = group
        self._probe = probe
        self._core_limits = core_limits
        self._abort = Abort((group,), aborter)

    @property
    def capabilities(self) -> Capabilities:
        """From the sources of the routed-only operators; of the closed older set it is assumed."""
        return Capabilities(
            connector="CAMAsync",
            roles=frozenset({"ffn", "attention"}),
            honours_current_stream=True,
            recv_send_same_channel_exclusive=False,
            recv_blocks_cores=True,
            host_metadata=True,
            metadata_reads=frozenset({MetadataRead.BLOCKING}),
            graph_safe=False,
            max_outstanding_per_channel=1,
            ready_probe=self._probe is not None,
            core_limits=self._core_limits,
            peer_abort=self._abort.aborter is not None,
        )

    def abort(self, reason: int) -> bool:
        """See Adapter."""
        return self._abort(reason)


@dataclass
class _SlotBuffers:
    received: DispatchItem
    computed: Tensor
    shared: Tensor | None
    empty: Tensor | None = None


class CamAsyncFfnAdapter(_CamAsync):
    """FFN side.

    Args:
        gate: whether a receive is posted only when something is there. `probe` answers that.
        capacity: rows of a receive output, the operators' own; None asks the operators.
        alive: called while idle; raises when a peer is gone.
    """

    def __init__(
        self,
        ops: CamAsyncOps,
        topology: CamAsyncTopology,
        group: str,
        *,
        gate: RecvGate = RecvGate.NONE,
        probe: ReadinessProbe | None = None,
        aborter: GroupAborter | None = None,
        capacity: int | None = None,
        dtype: torch.dtype = torch.bfloat16,
        core_limits: bool = False,
        alive: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(
            ops,
            topology,
            group,
            is_ffn=True,
            aborter=aborter,
            probe=probe,
            core_limits=core_limits,
        )
        if gate is RecvGate.READY_PROBE and probe is None:
            raise ConfigError(
                'recv_gate="ready_probe" without a probe; allowed: an operator library that has '
                'one; next: recv_gate="core_partition", or mode="serial"'
            )
        self._gate = gate
        self._capacity = capacity
        self._dtype = dtype
        self._alive = alive
        self._idle = 0
        self._slots: dict[int, _SlotBuffers] = {}
        self._partial: ItemHead | None = None
        self.finished = 0
        self.stopped = False
        self.metadata_reads = 0
        self.heads: deque[ItemHead] = deque(maxlen=1024)

    def channels(self) -> tuple[ChannelRule, ...]:
        """Receives on one stream, sends on one stream in their order, the two side by side."""
        return (ChannelRule(self._group),)

    def items(self, plan: StepPlan, model: FfnModel) -> Iterator[WorkItem]:
        """Items until the step's dispatches are finished; a dispatch may come in several."""
        goal = None if plan.dispatches is None else self.finished + plan.dispatches
        while not self.stopped and (goal is None or self.finished < goal):
            yield self.item(model)

    def item(self, model: FfnModel) -> WorkItem:
        """Receive whatever is next, compute, send."""
        gate = self._ready if self._gate is RecvGate.READY_PROBE else None
        group = self._group
        phases = (
            Phase(PhaseKind.RECV, group, self._recv),
            Phase(PhaseKind.METADATA, group, self._metadata),
            Phase(PhaseKind.COMPUTE, "ffn", lambda context: self._compute(context, model)),
            Phase(PhaseKind.SEND, group, self._send),
        )
        return WorkItem("camasync", -1, phases, gate=gate)

    def _ready(self) -> bool:
        assert self._probe is not None
        if self._probe.ready(self._topology, self._group) > 0:
            self._idle = 0
            return True
        self._idle += 1
        if self._alive is not None and self._idle % 256 == 0:
            self._alive()
        return False

    def _recv(self, context: PhaseContext) -> None:
        buffers = self._buffers(context.slot)
        context.keep(buffers)
        handle = context.stream.handle()
        self._ops.dispatch_recv(self._topology, self._group, stream=handle, out=buffers.received)

    def _metadata(self, context: PhaseContext) -> None:
        """Host reads, after the receive is over: who sent it, which layer, how many rows."""
        t, item = self._topology, self._buffers(context.slot).received
        info = item.batch_info.tolist()
        tokens = int(item.tokens_per_expert.sum())
        shared = 0 if item.shared_count is None else int(item.shared_count)
        self.metadata_reads += 2 + (item.shared_count is not None)
        head = ItemHead(info[1], info[2], info[3], info[4], tokens, shared)
        self._check_order(head)
        quant = t.dynamic_quant
        context.layer = head.layer
        context.values["head"] = head
        context.values["state"] = AFDAsyncTransferState(
            max(1, info[0]),
            t.hidden,
            t.topk,
            head.layer,
            item.batch_info,
            item.shared_count,
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
        buffers, head = self._buffers(context.slot), context.values["head"]
        state: AFDAsyncTransferState = context.values["state"]
        stream = context.stream.handle()
        rows = head.num_tokens
        if rows > 0:
            hidden = buffers.received.hidden_states[:rows]
            item = FfnInput(
                hidden, head.layer, context.stage, state.dynamic_scales, state.group_list
            )
            model.compute(item, buffers.computed[:rows], stream)
        if head.shared_tokens > 0:
            assert state.expand_x_shared is not None and buffers.shared is not None
            rows_in, scales = state.expand_x_shared, state.dynamic_scales_shared
            item = FfnInput(rows_in, head.layer, context.stage, scales, shared=True)
            model.compute(item, buffers.shared[: head.shared_tokens], stream)

    def _send(self, context: PhaseContext) -> None:
        """Answer every item, also one without a row: Attention waits for all FFN ranks."""
        buffers, head = self._buffers(context.slot), context.values["head"]
        # Never the receive buffer as a stand-in: with quantisation it is int8, which is refused.
        # Allocated here, so that it belongs to the stream that uses it.
        if buffers.empty is None and (head.num_tokens == 0 or head.shared_tokens == 0):
            buffers.empty = torch.zeros(
                1, self._topology.hidden, dtype=self._dtype, device=buffers.computed.device
            )
        shared = None
        if buffers.shared is not None:
            n = head.shared_tokens
            shared = buffers.shared[:n] if n else buffers.empty
        rows = buffers.computed[: head.num_tokens] if head.num_tokens else buffers.empty
        assert rows is not None
        self._ops.combine_send(
            self._topology,
            self._group,
            rows,
            buffers.received.batch_info,
            stream=context.stream.handle(),
            shared_out=shared,
        )

    def _buffers(self, slot: int) -> _SlotBuffers:
        found = self._slots.get(slot)
        if found is None:
            received = self._ops.empty_item(self._topology, self._capacity)

            def like(rows: Tensor) -> Tensor:
                return torch.empty(rows.shape, dtype=self._dtype, device=rows.device)

            shared = received.shared_hidden_states
            found = self._slots[slot] = _SlotBuffers(
                received, like(received.hidden_states), None if shared is None else like(shared)
            )
        return found

    def leftovers(self) -> tuple[str, ...]:
        """A dispatch of which a part is missing."""
        return () if self._partial is None else (f"unfinished {self._partial}",)


@dataclass(frozen=True)
class _Pending:
    layer: int
    topk_ids: Tensor
    topk_weights: Tensor
    hidden_states: Tensor
    state: AFDAsyncTransferState


class CamAsyncAttentionAdapter(_CamAsync):
    """Attention side. Pending dispatches are kept in a FIFO for each stage.

    `probe` and `core_limits` say what the operator library has: both roles check one configuration.
    """

    interleaves = True

    def __init__(
        self,
        ops: CamAsyncOps,
        topology: CamAsyncTopology,
        group: str,
        *,
        stages: int = 1,
        probe: ReadinessProbe | None = None,
        aborter: GroupAborter | None = None,
        core_limits: bool = False,
    ) -> None:
        super().__init__(
            ops,
            topology,
            group,
            is_ffn=False,
            aborter=aborter,
            probe=probe,
            core_limits=core_limits,
        )
        self._pending: tuple[deque[_Pending], ...] = tuple(deque() for _ in range(stages))

    def channels(self) -> tuple[ChannelRule, ...]:
        """One unanswered dispatch of this rank, whatever its stages."""
        return (ChannelRule(self._group, 1, PhaseKind.SEND, PhaseKind.RECV),)

    def item(
        self, plan: StepPlan, layer: int, stage: int, hidden_states: Tensor, model: AttentionModel
    ) -> WorkItem:
        """See AttentionAdapter."""
        fifo = self._fifo(stage)

        def compute(context: PhaseContext) -> None:
            given = context.values.pop("hidden", hidden_states)
            made = model.compute(given, layer, stage, context.stream.handle())
            context.keep(given, made)
            context.values["made"] = made

        def send(context: PhaseContext) -> None:
            made = context.values.pop("made")
            self._dispatch(context, fifo, layer, made)

        phases = []
        if layer > 0:
            phases.append(
                Phase(PhaseKind.RECV, self._group, lambda c: self._combine(c, fifo, layer - 1))
            )
        if layer < plan.layers:
            phases.append(Phase(PhaseKind.COMPUTE, "attention", compute))
            phases.append(Phase(PhaseKind.SEND, self._group, send))
        return WorkItem("camasync", layer, tuple(phases), stage)

    def _fifo(self, stage: int) -> deque[_Pending]:
        if not 0 <= stage < len(self._pending):
            raise ConfigError(
                f"stage {stage}; allowed: 0 to {len(self._pending) - 1}; next: give the adapter "
                "its number of stages"
            )
        return self._pending[stage]

    def _dispatch(
        self, context: PhaseContext, fifo: deque[_Pending], layer: int, made: AttentionOutput
    ) -> None:
        """Reserve, launch, commit: a launch that raises leaves no entry, so later ones match."""
        ids, weights = made.topk_ids, made.topk_weights
        if ids is None or weights is None:
            raise ConfigError(
                f"layer {layer}: Attention gave no topk_ids; allowed: ids and weights, this "
                "connector has its gate on the Attention side; next: return them from compute"
            )
        t, hidden = self._topology, made.hidden_states
        state = AFDAsyncTransferState(hidden.shape[0], t.hidden, t.topk, layer)
        entry = _Pending(layer, ids, weights, hidden, state)
        context.keep(entry)
        self._ops.dispatch_send(t, self._group, hidden, ids, layer, stream=context.stream.handle())
        fifo.append(entry)

    def _combine(self, context: PhaseContext, fifo: deque[_Pending], layer: int) -> None:
        if not fifo or fifo[0].layer != layer:
            found = f"layer {fifo[0].layer}" if fifo else "nothing"
            raise CommError(
                f"combine of layer {layer}, but {found} is pending; allowed: the oldest dispatch "
                "of the stage; next: correct the schedule"
            )
        entry = fifo[0]
        got = self._ops.combine_recv(
            self._topology,
            self._group,
            entry.topk_ids,
            entry.topk_weights,
            stream=context.stream.handle(),
        )
        fifo.popleft()
        context.keep(entry, got)
        context.values["hidden"] = got

    def leftovers(self) -> tuple[str, ...]:
        """Dispatches that were never combined."""
        return tuple(
            f"stage {stage}: layer {entry.layer}"
            for stage, fifo in enumerate(self._pending)
            for entry in fifo
        )
