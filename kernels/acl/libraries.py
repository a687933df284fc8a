# SPDX-License-Identifier: Apache-2.0
"""One frozen descriptor per vendor library, and opening one by absolute path."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xmoe.kernels.acl import elf, files
from xmoe.kernels.acl.problems import Code, Problem


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
_states: dict[str, tuple[int, ...]] = {}  # of each name when it was first opened here
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
            names = os.fsdecode(native.ffi.string(buffer))
            return tuple(Path(n) for n in names.split("\n") if n.startswith("/"))
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


def is_loaded(native: Any, path: Path) -> bool:
    """Whether the process holds this very file already. Opens nothing."""
    error = native.ffi.new("char[]", _ERROR_BYTES)
    found = native.lib.xm_dlopen(os.fsencode(path), 1, error, _ERROR_BYTES)
    return bool(found != native.ffi.NULL)


def check_file(path: Path, found_via: str) -> Problem | None:
    """What is wrong with a library file by looking at it; None when it can be opened as one."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        gone = "a dangling link" if os.path.islink(path) else "missing"
        where = f"(named by {found_via}); {files.describe(path.parent)}"
        return Problem(Code.FILE_MISSING, f"{path} is {gone} {where}")
    except OSError as error:
        return Problem(Code.UNREADABLE, f"{path} (named by {found_via}): {error.strerror}")
    info = elf.inspect(path)
    if info.problem:
        code = Code.UNLOADABLE if info.machine else Code.NOT_ELF
        code = Code.UNREADABLE if info.unreadable else code
        return Problem(code, f"{path} cannot be loaded: {info.problem}")
    return None


def open_library(native: Any, path: Path, found_via: str) -> tuple[Any, LoadedLibrary] | Problem:
    """Open one file by absolute path (RTLD_NOW, RTLD_LOCAL): (handle, record), or the problem."""
    problem = check_file(path, found_via)
    if problem is not None:
        return problem
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
        _states.setdefault(str(path), _state(path))
    problem = changed(path)
    if problem is not None:
        return problem
    return handle, LoadedLibrary(path.name, path, found_via, already, other_copies(native, path))


def changed(path: Path) -> Problem | None:
    """Whether a file that was opened here is another one by now.

    The linker goes by the name and gives the old code again, while whoever looks at the file sees
    the new one.
    """
    if _states.get(str(path)) in (None, _state(path)):
        return None
    return Problem(
        Code.LOADED_ELSEWHERE,
        f"{path} was changed on disk after this process had loaded it; the old code is what would "
        f"run",
    )


def _state(path: Path) -> tuple[int, ...]:
    try:
        found = os.stat(path)
    except OSError:
        return ()
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_size


def _load_failure(path: Path, text: str) -> Code:
    """Which kind of failure the dynamic linker's text describes (glibc wording)."""
    if "undefined symbol" in text or "version `" in text:
        return Code.UNRESOLVED_DEPENDENCY
    if "cannot open shared object file" in text and not text.startswith(str(path)):
        return Code.UNRESOLVED_DEPENDENCY
    if "invalid ELF header" in text or "file too short" in text:
        return Code.NOT_ELF
    return Code.UNLOADABLE


def was_replaced(path: Path) -> bool:
    """Whether the process still runs code of a file of that name that is no longer there."""
    gone = os.fsencode(os.path.realpath(path)) + b" (deleted)"
    try:
        with open("/proc/self/maps", "rb") as file:
            return any(line.rstrip(b"\n").endswith(gone) for line in file)
    except OSError:
        return False
