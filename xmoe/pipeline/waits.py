# SPDX-License-Identifier: Apache-2.0
"""The host's waits of an executor: each has a limit, sees a stop, and says what it waits for."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from xmoe.errors import AclError, FenceTimeout, PipelineStopped
from xmoe.kernels.device import is_timeout
from xmoe.multistream import StreamMode
from xmoe.pipeline.events import EventLease
from xmoe.pipeline.items import WorkItem
from xmoe.pipeline.options import ExecutorOptions
from xmoe.pipeline.ticket import Ticket

# A wait looks up this often, to see a stop or another phase's failure.
_LOOK_UP_S = 0.05
_SHORTEST_S = 0.001
_GATE_SPINS, _GATE_PAUSE_S = 64, 0.0001


def _look_up(left_s: float) -> float:
    return max(_SHORTEST_S, min(_LOOK_UP_S, left_s))


class Waits:
    """Waits for events and gates.

    Args:
        options: their limits. inflight: items under way, for the reports.
        on_stall: told once of each wait that takes longer than stall_warn_s.
    """

    def __init__(
        self,
        options: ExecutorOptions,
        inflight: deque[Ticket],
        on_stall: Callable[[str], None] | None,
    ) -> None:
        self._one_stream = options.mode is StreamMode.SERIAL
        self._timeout_s = options.timeout_s
        self._look = _look_up(options.timeout_s)
        self._stall_warn_s = options.stall_warn_s
        self._inflight = inflight
        self._on_stall = on_stall
        self.stop = threading.Event()

    def report(self) -> str:
        """Every item under way with layer, slot and phase; only while nothing has failed."""
        # A copy, and no lock, which a stalled wait holds: other threads may end items meanwhile.
        return " | ".join(ticket.where() for ticket in tuple(self._inflight)) or "nothing"

    def for_item(self, ticket: Ticket, timeout_s: float | None) -> None:
        """Wait for all phases of `ticket`; None is the executor's own limit.

        Raises:
            FenceTimeout: with a report; AclError: device.
        """
        look = self._look if timeout_s is None else _look_up(timeout_s)
        lanes, phases = ticket._slot.lanes, ticket.item.phases
        try:
            # Each stream is asked, since each may have failed; its last phase answers for it.
            for phase in phases[-1:] if self._one_stream else phases:
                lanes[phase.order][1].event.synchronize(look)
        except AclError as error:
            if not is_timeout(error):
                raise
            last = lanes[phases[-1].order][1]
            self._go_on(ticket, last, timeout_s, False, time.monotonic() - look)
            for _, lease in ticket.recorded:
                lease.synchronize(self._timeout_s)

    def for_receive(self, ticket: Ticket) -> None:
        """Wait for the first phase of `ticket`. Raises as `for_item`; PipelineStopped."""
        _, lease = ticket.recorded[0]
        try:
            lease.synchronize(self._look)
        except AclError as error:
            if not is_timeout(error):
                raise
            self._go_on(ticket, lease, None, True, time.monotonic() - self._look)

    def _go_on(
        self,
        ticket: Ticket,
        lease: EventLease,
        timeout_s: float | None,
        stoppable: bool,
        begin: float,
    ) -> None:
        limit = self._timeout_s if timeout_s is None else timeout_s
        warned = False
        while True:
            spent = time.monotonic() - begin
            # Another phase may have failed already while the awaited one hangs.
            for _, other in ticket.recorded:
                if other.query():
                    other.synchronize(_LOOK_UP_S)
            if stoppable and self.stop.is_set():
                raise PipelineStopped(f"stopped during {ticket.where()}; the item is abandoned")
            warned = warned or self._warned(spent, "")
            if spent >= limit:
                raise FenceTimeout(
                    f"{ticket.item.op}, layer {ticket.layer}: not finished after {limit:g} s; "
                    f"waiting: {self.report()}; allowed: within the time limit; next: check that "
                    "all ranks launched, or raise the time limit"
                )
            try:
                lease.synchronize(_look_up(limit - spent))
                return
            except AclError as error:
                if not is_timeout(error):
                    raise

    def for_gate(
        self, item: WorkItem, gate: Callable[[], bool], meanwhile: Callable[[], None]
    ) -> None:
        """Ask `gate` until it says yes; `meanwhile` is called between two questions.

        Raises:
            FenceTimeout: with a report, unless the item may idle; PipelineStopped; what they raise.
        """
        spins = 0
        begin = time.monotonic()
        warned = False
        while not gate():
            if self.stop.is_set():
                raise PipelineStopped("stopped while no work was ready; nothing was issued")
            meanwhile()
            spins += 1
            if spins <= _GATE_SPINS:
                continue
            time.sleep(_GATE_PAUSE_S)
            spent = time.monotonic() - begin
            if item.may_idle:
                continue
            limit = self._timeout_s
            warned = warned or self._warned(spent, f"the gate of {item.op}, ")
            if spent >= limit:
                raise FenceTimeout(
                    f"{item.op}, layer {item.layer}, stage {item.stage}: nothing came for "
                    f"{limit:g} s; waiting: its gate, {self.report()}; allowed: within the time "
                    "limit; next: check that all ranks launched, or raise the time limit"
                )

    def _warned(self, spent: float, what: str) -> bool:
        if self._on_stall is None or spent < self._stall_warn_s:
            return False
        self._on_stall(f"waiting for {spent:.1f} s: {what}{self.report()}")
        return True
