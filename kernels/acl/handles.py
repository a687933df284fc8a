# SPDX-License-Identifier: Apache-2.0
"""Owned vendor objects. Each closes once, by `close()` or `with`.

Several handles belong into one `contextlib.ExitStack`, which closes them in reverse order. A
forgotten object warns at collection and is not freed then: queued device work may still use it.
Binding a device to the calling thread is the caller's duty everywhere.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from xmoe.errors import ConfigError
from xmoe.kernels.acl.dtypes import BITS, dtype_code, format_code
from xmoe.kernels.acl.status import check, make_error

if TYPE_CHECKING:
    from xmoe.kernels.acl.loader import Runtime

DATA_ALIGNMENT_BYTES = 32
"""What aclTensor demands of its data pointer. Source: CANN aclnn documentation, aclCreateTensor."""

MAX_RANK = 8
_INT64_MAX = (1 << 63) - 1
_HOST_TO_DEVICE, _DEVICE_TO_HOST = 1, 2
_LONGEST_S = 2_000_000  # below 2**31 milliseconds


class OwnedHandle:
    """One vendor object that this process has to give back.

    Any thread may close it, and of many that do only one gives it back. Using it while another
    thread closes it is the caller's mistake.
    """

    _handle: Any = None

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime

    def _take(self) -> Any:
        """The vendor object for the one caller that gets it, None for all others.

        dict.pop is one step, so two threads never get the same object.
        """
        return self.__dict__.pop("_handle", None)

    @property
    def closed(self) -> bool:
        """Whether it was given back, or handed to another owner."""
        return self._handle is None

    @property
    def pointer(self) -> Any:
        """The cffi pointer, valid until `close`."""
        handle = self._handle
        if handle is None:
            raise ConfigError(
                f"{type(self).__name__} is closed; allowed: an open one; "
                f"keep it open until its last use"
            )
        return handle

    @property
    def handle(self) -> int:
        """The pointer as an integer, valid until `close`."""
        return int(self.runtime.ffi.cast("uintptr_t", self.pointer))

    def close(self) -> None:
        """Give the object back. Twice is harmless.

        Raises:
            AclError: the vendor refuses; the object counts as closed all the same.
        """
        handle = self._take()
        if handle is not None:
            self._release(handle)

    def _release(self, handle: Any) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_handle", None) is not None:
            warnings.warn(
                f"{type(self).__name__} was not closed; use `with` or close()",
                ResourceWarning,
                stacklevel=2,
                source=self,
            )


class DeviceMemory(OwnedHandle):
    """Memory of the current device. `handle` is its address."""

    def __init__(self, runtime: Runtime, nbytes: int, policy: int = 0) -> None:
        super().__init__(runtime)
        if not isinstance(nbytes, int) or not 0 < nbytes <= _INT64_MAX:
            raise ConfigError(
                f"device memory of {nbytes!r} bytes; allowed: 1 or more, below 2**63; skip an "
                "empty allocation"
            )
        self.nbytes = nbytes
        out = runtime.ffi.new("void**")
        check(runtime, runtime.acl.aclrtMalloc(out, nbytes, policy), "aclrtMalloc")
        self._handle = out[0]

    def write(self, data: bytes | bytearray | memoryview, offset: int = 0) -> None:
        """Copy host bytes in. Blocks."""
        source = self.runtime.ffi.from_buffer(data)
        self._check_span(len(source), offset)
        status = self.runtime.acl.aclrtMemcpy(
            self.pointer + offset if offset else self.pointer,
            self.nbytes - offset,
            source,
            len(source),
            _HOST_TO_DEVICE,
        )
        check(self.runtime, status, "aclrtMemcpy")

    def read(self, nbytes: int | None = None, offset: int = 0) -> bytes:
        """Copy bytes out. Blocks, but does not wait for queued work: synchronise first."""
        count = self.nbytes - offset if nbytes is None else nbytes
        self._check_span(count, offset)
        target = bytearray(count)
        status = self.runtime.acl.aclrtMemcpy(
            self.runtime.ffi.from_buffer(target),
            count,
            self.pointer + offset if offset else self.pointer,
            count,
            _DEVICE_TO_HOST,
        )
        check(self.runtime, status, "aclrtMemcpy")
        return bytes(target)

    def _check_span(self, count: int, offset: int) -> None:
        if offset < 0 or count < 0 or offset + count > self.nbytes:
            raise ConfigError(
                f"copy of {count} bytes at offset {offset} leaves the allocation; allowed: within "
                f"{self.nbytes} bytes; allocate more or copy less"
            )

    def _release(self, handle: Any) -> None:
        check(self.runtime, self.runtime.acl.aclrtFree(handle), "aclrtFree")


# Streams and events are used a dozen times for each work item, so these methods look at the status
# themselves. cffi takes no None for a pointer: a closed object ends in TypeError, and `pointer`
# then says which one it is.


class AclStream(OwnedHandle):
    """An in-order queue of the current device."""

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime)
        self._acl = runtime.acl
        out = runtime.ffi.new("aclrtStream*")
        check(runtime, runtime.acl.aclrtCreateStream(out), "aclrtCreateStream")
        self._handle = out[0]
        self._address = int(runtime.ffi.cast("uintptr_t", out[0]))

    def read(self) -> int:
        """`handle`, converted once: each launch asks for it."""
        if self._handle is None:
            return self.handle  # says that it is closed
        return self._address

    def synchronize(self, timeout_s: float | None = None) -> None:
        """Wait until all queued work is done. Blocks; without a timeout possibly for ever.

        Raises:
            AclError: failed device work, or the timeout (107019 or 107020).
        """
        acl = self._acl
        if timeout_s is None:
            check(self.runtime, acl.aclrtSynchronizeStream(self.pointer), "aclrtSynchronizeStream")
        else:
            status = acl.aclrtSynchronizeStreamWithTimeout(self.pointer, _milliseconds(timeout_s))
            check(self.runtime, status, "aclrtSynchronizeStreamWithTimeout")

    def wait_event(self, event: AclEvent) -> None:
        """Later work on this stream starts after the event's latest recording. Does not block."""
        try:
            status = self._acl.aclrtStreamWaitEvent(self._handle, event._handle)
        except TypeError:
            status = self._acl.aclrtStreamWaitEvent(self.pointer, event.pointer)
        if status:
            check(self.runtime, status, "aclrtStreamWaitEvent")

    def _release(self, handle: Any) -> None:
        check(self.runtime, self.runtime.acl.aclrtDestroyStream(handle), "aclrtDestroyStream")


class AclEvent(OwnedHandle):
    """A point in a stream; may be recorded again."""

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime)
        self._acl = runtime.acl
        out = runtime.ffi.new("aclrtEvent*")
        check(runtime, runtime.acl.aclrtCreateEvent(out), "aclrtCreateEvent")
        self._handle = out[0]

    def record(self, stream: AclStream) -> None:
        """Mark the end of what the stream holds now. Does not block."""
        try:
            status = self._acl.aclrtRecordEvent(self._handle, stream._handle)
        except TypeError:
            status = self._acl.aclrtRecordEvent(self.pointer, stream.pointer)
        if status:
            check(self.runtime, status, "aclrtRecordEvent")

    def query(self) -> bool:
        """True when the latest recording is reached."""
        out = self.runtime.ffi.new("int32_t*")
        status = self._acl.aclrtQueryEventStatus(self.pointer, out)
        check(self.runtime, status, "aclrtQueryEventStatus")
        return bool(out[0] == 1)

    def synchronize(self, timeout_s: float | None = None) -> None:
        """Wait for the latest recording. Blocks. Raises AclError as a stream does."""
        acl = self._acl
        if timeout_s is None:
            check(self.runtime, acl.aclrtSynchronizeEvent(self.pointer), "aclrtSynchronizeEvent")
            return
        milliseconds = _milliseconds(timeout_s)
        try:
            status = acl.aclrtSynchronizeEventWithTimeout(self._handle, milliseconds)
        except TypeError:
            status = acl.aclrtSynchronizeEventWithTimeout(self.pointer, milliseconds)
        if status:
            check(self.runtime, status, "aclrtSynchronizeEventWithTimeout")

    def _release(self, handle: Any) -> None:
        check(self.runtime, self.runtime.acl.aclrtDestroyEvent(handle), "aclrtDestroyEvent")


class TensorDesc(OwnedHandle):
    """An aclTensor over memory that somebody else owns.

    Args:
        ptr: address of the storage, aligned to 32 bytes; 0 only for a tensor without elements.
        shape: the view's sizes, at most 8 dimensions.
        strides: in elements; None means contiguous.
        dtype: name or aclDataType code.
        format: name or aclFormat code; ND unless the vendor asks for another.
        storage: sizes of the storage; None means just what the view spans.
        offset: first element of the view in the storage, in elements.

    Raises:
        ConfigError: the arguments contradict each other or the ABI.
    """

    def __init__(
        self,
        runtime: Runtime,
        ptr: int,
        shape: Sequence[int],
        strides: Sequence[int] | None = None,
        *,
        dtype: str | int,
        format: str | int = "ND",
        storage: Sequence[int] | None = None,
        offset: int = 0,
    ) -> None:
        super().__init__(runtime)
        self.ptr = ptr
        self.shape = _sizes("shape", shape)
        self.dtype = dtype_code(dtype)
        self.format = format_code(format)
        numel = _product(self.shape)
        contiguous = _contiguous_strides(self.shape)
        self.strides = contiguous if strides is None else _sizes("strides", strides)
        span = _span(self.shape, self.strides, numel)
        if storage is None:
            whole = offset == 0 and all(
                mine == dense or size == 1
                for mine, dense, size in zip(self.strides, contiguous, self.shape, strict=False)
            )
            self.storage = self.shape if whole else (offset + span,)
        else:
            self.storage = _sizes("storage", storage)
        self._check(numel, span, offset)
        new = runtime.ffi.new
        self._handle = runtime.nnop.aclCreateTensor(
            new("int64_t[]", list(self.shape)),
            len(self.shape),
            self.dtype,
            new("int64_t[]", list(self.strides)),
            offset,
            self.format,
            new("int64_t[]", list(self.storage)),
            len(self.storage),
            runtime.ffi.cast("void*", ptr),
        )
        if self._handle == runtime.ffi.NULL:
            self._handle = None
            raise make_error(runtime, 561103, "aclCreateTensor")

    def _check(self, numel: int, span: int, offset: int) -> None:
        if len(self.strides) != len(self.shape):
            raise ConfigError(
                f"tensor of shape {self.shape} has strides {self.strides}; allowed: one stride per "
                f"dimension; pass {len(self.shape)} strides or none"
            )
        if not isinstance(offset, int) or offset < 0:
            raise ConfigError(
                f"tensor offset {offset!r}; allowed: 0 or more elements; pass the storage's start"
            )
        held = _product(self.storage)
        if offset + span > held:
            raise ConfigError(
                f"view of shape {self.shape}, strides {self.strides}, offset {offset} ends at "
                f"element {offset + span}; allowed: within its storage of {held}; correct the view"
            )
        if held * BITS[self.dtype] // 8 > _INT64_MAX:
            raise ConfigError(
                f"tensor of {held} elements is too large; allowed: below 2**63 bytes; split it"
            )
        if not isinstance(self.ptr, int) or self.ptr < 0 or self.ptr >= 1 << 64:
            raise ConfigError(f"tensor address {self.ptr!r}; allowed: a 64-bit address; pass one")
        if numel == 0 and max(self.strides, default=0) > _INT64_MAX:
            # With elements, the storage is too large by then and was refused above.
            raise ConfigError(
                f"tensor of shape {self.shape} has strides {self.strides}; allowed: below 2**63; "
                "correct the shape"
            )
        if self.ptr == 0 and numel > 0:
            raise ConfigError(
                f"tensor of shape {self.shape} has a null pointer; allowed: null only without "
                f"elements; allocate it first"
            )
        if self.ptr % DATA_ALIGNMENT_BYTES:
            raise ConfigError(
                f"tensor address {self.ptr:#x} is not aligned; allowed: multiples of "
                f"{DATA_ALIGNMENT_BYTES} bytes; copy the slice to its own storage"
            )

    def release_to_owner(self) -> Any:
        """Hand the vendor object to a new owner, which destroys it. This one counts as closed."""
        pointer = self._take()
        if pointer is None:
            raise ConfigError(
                f"{type(self).__name__} is closed; allowed: an open one; "
                f"keep it open until its last use"
            )
        return pointer

    def _release(self, handle: Any) -> None:
        check(self.runtime, self.runtime.nnop.aclDestroyTensor(handle), "aclDestroyTensor")


class TensorListDesc(OwnedHandle):
    """An aclTensorList. It takes the members over: destroying a list destroys them.

    Raises:
        ConfigError: no members, one member twice, or a member that is closed.
    """

    def __init__(self, runtime: Runtime, members: Sequence[TensorDesc]) -> None:
        super().__init__(runtime)
        if not members:
            raise ConfigError(
                "tensor list of 0 members; allowed: 1 or more; pass None for an absent list"
            )
        if not all(isinstance(m, TensorDesc) for m in members):
            kinds = sorted({type(m).__name__ for m in members})
            raise ConfigError(
                f"tensor list of {', '.join(kinds)}; allowed: TensorDesc members; describe each "
                "tensor first"
            )
        if len({id(m) for m in members}) != len(members):
            raise ConfigError(
                f"tensor list of {len(members)} members holds one twice; allowed: each once, since "
                f"the list destroys its members; make a descriptor per entry"
            )
        shapes = tuple(m.shape for m in members)
        # Taken over first: from here on nobody else can give a member back.
        taken = [(m, m._take()) for m in members]
        pointers = [pointer for _, pointer in taken]
        if None not in pointers:
            array = runtime.ffi.new("const aclTensor*[]", pointers)
            self._handle = runtime.nnop.aclCreateTensorList(array, len(pointers))
            if self._handle != runtime.ffi.NULL:
                self.shapes = shapes
                return
            self._handle = None
        for member, pointer in taken:
            if pointer is not None:
                member._handle = pointer
        if None in pointers:
            raise ConfigError(
                "TensorDesc is closed; allowed: open members; keep them open until the list is made"
            )
        raise make_error(runtime, 561103, "aclCreateTensorList")

    def __len__(self) -> int:
        return len(self.shapes)

    def _release(self, handle: Any) -> None:
        status = self.runtime.nnop.aclDestroyTensorList(handle)
        check(self.runtime, status, "aclDestroyTensorList")


@functools.lru_cache(maxsize=64)  # most waits have one of few limits
def _milliseconds(timeout_s: float) -> int:
    """A timeout as the runtime takes it (int32). At least 1: 0 or -1 may mean no limit."""
    if 0 < timeout_s < _LONGEST_S:
        return int(timeout_s * 1000) or 1
    if timeout_s >= _LONGEST_S:
        return _LONGEST_S * 1000
    raise ConfigError(f"timeout of {timeout_s!r} s; allowed: above 0; pass None for no limit")


def _sizes(what: str, values: Sequence[int]) -> tuple[int, ...]:
    sizes = tuple(values)
    if len(sizes) > MAX_RANK:
        raise ConfigError(
            f"tensor {what} {sizes} has {len(sizes)} dimensions; allowed: at most {MAX_RANK}; "
            f"merge dimensions"
        )
    for size in sizes:
        if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= _INT64_MAX:
            raise ConfigError(
                f"tensor {what} {sizes} has the entry {size!r}; allowed: whole numbers from 0 to "
                f"2**63 - 1; correct the tensor"
            )
    return sizes


def _product(sizes: Sequence[int]) -> int:
    count = math.prod(sizes)
    if count > _INT64_MAX:
        raise ConfigError(
            f"tensor of sizes {tuple(sizes)} has {count} elements; allowed: below 2**63; split it"
        )
    return count


def _contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _span(shape: Sequence[int], strides: Sequence[int], numel: int) -> int:
    """Elements from the view's first to behind its last."""
    if numel == 0:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=False))
