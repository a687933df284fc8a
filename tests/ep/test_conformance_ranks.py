# SPDX-License-Identifier: Apache-2.0
"""The conformance list with more ranks than two: 8 here; tests/device has 16 on hardware."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from xmoe.cli import main
from xmoe.conformance.case import all_cases

pytestmark = [pytest.mark.ep, pytest.mark.timeout(300)]


def test_all_group_cases_pass_with_eight_ranks(tmp_path: Path) -> None:
    together = [one.name for one in all_cases() if one.ranks]
    report = tmp_path / "report.json"
    words = [word for name in together for word in ("--only", name)]
    code = main(["conformance", "--device", "soft", "--ep", "8", "--json", str(report), *words])
    found = json.loads(report.read_text())
    bad = [f"{r['name']}: {r['evidence']}" for r in found["results"] if r["verdict"] != "pass"]
    assert not bad, "\n".join(bad)
    assert code == 0 and found["ranks"] == 8
    assert [r["name"] for r in found["results"]] == together and len(together) >= 30
