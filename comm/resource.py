# SPDX-License-Identifier: Apache-2.0
"""The fused operator's communication resource: window, context and launch fence of one process
group.

One resource exists per (process group, device, role, capacity); layers and models that ask for the
same one share it. It belongs to the group: ask for it through `MegaMoeCommResource.acquire`, close
what you got, and the last one to close tears it down, in this order: refuse new launches, drain,
drop the context, destroy the communicator.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import TypeVar

from torch.distributed import ProcessGroup

from xmoe.comm.agree import group_size
from xmoe.comm.fence import LaunchFence
from xmoe.comm.resource_core import ResourceCore, RuntimeDevice
from xmoe.comm.resource_core import ResourceSpec as ResourceSpec
from xmoe.comm.window import MAX_RANKS
from xmoe.errors import CommError, ConfigError, XmoeError
from xmoe.kernels.device import Stream
from xmoe.kernels.ops.workspace import WorkspaceCache
from xmoe.types import CommHandle

T = TypeVar("T")
# At interpreter exit nobody waits for long.
_EXIT_DRAIN_S = 5.0


@dataclass
class _Slot:
    """One group's resources. The lock is held while one is built: collectives need an order."""

    lock: threading.RLock = field(default_factory=threading.RLock)
    cores: dict[tuple[str, int, str, int], ResourceCore] = field(default_factory=dict)


_slots: weakref.WeakKeyDictionary[ProcessGroup, _Slot] = weakref.WeakKeyDictionary()
_slots_lock = threading.Lock()
# Resources that still own a communicator; closed at exit when their owner did not.
_live: set[ResourceCore] = set()


class MegaMoeCommResource:
    """A share in a resource. `close` it once done; twice is harmless."""

    def __init__(self, core: ResourceCore) -> None:
        self._core: ResourceCore | None = core

    @classmethod
    def acquire(
        cls, group: ProcessGroup | None, device: RuntimeDevice, spec: ResourceSpec
    ) -> MegaMoeCommResource:
        """Get a share in the group's resource for `spec`, building it if there is none. COLLECTIVE.

        Any thread may call it; the device need not be bound. A failure on one rank is the same
        error on all ranks, leaves nothing behind, and is not remembered.

        Raises:
            ConfigError: no group, or the same key with another spec.
            WindowTooSmall: the communicator's window cannot hold `capacity` rows.
            CommError, AclError, LibraryError, PeerLost, RankDisagreement.
        """
        if group is None or not 2 <= group_size(group) <= MAX_RANKS:
            raise ConfigError(
                f"ep_size={group_size(group)}: the fused operator exchanges tokens between ranks; "
                "allowed: "
                f'2..{MAX_RANKS}; next: use mode="off" for a single rank'
            )
        with _slots_lock:
            slot = _slots.setdefault(group, _Slot())
        key = (device.name, device.index, spec.role, spec.capacity)
        with slot.lock:
            core = slot.cores.get(key)
            if core is None:
                core = slot.cores[key] = ResourceCore(group, device, spec, borrow=not slot.cores)
                _live.add(core)
            elif core.spec != spec:
                raise ConfigError(
                    f"resource role={spec.role!r}, capacity={spec.capacity} exists with "
                    f"{core.spec}; asked for {spec}; allowed: one spec per (group, device, role, "
                    "capacity); next: use another role"
                )
            core.shares += 1
            return cls(core)

    @property
    def handle(self) -> CommHandle:
        """What an operator needs; valid until the last share is closed."""
        return self._open().handle

    @property
    def fence(self) -> LaunchFence:
        """The resource's launch fence."""
        return self._open().fence

    @property
    def workspace(self) -> WorkspaceCache:
        """Scratch memory for this resource's launches."""
        return self._open().workspace

    @property
    def channel(self) -> str:
        """Name of the resource's channel in the executor."""
        return self._open().channel

    @property
    def shares(self) -> int:
        """How many shares are open, this one included."""
        return self._open().shares

    @property
    def failed(self) -> BaseException | None:
        """What made the window unusable, or None."""
        return self._open().failed

    def require_rows(self, num_tokens: int) -> None:
        """Check a launch of `num_tokens` rows per rank. Local; rank-equal input gives a rank-equal
        answer.

        Raises:
            WindowTooSmall: more rows than the resource was built for.
        """
        self._open().require_rows(num_tokens)

    def launch(self, stream: Stream, fn: Callable[[Stream], T]) -> T:
        """Run `fn(stream)`, which queues one launch, ordered after all earlier ones. COLLECTIVE.

        Every rank launches in the same order. Any thread may call it.

        Raises:
            What `fn` raises; CommError when the resource is closed or failed; FenceTimeout.
        """
        return self._open().launch(stream, fn)

    def wait(self, stream: Stream, timeout_s: float, what: str) -> None:
        """Block the host until the latest launch on `stream` is done. Local.

        Raises:
            FenceTimeout: not done in time, saying `what` was not. AclError: it failed on the
                device.
        """
        self._open().wait(stream, timeout_s, what)

    def require_usable(self) -> None:
        """Raise CommError when an earlier launch made the window unusable. Local; asks nobody."""
        self._open().require_usable()

    def translate(self, error: Exception) -> Exception:
        """For an error met while waiting for a launch: remember that the window is unusable when
        the device said so, and give the error to raise (PeerLost when a peer is the cause).
        Local."""
        return self._open().translate(error)

    def drain(self, timeout_s: float | None = None) -> None:
        """Wait until all launches so far are done. Local. Raises FenceTimeout, AclError or
        PeerLost.
        """
        self._open().drain(timeout_s)

    def close(self) -> None:
        """Give the share back; the last one tears the resource down. Twice is harmless.

        COLLECTIVE when it is the last share: a vendor's CANN may wait for the peers when a
        communicator is destroyed. After a failure, or with a peer gone, the communicator is left to
        the end of the process instead.
        """
        core, self._core = self._core, None
        if core is not None:
            _give_back(core)

    def _open(self) -> ResourceCore:
        if self._core is None:
            raise CommError(
                "communication resource is closed; allowed: use before close(); next: acquire it "
                "again"
            )
        return self._core

    def __enter__(self) -> MegaMoeCommResource:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _give_back(core: ResourceCore) -> None:
    group = core.group
    slot = None if group is None else _slots.get(group)
    with slot.lock if slot is not None else contextlib.nullcontext():
        core.shares -= 1
        if core.shares > 0:
            return
        if slot is not None:
            slot.cores = {key: other for key, other in slot.cores.items() if other is not core}
    _live.discard(core)
    core.tear_down(core.spec.fence_timeout_s)


@atexit.register
def _close_leftovers() -> None:
    """What nobody closed. Runs before modules are taken apart; never raises nor waits for long."""
    while _live:
        core = _live.pop()
        if not core.owned:
            continue
        warnings.warn(
            f"communication resource {core.channel} was not closed; use `with` or close()",
            ResourceWarning,
            stacklevel=1,
        )
        with contextlib.suppress(XmoeError):
            core.tear_down(_EXIT_DRAIN_S)
