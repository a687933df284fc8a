# SPDX-License-Identifier: Apache-2.0
"""The scripts people and CI share, with a stand-in for the interpreter.

Nothing is installed here.
"""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.tree import ROOT

FOLDERS = ("kernels", "policy", "comm", "models")
SUITE = (
    '<testsuites><testsuite tests="{}" failures="{}" errors="{}" skipped="{}" time="1"/>'
    "</testsuites>"
)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Enough of a checkout for ci/setup.sh, and an environment whose python keeps a log."""
    root = tmp_path / "checkout"
    for folder in (*FOLDERS, "xmoe"):
        (root / folder).mkdir(parents=True)
    shutil.copytree(ROOT / "ci", root / "ci")
    for name in ("pyproject.toml", "setup.py"):
        shutil.copy(ROOT / name, root)
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\necho "$@" >>{tmp_path / "log"}\n')
    python.chmod(0o755)
    return root


def setup(root: Path) -> subprocess.CompletedProcess[str]:
    venv = root.parent / "venv"
    env = {**os.environ, "XMOE_VENV": str(venv), "XMOE_PYTHON": str(venv / "bin" / "python")}
    script = ["bash", str(root / "ci" / "setup.sh")]
    return subprocess.run(script, env=env, cwd="/", capture_output=True, text=True)


def pip_calls(root: Path) -> list[str]:
    return [line for line in (root.parent / "log").read_text().splitlines() if " pip " in line]


def test_setup_recreates_lost_links(checkout: Path) -> None:
    # What git leaves on a file system without links: a text file with the target in it.
    (checkout / "xmoe" / "comm").write_text("../comm")
    assert setup(checkout).returncode == 0
    for folder in FOLDERS:
        assert os.readlink(checkout / "xmoe" / folder) == f"../{folder}"


def test_setup_does_not_delete_a_folder(checkout: Path) -> None:
    precious = checkout / "xmoe" / "policy" / "mine.py"
    precious.parent.mkdir()
    precious.touch()
    done = setup(checkout)
    assert done.returncode == 1
    assert "xmoe/policy is a folder, expected a link to ../policy" in done.stderr
    assert precious.exists()


def test_setup_installs_exact_versions_once(checkout: Path) -> None:
    assert setup(checkout).returncode == 0
    calls = pip_calls(checkout)
    assert calls
    assert all("-c ci/constraints.txt" in call for call in calls)
    assert setup(checkout).returncode == 0
    assert pip_calls(checkout) == calls, "nothing changed: pip has nothing to do"
    with open(checkout / "pyproject.toml", "a") as file:
        file.write("# changed\n")
    assert setup(checkout).returncode == 0
    assert len(pip_calls(checkout)) == 2 * len(calls)


def test_constraints_are_exact_and_cover_the_dependencies() -> None:
    lines = (ROOT / "ci" / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    needed = {
        "torch",
        "numpy",
        "cffi",
        "safetensors",
        "transformers",
        "rich",
        "pytest",
        "ruff",
        "mypy",
    }
    assert needed <= set(pins)
    assert pins["torch"] == "2.13.0"


@pytest.mark.parametrize(
    ("suites", "code", "closing"),
    [
        ({"unit": (5, 0, 0, 1), "ep": (3, 0, 0, 0)}, 0, "7 passed, 0 failed, 1 skipped"),
        ({"unit": (5, 1, 1, 0)}, 1, "3 passed, 2 failed, 0 skipped"),
        # An empty run must not look green.
        ({"unit": (5, 0, 0, 0), "ep": (0, 0, 0, 0)}, 1, "5 passed, 0 failed, 0 skipped"),
        ({"ep": (2, 0, 0, 2)}, 1, "0 passed, 0 failed, 2 skipped"),
    ],
)
def test_total(tmp_path: Path, suites: dict[str, tuple[int, ...]], code: int, closing: str) -> None:
    for name, numbers in suites.items():
        (tmp_path / f"{name}.xml").write_text(SUITE.format(*numbers))
    script = [sys.executable, str(ROOT / "ci" / "total.py"), str(tmp_path)]
    done = subprocess.run(script, capture_output=True, text=True)
    assert done.returncode == code
    assert done.stdout.splitlines()[-1] == closing


def test_size_measures_files_and_functions() -> None:
    size = runpy.run_path(str(ROOT / "ci" / "size.py"))
    text = "def f():\n" + "    pass\n" * 99 + "class A:\n    def g(self): pass\n"
    rows = size["measure"](Path("m.py"), text)
    assert [(lines, what) for lines, _, _, what in rows] == [
        (102, "m.py"),
        (100, "m.py:f"),
        (1, "m.py:g"),
    ]


def test_unknown_group_is_refused_before_anything_runs(checkout: Path) -> None:
    venv = checkout.parent / "venv"
    done = subprocess.run(
        ["bash", str(checkout / "ci" / "test.sh"), "untit"],
        env={**os.environ, "XMOE_VENV": str(venv), "XMOE_PYTHON": str(venv / "bin" / "python")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    groups = "check unit contract ep sanitize npu device"
    assert f"unknown group 'untit'; allowed: {groups}" in done.stderr
    assert not (checkout.parent / "log").exists()


def ci_run(root: Path, quickstart: str, test: str) -> subprocess.CompletedProcess[str]:
    """.ci/run in a checkout whose commands are the given shell lines."""
    shutil.copytree(ROOT / ".ci", root / ".ci")
    (root / "README.md").write_text("bash ci/quickstart.sh\nbash ci/test.sh\nbash ci/test.sh npu\n")
    (root / "ci" / "quickstart.sh").write_text(quickstart)
    (root / "ci" / "test.sh").write_text(test)
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    script = ["bash", str(root / ".ci" / "run")]
    return subprocess.run(script, stdin=subprocess.DEVNULL, capture_output=True, text=True, cwd="/")


TOTAL = "echo '3 passed, 0 failed, 0 skipped'\n"


@pytest.mark.parametrize(
    ("quickstart", "test", "code", "said"),
    [
        ("echo hello\n", TOTAL, 0, "leftovers    none"),
        ("exit 1\n", TOTAL, 1, "quickstart   exit 1"),
        ("true\n", TOTAL + "exit 1\n", 1, "tests        exit 1"),
        ("true\n", "true\n", 1, "no total: the tests were ended"),
        ("touch left-behind\n", TOTAL, 1, "> ?? left-behind"),
        # Both commands share one environment, made for this run and gone after it.
        ('mkdir "$XMOE_VENV"\n', '[ -d "$XMOE_VENV" ] && ' + TOTAL, 0, "tests        exit 0"),
        # Nobody can answer a question there.
        ("read -r answer && exit 1\ntrue\n", TOTAL, 0, "quickstart   exit 0"),
    ],
)
def test_ci_run(checkout: Path, quickstart: str, test: str, code: int, said: str) -> None:
    done = ci_run(checkout, quickstart, test)
    assert done.returncode == code, done.stdout
    assert said in done.stdout
    if code == 0:
        assert done.stdout.splitlines()[-1] == "3 passed, 0 failed, 0 skipped"


def test_ci_run_refuses_a_readme_that_says_otherwise(checkout: Path) -> None:
    text = (ROOT / ".ci" / "run").read_text()
    assert "bash ci/quickstart.sh" in text
    done = ci_run(checkout, "true\n", TOTAL)
    (checkout / "README.md").write_text("bash ci/other.sh\n")
    assert done.returncode == 0
    again = subprocess.run(
        ["bash", str(checkout / ".ci" / "run")], capture_output=True, text=True, cwd="/"
    )
    assert again.returncode == 1
    assert "README.md does not say 'bash ci/quickstart.sh'" in again.stderr
