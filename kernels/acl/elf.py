# SPDX-License-Identifier: Apache-2.0
"""Just enough ELF reading to say what a library file is without running its constructors."""

from __future__ import annotations

import mmap
import os
import platform
import stat
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

_MACHINES = {62: "x86_64", 183: "aarch64"}
_SHT_DYNSYM = 11
_STB_LOCAL = 0


@dataclass(frozen=True)
class ElfInfo:
    """What a file is. `defined` holds the asked-for dynamic symbols that it defines itself.

    `problem` is empty for a 64-bit little-endian shared object of this machine. `unreadable` says
    that this user may not look at it, which says nothing about the file; `missing` that there is
    no such file.
    """

    problem: str = ""
    machine: str = ""
    unreadable: bool = False
    missing: bool = False
    defined: frozenset[str] = field(default_factory=frozenset)


def inspect(path: Path, symbols: Iterable[str] = ()) -> ElfInfo:
    """Read a library file's header and look for dynamic symbols. Never raises for a bad file."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            return ElfInfo("not a regular file")
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(64)
            if len(head) < 4 or head[:4] != b"\x7fELF":
                return ElfInfo(f"not an ELF file ({size} bytes, starts with {head[:8]!r})")
            if len(head) < 64 or head[4] != 2 or head[5] != 1:
                return ElfInfo("not a 64-bit little-endian ELF file, or cut short")
            kind, machine = struct.unpack_from("<HH", head, 16)
            name = _MACHINES.get(machine, f"machine {machine}")
            if kind != 3:
                return ElfInfo(f"an ELF file of type {kind}, not a shared object (3)", name)
            if name != platform.machine():
                return ElfInfo(f"built for {name}, this machine is {platform.machine()}", name)
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return ElfInfo("", name, defined=_defined(data, head, frozenset(symbols)))
    except (FileNotFoundError, NotADirectoryError):
        return ElfInfo("no such file", missing=True)
    except (OSError, ValueError) as error:
        return ElfInfo(f"cannot be read: {error}", unreadable=isinstance(error, PermissionError))
    except (struct.error, IndexError):
        return ElfInfo("a damaged ELF file: its section table points outside the file")


def _defined(data: mmap.mmap, head: bytes, wanted: frozenset[str]) -> frozenset[str]:
    """Those of `wanted` that the dynamic symbol table defines."""
    (table,) = struct.unpack_from("<Q", head, 40)
    entry_size, count = struct.unpack_from("<HH", head, 58)
    sections = [
        struct.unpack_from("<IIQQQQIIQQ", data, table + i * entry_size) for i in range(count)
    ]
    found = set()
    for section in sections:
        if section[1] != _SHT_DYNSYM:
            continue
        start, length, link, symbol_size = section[4], section[5], section[6], section[9]
        strings = sections[link]
        blob = data[strings[4] : strings[4] + strings[5]]
        # Names sit between NUL bytes, and one name may be the tail of a longer one.
        places: dict[int, str] = {}
        for name in wanted:
            at = -1
            while (at := blob.find(name.encode() + b"\0", at + 1)) >= 0:
                places[at] = name
        if not places:
            continue
        for at in range(start, start + length, symbol_size):
            name_at, info, _, index = struct.unpack_from("<IBBH", data, at)
            if name_at in places and index != 0 and info >> 4 != _STB_LOCAL:
                found.add(places[name_at])
    return frozenset(found)
