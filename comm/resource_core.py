# SPDX-License-Identifier: Apache-2.0
"""What a communication resource consists of, how all ranks build it, and how it is taken down.

`xmoe.comm.resource` shares it between its users; nobody else imports this module.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from xmoe.comm.agree import (
    agree_success,
    as_peer_lost,
    broadcast_bytes,
    group_rank,
    group_size,
    introduce,
    lost_ranks,
    require_equal,
)
from xmoe.comm.fence import LaunchFence
from xmoe.comm.hccl import HcclCommunicator, hccl_name, make_root_info
from xmoe.comm.window import check_capacity, check_spans, context_bytes
from xmoe.errors import (
    AclError,
    CommError,
    ConfigError,
    FenceTimeout,
    WindowTooSmall,
    XmoeError,
)
from xmoe.kernels.acl.op import WORKSPACE_CALL
from xmoe.kernels.acl.status import DEVICE_ERRORS
from xmoe.kernels.device import Device, Stream, is_timeout
from xmoe.kernels.ops.workspace import WorkspaceCache
from xmoe.layout import WindowSpec, window_spec
from xmoe.types import CommHandle, FenceMode, MoeShape

if TYPE_CHECKING:
    from xmoe.kernels.acl.loader import Runtime

T = TypeVar("T")
# What a step of the build can fail with: carried to all ranks, and raised on each of them.
_STEP_ERRORS = (XmoeError, RuntimeError, ValueError, TypeError, OSError, MemoryError)


class RuntimeDevice(Device, Protocol):
    """A device that stands on an ACL runtime."""

    @property
    def runtime(self) -> Runtime: ...


@dataclass(frozen=True)
class ResourceSpec:
    """What a resource is built for; the same on all ranks.

    capacity: rows per rank and launch, at most. role: models that run concurrently (target and
    draft) need resources of their own. ccl_buffer_mb: MiB of one window half, None for
    HCCL_BUFFSIZE or the default. flag_min_bytes: see `xmoe.layout.WindowSpec`.
    """

    shape: MoeShape
    capacity: int
    role: str = "main"
    fence: FenceMode = FenceMode.STREAM
    soc_family: str = "A3"
    ccl_buffer_mb: int | None = None
    flag_min_bytes: int = 0
    fence_timeout_s: float = 60.0
    step_timeout_s: float = 120.0

    def __post_init__(self) -> None:
        if self.capacity < 1:
            raise ConfigError(
                f"capacity={self.capacity}; allowed: 1 or more rows per rank; next: set "
                "max_tokens_per_rank"
            )


class ResourceCore:
    """The resource itself, shared by all who acquired it."""

    def __init__(
        self, group: ProcessGroup, device: RuntimeDevice, spec: ResourceSpec, *, borrow: bool = True
    ) -> None:
        """`borrow`: an HCCL group's own communicator may serve, since no other resource uses it."""
        self.spec = spec
        # A window and its fence belong together: two resources never share a communicator. One
        # with a buffer size of its own needs a communicator made with it.
        self._borrow = borrow and spec.ccl_buffer_mb is None
        self.shares = 0
        self.failed: BaseException | None = None
        self.channel = f"mega_moe:{spec.role}:{spec.capacity}"
        self._group = weakref.ref(group)
        self._device = device
        self._pid = os.getpid()
        self._closing = False
        self._lock = threading.Lock()
        self._size, self._rank = group_size(group), group_rank(group)
        introduce(group, spec.step_timeout_s)
        with contextlib.ExitStack() as undo:
            self._build(group, undo)
            undo.pop_all()

    def _join(self, made: _Made, group: ProcessGroup, root_info: bytes) -> None:
        size, rank = self._size, self._rank
        name = hccl_name(group, rank) if self._borrow else None
        if name is None:
            made.comm = HcclCommunicator(
                made.runtime, size, rank, root_info, self.spec.ccl_buffer_mb
            )
        else:
            made.comm = HcclCommunicator.named(made.runtime, size, rank, name)
        made.comm.verify()
        made.name = made.comm.name()

    def _build(self, group: ProcessGroup, undo: contextlib.ExitStack) -> None:
        """Each step ends with all ranks agreeing that it went well; if not, all is undone."""
        spec, device, made = self.spec, self._device, _Made()

        def agreed(what: str, step: Callable[[], None]) -> None:
            error: Exception | None = None
            try:
                with device.bind():
                    step()
            except _STEP_ERRORS as caught:
                error = caught
            agree_success(group, f"communication resource, {what}", error, spec.step_timeout_s)

        require_equal(group, "resource spec", {"spec": spec}, spec.step_timeout_s)
        agreed("libraries", lambda: self._look(made))
        root_info = broadcast_bytes(group, made.root_info, "root info", spec.step_timeout_s)
        undo.callback(self._undo, made)
        agreed("communicator", lambda: self._join(made, group, root_info))
        agreed("context", lambda: made.build(self._window_spec(spec.capacity), self._rank, spec))
        sizes = {"ccl_buffer_bytes": made.ccl_buffer_bytes}
        require_equal(group, "communication resource", sizes, spec.step_timeout_s)
        agreed("context tensor", lambda: self._finish(made))

    def _look(self, made: _Made) -> None:
        """What can fail without anybody else: symbols, and rank 0's invitation."""
        made.runtime = self._device.runtime
        missing = made.runtime.missing_comm_symbols()
        if missing:
            raise CommError(
                f"communication symbols are missing: {', '.join(missing)}; allowed: libhccl.so and "
                "libhccl_fwk.so of CANN 9.1; next: run xmoe doctor"
            )
        if self._rank == 0:
            made.root_info = make_root_info(made.runtime)

    def _finish(self, made: _Made) -> None:
        packed = torch.frombuffer(bytearray(made.context), dtype=torch.int32)
        context: Tensor = self._device.empty((packed.numel(),), torch.int32)
        context.copy_(packed)
        assert made.comm is not None and made.runtime is not None
        self._comm: HcclCommunicator | None = made.comm
        self.handle = CommHandle(made.name, self._rank, self._size, made.ccl_buffer_bytes, context)
        self.fence = LaunchFence(
            self.spec.fence, self._device, self.spec.fence_timeout_s, self._fail
        )
        # An adaptor with an allocator of its own (torch_npu's) gives the scratch memory too.
        allocate = getattr(self._device, "allocate", None)
        self.workspace = WorkspaceCache(made.runtime, self.fence.wait_for_stream, allocate)
        if context.device.type != "cpu":  # the copy is queued; a launch may use another stream
            self._device.current_stream().synchronize(self.spec.step_timeout_s)

    def _undo(self, made: _Made) -> None:
        with self._device.bind():
            made.close()

    def _window_spec(self, num_tokens: int) -> WindowSpec:
        spec = self.spec
        return window_spec(spec.shape, self._size, num_tokens, spec.flag_min_bytes)

    @property
    def group(self) -> ProcessGroup | None:
        """The group it belongs to, None once that is gone."""
        return self._group()

    @property
    def owned(self) -> bool:
        """False in a forked child: it holds a copy of what belongs to its parent."""
        return self._pid == os.getpid()

    def require_rows(self, num_tokens: int) -> None:
        if num_tokens > self.spec.capacity:
            check_capacity(
                self.spec.soc_family, self._window_spec(num_tokens), self.handle.ccl_buffer_bytes
            )
            raise WindowTooSmall(
                f"{num_tokens} rows per rank; allowed: 1..{self.spec.capacity}, the capacity the "
                "resource was built for; next: raise max_tokens_per_rank"
            )

    def launch(self, stream: Stream, fn: Callable[[Stream], T]) -> T:
        self.require_usable()
        with self._device.bind(), self.fence.acquire(stream) as lease:
            # Again, now that nobody can close or fail it in between.
            self.require_usable()
            try:
                result = fn(stream)
            except AclError as error:
                # Phase one queues nothing, so the window is as it was.
                if error.call != WORKSPACE_CALL:
                    self.failed = error
                raise
            lease.record()
        return result

    def _fail(self, error: BaseException) -> None:
        if self.failed is None:
            self.failed = error

    def wait(self, stream: Stream, timeout_s: float, what: str) -> None:
        with self._device.bind():
            self.fence.wait_for_stream(stream.handle(), timeout_s, what)

    def require_usable(self) -> None:
        """Raise CommError when it failed before or is closing."""
        if self.failed is not None:
            raise CommError(
                f"communication resource failed before ({self.failed}); allowed: no launch, its "
                "window may hold half of a batch; next: close it on all ranks and build a new one"
            ) from self.failed
        if self._closing:
            raise CommError(
                "communication resource is closing; allowed: launches before close(); next: "
                "acquire it again"
            )

    def translate(self, error: Exception) -> Exception:
        device_error = isinstance(error, AclError) and error.code in DEVICE_ERRORS
        if device_error or isinstance(error, FenceTimeout):
            self._fail(error)
        return as_peer_lost(error, self._group(), f"MegaMoe on {self.channel}")

    def drain(self, timeout_s: float | None = None) -> None:
        with self._device.bind():
            try:
                self.fence.drain(timeout_s)
            except (AclError, FenceTimeout) as error:
                translated = self.translate(error)
                if translated is error:
                    raise
                raise translated from error

    def tear_down(self, drain_s: float) -> None:
        """Refuse, drain, drop the context, destroy. Errors of unwatched work are raised last."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            self.handle.validity.valid = False
        if not self.owned:
            return
        error: Exception | None = None
        had_failed = self.failed is not None
        with self._device.bind():
            try:
                self.drain(drain_s)
            except XmoeError as caught:
                error = caught
            # With a peer gone, destroying may wait for ever; the end of the process releases it.
            broken = self.failed is not None or bool(lost_ranks(self._group()))
            with contextlib.ExitStack() as steps:
                comm, self._comm = self._comm, None
                if comm is not None and not broken:
                    steps.callback(comm.close)
                steps.callback(self.fence.close)
                if error is None or not is_timeout(error):
                    steps.callback(self.workspace.close)
        if error is not None and not had_failed:
            raise error


@dataclass(eq=False)
class _Made:
    """What building has made so far, to be undone when a later step fails on any rank."""

    runtime: Any = None
    root_info: bytes | None = None
    comm: HcclCommunicator | None = None
    name: str = ""
    context: bytes = b""
    ccl_buffer_bytes: int = 0

    def build(self, window: WindowSpec, rank: int, spec: ResourceSpec) -> None:
        assert self.comm is not None
        kfc_context = self.comm.create_context()
        spans = self.comm.spans()
        check_spans(spec.soc_family, window, rank, spans)
        self.context = context_bytes(rank, kfc_context, spans)
        self.ccl_buffer_bytes = spans[rank].size_bytes

    def close(self) -> None:
        comm, self.comm = self.comm, None
        if comm is not None:
            comm.close()
