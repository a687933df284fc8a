# SPDX-License-Identifier: Apache-2.0
"""A bounded ring of device events that are recorded again and again.

A device takes a wait for an event that was never recorded as "nothing to wait for", its own wait
and the host's alike. An event that is used again makes this worse: the earlier recording
answers for the later one. So every recording begins a generation, and a lease of an event refuses
to wait while its present one is not recorded. A slot keeps its leases for all its items; who holds
on to a lease longer, holds the generation with it.
"""

from __future__ import annotations

from xmoe.errors import ConfigError, XmoeError
from xmoe.kernels.device import Device, Event, Stream


class EventLease:
    """An event of the ring in somebody's hands. The executor records it, in one place.

    Attributes:
        event: for who knows that it is recorded; the methods here look.
        generation: counts the event's recordings.
        stream: where it was recorded; None before, and once it was given back.
    """

    __slots__ = ("_live", "_pool", "event", "generation", "stream")

    def __init__(self, pool: EventPool, event: Event, generation: int) -> None:
        self._pool = pool
        self.event = event
        self._live = True
        self.generation = generation
        self.stream: Stream | None = None

    @property
    def live(self) -> bool:
        """Not given back. What a lease that was given back marked has been observed as done."""
        return self._live

    def wait_on(self, stream: Stream) -> None:
        """Later work on `stream` starts after this recording. Does not block the host."""
        if self.stream is None:
            raise self.misuse("waited for")
        stream.wait_event(self.event)

    def synchronize(self, timeout_s: float) -> None:
        """Block the host until the recording is reached. Raises AclError on failure or timeout."""
        if self.stream is None:
            raise self.misuse("waited for")
        self.event.synchronize(timeout_s)

    def query(self) -> bool:
        """Whether the recording is reached."""
        if self.stream is None:
            raise self.misuse("queried")
        return self.event.query()

    def give_back(self) -> None:
        """Return the event to the ring; what it marked was observed. Twice is harmless."""
        if self._live:
            self._live = False
            self.stream = None
            self._pool._return(self.event, self.generation)

    def misuse(self, what: str) -> XmoeError:
        """The error for a use that its state does not allow."""
        state = "not recorded" if self._live else "given back"
        return XmoeError(
            f"event generation {self.generation} is {what} while it is {state}; allowed: record, "
            "then wait, then give back; next: this is a defect of the schedule that did it"
        )


class EventPool:
    """Events of one device, made when first needed, at most `size` of them."""

    def __init__(self, device: Device, size: int) -> None:
        if size < 1:
            raise ConfigError(f"event ring of {size}; allowed: 1 or more; next: raise event_ring")
        self.size = size
        self._device = device
        self._made: list[Event] = []
        self._free: list[tuple[Event, int]] = []

    @property
    def taken(self) -> int:
        """Leases that are out."""
        return len(self._made) - len(self._free)

    def take(self) -> EventLease:
        """A lease; its first recording is a generation of its own.

        Raises:
            XmoeError: all events are out: somebody keeps leases longer than an item lives.
        """
        if self._free:
            event, generation = self._free.pop()
        elif len(self._made) < self.size:
            event, generation = self._device.create_event(), 0
            self._made.append(event)
        else:
            raise XmoeError(
                f"all {self.size} events are in use; allowed: three for each slot; next: raise "
                "event_ring"
            )
        return EventLease(self, event, generation)

    def _return(self, event: Event, generation: int) -> None:
        self._free.append((event, generation))

    def close(self) -> None:
        """Release all events, also those that are out. Twice is harmless."""
        self._free.clear()
        while self._made:
            self._made.pop().close()
