# SPDX-License-Identifier: Apache-2.0
"""What the worker loops expect of a connector's adapter and of a model. No behaviour.

An adapter turns its connector's protocol into work items. It owns the buffers of its slots, so that
memory is bounded by the number of slots; the executor owns streams, order and lifetime.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from xmoe.errors import CommError, ConfigError
from xmoe.kernels.ops.cam.topology import CamAsyncTopology, CamP2PTopology
from xmoe.multistream import Capabilities
from xmoe.pipeline.channels import ChannelRule
from xmoe.pipeline.items import WorkItem

UNKNOWN_LAYER = -1


@dataclass(frozen=True)
class FfnInput:
    """What one FFN item brings to compute.

    hidden_states [R, H] model dtype, or int8 with `scales` float32 [R]; tokens_per_expert int64
    [experts of this rank] on the device, None where the rows are not sorted by expert. `layer` and
    `stage` travel with the item: nothing else says which layer it is.

    With metadata_read="device" the host knows neither layer nor rows: `layer` is UNKNOWN_LAYER, R
    the receive capacity, of which the rows that tokens_per_expert counts are filled, and
    batch_info[2], int64 on the device, is the layer.
    """

    hidden_states: Tensor
    layer: int
    stage: int
    scales: Tensor | None = None
    tokens_per_expert: Tensor | None = None
    shared: bool = False
    batch_info: Tensor | None = None


class FfnModel(Protocol):
    """The experts of one FFN rank."""

    @property
    def device_metadata(self) -> bool:
        """Whether `compute` takes items whose layer and rows only the device knows."""

    def compute(self, item: FfnInput, out: Tensor, stream: int) -> None:
        """Queue the experts' work on `stream`: out [R, H] model dtype. Keeps no state between
        items, since items of different layers may be under way."""


@dataclass(frozen=True)
class AttentionOutput:
    """What an Attention layer hands to dispatch: hidden_states [T, H], topk_ids int32 [T, K] and
    topk_weights float32 [T, K]; the last two are None where the FFN side has the gate."""

    hidden_states: Tensor
    topk_ids: Tensor | None = None
    topk_weights: Tensor | None = None


class AttentionModel(Protocol):
    """Everything between two MoE layers on an Attention rank."""

    def compute(
        self, hidden_states: Tensor, layer: int, stage: int, stream: int
    ) -> AttentionOutput:
        """Queue the layer's work on `stream`; new memory, which the item keeps."""


@dataclass(frozen=True)
class StepPlan:
    """One step as both roles derive it from the same numbers.

    Attributes:
        layers: MoE layers.
        rows: physical rows of each stage on one Attention rank, equal on all of them.
        dispatches: that reach this FFN rank; None: until the loop is stopped.
    """

    layers: int
    rows: tuple[int, ...]
    dispatches: int | None = None

    @property
    def stages(self) -> int:
        return len(self.rows)


class GroupAborter(Protocol):
    """Ends every wait of a group's kernels, on all ranks. Not every operator library has it."""

    def abort(self, group: str, reason: int = 1) -> None: ...


class Adapter(Protocol):
    """Common to both roles."""

    @property
    def capabilities(self) -> Capabilities: ...

    def channels(self) -> tuple[ChannelRule, ...]:
        """The groups' rules, for the executor."""

    def abort(self, reason: int) -> bool:
        """Release the peers of a failed rank; whether that was possible. Terminal; twice is
        harmless."""

    def leftovers(self) -> tuple[str, ...]:
        """What is pending although nothing should be; for the check at closing."""


class FfnAdapter(Adapter, Protocol):
    """The FFN side."""

    def settled(self) -> None:
        """The streams are empty: no receive that was issued is under way any more."""

    @property
    def stoppable(self) -> bool:
        """Whether `stop` can end a receive that waits on the device."""

    def stop(self, stream: int) -> bool:
        """Make a receive that waits on the device end, and be the last one; False where nothing
        can. `stream` is one that no operator uses."""

    def items(self, plan: StepPlan, model: FfnModel) -> Iterator[WorkItem]:
        """The step's items in the order of issue. Take the next one only after the last one was
        submitted."""


class AttentionAdapter(Adapter, Protocol):
    """The Attention side."""

    @property
    def interleaves(self) -> bool:
        """Two stages share one credit, so a stage's receive comes before the other's dispatch."""

    def item(
        self, plan: StepPlan, layer: int, stage: int, hidden_states: Tensor, model: AttentionModel
    ) -> WorkItem:
        """Receive layer - 1, compute layer, send it; `layer` == plan.layers only receives.

        `hidden_states` is the step's input and counts for layer 0 only. The last item's values hold
        the stage's result as "hidden".
        """


class ConnectorAdapter:
    """What the adapters of both connectors and roles share: the role's check, the abort words.

    Args:
        groups: the communicators' names. is_ffn: whose side the adapter is for.
        first: the role whose ranks come first in this connector.
    """

    def __init__(
        self,
        topology: CamP2PTopology | CamAsyncTopology,
        groups: Sequence[str],
        *,
        is_ffn: bool,
        first: str,
        aborter: GroupAborter | None,
    ) -> None:
        if topology.is_ffn != is_ffn:
            raise ConfigError(
                f"rank {topology.rank} of {topology.attn_size} Attention and {topology.ffn_size} "
                f"FFN ranks; allowed: the adapter of its own role; next: {first} ranks come first"
            )
        self._groups = tuple(groups)
        self._aborter = aborter
        self._aborted = False

    def abort(self, reason: int) -> bool:
        """See Adapter."""
        if self._aborter is None:
            return False
        if not self._aborted:
            self._aborted = True
            problems = []
            for group in self._groups:
                try:
                    self._aborter.abort(group, reason)
                except CommError as error:
                    problems.append(str(error))
            if problems:
                raise CommError("; ".join(problems))
        return True
