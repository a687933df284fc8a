# SPDX-License-Identifier: Apache-2.0
"""What the host reads and writes beside running kernels: pinned copies of an item's metadata, and
the operators' stop buffer. CPU and npu tensors alike; the caller has the device bound."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from xmoe.kernels.ops.cam.binding import CamLibrary
from xmoe.kernels.ops.cam.topology import require

_TO_DEVICE, _TO_HOST = 1, 2
_NOT_YET = -(1 << 63)
_STOP_WORDS = 4


def _copy(library: CamLibrary, to: Any, source: Any, nbytes: int, kind: int, stream: int) -> None:
    ctype = "int32_t(*)(void*, size_t, void*, size_t, int, void*)"
    ffi, call = library.ffi, "aclrtMemcpyAsync"
    copy = library.base(call, ctype, "acl")
    void = [ffi.cast("void*", one) for one in (to, source, stream)]
    library.check(copy(void[0], nbytes, void[1], nbytes, kind, void[2]), call)


class _Pinned:
    """Host memory that copies may use while they are queued; freed with its last user."""

    def __init__(self, library: CamLibrary, words: int) -> None:
        ffi = library.ffi
        out = ffi.new("void**")
        allocate = library.base("aclrtMallocHost", "int32_t(*)(void**, size_t)", "acl")
        library.check(allocate(out, words * 8), "aclrtMallocHost")
        self.words = ffi.cast("int64_t*", out[0])
        free = library.base("aclrtFreeHost", "int32_t(*)(void*)", "acl")
        weakref.finalize(self, free, out[0]).atexit = False


class PinnedCopy:
    """`HostCopy` of at most `words` int64 values."""

    def __init__(self, library: CamLibrary, words: int) -> None:
        self._library = library
        self._memory = _Pinned(library, words)
        self._size = words
        self._count = 0
        self._blank = library.ffi.new("int64_t[]", [_NOT_YET] * words)

    def queue(self, words: Tensor, stream: int) -> None:
        """See HostCopy. `words` must stay unchanged until the stream passed the copy."""
        count = words.numel()
        ok = words.dtype is torch.int64 and words.is_contiguous() and count <= self._size
        wanted = f"at most {self._size} int64 values, contiguous"
        require("words", (words.dtype, count), ok, wanted, "make the copy for what it carries")
        self._count = count
        self._library.ffi.memmove(self._memory.words, self._blank, count * 8)
        to, source = self._memory.words, words.data_ptr()
        _copy(self._library, to, source, count * 8, _TO_HOST, stream)

    @property
    def arrived(self) -> bool:
        """See HostCopy; a copy may be seen half-done, so all words count."""
        return _NOT_YET not in self.read()

    def read(self) -> list[int]:
        """See HostCopy."""
        return list(self._memory.words[0 : self._count])


class StopBuffer:
    """The 16 half words, read by receives as 4 int64: not 0, layer, and two that are unused.

    Once it is written, every receive that was given it, or will be, brings the shutdown item
    (Attention rank -1), whether it waits or not. Source: afd_async_dispatch_recv.h, 2026-10.
    """

    def __init__(
        self,
        library: CamLibrary,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
    ) -> None:
        self._library = library
        self._tensor = torch.zeros(16, dtype=dtype, device=device)
        self._memory = _Pinned(library, _STOP_WORDS)
        self.written = False

    @property
    def tensor(self) -> Tensor:
        """What a receive is given in place of its one-element placeholder."""
        return self._tensor

    def write(self, stream: int, layer: int = 0) -> None:
        """Set it by copies in `stream`, which no operator may hold. Does not wait. Final; twice is
        harmless. Any thread that has the device bound.

        Raises:
            AclError: a copy could not be queued.
        """
        require("layer", layer, layer >= 0, "0 or more", "pass the layer index")
        words, at = self._memory.words, self._tensor.data_ptr()
        words[0], words[1], words[2], words[3] = 1, layer, 0, 0
        # The word that ends the wait goes last: a copy of all four may be seen half-done.
        _copy(self._library, at + 8, words + 1, 8 * (_STOP_WORDS - 1), _TO_DEVICE, stream)
        _copy(self._library, at, words, 8, _TO_DEVICE, stream)
        self.written = True
