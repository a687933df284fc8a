# SPDX-License-Identifier: Apache-2.0
"""The Attention loop: one or two stages through all layers, by the order that the edges allow.

An item of stage s and layer l is R_s(l-1), A_s(l), S_s(l): receive the previous layer's result,
attention, send. Issue orders:

    one stage, or a group for each stage     R A S, item by item, layers outside
    two stages with one credit               A0 S0 | A1 R0 S1 | A0 R1 S0 | ... : a stage's dispatch
                                             comes after the other stage's combine
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from xmoe.errors import ConfigError, PeerLost
from xmoe.kernels.device import Device
from xmoe.multistream import MultistreamConfig, PipelineShape
from xmoe.pipeline.adapters.base import AttentionAdapter, AttentionModel, StepPlan
from xmoe.pipeline.ffn import RoleLoop
from xmoe.pipeline.items import WorkItem
from xmoe.pipeline.ticket import Ticket


class AttentionLoop(RoleLoop):
    """The Attention side."""

    def __init__(
        self,
        device: Device,
        adapter: AttentionAdapter,
        model: AttentionModel,
        config: MultistreamConfig,
        shape: PipelineShape,
        *,
        translate: Callable[[Exception], Exception] | None = None,
        on_stall: Callable[[str], None] | None = None,
    ) -> None:
        # Two stages hold a slot each while the next item takes its own, in every mode.
        super().__init__(
            device,
            adapter,
            config,
            shape,
            "attention",
            slots=shape.stages + 1,
            translate=translate,
            on_stall=on_stall,
        )
        self._adapter = adapter
        self._model = model

    def run_step(self, plan: StepPlan, batches: Sequence[Tensor]) -> list[Tensor]:
        """Take each stage's rows through all layers; returns them, done.

        An empty stage must not be passed: plan one stage then.
        """
        if len(batches) != plan.stages or any(batch.shape[0] == 0 for batch in batches):
            raise ConfigError(
                f"{[tuple(b.shape) for b in batches]} for {plan.stages} stages; allowed: one batch "
                "with rows for each; next: plan fewer stages"
            )
        with self.executor.session():
            items = self._items(plan, batches)
            if self._adapter.interleaves and plan.stages == 2:
                tickets = self._interleaved(items)
            else:
                tickets = [self.executor.submit(item) for item in items]
            self.executor.drain()
        outputs = [ticket.result()["hidden"] for ticket in tickets[-plan.stages :]]
        if not self._adapter.capabilities.peer_abort:
            self._refuse_poison(outputs)
        return outputs

    def _refuse_poison(self, outputs: Sequence[Tensor]) -> None:
        # Without an abort word a failed FFN rank answers the rest of its step with NaN.
        if any(bool(output.isnan().any()) for output in outputs):
            raise PeerLost(
                "the step's result holds NaN; allowed: numbers, NaN is how an FFN rank that failed "
                "answers; next: look at the FFN ranks' own errors (or at the model, if they have "
                "none), then restart the group"
            )

    def _items(self, plan: StepPlan, batches: Sequence[Tensor]) -> Iterator[WorkItem]:
        for layer in range(plan.layers + 1):
            for stage in range(plan.stages):
                yield self._adapter.item(plan, layer, stage, batches[stage], self._model)

    def _interleaved(self, items: Iterator[WorkItem]) -> list[Ticket]:
        """The two-stage order: the send of an item comes after the next item's receive."""
        executor = self.executor
        tickets: list[Ticket] = []
        waiting: Ticket | None = None
        for item in items:
            ticket = executor.begin(item)
            kinds = len(item.phases)
            if kinds != 2:  # layers above 0 begin with a receive
                executor.issue(ticket)
            if waiting is not None:
                executor.issue(waiting)
                waiting = None
            if kinds != 1:  # the last layer's item only receives
                executor.issue(ticket)
                waiting = ticket
            tickets = [*tickets[-1:], ticket]
        return tickets
