# SPDX-License-Identifier: Apache-2.0
"""Reads `decl/*.h` and writes the C wrappers of the native module.

cffi calls a function pointer through libffi even in API mode. A wrapper that takes the function's
address as its first argument is ordinary compiled C instead, and the address can come from a
library that was verified at run time, so nothing is linked. Standard library only (build time).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

GROUPS: dict[str, tuple[str, str]] = {
    "ascendcl.h": ("acl", "libascendcl.so"),
    "nnopbase.h": ("nnop", "libnnopbase.so"),
    "hccl.h": ("hccl", "libhccl.so"),
    "hccl_fwk.h": ("hccl_fwk", "libhccl_fwk.so"),
}
"""Declaration file -> (wrapper prefix, library)."""

_PROTOTYPE = re.compile(r"^(?P<ret>[\w\s*]+?)\b(?P<name>\w+)\s*\((?P<params>.*)\)$", re.DOTALL)
_PARAMETER = re.compile(r"^(?P<type>.*[\s*])(?P<name>\w+)$", re.DOTALL)


@dataclass(frozen=True)
class Prototype:
    """One C function: return type, name, (type, name) of every parameter."""

    ret: str
    name: str
    params: tuple[tuple[str, str], ...]


def strip_comments(text: str) -> str:
    """C source without comments."""
    return re.sub(r"/\*.*?\*/|//[^\n]*", " ", text, flags=re.DOTALL)


def parse(text: str) -> list[Prototype]:
    """All prototypes of a declaration file, in order.

    Raises:
        ValueError: a statement that is not a plain prototype with named parameters.
    """
    found = []
    for statement in strip_comments(text).split(";"):
        statement = " ".join(statement.split())
        if not statement:
            continue
        match = _PROTOTYPE.match(statement)
        if match is None:
            raise ValueError(f"not a prototype: {statement!r}")
        params = []
        inside = match["params"].strip()
        for part in [] if inside in ("", "void") else inside.split(","):
            one = _PARAMETER.match(part.strip())
            if one is None:
                raise ValueError(f"unnamed parameter {part.strip()!r} of {match['name']}")
            params.append((one["type"].strip(), one["name"]))
        found.append(Prototype(match["ret"].strip(), match["name"], tuple(params)))
    return found


def wrapper(symbol: str, proto: Prototype) -> tuple[str, str]:
    """(declaration, definition) of the C wrapper `symbol` that calls `proto` at a given address."""
    types = ", ".join(t for t, _ in proto.params) or "void"
    arguments = "".join(f", {t} {n}" for t, n in proto.params)
    head = f"{proto.ret} {symbol}(void* fn_address{arguments})"
    call = f"(({proto.ret} (*)({types}))fn_address)({', '.join(n for _, n in proto.params)})"
    return f"{head};", f"static {head} {{ return {call}; }}"


def read_groups(folder: Path) -> list[tuple[str, Prototype]]:
    """(wrapper symbol, prototype) of every function declared under `folder`."""
    return [
        (f"{prefix}__{proto.name}", proto)
        for file, (prefix, _) in GROUPS.items()
        for proto in parse((folder / file).read_text())
    ]
