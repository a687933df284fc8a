# SPDX-License-Identifier: Apache-2.0
"""What the executor works on: items made of phases, and what a phase's callback gets."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from xmoe.errors import ConfigError
from xmoe.kernels.device import Stream


class PhaseKind(str, enum.Enum):
    """What a phase does; an item's phases come in this order.

    METADATA is the host's: it runs once the receive is over and reads what that brought.
    """

    RECV = "recv"
    METADATA = "metadata"
    COMPUTE = "compute"
    SEND = "send"


_ORDER = {kind: position for position, kind in enumerate(PhaseKind)}


class Closable(Protocol):
    """Something that an item owns until it is over."""

    def close(self) -> None: ...


class PhaseContext:
    """What a phase's callback works with; one per item, shared by its phases.

    Attributes:
        stream: where to queue device work; set for each phase.
        slot: number of the item's slot.
        layer, stage: for reports; a metadata phase sets them when only the receive tells.
        values: results handed from phase to phase and to the caller of `Ticket.result`.
    """

    __slots__ = ("_kept", "_owned", "layer", "slot", "stage", "stream", "values")

    def __init__(self, stream: Stream, slot: int, layer: int = 0, stage: int = 0) -> None:
        self.stream = stream
        self.slot = slot
        self.layer = layer
        self.stage = stage
        self.values: dict[str, Any] = {}
        self._kept: list[object] | None = None
        self._owned: list[Closable] | None = None

    def keep(self, *objects: object) -> None:
        """Hold objects until the item's completion was observed: launches have addresses only.

        Give the base tensor when a launch uses a view of it.
        """
        if self._kept is None:
            self._kept = []
        self._kept.extend(objects)

    def own(self, *objects: Closable) -> None:
        """As `keep`, and close them then."""
        if self._owned is None:
            self._owned = []
        self._owned.extend(objects)

    def _release(self) -> None:
        self._kept = None
        try:
            while self._owned:
                self._owned.pop().close()
        except BaseException:
            self._release()  # the rest, whatever one of them raises
            raise


class Phase:
    """One phase. `run` queues its work on the context's stream and may return before it is done.

    `channel` names the group whose order it keeps; a metadata phase has none.
    """

    __slots__ = ("channel", "kind", "order", "run")

    def __init__(self, kind: PhaseKind, channel: str, run: Callable[[PhaseContext], None]) -> None:
        self.kind = kind
        self.order = _ORDER[kind]
        self.channel = channel
        self.run = run


@dataclass(frozen=True)
class WorkItem:
    """One layer's work: at least one phase, each kind at most once, in the order of PhaseKind.

    `gate` is asked, on the host, until it says that the first phase may be posted; a False costs
    nothing on the device. With `may_idle` that may take for ever, because nothing is known to be
    coming; else the executor's time limit holds. `stage` is the micro-batch.
    """

    op: str
    layer: int
    phases: tuple[Phase, ...]
    stage: int = 0
    gate: Callable[[], bool] | None = None
    may_idle: bool = False

    def __post_init__(self) -> None:
        before = -1
        for phase in self.phases:
            if phase.order <= before:
                break
            before = phase.order
        else:
            if self.phases and self.phases[0].kind is not PhaseKind.METADATA:
                return
        raise ConfigError(
            f"work item {self.op!r}: phases {[phase.kind.value for phase in self.phases]}; "
            "allowed: one or more of recv, metadata, compute, send, in this order, metadata "
            "after recv; next: correct the item"
        )


@dataclass(frozen=True)
class TraceEntry:
    """One phase as the host saw it: `start` and `end` are host seconds around its callback.

    `generation` is that of the event that marks the phase's end, 0 when none was recorded.
    `sequence` counts the phases of `channel`; `stream` is where the work was queued, "host" for
    metadata. These times say nothing about the device's.
    """

    op: str
    phase: str
    layer: int
    slot: int
    channel: str
    sequence: int
    start: float
    end: float
    stream: str = "main"
    stage: int = 0
    generation: int = 0
