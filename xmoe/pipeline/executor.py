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
    waits      are bounded, and say which item, layer, slot and phase they waited for (waits.py)
    failure    the first one is final. `on_failure` is called once, so that an adapter can release
               its peers; nothing is issued or waited for afterwards; slots are quarantined. One
               exception: ConfigError from an item's first phase means that the item was refused
               before any effect (failure.py)
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from threading import get_ident
from types import TracebackType

from xmoe.errors import CommError, ConfigError, FenceTimeout, PipelineStopped, XmoeError
from xmoe.kernels.device import Device, Stream, is_timeout
from xmoe.multistream import StreamMode
from xmoe.pipeline.channels import Channel, ChannelRule
from xmoe.pipeline.events import EventLease, EventPool
from xmoe.pipeline.failure import QUARANTINE, Failure, OnFailure
from xmoe.pipeline.items import Phase, PhaseKind, TraceEntry, WorkItem
from xmoe.pipeline.options import ExecutorOptions
from xmoe.pipeline.ticket import Slot, Ticket
from xmoe.pipeline.waits import Waits

_COMPUTE = list(PhaseKind).index(PhaseKind.COMPUTE)
_METADATA = PhaseKind.METADATA  # an enum's members are slow to look up


class StreamExecutor:
    """Runs items; see the module's text. Thread-safe: items are issued one phase at a time.

    Args:
        device: owns the streams. The executor makes them and closes them.
        options: None is serial with one slot.
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
    ) -> None:
        self.options = options = options or ExecutorOptions()
        self.timeout_s = options.timeout_s
        self.trace: list[TraceEntry] | None = [] if options.trace else None
        self._device = device
        self._lock = threading.RLock()
        self._session: int | None = None
        self._slots = [Slot(number) for number in range(options.max_inflight)]
        self._free: deque[Slot] = deque(self._slots)
        self._inflight: deque[Ticket] = deque()
        self._channels = {rule.name: Channel(rule) for rule in channels}
        self._failure = Failure(translate, on_failure)
        self._waits = Waits(options, self._inflight, on_stall)
        self._over = False  # failed or closed
        self._observes = self._observe  # bound once, not for each ticket
        self._issue_up_to = self._issue_traced if options.trace else self._issue
        self._closed = False
        with device.bind():
            self._streams = self._make_streams(options.mode)
        self._own = tuple(dict.fromkeys(self._streams))
        self._pool = EventPool(device)

    def _make_streams(self, mode: StreamMode) -> tuple[Stream, ...]:
        """By the order of PhaseKind."""
        device = self._device
        if mode is StreamMode.SERIAL:
            return (device.create_stream(),) * len(PhaseKind)
        with contextlib.ExitStack() as undo:
            streams: list[Stream] = []
            for _ in range(3):
                streams.append(device.create_stream())
                undo.callback(streams[-1].close)
            handles = [stream.handle() for stream in streams]
            # Stream pools go round: beyond their size two "new" streams are one, and waits between
            # them would be waits of a stream for itself. Device without handles (0) run inline.
            if len(set(handles)) != len(handles) and any(handles):
                raise ConfigError(
                    f"the device gave streams with handles {handles}; allowed: three distinct "
                    "ones; next: make the executor before the process has used up its stream pool"
                )
            undo.pop_all()
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
        return self._failure.error

    @property
    def quarantined(self) -> int:
        """Items whose memory is held because the device may still use it."""
        return len(self._failure.quarantined)

    @property
    def inflight(self) -> int:
        """Items that hold a slot."""
        return len(self._inflight)

    def report(self) -> str:
        """Every item under way with layer, slot and phase; only while nothing has failed."""
        return self._waits.report()

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        """Keep lock and device binding over many calls of this thread: a loop pays for them once.

        Other threads wait; `request_stop` does not.
        """
        with self._lock, self._device.bind():
            before, self._session = self._session, get_ident()
            try:
                yield
            finally:
                self._session = before

    def request_stop(self) -> None:
        """Make waits for a gate or a receive end with PipelineStopped. Any thread; returns at
        once.

        Without a receive on the device nothing is lost and `close` drains as usual; a receive that
        waits on the device can only be aborted, which is a failure.
        """
        self._waits.stop.set()

    @property
    def stopping(self) -> bool:
        """`request_stop` was called."""
        return self._waits.stop.is_set()

    def submit(self, item: WorkItem) -> Ticket:
        """Issue the item's phases in order; their device work may still be going on afterwards.
        Local.

        Waits for the oldest item when all slots are taken, for the item's gate, and, if the item
        has a metadata phase, for its receive.

        Raises:
            What a phase raised; PipelineStopped; XmoeError when the executor has failed before or
            is closed.
        """
        if self._session != get_ident():
            with self.session():
                return self.submit(item)
        ticket = self._begin(item)
        self._issue_up_to(ticket, len(item.phases))
        return ticket

    def begin(self, item: WorkItem) -> Ticket:
        """Take a slot for the item and pass its gate; `issue` then issues one phase a call.

        For schedules that put one item's phase between two of another. Every item that was begun
        must be issued to its end.
        """
        if self._session != get_ident():
            with self.session():
                return self._begin(item)
        return self._begin(item)

    def issue(self, ticket: Ticket) -> None:
        """Issue the next phase. Raises as `submit`."""
        if self._session != get_ident():
            with self.session():
                return self.issue(ticket)
        if self._over:
            self._refuse_work()
        if ticket.issued:
            raise ConfigError(
                f"{ticket.item.op}: all phases were issued; allowed: once each; next: correct "
                "the schedule"
            )
        self._issue_up_to(ticket, ticket._next + 1)

    def _begin(self, item: WorkItem) -> Ticket:
        if self._over:
            self._refuse_work()
        if not self._free:
            oldest = self._inflight[0]
            if oldest._next != len(oldest.item.phases):
                raise XmoeError(
                    f"all {len(self._slots)} slots are taken and the oldest item, "
                    f"{oldest.item.op}, waits for a phase that nobody has issued; allowed: fewer "
                    "begun items than slots; next: issue its phases first, or raise max_inflight"
                )
            self._complete(oldest, None)
        if item.gate is not None:
            self._pass_gate(item, item.gate)
        slot = self._free.popleft()
        if not slot.lanes:
            slot.make_lanes(self._streams, self._pool)
        ticket = Ticket(item, slot, self._own[0], self._observes)
        self._inflight.append(ticket)
        return ticket

    def _pass_gate(self, item: WorkItem, gate: Callable[[], bool]) -> None:
        try:
            self._waits.for_gate(item, gate, self._complete_reached)
        except PipelineStopped:
            raise
        except BaseException as error:
            if not self._over:  # else an earlier item's failure, seen while waiting
                self._fail_with(None, error)
            raise

    def _complete_reached(self) -> None:
        """Idle: give slots back, and hear of failures of items that are on their way."""
        while self._inflight and self._inflight[0].issued:
            oldest = self._inflight[0]
            if not oldest._slot.lanes[oldest.item.phases[-1].order][1].query():
                break
            self._complete(oldest, None)

    def _issue(self, ticket: Ticket, end: int) -> None:
        """Issue the phases up to, and without, number `end`. Every item comes through here."""
        slot, phases = ticket._slot, ticket.item.phases
        lanes, channels = slot.lanes, self._channels
        number = ticket._next
        previous = lanes[phases[number - 1].order][1] if number else slot.last
        for phase in phases[number:end]:
            if phase.kind is _METADATA:
                self._read_metadata(ticket, phase)
                number += 1
                continue
            try:
                channel = channels[phase.channel]
            except KeyError:
                channel = self._new_channel(phase.channel)
            stream, lease = lanes[phase.order]
            edges = None if channel.free else self._edges(ticket, phase, channel)
            ran = False
            try:
                # As EventLease.wait_on; a stream is in order with itself.
                if previous is not None and previous.stream is not stream:
                    if previous.stream is None:
                        raise previous.misuse("waited for")
                    stream.wait_event(previous.event)
                if edges is not None:
                    self._wait_for_edges(ticket, previous, edges, stream)
                    channel.sequence += 1
                ticket.stream = stream
                phase.run(ticket)
                ran = True
                # The next generation: the end of what the stream holds now. If recording fails,
                # nothing may wait for the former one.
                lease.stream = None
                lease.generation += 1
                lease.event.record(stream)
                lease.stream = stream
                if edges is not None:
                    channel.commit(phase.kind, lease)
                ticket._next = number = number + 1
            except BaseException as error:
                # By contract a first phase refuses before anything was queued.
                if number == 0 and not ran and isinstance(error, ConfigError):
                    self._give_slot_back(ticket)
                else:
                    self._fail_with(ticket, error)
                raise
            previous = lease

    def _issue_traced(self, ticket: Ticket, end: int) -> None:
        """As `_issue`, with an entry for each phase, also for one that raises."""
        for number in range(ticket._next, end):
            phase = ticket.item.phases[number]
            sequence, start = 0, time.perf_counter()
            if phase.kind is not _METADATA:
                channel = self._channels.get(phase.channel) or self._new_channel(phase.channel)
                sequence = channel.sequence
                channel.sequence += channel.free
            try:
                self._issue(ticket, number + 1)
            finally:
                self._note(ticket, phase, sequence, start, ticket._next > number)

    def _edges(
        self, ticket: Ticket, phase: Phase, channel: Channel
    ) -> tuple[EventLease | None, EventLease | None]:
        """What the channel makes the phase wait for. Raises CommError if it does not allow it."""
        try:
            return channel.edges(phase.kind)
        except CommError as error:
            if ticket._next == 0:
                self._give_slot_back(ticket)
            else:
                self._fail_with(ticket, error)
            raise

    def _wait_for_edges(
        self,
        ticket: Ticket,
        previous: EventLease | None,
        edges: tuple[EventLease | None, EventLease | None],
        stream: Stream,
    ) -> None:
        """Queue the waits that the channel asks for besides the one for `previous`."""
        # What the item issued itself is ordered by its own phases already.
        ordered = [previous, *(lease for _, lease in ticket.recorded)]
        for edge in edges:
            if edge is not None and edge not in ordered:
                ordered.append(edge)
                if edge.stream is not stream:
                    edge.wait_on(stream)

    def _new_channel(self, name: str) -> Channel:
        """Without a rule: all phases one after the other."""
        channel = self._channels[name] = Channel(ChannelRule(name, exclusive=True))
        return channel

    def _give_slot_back(self, ticket: Ticket) -> None:
        """As if the refused item had never been begun."""
        ticket._done = True
        ticket._release()
        self._inflight.remove(ticket)
        self._free.append(ticket._slot)

    def _read_metadata(self, ticket: Ticket, phase: Phase) -> None:
        try:
            self._waits.for_receive(ticket)
            phase.run(ticket)
            ticket._next += 1
        except BaseException as error:
            self._fail_with(ticket, error)
            raise

    def _note(
        self, ticket: Ticket, phase: Phase, sequence: int, start: float, issued: bool
    ) -> None:
        assert self.trace is not None
        kind, generation = phase.kind.value, 0
        stream = kind if self.options.mode is StreamMode.OVERLAP else "main"
        if phase.kind is _METADATA:
            stream = "host"
        elif issued:
            generation = ticket._slot.lanes[phase.order][1].generation
        entry = TraceEntry(
            ticket.item.op, kind, ticket.layer, ticket.slot, phase.channel, sequence, start,
            time.perf_counter(), stream, ticket.stage, generation,
        )  # fmt: skip
        self.trace.append(entry)

    def _observe(self, ticket: Ticket, timeout_s: float | None) -> None:
        """Wait until `ticket` is done; older items are done then too, and are released first."""
        with self.session():
            if ticket._error is not None:
                raise ticket._error
            while not ticket._done:
                self._complete(self._inflight[0], timeout_s)

    def _complete(self, oldest: Ticket, timeout_s: float | None) -> None:
        """Observe the oldest item's completion and give its slot back."""
        try:
            if oldest._next != len(oldest.item.phases):
                raise XmoeError(
                    f"{oldest.item.op}, layer {oldest.layer}: only {oldest._next} of "
                    f"{len(oldest.item.phases)} phases were issued; allowed: all; next: issue the "
                    "rest before waiting"
                )
            self._waits.for_item(oldest, timeout_s)
        except BaseException as error:
            if isinstance(error, FenceTimeout) and timeout_s is not None:
                raise  # the caller's own deadline: the item goes on
            self._fail_with(oldest, error)
            raise
        self._inflight.popleft()
        slot = oldest._slot
        slot.last = slot.lanes[oldest.item.phases[-1].order][1]
        oldest._done = True
        self._free.append(slot)
        if oldest._kept is not None or oldest._owned is not None:
            oldest._release()

    def _fail_with(self, ticket: Ticket | None, error: BaseException) -> None:
        """Make a failure final. Raises what it means; returns when that is the error itself."""
        self._over = True  # first: telling the peers may raise
        meaning = self._failure.make_final(ticket, error, self._inflight)
        if meaning is not error:
            raise meaning from error

    def _refuse_work(self) -> None:
        self._failure.refuse()
        raise XmoeError(
            "executor is closed; allowed: work before close(); next: build a new runner"
        )

    def drain(self, timeout_s: float | None = None) -> None:
        """Wait for all submitted items and release their slots. Local. Raises as `result` does."""
        with self.session():
            while self._inflight and self.failed is None:
                self._complete(self._inflight[0], timeout_s)
            if self.failed is not None:
                raise self.failed

    def leaks(self) -> tuple[str, ...]:
        """What is not given back although no item is under way; for the check at closing."""
        found = []
        if len(self._free) != len(self._slots):
            found.append(f"{len(self._slots) - len(self._free)} slots")
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
            self._closed = self._over = True
            already_failed = self.failed is not None
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
        quarantined = self._failure.quarantined
        with self._device.bind():
            if self.failed is not None and not self._idle():
                QUARANTINE.extend((*quarantined, self._pool, self._own))
                return
            with contextlib.ExitStack() as rest:  # all of it, whatever one of them raises
                for stream in reversed(self._own):
                    rest.callback(stream.close)
                rest.callback(self._pool.close)
                for ticket in reversed(quarantined):
                    rest.callback(ticket._release)
                quarantined.clear()
                self._inflight.clear()
                for slot in self._slots:
                    slot.last, slot.lanes = None, ()

    def settle(self) -> bool:
        """Wait, bounded, until the streams have stopped; whether they have. Issues nothing."""
        with self.session():
            return self._idle()

    def _idle(self) -> bool:
        """Have the streams stopped? A failed stream answers with its error once it has."""
        if self._failure.on_device and self._device.torch_device.type != "cpu":
            return False  # a framework's host queue drops launches and records silently by now
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

    def __enter__(self) -> StreamExecutor:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
