# SPDX-License-Identifier: Apache-2.0
"""An item under way: what its phases share, how far it has come, and the slot that it holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from xmoe.kernels.device import Stream
from xmoe.pipeline.events import EventLease
from xmoe.pipeline.items import Phase, PhaseContext, PhaseKind, WorkItem


class Slot:
    """Room for one item.

    Attributes:
        leases: one for each device phase, recorded anew for each item.
        last: of the former item's last phase; None before the first item.
    """

    __slots__ = ("last", "leases", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self.leases: list[EventLease] = []
        self.last: EventLease | None = None


class Ticket(PhaseContext):
    """An item that was submitted or begun; its phases get it as their context.

    `_next` is the number of the first phase not issued, `_marks` counts the slot's leases that this
    item has recorded.
    """

    __slots__ = ("_done", "_error", "_marks", "_next", "_observe", "_slot", "item")

    def __init__(
        self,
        item: WorkItem,
        slot: Slot,
        stream: Stream,
        observe: Callable[[Ticket, float | None], None],
    ) -> None:
        super().__init__(stream, slot.number, item.layer, item.stage)
        self.item = item
        self._slot = slot
        self._observe = observe
        self._next = 0
        self._marks = 0
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
    def marks(self) -> list[EventLease]:
        """The leases that its phases have recorded so far, in their order."""
        return self._slot.leases[: self._marks]

    def result(self, timeout_s: float | None = None) -> Mapping[str, Any]:
        """Wait for the item and return its values. Local.

        Raises:
            FenceTimeout: not done in time; AclError or PeerLost: it failed on the device.
        """
        self._observe(self, timeout_s)
        return self.values

    def where(self) -> str:
        """Item, layer, slot, and the first phase that is not done, for reports."""
        phases = self.item.phases
        phase = phases[min(self._next, len(phases) - 1)].kind.value + " (host)"
        on_device = (one.kind for one in phases if one.kind is not PhaseKind.METADATA)
        for kind, lease in zip(on_device, self.marks, strict=False):
            if not lease.query():
                phase = kind.value
                break
        return (
            f"{self.item.op}, layer {self.layer}, stage {self.stage}, slot {self.slot}, "
            f"phase {phase}"
        )
