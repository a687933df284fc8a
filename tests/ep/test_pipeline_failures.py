# SPDX-License-Identifier: Apache-2.0
"""What one rank's failure, death or silence does to the others; stopping while a receive waits."""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import replace
from typing import Any

import pytest

from support.pipeline_runs import in_cores_of_its_own, spec
from xmoe.errors import CommError, PeerLost, PipelineStopped
from xmoe.multistream import MetadataRead, StreamMode
from xmoe.pipeline import deployment
from xmoe.pipeline.deployment import RunSpec, rank_main
from xmoe.ranks import RankContext, RanksFailed, run_ranks

PHASES = {
    ("camp2p", "ffn"): ("recv", "compute", "send"),
    ("camp2p", "attention"): ("recv", "compute", "send"),
    ("camasync", "ffn"): ("recv", "metadata", "compute", "send"),
    ("camasync", "attention"): ("recv", "compute", "send"),
}
EVERY = [(connector, role, phase) for (connector, role), all_ in PHASES.items() for phase in all_]


def breaking(context: RankContext, s: RunSpec, role: str, phase: str, how: str) -> Any:
    """The rank of `role` raises, or dies, when it issues `phase` for the third time."""
    count = 0

    def hook(kind: str) -> None:
        nonlocal count
        if kind == phase:
            count += 1
        if count == 3 and kind == phase:
            if how == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError(f"{phase} broke")

    if s.is_ffn(context.rank) == (role == "ffn"):
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


@pytest.mark.parametrize(("connector", "role", "phase"), EVERY)
def test_an_exception_in_any_phase_reaches_the_peers_at_once(
    connector: str, role: str, phase: str
) -> None:
    s = spec(connector, attn=1, layers=4, trace=False, wait_s=15.0, timeout_s=15.0)
    results = run_ranks(breaking, s.size, s, role, phase, "raise", silence_s=60)
    broken, peer = sorted(results, key=lambda result: result[0] != "RuntimeError")
    assert broken[0] == "RuntimeError" and f"{phase} broke" in broken[1]
    assert peer[0] == "PeerLost" and "aborted" in peer[1]
    assert peer[2] < 10, "the peer waited for its time limit"


@pytest.mark.parametrize(("connector", "role", "phase"), EVERY)
def test_a_dead_peer_ends_the_others(connector: str, role: str, phase: str) -> None:
    s = spec(connector, attn=1, layers=4, trace=False, wait_s=15.0, timeout_s=15.0)
    begin = time.monotonic()
    with pytest.raises(RanksFailed, match="SIGKILL") as caught:
        run_ranks(breaking, s.size, s, role, phase, "die", silence_s=60)
    assert time.monotonic() - begin < 30
    assert {error.kind for error in caught.value.errors} == {"PeerLost"}


def asks_after_an_abort(context: RankContext, s: RunSpec) -> Any:
    """Attention aborts the group; what does its probe say, and what the FFN rank's?"""
    group = context.init_process_group(30.0)
    deployment.introduce(group, 30.0)
    with deployment.open_device("host", context.rank) as device:
        rank = deployment._Rank(s, context.rank, group, device)
        with rank.communicators(1) as (name,):
            if not s.is_ffn(context.rank):
                rank.soft.abort(name, 7)
            deployment.agree_success(group, "aborted", None, 30.0)
            try:
                rank.soft.ready(s.async_topology(context.rank), name)
            except CommError as error:
                return type(error).__name__, str(error)
    return "", ""


def test_an_abort_that_the_gate_sees_names_its_rank() -> None:
    own, peer = run_ranks(asks_after_an_abort, 2, spec("camasync", attn=1), silence_s=60)
    assert own[0] == "CommError" and peer[0] == "PeerLost"
    for _, text in (own, peer):
        assert "was aborted by rank 0 (reason 7)" in text


def silent(context: RankContext, s: RunSpec) -> Any:
    """Attention is alive and never sends."""
    plan = deployment._plan

    def slow(*args: Any) -> Any:
        made = plan(*args)
        if not s.is_ffn(context.rank):
            time.sleep(2.5)
        return made

    deployment._plan = slow
    try:
        rank_main(context, s, (StreamMode.OVERLAP,))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("connector", ["camp2p", "camasync"])
def test_a_peer_that_lives_and_never_sends_is_reported_and_not_waited_for(
    connector: str, capfd: pytest.CaptureFixture[str]
) -> None:
    s = spec(connector, attn=1, layers=2, trace=False, wait_s=1.0, timeout_s=15.0)
    s = replace(s, config=replace(s.config, stall_warn_s=0.2))
    results = run_ranks(silent, s.size, s, silence_s=60)
    ffn, attention = (results[rank] for rank in sorted((0, 1), key=lambda r: not s.is_ffn(r)))
    assert "FenceTimeout" in ffn and ("nothing came" in ffn or "not finished after 1 s" in ffn)
    assert "PeerLost" in attention and "aborted" in attention
    assert "waiting for 0." in capfd.readouterr().err


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
