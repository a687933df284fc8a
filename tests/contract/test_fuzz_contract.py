# SPDX-License-Identifier: Apache-2.0
"""A short fuzz of contract layer, launch plan and software vendor, the same sets each time.

tests/fuzz/fuzz_contract.py is the long one; docs/benchmarks/fuzz.json holds what it last counted.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from support.fuzz_cases import Case
from support.tree import ROOT

pytestmark = [pytest.mark.ep, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "fuzz_contract", ROOT / "tests" / "fuzz" / "fuzz_contract.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_two_thousand_sets(script: ModuleType) -> None:
    found = script.fuzz(2000, start=7, variants="BEJ", batch=500)
    assert found["findings"] == []
    assert found["sets"] >= 2000
    contract, vendor = found["outcomes"]["contract"], found["outcomes"]["vendor"]
    # It reached what it is meant to reach: each layer's refusals, and calls that ran.
    assert {"ConfigError", "AclError 561002", "accepted"} <= set(contract)
    assert {"161001", "161002", "561002", "accepted"} <= set(vendor)
    assert any(key.startswith("ran") for key in vendor)
    plan = found["outcomes"]["plan"]
    assert {"make ConfigError", "step ConfigError", "rebind ConfigError"} <= set(plan)
    assert any(key.startswith("step ok") for key in plan)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("os.kill(os.getpid(), 9)", "was ended by SIGKILL"),
        ("time.sleep(600)", "stood still"),
        ("raise KeyError('x')", "KeyError"),
    ],
)
def test_crash_hang_and_unnamed_error_are_findings(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, what: str, words: str
) -> None:
    from support import fuzz_vendor_target

    def run(self: object, case: Case) -> str:
        exec(f"import os, time\n{what}")
        return "accepted"

    monkeypatch.setattr(fuzz_vendor_target.Vendor, "run", run)
    found = script.fuzz(1, targets=("vendor",), variants="B", batch=1, still_s=3.0)
    assert any(words in text and "Case(target='vendor'" in text for text in found["findings"])


def test_recorded_run_was_long_enough_and_clean() -> None:
    path: Path = ROOT / "docs" / "benchmarks" / "fuzz.json"
    found: dict[str, Any] = json.loads(path.read_text())
    assert found["sets"] >= 100_000 and found["findings"] == []
    assert set(found["variants"]) == set("ABCDEFGHIJ")
    assert sum(sum(kinds.values()) for kinds in found["outcomes"].values()) == found["sets"]
    assert all(sum(kinds.values()) >= 30_000 for kinds in found["outcomes"].values())
    assert set(found["outcomes"]) == {"contract", "vendor", "plan"}
