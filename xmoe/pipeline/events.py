# SPDX-License-Identifier: Apache-2.0
"""Device events that are recorded again and again.

A device takes a wait for an event that was never recorded as "nothing to wait for", its own wait
and the host's alike. An event that is used again makes this worse: the earlier recording
answers for the later one. So every recording begins a generation, and a lease of an event refuses
to wait while its present one is not recorded. A slot keeps its leases for all its items; who holds
on to a lease longer, holds the generation with it.
"""

from __future__ import annotations

import contextlib

from xmoe.errors import XmoeError
from xmoe.kernels.device import Device, Event, Stream


class EventLease:
    """An event in a slot's hands. The executor records it, in one place.

    Attributes:
        event: for who knows that it is recorded; the methods here look.
        generation: counts the event's recordings.
        stream: where it was recorded; None while the present generation is not.
    """

    __slots__ = ("event", "generation", "stream")

    def __init__(self, event: Event) -> None:
        self.event = event
        self.generation = 0
        self.stream: Stream | None = None

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

    def misuse(self, what: str) -> XmoeError:
        """The error for a use that its state does not allow."""
        return XmoeError(
            f"event generation {self.generation} is {what} while it is not recorded; allowed: "
            "record, then wait; next: this is a defect of the schedule that did it"
        )


class EventPool:
    """Events of one device, made when first needed and released together."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._made: list[Event] = []

    def take(self) -> EventLease:
        """A lease of a new event; its first recording is a generation of its own."""
        event = self._device.create_event()
        self._made.append(event)
        return EventLease(event)

    def close(self) -> None:
        """Release all events, also when one of them raises. Twice is harmless."""
        with contextlib.ExitStack() as rest:
            while self._made:
                rest.callback(self._made.pop().close)
