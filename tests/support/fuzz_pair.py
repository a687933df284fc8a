# SPDX-License-Identifier: Apache-2.0
"""A communicator of two ranks in one process, so that accepted fuzz cases can run to their end."""

from __future__ import annotations

import ctypes as C
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.fuzz_cases import Case
from support.fuzz_plan_cases import PlanCase
from support.fuzz_values import (
    PLACES,
    SECOND_RANK,
    Finding,
    Memory,
    dense,
    int64s,
    right,
    scalars,
)
from support.vendor import Soft
from xmoe.kernels.acl import status


class SecondRank(Soft):
    """The libraries once more in one process: they are initialised already."""

    def check(self, call: str, code: int) -> None:
        if call != "aclInit" or code != status.REPEAT_INITIALIZE:
            super().check(call, code)


class Pair:
    """A communicator of two ranks, both in this process; rank 1 lives in a thread."""

    def __init__(self, vendor: Path, variant: str) -> None:
        self.contexts: list[bytes] = [b"", b""]
        self.comms: list[C.c_void_p] = [C.c_void_p(), C.c_void_p()]
        self._vendor, self._variant = vendor, variant
        self.stream: C.c_void_p | None = None
        self._error = ""
        self._run(self._join_both)

    def _run(self, fn: Callable[[], None]) -> None:
        """In a thread of rank 1, whose current device must not be that of the main thread."""

        def body() -> None:
            try:
                fn()
            except Exception as error:
                self._error = f"{type(error).__name__}: {error}"

        thread = threading.Thread(target=body)
        thread.start()
        thread.join(30)
        if thread.is_alive():
            raise Finding("rank 1 is stuck")
        if self._error:
            raise Finding(f"rank 1: {self._error}")

    def _join_both(self) -> None:
        hccl = C.CDLL(str(self._libs() / "libhccl.so"))
        acl = C.CDLL(str(self._libs() / "libascendcl.so"))
        root = C.create_string_buffer(4108)
        assert acl.aclrtSetDevice(1) == 0 and hccl.HcclGetRootInfo(root) == 0
        ends: list[int] = []

        def zero() -> None:
            assert acl.aclrtSetDevice(0) == 0
            ends.append(hccl.HcclCommInitRootInfo(2, root, 0, C.byref(self.comms[0])))
            self.contexts[0] = self._context(hccl, self.comms[0])

        thread = threading.Thread(target=zero)
        thread.start()
        ends.append(hccl.HcclCommInitRootInfo(2, root, 1, C.byref(self.comms[1])))
        thread.join(30)
        assert ends == [0, 0], ends
        self.contexts[1] = self._context(hccl, self.comms[1])

    @staticmethod
    def _libs() -> Path:
        from support.vendor import LIB64

        return LIB64

    @staticmethod
    def _context(hccl: C.CDLL, comm: C.c_void_p) -> bytes:
        args, made = C.c_void_p(), C.c_void_p()
        assert hccl.HcclKfcAllocOpArgs(C.byref(args)) == 0
        assert hccl.HcclKfcOpArgsSetCommEngine(args, C.c_uint8(4)) == 0
        text = C.create_string_buffer(b"AlltoAll=level0:fullmesh;level1:pairwise")
        assert hccl.HcclKfcOpArgsSetAlgConfig(args, text) == 0
        assert hccl.HcclCreateOpResCtx(comm, C.c_uint8(8), args, C.byref(made)) == 0
        assert hccl.HcclKfcFreeOpArgs(args) == 0
        return bytes(8) + (made.value or 0).to_bytes(8, "little")

    def join(self, case: Case | PlanCase, memory: Memory) -> None:
        """Launch the accepted call on rank 1."""

        def launch_one() -> None:
            soft = SecondRank(1, self._vendor, self._variant)
            shift = SECOND_RANK
            memory.fill(case, shift)
            C.memmove(memory.base + shift + PLACES["context"], self.contexts[1], 16)
            args: dict[str, Any] = {}
            shared = {"yOut": "yOut", "expertTokenNumsOut": "expertTokenNumsOut"}
            for key in ("context", "x", "topkIds", "topkWeights", *shared):
                f = right(key, case.sizes, memory.base + shift)
                args[key] = _plain(soft, f)
            for key in ("weight1", "weight2"):
                f = right(key, case.sizes, memory.base)
                members = [_plain(soft, f) for _ in range(case.sizes[4])]
                handles = (C.c_void_p * len(members))(*members)
                args[key] = soft.nnop.aclCreateTensorList(handles, C.c_uint64(len(members)))
            values = scalars(case)
            for name in ("moeExpertNum", "epWorldSize", "cclBufferSize"):
                args[name] = values[name]
            self.stream = soft.stream()
            code, size, executor = soft.prepare(args)
            if code == 0:
                workspace = soft.malloc(max(size, 64))
                soft.check("launch", soft.phase2(workspace, max(size, 64), executor, self.stream))

        self._run(launch_one)

    def settle(self) -> str:
        acl = C.CDLL(str(self._libs() / "libascendcl.so"))
        if self.stream is None:
            return "0"
        code = acl.aclrtSynchronizeStreamWithTimeout(self.stream, 20_000)
        acl.aclrtDestroyStream(self.stream)
        self.stream = None
        return str(code)

    def close(self) -> None:
        hccl = C.CDLL(str(self._libs() / "libhccl.so"))
        for comm in self.comms:
            hccl.HcclCommDestroy(comm)


def _plain(soft: Soft, f: dict[str, Any]) -> int:
    shape = f["shape"]
    made: int = soft.nnop.aclCreateTensor(
        int64s(shape), C.c_uint64(len(shape)), f["dtype"], int64s(dense(shape)), C.c_int64(0),
        f["format"], int64s(shape), C.c_uint64(len(shape)), C.c_void_p(f["ptr"]),
    )  # fmt: skip
    return made
