# SPDX-License-Identifier: Apache-2.0
"""The whole conformance list over torch_npu's memory and streams, two ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from support.npu import child
from xmoe.cli import main
from xmoe.conformance.case import all_cases

pytestmark = pytest.mark.timeout(300)


def test_all_cases_pass_on_npu_tensors(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    code = main(["conformance", "--ep", "2", "--tensors", "npu", "--json", str(report)])
    found = json.loads(report.read_text())
    bad = [f"{r['name']}: {r['evidence']}" for r in found["results"] if r["verdict"] != "pass"]
    # With two ranks no FFN rank can go empty.
    assert [line.partition(":")[0] for line in bad] == ["cam_async.empty_ranks"], "\n".join(bad)
    assert found["counts"]["skip"] == 1
    assert code == 0 and found["tensors"] == "npu"
    assert [r["name"] for r in found["results"]] == [one.name for one in all_cases()]


def test_memory_and_streams_are_torch_npus() -> None:
    def body(device: torch.device) -> None:
        from xmoe.conformance.session import Session

        session = Session(None, device.index, "npu")
        before = torch.npu.memory_allocated()
        with session.scope():
            memory, stream = session.memory(1 << 20), session.stream()
            assert torch.npu.memory_allocated() - before >= 1 << 20
            with torch.npu.stream(stream._stream.torch_stream()):
                # In torch_npu's host queue until somebody reads the stream's handle.
                memory._memory._tensor.fill_(7)
            target = session.memory(1 << 20)
            session.copy(target, memory, stream)
            stream.synchronize(20)
            assert set(target.read()) == {7}
        assert torch.npu.memory_allocated() == before
        session.close()

    child(body)
