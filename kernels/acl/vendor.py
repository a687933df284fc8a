# SPDX-License-Identifier: Apache-2.0
"""Decides whether MegaMoe's two symbols can be used, and names the one reason when not.

The rule: the vendor of MegaMoe is the first entry of the chain and provides both symbols from one
file. Other vendors may stand behind it, but MegaMoe is never taken from them: the operator's front
end and its kernels are found by two separate searches, which agree only for the first entry.
The toolkit's built-in library counts when no vendor of the chain exports either symbol.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xmoe.kernels.acl import abi_detect, elf, files
from xmoe.kernels.acl.abi_detect import Identified, vendor_version
from xmoe.kernels.acl.libraries import (
    LoadedLibrary,
    changed,
    check_file,
    is_loaded,
    loaded_objects,
    open_library,
    other_copies,
)
from xmoe.kernels.acl.problems import Code, Problem
from xmoe.kernels.acl.provenance import Provenance, check_provenance, shadow_of
from xmoe.kernels.acl.toolkit import Skipped, Toolkit, VendorDir
from xmoe.kernels.acl.variants import Variant

LAUNCH_SYMBOL = "aclnnMegaMoe"
WORKSPACE_SYMBOL = "aclnnMegaMoeGetWorkspaceSize"
SYMBOLS = (LAUNCH_SYMBOL, WORKSPACE_SYMBOL)
INNER_SYMBOLS = ("aclnnInnerMegaMoe", "aclnnInnerMegaMoeGetWorkspaceSize")
"""What the two call inside their library, through the process-wide table. Source: ops-transformer
9.1.0 mc2/mega_moe/op_api/aclnn_mega_moe.cpp."""


@dataclass(frozen=True)
class ChainEntry:
    """What the report says of one vendor: its file, the MegaMoe symbols in it, and a verdict."""

    vendor: VendorDir
    version: str
    symbols: tuple[str, ...]
    verdict: str


@dataclass(frozen=True)
class MegaMoeSymbols:
    """The two verified functions. Valid as long as the process lives: libraries are never closed.

    Addresses are plain integers. `identified` holds the variant and who says so; symbols without a
    variant are never called.
    """

    identified: Identified
    workspace_addr: int
    launch_addr: int
    provenance: tuple[Provenance, Provenance]
    vendor: VendorDir
    vendor_version: str
    library: LoadedLibrary

    @property
    def variant(self) -> Variant | None:
        """The ABI variant, None when it is not known."""
        return self.identified.variant

    @property
    def variant_source(self) -> str:
        """Who says so, or why nobody can."""
        return self.identified.source

    def require_variant(self) -> Variant:
        """The variant; a LibraryError with the named reason when it is not known."""
        if self.identified.variant is None:
            assert self.identified.problem is not None
            raise self.identified.problem.error()
        return self.identified.variant


def inspect_chain(toolkit: Toolkit) -> tuple[ChainEntry, ...]:
    """What each vendor of the chain holds. Reads files; opens no library. Local."""
    entries = []
    for position, vendor in enumerate(toolkit.vendor_dirs):
        info = elf.inspect(vendor.library, SYMBOLS)
        symbols = tuple(s for s in SYMBOLS if s in info.defined)
        if info.missing:
            verdict = f"no {vendor.library.name}"
        elif info.problem:
            verdict = info.problem
        elif len(symbols) == 2:
            verdict = "provides MegaMoe" if position == 0 or vendor.builtin else "shadowed"
        elif symbols:
            verdict = f"only {symbols[0]}"
        else:
            verdict = "no MegaMoe symbols"
        entries.append(ChainEntry(vendor, vendor_version(toolkit, vendor), symbols, verdict))
    return tuple(entries)


def select_vendor(
    chain: tuple[ChainEntry, ...], skipped: Sequence[Skipped] = ()
) -> ChainEntry | Problem:
    """The entry whose library MegaMoe must come from, by what the files say."""
    if not chain:
        over = "; ".join(f"{s.entry!r} ({s.found_via}): {s.reason}" for s in skipped)
        passed = f"; passed over: {over}" if over else ""
        return Problem(Code.FILE_MISSING, f"the vendor chain is empty: no operator library{passed}")
    having = [entry for entry in chain if entry.symbols]
    first = chain[0]
    if not first.symbols and having and having[0].vendor.builtin:
        return having[0]
    if first.symbols or not having:
        if len(first.symbols) == 1:
            missing = next(s for s in SYMBOLS if s not in first.symbols)
            other = next((e for e in chain[1:] if missing in e.symbols), None)
            if other is not None:
                return Problem(
                    Code.MIXED_FILES,
                    f"{first.symbols[0]} is in {first.vendor.library} but {missing} only in "
                    f"{other.vendor.library}",
                )
        # With no symbol anywhere, the first vendor that has a library at all explains most.
        present = next((e for e in chain if files.exists(e.vendor.library)), first)
        return first if first.symbols else present
    behind = next((e for e in having if len(e.symbols) == 2), None)
    if behind is None:
        half = having[0]
        launch_only = half.symbols == (LAUNCH_SYMBOL,)
        return Problem(
            Code.ONLY_LAUNCH_SYMBOL if launch_only else Code.ONLY_WORKSPACE_SYMBOL,
            f"no entry of the chain provides both symbols; {half.vendor.library} has only "
            f"{half.symbols[0]}, and is not the first",
        )
    return Problem(
        Code.WRONG_VENDOR,
        f"MegaMoe's vendor must be the first of the chain; {first.vendor.path} is first and "
        f"provides neither {LAUNCH_SYMBOL} nor {WORKSPACE_SYMBOL} ({first.verdict}), "
        f"{behind.vendor.library} does but stands behind it",
    )


def resolve_mega_moe(
    native: Any,
    toolkit: Toolkit,
    pinned: str | None = None,
    expected_vendor: str | None = None,
    base_libraries: Sequence[Path] = (),
) -> MegaMoeSymbols | Problem:
    """Find, load and verify MegaMoe's two symbols, or say why not. Local.

    Args:
        native: the native module.
        toolkit: the toolkit with the vendor chain of this moment.
        pinned: ABI variant set by configuration.
        expected_vendor: folder name or path of the vendor to insist on.
        base_libraries: the toolkit's libraries as loaded here.
    """
    chain = inspect_chain(toolkit)
    entry = select_vendor(chain, toolkit.skipped)
    if isinstance(entry, Problem):
        return entry
    vendor = entry.vendor
    if expected_vendor is not None and expected_vendor not in (vendor.path.name, str(vendor.path)):
        return Problem(
            Code.WRONG_VENDOR, f"the chain's vendor is {vendor.path}, expected {expected_vendor!r}"
        )
    harm = check_file(vendor.library, vendor.found_via) or _opening_harm(
        native, vendor.library, base_libraries
    )
    if harm is not None:
        return harm
    opened = open_library(native, vendor.library, vendor.found_via)
    if isinstance(opened, Problem):
        return opened
    handle, library = opened
    bound = _bind(native, handle, vendor.library)
    if isinstance(bound, Problem):
        return bound
    for problem in (
        *(p.problem for p in bound[1]),
        _shadowed_inside(native, handle, vendor.library),
        _rival_copy(native, library),
        _second_base(native, library, base_libraries),
    ):
        if problem is not None:
            return problem
    addresses, provenance = bound
    # Only now: nothing is called in a library whose origin is not verified.
    identified = abi_detect.identify(toolkit, vendor, library.path, base_libraries, pinned)
    replaced = changed(library.path)  # what was looked at is what is loaded?
    if replaced is not None:
        return replaced
    return MegaMoeSymbols(
        identified,
        int(native.ffi.cast("uintptr_t", addresses[WORKSPACE_SYMBOL])),
        int(native.ffi.cast("uintptr_t", addresses[LAUNCH_SYMBOL])),
        provenance,
        vendor,
        entry.version,
        library,
    )


def _opening_harm(native: Any, path: Path, bases: Sequence[Path]) -> Problem | None:
    """Its constructors may do anything, so they run in a child first."""
    harm = "" if is_loaded(native, path) else abi_detect.opening_harm(path, bases)
    if not harm:
        return None
    return Problem(Code.UNLOADABLE, f"{path} cannot be loaded: a process that opens it {harm}")


def _bind(
    native: Any, handle: Any, path: Path
) -> tuple[dict[str, Any], tuple[Provenance, Provenance]] | Problem:
    """Look both symbols up through the handle and check where they come from."""
    addresses = {}
    for symbol in SYMBOLS:
        address = native.lib.xm_dlsym(handle, symbol.encode(), native.ffi.NULL, 0)
        if address != native.ffi.NULL:
            addresses[symbol] = address
    if not addresses:
        return Problem(
            Code.NO_SYMBOLS,
            f"{path} exports neither {LAUNCH_SYMBOL} nor {WORKSPACE_SYMBOL}; "
            f"{files.describe(path.parent)}",
        )
    if len(addresses) == 1:
        only_launch = LAUNCH_SYMBOL in addresses
        missing = WORKSPACE_SYMBOL if only_launch else LAUNCH_SYMBOL
        code = Code.ONLY_LAUNCH_SYMBOL if only_launch else Code.ONLY_WORKSPACE_SYMBOL
        return Problem(code, f"{path} exports {next(iter(addresses))} but lacks {missing}")
    launch, workspace = (check_provenance(native, s, addresses[s], path) for s in SYMBOLS)
    return addresses, (launch, workspace)


def _rival_copy(native: Any, library: LoadedLibrary) -> Problem | None:
    """Another loaded file of the same name that defines MegaMoe as well.

    Both would register the same operator type with the framework; which one then runs is chance.
    A companion vendor's file without MegaMoe is no rival. A file that was replaced on disk and
    opened again is its own rival.
    """
    real = os.path.realpath(library.path)
    if sum(os.path.realpath(path) == real for path in loaded_objects(native)) > 1:
        return Problem(
            Code.LOADED_ELSEWHERE,
            f"{library.path} is loaded twice: it was replaced on disk after this process had "
            f"loaded it",
        )
    for path in library.other_copies:
        if elf.inspect(path, SYMBOLS).defined:
            return Problem(
                Code.LOADED_ELSEWHERE,
                f"{library.path} is the verified library, but {os.fspath(path)} with MegaMoe "
                f"symbols is loaded in this process too",
            )
    return None


def _shadowed_inside(native: Any, handle: Any, path: Path) -> Problem | None:
    """Whether the library's own inner calls would leave it."""
    for symbol in INNER_SYMBOLS:
        address = native.lib.xm_dlsym(handle, symbol.encode(), native.ffi.NULL, 0)
        if address == native.ffi.NULL:
            continue
        shadow = shadow_of(native, symbol, address)
        if shadow is not None:
            return Problem(
                Code.INTERPOSED,
                f"{symbol}, which MegaMoe calls inside {path}, is shadowed in the process by "
                f"{shadow}",
            )
    return None


def _second_base(native: Any, library: LoadedLibrary, bases: Sequence[Path]) -> Problem | None:
    """Another copy of one of the toolkit's libraries that came with the vendor's."""
    for base in bases:
        others = other_copies(native, base)
        if others:
            return Problem(
                Code.LOADED_ELSEWHERE,
                f"beside {base}, {', '.join(map(str, others))} is loaded in this process too, "
                f"perhaps as a dependency of {library.path}",
            )
    return None
