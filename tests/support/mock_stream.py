# SPDX-License-Identifier: Apache-2.0
"""A device of simulated streams with torch_npu's semantics, in one thread and without time.

    host queue    one first-in first-out queue for launches, records and waits of all streams; its
                  consumer lags behind the host
    events        a wait on an event that was never recorded does nothing, and its query says done;
                  a query says "not done" while the record is still in the host queue
    streams       from a pool of 32: the 33rd is the first again
    cores         exclusive, given in the order of arrival, held while a kernel waits for a peer
    errors        a launch that fails does so in the consumer: what is behind it is dropped, the
                  next enqueue raises once, later ones vanish silently; records that were dropped
                  leave their event at its earlier recording

Whatever may happen next (consumer, a stream, a peer) is chosen at random from a seed. Only waits of
the host let anything happen, so a schedule is what the host calls make of it.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from xmoe.errors import AclError

TIMEOUT = 507046
FAILED = 507014


class World:
    """Chooses what happens next. `actors` give the actions that are possible now."""

    def __init__(self, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.actors: list[Callable[[], list[Callable[[], None]]]] = []
        self.problems: list[str] = []

    def step(self) -> bool:
        actions = [action for actor in self.actors for action in actor()]
        if not actions:
            return False
        self.random.choice(actions)()
        return True

    def until(self, condition: Callable[[], bool]) -> bool:
        """Let things happen until `condition`; False when nothing can happen any more."""
        while not condition():
            if not self.step():
                return False
        return True

    def violation(self, text: str) -> None:
        self.problems.append(text)


@dataclass
class Kernel:
    """One launch. `start` runs when it gets its cores, `finish` once `ready` holds."""

    name: str
    cores: int = 0
    start: Callable[[], None] = lambda: None
    ready: Callable[[], bool] = lambda: True
    finish: Callable[[], None] = lambda: None
    state: str = "queued"


@dataclass(eq=False)
class _Queue:
    handle: int
    tasks: deque[object] = field(default_factory=deque)


class MockStream:
    def __init__(self, device: MockNpu, queue: _Queue) -> None:
        self._device = device
        self.queue = queue
        self.closed = False

    def handle(self) -> int:
        return self.queue.handle

    def wait_event(self, event: MockEvent) -> None:
        self._device.log.append(("wait", self.handle(), event.number))
        if event.recorded == 0:
            self._device.dropped_waits += 1
            return
        self._device.enqueue(self.queue, ("wait", event, event.recorded))

    def synchronize(self, timeout_s: float) -> None:
        self._device.stream_syncs += 1
        self._device.block(lambda: not self._device.busy(self.queue), timeout_s)

    def close(self) -> None:
        self.closed = True


class MockEvent:
    """`recorded` counts records as the host sees them, `reached` the latest one passed."""

    def __init__(self, device: MockNpu, number: int) -> None:
        self._device = device
        self.number = number
        self.recorded = 0
        self.reached = 0
        self.closed = False

    def record(self, stream: MockStream) -> None:
        self._device.log.append(("record", stream.handle(), self.number))
        self.recorded += 1
        self._device.enqueue(stream.queue, ("record", self, self.recorded))

    def synchronize(self, timeout_s: float) -> None:
        if self.recorded == 0:
            return
        self._device.event_syncs += 1
        if self._device.failure == "dropping":
            raise AssertionError("waits for an event of a failed device: never returns on an NPU")
        self._device.block(lambda: self.reached >= self.recorded, timeout_s)

    def query(self) -> bool:
        self._device.queries += 1
        return self.recorded == 0 or self.reached >= self.recorded

    def close(self) -> None:
        self.closed = True


class MockNpu:
    """See the module's text. `log` is the exact order of host calls."""

    name = "mock"
    index = 0
    torch_device = torch.device("cpu")

    def __init__(self, world: World | None = None, cores: int = 48, pool: int = 32) -> None:
        self.world = world or World()
        self.log: list[tuple[object, ...]] = []
        self.events: list[MockEvent] = []
        self.streams: list[MockStream] = []
        self.total_cores = cores
        self.free_cores = cores
        self.line: list[Kernel] = []
        self.fail_launch: str | None = None
        self.failure = ""
        self.dropped_waits = self.dropped = 0
        self.stream_syncs = self.event_syncs = self.device_syncs = self.queries = 0
        self._queues = [_Queue(handle) for handle in range(1, pool + 1)]
        self._used: list[_Queue] = []
        self._host: deque[tuple[_Queue, object]] = deque()
        self.world.actors.append(self._actions)

    @contextlib.contextmanager
    def bind(self) -> Iterator[None]:
        yield

    def create_stream(self) -> MockStream:
        queue = self._queues[len(self.streams) % len(self._queues)]
        self.streams.append(MockStream(self, queue))
        if queue not in self._used:
            self._used.append(queue)
        return self.streams[-1]

    def create_event(self) -> MockEvent:
        self.events.append(MockEvent(self, len(self.events)))
        return self.events[-1]

    def current_stream(self) -> MockStream:
        return self.streams[0]

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    def close(self) -> None:
        self.world.actors.remove(self._actions)

    def launch(self, handle: int, kernel: Kernel) -> None:
        """What an operator does."""
        self.log.append(("launch", handle, kernel.name))
        self.enqueue(self._queues[handle - 1], kernel)

    def launches(self) -> list[object]:
        return [entry[2] for entry in self.log if entry[0] == "launch"]

    def enqueue(self, queue: _Queue, task: object) -> None:
        if self.failure == "unreported":
            self.failure = "dropping"
            raise AclError("enqueue", FAILED, "TASK_QUEUE", "an earlier launch failed")
        if self.failure == "dropping":
            self.dropped += 1
            return
        self._host.append((queue, task))

    def block(self, done: Callable[[], bool], timeout_s: float) -> None:
        """A wait of the host."""
        if self.world.until(done):
            return
        if self.failure == "unreported":
            self.failure = "dropping"
            raise AclError("synchronize", FAILED, "TASK_QUEUE", "an earlier launch failed")
        time.sleep(min(timeout_s, 0.002))
        raise AclError("synchronize", TIMEOUT, "TIMEOUT", "")

    def busy(self, queue: _Queue) -> bool:
        return bool(queue.tasks) or any(entry[0] is queue for entry in self._host)

    def _actions(self) -> list[Callable[[], None]]:
        found: list[Callable[[], None]] = []
        if self._host:
            found.append(self._consume)
        for queue in self._used:
            action = self._head(queue) if queue.tasks else None
            if action is not None:
                found.append(action)
        return found

    def _consume(self) -> None:
        queue, task = self._host.popleft()
        if isinstance(task, Kernel) and task.name == self.fail_launch:
            self.failure = "unreported"
            for _, lost in self._host:  # never executed; their events look as they were before
                if isinstance(lost, tuple) and lost[0] == "record":
                    lost[1].recorded -= 1
            self._host.clear()
            return
        queue.tasks.append(task)

    def _head(self, queue: _Queue) -> Callable[[], None] | None:
        task = queue.tasks[0]
        if isinstance(task, Kernel):
            return self._kernel(queue, task)
        kind, event, number = task  # type: ignore[misc]
        if kind == "wait" and event.reached < number:
            return None

        def pass_by() -> None:
            queue.tasks.popleft()
            if kind == "record":
                event.reached = max(event.reached, number)

        return pass_by

    def _kernel(self, queue: _Queue, kernel: Kernel) -> Callable[[], None] | None:
        if kernel.state == "queued":

            def arrive() -> None:
                kernel.state = "in line"
                self.line.append(kernel)

            return arrive
        if kernel.state == "in line":
            if self.line[0] is not kernel or self.free_cores < kernel.cores:
                return None

            def begin() -> None:
                self.line.pop(0)
                self.free_cores -= kernel.cores
                kernel.state = "running"
                kernel.start()

            return begin
        if not kernel.ready():
            return None

        def end() -> None:
            self.free_cores += kernel.cores
            queue.tasks.popleft()
            kernel.finish()

        return end
