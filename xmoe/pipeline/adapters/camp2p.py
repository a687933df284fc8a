# SPDX-License-Identifier: Apache-2.0
"""CAMP2P: a2e brings rows from Attention to FFN, e2a brings them back, a group for each stage.

A launch of either operator counts in its group, and flags are compared for equality: one launch too
many, or two at once, and the peer waits for ever. So a group is a channel with one unanswered
operation and no two phases at once, and a stage has exactly the group that was named for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from xmoe.errors import CommError, ConfigError
from xmoe.kernels.ops.cam.protocols import A2EOutput, CamP2POps
from xmoe.kernels.ops.cam.topology import CamP2PTopology
from xmoe.kernels.ops.torch_stream import on_stream
from xmoe.multistream import Capabilities, MetadataRead
from xmoe.pipeline.adapters.base import (
    AttentionModel,
    ConnectorAdapter,
    FfnInput,
    FfnModel,
    GroupAborter,
    StepPlan,
)
from xmoe.pipeline.channels import ChannelRule
from xmoe.pipeline.items import Phase, PhaseContext, PhaseKind, WorkItem


@dataclass(slots=True)
class CAMP2PTransferState:
    """What e2a needs of the a2e before it. `atten_batch_size` and `x_active_mask` hold no values:
    the kernels want the memory and write nothing."""

    aiv_num: int = 8
    batch_size: int = 0
    h: int = 0
    k: int = 1
    atten_batch_size: Tensor | None = None
    x_active_mask: Tensor | None = None
    cam_p2p_ep_name: str | None = None

    @classmethod
    def of(
        cls, topology: CamP2PTopology, group: str, rows: int, out: A2EOutput
    ) -> CAMP2PTransferState:
        """The state of one a2e."""
        t = topology
        return cls(
            t.aiv_num, rows, t.hidden, t.topk, out.atten_batch_size, out.x_active_mask, group
        )


def capabilities(*, peer_abort: bool) -> Capabilities:
    """Known from the operators' sources; two groups may run at once, one may not."""
    return Capabilities(
        connector="CAMP2P",
        roles=frozenset({"ffn", "attention"}),
        honours_current_stream=True,
        recv_send_same_channel_exclusive=True,
        recv_blocks_cores=False,
        host_metadata=False,
        metadata_reads=frozenset({MetadataRead.BLOCKING}),
        graph_safe=False,
        max_outstanding_per_channel=1,
        ready_probe=False,
        core_limits=True,
        peer_abort=peer_abort,
    )


class _CamP2P(ConnectorAdapter):
    """What both roles share: groups, rules."""

    def __init__(
        self, ops: CamP2POps, groups: Sequence[str], *, is_ffn: bool, aborter: GroupAborter | None
    ) -> None:
        super().__init__(ops.topology, groups, is_ffn=is_ffn, first="FFN", aborter=aborter)
        if not groups or len(set(groups)) != len(groups) or not all(groups):
            raise ConfigError(
                f"groups {list(groups)}; allowed: a distinct name for each stage; next: create one "
                "communicator for each"
            )
        self._ops = ops
        self._topology = ops.topology
        self._is_ffn = is_ffn

    @property
    def capabilities(self) -> Capabilities:
        """See Adapter."""
        return capabilities(peer_abort=self._aborter is not None)

    def channels(self) -> tuple[ChannelRule, ...]:
        """One a2e, then one e2a, never both at once."""
        opens, closes = PhaseKind.RECV, PhaseKind.SEND
        if not self._is_ffn:
            opens, closes = closes, opens
        return tuple(ChannelRule(g, 1, opens, closes, exclusive=True) for g in self._groups)

    def group_of(self, stage: int) -> str:
        """The stage's group; a stage without one is an error, never another stage's group."""
        if not 0 <= stage < len(self._groups):
            raise ConfigError(
                f"stage {stage}; allowed: 0 to {len(self._groups) - 1}, one for each group; next: "
                "create a communicator for the stage"
            )
        return self._groups[stage]

    def leftovers(self) -> tuple[str, ...]:
        """See Adapter; the executor's channels count everything that can be pending."""
        return ()


@dataclass
class _SlotBuffers:
    """`own`: what receives are told to fill; None where each makes its outputs anew."""

    own: A2EOutput | None
    received: A2EOutput | None = None
    computed: Tensor | None = None


class CamP2PFfnAdapter(_CamP2P):
    """FFN side. `max_rows`: most rows of one item, over all Attention ranks it serves."""

    def __init__(
        self,
        ops: CamP2POps,
        groups: Sequence[str],
        max_rows: int,
        *,
        dtype: torch.dtype = torch.bfloat16,
        aborter: GroupAborter | None = None,
    ) -> None:
        super().__init__(ops, groups, is_ffn=True, aborter=aborter)
        self._max_rows = max_rows
        self._dtype = dtype
        self._slots: dict[int, _SlotBuffers] = {}

    def items(self, plan: StepPlan, model: FfnModel) -> Iterator[WorkItem]:
        """Layers outside, stages inside: the order in which Attention sends."""
        for layer in range(plan.layers):
            for stage, rows in enumerate(plan.rows):
                yield self.item(layer, stage, rows * self._topology.ratio, model)

    def item(self, layer: int, stage: int, rows: int, model: FfnModel) -> WorkItem:
        """One a2e, compute, e2a. `rows`: physical rows of all peers, equal from each."""
        group, ops, t = self.group_of(stage), self._ops, self._topology
        if not 1 <= rows <= self._max_rows or rows % t.ratio:
            raise ConfigError(
                f"layer {layer}, stage {stage}: {rows} rows; allowed: a multiple of {t.ratio} up "
                f"to {self._max_rows}; next: pad all Attention peers to the same number of rows"
            )

        def recv(context: PhaseContext) -> None:
            buffers = self._buffers(context.slot)
            own = None if buffers.own is None else _rows_of(buffers.own, rows)
            out = ops.a2e(group, None, rows, stream=context.stream.handle(), out=own)
            buffers.received = out
            context.keep(buffers, out)
            context.values["state"] = CAMP2PTransferState.of(t, group, rows, out)

        def compute(context: PhaseContext) -> None:
            buffers = self._buffers(context.slot)
            assert buffers.received is not None
            handle = context.stream.handle()
            received = buffers.received.hidden_states
            if buffers.computed is None:
                with on_stream(received.device, handle):  # memory of the stream that writes it
                    buffers.computed = torch.empty(
                        self._max_rows, t.hidden, dtype=self._dtype, device=received.device
                    )
            item = FfnInput(received, layer, stage)
            model.compute(item, buffers.computed[:rows], handle)

        def send(context: PhaseContext) -> None:
            state: CAMP2PTransferState = context.values["state"]
            computed = self._buffers(context.slot).computed
            assert state.atten_batch_size is not None and computed is not None
            handle = context.stream.handle()
            ops.e2a(group, computed[:rows], state.atten_batch_size, stream=handle)

        phases = (
            Phase(PhaseKind.RECV, group, recv),
            Phase(PhaseKind.COMPUTE, "ffn", compute),
            Phase(PhaseKind.SEND, group, send),
        )
        return WorkItem("camp2p", layer, phases, stage)

    def _buffers(self, slot: int) -> _SlotBuffers:
        found = self._slots.get(slot)
        if found is None:
            found = self._slots[slot] = _SlotBuffers(self._ops.empty_a2e(self._max_rows))
        return found

    def settled(self) -> None:
        """See FfnAdapter; nothing depends on it here."""

    @property
    def stoppable(self) -> bool:
        """See FfnAdapter; a2e has no way to be stopped."""
        return False

    def stop(self, stream: int) -> bool:
        """See FfnAdapter and `stoppable`."""
        return False


def _rows_of(base: A2EOutput, rows: int) -> A2EOutput:
    return A2EOutput(
        base.hidden_states[:rows],
        base.sim_expert_ids[:rows],
        base.sim_scales[:rows],
        base.atten_batch_size,
        base.x_active_mask,
    )


class CamP2PAttentionAdapter(_CamP2P):
    """Attention side."""

    interleaves = False

    def __init__(
        self,
        ops: CamP2POps,
        groups: Sequence[str],
        *,
        aborter: GroupAborter | None = None,
    ) -> None:
        super().__init__(ops, groups, is_ffn=False, aborter=aborter)
        self._sent: dict[int, tuple[int, Tensor, CAMP2PTransferState]] = {}

    def item(
        self, plan: StepPlan, layer: int, stage: int, hidden_states: Tensor, model: AttentionModel
    ) -> WorkItem:
        """See AttentionAdapter."""
        group, ops, t = self.group_of(stage), self._ops, self._topology

        def recv(context: PhaseContext) -> None:
            sent = self._sent.pop(stage, None)
            if sent is None or sent[0] != layer - 1:
                found = "nothing" if sent is None else f"layer {sent[0]}"
                raise CommError(
                    f"stage {stage}: e2a of layer {layer - 1}, but {found} was sent; allowed: one "
                    "e2a for each a2e, in its order; next: correct the schedule"
                )
            _, rows, state = sent
            assert state.atten_batch_size is not None
            handle = context.stream.handle()
            got = ops.e2a(group, rows, state.atten_batch_size, stream=handle)
            context.keep(rows, state, got)
            context.values["hidden"] = got

        def compute(context: PhaseContext) -> None:
            given = context.values.pop("hidden", hidden_states)
            made = model.compute(given, layer, stage, context.stream.handle())
            context.keep(given, made)
            context.values["made"] = made.hidden_states

        def send(context: PhaseContext) -> None:
            made: Tensor = context.values.pop("made")
            rows = plan.rows[stage]
            out = ops.a2e(group, made, rows, stream=context.stream.handle())
            context.keep(made, out)
            state = CAMP2PTransferState.of(t, group, rows, out)
            self._sent[stage] = (layer, made, state)

        phases = []
        if layer > 0:
            phases.append(Phase(PhaseKind.RECV, group, recv))
        if layer < plan.layers:
            phases.append(Phase(PhaseKind.COMPUTE, "attention", compute))
            phases.append(Phase(PhaseKind.SEND, group, send))
        return WorkItem("camp2p", layer, tuple(phases), stage)

    def leftovers(self) -> tuple[str, ...]:
        """Stages whose a2e was never answered."""
        return tuple(f"stage {stage}: layer {sent[0]}" for stage, sent in self._sent.items())
