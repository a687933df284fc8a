# SPDX-License-Identifier: Apache-2.0
"""`xmoe regress` as a user runs it: the shipped checkpoint, one process per rank, one exit code."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from xmoe.models.checkpoints import shipped_checkpoint

COMMAND = [sys.executable, "-c", "from xmoe.cli import main; raise SystemExit(main())", "regress"]


def _run(*words: str, timeout: float = 150) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *words], capture_output=True, text=True, timeout=timeout, check=False
    )


@pytest.mark.parametrize("ep_size", [8, 16])
def test_shipped_checkpoint_answers_right_and_alike(tmp_path: Path, ep_size: int) -> None:
    """More ranks than requests at EP16: half of the shards are empty."""
    target = tmp_path / "result.json"
    words = ["--ep", str(ep_size), "--rounds", "3", "--requests", "8", "--json", str(target)]
    done = _run(*words)
    assert done.returncode == 0, done.stderr
    document = json.loads(target.read_text())
    assert document["passed"] and {v["passed"] for v in document["verdicts"]} == {True}
    for path in ("mega_moe", "fused_moe"):
        assert document["outputs"][path] == [["579"] * 8] * 3
        assert document["decision"][path]["path"] == path
    assert {v["name"] for v in document["verdicts"]} == {
        "identical",
        "right",
        "reference",
        "expert ids",
        "expert bytes",
        "error scan",
        "released",
    }
    assert "not an NPU" in document["device"]


def test_a_wrong_answer_is_exit_code_one(tmp_path: Path) -> None:
    """A checkpoint that runs but was damaged in one expert: ranks agree, the sum is wrong."""
    model = tmp_path / "model"
    shutil.copytree(shipped_checkpoint(), model)
    weights = model / "model.safetensors"
    data = bytearray(weights.read_bytes())
    header = 8 + int.from_bytes(data[:8], "little")
    entries = json.loads(data[8:header])
    begin, end = entries["lm_head.weight" if "lm_head.weight" in entries else "model.norm.weight"][
        "data_offsets"
    ]
    data[header + begin : header + end] = bytes(end - begin)
    weights.write_bytes(data)
    words = ["--ep", "2", "--rounds", "1", "--requests", "2", "--path", "fused_moe"]
    done = _run(*words, "--max-new-tokens", "2", "--model", str(model))
    assert done.returncode == 1, done.stderr
    assert "FAIL" in done.stderr


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda model: (model / "model.safetensors").unlink(), "safetensors"),
        (
            lambda model: (model / "model.safetensors").write_bytes(
                (model / "model.safetensors").read_bytes()[:-10]
            ),
            "model.safetensors",
        ),
        (
            lambda model: (model / "config.json").write_text(
                (model / "config.json")
                .read_text()
                .replace('"num_experts": 32', '"num_experts": 48')
            ),
            "experts",
        ),
    ],
)
def test_a_bad_checkpoint_is_one_error_before_any_rank(
    tmp_path: Path, damage: object, message: str
) -> None:
    model = tmp_path / "model"
    shutil.copytree(shipped_checkpoint(), model)
    damage(model)  # type: ignore[operator]
    done = _run("--ep", "2", "--model", str(model))
    assert done.returncode == 2, done.stderr
    assert message in done.stderr and "Traceback" not in done.stderr
    assert "rank" not in done.stderr.lower().replace("ranks are", "")


def test_an_unknown_key_in_the_models_config_is_refused(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(shipped_checkpoint(), model)
    config = json.loads((model / "config.json").read_text())
    config["xmoe"] = {"mega_moe_max_token": 8}
    (model / "config.json").write_text(json.dumps(config))
    done = _run("--ep", "2", "--model", str(model))
    assert done.returncode == 2
    assert "mega_moe_max_token" in done.stderr and "max_tokens_per_rank" in done.stderr


def test_interrupt_ends_all_ranks() -> None:
    """V9.1: Ctrl-C reaches the whole foreground group."""
    process = subprocess.Popen(
        [*COMMAND, "--ep", "4", "--rounds", "50"],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stderr is not None
    with process.stderr:
        for line in process.stderr:
            if "ready" in line:
                break
        os.killpg(process.pid, signal.SIGINT)
        rest = process.stderr.read()
    assert process.wait(timeout=30) == 130, rest
    deadline = time.monotonic() + 10
    while _members(process.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _members(process.pid)


def _members(group: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[2]) == group and fields[0] != "Z":
                found.append(int(entry.name))
    return found
