# SPDX-License-Identifier: Apache-2.0
"""Which ABI variant a verified MegaMoe library has, from three witnesses.

    pin        abi_variant of the configuration
    metadata   what the operator package says of itself
    probe      return codes of the library (abi_probe.py)

A pin wins over metadata, but nothing wins over the probe: a list that the library's answers exclude
is never called. Witnesses that contradict one another make the variant unknown.
"""

from __future__ import annotations

import json
import os
import stat
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from xmoe import env
from xmoe.kernels.acl import abi_probe
from xmoe.kernels.acl.abi_probe import Verdict
from xmoe.kernels.acl.problems import Code, Problem
from xmoe.kernels.acl.toolkit import Toolkit, VendorDir
from xmoe.kernels.acl.variants import REFUSED, RELEASES, VARIANTS, Variant, find_variant
from xmoe.kernels.acl.versions import OPERATOR_FILE, parse_version, read_info, read_version_text

_CACHE_FORMAT = 2
_OFF = Verdict("off", None, "XMOE_ABI_PROBE=off")


@dataclass(frozen=True)
class Identified:
    """The variant, or why there is none. `source` is a sentence part for reports.

    pinned, metadata   what these witnesses say, None when nothing
    metadata_source    the file or release it was read from, or why it says nothing
    """

    variant: Variant | None
    source: str
    problem: Problem | None
    pinned: str | None
    metadata: str | None
    metadata_source: str
    probe: Verdict


def vendor_version(toolkit: Toolkit, vendor: VendorDir) -> str:
    """The operator package's version as its file spells it, or an empty string."""
    if vendor.builtin:
        return read_version_text(toolkit.root / OPERATOR_FILE)
    return read_version_text(vendor.path / "version.info")


def read_metadata(toolkit: Toolkit, vendor: VendorDir) -> tuple[Variant | None, str]:
    """(variant, where it was read) by the package's own words.

    `mega_moe_abi` in the vendor's version.info is this project's own convention. A release number
    counts only where public source shows the variant.
    """
    file = vendor.path / "version.info"
    stated = "" if vendor.builtin else read_info(file).get("mega_moe_abi", "")
    if stated in VARIANTS:
        return VARIANTS[stated], f"mega_moe_abi in {file}"
    if stated:
        why = f": {REFUSED[stated]}" if stated in REFUSED else ""
        return None, f"mega_moe_abi={stated!r} in {file} is no callable variant{why}"
    text = vendor_version(toolkit, vendor)
    version = parse_version(text)
    if version is not None:
        for release, variant_id in RELEASES.items():
            if parse_version(release) == version:
                return find_variant(variant_id), f"operator package release {version}"
    return None, f"operator package version {text or 'unknown'!r}"


def identify(
    toolkit: Toolkit,
    vendor: VendorDir,
    library: Path,
    base_libraries: Sequence[Path],
    pinned: str | None,
) -> Identified:
    """Hear the witnesses about a library whose symbols were verified. Local.

    Raises:
        ConfigError: the pinned id cannot be called.
    """
    pin = None if pinned is None else find_variant(pinned)
    metadata, where = read_metadata(toolkit, vendor)
    verdict = probe_library(library, base_libraries)
    return conclude(library, pin, metadata, where, verdict)


def conclude(
    library: Path,
    pin: Variant | None,
    metadata: Variant | None,
    metadata_source: str,
    verdict: Verdict,
) -> Identified:
    """Weigh what the witnesses said."""

    def result(variant: Variant | None, source: str, problem: Problem | None = None) -> Identified:
        said = (None if pin is None else pin.id, None if metadata is None else metadata.id)
        return Identified(variant, source, problem, *said, metadata_source, verdict)

    confirmed = f", confirmed by the return-code probe ({verdict.reason})"
    unchecked = f", not confirmed: probe {verdict}"
    suffix = confirmed if verdict.status == "identified" else unchecked
    if pin is not None:
        if verdict.allows(pin.id):
            return result(pin, f"pinned by abi_variant{suffix}")
        text = (
            f"abi_variant={pin.id} is pinned, but the return-code probe of {library} says {verdict}"
        )
        return result(None, "pin and probe disagree", Problem(Code.VARIANT_MISMATCH, text))
    if metadata is not None:
        if verdict.allows(metadata.id):
            return result(metadata, f"{metadata_source}{suffix}")
        text = (
            f"{library}: {metadata_source} means variant {metadata.id}, but the return-code probe "
            f"says {verdict}"
        )
        return result(None, "metadata and probe disagree", Problem(Code.VARIANT_UNKNOWN, text))
    if verdict.status == "identified":
        assert verdict.variant is not None
        return result(VARIANTS[verdict.variant], f"return-code probe ({verdict.reason})")
    text = (
        f"{library} exports aclnnMegaMoeGetWorkspaceSize, but its ABI variant is not known "
        f"({metadata_source}; probe {verdict})"
    )
    return result(None, f"{metadata_source}; probe {verdict}", Problem(Code.VARIANT_UNKNOWN, text))


@dataclass(frozen=True)
class FileIdentity:
    """One state of one file: a rebuilt or replaced library is another one.

    The time of the last change of any kind counts too: content and modification time can be set.
    """

    path: str
    device: int
    inode: int
    mtime_ns: int
    ctime_ns: int
    size: int

    @classmethod
    def of(cls, path: Path) -> FileIdentity:
        found = os.stat(path)
        real = os.path.realpath(path)
        times = (found.st_mtime_ns, found.st_ctime_ns)
        return cls(real, found.st_dev, found.st_ino, *times, found.st_size)

    def numbers(self) -> tuple[int, int, int, int, int]:
        """Everything but the path."""
        return self.device, self.inode, self.mtime_ns, self.ctime_ns, self.size


_lock = threading.Lock()
_verdicts: dict[FileIdentity, Verdict] = {}
_opened: set[FileIdentity] = set()


def _renew_lock_in_child() -> None:
    # Another thread may have held it at fork; in the child nobody would release it.
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock_in_child)


def probe_library(library: Path, base_libraries: Sequence[Path]) -> Verdict:
    """The probe's verdict on a file, made once per state of the file. Thread-safe; may block.

    Only what is evidence about the file is kept, in this process and, when XMOE_ABI_CACHE names a
    folder, there. A probe that could not be made is tried again next time.
    """
    if env.text("XMOE_ABI_PROBE") == "off":
        return _OFF
    timeout_s = env.get("XMOE_ABI_PROBE_TIMEOUT_S")
    assert isinstance(timeout_s, float)
    folder = env.text("XMOE_ABI_CACHE")
    try:
        identity = FileIdentity.of(library)
    except OSError as error:
        return Verdict("unavailable", None, f"the file cannot be looked at: {error}")
    with _lock:  # one probe at a time: callers that race for one file share it
        known = _verdicts.get(identity)
        if known is None and folder is not None:
            known = _read(Path(folder), identity)
        if known is not None:
            _verdicts[identity] = known
            return replace(known, cached=True)
        verdict = abi_probe.run(library, identity.numbers(), base_libraries, timeout_s)
        if verdict.says_something:
            _verdicts[identity] = verdict
            # What depends on the moment (a busy machine, an unlucky signal) is not kept for others.
            if folder is not None and verdict.status not in ("hung", "crashed"):
                _write(Path(folder), identity, verdict)
        return verdict


def opening_harm(library: Path, base_libraries: Sequence[Path]) -> str:
    """What becomes of a process that opens this file; empty for nothing, or when it cannot be told.

    A constructor that crashes would take this process with it. Tried once per state of the file;
    not at all with XMOE_ABI_PROBE=off. Thread-safe; may block.
    """
    if env.text("XMOE_ABI_PROBE") == "off":
        return ""
    timeout_s = env.get("XMOE_ABI_PROBE_TIMEOUT_S")
    assert isinstance(timeout_s, float)
    try:
        identity = FileIdentity.of(library)
    except OSError:
        return ""
    with _lock:
        folder = env.text("XMOE_ABI_CACHE")
        if identity in _opened or identity in _verdicts:
            return ""
        if folder is not None and _read(Path(folder), identity) is not None:
            return ""  # a child opened and probed this very file before
        harm = abi_probe.opening_harm(library, identity.numbers(), base_libraries, timeout_s)
        if not harm:
            _opened.add(identity)
        return harm


def _entry(folder: Path, identity: FileIdentity) -> Path:
    numbers = "-".join(f"{n:x}" for n in identity.numbers())
    return folder / f"megamoe-abi-{numbers}.json"


def _read(folder: Path, identity: FileIdentity) -> Verdict | None:
    """A kept verdict; None when there is none, when it is damaged, or when others could write it.

    A forged entry would make this process call a library with a wrong argument list.
    """
    path = _entry(folder, identity)
    try:
        for place in (folder, path):
            found = place.lstat()
            if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                return None
        kept: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if kept["format"] != _CACHE_FORMAT or kept["identity"] != asdict(identity):
            return None
        verdict = Verdict(str(kept["status"]), kept["variant"], str(kept["reason"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    known = verdict.variant is None or verdict.variant in VARIANTS
    return verdict if known and verdict.status in ("identified", "ambiguous", "foreign") else None


def _write(folder: Path, identity: FileIdentity, verdict: Verdict) -> None:
    """Keep a verdict. A folder that cannot be written costs the next process a probe, no more."""
    kept = {"format": _CACHE_FORMAT, "identity": asdict(identity), **asdict(verdict)}
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        number, name = tempfile.mkstemp(dir=folder, suffix=".part")
        with os.fdopen(number, "w", encoding="utf-8") as file:
            json.dump(kept, file)
        os.replace(name, _entry(folder, identity))
    except OSError:
        return
