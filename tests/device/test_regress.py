# SPDX-License-Identifier: Apache-2.0
"""The shipped checkpoint over 8 and 16 NPUs, both paths, three rounds. Never run on an NPU so far.

The rank processes are those of `xmoe regress`; this starts the command as a person would.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.hardware import missing_device

pytestmark = [pytest.mark.npu, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("ep", [8, 16])
def test_regress(ep: int, tmp_path: Path) -> None:
    if missing := missing_device(ep):
        pytest.skip(missing)
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "xmoe", "regress", "--ep", str(ep), "--device", "npu"]
    done = subprocess.run(
        [*command, "--rounds", "3", "--requests", str(2 * ep), "--json", str(report)],
        capture_output=True, text=True, timeout=1500,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    found = json.loads(report.read_text())
    assert found["passed"]
    assert "software" not in str(found["device"]).lower(), "this was not the NPU"
    # Greedy answers of all rounds are equal, on either path.
    for path, rounds in found["outputs"].items():
        assert all(one == rounds[0] for one in rounds), f"{path} gave different answers"
