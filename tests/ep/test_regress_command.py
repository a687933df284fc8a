# SPDX-License-Identifier: Apache-2.0
"""`xmoe regress` around its ranks: exit codes, results, and a torch_npu that is only half there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from xmoe import cli
from xmoe.ranks import RankContext

COMMAND = [sys.executable, "-c", "from xmoe.cli import main; raise SystemExit(main())", "regress"]
SHORT = ["--ep", "2", "--rounds", "1", "--requests", "2", "--path", "fused_moe"]


def _run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    paths = [str(folder), os.environ.get("PYTHONPATH", "")]
    around = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [*COMMAND, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=150, env=around)


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """A torch_npu that is found and cannot be imported."""
    (tmp_path / "torch_npu.py").write_text("raise RuntimeError('libascend_hal.so: cannot open')\n")
    return tmp_path


def test_a_broken_torch_npu_does_not_matter_on_the_host(broken: Path) -> None:
    done = _run(broken, *SHORT)
    assert done.returncode == 0, done.stderr


def test_a_broken_torch_npu_is_named_where_it_is_needed(broken: Path) -> None:
    done = _run(broken, *SHORT, "--device", "npu")
    assert done.returncode == 2
    assert "torch_npu cannot be imported: RuntimeError: libascend_hal.so: cannot" in done.stderr
    assert "rank" not in done.stderr and "defect" not in done.stderr


def test_a_torch_that_fails_with_a_broken_backend_is_named(broken: Path) -> None:
    about = broken / "torch_npu-2.13.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: torch_npu\nVersion: 2.13.0\n")
    (about / "entry_points.txt").write_text("[torch.backends]\ntorch_npu = torch_npu:_autoload\n")
    done = _run(broken, *SHORT)
    assert done.returncode == 2
    assert "xmoe: torch cannot be imported: " in done.stderr and "torch_npu" in done.stderr
    assert "libascend_hal.so: cannot open" in done.stderr and "defect" not in done.stderr


def test_a_prompt_that_no_rank_can_bring_is_refused_before_any_rank(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def started(*args: Any, **kw: Any) -> None:
        raise AssertionError("a rank was started")

    monkeypatch.setattr("xmoe.regress.command.run_ranks", started)
    monkeypatch.setenv("XMOE_MAX_TOKENS_PER_RANK", "20")
    assert cli.main(["regress", "--ep", "2", "--prompt", "12 plus 34 " * 20]) == 2
    assert "tokens; allowed: up to 20, max_tokens_per_rank" in capsys.readouterr().err


def _fails(context: RankContext, plan: Any) -> None:
    raise ValueError(f"rank {context.rank} broke")


def test_a_rank_that_fails_is_a_known_error_with_a_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("xmoe.regress.rank.run_rank", _fails)
    target = tmp_path / "new" / "r.json"
    assert cli.main(["regress", *SHORT, "--json", str(target)]) == 2
    assert "rank 0 broke" in capsys.readouterr().err
    document = json.loads(target.read_text())
    assert document["passed"] is False
    assert "rank 0 broke" in document["verdicts"][0]["detail"]
