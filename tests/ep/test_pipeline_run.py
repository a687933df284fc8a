# SPDX-License-Identifier: Apache-2.0
"""Both roles over forked ranks on the software device: serial and overlap, results against float64,
failures and deaths in every phase."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.tree import ROOT
from xmoe.cli import main
from xmoe.errors import ConfigError, PeerLost, PipelineStopped
from xmoe.multistream import HostFence, MetadataRead, MultistreamConfig, RecvGate, StreamMode
from xmoe.pipeline import deployment
from xmoe.pipeline.deployment import RankRun, RunSpec, own_tokens, rank_main, step_input
from xmoe.pipeline.report import order_by_channel, report
from xmoe.pipeline.run import check, run
from xmoe.pipeline.synthetic import attention_factor, expert_factor, route
from xmoe.ranks import RankContext, RanksFailed, run_ranks

BOTH = (StreamMode.SERIAL, StreamMode.OVERLAP)
ROLES = frozenset({"ffn", "attention"})


def spec(connector: str, **kw: Any) -> RunSpec:
    p2p = connector == "camp2p"
    config = MultistreamConfig(
        mode=StreamMode.OVERLAP,
        roles=kw.pop("roles", frozenset({"ffn"})),
        max_inflight=kw.pop("slots", 3),
        recv_gate=RecvGate.NONE if p2p else RecvGate.READY_PROBE,
        memory_budget_bytes=None if p2p else 1 << 30,
        fence=kw.pop("fence", HostFence.STEP),
        wait_timeout_s=kw.pop("wait_s", 20.0),
        trace=kw.pop("trace", True),
    )
    given = {"attn": 2, "ffn": 1, "layers": 3, "stages": 2 if p2p else 1, "steps": 2, "tokens": 9}
    given |= {"hidden": 32, "compute_us": 50, "attention_us": 50, "timeout_s": 30.0}
    return RunSpec(connector=connector, config=config, **{**given, **kw})


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
    for rank, runs in enumerate(results):
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
        "camasync", attn=1, ffn=2, routing="low", shared_expert=True, dynamic_quant=True
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


# ---- failures ---------------------------------------------------------------------------------


def breaking(context: RankContext, s: RunSpec, phase: str, how: str) -> Any:
    """The FFN rank raises, or dies, when it issues `phase` of its third item."""
    count = 0

    def hook(kind: str) -> None:
        nonlocal count
        if kind == phase:
            count += 1
        if count == 3 and kind == phase:
            if how == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError(f"{phase} broke")

    if s.is_ffn(context.rank):
        _hook(s, hook)
    begin = time.monotonic()
    try:
        rank_main(context, s, (StreamMode.OVERLAP,))
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - begin
    return "", "", time.monotonic() - begin


def _hook(s: RunSpec, hook: Any) -> None:
    from xmoe.pipeline.executor import StreamExecutor

    begin = StreamExecutor._begin

    def hooked(kind: str, run: Any) -> Any:
        def wrapped(context: Any) -> None:
            hook(kind)
            run(context)

        return wrapped

    def broken(self: Any, item: Any) -> Any:
        for phase in item.phases:
            phase.run = hooked(phase.kind.value, phase.run)
        return begin(self, item)

    StreamExecutor._begin = broken  # this process only: it was forked for one rank


@pytest.mark.parametrize(
    ("connector", "phase"),
    [("camp2p", "recv"), ("camp2p", "compute"), ("camp2p", "send")]
    + [("camasync", phase) for phase in ("recv", "metadata", "compute", "send")],
)
def test_an_exception_in_any_phase_reaches_the_peers_at_once(connector: str, phase: str) -> None:
    s = spec(connector, attn=1, layers=4, trace=False, wait_s=15.0, timeout_s=15.0)
    results = run_ranks(breaking, s.size, s, phase, "raise", silence_s=60)
    roles = {s.is_ffn(rank): result for rank, result in enumerate(results)}
    assert roles[True][0] == "RuntimeError" and f"{phase} broke" in roles[True][1]
    assert roles[False][0] == "PeerLost" and "aborted" in roles[False][1]
    assert roles[False][2] < 10, "the peer waited for its time limit"


@pytest.mark.parametrize(
    ("connector", "phase"), [("camp2p", "compute"), ("camasync", "recv"), ("camasync", "send")]
)
def test_a_dead_peer_ends_the_others(connector: str, phase: str) -> None:
    s = spec(connector, attn=1, layers=4, trace=False, wait_s=15.0, timeout_s=15.0)
    begin = time.monotonic()
    with pytest.raises(RanksFailed, match="SIGKILL") as caught:
        run_ranks(breaking, s.size, s, phase, "die", silence_s=60)
    assert time.monotonic() - begin < 30
    assert {error.kind for error in caught.value.errors} == {"PeerLost"}


def never_sends(context: RankContext, s: RunSpec) -> Any:
    """Attention dies before its first dispatch; the FFN rank's receive is blocked (p2p), or its
    gate is idle (async)."""
    if not s.is_ffn(context.rank):
        deployment._plan = lambda *args: time.sleep(0.5) or os._exit(9)
    else:
        deployment._plan = lambda rank, step, tokens: deployment.StepPlan(
            s.layers, (s.tokens,) * s.stages, s.layers
        )
    try:
        rank_main(context, s, (StreamMode.OVERLAP,))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("connector", ["camp2p", "camasync"])
def test_a_peer_that_dies_before_it_sends_anything(connector: str) -> None:
    s = spec(connector, attn=1, layers=2, trace=False, wait_s=15.0, timeout_s=15.0)
    begin = time.monotonic()
    with pytest.raises(RanksFailed, match="exit code 9"):
        run_ranks(never_sends, s.size, s, silence_s=60)
    assert time.monotonic() - begin < 25


def blocked(context: RankContext, s: RunSpec) -> Any:
    """A receive waits on the device, in cores of its own; then the loop is told to stop."""
    group = context.init_process_group(30.0)
    deployment.introduce(group, 30.0)
    with deployment.HostDevice(deployment.load(deployment.find_toolkit()), context.rank) as device:
        rank = deployment._Rank(s, context.rank, group, device)
        try:
            with rank.communicators(1) as groups:
                if not s.is_ffn(context.rank):
                    time.sleep(0.1)
                    return "idle"
                loop = rank.ffn_loop(s.config, groups)
                threading.Timer(0.3, loop.stop).start()
                begin, said = time.monotonic(), ""
                try:
                    loop.serve(deployment.StepPlan(s.layers, (s.tokens,)))
                except PipelineStopped as error:
                    said = str(error)
                loop.close()
                loop.close()
                failed = loop.executor.failed is not None
                return said, loop.executor.quarantined, failed, time.monotonic() - begin
        except PeerLost as error:
            return str(error)


def in_cores_of_its_own(s: RunSpec, **kw: Any) -> RunSpec:
    config = replace(
        s.config, recv_gate=RecvGate.CORE_PARTITION, recv_cores=16, compute_cores=24, send_cores=8,
        **kw,
    )  # fmt: skip
    return replace(s, config=config)


def test_stop_while_a_receive_is_blocked_ends_it_by_the_abort_word() -> None:
    s = in_cores_of_its_own(spec("camasync", attn=1, wait_s=15.0, timeout_s=15.0))
    _, (said, quarantined, failed, seconds) = run_ranks(blocked, 2, s, silence_s=60)
    assert "stopped during camasync" in said and "phase recv" in said
    assert quarantined == 0 and failed and seconds < 5


@pytest.mark.parametrize("read", list(MetadataRead))
def test_stop_while_a_receive_is_blocked_ends_it_by_the_stop_buffer(read: MetadataRead) -> None:
    """With quantisation: the loop ends well, and no group is aborted."""
    s = spec("camasync", attn=1, dynamic_quant=True, wait_s=15.0, timeout_s=15.0)
    s = in_cores_of_its_own(s, metadata_read=read)
    _, (said, quarantined, failed, seconds) = run_ranks(blocked, 2, s, silence_s=60)
    assert said == "" and quarantined == 0 and not failed and seconds < 5


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


def test_no_device_is_ever_waited_for_as_a_whole() -> None:
    """Neither the executor nor anything it calls binds aclrtSynchronizeDevice."""
    for folder in ("xmoe/pipeline", "kernels/ops/cam"):
        for path in (ROOT / folder).rglob("*.py"):
            if "probes" not in path.parts:
                assert "SynchronizeDevice" not in path.read_text(), path


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
        ("camasync --attn 16", "16 ranks at most"),
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
