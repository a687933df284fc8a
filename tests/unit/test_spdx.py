# SPDX-License-Identifier: Apache-2.0
"""Every file that can hold a comment names its licence in its first lines."""

from __future__ import annotations

import subprocess

import pytest

from support.tree import ROOT

TAG = "SPDX-License-Identifier: Apache-2.0"
SUFFIXES = {".py", ".sh", ".c", ".h", ".cpp", ".hpp", ".inc", ".toml", ".txt", ".in", ".yml"}
NAMES = {"run", ".gitignore"}


def tracked() -> list[str]:
    """Files git tracks or would track."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    return [name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def test_every_source_file_names_its_licence() -> None:
    checked = 0
    missing = []
    for name in tracked():
        path = ROOT / name
        if path.is_symlink() or not (path.suffix in SUFFIXES or path.name in NAMES):
            continue
        checked += 1
        head = path.read_text(encoding="utf-8").splitlines()[:3]
        if not any(TAG in line for line in head):
            missing.append(name)
    assert checked > 20
    assert missing == []


def test_licence_text_is_complete() -> None:
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text
