# SPDX-License-Identifier: Apache-2.0
"""Orders of issue that an item by itself does not give."""

from __future__ import annotations

from collections.abc import Iterable

from xmoe.errors import ConfigError
from xmoe.pipeline.executor import StreamExecutor
from xmoe.pipeline.items import WorkItem
from xmoe.pipeline.ticket import Ticket


def prefetch(executor: StreamExecutor, items: Iterable[WorkItem]) -> list[Ticket]:
    """Issue each item's first phase before the previous item's other phases.

        r0 | r1 c0 s0 | r2 c1 s1 | ... | cN sN

    For channels on which no two phases may run at once: issued one item after the other, a receive
    would wait for the send before it, and nothing could overlap. The order depends on the number
    of items only, so ranks with equally many keep one order. Needs two slots.

    Raises:
        As `submit`. ConfigError from a first phase: the items before it were still issued to their
        end, as on every rank that refuses the same item.
    """
    tickets: list[Ticket] = []
    with executor.session():
        for item in items:
            ticket = executor.begin(item)
            try:
                executor.issue(ticket)
            except ConfigError:
                _finish(executor, tickets)
                raise
            _finish(executor, tickets)
            tickets.append(ticket)
        _finish(executor, tickets)
    return tickets


def _finish(executor: StreamExecutor, tickets: list[Ticket]) -> None:
    while tickets and not tickets[-1].issued:
        executor.issue(tickets[-1])
