# SPDX-License-Identifier: Apache-2.0
"""An item under way: what its phases share, how far it has come, and the slot that it holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from xmoe.kernels.device import Stream
from xmoe.pipeline.events import EventLease, EventPool
from xmoe.pipeline.items import Phase, PhaseContext, PhaseKind, WorkItem


class Slot:
    """Room for one item.

    Attributes:
        lanes: for each kind of phase, by the order of PhaseKind, its stream and the event that
            marks its end, recorded anew for each item. A metadata phase is done with its receive
            and has that one's.
        last: the mark of the former item's last phase; None before the first item.
    """

    __slots__ = ("lanes", "last", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self.lanes: tuple[tuple[Stream, EventLease], ...] = ()
        self.last: EventLease | None = None

    def make_lanes(self, streams: Sequence[Stream], pool: EventPool) -> None:
        """Before the first item. `streams` by the order of PhaseKind."""
        recv, compute, send = (pool.take() for _ in range(3))
        self.lanes = tuple(zip(streams, (recv, recv, compute, send), strict=True))


class Ticket(PhaseContext):
    """An item that was submitted or begun; its phases get it as their context.

    `_next` is the number of the first phase not issued.
    """

    __slots__ = ("_done", "_error", "_next", "_observe", "_slot", "item")

    def __init__(
        self,
        item: WorkItem,
        slot: Slot,
        stream: Stream,
        observe: Callable[[Ticket, float | None], None],
    ) -> None:
        # As PhaseContext does it, without a second call for each item.
        self.stream = stream
        self.slot = slot.number
        self.layer = item.layer
        self.stage = item.stage
        self.values = {}
        self._kept = self._owned = None
        self.item = item
        self._slot = slot
        self._observe = observe
        self._next = 0
        self._done = False
        self._error: BaseException | None = None

    @property
    def done(self) -> bool:
        """Completion was observed (not: the device is done)."""
        return self._done

    @property
    def context(self) -> PhaseContext:
        """What the item's phases share."""
        return self

    @property
    def unissued(self) -> tuple[Phase, ...]:
        """Phases that were not issued; the first of them may have raised."""
        return self.item.phases[self._next :]

    @property
    def issued(self) -> bool:
        """All phases were issued."""
        return self._next == len(self.item.phases)

    @property
    def recorded(self) -> list[tuple[PhaseKind, EventLease]]:
        """Its phases on the device that were issued, each with the lease that marks its end."""
        if self._done:
            return []  # the slot may be another item's
        lanes, issued = self._slot.lanes, self.item.phases[: self._next]
        on_device = (phase for phase in issued if phase.kind is not PhaseKind.METADATA)
        return [(phase.kind, lanes[phase.order][1]) for phase in on_device]

    def result(self, timeout_s: float | None = None) -> Mapping[str, Any]:
        """Wait for the item and return its values. Local.

        Raises:
            FenceTimeout: not done in time; AclError or PeerLost: it failed on the device.
        """
        self._observe(self, timeout_s)
        return self.values

    def where(self) -> str:
        """Item, layer, slot, and the first phase that is not done, for reports."""
        if self.issued:
            at = "all phases done"
        else:
            at = f"phase {self.item.phases[self._next].kind.value} (host)"
        for kind, lease in self.recorded:
            if not lease.query():
                at = f"phase {kind.value}"
                break
        return f"{self.item.op}, layer {self.layer}, stage {self.stage}, slot {self.slot}, {at}"
