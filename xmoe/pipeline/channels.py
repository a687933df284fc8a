# SPDX-License-Identifier: Apache-2.0
"""Channels: communication groups as a resource of their own, apart from slots.

A slot is memory; a channel is a group's protocol. Two items in different slots may share a channel,
and then their phases keep its rules: an order, a number of unanswered dispatches, and possibly that
no two phases run at once. The rules turn into event waits; a schedule that would need a wait on
something that was not issued is refused.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from xmoe.errors import CommError, ConfigError
from xmoe.pipeline.events import EventLease
from xmoe.pipeline.items import PhaseKind


@dataclass(frozen=True)
class ChannelRule:
    """The protocol of one channel.

    Attributes:
        name: as the phases spell it.
        max_outstanding: openings without their closing, None for no limit.
        opens, closes: the phases that do; an FFN rank opens with recv and closes with send, an
            Attention rank opens with send and closes with recv.
        exclusive: no two phases of the channel run at once, whatever their streams. Implies the
            edge from a send to the next receive.
    """

    name: str
    max_outstanding: int | None = None
    opens: PhaseKind = PhaseKind.RECV
    closes: PhaseKind = PhaseKind.SEND
    exclusive: bool = False

    def __post_init__(self) -> None:
        if not self.name or (self.max_outstanding is not None and self.max_outstanding < 1):
            raise ConfigError(
                f"channel {self.name!r} with max_outstanding={self.max_outstanding}; allowed: a "
                "name, and 1 or more, or None; next: correct the rule"
            )


class Channel:
    """State of one channel.

    Attributes:
        sequence: phases issued so far; while `free`, it is counted for the trace only.
        opened, closed: how many phases of these kinds were issued.
        free: no rule to keep; its phases' order is that of their streams.
    """

    __slots__ = (
        "_closings",
        "_generation",
        "_last",
        "_openings",
        "closed",
        "free",
        "opened",
        "rule",
        "sequence",
    )

    def __init__(self, rule: ChannelRule) -> None:
        self.rule = rule
        self.sequence = 0
        self.opened = 0
        self.closed = 0
        self.free = rule.max_outstanding is None and not rule.exclusive
        self._last: EventLease | None = None
        self._generation = 0
        limit = rule.max_outstanding or 1
        self._openings: deque[tuple[EventLease, int]] = deque(maxlen=limit)
        self._closings: deque[tuple[EventLease, int]] = deque(maxlen=limit)

    @property
    def outstanding(self) -> int:
        """Openings whose closing was not issued; 0 where nothing is counted."""
        return self.opened - self.closed if self.rule.max_outstanding is not None else 0

    def edges(self, kind: PhaseKind) -> tuple[EventLease | None, EventLease | None]:
        """What a phase of `kind` must wait for now: the channel's last phase, and its partner.

        An opening's partner is the closing that returned its credit, a closing's the opening that
        it answers: a receive that waits before its dispatch is on its way only holds cores. None
        where there is none, or where it was observed as done: its lease is in other use then.

        Raises:
            CommError: no credit, or an answer without a dispatch. Nothing was issued.
        """
        rule = self.rule
        limit = rule.max_outstanding
        partner = last = None
        if limit is not None:
            if kind is rule.opens:
                if self.opened - self.closed >= limit:
                    raise self._refused(kind, f"{limit} unanswered at most")
                needed = self.opened - limit  # number of the closing that returned this credit
                if needed >= 0:
                    partner = _unobserved(*self._closings[needed - self.closed])
            elif kind is rule.closes:
                if self.closed >= self.opened:
                    raise self._refused(kind, f"a {rule.opens.value} before each {kind.value}")
                partner = _unobserved(*self._openings[self.closed - self.opened])
        if rule.exclusive and self._last is not None:
            last = _unobserved(self._last, self._generation)
        return last, partner

    def commit(self, kind: PhaseKind, lease: EventLease) -> None:
        """The phase was issued, and `lease` marks its end."""
        rule = self.rule
        self._last = lease
        self._generation = lease.generation
        if rule.max_outstanding is not None:
            if kind is rule.opens:
                self.opened += 1
                self._openings.append((lease, lease.generation))
            elif kind is rule.closes:
                self.closed += 1
                self._closings.append((lease, lease.generation))

    def _refused(self, kind: PhaseKind, allowed: str) -> CommError:
        return CommError(
            f"channel {self.rule.name!r}: {kind.value} number {self.sequence} with "
            f"{self.opened - self.closed} unanswered; allowed: {allowed}; next: correct the order "
            "in which items are issued"
        )


def _unobserved(lease: EventLease, generation: int) -> EventLease | None:
    return lease if lease.generation == generation else None
