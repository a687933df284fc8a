# SPDX-License-Identifier: Apache-2.0
"""Device packages that are there by name only: a plain file, an empty folder, a broken one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from support.tree import ROOT

NAMES = ("torch_npu", "cann_ops_transformer")
PROBE = f"""
import json, os, sys
before = dict(os.environ)
import xmoe
from xmoe import doctor
from xmoe.kernels import capability
states = [[(s.available, s.error) for s in map(capability.module_state, {NAMES!r})] for _ in "12"]
facts = [capability.probe("soft").to_dict()["problems"] for _ in "12"]
report = doctor.collect("soft")["torch_npu"]["usable"]
unchanged = dict(os.environ) == before
print(json.dumps([states, facts, report, unchanged, "torch" in sys.modules]))
"""


def plain_file(place: Path) -> None:
    place.write_text("not a package\n")


def empty_folder(place: Path) -> None:
    place.mkdir()


def broken_package(place: Path) -> None:
    place.mkdir()
    (place / "__init__.py").write_text("raise OSError('libascend_hal.so: cannot open')\n")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (None, "No module named"),
        (plain_file, "No module named"),
        (empty_folder, "empty folder"),
        (broken_package, "OSError: libascend_hal.so: cannot open"),
    ],
    ids=["absent", "file", "folder", "broken"],
)
def test_what_is_there_by_name_only_is_unavailable_and_harmless(
    make: Callable[[Path], None] | None, said: str, tmp_path: Path
) -> None:
    if make is not None:
        for name in NAMES:
            make(tmp_path / name)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    done = subprocess.run(
        [sys.executable, "-c", PROBE], cwd="/", env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    states, facts, usable, unchanged, torch = json.loads(done.stdout)
    assert states[0] == states[1] and facts[0] == facts[1] == []
    assert [available for available, _ in states[0]] == [False, False]
    assert all(said in (error or "") for _, error in states[0]), states[0]
    assert usable is False
    assert unchanged and not torch
