# SPDX-License-Identifier: Apache-2.0
"""What the stream pipeline relies on, asked of the connectors' operators on the real device. Never
run on an NPU so far."""

from __future__ import annotations

import importlib.util

import pytest

from support.hardware import missing_device
from xmoe.errors import SymbolMissing
from xmoe.kernels.acl.toolkit import find_toolkit
from xmoe.kernels.ops.cam.binding import open_cam
from xmoe.pipeline.probes import PROBES, Evidence, run_probes
from xmoe.ranks import RankContext, run_ranks

pytestmark = [pytest.mark.npu, pytest.mark.timeout(3600)]


def _missing_operators(context: RankContext) -> str:
    try:
        open_cam(find_toolkit("cann"))
    except SymbolMissing as error:
        return str(error)
    return ""


@pytest.fixture(scope="module")
def evidence() -> list[Evidence]:
    """All of them once; a probe that hangs ends with its processes."""
    if missing := missing_device(2):
        pytest.skip(missing)
    if importlib.util.find_spec("torch_npu") is None:
        pytest.skip("torch_npu is not installed; pip install '.[npu]'")
    if missing := run_ranks(_missing_operators, 1)[0]:
        pytest.skip(missing)
    return run_probes(["all"], items=2000)


@pytest.mark.parametrize("name", PROBES)
def test_probe(name: str, evidence: list[Evidence]) -> None:
    lines = [one for one in evidence if one.probe == name]
    assert lines, "no evidence at all"
    for one in lines:
        if one.outcome == "skipped":
            pytest.skip(one.finding)
        assert one.outcome == "expected", one.line()
