# SPDX-License-Identifier: Apache-2.0
"""Compares this project's C declarations with a vendor's headers, by compiling the two together.

For each function of kernels/acl/decl a C++ static assertion states that the vendor's function has
our type. Types that only differ in name (an enumeration and int32_t, a struct and its alias) are
equal for a caller, so parameters are compared by size and by kind, not by name.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from support.tree import ROOT

DECL = ROOT / "kernels" / "acl" / "decl"
# Which of the vendor's headers declare what, newest layout first. A missing one is no error: its
# functions are reported as not compared.
HEADERS = {
    "acl": ("acl/acl.h", "acl/acl_rt.h", "acl/acl_base.h"),
    "nnop": ("aclnn/acl_meta.h", "aclnn/aclnn_base.h"),
    "hccl": ("hccl/hccl.h", "hccl/hccl_types.h"),
    "hccl_fwk": ("hccl/hccl.h", "hccl/hcom.h"),
}
_CHECKS = """
#include <cstddef>
#include <cstdint>
#include <tuple>
#include <type_traits>
#include <utility>
namespace xmoe_compare {
template <class T> struct Call;
template <class R, class... A> struct Call<R (*)(A...)> {
  using result = R;
  using all = std::tuple<A...>;
  static constexpr std::size_t count = sizeof...(A);
};
template <class R, class... A> struct Call<R (*)(A...) noexcept> : Call<R (*)(A...)> {};
// Behind a pointer: numbers of one size and kind, or something that is no number on both sides.
template <class O, class T> constexpr bool pointee() {
  using P = std::remove_cv_t<O>;
  using Q = std::remove_cv_t<T>;
  if constexpr (std::is_void_v<P> || std::is_void_v<Q>) return true;
  else if constexpr (std::is_pointer_v<P> != std::is_pointer_v<Q>) return false;
  else if constexpr (std::is_arithmetic_v<P> && (std::is_arithmetic_v<Q> || std::is_enum_v<Q>))
    return sizeof(P) == sizeof(Q) && std::is_floating_point_v<P> == std::is_floating_point_v<Q>;
  else return std::is_arithmetic_v<P> == std::is_arithmetic_v<Q>;
}
// A caller passes the same bits in the same kind of register.
template <class O, class T> constexpr bool same() {
  if constexpr (std::is_void_v<O> || std::is_void_v<T>)
    return std::is_void_v<O> && std::is_void_v<T>;
  else if constexpr (std::is_pointer_v<O> && std::is_pointer_v<T>)
    return pointee<std::remove_pointer_t<O>, std::remove_pointer_t<T>>();
  else if constexpr (std::is_pointer_v<O> || std::is_pointer_v<T>) return false;
  else if constexpr (std::is_floating_point_v<O> || std::is_floating_point_v<T>)
    return std::is_same_v<O, T>;
  else return sizeof(O) == sizeof(T);
}
template <class O, class T, std::size_t... I> constexpr bool each(std::index_sequence<I...>) {
  return (same<std::tuple_element_t<I, O>, std::tuple_element_t<I, T>>() && ...);
}
template <class Ours, class Theirs> constexpr bool equal() {
  using O = Call<Ours>;
  using T = Call<Theirs>;
  if constexpr (O::count != T::count) return false;
  else return same<typename O::result, typename T::result>() &&
      each<typename O::all, typename T::all>(std::make_index_sequence<O::count>());
}
}
"""
# Structures that cross the border by value or by layout, and the fields this project writes.
STRUCTURES = {
    "HcclRootInfo": (),
    "HcclCommConfig": ("hcclBufferSize", "hcclDeterministic", "hcclCommName"),
}


@dataclass
class Comparison:
    """What came of comparing one toolkit's headers.

    drifted: function -> compiler's words. absent: not declared by the headers that are there.
    """

    include: Path
    equal: list[str] = field(default_factory=list)
    drifted: dict[str, str] = field(default_factory=dict)
    absent: list[str] = field(default_factory=list)
    headers: list[str] = field(default_factory=list)


def prototypes() -> ModuleType:
    """kernels/acl/prototypes.py, the reader of our declarations."""
    path = ROOT / "kernels" / "acl" / "prototypes.py"
    spec = importlib.util.spec_from_file_location("_xmoe_prototypes", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def include_folder(root: Path) -> Path | None:
    """The toolkit's folder with acl/acl.h, or None."""
    for name in ("include", "aarch64-linux/include", "x86_64-linux/include"):
        if (root / name / "acl" / "acl.h").is_file():
            return root / name
    return None


def compare(include: Path, scratch: Path) -> Comparison:
    """Compile our declarations against the headers below `include`."""
    found = Comparison(include)
    reader = prototypes()
    for file, (group, _) in reader.GROUPS.items():
        headers = [name for name in HEADERS[group] if (include / name).is_file()]
        found.headers += [name for name in headers if name not in found.headers]
        # Without xsd...: those are the software device's own.
        ours = [p for p in reader.parse((DECL / file).read_text()) if p.name[:3] != "xsd"]
        declared = _declared(include, headers, [p.name for p in ours], scratch)
        found.absent += [p.name for p in ours if p.name not in declared]
        checks = {
            p.name: f"xmoe_compare::equal<{_type(p)}, decltype(&::{p.name})>()"
            for p in ours
            if p.name in declared
        }
        if group == "hccl":
            names = _declared(include, headers, list(STRUCTURES), scratch, "sizeof(::{})")
            checks |= {name: _layout(name) for name in names}
        _assert_all(found, headers, checks, scratch)
    return found


def _type(proto: Any) -> str:
    return f"ours_{proto.name}"


def _layout(name: str) -> str:
    parts = [f"sizeof(ours::{name}) == sizeof(::{name})"]
    parts += [f"offsetof(ours::{name}, {f}) == offsetof(::{name}, {f})" for f in STRUCTURES[name]]
    return " && ".join(parts)


def _declared(
    include: Path, headers: list[str], names: list[str], scratch: Path, use: str = "&::{}"
) -> set[str]:
    """Which names the headers declare: one line each, and the compiler says which are wrong."""
    if not headers:
        return set()
    lines = [f'#include "{name}"' for name in headers]
    first = len(lines) + 1
    lines += [f"auto probe_{i} = {use.format(name)};" for i, name in enumerate(names)]
    words = _compile(include, "\n".join(lines) + "\n", scratch)
    bad = {int(number) for number in re.findall(r"compare\.cpp:(\d+):\d+: error", words)}
    return {name for i, name in enumerate(names) if first + i not in bad}


def _assert_all(
    found: Comparison, headers: list[str], checks: dict[str, str], scratch: Path
) -> None:
    reader = prototypes()
    declarations = [
        f"using ours_{p.name} = ours::R_{p.name} (*)({', '.join(_scoped(t) for t, _ in p.params)});"
        for file in reader.GROUPS
        for p in reader.parse((DECL / file).read_text())
        if p.name in checks
    ]
    results = [
        f"namespace ours {{ using R_{p.name} = {p.ret}; }}"
        for file in reader.GROUPS
        for p in reader.parse((DECL / file).read_text())
        if p.name in checks
    ]
    lines = [f'#include "{name}"' for name in headers]
    lines += [_CHECKS, f'namespace ours {{\n#include "{DECL / "types.h"}"\n}}']
    lines += [*results, *declarations]
    text = "\n".join(lines) + "\n"
    first = text.count("\n") + 1
    text += "".join(f'static_assert({check}, "{name}");\n' for name, check in checks.items())
    words = _compile(found.include, text, scratch)
    wrong: dict[int, str] = {}
    for number, said in re.findall(r"compare\.cpp:(\d+):\d+: error: (.*)", words):
        wrong.setdefault(int(number), said)
    outside = {n: said for n, said in wrong.items() if n < first}
    for i, name in enumerate(checks):
        if outside:
            found.drifted[name] = f"not comparable: {next(iter(outside.values()))}"
        elif first + i in wrong:
            found.drifted[name] = wrong[first + i]
        else:
            found.equal.append(name)


def _scoped(kind: str) -> str:
    """A type of ours, wherever it is spelled: the vendor's headers use the same names."""
    return re.sub(r"\b(acl\w+|Hccl\w+)\b", r"ours::\1", kind)


def _compile(include: Path, text: str, scratch: Path) -> str:
    """What the compiler says; empty when it is content."""
    source = scratch / "compare.cpp"
    source.write_text(text)
    compiler = shlex.split(os.environ.get("CXX", "g++"))
    command = [*compiler, "-std=c++17", "-w", "-fsyntax-only", "-fmax-errors=0", f"-I{include}"]
    done = subprocess.run(
        [*command, str(source)], capture_output=True, text=True, timeout=120,
        env={**os.environ, "LC_ALL": "C"},
    )  # fmt: skip
    return done.stderr if done.returncode else ""


def mega_moe_variants(header: Path, scratch: Path) -> list[str]:
    """ABI variants whose parameter list the vendor's aclnn_mega_moe.h declares; none or one."""
    from xmoe.kernels.acl.variants import CTYPES, VARIANTS

    include = include_folder_of(header)
    found = []
    for variant in VARIANTS.values():
        kinds = ", ".join(_scoped(CTYPES[p.kind]) for p in variant.params)
        text = (
            f'#include "{header}"\n{_CHECKS}namespace ours {{\n#include "{DECL / "types.h"}"\n}}\n'
            f"using Ours = int32_t (*)({kinds});\n"
            "static_assert(xmoe_compare::equal<Ours, decltype(&aclnnMegaMoeGetWorkspaceSize)>());\n"
        )
        if not _compile(include, text, scratch):
            found.append(variant.id)
    return found


def include_folder_of(header: Path) -> Path:
    """Where the headers that a vendor's header includes are looked for."""
    for parent in header.parents:
        if (parent / "aclnn").is_dir() or (parent / "include" / "aclnn").is_dir():
            return parent if (parent / "aclnn").is_dir() else parent / "include"
    return header.parent
