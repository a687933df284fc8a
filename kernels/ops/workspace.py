# SPDX-License-Identifier: Apache-2.0
"""Scratch memory of fused launches: one block per stream, grown when needed, a bounded number of
them.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from xmoe.errors import AclError
from xmoe.kernels.acl.handles import DeviceMemory
from xmoe.kernels.device import Device, Event, Stream, is_timeout

if TYPE_CHECKING:
    from xmoe.kernels.acl.loader import Runtime

# Rounded up, so that growing batches do not reallocate at every step.
_GRANULE_BYTES = 2 << 20
_MAX_STREAMS = 4


@dataclass
class _Block:
    memory: DeviceMemory
    last_use: Event


class WorkspaceCache:
    """Blocks by stream. Launches of one stream may share a block, since they run one after the
    other; a block is freed only after its last launch was seen to end.

    Not visible to peers. Call with the device bound.
    """

    def __init__(self, runtime: Runtime, device: Device, timeout_s: float = 60.0) -> None:
        self._runtime = runtime
        self._device = device
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._blocks: OrderedDict[int, _Block] = OrderedDict()

    @property
    def nbytes(self) -> int:
        """Bytes held now."""
        return sum(block.memory.nbytes for block in self._blocks.values())

    def take(self, stream: Stream, nbytes: int) -> DeviceMemory:
        """At least `nbytes` for the next launch on `stream`; valid until that stream's next `take`.

        Waits for the stream's last launch when the block has to grow, and for another stream's when
        there are too many blocks.
        """
        key = stream.handle()
        with self._lock:
            block = self._blocks.pop(key, None)
            if block is not None and block.memory.nbytes < nbytes:
                self._free(block)
                block = None
            if block is None:
                while len(self._blocks) >= _MAX_STREAMS:
                    self._free(self._blocks.popitem(last=False)[1])
                size = -(-nbytes // _GRANULE_BYTES) * _GRANULE_BYTES
                block = _Block(DeviceMemory(self._runtime, size), self._device.create_event())
            self._blocks[key] = block
            return block.memory

    def launched(self, stream: Stream) -> None:
        """Tell that the launch that took the block was queued."""
        with self._lock:
            block = self._blocks.get(stream.handle())
            if block is not None:
                block.last_use.record(stream)

    def _free(self, block: _Block) -> None:
        block.last_use.synchronize(self._timeout_s)
        block.memory.close()
        block.last_use.close()

    def close(self) -> None:
        """Free all blocks whose last launch ended, well or not. Twice is harmless.

        A block whose launch does not end in time stays allocated: the device may still write to it.
        """
        with self._lock:
            for key, block in list(self._blocks.items()):
                try:
                    block.last_use.synchronize(self._timeout_s)
                except AclError as error:
                    if is_timeout(error):
                        continue
                del self._blocks[key]
                block.memory.close()
                block.last_use.close()
