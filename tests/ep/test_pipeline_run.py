# SPDX-License-Identifier: Apache-2.0
"""Both roles over forked ranks on the software device: serial and overlap, results against
float64."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.pipeline_runs import in_cores_of_its_own, spec
from xmoe.cli import main
from xmoe.errors import ConfigError
from xmoe.multistream import HostFence, MetadataRead, RecvGate, StreamMode
from xmoe.pipeline.deployment import RankRun, RunSpec, own_tokens, rank_main, step_input
from xmoe.pipeline.report import order_by_channel, report
from xmoe.pipeline.run import check, run
from xmoe.pipeline.synthetic import attention_factor, expert_factor, route
from xmoe.ranks import RankContext, RanksFailed, run_ranks

BOTH = (StreamMode.SERIAL, StreamMode.OVERLAP)
ROLES = frozenset({"ffn", "attention"})


def expected(s: RunSpec, rank: int, step: int, stage: int) -> np.ndarray:
    """The whole chain in float64."""
    tokens = own_tokens(s, rank)
    x = step_input(s, rank, step, stage, s.tokens)[:tokens].double().numpy()
    experts = s.ffn * s.experts
    for layer in range(s.layers):
        x = x * attention_factor(layer, stage)
        if s.connector == "camp2p":
            x = x * expert_factor(layer, 0, 1)
            continue
        ids, weights = route(rank, layer, stage, tokens, s.topk, experts, s.routing)
        factor = np.array([expert_factor(layer, e, experts) for e in range(experts)])
        shared = 3.0 if s.shared_expert else 0.0
        x = x * ((factor[ids.numpy()] * weights.double().numpy()).sum(1, keepdims=True) + shared)
    return x


def check_outputs(s: RunSpec, results: list[list[RankRun]]) -> None:
    """Against float64; and nobody waited for a whole device, as the device counts."""
    for rank, runs in enumerate(results):
        for one in runs:
            assert one.counters["host_device_waits"] == 0
            assert one.counters["host_event_waits"] > 0
        if runs[0].role == "ffn":
            continue
        for one in runs:
            for step, stages in enumerate(one.outputs):
                for stage, got in enumerate(stages):
                    want = expected(s, rank, step, stage)
                    assert got.shape == want.shape
                    # A few roundings to bfloat16 (and to int8) in each layer.
                    limit = s.layers * (0.03 if s.dynamic_quant else 0.012)
                    assert np.abs(got - want).max() <= limit * np.abs(want).max() + 1e-6


CASES = {
    "p2p": spec("camp2p"),
    "p2p, both roles, uneven": spec(
        "camp2p", attn=3, ffn=2, layers=4, uneven=True, roles=ROLES, slots=4, fence=HostFence.ITEM
    ),
    "async": spec("camasync", attn=3, layers=5, routing="skewed"),
    "async, two FFN ranks, one without rows": spec(
        "camasync", ffn=2, routing="low", dynamic_quant=True, topk=3, slots=2
    ),
    "async, two stages, both roles": spec(
        "camasync", stages=2, roles=ROLES, layers=4, routing="one", fence=HostFence.NONE
    ),
    "async, shared expert": spec(
        "camasync", attn=3, ffn=2, tokens=16, topk=3, shared_expert=True, dynamic_quant=True
    ),
    "async, tensor parallel": spec("camasync", attn=4, tp_size=2, dynamic_quant=True),
}


@pytest.mark.parametrize("name", CASES)
def test_serial_and_overlap_give_the_same_bits_and_the_right_ones(name: str) -> None:
    s = CASES[name]
    check(s, BOTH)
    results = run(s, BOTH)
    found = report(s, BOTH, results)
    assert found["equal"] is True and found["order_equal"] is True and found["violations"] == 0
    check_outputs(s, results)
    dispatches = s.steps * s.layers * s.stages * s.attn // s.tp_size
    for runs in results:
        for one in runs:
            assert one.counters["outstanding"] == 0
            if one.role == "ffn":
                want = s.steps * s.layers * s.stages if s.connector == "camp2p" else dispatches
                assert one.items == want
                streams = {phase[6] for phase in one.phases} - {"host"}
                assert streams == (
                    {"recv", "compute", "send"} if one.mode == "overlap" else {"main"}
                )
                assert len(order_by_channel(one)["ffn"]) == one.items


@pytest.mark.parametrize("quant", [False, True])
def test_every_way_to_read_the_metadata_gives_the_same_bits(quant: bool) -> None:
    """Two FFN ranks, one of them without rows; nothing is read on the host with "device"."""
    digests = set()
    for read in MetadataRead:
        s = spec("camasync", ffn=2, routing="low", topk=3, layers=4, dynamic_quant=quant)
        s = replace(s, config=replace(s.config, metadata_read=read))
        check(s, BOTH)
        results = run(s, BOTH)
        found = report(s, BOTH, results)
        assert found["equal"] is True and found["violations"] == 0
        check_outputs(s, results)
        digests.add(tuple(one.digest for runs in results for one in runs))
        phases = {phase[1] for runs in results[s.attn :] for one in runs for phase in one.phases}
        assert ("metadata" in phases) == (read is not MetadataRead.DEVICE)
    assert len(digests) == 1


def chunked(context: RankContext, s: RunSpec) -> Any:
    """Receive outputs of 26 rows: a dispatch of 40 rows comes in several items."""
    os.environ["BATCH_SIZE_FACTOR"] = "0.0001"
    return rank_main(context, s, BOTH)


def test_dispatches_that_come_in_parts() -> None:
    s = spec("camasync", tokens=20, layers=2)
    results = run_ranks(chunked, s.size, s, silence_s=60)
    found = report(s, BOTH, results)
    assert found["equal"] is True and found["violations"] == 0
    check_outputs(s, results)
    assert all(one.items > s.steps * s.layers * s.attn for one in results[-1])


# ---- cores ------------------------------------------------------------------------------------


def test_a_core_partition_takes_the_place_of_the_gate() -> None:
    s = in_cores_of_its_own(spec("camasync", attn=2, layers=4))
    check(s, BOTH)
    results = run(s, BOTH)
    found = report(s, BOTH, results)
    assert found["equal"] is True and found["violations"] == 0
    check_outputs(s, results)
    cores = {(k.op, k.vector_cores) for run in results[-1] for k in run.kernels}
    assert cores == {
        ("aclnnAfdAsyncDispatchRecv", 16), ("aclnnXsdTimedKernel", 24),
        ("aclnnAfdAsyncCombineSend", 8),
    }  # fmt: skip


def test_one_group_in_a_core_partition() -> None:
    """Its receive is posted before the last item's compute: without the partition, a deadlock."""
    s = in_cores_of_its_own(spec("camasync", attn=1, wait_s=10.0, timeout_s=10.0))
    check(s, (StreamMode.OVERLAP,))
    results = run(s, (StreamMode.OVERLAP,))
    check_outputs(s, results)


def test_core_counts_reach_both_operators_of_camp2p() -> None:
    s = spec("camp2p", attn=1)
    s = replace(s, config=replace(s.config, recv_cores=12, compute_cores=20, send_cores=12))
    check(s, BOTH)
    for runs in run(s, BOTH):
        for one in runs:
            cores = {k.op: k.vector_cores for k in one.kernels}
            compute = 20 if one.role == "ffn" else 8
            assert cores == {"aclnnA2e": 12, "aclnnE2a": 12, "aclnnXsdTimedKernel": compute}


@pytest.mark.parametrize("connector", ["camp2p", "camasync"])
def test_more_cores_than_the_device_has_are_refused(
    connector: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device is asked; it need not have 48."""
    s = in_cores_of_its_own(spec(connector))
    if connector == "camp2p":
        config = replace(s.config, recv_gate=RecvGate.NONE, compute_cores=12, send_cores=16)
        s = replace(s, config=config)
    check(s, BOTH)
    monkeypatch.setenv("XSD_AIV_COUNT", "40")
    with pytest.raises(ConfigError, match=r"recv_cores, compute_cores, send_cores: \d+ of 40"):
        check(s, BOTH)


# ---- the command ------------------------------------------------------------------------------


def test_the_command_compares_both_modes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report_file, trace_file = tmp_path / "r.json", tmp_path / "t.json"
    words = "pipeline run --connector camasync --mode both --attn 2 --ffn 1 --layers 2 --steps 2"
    words += f" --tokens 5 --hidden 32 --dynamic-quant --json {report_file} --trace {trace_file}"
    assert main(words.split()) == 0
    assert "outputs equal bit for bit: yes" in capsys.readouterr().out
    found = json.loads(report_file.read_text())
    assert found["equal"] and set(found["modes"]) == {"serial", "overlap"}
    assert trace_file.stat().st_size > 0


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("camp2p --stages 1", "overlap with one stage"),
        ("camp2p --dynamic-quant", "a2e carries the model's type only"),
        ("camasync --gate none", "starves compute"),
        ("camasync --gate core_partition", "needs recv_cores"),
        ("camasync --roles both", "nothing to overlap with"),
        ('camasync --multistream {"is_multistream":true}', "earlier connectors"),
        ('camasync --multistream {"max_inflght":2}', "nearest: max_inflight"),
        ("camasync --memory-budget 201326592", "3 slots need 20"),
        ("camasync --hidden 512", "memory_budget_bytes=1073741824: 3 slots need"),
        ("camasync --shared-expert --memory-budget 402653184", "3 slots need 40"),
        ("camp2p --shared-expert", "with --connector camasync"),
        ('camp2p --multistream {"metadata_read":"device"}', "shapes are known in advance"),
        ("camasync --attn 15 --ffn 2", "16 ranks at most"),
    ],
)
def test_what_is_not_supported_is_refused_before_a_rank_starts(
    words: str, reason: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(*args: Any, **kw: Any) -> None:
        raise AssertionError("a rank was started")

    monkeypatch.setattr("xmoe.pipeline.run.run_ranks", started)
    assert main(["pipeline", "run", "--connector", *words.split()]) == 2
    assert reason in capsys.readouterr().err


def test_both_roles_compare_their_settings() -> None:
    def differ(context: RankContext, s: RunSpec) -> Any:
        config = replace(s.config, max_inflight=2 + context.rank % 2)
        return rank_main(context, replace(s, config=config), (StreamMode.OVERLAP,))

    s = spec("camp2p", attn=1)
    with pytest.raises(RanksFailed, match="RankDisagreement"):
        run_ranks(differ, s.size, s, silence_s=60)
    with pytest.raises(ConfigError, match="stages=3"):
        check(replace(s, stages=3), BOTH)
