# SPDX-License-Identifier: Apache-2.0
"""torch_npu's memory and streams in the place of ACL's own, for `xmoe conformance --tensors npu`.

The cases stay as they are. Memory is a tensor of torch_npu's caching allocator; a stream is one of
torch_npu's, whose raw handle is read at each use, because reading it empties the host queue.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from xmoe.kernels.acl.handles import AclStream, DeviceMemory, OwnedHandle

if TYPE_CHECKING:
    from xmoe.kernels.device import Stream
    from xmoe.kernels.npu_device import NpuDevice


class NpuMemory(DeviceMemory):
    """The bytes of an npu tensor."""

    def __init__(self, device: NpuDevice, nbytes: int) -> None:
        OwnedHandle.__init__(self, device.runtime)
        self.nbytes = nbytes
        self._memory = device.allocate(nbytes)
        self._handle = self._memory.pointer

    def _release(self, handle: Any) -> None:
        self._memory.close()


class NpuStream(AclStream):
    """A stream of torch_npu's pool."""

    def __init__(self, device: NpuDevice) -> None:
        OwnedHandle.__init__(self, device.runtime)
        self._acl = device.runtime.acl
        self._stream: Stream = device.create_stream()
        self._handle = self._stream

    @property
    def pointer(self) -> Any:
        """The raw stream, after torch_npu's host queue was emptied."""
        return self.runtime.ffi.cast("aclrtStream", self._stream.handle())

    def read(self) -> int:
        """`pointer` as a number."""
        return self._stream.handle()

    def _release(self, handle: Any) -> None:
        self._stream.close()
