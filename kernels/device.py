# SPDX-License-Identifier: Apache-2.0
"""Devices, streams and events as the layers above see them.

    HostDevice    CPU tensors; streams and events of an ACL runtime whose devices share host memory
    InlineDevice  CPU tensors, no library: work is done when the call returns (mode "off")

An adaptor for torch_npu tensors has the same surface. Which one is made follows from where a
model's tensors are.
"""

from __future__ import annotations

import contextlib
import threading
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from xmoe.errors import AclError, ConfigError, FenceTimeout, UnsupportedError
from xmoe.kernels.acl.handles import AclEvent, AclStream
from xmoe.kernels.acl.status import REPEAT_INITIALIZE, check, recent_text

if TYPE_CHECKING:
    from xmoe.kernels.acl.loader import Runtime


# What a runtime answers when a wait runs out of time: stream and event form of CANN 9, older codes.
_TIMEOUT_CODES = (507046, 507047, 107019, 107020)


def is_timeout(error: Exception) -> bool:
    """Does the error say that a wait ran out of time, so that the work may still be going on?"""
    return isinstance(error, FenceTimeout) or (
        isinstance(error, AclError) and error.code in _TIMEOUT_CODES
    )


class Stream(Protocol):
    """An in-order queue of device work."""

    def handle(self) -> int:
        """The raw stream for a C launch. Read it at each launch, never keep it. Local."""

    def wait_event(self, event: Event) -> None:
        """Later work on this stream starts after `event`'s latest recording. Does not block the
        host.
        """

    def synchronize(self, timeout_s: float) -> None:
        """Block until all queued work is done. Raises AclError for failed work or a timeout."""

    def close(self) -> None:
        """Release it; twice is harmless."""


class Event(Protocol):
    """A point in a stream; may be recorded again."""

    def record(self, stream: Stream, handle: int | None = None) -> None:
        """Mark the end of what `stream` holds now. `handle` is the stream's, for a caller that read
        it for the same launch.
        """

    def synchronize(self, timeout_s: float) -> None:
        """Block until the latest recording is reached; returns at once if there was none."""

    def query(self) -> bool:
        """True when the latest recording is reached."""

    def close(self) -> None:
        """Release it; twice is harmless."""


class Device(Protocol):
    """One device of this process."""

    @property
    def name(self) -> str: ...

    @property
    def torch_device(self) -> torch.device: ...

    @property
    def index(self) -> int: ...

    def bind(self) -> AbstractContextManager[None]:
        """Make this device current for the calling thread; the former one is restored on exit."""

    def create_stream(self) -> Stream: ...

    def create_event(self) -> Event: ...

    def current_stream(self) -> Stream: ...

    def capturing(self) -> bool:
        """Whether work on the caller's current stream is recorded into a graph instead of run. Does
        not wait; asked at each layer call.
        """

    def check(self) -> None:
        """Raise the error of work on the current stream that is known to have failed. Does not
        wait; asked once a step, since asking costs more than a launch.
        """

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor: ...

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor: ...

    def close(self) -> None: ...


class _InlineStream:
    def handle(self) -> int:
        return 0

    def wait_event(self, event: Event) -> None:
        return None

    def synchronize(self, timeout_s: float) -> None:
        return None

    def close(self) -> None:
        return None


class _InlineEvent:
    def record(self, stream: Stream, handle: int | None = None) -> None:
        return None

    def synchronize(self, timeout_s: float) -> None:
        return None

    def query(self) -> bool:
        return True

    def close(self) -> None:
        return None


class InlineDevice:
    """CPU tensors without any runtime library; for models that run the split path only."""

    name = "cpu"
    index = 0
    torch_device = torch.device("cpu")

    def bind(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def create_stream(self) -> Stream:
        return _InlineStream()

    def create_event(self) -> Event:
        return _InlineEvent()

    def current_stream(self) -> Stream:
        return _InlineStream()

    def capturing(self) -> bool:
        return False

    def check(self) -> None:
        return None

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype)

    def close(self) -> None:
        return None


class _HostStream:
    """What needs no look at the argument is the inner object's own method."""

    def __init__(self, inner: AclStream) -> None:
        self._inner = inner
        self.handle = inner.read
        self.synchronize = inner.synchronize
        self.close = inner.close

    def wait_event(self, event: Event) -> None:
        if type(event) is not _HostEvent:
            raise _foreign("event", event)
        self._inner.wait_event(event._inner)


class _HostEvent:
    def __init__(self, inner: AclEvent) -> None:
        self._inner = inner
        self.synchronize = inner.synchronize
        self.query = inner.query
        self.close = inner.close

    def record(self, stream: Stream, handle: int | None = None) -> None:
        if type(stream) is not _HostStream:
            raise _foreign("stream", stream)
        self._inner.record(stream._inner)


def _foreign(kind: str, value: object) -> ConfigError:
    return ConfigError(
        f"{kind} of type {type(value).__name__} was not made by a HostDevice; allowed: streams and "
        f"events of one device adaptor; next: create it with device.create_{kind}()"
    )


# How many HostDevices stand on each device: the runtime counts per thread, not per caller, so only
# the last one resets it.
_users: dict[tuple[int, int], int] = {}
_users_lock = threading.Lock()


class _Bound(AbstractContextManager[None]):
    """A device made current. A class, since every launch binds and a generator costs twice that."""

    __slots__ = ("_device", "_previous")

    def __init__(self, device: HostDevice) -> None:
        self._device = device
        self._previous: Any = None

    def __enter__(self) -> None:
        previous = self._device._current()
        if previous != self._device._context:
            self._device._restore(self._device._context)
            self._previous = previous

    def __exit__(self, *_: object) -> None:
        if self._previous is not None:
            self._device._restore(self._previous)


class HostDevice:
    """CPU tensors, with streams and events of an ACL runtime.

    A tensor's own memory is handed to the runtime, so it must stay alive and unchanged until the
    stream was synchronised, and outputs may be read only then. Call `bind` in every thread before
    other calls; the layers above do so at each entry.

    Args:
        runtime: from `xmoe.kernels.acl.loader.load`; its devices must share the host's memory.
        index: device number.

    Raises:
        UnsupportedError: the devices have memory of their own, where a CPU address means nothing.
    """

    name = "host"
    torch_device = torch.device("cpu")

    def __init__(self, runtime: Runtime, index: int = 0) -> None:
        if not runtime.shares_host_memory:
            raise UnsupportedError(
                f"CPU tensors cannot be passed to {runtime.toolkit.root}: its devices have memory "
                "of their own; allowed: npu tensors there, CPU tensors on the software device "
                "(XMOE_DEVICE=soft); next: move the model to the npu device"
            )
        self.runtime = runtime
        self.index = index
        self._lock = threading.Lock()
        self._default: _HostStream | None = None
        acl, ffi = runtime.acl, runtime.ffi
        with _users_lock:
            status = acl.aclInit(ffi.NULL)
            if status not in (0, REPEAT_INITIALIZE):
                check(runtime, status, "aclInit")
            previous = self._current()
            check(runtime, acl.aclrtSetDevice(index), "aclrtSetDevice")
            self._context: Any = self._current()
            self._restore(previous)
            self._key = (id(acl), index)
            _users[self._key] = _users.get(self._key, 0) + 1

    def _current(self) -> Any:
        """The calling thread's context, None when it has none."""
        out = self.runtime.ffi.new("aclrtContext*")
        if self.runtime.acl.aclrtGetCurrentContext(out) != 0:
            recent_text(
                self.runtime
            )  # reading it drops it: this failure is an answer, not an error
            return None
        return out[0]

    def _restore(self, context: Any) -> None:
        if context is not None:
            status = self.runtime.acl.aclrtSetCurrentContext(context)
            check(self.runtime, status, "aclrtSetCurrentContext")

    def bind(self) -> AbstractContextManager[None]:
        """See Device. A thread that had no device keeps this one: there is no call to have none."""
        if self._context is None:
            raise ConfigError(
                f"device {self.index} is closed; allowed: use before close(); next: make a new "
                "HostDevice"
            )
        return _Bound(self)

    def create_stream(self) -> Stream:
        return _HostStream(AclStream(self.runtime))

    def create_event(self) -> Event:
        return _HostEvent(AclEvent(self.runtime))

    def current_stream(self) -> Stream:
        """The device's default stream, made at first use and closed with the device."""
        with self._lock:
            if self._default is None:
                with self.bind():
                    self._default = _HostStream(AclStream(self.runtime))
            return self._default

    def capturing(self) -> bool:
        """Never: operators on CPU tensors run when they are called."""
        return False

    def check(self) -> None:
        """Nothing to ask: every wait for work on CPU tensors reports its failure itself."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype)

    def close(self) -> None:
        """Give the device back. Twice is harmless. Streams, events and resources must be closed
        first.

        The runtime itself stays initialised: other users of this process may need it.
        """
        with self._lock:
            if self._context is None:
                return
            with self.bind():
                if self._default is not None:
                    self._default.close()
                self._default = None
            self._context = None
            with _users_lock:
                _users[self._key] -= 1
                if _users[self._key] == 0:
                    status = self.runtime.acl.aclrtResetDevice(self.index)
                    check(self.runtime, status, "aclrtResetDevice")

    def __enter__(self) -> HostDevice:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
