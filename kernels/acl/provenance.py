# SPDX-License-Identifier: Apache-2.0
"""Where a symbol really comes from. Two sides are looked at.

A library handle also finds symbols of the library's dependencies, so that it found one proves
little: `dladdr` names the file. And with an interposer in the global scope our handle still names
the right file, while calls between libraries go to the interposer: only a global look-up shows it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xmoe.kernels.acl.problems import Code, Problem

_PATH_BYTES = 4096


@dataclass(frozen=True)
class Provenance:
    """The result of one check. Paths are as the dynamic linker spells them, resolved."""

    symbol: str
    resolved_path: str | None
    global_path: str | None
    expected_path: str
    ok: bool
    problem: Problem | None = None


def file_of(native: Any, address: Any) -> str | None:
    """The real path of the object that holds an address, or None."""
    buffer = native.ffi.new("char[]", _PATH_BYTES)
    start = native.ffi.new("void**")
    if not native.lib.xm_dladdr(address, buffer, _PATH_BYTES, start):
        return None
    return os.path.realpath(os.fsdecode(native.ffi.string(buffer)))


def mapped_file(address: int) -> str | None:
    """The file whose code lies at an address, as the kernel knows it; None when it cannot tell.

    The linker remembers a name only, and a link may lead elsewhere since.
    """
    try:
        with open("/proc/self/maps", "rb") as file:
            for line in file:
                words = line.rstrip(b"\n").split(None, 5)
                start, _, end = words[0].partition(b"-")
                if int(start, 16) <= address < int(end, 16):
                    return os.fsdecode(words[5]) if words[5:] and words[5][:1] == b"/" else None
    except (OSError, ValueError):
        pass
    return None


def shadow_of(native: Any, symbol: str, address: Any) -> str | None:
    """The file whose symbol of that name the process finds instead of `address`; None for none."""
    found = native.lib.xm_dlsym_global(symbol.encode())
    if found in (native.ffi.NULL, address):
        return None
    return file_of(native, found) or "an object without a file"


def check_provenance(native: Any, symbol: str, address: Any, expected: Path) -> Provenance:
    """Check that a bound symbol, and the process-wide one of its name, come from `expected`.

    Args:
        native: the native module.
        symbol: the C name.
        address: what the verified library's handle resolved it to.
        expected: the library file it must come from.
    """
    want = os.path.realpath(expected)
    resolved = file_of(native, address)
    global_address = native.lib.xm_dlsym_global(symbol.encode())
    global_path = None
    if global_address != native.ffi.NULL:
        global_path = file_of(native, global_address) or "an object without a file"
    mapped = mapped_file(int(native.ffi.cast("uintptr_t", address)))
    problem = None
    if resolved != want:
        problem = Problem(
            Code.MIXED_FILES,
            f"{symbol} was looked up in {want} but resolves into {resolved or 'no known file'}",
        )
    elif mapped not in (None, want):
        problem = Problem(
            Code.LOADED_ELSEWHERE,
            f"the code of {symbol} in this process is {mapped}, which is not the file that "
            f"{expected} leads to now",
        )
    elif global_path is not None and (global_path != want or global_address != address):
        problem = Problem(
            Code.INTERPOSED,
            f"{symbol} of {want} is shadowed in the process by {global_path}, "
            f"so calls between libraries would go there",
        )
    return Provenance(symbol, resolved, global_path, want, problem is None, problem)
