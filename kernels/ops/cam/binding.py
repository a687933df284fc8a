# SPDX-License-Identifier: Apache-2.0
"""The library that holds the CAM operators: its functions by address, and plans of its launches.

Argument lists of the operators are in `xmoe.kernels.acl.op_lists`. xsdCam* exist on the software
device only.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any

from xmoe.errors import AclError, SymbolMissing
from xmoe.kernels.acl import libraries
from xmoe.kernels.acl.loader import native_module
from xmoe.kernels.acl.native_plan import function_table
from xmoe.kernels.acl.op_plan import OpPlan, Parameter
from xmoe.kernels.acl.problems import Problem
from xmoe.kernels.acl.provenance import check_provenance, file_of
from xmoe.kernels.acl.status import NAMES
from xmoe.kernels.acl.toolkit import Toolkit

PLAIN: dict[str, str] = {
    "xsdCamDispatchReady": "int32_t(*)(char*" + ", int64_t" * 8 + ")",
    "xsdCamAbort": "int32_t(*)(char*, uint32_t)",
    "xsdCamAbortState": "int64_t(*)(char*)",
    "xsdCamCounters": "int32_t(*)(char*, uint32_t*)",
    "xsdCamFreeCores": "void(*)(int32_t, uint32_t*, uint32_t*)",
    "xsdCamSetCores": "int(*)(uint32_t, uint32_t)",
    "xsdCamTraceEnable": "void(*)(int)",
    "xsdCamTraceRead": "uint32_t(*)(void*, uint32_t, uint64_t*)",
}
_ERROR_BYTES = 512
_MAX_PLANS = 64


class CamLibrary:
    """The library that holds the CAM operators, with the functions found in it.

    `path` is where it came from. Functions are bound on first use; a missing one is an error then,
    so that a library with only one operator set is usable. So is one that comes from another file,
    or that another library shadows in this process (ProvenanceError).
    """

    def __init__(self, native: Any, handles: dict[str, Any], path: Path) -> None:
        self._native = native
        self._handles = handles
        self._functions: dict[str, Any] = {}
        self.path = path

    @property
    def ffi(self) -> Any:
        return self._native.ffi

    def has(self, name: str) -> bool:
        """Whether the operator library itself exports `name`; its dependencies do not count."""
        address = self._address("cam", name)
        if address == self.ffi.NULL:
            return False
        return file_of(self._native, address) == os.path.realpath(self.path)

    def _address(self, library: str, name: str) -> Any:
        error = self.ffi.new("char[]", _ERROR_BYTES)
        return self._native.lib.xm_dlsym(self._handles[library], name.encode(), error, _ERROR_BYTES)

    def _bind(self, key: str, library: str, ctype: str) -> Any:
        address = self._address(library, key)
        if address == self.ffi.NULL:
            raise SymbolMissing(
                f"{key} is not exported by {self.path}; allowed: a CAM operator library that "
                f"has it; install the operator package of the connector"
            )
        if library == "cam":
            problem = check_provenance(self._native, key, address, self.path).problem
            if problem is not None:
                raise problem.error()
        self._functions[key] = function = self.ffi.cast(ctype, address)
        return function

    def plain(self, name: str) -> Any:
        """A function of `PLAIN`."""
        return self._functions.get(name) or self._bind(name, "cam", PLAIN[name])

    def base(self, name: str, ctype: str, library: str = "nnop") -> Any:
        """A function of the runtime libraries ("acl", "nnop", "hccl", "hccl_fwk")."""
        return self._functions.get(name) or self._bind(name, library, ctype)

    def check(self, status: int, call: str) -> None:
        """Raise AclError with the library's own text unless `status` is 0."""
        if status == 0:
            return
        text = self.base("aclGetRecentErrMsg", "char*(*)(void)", "acl")()
        detail = "" if text == self.ffi.NULL else self.ffi.string(text).decode(errors="replace")
        raise AclError(call, status, NAMES.get(status, "UNKNOWN"), detail)

    def plan(self, op: str, parameters: Sequence[Parameter]) -> OpPlan:
        """A compiled launch of `op`.

        Raises:
            SymbolMissing: the library has no such operator.
        """
        ffi = self.ffi
        phases = [self._bind(name, "cam", "void*") for name in (op + "GetWorkspaceSize", op)]
        functions = function_table(ffi, lambda name: self._address("nnop", name), *phases)
        return OpPlan(self._native, functions, op, parameters, self.check)


class PlanCache:
    """Plans by what they were made for, bounded. Descriptors hold no memory of tensors, and queued
    launches do not need them, so a plan may go at any time; who has got one can still use it."""

    def __init__(self) -> None:
        self._plans: dict[Hashable, OpPlan] = {}
        self._lock = threading.Lock()
        weakref.finalize(self, _close_all, self._plans).atexit = False

    def get(self, key: Hashable, make: Callable[[], OpPlan]) -> OpPlan:
        """The plan of `key`, made when there is none."""
        plan = self._plans.get(key)
        if plan is None:
            with self._lock:
                plan = self._plans.get(key)
                if plan is None:
                    if len(self._plans) >= _MAX_PLANS:
                        self._plans.pop(next(iter(self._plans))).close_after_last_use()
                    plan = self._plans[key] = make()
        return plan

    def __len__(self) -> int:
        return len(self._plans)


def _close_all(plans: dict[Hashable, OpPlan]) -> None:
    while plans:
        plans.popitem()[1].close()


_cache: dict[tuple[Toolkit, str], CamLibrary] = {}
_lock = threading.Lock()


def _renew_lock_in_child() -> None:
    # Another thread may have held it at fork; in the child nobody would release it.
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock_in_child)


def open_cam(toolkit: Toolkit, symbol: str = "aclnnA2eGetWorkspaceSize") -> CamLibrary:
    """The first library of the vendor chain that exports `symbol`. Local; cached per process and
    chain. A vendor folder that no setting names is never looked into.

    Raises:
        SymbolMissing: no library has it; the message lists those looked into.
        LibraryNotFound: a library the operators need cannot be loaded.
    """
    key = (toolkit, symbol)
    with _lock:
        found = _cache.get(key)
        if found is None:
            found = _cache[key] = _open(toolkit, symbol)
        return found


def _open(toolkit: Toolkit, symbol: str) -> CamLibrary:
    native = native_module()
    handles: dict[str, Any] = {}
    for descriptor in libraries.LIBRARIES:
        folder = next((d for d in toolkit.lib_dirs if (d / descriptor.name).exists()), None)
        path = (folder or toolkit.lib_dirs[0]) / descriptor.name
        opened = libraries.open_library(native, path, toolkit.found_via)
        if isinstance(opened, Problem):
            raise opened.error()
        handles[descriptor.group] = opened[0]
    tried = []
    for entry in toolkit.vendor_dirs:
        path = entry.library
        opened = libraries.open_library(native, path, entry.found_via)
        if isinstance(opened, Problem):
            tried.append(str(opened))
            continue
        library = CamLibrary(native, {**handles, "cam": opened[0]}, path)
        if library.has(symbol):
            return library
        tried.append(f"{path} has no {symbol}")
    raise SymbolMissing(
        f"no CAM operator library in the vendor chain; looked into: {'; '.join(tried) or 'none'}; "
        f"allowed: a vendor library that exports {symbol}; next: install the connector's operator "
        f"package and name it in ASCEND_CUSTOM_OPP_PATH, or in {toolkit.opp_dir}/vendors/config.ini"
    )
