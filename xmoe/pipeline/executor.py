# SPDX-License-Identifier: Apache-2.0
"""The stream pipeline executor: items' phases onto streams, ordered by device events only.

It knows nothing of operators or transports, starts no thread and never waits for a whole device.

    serial    one stream; a phase follows the one issued before it
    overlap   a stream each for recv, compute and send

Both modes issue the same operations in the same order; overlap adds waits between the streams:

    recv -> compute -> send             one item's phases
    last phase -> slot's next item      memory is used again after the send
    channel rules                       see xmoe.pipeline.channels

    slots      an item holds a slot, and everything its launches point at, until its completion was
               *observed* by the host; nothing is released because a call returned
    waits      are bounded, and say which item, layer, slot and phase they waited for
    failure    the first one is final. `on_failure` is called once, so that an adapter can release
               its peers; nothing is issued or waited for afterwards; slots are quarantined. One
               exception: ConfigError from an item's first phase means that the item was refused
               before any effect
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any

from xmoe.errors import AclError, CommError, ConfigError, FenceTimeout, PipelineStopped, XmoeError
from xmoe.kernels.device import Device, Stream, is_timeout
from xmoe.multistream import EVENTS_PER_SLOT, StreamMode
from xmoe.pipeline.channels import Channel, ChannelRule
from xmoe.pipeline.events import EventLease, EventPool
from xmoe.pipeline.items import Phase, PhaseContext, PhaseKind, TraceEntry, WorkItem
from xmoe.pipeline.options import DEFAULT_TIMEOUT_S, ExecutorOptions

# A host wait looks up this often, to see a stop or another phase's failure.
_LOOK_UP_S = 0.05
_GATE_SPINS, _GATE_PAUSE_S = 64, 0.0001

_COMPUTE = list(PhaseKind).index(PhaseKind.COMPUTE)
_METADATA = PhaseKind.METADATA  # an enum's members are slow to look up

# Memory that a device may still use after its executor is gone lives as long as the process.
_QUARANTINE: list[object] = []


def _order(lease: EventLease, stream: Stream) -> None:
    if lease.stream is not stream:  # a stream is in order with itself
        lease.wait_on(stream)


OnFailure = Callable[[BaseException, "tuple[Ticket, ...]"], None]


class _Slot:
    """`leases`: one for each device phase, renewed for each item. `last`: of the former item."""

    __slots__ = ("last", "leases", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self.leases: list[EventLease] = []
        self.last: EventLease | None = None


class Ticket:
    """An item that was submitted or begun."""

    __slots__ = ("_context", "_done", "_error", "_executor", "_leases", "_next", "_slot", "item")

    def __init__(
        self, executor: StreamExecutor, item: WorkItem, slot: _Slot, context: PhaseContext
    ) -> None:
        self.item = item
        self._executor = executor
        self._slot = slot
        self._context = context
        self._next = 0
        self._leases: list[tuple[PhaseKind, EventLease]] = []
        self._done = False
        self._error: BaseException | None = None

    @property
    def done(self) -> bool:
        """Completion was observed (not: the device is done)."""
        return self._done

    @property
    def context(self) -> PhaseContext:
        """What the item's phases share."""
        return self._context

    @property
    def unissued(self) -> tuple[Phase, ...]:
        """Phases that were not issued; the first of them may have raised."""
        return self.item.phases[self._next :]

    @property
    def issued(self) -> bool:
        """All phases were issued."""
        return self._next == len(self.item.phases)

    def result(self, timeout_s: float | None = None) -> Mapping[str, Any]:
        """Wait for the item and return its values. Local.

        Raises:
            FenceTimeout: not done in time; AclError or PeerLost: it failed on the device.
        """
        self._executor._observe(self, timeout_s)
        return self._context.values

    def where(self) -> str:
        """Item, layer, slot, and the first phase that is not done, for reports."""
        phase = self.item.phases[min(self._next, len(self.item.phases) - 1)].kind.value + " (host)"
        for kind, lease in self._leases:
            if not lease.query():
                phase = kind.value
                break
        context = self._context
        return (
            f"{self.item.op}, layer {context.layer}, stage {context.stage}, slot {context.slot}, "
            f"phase {phase}"
        )


class StreamExecutor:
    """Runs items; see the module's text. Thread-safe: items are issued one phase at a time.

    Args:
        device: owns the streams. The executor makes them and closes them.
        options: None is serial with one slot; `timeout_s`, `max_inflight` and `trace` replace its.
        channels: rules; a channel without a rule keeps the order of issue, exclusively.
        translate: turns a device error into the error to raise (for example PeerLost).
        on_failure: told of the first failure, with the items whose phases were not all issued.
        on_stall: told of waits longer than stall_warn_s.
    """

    def __init__(
        self,
        device: Device,
        options: ExecutorOptions | None = None,
        *,
        channels: Iterable[ChannelRule] = (),
        translate: Callable[[Exception], Exception] | None = None,
        on_failure: OnFailure | None = None,
        on_stall: Callable[[str], None] | None = None,
        max_inflight: int = 1,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        trace: bool = False,
    ) -> None:
        if options is None:
            options = ExecutorOptions(max_inflight=max_inflight, timeout_s=timeout_s, trace=trace)
        self.options = options
        self.timeout_s = options.timeout_s
        self.trace: list[TraceEntry] | None = [] if options.trace else None
        self._device = device
        self._translate = translate
        self._on_failure = on_failure
        self._on_stall = on_stall
        self._lock = threading.RLock()
        self._session: int | None = None
        self._stop = threading.Event()
        self._slots = [_Slot(number) for number in range(options.max_inflight)]
        self._free: deque[_Slot] = deque(self._slots)
        self._inflight: deque[Ticket] = deque()
        self._quarantine: list[Ticket] = []
        self._channels = {rule.name: Channel(rule) for rule in channels}
        self._error: BaseException | None = None
        self._closed = False
        with device.bind():
            self._streams = self._make_streams(options.mode)
        self._own = tuple(dict.fromkeys(self._streams))
        self._pool = EventPool(device, options.event_ring or EVENTS_PER_SLOT * options.max_inflight)

    def _make_streams(self, mode: StreamMode) -> tuple[Stream, ...]:
        """By the order of PhaseKind."""
        device = self._device
        if mode is StreamMode.SERIAL:
            return (device.create_stream(),) * len(PhaseKind)
        streams = [device.create_stream() for _ in range(3)]
        handles = [stream.handle() for stream in streams]
        # Stream pools go round: beyond their size two "new" streams are one, and waits between them
        # would be waits of a stream for itself. Device without handles (0) run inline.
        if len(set(handles)) != len(handles) and any(handles):
            for stream in streams:
                stream.close()
            raise ConfigError(
                f"the device gave streams with handles {handles}; allowed: three distinct ones; "
                "next: make the executor before the process has used up its stream pool"
            )
        recv, compute, send = streams
        return recv, recv, compute, send

    @property
    def stream(self) -> Stream:
        """The stream of compute phases; the only one in serial mode."""
        return self._streams[_COMPUTE]

    @property
    def stream_handles(self) -> dict[str, int]:
        """The raw stream of each track that a TraceEntry names. Not for launches."""
        if self.options.mode is StreamMode.SERIAL:
            return {"main": self.stream.handle()}
        recv, _, compute, send = (stream.handle() for stream in self._streams)
        return {"recv": recv, "compute": compute, "send": send}

    @property
    def failed(self) -> BaseException | None:
        """The first failure, or None."""
        return self._error

    @property
    def quarantined(self) -> int:
        """Items whose memory is held because the device may still use it."""
        return len(self._quarantine)

    @property
    def inflight(self) -> int:
        """Items that hold a slot."""
        return len(self._inflight)

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        """Keep lock and device binding over many calls of this thread: a loop pays for them once.

        Other threads wait; `request_stop` does not.
        """
        with self._lock, self._device.bind():
            before, self._session = self._session, threading.get_ident()
            try:
                yield
            finally:
                self._session = before

    @contextlib.contextmanager
    def _entered(self) -> Iterator[None]:
        with self._lock, self._device.bind():
            yield

    def request_stop(self) -> None:
        """Make waits for a gate or a receive end with PipelineStopped. Any thread; returns at
        once.

        Without a receive on the device nothing is lost and `close` drains as usual; a receive that
        waits on the device can only be aborted, which is a failure.
        """
        self._stop.set()

    @property
    def stopping(self) -> bool:
        """`request_stop` was called."""
        return self._stop.is_set()

    def submit(self, item: WorkItem) -> Ticket:
        """Issue the item's phases in order; their device work may still be going on afterwards.
        Local.

        Waits for the oldest item when all slots are taken, for the item's gate, and, if the item
        has a metadata phase, for its receive.

        Raises:
            What a phase raised; PipelineStopped; XmoeError when the executor has failed before or
            is closed.
        """
        if self._session == threading.get_ident():
            ticket = self._begin(item)
            for _ in item.phases:
                self._issue(ticket)
            return ticket
        with self._entered():
            ticket = self._begin(item)
            for _ in item.phases:
                self._issue(ticket)
            return ticket

    def begin(self, item: WorkItem) -> Ticket:
        """Take a slot for the item and pass its gate; `issue` then issues one phase a call.

        For schedules that put one item's phase between two of another. Every item that was begun
        must be issued to its end.
        """
        with self._entered():
            return self._begin(item)

    def issue(self, ticket: Ticket) -> None:
        """Issue the next phase. Raises as `submit`."""
        with self._entered():
            self._refuse_if_over()
            if ticket.issued:
                raise ConfigError(
                    f"{ticket.item.op}: all phases were issued; allowed: once each; next: correct "
                    "the schedule"
                )
            self._issue(ticket)

    def _begin(self, item: WorkItem) -> Ticket:
        self._refuse_if_over()
        if not self._free:
            oldest = self._inflight[0]
            if not oldest.issued:
                raise XmoeError(
                    f"all {len(self._slots)} slots are taken and the oldest item, "
                    f"{oldest.item.op}, waits for a phase that nobody has issued; allowed: fewer "
                    "begun items than slots; next: issue its phases first, or raise max_inflight"
                )
            self._complete(oldest, None)
        if item.gate is not None:
            try:
                self._pass_gate(item, item.gate)
            except PipelineStopped:
                raise
            except BaseException as error:
                if self._error is None:  # else an earlier item's failure, seen while waiting
                    self._fail_with(None, error)
                raise
        slot = self._free.popleft()
        if not slot.leases:
            slot.leases = [self._pool.take() for _ in range(EVENTS_PER_SLOT)]
        stream = self._streams[item.phases[0].order]
        context = PhaseContext(stream, slot.number, item.layer, item.stage)
        ticket = Ticket(self, item, slot, context)
        self._inflight.append(ticket)
        return ticket

    def _pass_gate(self, item: WorkItem, gate: Callable[[], bool]) -> None:
        spins = 0
        begin = time.monotonic()
        warned = False
        while not gate():
            if self._stop.is_set():
                raise PipelineStopped("stopped while no work was ready; nothing was issued")
            # Idle: give slots back, and hear of failures of items that are on their way.
            while self._inflight and self._inflight[0].issued:
                if not self._inflight[0]._leases[-1][1].query():
                    break
                self._complete(self._inflight[0], None)
            spins += 1
            if spins <= _GATE_SPINS:
                continue
            time.sleep(_GATE_PAUSE_S)
            spent = time.monotonic() - begin
            if item.may_idle:
                continue
            if spent >= self.timeout_s:
                raise FenceTimeout(
                    f"{item.op}, layer {item.layer}, stage {item.stage}: nothing came for "
                    f"{self.timeout_s:g} s; waiting: its gate, {self.report()}; allowed: within "
                    "the time limit; next: check that all ranks launched, or raise the time limit"
                )
            if not warned and spent >= self.options.stall_warn_s and self._on_stall is not None:
                warned = True
                self._on_stall(f"waiting for {spent:.1f} s: the gate of {item.op}, {self.report()}")

    def _issue(self, ticket: Ticket) -> None:
        phase = ticket.item.phases[ticket._next]
        kind = phase.kind
        if kind is _METADATA:
            self._read_metadata(ticket, phase)
            return
        channel = self._channels.get(phase.channel) or self._new_channel(phase.channel)
        stream, slot, leases = self._streams[phase.order], ticket._slot, ticket._leases
        start = time.perf_counter() if self.trace is not None else 0.0
        sequence = channel.sequence
        try:
            self._wait_for_edges(ticket, kind, channel, stream)
            channel.sequence = sequence + 1
            ticket._context.stream = stream
            phase.run(ticket._context)
            lease = slot.leases[len(leases)]
            lease.renew()
            leases.append((kind, lease))
            lease.record(stream)
            channel.commit(kind, lease)
            slot.last = None
            ticket._next += 1
        except BaseException as error:
            # Refused by the channel, or, by contract before anything was queued, by the phase.
            by_channel = isinstance(error, CommError) and channel.sequence == sequence
            if not leases and (by_channel or isinstance(error, ConfigError)):
                self._refuse(ticket)
            else:
                self._fail_with(ticket, error)
            raise
        finally:
            if self.trace is not None:
                self._note(ticket, phase, sequence, start)

    def _wait_for_edges(
        self, ticket: Ticket, kind: PhaseKind, channel: Channel, stream: Stream
    ) -> None:
        """Queue the waits of the item's next phase; CommError if the channel does not allow it."""
        leases = ticket._leases
        previous = leases[-1][1] if leases else ticket._slot.last
        if channel.free:
            if previous is not None:
                _order(previous, stream)
            return
        exclusive, partner = channel.edges(kind)
        if previous is not None:
            _order(previous, stream)
        if exclusive is None and partner is None:
            return
        # What this item issued itself is ordered by its own phases already.
        done = [lease for _, lease in leases]
        if exclusive is not None and exclusive is not previous and exclusive not in done:
            _order(exclusive, stream)
        if partner is not None and partner not in (previous, exclusive, *done):
            _order(partner, stream)

    def _new_channel(self, name: str) -> Channel:
        """Without a rule: all phases one after the other."""
        channel = self._channels[name] = Channel(ChannelRule(name, exclusive=True))
        return channel

    def _refuse(self, ticket: Ticket) -> None:
        """Give the slot back as if the item had never been begun."""
        ticket._done = True
        ticket._context._release()
        self._inflight.remove(ticket)
        self._free.append(ticket._slot)

    def _fail_with(self, ticket: Ticket | None, error: BaseException) -> None:
        """Make a failure final. Raises what it means; returns when that is the error itself."""
        translated = self._fail(ticket, error)
        if translated is not error:
            raise translated from error

    def _read_metadata(self, ticket: Ticket, phase: Phase) -> None:
        start = time.perf_counter()
        try:
            self._await(ticket, ticket._leases[-1][1], self.timeout_s, stoppable=True)
            phase.run(ticket._context)
            ticket._next += 1
        except BaseException as error:
            self._fail_with(ticket, error)
            raise
        finally:
            if self.trace is not None:
                self._note(ticket, phase, 0, start)

    def _note(self, ticket: Ticket, phase: Phase, sequence: int, start: float) -> None:
        assert self.trace is not None
        context, kind = ticket._context, phase.kind.value
        name = kind if self.options.mode is StreamMode.OVERLAP else "main"
        if phase.kind is PhaseKind.METADATA:
            name = "host"
        leases = ticket._leases
        generation = leases[-1][1].generation if leases and leases[-1][0] is phase.kind else 0
        entry = TraceEntry(
            ticket.item.op, kind, context.layer, context.slot, phase.channel, sequence, start,
            time.perf_counter(), name, context.stage, generation,
        )  # fmt: skip
        self.trace.append(entry)

    def _await(
        self, ticket: Ticket, lease: EventLease, timeout_s: float, stoppable: bool = False
    ) -> None:
        """Wait on the host for one event of `ticket`, bounded.

        Raises:
            FenceTimeout: with a report; AclError: device; PipelineStopped.
        """
        begin = time.monotonic()
        warned = False
        while True:
            spent = time.monotonic() - begin
            try:
                lease.synchronize(max(0.001, min(_LOOK_UP_S, timeout_s - spent)))
                return
            except AclError as error:
                if not is_timeout(error):
                    raise
            spent = time.monotonic() - begin
            self._raise_device_errors(ticket)
            if stoppable and self._stop.is_set():
                raise PipelineStopped(f"stopped during {ticket.where()}; the item is abandoned")
            if spent >= timeout_s:
                raise FenceTimeout(
                    f"{ticket.item.op}, layer {ticket._context.layer}: not finished after "
                    f"{timeout_s:g} s; waiting: {self.report()}; allowed: within the time limit; "
                    "next: check that all ranks launched, or raise the time limit"
                )
            if not warned and spent >= self.options.stall_warn_s and self._on_stall is not None:
                warned = True
                self._on_stall(f"waiting for {spent:.1f} s: {self.report()}")

    def _raise_device_errors(self, ticket: Ticket) -> None:
        # Another phase may have failed already while the awaited one hangs.
        for _, lease in ticket._leases:
            if lease.query():
                lease.synchronize(_LOOK_UP_S)

    def report(self) -> str:
        """Every item under way with layer, slot and phase; only while nothing has failed."""
        return " | ".join(ticket.where() for ticket in self._inflight) or "nothing"

    def _observe(self, ticket: Ticket, timeout_s: float | None) -> None:
        """Wait until `ticket` is done; older items are done then too, and are released first."""
        with self._entered():
            if ticket._error is not None:
                raise ticket._error
            while not ticket._done:
                self._complete(self._inflight[0], timeout_s)

    def _complete(self, oldest: Ticket, timeout_s: float | None) -> None:
        """Observe the oldest item's completion and give its slot back."""
        limit = self.timeout_s if timeout_s is None else timeout_s
        try:
            if not oldest.issued:
                raise XmoeError(
                    f"{oldest.item.op}, layer {oldest._context.layer}: only {oldest._next} of "
                    f"{len(oldest.item.phases)} phases were issued; allowed: all; next: issue the "
                    "rest before waiting"
                )
            leases = oldest._leases
            self._await(oldest, leases[-1][1], limit)
            for _, lease in leases[:-1]:
                lease.synchronize(limit)  # reached long ago; this reports a failure of its stream
        except BaseException as error:
            if isinstance(error, FenceTimeout) and timeout_s is not None:
                raise  # the caller's own deadline: the item goes on
            self._fail_with(oldest, error)
            raise
        self._inflight.popleft()
        oldest._slot.last = leases[-1][1]
        oldest._leases = []
        oldest._done = True
        oldest._context._release()
        self._free.append(oldest._slot)

    def _fail(self, ticket: Ticket | None, error: BaseException) -> BaseException:
        """Make a failure final; slots and what they hold stay."""
        if isinstance(error, ConfigError) and ticket is not None:
            final: BaseException = XmoeError(
                f"{ticket.item.op}, layer {ticket.item.layer} was refused half-way: {error}"
            )
            translated: BaseException = error
        else:
            known = self._translate is not None and isinstance(error, Exception)
            translated = final = self._translate(error) if known else error  # type: ignore
        if self._error is not None:
            return translated
        self._error = final
        unsent = []
        for one in self._inflight:
            # Whatever was queued behind it cannot be trusted either.
            one._error = final
            if not one.issued:
                unsent.append(one)
        self._quarantine.extend(self._inflight)
        if self._on_failure is not None:
            try:
                self._on_failure(final, tuple(unsent))
            except XmoeError as second:
                final.add_note(f"and then, while the peers were told: {second}")
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
        with self._entered():
            while self._inflight and self._error is None:
                self._complete(self._inflight[0], timeout_s)
            if self._error is not None:
                raise self._error

    def leaks(self) -> tuple[str, ...]:
        """What is not given back although no item is under way; for the check at closing."""
        found = []
        if len(self._free) != len(self._slots):
            found.append(f"{len(self._slots) - len(self._free)} slots")
        kept = sum(len(slot.leases) for slot in self._slots)
        if self._pool.taken != kept:
            found.append(f"{self._pool.taken - kept} events")
        for channel in self._channels.values():
            if channel.outstanding:
                found.append(f"channel {channel.rule.name!r}: {channel.outstanding} unanswered")
        return tuple(found)

    def close(self) -> None:
        """Refuse new work, drain, release events and streams. Twice is harmless. Local.

        After a failure it waits once for the streams; what does not end in time stays allocated
        (`quarantined`), since the device may still use it.

        Raises:
            What `drain` raises, when the executor had not failed before; XmoeError for a leak.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            already_failed = self._error is not None
            leaks: tuple[str, ...] = ()
            try:
                if not already_failed:
                    self.drain()
                    leaks = self.leaks()
            finally:
                self._release_all()
            if leaks:
                raise XmoeError(
                    f"pipeline closed with {', '.join(leaks)}; allowed: none; next: issue every "
                    "begun item to its end and answer every dispatch"
                )

    def _release_all(self) -> None:
        with self._device.bind():
            if self._error is not None and not self._idle():
                _QUARANTINE.extend(self._quarantine)
                _QUARANTINE.append(self._pool)
                _QUARANTINE.append(self._own)
                return
            for ticket in self._quarantine:
                ticket._context._release()
            self._quarantine.clear()
            self._inflight.clear()
            for slot in self._slots:
                slot.last, slot.leases = None, []
            self._pool.close()
            for stream in self._own:
                stream.close()

    def settle(self) -> bool:
        """Wait, bounded, until the streams have stopped; whether they have. Issues nothing."""
        with self._entered():
            return self._idle()

    def _idle(self) -> bool:
        """Have the streams stopped? A failed stream answers with its error once it has."""
        device_error = isinstance(self._cause(), AclError)
        if device_error and self.options.distrust_after_error:
            return False
        limit = self.options.shutdown_timeout_s or self.timeout_s
        deadline = time.monotonic() + limit
        for stream in self._own:
            try:
                stream.synchronize(max(0.001, deadline - time.monotonic()))
            except XmoeError as error:
                # A device error means that the stream has stopped; a timeout says nothing.
                if is_timeout(error):
                    return False
        return True

    def _cause(self) -> BaseException | None:
        error = self._error
        if error is not None and isinstance(error.__cause__, AclError):
            return error.__cause__
        return error

    def __enter__(self) -> StreamExecutor:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
