# SPDX-License-Identifier: Apache-2.0
"""Scratch memory of fused launches: one block per stream, grown when needed, a bounded number of
them.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING

from xmoe.errors import AclError, FenceTimeout
from xmoe.kernels.acl.handles import DeviceMemory, OwnedHandle
from xmoe.kernels.device import is_timeout

if TYPE_CHECKING:
    from xmoe.kernels.acl.loader import Runtime

# Rounded up, so that growing batches do not reallocate at every step.
_GRANULE_BYTES = 2 << 20
_MAX_STREAMS = 4


class Memory(OwnedHandle):
    """Device memory of `nbytes`, whoever allocated it."""

    nbytes: int


class WorkspaceBlock:
    """One stream's scratch memory: what `xmoe.kernels.acl.plan.LaunchPlan.step` asks for.

    Attributes:
        address: 0 before the first `take`. nbytes: its size. stream: handle of its stream.
    """

    __slots__ = ("_cache", "_memory", "address", "nbytes", "stream")

    def __init__(self, cache: WorkspaceCache, stream: int) -> None:
        self.address = 0
        self.nbytes = 0
        self._cache = cache
        self.stream = stream
        self._memory: Memory | DeviceMemory | None = None

    def take(self, nbytes: int) -> None:
        """Make it at least this large. Waits for the stream's last launch when it has to grow."""
        if nbytes > self.nbytes:
            self.free()
            memory = self._cache._allocate(-(-nbytes // _GRANULE_BYTES) * _GRANULE_BYTES)
            self._memory, self.address, self.nbytes = memory, memory.handle, memory.nbytes

    def free(self) -> None:
        """Give the memory back once the stream's last launch was seen to end."""
        if self._memory is not None:
            self._cache._wait(self.stream)
            self.drop()

    def drop(self) -> None:
        """Give the memory back."""
        memory, self._memory, self.address, self.nbytes = self._memory, None, 0, 0
        if memory is not None:
            memory.close()


class WorkspaceCache:
    """Blocks by stream. Launches of one stream may share a block, since they run one after the
    other; a block is freed only after its last launch was seen to end.

    Not visible to peers. Call with the device bound, one launch at a time: the launch fence's lease
    is held from `block` to the end of the launch.

    Args:
        wait: waits for the latest launch on a stream, by handle. The launch fence keeps an event of
            each stream anyway, so a launch needs no second one.
        allocate: gives memory of that many bytes; None takes the runtime's own.
    """

    def __init__(
        self,
        runtime: Runtime,
        wait: Callable[[int], None],
        allocate: Callable[[int], Memory] | None = None,
    ) -> None:
        self._wait = wait
        self._allocate: Callable[[int], Memory | DeviceMemory] = (
            (lambda nbytes: DeviceMemory(runtime, nbytes)) if allocate is None else allocate
        )
        self._lock = threading.Lock()
        self._blocks: OrderedDict[int, WorkspaceBlock] = OrderedDict()
        self._latest: WorkspaceBlock | None = None

    @property
    def nbytes(self) -> int:
        """Bytes held now."""
        return sum(block.nbytes for block in self._blocks.values())

    def block(self, stream: int) -> WorkspaceBlock:
        """The block of the stream with this handle, for its next launch.

        Waits for another stream's last launch when there are too many blocks.
        """
        latest = self._latest
        if latest is not None and latest.stream == stream:
            return latest
        with self._lock:
            block = self._blocks.get(stream)
            if block is None:
                while len(self._blocks) >= _MAX_STREAMS:
                    oldest = next(iter(self._blocks))
                    self._blocks[oldest].free()
                    del self._blocks[oldest]
                block = self._blocks[stream] = WorkspaceBlock(self, stream)
            else:
                self._blocks.move_to_end(stream)
            self._latest = block
            return block

    def close(self) -> None:
        """Free all blocks whose last launch ended, well or not. Twice is harmless.

        A block whose launch does not end in time stays allocated: the device may still write to it.
        """
        with self._lock:
            for key, block in list(self._blocks.items()):
                try:
                    self._wait(key)
                except (AclError, FenceTimeout) as error:
                    if is_timeout(error):
                        continue
                del self._blocks[key]
                self._latest = None
                block.drop()
