# SPDX-License-Identifier: Apache-2.0
"""Order of launches that share one communication resource.

The window, its counters and its flags belong to one launch at a time. Launches on one stream are
ordered by the stream; launches on two streams are ordered by nobody. The fence orders them:

    stream   a launch whose stream is not the one that launched last first waits, on the device, for
             the last launch's event; same-stream launches cost nothing
    host     each launch first waits, on the host, for the last one
    off      no order; exists to show the race

A lease is held from `acquire` to `record`: between them the launch is queued, so no other thread
can get in between the wait and the record.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from types import TracebackType

from xmoe.errors import AclError, FenceTimeout
from xmoe.kernels.device import Device, Event, Stream, is_timeout
from xmoe.types import FenceMode

DEFAULT_TIMEOUT_S = 60.0
# A stream that has not launched for this many other streams' launches has its event waited for and
# dropped.
_MAX_STREAMS = 32


class FenceLease:
    """Permission for one launch. Use with `with`; call `record` right after queueing the launch.

    Leaving without `record` (the launch raised, or was abandoned) waits for the stream, since
    nobody knows what was queued, and gives the fence back.
    """

    __slots__ = ("_fence", "_given_back", "_handle", "_open", "_stream")

    def __init__(self, fence: LaunchFence, stream: Stream, handle: int) -> None:
        self._fence = fence
        self._stream = stream
        self._handle = handle
        self._open = True
        self._given_back = False

    def record(self) -> None:
        """Mark the launch and let the next one in. Local; queues one event."""
        if self._open:
            self._open = False
            try:
                self._fence._recorded(self._stream, self._handle)
            finally:
                self._give_back()

    def _give_back(self) -> None:
        if not self._given_back:
            self._given_back = True
            self._fence._mutex.release()

    def __enter__(self) -> FenceLease:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not self._open:
            return
        self._open = False
        try:
            self._fence._settle(self._stream)
        except AclError:
            # The launch's own error is on its way; without one, this is the first anybody hears of
            # it.
            if kind is None:
                raise
        finally:
            self._give_back()


class LaunchFence:
    """Orders launches on one resource; see the module's text for the modes.

    Args:
        timeout_s: seconds for each wait.
        on_failure: told when an unmarked launch failed or did not end in time: nothing orders the
            next one after it. No other launch is let in before it returns.

    Attributes:
        mode: how.
        launches: launches recorded so far. waits: how often a launch had to be ordered after
            another.
    """

    def __init__(
        self,
        mode: FenceMode,
        device: Device,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        on_failure: Callable[[BaseException], None] | None = None,
    ) -> None:
        self.mode = FenceMode(mode)
        self.timeout_s = timeout_s
        self.launches = 0
        self.waits = 0
        self._device = device
        self._on_failure = on_failure
        self._mutex = threading.Lock()
        # Latest launch of each stream, oldest first; `_last` is the latest of all. An entry stays
        # while its launch is recorded: `wait_for_stream` looks without the lock.
        self._events: OrderedDict[int, Event] = OrderedDict()
        self._last: tuple[int, Event] | None = None

    def acquire(self, stream: Stream) -> FenceLease:
        """Wait until `stream` may launch.

        Raises:
            FenceTimeout: another launch holds the lease, or (host mode) runs, longer than
                `timeout_s`.
        """
        self._lock(self.timeout_s)
        try:
            # Read once for the fence's own needs: where a host queue is emptied first, that costs.
            handle = stream.handle()
            self._make_room(handle)
            self._order(stream, handle)
        except BaseException:
            self._mutex.release()
            raise
        return FenceLease(self, stream, handle)

    def _order(self, stream: Stream, handle: int) -> None:
        if self._last is None or self.mode is FenceMode.OFF:
            return
        owner, event = self._last
        if self.mode is FenceMode.HOST:
            self.waits += 1
            wait_event(event, self.timeout_s, f"launch {self.launches} on this resource")
        elif owner != handle:
            self.waits += 1
            stream.wait_event(event)

    def _make_room(self, handle: int) -> None:
        """An event for this stream, made before the launch: afterwards nothing may fail for it."""
        if handle in self._events:
            return
        while len(self._events) >= _MAX_STREAMS:
            oldest = next(iter(self._events))
            wait_event(self._events[oldest], self.timeout_s, "an earlier stream's launch")
            self._events.pop(oldest).close()
        self._events[handle] = self._device.create_event()

    def _recorded(self, stream: Stream, handle: int) -> None:
        event = self._events[handle]
        try:
            event.record(stream, handle)
        except AclError:
            # Without an event only the host can tell when the launch is over.
            self._events.pop(handle).close()
            self._last = None
            self._settle(stream)
            raise
        self.launches += 1
        self._events.move_to_end(handle)
        self._last = (handle, event)

    def _settle(self, stream: Stream) -> None:
        """Wait for what nobody could mark. The lease is still held when `on_failure` is called."""
        try:
            stream.synchronize(self.timeout_s)
        except BaseException as error:
            if self._on_failure is not None:
                self._on_failure(error)
            raise

    def wait_for_stream(
        self, handle: int, timeout_s: float | None = None, what: str = "the stream's last launch"
    ) -> None:
        """Wait until the latest launch recorded on this stream is done. Local.

        Raises:
            FenceTimeout: not done in time, saying `what` was not. AclError: it failed on the
                device.
        """
        # Without the lock: who holds the lease asks this too, when it makes room.
        event = self._events.get(handle)
        if event is not None:
            wait_event(event, self.timeout_s if timeout_s is None else timeout_s, what)

    def drain(self, timeout_s: float | None = None) -> None:
        """Wait until every launch recorded so far is done. Local.

        Raises:
            FenceTimeout: not done in time. AclError: a launch failed on the device.
        """
        limit = self.timeout_s if timeout_s is None else timeout_s
        self._lock(limit)
        try:
            for event in self._events.values():
                wait_event(event, limit, "drain")
        finally:
            self._mutex.release()

    def close(self) -> None:
        """Release the events; waits for no launch. Twice is harmless. Raises FenceTimeout."""
        self._lock(self.timeout_s)
        try:
            self._last = None
            while self._events:
                self._events.popitem()[1].close()
        finally:
            self._mutex.release()

    def _lock(self, timeout_s: float) -> None:
        if not self._mutex.acquire(timeout=timeout_s):
            raise FenceTimeout(
                f"launch fence: another thread has held the lease for {timeout_s:g} s; "
                "allowed: a launch is queued within that time; next: look at that thread, or raise "
                "fence_timeout_s"
            )


def wait_event(event: Event, timeout_s: float, what: str) -> None:
    """Wait for a recorded event by a deadline; a timeout is FenceTimeout, a failed task its
    AclError.
    """
    try:
        event.synchronize(timeout_s)
    except AclError as error:
        if not is_timeout(error):
            raise
        raise FenceTimeout(
            f"{what}: not finished after {timeout_s:g} s; allowed: within the time limit; next: "
            "check that all ranks launched, or raise the time limit"
        ) from error
