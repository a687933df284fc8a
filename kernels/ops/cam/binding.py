# SPDX-License-Identifier: Apache-2.0
"""The C functions behind the CAM operators: one table of prototypes, bound by address.

Prototypes of aclnnA2e and aclnnE2a: afd-plugin csrc/npu/ascend_kernels/{a2e,e2a}/op_api; of the
four aclnnAfdAsync*: csrc/npu/pybind/torch_binding_cam_async.cpp (both read 2026-10). aclnnXsd* and
xsdCam* exist on the software device only.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xmoe.errors import AclError, ConfigError, SymbolMissing
from xmoe.kernels.acl import libraries
from xmoe.kernels.acl.dtypes import DTYPES
from xmoe.kernels.acl.loader import native_module
from xmoe.kernels.acl.problems import Problem
from xmoe.kernels.acl.status import NAMES
from xmoe.kernels.acl.toolkit import VENDOR_LIBRARY, Toolkit

if TYPE_CHECKING:
    from torch import Tensor

# One letter per parameter: T tensor, i int64, d double, s char*.
OPERATORS: dict[str, str] = {
    "aclnnA2e": "TTT" + "i" * 6 + "s" + "ii" + "TTTTT",
    "aclnnE2a": "TT" + "i" * 6 + "s" + "i" + "T",
    "aclnnAfdAsyncDispatchSend": "TTT" + "i" * 13 + "s" + "T",
    "aclnnAfdAsyncDispatchRecv": "TT" + "i" * 11 + "s" + "TTTT",
    "aclnnAfdAsyncCombineSend": "TTT" + "i" * 10 + "s" + "T",
    "aclnnAfdAsyncCombineRecv": "TTTT" + "i" * 9 + "s" + "T",
    "aclnnXsdUmdkAsyncDispatchSend": "TTT" + "i" * 13 + "s",
    "aclnnXsdUmdkAsyncDispatchRecv": "TT" + "i" * 11 + "s" + "T" * 7,
    "aclnnXsdUmdkAsyncCombineSend": "TTTT" + "i" * 10 + "s",
    "aclnnXsdUmdkAsyncCombineRecv": "TTTT" + "i" * 9 + "s" + "T",
    "aclnnXsdTimedKernel": "TTT" + "iiii" + "dd" + "T",
}
_CTYPES = {"T": "aclTensor*", "i": "int64_t", "d": "double", "s": "char*"}
PLAIN: dict[str, str] = {
    "xsdCamDispatchReady": "int32_t(*)(char*" + ", int64_t" * 7 + ")",
    "xsdCamAbort": "int32_t(*)(char*, uint32_t)",
    "xsdCamAbortState": "int64_t(*)(char*)",
    "xsdCamCounters": "int32_t(*)(char*, uint32_t*)",
    "xsdCamFreeCores": "void(*)(int32_t, uint32_t*, uint32_t*)",
    "xsdCamTraceEnable": "void(*)(int)",
    "xsdCamTraceRead": "uint32_t(*)(void*, uint32_t, uint64_t*)",
}
_FORMAT_ND = 2
_ERROR_BYTES = 512


class CamLibrary:
    """The library that holds the CAM operators, with the functions found in it.

    `path` is where it came from. Functions are bound on first use; a missing one is an error then,
    so that a library with only one operator set is usable.
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
        """Whether the operator library exports `name`."""
        return bool(self._address("cam", name) != self.ffi.NULL)

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

    def tensor(self, value: Tensor | None) -> Any:
        """An aclTensor over a contiguous tensor's memory; NULL for None."""
        if value is None:
            return self.ffi.NULL
        dtype = DTYPES.get(str(value.dtype).removeprefix("torch."))
        if dtype is None or not value.is_contiguous() or value.data_ptr() % 32:
            raise ConfigError(
                f"a tensor with dtype {value.dtype}, contiguous={value.is_contiguous()}, address "
                f"{value.data_ptr():#x} cannot be given to an operator; allowed: contiguous, "
                f"32-byte aligned, an ACL data type; use .contiguous() or .clone()"
            )
        shape = list(value.shape)
        make = self.base(
            "aclCreateTensor",
            "aclTensor*(*)(int64_t*, uint64_t, int32_t, int64_t*, int64_t, int32_t, "
            "int64_t*, uint64_t, void*)",
        )
        dims = self.ffi.new("int64_t[]", shape)
        strides = self.ffi.new("int64_t[]", list(value.stride()))
        data = self.ffi.cast("void*", value.data_ptr())
        made = make(dims, len(shape), dtype, strides, 0, _FORMAT_ND, dims, len(shape), data)
        if made == self.ffi.NULL:
            self.check(-1, "aclCreateTensor")
        return made

    def launch(self, op: str, args: Sequence[Any], stream: int) -> None:
        """Both phases of `op`: prepare, then queue on `stream`. Returns before the kernel runs.

        `args` by the table's letters: tensors or None, numbers, text. Tensor descriptors are gone
        afterwards; the memory behind them must stay until the stream has passed the kernel.
        """
        ffi = self.ffi
        kinds = OPERATORS[op]
        prepare = self._functions.get(op + "GetWorkspaceSize")
        if prepare is None:
            params = ", ".join(_CTYPES[k] for k in kinds)
            prepare = self._bind(
                op + "GetWorkspaceSize", "cam", f"int32_t(*)({params}, uint64_t*, aclOpExecutor**)"
            )
        run = self._functions.get(op) or self._bind(
            op, "cam", "int32_t(*)(void*, uint64_t, aclOpExecutor*, void*)"
        )
        destroy = self.base("aclDestroyTensor", "int32_t(*)(aclTensor*)")
        bytes_out = ffi.new("uint64_t*")
        op_executor = ffi.new("aclOpExecutor**")
        made: list[Any] = []
        values: list[Any] = []
        try:
            for kind, value in zip(kinds, args, strict=True):
                if kind == "T":
                    values.append(self.tensor(value))
                    made.append(values[-1])
                elif kind == "s":
                    values.append(ffi.new("char[]", value.encode()))
                else:
                    values.append(value)
            self.check(prepare(*values, bytes_out, op_executor), op + "GetWorkspaceSize")
            if bytes_out[0] != 0:
                # These operators declare none; a library that wants some needs an owner for it.
                raise ConfigError(
                    f"{op} wants {bytes_out[0]} workspace bytes; allowed: 0; next: give the "
                    f"launch a workspace owner before using this library"
                )
            self.check(run(ffi.NULL, 0, op_executor[0], ffi.cast("void*", stream)), op)
        finally:
            for one in made:
                if one != ffi.NULL:
                    destroy(one)


_cache: dict[tuple[str, str], CamLibrary] = {}
_lock = threading.Lock()


def candidates(toolkit: Toolkit) -> tuple[Path, ...]:
    """Operator libraries to look into: the vendor chain, then every other installed vendor."""
    chain = [v.library for v in toolkit.vendor_dirs]
    vendors = toolkit.opp_dir / "vendors"
    others = sorted(p / VENDOR_LIBRARY for p in vendors.iterdir()) if vendors.is_dir() else []
    return tuple(dict.fromkeys(p for p in (*chain, *others) if p.exists()))


def open_cam(toolkit: Toolkit, symbol: str = "aclnnA2eGetWorkspaceSize") -> CamLibrary:
    """The first library of the vendor chain that exports `symbol`. Local; cached per process.

    Raises:
        SymbolMissing: no library has it; the message lists those looked into.
        LibraryNotFound: a library the operators need cannot be loaded.
    """
    key = (str(toolkit.root), symbol)
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
    for path in candidates(toolkit):
        opened = libraries.open_library(native, path, "vendor chain")
        if isinstance(opened, Problem):
            tried.append(str(opened))
            continue
        library = CamLibrary(native, {**handles, "cam": opened[0]}, path)
        if library.has(symbol):
            return library
        tried.append(f"{path} has no {symbol}")
    raise SymbolMissing(
        f"no CAM operator library under {toolkit.opp_dir}; looked into: "
        f"{'; '.join(tried) or 'none'}; allowed: a vendor library that exports {symbol}; "
        f"install the connector's operator package"
    )
