# SPDX-License-Identifier: Apache-2.0
"""One frozen descriptor per vendor library, and opening one by absolute path."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xmoe.kernels.acl import elf
from xmoe.kernels.acl.problems import Code, Problem
from xmoe.kernels.acl.toolkit import describe


@dataclass(frozen=True)
class LibraryDescriptor:
    """A library of the toolkit.

    `group` is the wrapper prefix of its functions. Without a `needed` library nothing works; the
    others are missing only for the feature that uses them. `required` symbols are checked at load.
    """

    name: str
    group: str
    needed: bool
    required: tuple[str, ...]


ASCENDCL = LibraryDescriptor(
    "libascendcl.so",
    "acl",
    True,
    (
        "aclInit",
        "aclGetRecentErrMsg",
        "aclrtSetDevice",
        "aclrtMalloc",
        "aclrtFree",
        "aclrtMemcpy",
        "aclrtCreateStream",
        "aclrtDestroyStream",
        "aclrtSynchronizeStream",
    ),
)
NNOPBASE = LibraryDescriptor(
    "libnnopbase.so",
    "nnop",
    True,
    ("aclCreateTensor", "aclCreateTensorList", "aclDestroyTensor", "aclDestroyTensorList"),
)
HCCL = LibraryDescriptor(
    "libhccl.so",
    "hccl",
    False,
    (
        "HcclGetRootInfo",
        "HcclCommInitRootInfoConfig",
        "HcclCommDestroy",
        "HcclGetRankSize",
        "HcclGetRankId",
        "HcclKfcAllocOpArgs",
        "HcclKfcFreeOpArgs",
        "HcclKfcOpArgsSetAlgConfig",
        "HcclKfcOpArgsSetCommEngine",
        "HcclCreateOpResCtx",
        "HcclGetHcclBuffer",
    ),
)
HCCL_FWK = LibraryDescriptor(
    "libhccl_fwk.so",
    "hccl_fwk",
    False,
    ("HcclGetRemoteIpcHcclBuf", "HcclCommGetHandleWithName"),
)
LIBRARIES = (ASCENDCL, NNOPBASE, HCCL, HCCL_FWK)
"""In load order: a later one depends on earlier ones."""

COMM_SYMBOLS = (*HCCL.required, *HCCL_FWK.required)
"""What the communication context of MegaMoe needs. Source: ops-transformer 9.1.0
torch_extension comm_context.cpp (the "kfc" backend)."""


@dataclass(frozen=True)
class LoadedLibrary:
    """A library this process opened.

    `already_loaded` says that something else had opened the same file before;
    `other_copies` are files with the same name that are loaded as well.
    """

    name: str
    path: Path
    found_via: str
    already_loaded: bool
    other_copies: tuple[Path, ...] = ()


_ERROR_BYTES = 2048
_opened_here: set[str] = set()
_lock = threading.Lock()


def _renew_lock_in_child() -> None:
    # Another thread may have held it at fork; in the child nobody would release it.
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock_in_child)


def loaded_objects(native: Any) -> tuple[Path, ...]:
    """Files of all objects in this process, as the dynamic linker knows them."""
    size = 1 << 16
    while True:
        buffer = native.ffi.new("char[]", size)
        needed = native.lib.xm_loaded_objects(buffer, size)
        if needed <= size:
            names = native.ffi.string(buffer).decode(errors="surrogateescape")
            return tuple(Path(n) for n in names.splitlines() if n.startswith("/"))
        size = needed * 2


def other_copies(native: Any, path: Path) -> tuple[Path, ...]:
    """Loaded objects that have this file's name but are another file."""
    real = os.path.realpath(path)
    return tuple(
        sorted(
            {
                p
                for p in loaded_objects(native)
                if p.name == path.name and os.path.realpath(p) != real
            }
        )
    )


def open_library(native: Any, path: Path, found_via: str) -> tuple[Any, LoadedLibrary] | Problem:
    """Open one file by absolute path (RTLD_NOW, RTLD_LOCAL): (handle, record), or the problem."""
    if not path.exists():
        gone = "a dangling link" if path.is_symlink() else "missing"
        return Problem(
            Code.FILE_MISSING, f"{path} is {gone} (named by {found_via}); {describe(path.parent)}"
        )
    info = elf.inspect(path)
    if info.problem:
        code = Code.UNLOADABLE if info.machine else Code.NOT_ELF
        return Problem(code, f"{path} cannot be loaded: {info.problem}")
    error = native.ffi.new("char[]", _ERROR_BYTES)
    encoded, real = os.fsencode(path), os.path.realpath(path)
    with _lock:  # else a second thread would take our own load for somebody else's
        already = native.lib.xm_dlopen(encoded, 1, error, _ERROR_BYTES) != native.ffi.NULL
        handle = native.lib.xm_dlopen(encoded, 0, error, _ERROR_BYTES)
        if handle == native.ffi.NULL:
            text = native.ffi.string(error).decode(errors="replace")
            return Problem(_load_failure(path, text), f"{path} cannot be loaded: {text}")
        already = already and real not in _opened_here
        _opened_here.add(real)
    return handle, LoadedLibrary(path.name, path, found_via, already, other_copies(native, path))


def _load_failure(path: Path, text: str) -> Code:
    """Which kind of failure the dynamic linker's text describes (glibc wording)."""
    if "undefined symbol" in text or "version `" in text:
        return Code.UNRESOLVED_DEPENDENCY
    if "cannot open shared object file" in text and not text.startswith(str(path)):
        return Code.UNRESOLVED_DEPENDENCY
    if "invalid ELF header" in text or "file too short" in text:
        return Code.NOT_ELF
    return Code.UNLOADABLE
