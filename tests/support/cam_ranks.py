# SPDX-License-Identifier: Apache-2.0
"""One forked rank of a CAM test: device, communicators by name, streams, operators; all closed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from xmoe.kernels.acl.toolkit import find_toolkit
from xmoe.kernels.ops.cam.binding import CamLibrary, open_cam
from xmoe.kernels.ops.cam.soft import SoftCam

VECTOR_TIMEOUT = 507034
VECTOR_FAULT = 507035
REMOTE = 507057


class CamRank:
    """What a rank needs; `folder` is where rank 0 leaves the root information of a communicator."""

    def __init__(self, rank: int, size: int, folder: str) -> None:
        self.rank = rank
        self.size = size
        self.library: CamLibrary = open_cam(find_toolkit("soft"))
        self.soft = SoftCam(self.library)
        self._ffi = self.library.ffi
        self._folder = Path(folder)
        self._comms: list[Any] = []
        self._streams: list[int] = []
        self._kept: list[Any] = []
        acl = self.library.base
        acl("aclInit", "int32_t(*)(char*)", "acl")(self._ffi.NULL)
        set_device = acl("aclrtSetDevice", "int32_t(*)(int32_t)", "acl")
        self.library.check(set_device(rank), "aclrtSetDevice")

    def communicator(self, name: str, buffer_mb: int = 4) -> str:
        """Collective: make the communicator `name` over all ranks of the test."""
        ffi = self._ffi
        root = ffi.new("HcclRootInfo*")
        path = self._folder / f"root-{name}"
        if self.rank == 0:
            get = self.library.base("HcclGetRootInfo", "int32_t(*)(HcclRootInfo*)", "hccl")
            self.library.check(get(root), "HcclGetRootInfo")
            part = path.with_suffix(".part")
            part.write_bytes(bytes(ffi.buffer(root)))
            part.rename(path)
        self.wait_for(path)
        ffi.buffer(root)[:] = path.read_bytes()
        config = ffi.new("HcclCommConfig*")
        config.configSize = ffi.sizeof("HcclCommConfig")
        config.magicWord = 0xF0F0F0F0
        config.version = 10
        config.hcclBufferSize = buffer_mb
        config.hcclDeterministic = 0xFFFFFFFF
        config.hcclCommName = name.encode()
        comm = ffi.new("void**")
        init = self.library.base(
            "HcclCommInitRootInfoConfig",
            "int32_t(*)(uint32_t, HcclRootInfo*, uint32_t, HcclCommConfig*, void**)",
            "hccl",
        )
        status = init(self.size, root, self.rank, config, comm)
        self.library.check(status, "HcclCommInitRootInfoConfig")
        self._comms.append(comm[0])
        return name

    def wait_for(self, path: Path, limit_s: float = 20.0) -> None:
        """Until `path` exists: how ranks tell each other where they are."""
        end = time.monotonic() + limit_s
        while not path.exists():
            if time.monotonic() > end:
                raise TimeoutError(f"rank {self.rank}: nobody made {path.name} in {limit_s} s")
            time.sleep(0.002)

    def keep(self, value: Any) -> Any:
        """Hold tensors until the streams are gone: kernels have raw addresses, no references."""
        self._kept.append(value)
        return value

    def mark(self, name: str) -> None:
        """Let others pass `meet(name)`."""
        (self._folder / f"mark-{name}").touch()

    def meet(self, name: str) -> None:
        """Until some rank called `mark(name)`."""
        self.wait_for(self._folder / f"mark-{name}")

    def stream(self) -> int:
        """A new stream's raw handle."""
        out = self._ffi.new("void**")
        create = self.library.base("aclrtCreateStream", "int32_t(*)(void**)", "acl")
        self.library.check(create(out), "aclrtCreateStream")
        self._streams.append(int(self._ffi.cast("uintptr_t", out[0])))
        return self._streams[-1]

    def sync(self, stream: int, timeout_ms: int = 30000) -> None:
        """Raises AclError with the device's code when a kernel of the stream failed."""
        ctype = "int32_t(*)(void*, int32_t)"
        wait = self.library.base("aclrtSynchronizeStreamWithTimeout", ctype, "acl")
        status = wait(self._ffi.cast("void*", stream), timeout_ms)
        self.library.check(status, "aclrtSynchronizeStreamWithTimeout")

    def close(self) -> None:
        destroy = self.library.base("aclrtDestroyStream", "int32_t(*)(void*)", "acl")
        for stream in self._streams:
            destroy(self._ffi.cast("void*", stream))
        free = self.library.base("HcclCommDestroy", "int32_t(*)(void*)", "hccl")
        for comm in self._comms:
            free(comm)


@contextlib.contextmanager
def cam_rank(rank: int, size: int, folder: str) -> Iterator[CamRank]:
    """A CamRank that is closed at the end, whatever happens."""
    one = CamRank(rank, size, folder)
    try:
        yield one
    finally:
        one.close()
