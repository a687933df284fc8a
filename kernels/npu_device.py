# SPDX-License-Identifier: Apache-2.0
"""The device adaptor over torch_npu: its tensors, its current stream and its caching allocator.

torch operators wait in a host queue before they reach the device; a C launch on a bare stream
handle would overtake them. So a handle is read at each launch, through the getter that first
empties that queue, and never kept. Events are the runtime's own, recorded on a handle just read: an
event of torch_npu goes through the queue, and after a failure the queue drops it without a word, so
that waiting for it never ends.

After one failed asynchronous launch torch_npu raises once and then silently drops later operators,
whose results stay uninitialised. The first such failure therefore ends all use of the device in
this process: every later call raises ProcessLost. Whoever waits for a stream or an event hears of
it, and so does the next reading of a handle, unless torch_npu told somebody else already; `check`
finds that, and is asked once a step.

Source: torch_npu 2.13.0, csrc/core/npu/NPUStream.cpp and NPUQueue.cpp.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from xmoe.errors import AclError, ConfigError, ProcessLost, ProvenanceError
from xmoe.kernels.acl.handles import AclEvent
from xmoe.kernels.acl.libraries import other_copies
from xmoe.kernels.acl.status import DEVICE_ERRORS, check, name_of
from xmoe.kernels.capability import require_module
from xmoe.kernels.device import Device, Event, Stream
from xmoe.kernels.ops.workspace import Memory

if TYPE_CHECKING:
    from xmoe.kernels.acl.loader import Runtime

# Failures of this process' device work, the first one only. There is no way back.
_lost: list[str] = []
_lost_lock = threading.Lock()
_UNNAMED_FAILURE = 507000  # ACL_ERROR_RT_INTERNAL_ERROR
_CODE = re.compile(r"(?:error code is |error code:? ?|device error )(\d{6})")


def mark_lost(reason: str) -> None:
    """Remember the first failure. Local; cannot be undone."""
    with _lost_lock:
        if not _lost:
            _lost.append(reason)


def require_usable() -> None:
    """Raise ProcessLost when device work of this process has failed before."""
    if _lost:
        raise ProcessLost(
            f"this process is lost: {_lost[0]}; allowed: no further use of its NPU (torch_npu now "
            "drops operators silently); next: end the process and start the group again"
        )


def torch_npu() -> Any:
    """The torch_npu module. Raises LibraryNotFound with the remedy."""
    require_module(
        "torch_npu",
        "pip install 'xmoe[npu]', and set the CANN environment before Python starts (xmoe device "
        "env prints the software device's)",
    )
    import torch_npu as module

    return module


def translate(error: RuntimeError, call: str) -> AclError:
    """torch_npu's exception as an AclError; a device failure also ends the use of this process."""
    text = str(error)
    found = _CODE.search(text)
    code = int(found[1]) if found else _UNNAMED_FAILURE
    mark_lost(f"{call}: {text.strip().splitlines()[0] if text.strip() else type(error).__name__}")
    return AclError(call, code, name_of(call, code), text)


def checked(runtime: Runtime, status: int, call: str) -> None:
    """`check` for calls that report device work; a device failure marks the process."""
    try:
        check(runtime, status, call)
    except AclError as error:
        if error.code in DEVICE_ERRORS and not _is_timeout(error.code):
            mark_lost(str(error))
        raise


def _is_timeout(code: int) -> bool:
    return code in (507046, 507047)


class TensorMemory(Memory):
    """Scratch memory from torch_npu's caching allocator, in the place of aclrtMalloc's.

    It belongs to the stream that was current when it was made, like any tensor; give it back only
    after its last launch ended.
    """

    def __init__(self, runtime: Runtime, tensor: Tensor) -> None:
        super().__init__(runtime)
        self.nbytes = tensor.numel()
        self._tensor: Tensor | None = tensor
        self._handle = runtime.ffi.cast("void*", tensor.data_ptr())

    def _release(self, handle: Any) -> None:
        self._tensor = None


class _NpuStream:
    """A stream of torch_npu: a fixed one, or whichever is current at each call."""

    def __init__(self, device: NpuDevice, read: Callable[[], int], owned: Any = None) -> None:
        self._device = device
        self._read = read
        self._owned = owned

    def handle(self) -> int:
        """Empties torch_npu's host queue, then returns the raw stream. Never keep the result."""
        require_usable()
        try:
            handle = self._read()
        except RuntimeError as error:
            raise translate(error, "emptying the host queue") from error
        if not handle:
            # A failed flush gives a null stream, which a C call would take for the default one.
            mark_lost("emptying the host queue gave no stream")
            require_usable()
        return handle

    def wait_event(self, event: Event) -> None:
        inner, runtime = _event(event), self._device.runtime
        stream = runtime.ffi.cast("aclrtStream", self.handle())
        status = runtime.acl.aclrtStreamWaitEvent(stream, inner.pointer)
        checked(runtime, status, "aclrtStreamWaitEvent")

    def synchronize(self, timeout_s: float) -> None:
        runtime = self._device.runtime
        stream = runtime.ffi.cast("aclrtStream", self.handle())
        status = runtime.acl.aclrtSynchronizeStreamWithTimeout(stream, _milliseconds(timeout_s))
        checked(runtime, status, "aclrtSynchronizeStreamWithTimeout")

    def torch_stream(self) -> Any:
        """The torch_npu stream, to make it current; None when it follows the current one."""
        return self._owned

    def close(self) -> None:
        self._owned = None


class _NpuEvent:
    def __init__(self, device: NpuDevice) -> None:
        require_usable()
        self._device = device
        self._inner = AclEvent(device.runtime)

    def record(self, stream: Stream, handle: int | None = None) -> None:
        runtime = self._device.runtime
        raw = runtime.ffi.cast("aclrtStream", stream.handle() if handle is None else handle)
        checked(runtime, runtime.acl.aclrtRecordEvent(self._inner.pointer, raw), "aclrtRecordEvent")

    def synchronize(self, timeout_s: float) -> None:
        runtime = self._device.runtime
        status = runtime.acl.aclrtSynchronizeEventWithTimeout(
            self._inner.pointer, _milliseconds(timeout_s)
        )
        checked(runtime, status, "aclrtSynchronizeEventWithTimeout")

    def query(self) -> bool:
        return self._inner.query()

    def close(self) -> None:
        self._inner.close()


def _event(event: Event) -> AclEvent:
    if not isinstance(event, _NpuEvent):
        raise ConfigError(
            f"event of type {type(event).__name__} was not made by an NpuDevice; allowed: events "
            "of one device adaptor; next: create it with device.create_event()"
        )
    return event._inner


def _milliseconds(timeout_s: float) -> int:
    return max(0, min(int(timeout_s * 1000), (1 << 31) - 1))


class _Bound(AbstractContextManager[None]):
    """A device made current. A class, since every launch binds and a generator costs thrice that.

    torch_npu's own context manager looks at more kinds of arguments, and initialises the device;
    an NpuDevice has done that.
    """

    __slots__ = ("_former", "_index", "_native")

    def __init__(self, native: Any, index: int) -> None:
        self._native = native
        self._index = index
        self._former = index

    def __enter__(self) -> None:
        former = self._native._npu_getDeviceWithoutSet()
        if former != self._index:
            self._native._npu_setDevice(self._index)
            self._former = former if former >= 0 else self._index

    def __exit__(self, *_: object) -> None:
        if self._former != self._index:
            self._native._npu_maybeExchangeDevice(self._former)


class NpuDevice:
    """Tensors, streams and memory of torch_npu over the CANN it was loaded with.

    Work goes onto the caller's current stream unless another one is asked for. torch_npu hands out
    streams from a pool of 32, so the 33rd `create_stream` gives the first one again.

    Args:
        index: device number; None takes torch_npu's current one.
        runtime: the loaded ACL runtime; None loads the toolkit that is found. It must be the copy
            that torch_npu uses.

    Raises:
        LibraryNotFound: torch_npu is not installed, or there is no toolkit.
        ProvenanceError: torch_npu uses another libascendcl than the toolkit's.
        ProcessLost: device work of this process has failed before.
    """

    name = "npu"

    def __init__(self, index: int | None = None, runtime: Runtime | None = None) -> None:
        require_usable()
        self._module = torch_npu()
        self._npu: Any = self._module.npu
        if index is None:
            index = int(self._npu.current_device())
        self.index = index
        self.torch_device = torch.device("npu", index)
        with self._npu.device(index):
            torch.empty(1, device=self.torch_device)  # initialises the device for this process
            self.runtime = _load() if runtime is None else runtime
        _require_same_copy(self.runtime)
        raw = getattr(self._module._C, "_npu_getCurrentRawStream", None)
        # The public way builds a Python object first, which costs more than the flush.
        self._read_current: Callable[[], int] = (
            (lambda: int(raw(index)))
            if raw is not None
            else (lambda: int(self._npu.current_stream(index).npu_stream))
        )
        names = ("_npu_getDeviceWithoutSet", "_npu_setDevice", "_npu_maybeExchangeDevice")
        native = self._module._C
        self._native = native if all(hasattr(native, name) for name in names) else None
        # See Device.capturing. A release without this has no graphs; a method would cost as much
        # again as the call.
        self.capturing: Callable[[], bool] = getattr(
            native, "_npu_isCurrentStreamCapturing", lambda: False
        )
        self._closed = False

    def check(self) -> None:
        """See Device. Catches what torch_npu told somebody else already, and then no more.

        Raises:
            AclError: work on the current stream failed; the process is lost from now on.
            ProcessLost: that was known before.
        """
        handle = self.current_stream().handle()
        acl, ffi = self.runtime.acl, self.runtime.ffi
        if acl.has("aclrtStreamQuery"):
            status = ffi.new("int32_t*")
            checked(
                self.runtime,
                acl.aclrtStreamQuery(ffi.cast("aclrtStream", handle), status),
                "aclrtStreamQuery",
            )

    def bind(self) -> AbstractContextManager[None]:
        """See Device."""
        if self._native is None:
            bound: AbstractContextManager[None] = self._npu.device(self.index)
            return bound
        return _Bound(self._native, self.index)

    def create_stream(self) -> Stream:
        require_usable()
        with self._npu.device(self.index):
            stream = self._npu.Stream()
        return _NpuStream(self, lambda: int(stream.npu_stream), stream)

    def create_event(self) -> Event:
        return _NpuEvent(self)

    def current_stream(self) -> Stream:
        """Follows the calling thread's current stream: each use asks which one that is."""
        require_usable()
        return _NpuStream(self, self._read_current)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        require_usable()
        return torch.empty(shape, dtype=dtype, device=self.torch_device)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        require_usable()
        return torch.zeros(shape, dtype=dtype, device=self.torch_device)

    def allocate(self, nbytes: int) -> TensorMemory:
        """Scratch memory for C launches, from the caching allocator."""
        return TensorMemory(self.runtime, self.empty((nbytes,), torch.uint8))

    def close(self) -> None:
        """Twice is harmless. The device itself stays with torch_npu."""
        self._closed = True

    def __enter__(self) -> NpuDevice:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _OnCurrentStream:
    """The same device, whose new streams are the caller's current one."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def create_stream(self) -> Stream:
        return self._device.current_stream()


def on_current_stream(device: Device) -> Device:
    """For an executor whose work must follow the torch operators before it, without a wait between
    two streams."""
    return cast(Device, _OnCurrentStream(device))


def make_current(stream: Stream) -> AbstractContextManager[None]:
    """torch's operators go onto `stream` inside. Nothing changes for one that follows the current
    stream, or that is not torch_npu's."""
    owned = stream.torch_stream() if isinstance(stream, _NpuStream) else None
    if owned is None:
        return nullcontext()
    made: AbstractContextManager[None] = torch_npu().npu.stream(owned)
    return made


def _load() -> Runtime:
    from xmoe.kernels.acl.loader import load
    from xmoe.kernels.acl.toolkit import find_toolkit

    return load(find_toolkit())


def _require_same_copy(runtime: Runtime) -> None:
    """torch_npu depends on a libascendcl, so with one file of that name loaded both use it."""
    first = runtime.libraries[0]
    others = other_copies(runtime.native, first.path)
    if others:
        raise ProvenanceError(
            f"torch_npu uses {', '.join(map(str, others))}, xmoe found {first.path} via "
            f"{first.found_via}; allowed: one libascendcl for both; next: set LD_LIBRARY_PATH and "
            "ASCEND_HOME_PATH to one CANN before Python starts"
        )
