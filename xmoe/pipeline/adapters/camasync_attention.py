# SPDX-License-Identifier: Apache-2.0
"""CAMAsync, Attention side: send a layer's rows to their experts, later take the sums back."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from torch import Tensor

from xmoe.errors import CommError, ConfigError
from xmoe.kernels.ops.cam.protocols import CamAsyncOps, ReadinessProbe
from xmoe.pipeline.adapters.base import (
    AttentionModel,
    AttentionOutput,
    GroupAborter,
    StepPlan,
)
from xmoe.pipeline.adapters.camasync import AFDAsyncTransferState, CamAsyncAdapter
from xmoe.pipeline.channels import ChannelRule
from xmoe.pipeline.items import Phase, PhaseContext, PhaseKind, WorkItem


@dataclass(frozen=True)
class _Pending:
    layer: int
    topk_ids: Tensor
    topk_weights: Tensor
    hidden_states: Tensor
    state: AFDAsyncTransferState


class CamAsyncAttentionAdapter(CamAsyncAdapter):
    """Attention side. Pending dispatches are kept in a FIFO for each stage."""

    interleaves = True

    def __init__(
        self,
        ops: CamAsyncOps,
        group: str,
        *,
        stages: int = 1,
        probe: ReadinessProbe | None = None,
        aborter: GroupAborter | None = None,
        core_limits: bool = False,
        capacity: int | None = None,
    ) -> None:
        super().__init__(
            ops,
            group,
            is_ffn=False,
            aborter=aborter,
            probe=probe,
            core_limits=core_limits,
            capacity=capacity,
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
        self._ops.dispatch_send(self._group, hidden, ids, layer, stream=context.stream.handle())
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
