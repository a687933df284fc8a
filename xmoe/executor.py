# SPDX-License-Identifier: Apache-2.0
"""Runs work items through their recv, compute and send phases.

An item is a short list of phases, each with the channel it uses; the executor knows nothing of
operators or transports. Here it is serial: one stream, an item's phases in order, items in the
order of submission. The fused operator is an item with one compute phase on its resource's channel;
the split path has a recv (dispatch), a compute (grouped product) and a send (combine) phase.

Rules that hold in any mode:

    slots      an item holds a slot from submission until its completion was *observed*; what it
               keeps (tensors, descriptors) is released then, not when the call returns
    channels   phases of one channel run in order of submission, on every rank in the same order
    failure    the first failure is final: later submissions raise it. The slot is quarantined, its
               references stay, for the device may still use them. One exception: ConfigError from
               an item's first phase means that the item was refused before any effect
"""

from __future__ import annotations

import enum
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from xmoe.comm.fence import wait_event
from xmoe.errors import ConfigError, FenceTimeout, XmoeError
from xmoe.kernels.device import Device, Event, Stream, is_timeout

MAX_INFLIGHT = 4
DEFAULT_TIMEOUT_S = 60.0


class PhaseKind(str, enum.Enum):
    """What a phase does; an item's phases come in this order."""

    RECV = "recv"
    COMPUTE = "compute"
    SEND = "send"


_ORDER = tuple(PhaseKind)


class PhaseContext:
    """What a phase's callback works with; one per item, shared by its phases.

    Attributes:
        stream: where to queue device work.
        slot: number of the item's slot.
        values: results handed from phase to phase and to the caller of `Ticket.result`.
    """

    def __init__(self, stream: Stream, slot: int) -> None:
        self.stream = stream
        self.slot = slot
        self.values: dict[str, Any] = {}
        self._kept: list[object] = []

    def keep(self, *objects: object) -> None:
        """Hold objects until the item's completion was observed; those with `close` are closed
        then.
        """
        self._kept.extend(objects)

    def _release(self) -> None:
        while self._kept:
            close = getattr(self._kept.pop(), "close", None)
            if close is not None:
                close()


@dataclass(frozen=True)
class Phase:
    """One phase. `run` queues its work on the context's stream and may return before it is done."""

    kind: PhaseKind
    channel: str
    run: Callable[[PhaseContext], None]


@dataclass(frozen=True)
class WorkItem:
    """One layer's work: at least one phase, in the order recv, compute, send, each at most once."""

    op: str
    layer: int
    phases: tuple[Phase, ...]

    def __post_init__(self) -> None:
        positions = [_ORDER.index(phase.kind) for phase in self.phases]
        if not positions or positions != sorted(set(positions)):
            raise ConfigError(
                f"work item {self.op!r}: phases {[phase.kind.value for phase in self.phases]}; "
                "allowed: one or more of recv, compute, send, in this order; next: correct the item"
            )


@dataclass(frozen=True)
class TraceEntry:
    """One phase as the host saw it: `start` and `end` are host seconds around its callback.

    `sequence` counts the phases of `channel`. These times say nothing about the device's.
    """

    op: str
    phase: str
    layer: int
    slot: int
    channel: str
    sequence: int
    start: float
    end: float


class Ticket:
    """An item that was submitted."""

    def __init__(self, executor: StreamExecutor, item: WorkItem, context: PhaseContext) -> None:
        self._executor = executor
        self.item = item
        self._context = context
        self._event: Event | None = None
        self._done = False
        self._error: BaseException | None = None

    @property
    def done(self) -> bool:
        """Completion was observed (not: the device is done)."""
        return self._done

    def result(self, timeout_s: float | None = None) -> Mapping[str, Any]:
        """Wait for the item and return its values. Local.

        Raises:
            FenceTimeout: not done in time; AclError or PeerLost: it failed on the device.
        """
        self._executor._observe(self, timeout_s)
        return self._context.values


class StreamExecutor:
    """Serial executor over one stream of a device. Thread-safe: items are queued one at a time.

    Args:
        device: owns the stream. The executor makes one and closes it.
        max_inflight: slots, 1..4.
        timeout_s: for one item's completion.
        translate: turns a device error into the error to raise (for example PeerLost).
        trace: keep a list of TraceEntry in `trace`.
    """

    def __init__(
        self,
        device: Device,
        *,
        max_inflight: int = 1,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        translate: Callable[[Exception], Exception] | None = None,
        trace: bool = False,
    ) -> None:
        if not 1 <= max_inflight <= MAX_INFLIGHT:
            raise ConfigError(
                f"max_inflight={max_inflight}; allowed: 1..{MAX_INFLIGHT}; next: correct the "
                "setting"
            )
        self.trace: list[TraceEntry] | None = [] if trace else None
        self.timeout_s = timeout_s
        self._device = device
        self._translate = translate
        self._lock = threading.RLock()
        self._free: deque[int] = deque(range(max_inflight))
        self._inflight: deque[Ticket] = deque()
        self._quarantine: list[Ticket] = []
        self._sequences: dict[str, int] = {}
        self._error: BaseException | None = None
        self._closed = False
        with device.bind():
            self._stream = device.create_stream()
        self._events: list[Event] = []

    @property
    def stream(self) -> Stream:
        """The stream all phases run on."""
        return self._stream

    @property
    def failed(self) -> BaseException | None:
        """The first failure, or None."""
        return self._error

    def submit(self, item: WorkItem) -> Ticket:
        """Run the item's phases in order; their device work may still be going on afterwards.
        Local.

        Waits for the oldest item when all slots are taken.

        Raises:
            What a phase raised; XmoeError when the executor has failed before or is closed.
        """
        with self._lock:
            self._refuse_if_over()
            if not self._free:
                self._observe(self._inflight[0], None)
            context = PhaseContext(self._stream, self._free.popleft())
            ticket = Ticket(self, item, context)
            with self._device.bind():
                for number, phase in enumerate(item.phases):
                    self._run(ticket, phase, refusable=number == 0)
                try:
                    ticket._event = self._event()
                    ticket._event.record(self._stream)
                except Exception as error:
                    raise self._fail(ticket, error) from error
            self._inflight.append(ticket)
            return ticket

    def _run(self, ticket: Ticket, phase: Phase, refusable: bool) -> None:
        sequence = self._sequences.get(phase.channel, 0)
        self._sequences[phase.channel] = sequence + 1
        start = time.perf_counter()
        try:
            phase.run(ticket._context)
        except ConfigError:
            if not refusable:
                self._fail(ticket, None)
                raise
            ticket._done = True
            ticket._context._release()
            self._free.append(ticket._context.slot)
            raise
        except Exception as error:
            translated = self._fail(ticket, error)
            if translated is error:
                raise
            raise translated from error
        finally:
            if self.trace is not None:
                entry = TraceEntry(
                    ticket.item.op,
                    phase.kind.value,
                    ticket.item.layer,
                    ticket._context.slot,
                    phase.channel,
                    sequence,
                    start,
                    time.perf_counter(),
                )
                self.trace.append(entry)

    def _event(self) -> Event:
        return self._events.pop() if self._events else self._device.create_event()

    def _observe(self, ticket: Ticket, timeout_s: float | None) -> None:
        """Wait until `ticket` is done; older items are done then too, and are released first."""
        with self._lock, self._device.bind():
            if ticket._error is not None:
                raise ticket._error
            while not ticket._done:
                oldest = self._inflight[0]
                event = oldest._event
                assert event is not None
                what = f"{oldest.item.op}, layer {oldest.item.layer}"
                try:
                    wait_event(event, self.timeout_s if timeout_s is None else timeout_s, what)
                except Exception as error:
                    if isinstance(error, FenceTimeout) and timeout_s is not None:
                        raise  # the caller's own deadline: the item goes on
                    self._inflight.popleft()
                    translated = self._fail(oldest, error)
                    if translated is error:
                        raise
                    raise translated from error
                self._inflight.popleft()
                self._events.append(event)
                oldest._done = True
                oldest._context._release()
                self._free.append(oldest._context.slot)

    def _fail(self, ticket: Ticket, error: Exception | None) -> Exception:
        """Make a failure final; the slot and what it holds stay."""
        if error is None:
            error = XmoeError(f"{ticket.item.op}, layer {ticket.item.layer} was refused half-way")
        translated = error if self._translate is None else self._translate(error)
        if self._error is None:
            self._error = translated
        ticket._error = translated
        self._quarantine.append(ticket)
        # Whatever was queued behind it can't be trusted either.
        for later in self._inflight:
            later._error = translated
        return translated

    def _refuse_if_over(self) -> None:
        if self._error is not None:
            raise XmoeError(
                f"executor stopped after its first failure ({type(self._error).__name__}: "
                f"{self._error}); allowed: no further work; next: close the runner and build a new "
                "one on every rank"
            ) from self._error
        if self._closed:
            raise XmoeError(
                "executor is closed; allowed: work before close(); next: build a new runner"
            )

    def drain(self, timeout_s: float | None = None) -> None:
        """Wait for all submitted items and release their slots. Local. Raises as `result` does."""
        with self._lock:
            while self._inflight:
                self._observe(self._inflight[-1], timeout_s)

    def close(self) -> None:
        """Refuse new work, drain, release events and stream. Twice is harmless. Local.

        After a failure it waits once for the stream; what does not end in time stays allocated
        (`quarantined`), since the device may still use it.

        Raises:
            What `drain` raises, when the executor had not failed before.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            already_failed = self._error is not None
            try:
                self.drain()
            except XmoeError:
                if not already_failed:
                    raise
            finally:
                self._release_all()

    def _release_all(self) -> None:
        with self._device.bind():
            idle = True
            if self._error is not None:
                idle = self._idle()
            if not idle:
                return
            for ticket in [*self._quarantine, *self._inflight]:
                ticket._context._release()
                if ticket._event is not None:
                    ticket._event.close()
            self._quarantine.clear()
            self._inflight.clear()
            while self._events:
                self._events.pop().close()
            self._stream.close()

    def _idle(self) -> bool:
        """Has the failed stream stopped? A failed stream answers with its error once it has."""
        event = self._quarantine[-1]._event if self._quarantine else None
        try:
            self._stream.synchronize(self.timeout_s)
        except XmoeError as error:
            # A device error means that the stream has stopped; a timeout says nothing.
            return not is_timeout(error) or (event is not None and event.query())
        return True

    @property
    def quarantined(self) -> int:
        """Items whose memory is held because the device may still use it."""
        return len(self._quarantine)

    def __enter__(self) -> StreamExecutor:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
