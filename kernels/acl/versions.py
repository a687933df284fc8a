# SPDX-License-Identifier: Apache-2.0
"""Version files of a CANN toolkit, and versions that compare as numbers.

The file moved between releases, so all known places are read. A version that cannot be read is
unknown, never "old" or "newest".
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import total_ordering
from pathlib import Path

from xmoe.kernels.acl import files

TOOLKIT_FILES = (
    "version.info",
    "compiler/version.info",
    "opp/version.info",
    "runtime/version.info",
    "share/info/runtime/version.info",
    "share/info/compiler/version.info",
    "share/info/opp/version.info",
)
"""Source: xllm-ops pull request 24 (root, compiler, opp); share/info as CANN 9 installs it."""

OPERATOR_FILE = "share/info/ops_transformer/version.info"

_STAGES = {"dev": 0, "a": 1, "alpha": 1, "b": 2, "beta": 2, "pre": 3, "preview": 3, "rc": 4}
_RELEASE = 9
_VERSION = re.compile(
    r"^v?(?P<numbers>\d+(?:\.\d+)*)"
    r"(?:[-._]?(?P<stage>dev|alpha|beta|preview|pre|rc|a|b)[-._]?(?P<stage_number>\d*))?$",
    re.IGNORECASE,
)


@total_ordering
@dataclass(frozen=True)
class Version:
    """A version that sorts by number; a pre-release sorts before its release."""

    text: str
    numbers: tuple[int, ...]
    stage: int
    stage_number: int

    def _key(self) -> tuple[tuple[int, ...], int, int]:
        numbers = self.numbers
        while numbers and numbers[-1] == 0:
            numbers = numbers[:-1]  # 9.1 and 9.1.0 are one version
        return numbers, self.stage, self.stage_number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Version) and self._key() == other._key()

    def __lt__(self, other: Version) -> bool:
        return self._key() < other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __str__(self) -> str:
        return self.text


def parse_version(text: str) -> Version | None:
    """A version such as 9.1.0, 9.10, 9.1.0-beta.2 or 8.0.RC1; None when it is none of these."""
    text = text.strip()
    match = _VERSION.match(text)
    if match is None:
        return None
    numbers = tuple(int(n) for n in match["numbers"].split("."))
    if match["stage"] is None:
        return Version(text, numbers, _RELEASE, 0)
    return Version(text, numbers, _STAGES[match["stage"].lower()], int(match["stage_number"] or 0))


@dataclass(frozen=True)
class VersionReport:
    """What the version files say. `version` is None when unknown; `found` holds (file, text)."""

    version: Version | None
    found: tuple[tuple[str, str], ...]
    warnings: tuple[str, ...]


def read_info(path: Path) -> dict[str, str]:
    """`key=value` lines of a version file with lower-case keys; empty when it cannot be read."""
    try:
        text = files.read_text(path)
    except OSError:
        return {}
    pairs = (line.split("=", 1) for line in text.splitlines() if "=" in line)
    return {k.strip().lower(): v.strip().strip("\"'") for k, v in pairs}


def read_version_text(path: Path) -> str:
    """The version named by a version file, or an empty string."""
    info = read_info(path)
    return info.get("version") or info.get("package_version") or ""


def toolkit_version(root: Path) -> VersionReport:
    """The toolkit's version from all known places; the first place that has one wins."""
    found, warnings = [], []
    version = None
    for place in TOOLKIT_FILES:
        text = read_version_text(root / place)
        if not text:
            continue
        found.append((str(root / place), text))
        parsed = parse_version(text)
        if parsed is None:
            warnings.append(f"{root / place} says {text!r}, which is not a version number")
        elif version is None:
            version = parsed
        elif parsed != version:
            warnings.append(
                f"version files differ: {version.text!r} (used) and {text!r} in {root / place}"
            )
    if not found:
        warnings.append(
            f"no version file under {root}; looked at {', '.join(TOOLKIT_FILES)}: version unknown"
        )
    return VersionReport(version, tuple(found), tuple(warnings))
