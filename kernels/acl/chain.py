# SPDX-License-Identifier: Apache-2.0
"""Looks over the whole vendor chain: what a report shows, what is wrong, what is only odd.

`vendor.py` decides whether MegaMoe's symbols can be used. This module adds what lies around them:
files and their owners, packages that do not belong together, settings that came too late for
others. It reads files and asks the dynamic linker; it changes and loads nothing.
"""

from __future__ import annotations

import json
import os
import pwd
import stat
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from xmoe import env
from xmoe.kernels.acl import elf, files, libraries, loader, vendor, versions
from xmoe.kernels.acl.loader import Runtime
from xmoe.kernels.acl.problems import Code, Problem
from xmoe.kernels.acl.toolkit import BUILTIN_LIBRARIES, Toolkit, load_priority_lines
from xmoe.kernels.acl.vendor import SYMBOLS, ChainEntry, MegaMoeSymbols
from xmoe.kernels.acl.versions import Version, parse_version, read_info

UMBRELLA = "libopapi.so"
SPLIT = tuple(f"libopapi_{part}.so" for part in ("transformer", "math", "nn", "cv", "legacy"))

_GONE = ("does not exist", "cannot be looked at")
_NEXT_STEPS = {
    "provides MegaMoe": "",
    "shadowed": "nothing to do; to use this one, put it first",
    "no MegaMoe symbols": "",
}
# Attribute of the operator's kernel package -> parameter of the front end. Inferred from the order
# in which both appeared; a difference is a hint, not a proof.
_ATTRIBUTES = {
    "topo_type": "topoType",
    "rank_num_per_server": "rankNumPerServer",
    "topk_weights_type": "topkWeightsType",
}


@dataclass
class Findings:
    """`parts` of the report, JSON-able; what forbids MegaMoe; and what does not."""

    parts: dict[str, Any] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def inspect(
    toolkit: Toolkit, runtime: Runtime | None = None, symbols: MegaMoeSymbols | None = None
) -> Findings:
    """Look the chain over. Local.

    Args:
        runtime: the loaded toolkit, None when it cannot be loaded.
        symbols: MegaMoe's verified symbols, None when there are none.
    """
    found = Findings()
    chain = vendor.inspect_chain(toolkit)
    found.parts["vendor_chain"] = [_entry(entry, found) for entry in chain]
    found.parts["skipped"] = [asdict(entry) for entry in toolkit.skipped]
    _search_path(toolkit, found)
    _config_file(toolkit, chain, found)
    _builtin(toolkit, runtime, found)
    _packages(toolkit, chain, symbols, found)
    _environment(found)
    _loaded(runtime, found)
    return found


# ---- files


def _entry(entry: ChainEntry, found: Findings) -> dict[str, Any]:
    place = entry.vendor
    notes = []
    if files.exists(place.library):
        notes += file_notes(place.library)
        real_folder = os.path.realpath(place.path)
        real = os.path.realpath(place.library)
        if not Path(real).is_relative_to(real_folder):
            notes.append(f"{place.library.name} is a link out of the folder, to {real}")
    found.warnings += [f"{place.path}: {note}" for note in notes]
    remedy = _NEXT_STEPS.get(entry.verdict, "reinstall the package, or take it out of the chain")
    return {
        "path": str(place.path),
        "realpath": os.path.realpath(place.path),
        "found_via": place.found_via,
        "builtin": place.builtin,
        "library": str(place.library),
        "version": entry.version or None,
        "symbols": list(entry.symbols),
        "verdict": entry.verdict,
        "remedy": remedy,
        "owner": _owner(place.library if files.exists(place.library) else place.path),
        "notes": notes,
    }


def _owner(path: Path) -> str | None:
    try:
        number = path.stat().st_uid
    except OSError:
        return None
    return _user_name(number)


def _user_name(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"user {number}"


def file_notes(path: Path, user: int | None = None) -> list[str]:
    """What is odd about who may write to a library file. Sentences.

    The dynamic linker looks at no owner: it loads whatever the path leads to, with this process'
    rights. Only programs with raised rights make it ignore LD_PRELOAD and LD_LIBRARY_PATH.
    """
    me = os.geteuid() if user is None else user
    found = []
    for place in (path, path.parent):
        try:
            state = place.stat()
        except OSError as error:
            return [f"cannot be looked at: {error}"]
        if state.st_uid not in (me, 0):
            found.append(
                f"{place} belongs to {_user_name(state.st_uid)}, not to {_user_name(me)} or root; "
                f"the loader takes it all the same, so that user's code runs with your rights"
            )
        sticky = files.is_dir(place) and state.st_mode & stat.S_ISVTX
        if state.st_mode & stat.S_IWOTH and not sticky:
            found.append(f"{place} can be written by everybody; the loader takes it all the same")
    return found


# ---- the search


def _search_path(toolkit: Toolkit, found: Findings) -> None:
    variable = "ASCEND_CUSTOM_OPP_PATH"
    for entry in toolkit.skipped:
        if entry.found_via == variable and entry.reason.startswith(_GONE):
            found.warnings.append(
                f"{variable}: {entry.entry!r} {entry.reason}; some engines' own search (xLLM's "
                f"helper) stops there and never sees the entries behind it; remove it"
            )
        elif entry.found_via == "ASCEND_OPP_PATH" or "cannot be read" in entry.reason:
            found.warnings.append(f"{entry.entry} ({entry.found_via}) {entry.reason}")
    for text in (env.text(variable) or "").split(":"):
        if text.strip() != text and text.strip():
            found.warnings.append(
                f"{variable}: {text!r} is read here without the blanks around it; other programs "
                f"take them as part of the name; remove them"
            )
        if text.strip() and not os.path.isabs(text.strip()):
            found.warnings.append(
                f"{variable}: {text!r} is relative to the current folder; write it in full"
            )


def _config_file(toolkit: Toolkit, chain: Iterable[ChainEntry], found: Findings) -> None:
    folder = toolkit.opp_dir / "vendors"
    lines = load_priority_lines(folder / "config.ini")
    if len(lines) > 1:
        found.warnings.append(
            f"{folder}/config.ini has {len(lines)} load_priority lines; the first one counts here, "
            f"others may take another"
        )
    if lines and not lines[0].startswith("load_priority="):
        found.warnings.append(
            f"{folder}/config.ini writes {lines[0]!r}; the vendor's own loaders want a line that "
            f"starts with exactly 'load_priority='"
        )
    known = {os.path.realpath(entry.vendor.path) for entry in chain}
    try:
        installed = sorted(p for p in folder.iterdir() if files.is_dir(p))
    except OSError:
        installed = []
    left_out = [str(p) for p in installed if os.path.realpath(p) not in known]
    found.parts["not_in_chain"] = left_out


def _builtin(toolkit: Toolkit, runtime: Runtime | None, found: Findings) -> None:
    """The toolkit's own front ends: several split ones, or one umbrella."""
    present = []
    loaded = set()
    if runtime is not None:
        loaded = {os.path.realpath(p) for p in libraries.loaded_objects(runtime.native)}
    for folder in toolkit.lib_dirs:
        for name in (*SPLIT, UMBRELLA):
            path = folder / name
            if files.exists(path):
                defined = elf.inspect(path, SYMBOLS).defined
                if defined and name not in BUILTIN_LIBRARIES:
                    names = ", ".join(s for s in SYMBOLS if s in defined)
                    found.warnings.append(
                        f"{path} defines {names}; not used: of the toolkit's libraries only "
                        f"{' and '.join(BUILTIN_LIBRARIES)} are asked for MegaMoe"
                    )
                present.append(
                    {
                        "path": str(path),
                        "kind": "umbrella" if name == UMBRELLA else "split",
                        "symbols": [s for s in SYMBOLS if s in defined],
                        "loaded": os.path.realpath(path) in loaded,
                    }
                )
    found.parts["builtin"] = present
    for state, sentence in (
        ("symbols", "both define MegaMoe"),
        ("loaded", "are both loaded in this process"),
    ):
        kinds = {one["kind"]: one["path"] for one in present if one[state]}
        if len(kinds) == 2:
            found.warnings.append(
                f"{kinds['split']} and the umbrella {kinds['umbrella']} {sentence}; they must not "
                f"be mixed: link and preload only one kind"
            )


# ---- packages


def _packages(
    toolkit: Toolkit,
    chain: tuple[ChainEntry, ...],
    symbols: MegaMoeSymbols | None,
    found: Findings,
) -> None:
    """Front end, kernels and toolkit come from three searches; do they belong together?"""
    report = versions.toolkit_version(toolkit.root)
    provider = next((e for e in chain if symbols is not None and e.vendor == symbols.vendor), None)
    front_end = "" if provider is None else provider.version
    info = {} if provider is None else read_info(provider.vendor.path / "version.info")
    built_for = info.get("custom_opp_compiler_version", "")
    kernels = {str(e.vendor.path): _kernel_attributes(e) for e in chain if not e.vendor.builtin}
    found.parts["packages"] = {
        "toolkit": None if report.version is None else str(report.version),
        "front_end": front_end or None,
        "front_end_built_for": built_for or None,
        "kernels": {path: attributes for path, attributes in kernels.items() if attributes},
    }
    if provider is None:
        return
    for what, text in (("is", front_end), ("was built for", built_for)):
        if report.version is not None and _other_release(report.version, parse_version(text)):
            found.problems.append(
                Problem(
                    Code.VERSION_MISMATCH,
                    f"the operator package {provider.vendor.path} {what} {text}, the toolkit "
                    f"{toolkit.root} is {report.version}; such a mixture ends in 561114, 561115 "
                    f"or silently lost attributes",
                )
            )
            break
    _kernel_package(provider, kernels, symbols, found)


def _other_release(one: Version, other: Version | None) -> bool:
    """Whether the numbers before a pre-release part differ; 9.1 and 9.1.0 are one release."""
    if other is None:
        return False
    first, second = (tuple([*v.numbers, 0, 0, 0][:3]) for v in (one, other))
    return first != second


def _kernel_attributes(entry: ChainEntry) -> list[str] | None:
    """Attributes of MegaMoe in the kernel package of a vendor, None when it has no MegaMoe there.

    Source: ops-transformer 9.1.0, the installed layout of a custom package.
    """
    for file in sorted(entry.vendor.path.glob("op_impl/ai_core/tbe/config/*/*ops-info.json")):
        try:
            operator = json.loads(files.read_bytes(file)).get("MegaMoe")
        except (OSError, ValueError, AttributeError, RecursionError):
            continue
        if isinstance(operator, dict):
            listed = operator.get("attr")
            text = listed.get("list", "") if isinstance(listed, dict) else ""
            return [word.strip() for word in str(text).split(",") if word.strip()] or ["unnamed"]
    return None


def _kernel_package(
    provider: ChainEntry,
    kernels: dict[str, list[str] | None],
    symbols: MegaMoeSymbols | None,
    found: Findings,
) -> None:
    mine = kernels.get(str(provider.vendor.path))
    others = [path for path, attributes in kernels.items() if attributes]
    if mine is None:
        if others:
            found.problems.append(
                Problem(
                    Code.MIXED_PACKAGES,
                    f"MegaMoe's front end is {provider.vendor.library}, its kernels are only in "
                    f"{others[0]}",
                )
            )
        return
    variant = None if symbols is None else symbols.variant
    if variant is None:
        return
    odd = [
        name
        for name, key in _ATTRIBUTES.items()
        if (name in mine) != variant.has(key) and mine != ["unnamed"]
    ]
    if odd:
        found.warnings.append(
            f"the kernels in {provider.vendor.path} list the attributes {', '.join(mine)}; with "
            f"ABI variant {variant.id} of the front end {', '.join(odd)} would be "
            f"{'missing' if variant.has(_ATTRIBUTES[odd[0]]) else 'unset'} (561115, 561114)"
        )


# ---- the process


def _environment(found: Findings) -> None:
    """Chain variables at process start, at our first load, and now."""
    at_load = loader.environment_at_load()
    rows = {}
    for name in loader.CHAIN_VARIABLES:
        values = {
            "at_start": env.at_process_start(name),
            "at_load": None if at_load is None else at_load[name],
            "now": env.text(name),
        }
        rows[name] = values
        old = values["at_start"] or None
        if old != values["now"]:
            found.warnings.append(
                f"{name} was {old!r} when this process started and is {values['now']!r} now; this "
                f"package reads it again each time, but extensions that read it once when they are "
                f"loaded (op-plugin, engines) may hold the old value: set it before the start"
            )
        if at_load is not None and values["at_load"] != values["now"]:
            found.warnings.append(
                f"{name} was {values['at_load']!r} when libraries were first loaded and is "
                f"{values['now']!r} now; what is loaded stays loaded"
            )
    for name in ("LD_PRELOAD", "LD_LIBRARY_PATH", "LD_AUDIT"):
        rows[name] = {"at_start": env.at_process_start(name)}
    audit = rows["LD_AUDIT"]["at_start"]
    if audit:
        found.warnings.append(
            f"LD_AUDIT={audit}: such a library may redirect any call, which nothing here can see"
        )
    found.parts["environment"] = rows


def _loaded(runtime: Runtime | None, found: Findings) -> None:
    loaded: list[dict[str, Any]] = []
    interposed: list[dict[str, str]] = []
    if runtime is not None:
        for lib in runtime.libraries:
            replaced = libraries.was_replaced(lib.path)
            loaded.append(
                {
                    "name": lib.name,
                    "path": str(lib.path),
                    "realpath": os.path.realpath(lib.path),
                    "found_via": lib.found_via,
                    "already_loaded": lib.already_loaded,
                    "other_copies": [str(p) for p in lib.other_copies],
                    "replaced_on_disk": replaced,
                }
            )
            if replaced:
                found.warnings.append(
                    f"{lib.path} was replaced on disk after this process loaded it; the old code "
                    f"still runs: start a new process"
                )
        for name, file in loader.interposed_functions(runtime):
            interposed.append({"function": name, "file": file})
            found.warnings.append(f"{name} is shadowed in the process by {file}")
    found.parts["libraries"] = loaded
    found.parts["interposed"] = interposed
