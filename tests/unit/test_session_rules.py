# SPDX-License-Identifier: Apache-2.0
"""tests/conftest.py does what it promises: each rule is broken once in a pytest of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.tree import ROOT

GOOD = "def test_good(): pass\n"


def run(folder: Path, source: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run `source` as a test file under this project's settings and conftest.py."""
    (folder / "test_inner.py").write_text(source)
    env = {key: value for key, value in os.environ.items() if key != "XSD_SHM_PREFIX"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT / "tests"), *_paths()])
    pytest_script = [sys.executable, "-c", "import sys, pytest; sys.exit(pytest.main())"]
    return subprocess.run(
        [
            *pytest_script,
            "-p",
            "conftest",
            "-c",
            str(ROOT / "pyproject.toml"),
            "-p",
            "no:cacheprovider",
        ]
        + [f"--rootdir={folder}", *options, str(folder / "test_inner.py")],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
    )


def _paths() -> list[str]:
    return [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]


def test_clean_session_passes(tmp_path: Path) -> None:
    done = run(tmp_path, GOOD)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "left behind" not in done.stdout


def test_process_left_behind_fails_the_session(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    # The return code is set by hand: no ResourceWarning, so only the session's own check finds it.
    done = run(
        tmp_path,
        "import subprocess, pathlib\n"
        "def test_leaks():\n"
        "    child = subprocess.Popen(['sleep', '60'])\n"
        f"    pathlib.Path({str(pid_file)!r}).write_text(str(child.pid))\n"
        "    child.returncode = 0\n",
    )
    os.kill(int(pid_file.read_text()), signal.SIGKILL)
    assert done.returncode == 1, done.stdout
    assert "process left behind: pid" in done.stdout
    assert "1 passed" in done.stdout


def test_shared_memory_left_behind_fails_the_session(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        "import os, pathlib\n"
        "def test_leaks():\n"
        "    pathlib.Path('/dev/shm', os.environ['XSD_SHM_PREFIX'] + 'x').touch()\n",
    )
    for line in done.stdout.splitlines():
        if line.startswith("shared memory left behind: "):
            Path(line.split(": ")[1]).unlink()
    assert done.returncode == 1, done.stdout
    assert "shared memory left behind: /dev/shm/xmoe-test-" in done.stdout


def test_second_module_name_fails_the_session(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n"
        "def test_imports():\n    import policy.facts\n",
    )
    assert done.returncode == 1, done.stdout
    assert "module imported twice: policy.facts" in done.stdout
    assert "import xmoe.policy.facts" in done.stdout


def test_strict_turns_a_skip_into_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "import pytest\ndef test_device(): pytest.skip('needs an NPU')\n"
    assert run(tmp_path, source).returncode == 0
    monkeypatch.setenv("XMOE_STRICT", "1")
    done = run(tmp_path, source)
    assert done.returncode == 1
    assert "may not be skipped: Skipped: needs an NPU" in done.stdout


def test_warning_is_an_error(tmp_path: Path) -> None:
    done = run(tmp_path, "import warnings\ndef test_warns(): warnings.warn('old')\n")
    assert done.returncode == 1
    assert "UserWarning: old" in done.stdout


def test_slow_python_test_fails_and_the_session_goes_on(tmp_path: Path) -> None:
    source = "import time\ndef test_slow(): time.sleep(60)\n" + GOOD
    done = run(tmp_path, source, "-o", "timeout=1")
    assert done.returncode == 1
    assert "1 failed, 1 passed" in done.stdout


@pytest.mark.timeout(60)
def test_hang_in_a_c_call_is_ended_with_stacks(tmp_path: Path) -> None:
    # A mutex locked twice: no signal handler of Python gets to run.
    done = run(
        tmp_path,
        "import ctypes\n"
        "def test_hangs():\n"
        "    mutex = ctypes.create_string_buffer(64)\n"
        "    lock = ctypes.CDLL(None).pthread_mutex_lock\n"
        "    lock(mutex); lock(mutex)\n",
        *("-o", "timeout=1", "-o", "watchdog_grace=1"),
    )
    assert done.returncode == 1
    assert "Timeout" in done.stderr
    assert "test_hangs" in done.stderr
