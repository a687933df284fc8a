# SPDX-License-Identifier: Apache-2.0
"""Every probe brings its expected evidence on the software device, and says what it ran on."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from xmoe.cli import main
from xmoe.errors import ConfigError
from xmoe.kernels.ops.cam.soft import SoftCam
from xmoe.kernels.ops.cam.topology import CamP2PTopology
from xmoe.pipeline.probes import PROBES, Evidence, run_probes, table
from xmoe.pipeline.probes.rank import HIDDEN, TOPK, ProbeRank
from xmoe.pipeline.probes.streams import LIMITS

pytestmark = pytest.mark.timeout(120)


def probed(*names: str, items: int = 48) -> list[Evidence]:
    found = run_probes(names, items=items)
    for one in found:
        assert one.outcome == "expected", one.line()
        assert one.device == "software device as Ascend910_9391"
        assert one.device in one.line()
    return found


def figures(found: list[Evidence]) -> list[dict[str, Any]]:
    return [one.figures for one in found]


def test_streams_and_cores() -> None:
    p2p, asynchronous, p2p_cores, async_cores = figures(probed("P1", "P2"))
    for one in (p2p, asynchronous):
        assert one["kernel_stream"] == one["given_stream"] != one["other_stream"]
    assert p2p_cores["cores_held"] == 8
    assert p2p_cores["starved"] is False
    # The receive on all cores starves even a small kernel until the peer sends.
    assert async_cores["cores_held"] == 48 and async_cores["starved"] is True


def test_cores_that_are_not_held_as_declared_are_unexpected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """a2e on all cores starves compute, which its adapter denies."""
    monkeypatch.setattr(
        ProbeRank,
        "p2p_topology",
        lambda one, aiv_num=48: CamP2PTopology(1, 1, one.rank, HIDDEN, TOPK, 48),
    )
    a2e, recv = run_probes(["P2"], items=1)
    assert a2e.outcome == "unexpected" and a2e.figures["starved"] is True
    assert recv.outcome == "expected"


def without_its_own_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on an NPU: nothing that only the software device has may be called."""
    monkeypatch.setattr(SoftCam, "available", staticmethod(lambda library: False))
    monkeypatch.setattr(table, "_device", lambda context: ("a device", False))


def test_what_needs_nothing_of_the_software_device_runs_without_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    without_its_own_functions(monkeypatch)
    found = run_probes(["P1", "P5", "P7", "P8"], items=1, tensors="host")
    assert [one.probe for one in found] == ["P1", "P1", "P5", "P7", "P8"]
    for one in found:
        assert one.outcome == "expected" and one.device == "a device", one.line()


def test_what_needs_it_is_skipped_elsewhere_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    without_its_own_functions(monkeypatch)
    found = run_probes(["P3", "P4", "P6"], items=1, tensors="host")
    assert [one.outcome for one in found] == ["skipped"] * 3
    assert "profiler" in found[0].finding and "readiness probe" in found[1].finding
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (one,) = run_probes(["P1"], items=1)  # the operators take npu tensors there
    assert one.outcome == "skipped" and "torch_npu is not installed" in one.finding


def test_broken_protocols() -> None:
    strict, loose, parity = figures(probed("P5", "P7"))
    assert strict["second_dispatch_code"] == 507035
    assert (loose["second_dispatch_code"], loose["came_back_for_first"]) == (0, 2.0)
    assert parity["code"] == 507034 and 0.9 < parity["hung_s"] < 10
    assert "flag of launch" in parity["text"]


def test_limits_and_shutdown() -> None:
    cores, aborted, stopped = figures(probed("P3", "P8"))
    assert cores["default"]["aclnnAfdAsyncDispatchRecv"] == 48
    assert cores["limited"] == LIMITS
    assert aborted["codes"] == [507057, 507057] and aborted["cores_still_held"] == 0
    assert stopped["attention_rank"] == -1


def test_many_items_and_no_fence() -> None:
    together, unfenced = figures(probed("P4", "P6"))
    assert together["equal"] and together["items"] == 48 and together["overlapped"] > 0
    assert unfenced["equal"] and unfenced["device_waits"] == 0


def test_the_queue_probe_skips_with_a_reason_without_torch_npu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    found = run_probes(["P9"], items=1)
    assert [one.outcome for one in found] == ["skipped"]
    assert "torch_npu is not installed" in found[0].finding


def test_the_command_writes_evidence_and_refuses_unknown_probes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "probes.json"
    assert main(["pipeline", "probe", "p3", "--json", str(path)]) == 0
    written = json.loads(path.read_text())
    assert [one["probe"] for one in written] == ["P3"]
    assert "software device" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="P1, P2"):
        run_probes(["P10"], items=1)
    assert list(PROBES) == [f"P{n}" for n in range(1, 10)]


def test_a_rank_that_fails_is_evidence_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from xmoe.pipeline.probes import streams

    def broken(context: Any, *args: Any) -> None:
        raise RuntimeError("out of order")

    monkeypatch.setattr(streams, "core_limit", broken)
    found = run_probes(["P3"], items=1)
    assert found[0].outcome == "unexpected"
    assert "out of order" in found[0].finding
