# SPDX-License-Identifier: Apache-2.0
"""The software device's runtime through ctypes, for tests that must not depend on our binding.

Process-global state (the thread's device, the used mark, settings) is why most tests run their body
in a forked child: `child(fn)` here, several ranks by `support.forked.fork_ranks`.
"""

from __future__ import annotations

import ctypes as C
import functools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from support.forked import fork_ranks
from support.tree import ROOT

SOFTDEV = ROOT / "kernels" / "softdev"
LIB64 = SOFTDEV / "ascend" / "lib64"

ALGORITHM = b"AlltoAll=level0:fullmesh;level1:pairwise"
H2H, H2D, D2H, D2D = range(4)
FLOAT, INT8, INT32, ND = 0, 2, 3, 2
HCCL = {"int8": 0, "int32": 2, "fp16": 3, "fp32": 4, "int64": 5, "uint8": 7, "bf16": 11}
SUM, PROD, MAX, MIN = range(4)

TASK = C.CFUNCTYPE(C.c_int, C.c_void_p)
KERNEL = C.CFUNCTYPE(C.c_int, C.c_void_p, C.c_void_p, C.c_uint64)
CALLBACK = C.CFUNCTYPE(None, C.c_void_p)


class RootInfo(C.Structure):
    _fields_ = [("internal", C.c_char * 4108)]


class CommConfig(C.Structure):
    """HcclCommConfig of CANN 9.1, written out a second time."""

    _fields_ = [
        ("size", C.c_size_t),
        ("magic", C.c_uint32),
        ("version", C.c_uint32),
        ("reserved", C.c_uint64),
        ("buffer_mib", C.c_uint32),
        ("deterministic", C.c_uint32),
        ("name", C.c_char * 128),
        ("udi", C.c_char * 128),
        ("expansion", C.c_uint32),
        ("traffic_class", C.c_uint32),
        ("service_level", C.c_uint32),
        ("world_rank", C.c_uint32),
        ("job", C.c_uint64),
        ("zero_copy", C.c_uint8),
        ("exec_timeout", C.c_int32),
        ("algo", C.c_char * 1600),
        ("retry_enable", C.c_char * 50),
        ("retry_params", C.c_char * 128),
        ("buffer_name", C.c_char * 128),
        ("qos", C.c_uint32),
        ("symmetric_gib", C.c_uint64),
    ]


class OpResCtx(C.Structure):
    """XsdOpResCtx of xsd.h."""

    _fields_ = [
        ("magic", C.c_uint64),
        ("rank", C.c_uint32),
        ("size", C.c_uint32),
        ("window_bytes", C.c_uint64),
        ("window", C.c_uint64 * 1024),
        ("busy", C.c_uint64),
        ("abort_flag", C.c_uint64),
    ]


def config(buffer_mib: int = 1, name: str = "") -> CommConfig:
    made = CommConfig()
    made.size, made.magic, made.version = C.sizeof(made), 0xF0F0F0F0, 10
    made.buffer_mib, made.deterministic = buffer_mib, 0xFFFFFFFF
    made.name = name.encode()
    return made


@functools.cache
def library(name: str, folder: Path = LIB64) -> C.CDLL:
    lib = C.CDLL(str(folder / f"lib{name}.so"))
    for function in ("aclGetRecentErrMsg", "aclrtGetSocName", "xsdIdentity", "HcclGetErrorString"):
        if name in ("ascendcl", "hccl") and hasattr(lib, function):
            getattr(lib, function).restype = C.c_char_p
    if name == "nnopbase":
        for function in (
            "aclCreateTensor aclCreateTensorList aclCreateScalar aclCreateIntArray "
            "aclCreateFloatArray aclCreateBoolArray xsdExecutorCreate"
        ).split():
            getattr(lib, function).restype = C.c_void_p
    return lib


def error() -> str:
    text = library("ascendcl").aclGetRecentErrMsg()
    return "" if text is None else text.decode()


class Failed(Exception):
    """A call returned a status other than 0."""

    def __init__(self, call: str, status: int, text: str) -> None:
        super().__init__(f"{call} -> {status}: {text}")
        self.status, self.text = status, text


class Api:
    """Calls that raise on failure: `api.aclrtSetDevice(0)`; `status()` returns the code instead."""

    def __init__(self) -> None:
        self.libs = [library(name) for name in ("ascendcl", "nnopbase", "hccl", "hccl_fwk")]
        self.kept: list[Any] = []  # ctypes callbacks must outlive their tasks

    def status(self, call: str, *args: Any) -> int:
        for lib in self.libs:
            if hasattr(lib, call):
                return int(getattr(lib, call)(*args))
        raise AttributeError(call)

    def __getattr__(self, call: str) -> Callable[..., None]:
        def checked(*args: Any) -> None:
            status = self.status(call, *args)
            if status != 0:
                raise Failed(call, status, error())

        return checked

    def stream(self) -> C.c_void_p:
        handle = C.c_void_p()
        self.aclrtCreateStream(C.byref(handle))
        return handle

    def event(self) -> C.c_void_p:
        handle = C.c_void_p()
        self.aclrtCreateEvent(C.byref(handle))
        return handle

    def malloc(self, size: int) -> C.c_void_p:
        pointer = C.c_void_p()
        self.aclrtMalloc(C.byref(pointer), C.c_size_t(size), 0)
        return pointer

    def malloc_host(self, size: int) -> C.c_void_p:
        pointer = C.c_void_p()
        self.aclrtMallocHost(C.byref(pointer), C.c_size_t(size))
        return pointer

    def task(self, stream: C.c_void_p, fn: Callable[[], int | None], name: str = "test") -> None:
        """Queues a Python function; what it returns is the device error code."""
        wrapped = TASK(lambda ctx: fn() or 0)
        self.kept.append(wrapped)
        self.xsdStreamEnqueue(stream, name.encode(), wrapped, None, None)

    def event_done(self, event: C.c_void_p) -> bool:
        status = C.c_int(-1)
        self.aclrtQueryEventStatus(event, C.byref(status))
        return status.value == 1

    def tensor(
        self,
        shape: Sequence[int],
        data: Any,
        *,
        strides: Sequence[int] | None = None,
        storage: Sequence[int] | None = None,
        dtype: int = FLOAT,
        offset: int = 0,
        form: int = ND,
    ) -> int | None:
        """aclCreateTensor; None when refused."""
        if strides is None:
            strides, step = [], 1
            for dim in reversed(shape):
                strides.insert(0, step)
                step *= dim
        storage = shape if storage is None else storage
        view = (array64(shape), C.c_uint64(len(shape)), dtype, array64(strides), C.c_int64(offset))
        behind = (form, array64(storage), C.c_uint64(len(storage)), data)
        pointer: int | None = library("nnopbase").aclCreateTensor(*view, *behind)
        return pointer

    def executor(self, fn: Callable[[int, int], int | None], workspace: int = 0) -> C.c_void_p:
        """An executor of operator "op" that runs `fn(workspace address, bytes)`."""
        kernel = KERNEL(lambda ctx, address, size: fn(address or 0, size) or 0)
        self.kept.append(kernel)
        made = library("nnopbase").xsdExecutorCreate(
            b"op", C.c_uint64(workspace), kernel, None, None
        )
        return C.c_void_p(made)

    def launch(self, executor: C.c_void_p, stream: C.c_void_p, ws: Any = None, n: int = 0) -> int:
        return self.status("xsdExecutorLaunch", b"op", ws, C.c_uint64(n), executor, stream)


def array64(values: Iterable[int]) -> Any:
    values = list(values)
    return (C.c_int64 * len(values))(*values)


def device(index: int = 0) -> Api:
    api = Api()
    api.aclrtSetDevice(index)
    return api


def child(fn: Callable[..., Any], *args: Any, env: Mapping[str, str] | None = None) -> Any:
    """Runs `fn(*args)` in a process of its own and returns its value; a crash fails the test."""
    return fork_ranks(functools.partial(_call, fn), 1, *args, env=env)[0].value


def _call(fn: Callable[..., Any], rank: int, folder: Path, *args: Any) -> Any:
    return fn(*args)


def join(rank: int, size: int, folder: Path, *, mib: int = 1, name: str = "", tag: str = "") -> Any:
    """Sets the device and joins a group whose root info travels through `folder`."""
    api = device(rank)
    root = root_info(rank, folder, tag)
    comm = C.c_void_p()
    made = config(mib, name)
    api.HcclCommInitRootInfoConfig(size, C.byref(root), rank, C.byref(made), C.byref(comm))
    return api, comm


def root_info(rank: int, folder: Path, tag: str = "") -> RootInfo:
    root, path = RootInfo(), folder / f"root{tag}"
    if rank == 0:
        assert library("hccl").HcclGetRootInfo(C.byref(root)) == 0, error()
        (folder / f"part-root{tag}").write_bytes(bytes(root))
        (folder / f"part-root{tag}").rename(path)
    else:
        while not path.exists():
            time.sleep(0.002)
        C.memmove(C.byref(root), path.read_bytes(), C.sizeof(root))
    return root


def context_of(api: Api, comm: C.c_void_p) -> OpResCtx:
    args, made = C.c_void_p(), C.c_void_p()
    api.HcclKfcAllocOpArgs(C.byref(args))
    api.HcclKfcOpArgsSetCommEngine(args, C.c_uint8(4))
    api.HcclKfcOpArgsSetAlgConfig(args, ALGORITHM)
    api.HcclCreateOpResCtx(comm, C.c_uint8(8), args, C.byref(made))
    api.HcclKfcFreeOpArgs(args)
    return OpResCtx.from_address(made.value or 0)
