# SPDX-License-Identifier: Apache-2.0
"""One rank's device for the conformance cases: device memory only, never a host pointer.

Everything goes through the functions the product uses. Raw status codes are wanted here, so most
calls are made without `check`.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from xmoe.conformance.case import NotHere
from xmoe.kernels.acl.handles import AclEvent, AclStream, DeviceMemory, TensorDesc, TensorListDesc
from xmoe.kernels.acl.loader import load
from xmoe.kernels.acl.status import REPEAT_INITIALIZE, check, recent_text
from xmoe.kernels.acl.toolkit import find_toolkit

if TYPE_CHECKING:
    from xmoe.kernels.acl.loader import Runtime
    from xmoe.kernels.npu_device import NpuDevice

Array = npt.NDArray[Any]
TIMEOUT_S = 20.0
COMPLETE, NOT_READY = 0, 1  # aclrtStreamQuery
_BLOCKING = 1


class Session:
    """The device bound to the calling thread. Objects made through it are closed with it."""

    def __init__(self, device: str | None, index: int = 0, tensors: str = "acl") -> None:
        self.runtime: Runtime = load(find_toolkit(device))
        self.ffi = self.runtime.ffi
        self.index = index
        code = self.runtime.acl.aclInit(self.ffi.NULL)
        if code not in (0, REPEAT_INITIALIZE):
            check(self.runtime, code, "aclInit")
        self.text()
        check(self.runtime, self.runtime.acl.aclrtSetDevice(index), "aclrtSetDevice")
        self._npu: NpuDevice | None = None
        if tensors == "npu":
            from xmoe.kernels.npu_device import NpuDevice

            self._npu = NpuDevice(index, self.runtime)
        self._lasting = contextlib.ExitStack()
        self.stack = self._lasting

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """What is made inside is given back at the end of it."""
        outer, self.stack = self.stack, contextlib.ExitStack()
        try:
            yield
        finally:
            inner, self.stack = self.stack, outer
            inner.close()

    @contextlib.contextmanager
    def lasting(self) -> Iterator[None]:
        """What is made inside lives as long as the session."""
        outer, self.stack = self.stack, self._lasting
        try:
            yield
        finally:
            self.stack = outer

    @property
    def soft(self) -> bool:
        """Whether this is the software device. Only for what would harm a vendor's CANN."""
        return self.runtime.identity is not None

    def acl(self, name: str) -> Any:
        """A function of libascendcl; the case is skipped where there is none."""
        return self._function(self.runtime.acl, name)

    def nnop(self, name: str) -> Any:
        """A function of libnnopbase."""
        return self._function(self.runtime.nnop, name)

    def hccl(self, name: str) -> Any:
        """A function of libhccl or libhccl_fwk."""
        return self._function(self.runtime.hccl, name)

    @staticmethod
    def _function(table: Any, name: str) -> Any:
        if not table.has(name):
            raise NotHere(f"{name} is not exported here")
        return getattr(table, name)

    def text(self) -> str:
        """The vendor's text for the last failure of this thread; reading drops it."""
        return recent_text(self.runtime)

    def stream(self) -> AclStream:
        return self.stack.enter_context(self._stream())

    def _stream(self) -> AclStream:
        if self._npu is None:
            return AclStream(self.runtime)
        from xmoe.conformance.npu_objects import NpuStream

        return NpuStream(self._npu)

    def event(self) -> AclEvent:
        return self.stack.enter_context(AclEvent(self.runtime))

    def memory(self, nbytes: int) -> DeviceMemory:
        return self.stack.enter_context(self._memory(nbytes))

    def _memory(self, nbytes: int) -> DeviceMemory:
        if self._npu is None:
            return DeviceMemory(self.runtime, nbytes)
        from xmoe.conformance.npu_objects import NpuMemory

        return NpuMemory(self._npu, nbytes)

    def array(self, values: Array) -> DeviceMemory:
        """A copy of a host array in device memory of its own."""
        made = self.memory(max(64, values.nbytes))
        made.write(np.ascontiguousarray(values).tobytes())
        return made

    def read(self, memory: DeviceMemory, dtype: Any, count: int) -> Array:
        """Host copy of the first elements. Synchronise first."""
        return np.frombuffer(memory.read(count * np.dtype(dtype).itemsize), dtype).copy()

    def tensor(self, memory: DeviceMemory, shape: tuple[int, ...], dtype: str) -> TensorDesc:
        return self.stack.enter_context(TensorDesc(self.runtime, memory.handle, shape, dtype=dtype))

    def tensors(self, memories: list[DeviceMemory], shape: tuple[int, ...], dtype: str) -> Any:
        members = [TensorDesc(self.runtime, m.handle, shape, dtype=dtype) for m in memories]
        return self.stack.enter_context(TensorListDesc(self.runtime, members))

    def fill(self, memory: DeviceMemory, value: int, stream: AclStream) -> None:
        """Queue a memset of all of it."""
        status = self.acl("aclrtMemsetAsync")(
            memory.pointer, memory.nbytes, value, memory.nbytes, stream.pointer
        )
        check(self.runtime, status, "aclrtMemsetAsync")

    def copy(self, target: DeviceMemory, source: DeviceMemory, stream: AclStream) -> None:
        """Queue a copy inside the device."""
        status = self.acl("aclrtMemcpyAsync")(
            target.pointer, target.nbytes, source.pointer, source.nbytes, 3, stream.pointer
        )
        check(self.runtime, status, "aclrtMemcpyAsync")

    def value(self, memory: DeviceMemory) -> int:
        """The byte all of it holds; -1 when it differs from place to place."""
        held = set(memory.read())
        return held.pop() if len(held) == 1 else -1

    def query(self, event: AclEvent) -> bool:
        return event.query()

    def in_thread(self, fn: Callable[[], Any]) -> Any:
        """The result of `fn` in a fresh thread."""
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(fn).result()

    def gate(self, stream: AclStream) -> Gate:
        """Block the stream from here on until the gate opens; it opens at the latest with `close`.

        Held by a host callback, the one way to hold a stream that every device has.
        """
        return self.stack.enter_context(Gate(self, stream))

    def close(self) -> None:
        """Give everything back, in reverse order."""
        self._lasting.close()


class Gate:
    """A stream that waits in a host callback. `open` lets it go on."""

    def __init__(self, session: Session, stream: AclStream) -> None:
        self._session, self._stream = session, stream
        self._opened, self._stop, self._ready = (threading.Event() for _ in range(3))
        launch = session.acl("aclrtLaunchCallback")
        subscribe = session.acl("aclrtSubscribeReport")
        session.acl("aclrtProcessReport")
        self._thread = threading.Thread(target=self._serve)
        self._fn = session.ffi.callback("void(void*)", self._hold)
        self._thread.start()
        self._number = self._thread.ident or 0  # pthread_self on Linux
        try:
            check(session.runtime, subscribe(self._number, stream.pointer), "aclrtSubscribeReport")
            self._ready.set()
            status = launch(self._fn, session.ffi.NULL, _BLOCKING, stream.pointer)
            check(session.runtime, status, "aclrtLaunchCallback")
        except BaseException:
            self._end()
            raise

    def _serve(self) -> None:
        self._session.runtime.acl.aclrtSetDevice(self._session.index)
        self._ready.wait(TIMEOUT_S)
        while not self._stop.is_set():
            self._session.runtime.acl.aclrtProcessReport(20)

    def _hold(self, _: object) -> None:
        self._opened.wait(TIMEOUT_S)

    def open(self) -> None:
        """Let the stream go on."""
        self._opened.set()

    def _end(self) -> None:
        self._opened.set()
        self._stop.set()
        self._ready.set()
        self._thread.join(TIMEOUT_S)

    def __enter__(self) -> Gate:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.set()
        if not self._stream.closed:
            # The thread that handles the callback must outlive it.
            acl = self._session.runtime.acl
            acl.aclrtSynchronizeStreamWithTimeout(self._stream.pointer, int(TIMEOUT_S * 1000))
            acl.aclrtUnSubscribeReport(self._number, self._stream.pointer)
        self._end()


def until(condition: Callable[[], bool], timeout_s: float = 5.0) -> bool:
    """Whether the condition became true in time."""
    limit = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > limit:
            return False
        time.sleep(0.001)
    return True


def milliseconds(since: float) -> str:
    return f"{(time.perf_counter() - since) * 1000:.2f} ms"
