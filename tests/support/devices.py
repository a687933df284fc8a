# SPDX-License-Identifier: Apache-2.0
"""A device made of Python threads, to look at ordering without any library.

Streams are worker threads; an event is a set of generations. It knows nothing of the product.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator

import torch

from xmoe.errors import AclError


class FakeStream:
    """FIFO worker. `push` queues a function; a raised AclError stops the stream for good."""

    _next = 1

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.error: AclError | None = None
        self.closed = False
        self.waits: list[FakeEvent] = []
        self._handle = FakeStream._next
        FakeStream._next += 1
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while (task := self._queue.get()) is not None:
            try:
                if self.error is None or getattr(task, "always", False):
                    task()
            except AclError as error:
                self.error = error

    def handle(self) -> int:
        return self._handle

    def push(self, task: Callable[[], None], always: bool = False) -> None:
        def run() -> None:
            task()

        run.always = always  # type: ignore[attr-defined]
        self._queue.put(run)

    def wait_event(self, event: FakeEvent) -> None:
        self.waits.append(event)
        self.push(event.latest().wait)

    def synchronize(self, timeout_s: float) -> None:
        done = threading.Event()
        self.push(done.set, always=True)
        if not done.wait(timeout_s):
            raise AclError("sync", 507046, "TIMEOUT", "")
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._queue.put(None)
            self._thread.join(10)


class FakeEvent:
    def __init__(self) -> None:
        self._recordings: list[tuple[threading.Event, FakeStream]] = []
        self.closed = False

    def latest(self) -> threading.Event:
        return self._recordings[-1][0]

    def record(self, stream: FakeStream, handle: int | None = None) -> None:
        reached = threading.Event()
        self._recordings.append((reached, stream))
        stream.push(reached.set, always=True)

    def synchronize(self, timeout_s: float) -> None:
        if not self._recordings:
            return
        reached, stream = self._recordings[-1]
        if not reached.wait(timeout_s):
            raise AclError("sync", 507047, "TIMEOUT", "")
        if stream.error is not None:
            raise stream.error

    def query(self) -> bool:
        return bool(self._recordings) and self._recordings[-1][0].is_set()

    def close(self) -> None:
        self.closed = True


class FakeDevice:
    name = "fake"
    index = 0
    torch_device = torch.device("cpu")

    def __init__(self) -> None:
        self.streams: list[FakeStream] = []
        self.events: list[FakeEvent] = []

    @contextlib.contextmanager
    def bind(self) -> Iterator[None]:
        yield

    def create_stream(self) -> FakeStream:
        self.streams.append(FakeStream())
        return self.streams[-1]

    def create_event(self) -> FakeEvent:
        self.events.append(FakeEvent())
        return self.events[-1]

    def current_stream(self) -> FakeStream:
        return self.streams[0]

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    def close(self) -> None:
        for stream in self.streams:
            stream.close()
