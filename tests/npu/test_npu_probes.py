# SPDX-License-Identifier: Apache-2.0
"""The probes as they run on an NPU: on torch_npu's tensors, streams and events."""

from __future__ import annotations

import pytest

from xmoe.pipeline.probes import run_probes

NAMES = ("P1", "P2", "P3", "P5", "P7", "P8")


@pytest.mark.timeout(300)
def test_probes_on_npu_tensors_bring_the_expected_evidence() -> None:
    found = run_probes(NAMES, items=1, tensors="npu")
    bad = [one.line() for one in found if one.outcome != "expected"]
    assert not bad, "\n".join(bad)
    assert [one.probe for one in found] == ["P1", "P1", "P2", "P2", "P3", "P5", "P7", "P8"]
