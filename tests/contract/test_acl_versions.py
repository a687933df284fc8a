# SPDX-License-Identifier: Apache-2.0
"""Version files of the toolkit, wherever they moved, and versions that compare as numbers."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from xmoe.kernels.acl.versions import parse_version, toolkit_version

ASCENDING = [
    "8.0.0.alpha003",
    "8.0.RC1",
    "8.0.RC2",
    "8.0.0",
    "8.5.0",
    "9.1.0-alpha.9",
    "9.1.0-beta.2",
    "9.1.0-beta.10",
    "9.1.0.pre",
    "9.1.0",
    "9.1.1",
    "9.9.0",
    "9.10.0",
    "10.0.0-beta.1",
    "10.0",
]


@pytest.mark.parametrize(("low", "high"), list(itertools.pairwise(ASCENDING)))
def test_order_is_numeric_and_a_prerelease_comes_first(low: str, high: str) -> None:
    first, second = parse_version(low), parse_version(high)
    assert first is not None and second is not None and first < second and first != second


@pytest.mark.parametrize("text", ["", "latest", "9..1", "9.1.0-gamma.1", "9.1.0+cann", "v", "-9.1"])
def test_anything_else_is_unknown(text: str) -> None:
    assert parse_version(text) is None


def test_equal_versions_are_equal() -> None:
    assert parse_version("9.1") == parse_version("9.1.0") == parse_version("V9.1.0.0")
    assert len({parse_version("9.1"), parse_version("9.1.0")}) == 1


@pytest.mark.parametrize(
    "place", ["version.info", "compiler/version.info", "opp/version.info",
              "share/info/runtime/version.info"],
)  # fmt: skip
@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"Version=9.1.0\nversion_dir=9.1.0\n", "9.1.0"),
        (b"# head\r\nVersion=9.1.0\r\ntimestamp=1\r\n", "9.1.0"),
        (b"VERSION = 9.10.0\n", "9.10.0"),
        (b'\xef\xbb\xbfversion="9.1.0-beta.2"\n', "9.1.0-beta.2"),
    ],
)
def test_every_known_place_and_spelling_is_read(
    place: str, content: bytes, text: str, tmp_path: Path
) -> None:
    file = tmp_path / place
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
    report = toolkit_version(tmp_path)
    assert str(report.version) == text and report.warnings == ()
    assert report.found == ((str(file), text),)


def test_nowhere_is_unknown_and_says_where_it_looked(tmp_path: Path) -> None:
    report = toolkit_version(tmp_path)
    assert report.version is None
    assert "compiler/version.info" in report.warnings[0] and "unknown" in report.warnings[0]


def test_two_differing_files_warn_with_both(tmp_path: Path) -> None:
    (tmp_path / "opp").mkdir()
    (tmp_path / "version.info").write_text("Version=9.1.0\n")
    (tmp_path / "opp/version.info").write_text("Version=9.0.0\n")
    report = toolkit_version(tmp_path)
    assert str(report.version) == "9.1.0"
    assert len(report.warnings) == 1 and all(v in report.warnings[0] for v in ("9.1.0", "9.0.0"))
    (tmp_path / "opp/version.info").write_text("Version=9.1\n")
    assert toolkit_version(tmp_path).warnings == ()


def test_an_unreadable_value_is_unknown_not_old(tmp_path: Path) -> None:
    (tmp_path / "version.info").write_text("Version=latest\n")
    report = toolkit_version(tmp_path)
    assert report.version is None and "'latest'" in report.warnings[0]
