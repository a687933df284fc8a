# SPDX-License-Identifier: Apache-2.0
"""The static checks of ci/check.sh as tests, so that one run of the tests is enough."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.tree import ROOT


@pytest.mark.timeout(300)
@pytest.mark.parametrize("check", ["format", "lint", "types", "size"])
def test_static_check(check: str) -> None:
    bin_folder = Path(sys.executable).parent
    done = subprocess.run(
        ["bash", "ci/check.sh", check],
        cwd=ROOT,
        env={**os.environ, "XMOE_BIN": str(bin_folder)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


def test_unknown_check_is_refused() -> None:
    done = subprocess.run(
        ["bash", "ci/check.sh", "tpyes"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode != 0
