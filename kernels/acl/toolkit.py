# SPDX-License-Identifier: Apache-2.0
"""Finds the toolkit and its vendor chain. Looks at files and environment values only.

Everything is read again at each call: a platform's start-up code may extend
ASCEND_CUSTOM_OPP_PATH after this package was imported. The results are frozen and hashable, so
that caches keyed by them follow the environment.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from xmoe import env
from xmoe.errors import ConfigError
from xmoe.kernels.acl import files
from xmoe.kernels.acl.problems import Code, Problem

SOFTWARE_ROOT = Path(__file__).parent.parent / "softdev" / "ascend"
"""The software device's tree, laid out as CANN lays out its own."""

DEVICES = ("auto", "soft", "cann")
VENDOR_LIBRARY = Path("op_api") / "lib" / "libcust_opapi.so"
BUILTIN_LIBRARIES = ("libopapi_transformer.so", "libopapi.so")
"""Operator front ends inside the toolkit, newest layout first."""

_CONFIG_INI = "opp/vendors/config.ini"
_NO_CWD = "is relative, and the current folder is gone"
_LIB_DIRS = ("lib64", "aarch64-linux/lib64", "x86_64-linux/lib64", "runtime/lib64", "hccl/lib64")


@dataclass(frozen=True)
class VendorDir:
    """One entry of the vendor chain, in priority order.

    `library` is where its operator front end has to be; the file may be missing.
    `found_via` is the step that named it. `builtin` marks the toolkit's own libraries.
    """

    path: Path
    found_via: str
    library: Path
    builtin: bool = False


@dataclass(frozen=True)
class Skipped:
    """An entry of the search that was passed over, with the reason."""

    entry: str
    found_via: str
    reason: str


@dataclass(frozen=True)
class Toolkit:
    """A toolkit and its vendor chain at one moment.

    `kind` is how it was chosen ("cann", "soft" or "explicit"), `found_via` the step that named the
    root. Nothing may decide on `kind`: it is for reports.
    """

    root: Path
    kind: str
    found_via: str
    lib_dirs: tuple[Path, ...]
    opp_dir: Path
    vendor_dirs: tuple[VendorDir, ...]
    skipped: tuple[Skipped, ...] = ()


@dataclass(frozen=True)
class SearchStep:
    """One place where a toolkit root may be named."""

    name: str
    kind: str
    value: str | None


def find_toolkit(
    device: str | None = None,
    *,
    root: str | os.PathLike[str] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Toolkit:
    """The toolkit to use, and its vendor chain as the environment stands now. Local.

    Args:
        device: "auto", "soft" or "cann"; None reads XMOE_DEVICE (default "auto"). "auto" takes a
            CANN named by the environment, and the software device when none is named.
        root: an explicit toolkit folder; wins over everything.
        environ: the environment to read; None means the process's.

    Raises:
        ConfigError: `device` is none of the three.
        LibraryNotFound: no folder named by a step is a toolkit. A CANN that is named but broken is
            an error: it never becomes the software device by itself.
    """
    steps = _steps(device, root, environ)
    tried = []
    for step in steps:
        if not step.value:
            tried.append(f"{step.name}: not set")
            continue
        folder = _absolute(os.path.expanduser(step.value))
        if folder is None:
            tried.append(f"{step.name}: {step.value} {_NO_CWD}")
            break
        lib_dirs = tuple(folder / d for d in _LIB_DIRS if files.is_dir(folder / d))
        if any(files.exists(d / "libascendcl.so") for d in lib_dirs):
            opp_dir, passed_over = _opp_dir(folder, step.kind, environ)
            chain, skipped = vendor_chain(opp_dir, lib_dirs, environ)
            skipped = (*passed_over, *skipped)
            return Toolkit(folder, step.kind, step.name, lib_dirs, opp_dir, chain, skipped)
        tried.append(
            f"{step.name}: {folder} has no lib64/libascendcl.so "
            f"({files.describe(lib_dirs[0] if lib_dirs else folder)})"
        )
        if step.kind != "soft":
            break
    problem = Problem(Code.TOOLKIT_MISSING, f"no toolkit found. Tried {'; '.join(tried)}")
    raise problem.error()


def check_device(device: str | None) -> None:
    """Raise ConfigError unless it is None or one of `DEVICES`."""
    if device is not None and device not in DEVICES:
        raise ConfigError(
            f"device argument={device!r} is not a device; allowed: {', '.join(DEVICES)}; "
            f"leave it out for 'auto'"
        )


def _steps(
    device: str | None, root: str | os.PathLike[str] | None, environ: Mapping[str, str] | None
) -> tuple[SearchStep, ...]:
    if root is not None:
        return (SearchStep("explicit path", "explicit", os.fspath(root)),)
    origin = "device argument"
    check_device(device)
    if device is None:
        device, origin = env.text("XMOE_DEVICE", environ) or "auto", "XMOE_DEVICE"
    soft = SearchStep("software device tree", "soft", str(SOFTWARE_ROOT))
    if device == "soft":
        return (SearchStep(f"{origin}=soft: software device tree", "soft", str(SOFTWARE_ROOT)),)
    cann = tuple(
        SearchStep(name, "cann", env.text(name, environ))
        for name in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")
    )
    return cann if device == "cann" else (*cann, soft)


def _absolute(text: str) -> Path | None:
    """A path in full; None when it is relative and the current folder is gone."""
    try:
        return Path(text).absolute()
    except OSError:
        return None


def _opp_dir(
    root: Path, kind: str, environ: Mapping[str, str] | None
) -> tuple[Path, tuple[Skipped, ...]]:
    """The operator package folder, and a named one that was passed over. ASCEND_OPP_PATH belongs
    to a CANN only."""
    variable, own = "ASCEND_OPP_PATH", root / "opp"
    named = env.text(variable, environ)
    if kind != "cann" or not named:
        return own, ()
    folder = _absolute(named)
    if folder is not None and files.is_dir(folder):
        return folder, ()
    why = _NO_CWD if folder is None else files.why_no_folder(folder)
    return own, (Skipped(named, variable, f"{why}; {own} is used"),)


def vendor_chain(
    opp_dir: Path, lib_dirs: tuple[Path, ...], environ: Mapping[str, str] | None = None
) -> tuple[tuple[VendorDir, ...], tuple[Skipped, ...]]:
    """Vendors in priority order, and the entries passed over.

    Source: ops-transformer 9.1.0 cmake/scripts/custom/install.sh and set_env.bash (order, colon
    separated list with a trailing colon, comma separated load_priority).
    """
    chain: list[VendorDir] = []
    skipped: list[Skipped] = []
    seen: dict[str, str] = {}

    def add(entry: str, path: Path | None, via: str) -> None:
        real = "" if path is None else os.path.realpath(path)
        if path is None:
            skipped.append(Skipped(entry, via, _NO_CWD))
        elif not files.is_dir(path):
            right, wrong = (",", ":;") if via == _CONFIG_INI else (":", ";,")
            reason = files.why_no_folder(path)
            if any(mark in entry for mark in wrong):
                reason += f"; entries are separated by '{right}' only"
            elif via == _CONFIG_INI and entry.strip()[:1] in ('"', "'"):
                reason += "; names stand there without quotes"
            skipped.append(Skipped(entry, via, reason))
        elif real in seen:
            skipped.append(Skipped(entry, via, f"already in the chain from {seen[real]}"))
        else:
            seen[real] = via
            chain.append(VendorDir(path, via, path / VENDOR_LIBRARY))

    via = "ASCEND_CUSTOM_OPP_PATH"
    value = env.text(via, environ)
    for entry in value.split(":") if value else ():
        if entry.strip():
            add(entry, _absolute(entry.strip()), via)
        else:
            skipped.append(Skipped(entry, via, "empty entry"))
    via = _CONFIG_INI
    names, reason = _load_priority(opp_dir / "vendors" / "config.ini")
    if reason:
        skipped.append(Skipped(str(opp_dir / "vendors" / "config.ini"), via, reason))
    for name in names:
        if not name.strip():
            skipped.append(Skipped(name, via, "empty entry"))
        elif name.strip() in (".", "..") or "/" in name:
            # Only folders beside the file: its writer may not be whoever may install vendors.
            skipped.append(Skipped(name, via, "is not the name of a folder in opp/vendors"))
        else:
            add(name, opp_dir / "vendors" / name.strip(), via)
    for folder in lib_dirs:
        for name in BUILTIN_LIBRARIES:
            known = any(v.builtin and v.library.name == name for v in chain)
            if files.exists(folder / name) and not known:
                chain.append(VendorDir(folder, "built-in", folder / name, builtin=True))
    return tuple(chain), tuple(skipped)


def _load_priority(path: Path) -> tuple[list[str], str]:
    """(vendor names, reason when there are none). A missing file is normal."""
    try:
        lines = _priority_lines(path)
    except FileNotFoundError:
        return [], ""
    except OSError as error:
        return [], f"cannot be read: {error}"
    if not lines:
        return [], "has no load_priority line"
    return lines[0].partition("=")[2].split(","), ""


def load_priority_lines(path: Path) -> list[str]:
    """The load_priority lines of a config.ini as they stand there; none when it cannot be read."""
    try:
        return _priority_lines(path)
    except OSError:
        return []


def _priority_lines(path: Path) -> list[str]:
    parts = ((line, line.partition("=")) for line in files.read_text(path).splitlines())
    return [line for line, (key, eq, _) in parts if eq and key.strip().lower() == "load_priority"]
