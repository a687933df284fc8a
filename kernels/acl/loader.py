# SPDX-License-Identifier: Apache-2.0
"""Loads the toolkit's libraries and binds their functions. Thread-safe; libraries stay loaded."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from xmoe import env
from xmoe.errors import LibraryNotFound, ProvenanceError, SymbolMissing
from xmoe.kernels.acl import files, libraries, vendor
from xmoe.kernels.acl.libraries import LibraryDescriptor, LoadedLibrary
from xmoe.kernels.acl.problems import Code, Problem
from xmoe.kernels.acl.provenance import file_of
from xmoe.kernels.acl.toolkit import Toolkit
from xmoe.kernels.acl.variants import VARIANTS
from xmoe.kernels.acl.vendor import MegaMoeSymbols


def native_module() -> Any:
    """The compiled module. Imported at first use, so that a broken build does not break imports.

    Raises:
        LibraryNotFound: it was not built, or not for this interpreter.
    """
    try:
        from xmoe.kernels.acl import _native
    except ImportError as error:
        raise LibraryNotFound(
            f"the native module xmoe.kernels.acl._native cannot be imported: {error}; "
            f"install xmoe again, or run kernels/acl/build.py in a checkout"
        ) from error
    return _native


class Functions:
    """Bound functions of one or two libraries: `functions.aclrtMalloc(...)` calls the C function.

    Arguments and results are cffi values. A function the library lacks, or whose library is
    absent, raises SymbolMissing when it is asked for, not before.
    """

    def __init__(self, group: str) -> None:
        self._group = group
        self._absent: dict[str, str] = {}
        self._frozen = False

    def _bind(self, name: str, call: Callable[..., Any]) -> None:
        setattr(self, name, call)

    def _mark_absent(self, name: str, reason: str) -> None:
        self._absent[name] = reason

    def _freeze(self) -> None:
        """From here on the table only is read, which needs no lock."""
        self._frozen = True

    def __setattr__(self, name: str, value: object) -> None:
        if self.__dict__.get("_frozen", False):
            raise TypeError(f"{name} of the {self._group} functions is read-only after loading")
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        raise TypeError(f"{name} of the {self._group} functions is read-only")

    def has(self, name: str) -> bool:
        """Whether the function is bound."""
        return name in self.__dict__ and not name.startswith("_")

    def missing(self) -> dict[str, str]:
        """Declared functions that are not bound, with the reason."""
        return dict(self._absent)

    def __getattr__(self, name: str) -> Any:
        # Reached only for names that were not bound.
        if name.startswith("__"):
            raise AttributeError(name)
        reason = self._absent.get(name, f"no declaration for it in decl/ ({self._group})")
        raise SymbolMissing(
            f"{name} cannot be called: {reason}; install a CANN that exports it, "
            f"and run xmoe doctor to see what was found"
        )


@dataclass(frozen=True)
class _Base:
    """The toolkit's own libraries, shared by all vendor chains of one toolkit."""

    acl: Functions
    nnop: Functions
    hccl: Functions
    libraries: tuple[LoadedLibrary, ...]
    problems: tuple[Problem, ...]


_SymbolKey = tuple[str | None, str | None, str]
"""Pinned variant, expected vendor, probe setting."""


class Runtime:
    """One loaded toolkit with one vendor chain.

    `acl`, `nnop` and `hccl` are the bound functions (hccl holds those of libhccl_fwk too),
    `libraries` what was opened, `problems` what is wrong with libraries that are not strictly
    needed. Get one from `load`.
    """

    def __init__(self, native: Any, toolkit: Toolkit, base: _Base) -> None:
        self.native = native
        self.ffi = native.ffi
        self.toolkit = toolkit
        self.acl = base.acl
        self.nnop = base.nnop
        self.hccl = base.hccl
        self.problems = base.problems
        self._base_libraries = base.libraries
        self._vendor_libraries: tuple[LoadedLibrary, ...] = ()
        self._lock = threading.Lock()
        # Replaced as a whole, never changed: readers hold no lock.
        self._symbols: Mapping[_SymbolKey, MegaMoeSymbols] = MappingProxyType({})

    @property
    def libraries(self) -> tuple[LoadedLibrary, ...]:
        """Libraries opened so far, in load order; the vendor's once MegaMoe was looked up."""
        return (*self._base_libraries, *self._vendor_libraries)

    @property
    def mega_moe(self) -> MegaMoeSymbols:
        """MegaMoe's verified symbols. Raises LibraryNotFound, SymbolMissing or ProvenanceError."""
        return self.require_mega_moe()

    def require_mega_moe(
        self, abi_variant: str | None = None, expected_vendor: str | None = None
    ) -> MegaMoeSymbols:
        """As `mega_moe`, with the ABI variant or the vendor pinned by configuration."""
        found = self.find_mega_moe(abi_variant, expected_vendor)
        if isinstance(found, Problem):
            raise found.error()
        return found

    def find_mega_moe(
        self, abi_variant: str | None = None, expected_vendor: str | None = None
    ) -> MegaMoeSymbols | Problem:
        """MegaMoe's verified symbols, or the named reason why not. Local.

        Symbols with a known variant are kept. Anything else is looked into again each time: files
        may be installed or corrected late.
        """
        key = (abi_variant, expected_vendor, env.text("XMOE_ABI_PROBE") or "")
        found = self._symbols.get(key)
        if found is not None:
            return found
        with self._lock:
            found = self._symbols.get(key)
            if found is not None:
                return found
            base = tuple(lib.path for lib in self._base_libraries)
            fresh = vendor.resolve_mega_moe(
                self.native, self.toolkit, abi_variant, expected_vendor, base
            )
            if isinstance(fresh, MegaMoeSymbols):
                self._record(fresh.library)
                if fresh.variant is not None:
                    self._symbols = MappingProxyType({**self._symbols, key: fresh})
            return fresh

    def _record(self, library: LoadedLibrary) -> None:
        """Remember a vendor library that was opened, as it was the first time. Lock held."""
        if all(library.path != known.path for known in self._vendor_libraries):
            self._vendor_libraries = (*self._vendor_libraries, library)

    def callable_variants(self) -> tuple[str, ...]:
        """ABI variants the native module has compiled calls for."""
        lib = self.native.lib
        return tuple(v for v in VARIANTS if hasattr(lib, f"mega_moe_workspace__{v}"))

    def missing_comm_symbols(self) -> tuple[str, ...]:
        """Symbols the communication context needs and this toolkit lacks."""
        return tuple(s for s in libraries.COMM_SYMBOLS if not self.hccl.has(s))

    @property
    def shares_host_memory(self) -> bool:
        """Whether this runtime's devices work on the host's own memory. A real NPU's do not."""
        return self.identity is not None

    @property
    def identity(self) -> str | None:
        """The software device's own name, or None for a vendor's CANN. For reports only."""
        if not self.acl.has("xsdIdentity"):
            return None
        text = self.acl.xsdIdentity()
        return None if text == self.ffi.NULL else str(self.ffi.string(text).decode())


CHAIN_VARIABLES = (
    "ASCEND_HOME_PATH",
    "ASCEND_TOOLKIT_HOME",
    "ASCEND_OPP_PATH",
    "ASCEND_CUSTOM_OPP_PATH",
)
"""Environment variables that decide what is loaded."""

_lock = threading.RLock()
_at_load: Mapping[str, str | None] | None = None
_runtimes: dict[Toolkit, Runtime] = {}
_bases: dict[tuple[str, tuple[Path, ...]], _Base] = {}


def _renew_lock_in_child() -> None:
    # Another thread may have held the lock at fork; in the child nobody would release it.
    global _lock
    _lock = threading.RLock()
    for runtime in _runtimes.values():
        runtime._lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock_in_child)


def load(toolkit: Toolkit) -> Runtime:
    """Load a toolkit's libraries; the same Runtime for equal toolkits, from any thread. Local.

    A Toolkit holds the vendor chain of the moment it was found, so a changed
    ASCEND_CUSTOM_OPP_PATH gives another Runtime over the same base libraries.

    Raises:
        LibraryNotFound: a library nothing works without is missing or cannot be loaded.
        SymbolMissing: such a library lacks a required function.
        ProvenanceError: another copy of it is already loaded.
    """
    global _at_load
    with _lock:
        if _at_load is None:
            _at_load = MappingProxyType({name: env.text(name) for name in CHAIN_VARIABLES})
        runtime = _runtimes.get(toolkit)
        if runtime is None:
            native = native_module()
            key = (os.path.realpath(toolkit.root), toolkit.lib_dirs)
            base = _bases.get(key)
            if base is None:
                base = _bases[key] = _load_base(native, toolkit)
            runtime = _runtimes[toolkit] = Runtime(native, toolkit, base)
        return runtime


def environment_at_load() -> Mapping[str, str | None] | None:
    """The chain's variables when this process first loaded a toolkit; None before that."""
    return _at_load


def _load_base(native: Any, toolkit: Toolkit) -> _Base:
    tables = {name: Functions(name) for name in ("acl", "nnop", "hccl")}
    opened: list[LoadedLibrary] = []
    problems: list[Problem] = []
    for descriptor in libraries.LIBRARIES:
        table = tables[descriptor.group.removesuffix("_fwk")]
        path = _locate(toolkit, descriptor)
        found: Any = (
            path
            if isinstance(path, Problem)
            else libraries.open_library(native, path, toolkit.found_via)
        )
        if isinstance(found, Problem):
            if descriptor.needed:
                raise found.error()
            problems.append(found)
            for name in _declared(native, descriptor):
                table._mark_absent(name, found.text)
            continue
        handle, record = found
        _refuse_second_copy(descriptor, record, problems)
        opened.append(record)
        _bind_all(native, descriptor, handle, record, table)
        lacking = [s for s in descriptor.required if not table.has(s)]
        if lacking and descriptor.needed:
            raise SymbolMissing(
                f"{record.path} lacks {', '.join(lacking)}; it must export "
                f"{', '.join(descriptor.required)}; install CANN 9.1.0 or later"
            )
    for table in tables.values():
        table._freeze()
    return _Base(
        tables["acl"], tables["nnop"], tables["hccl"], tuple(opened), tuple(problems)
    )  # fmt: skip


def _locate(toolkit: Toolkit, descriptor: LibraryDescriptor) -> Path | Problem:
    for folder in toolkit.lib_dirs:
        if files.exists(folder / descriptor.name):
            return folder / descriptor.name
    places = "; ".join(f"{d}: {files.describe(d)}" for d in toolkit.lib_dirs)
    return Problem(
        Code.FILE_MISSING,
        f"{descriptor.name} is missing from the toolkit {toolkit.root} "
        f"(named by {toolkit.found_via}); looked in {places}",
    )


def _refuse_second_copy(
    descriptor: LibraryDescriptor, record: LoadedLibrary, problems: list[Problem]
) -> None:
    """Two copies of a runtime library split the process' device state between them."""
    if not record.other_copies:
        return
    problem = Problem(
        Code.LOADED_ELSEWHERE,
        f"{record.path} was found via {record.found_via}, but "
        f"{', '.join(map(str, record.other_copies))} is loaded in this process already",
    )
    if descriptor.needed:
        raise ProvenanceError(str(problem))
    problems.append(problem)


def _declared(native: Any, descriptor: LibraryDescriptor) -> list[str]:
    prefix = f"{descriptor.group}__"
    return [n.removeprefix(prefix) for n in dir(native.lib) if n.startswith(prefix)]


def _bind_all(
    native: Any,
    descriptor: LibraryDescriptor,
    handle: Any,
    record: LoadedLibrary,
    table: Functions,
) -> None:
    for name in _declared(native, descriptor):
        address = native.lib.xm_dlsym(handle, name.encode(), native.ffi.NULL, 0)
        if address == native.ffi.NULL:
            table._mark_absent(name, f"{record.path} does not export it")
        else:
            wrapper = getattr(native.lib, f"{descriptor.group}__{name}")
            table._bind(name, functools.partial(wrapper, address))


def interposed_functions(runtime: Runtime) -> tuple[tuple[str, str], ...]:
    """(function, file) of base functions that a global library shadows. For reports."""
    native, found = runtime.native, []
    for table in (runtime.acl, runtime.nnop, runtime.hccl):
        for name, call in sorted(vars(table).items()):
            if name.startswith("_"):
                continue
            shadow = native.lib.xm_dlsym_global(name.encode())
            if shadow != native.ffi.NULL and shadow != call.args[0]:
                found.append((name, file_of(native, shadow) or "unknown file"))
    return tuple(found)
