# SPDX-License-Identifier: Apache-2.0
"""One HCCL communicator with its kernel context (KFC), as an owned object. No collectives of torch
here.

Order of the KFC calls: ops-transformer 9.1.0, torch_extension comm_context.cpp (A2/A3, one
supernode).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import ProcessGroup

from xmoe.comm.window import Span
from xmoe.errors import CommError
from xmoe.kernels.acl.status import check

if TYPE_CHECKING:
    from xmoe.kernels.acl.loader import Runtime

_ENGINE_AIV = 4
_OP_TYPE_ALL_TO_ALL = 8
_ALGORITHM = b"AlltoAll=level0:fullmesh;level1:pairwise"
_CONFIG_MAGIC, _CONFIG_VERSION, _NOT_SET = 0xF0F0F0F0, 10, 0xFFFFFFFF
_NAME_BYTES = 128


def make_root_info(runtime: Runtime) -> bytes:
    """What rank 0 hands to all ranks before they join. Local; device bound."""
    info = runtime.ffi.new("HcclRootInfo*")
    check(runtime, runtime.hccl.HcclGetRootInfo(info), "HcclGetRootInfo")
    return bytes(runtime.ffi.buffer(info))


def hccl_name(group: ProcessGroup, rank: int) -> str | None:
    """Name of the group's own HCCL communicator, None when it has none (gloo alone).

    COLLECTIVE: torch_npu makes the communicator at the first call.
    """
    types = getattr(group, "_device_types", None) or ()
    if not any(device.type == "npu" for device in types):
        return None
    backend: Any = group._get_backend(torch.device("npu"))
    return str(backend.get_hccl_comm_name(rank)) if hasattr(backend, "get_hccl_comm_name") else None


class HcclCommunicator:
    """A communicator of its own, since no other collective may use its window. Device bound
    throughout.

    Args:
        root_info: rank 0's, the same on all ranks.
        buffer_mb: MiB of one half of the window; None leaves it to HCCL_BUFFSIZE or the default.

    COLLECTIVE: returns when all ranks have joined.
    """

    def __init__(
        self, runtime: Runtime, size: int, rank: int, root_info: bytes, buffer_mb: int | None
    ) -> None:
        self._runtime = runtime
        self._size = size
        self._rank = rank
        ffi, hccl = runtime.ffi, runtime.hccl
        info = ffi.new("HcclRootInfo*")
        ffi.buffer(info)[:] = root_info
        out = ffi.new("HcclComm*")
        if buffer_mb is None:
            status = hccl.HcclCommInitRootInfo(size, info, rank, out)
            check(runtime, status, "HcclCommInitRootInfo")
        else:
            config = _config(ffi, buffer_mb)
            status = hccl.HcclCommInitRootInfoConfig(size, info, rank, config, out)
            check(runtime, status, "HcclCommInitRootInfoConfig")
        self._comm: Any = out[0]
        self._owned = True

    @classmethod
    def named(cls, runtime: Runtime, size: int, rank: int, name: str) -> HcclCommunicator:
        """One that torch_npu's process group made and owns; it is found by name. Local.

        No collective of that group may run while a launch uses the window; its size is the group's.
        """
        self = cls.__new__(cls)
        self._runtime, self._size, self._rank, self._owned = runtime, size, rank, False
        out = runtime.ffi.new("HcclComm*")
        text = runtime.ffi.new("char[]", name.encode())
        status = runtime.hccl.HcclCommGetHandleWithName(text, out)
        check(runtime, status, "HcclCommGetHandleWithName")
        self._comm = out[0]
        return self

    def verify(self) -> None:
        """Rank and size must be what was asked for. Local."""
        ffi, hccl = self._runtime.ffi, self._runtime.hccl
        number = ffi.new("uint32_t*")
        found = {}
        for call in ("HcclGetRankSize", "HcclGetRankId"):
            check(self._runtime, getattr(hccl, call)(self._comm, number), call)
            found[call] = int(number[0])
        if found != {"HcclGetRankSize": self._size, "HcclGetRankId": self._rank}:
            raise CommError(
                f"communicator reports rank {found['HcclGetRankId']} of "
                f"{found['HcclGetRankSize']}; allowed: rank {self._rank} of {self._size}; next: "
                "check that all ranks joined with one root info"
            )

    def name(self) -> str:
        """The communicator's name. Local."""
        buffer = self._runtime.ffi.new(f"char[{_NAME_BYTES}]")
        status = self._runtime.hccl.HcclGetCommName(self._comm, buffer)
        check(self._runtime, status, "HcclGetCommName")
        return str(self._runtime.ffi.string(buffer, _NAME_BYTES).decode())

    def create_context(self) -> int:
        """Address of the operator's resource context on the device; lives as long as the
        communicator.
        """
        runtime, ffi, hccl = self._runtime, self._runtime.ffi, self._runtime.hccl
        args, context = ffi.new("void**"), ffi.new("void**")
        check(runtime, hccl.HcclKfcAllocOpArgs(args), "HcclKfcAllocOpArgs")
        try:
            status = hccl.HcclKfcOpArgsSetCommEngine(args[0], _ENGINE_AIV)
            check(runtime, status, "HcclKfcOpArgsSetCommEngine")
            algorithm = ffi.new("char[]", _ALGORITHM)
            status = hccl.HcclKfcOpArgsSetAlgConfig(args[0], algorithm)
            check(runtime, status, "HcclKfcOpArgsSetAlgConfig")
            status = hccl.HcclCreateOpResCtx(self._comm, _OP_TYPE_ALL_TO_ALL, args[0], context)
            check(runtime, status, "HcclCreateOpResCtx")
        except BaseException:
            hccl.HcclKfcFreeOpArgs(args[0])
            raise
        check(runtime, hccl.HcclKfcFreeOpArgs(args[0]), "HcclKfcFreeOpArgs")
        address = int(ffi.cast("uintptr_t", context[0]))
        if address == 0:
            raise CommError(
                "HcclCreateOpResCtx gave a null context; allowed: an address; next: run xmoe "
                "doctor and check that libhccl and the driver belong together"
            )
        return address

    def spans(self) -> list[Span]:
        """Every rank's buffer as mapped here, the own one too. Local once all ranks have joined."""
        ffi, hccl = self._runtime.ffi, self._runtime.hccl
        found = []
        for rank in range(self._size):
            address, size = ffi.new("void**"), ffi.new("uint64_t*")
            if rank == self._rank:
                call, status = (
                    "HcclGetHcclBuffer",
                    hccl.HcclGetHcclBuffer(self._comm, address, size),
                )
            else:
                call = "HcclGetRemoteIpcHcclBuf"
                status = hccl.HcclGetRemoteIpcHcclBuf(self._comm, rank, address, size)
            check(self._runtime, status, call)
            found.append(Span(rank, int(ffi.cast("uintptr_t", address[0])), int(size[0])))
        return found

    def close(self) -> None:
        """Destroy it. On a vendor's CANN this may wait for the other ranks. Twice is harmless."""
        comm, self._comm = self._comm, None
        if comm is not None and self._owned:
            check(self._runtime, self._runtime.hccl.HcclCommDestroy(comm), "HcclCommDestroy")


def _config(ffi: Any, buffer_mb: int) -> Any:
    config = ffi.new("HcclCommConfig*")
    config.configSize = ffi.sizeof("HcclCommConfig")
    config.magicWord, config.version = _CONFIG_MAGIC, _CONFIG_VERSION
    config.hcclBufferSize = buffer_mb
    for name in ("hcclDeterministic", "hcclRdmaTrafficClass", "hcclRdmaServiceLevel", "hcclQos"):
        setattr(config, name, _NOT_SET)
    config.hcclExecTimeOut = -1
    config.hcclSymWinMaxMemSizePerRank = 16
    return config
