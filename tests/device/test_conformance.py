# SPDX-License-Identifier: Apache-2.0
"""Every semantic the software device assumes, on the real device. Never run on an NPU so far."""

from __future__ import annotations

import importlib.util

import pytest

from support.hardware import missing_device
from xmoe.conformance.case import Result, Verdict, all_cases
from xmoe.conformance.run import identify, run_cases

pytestmark = [pytest.mark.npu, pytest.mark.timeout(3600)]

NAMES = [one.name for one in all_cases()]


@pytest.fixture(scope="module")
def results() -> dict[str, Result]:
    """One run of the whole list over two ranks; each case is judged by a test of its own."""
    if missing := missing_device(2):
        pytest.skip(missing)
    label = identify("cann")
    assert label.startswith("Ascend910_93")
    return {r.name: r for r in run_cases(all_cases(), label, "cann", ranks=2)}


@pytest.mark.parametrize("name", NAMES)
def test_case(name: str, results: dict[str, Result]) -> None:
    result = results[name]
    if result.verdict is Verdict.SKIP:
        pytest.skip(result.evidence)
    assert result.verdict is Verdict.PASS, f"{result.device}: {result.evidence}"


def test_all_cases_on_npu_tensors() -> None:
    if missing := missing_device(2):
        pytest.skip(missing)
    if importlib.util.find_spec("torch_npu") is None:
        pytest.skip("torch_npu is not installed; pip install '.[npu]'")
    found = run_cases(all_cases(), identify("cann"), "cann", ranks=2, tensors="npu")
    bad = [f"{r.name}: {r.evidence}" for r in found if r.verdict is Verdict.FAIL]
    assert not bad, "\n".join(bad)


@pytest.mark.parametrize("ranks", [4, 8, 16])
def test_group_cases_at_size(ranks: int) -> None:
    if missing := missing_device(ranks):
        pytest.skip(missing)
    together = [one for one in all_cases() if one.ranks]
    found = run_cases(together, identify("cann"), "cann", ranks=ranks, deadline_s=120)
    bad = [f"{r.name}: {r.evidence}" for r in found if r.verdict is Verdict.FAIL]
    assert not bad, "\n".join(bad)
