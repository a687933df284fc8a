# SPDX-License-Identifier: Apache-2.0
"""Overlap figures and their bound, on traces whose answers are known by hand; and the picture."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from xmoe.cli import main
from xmoe.errors import ConfigError
from xmoe.pipeline.overlap import both_directions, figures
from xmoe.pipeline.timeline import draw
from xmoe.pipeline.trace import WAIT, WORK, Span, Trace, write

ORDER = {"recv": 0, "compute": 1, "send": 2}


def span(
    item: int,
    phase: str,
    start: float,
    duration: float,
    *,
    process: int = 0,
    order: int | None = None,
    slot: int | None = None,
    track: str = "",
    **more: Any,
) -> Span:
    args = {
        "item": item,
        "order": item * 3 + ORDER[phase] if order is None else order,
        "phase": phase,
        "slot": item if slot is None else slot,
        "layer": item,
        "stage": 0,
        "channel": "afd" if phase != "compute" else "ffn",
        "connector": "camasync",
        "step": 0,
        **more,
    }
    return Span(phase, WORK, process, track or phase, start, duration, args)


def trace_of(spans: list[Span], role: str = "ffn", **about: Any) -> Trace:
    processes = {s.process: {"rank": s.process, "role": role, "mode": "overlap"} for s in spans}
    return Trace(spans, processes, about)


def pipeline(items: int, recv: float, compute: float, send: float, slots: int = 8) -> list[Span]:
    """The best schedule of three streams: item n's phase follows its stream and its item."""
    free = dict.fromkeys(ORDER, 0.0)
    ends: dict[int, float] = {}
    spans = []
    for item in range(items):
        at = ends.get(item - slots, 0.0)
        for phase, took in (("recv", recv), ("compute", compute), ("send", send)):
            at = max(at, free[phase])
            spans.append(span(item, phase, at, took, slot=item % slots))
            at += took
            free[phase] = at
        ends[item] = at
    return spans


def test_a_perfect_pipeline_reaches_its_bound() -> None:
    one = figures(trace_of(pipeline(10, 2, 5, 3)))[0]
    assert one.items == 10
    assert one.bound == one.measured == 2 + 10 * 5 + 3
    assert one.serial_bound == 100
    assert one.ratio == 1.0 and one.efficiency == 1.0
    assert one.critical["ffn compute"] == 50


def test_what_is_lost_between_phases_is_what_is_missing_to_the_bound() -> None:
    late = [
        Span(s.name, s.category, s.process, s.track, s.start * 1.2, s.duration, s.args)
        for s in pipeline(10, 2, 5, 3)
    ]
    one = figures(trace_of(late))[0]
    assert one.bound == 55
    assert one.measured > 60
    assert 0 < one.efficiency < 1
    assert one.ratio is not None and one.ratio < 1


def test_few_slots_are_a_dependency() -> None:
    one = figures(trace_of(pipeline(10, 4, 4, 4, slots=1)))[0]
    assert one.bound == one.serial_bound == 120
    assert one.ratio is None  # nothing to save
    assert figures(trace_of(pipeline(10, 4, 4, 4, slots=2)))[0].bound < 120


def test_hidden_share_is_communication_during_compute() -> None:
    spans = [span(0, "recv", 0, 10), span(0, "compute", 10, 10), span(1, "recv", 15, 10)]
    wait = Span("wait for peer", WAIT, 0, "recv", 25, 50, dict(spans[0].args))
    rank = figures(trace_of([*spans, wait]))[0].ranks[0]
    assert rank.communication == 20 and rank.compute == 10
    assert rank.hidden == pytest.approx(5 / 20)
    assert rank.waiting == {"peer": 50}


def test_one_group_cannot_overlap_and_two_can() -> None:
    """CAMP2P: a receive waits for the group's send before it, whatever the streams."""

    def spans(groups: int) -> list[Span]:
        return [
            span(i, phase, 100.0 * i, 4, slot=i % 2, channel=f"g{i % groups}", connector="camp2p")
            for i in range(6)
            for phase in ORDER
        ]

    assert figures(trace_of(spans(1)))[0].bound == 6 * 12
    assert figures(trace_of(spans(2)))[0].bound < 6 * 12


def test_kernels_that_need_all_cores_do_not_overlap() -> None:
    spans = [
        span(0, "recv", 0, 10, vector_cores=48), span(0, "compute", 10, 10, vector_cores=8),
        span(1, "recv", 20, 10, vector_cores=48), span(1, "compute", 30, 10, vector_cores=8),
    ]  # fmt: skip
    assert figures(trace_of(spans))[0].bound == 30
    assert figures(trace_of(spans, vector_cores=48))[0].bound == 40


def test_messages_between_ranks_are_dependencies() -> None:
    """One Attention rank, one FFN rank: dispatch, receive, compute, send, combine is one chain."""
    attention = [
        span(0, "send", 0, 3, process=0, order=0),
        span(1, "recv", 20, 2, process=0, order=1),
        span(1, "compute", 22, 1, process=0, order=2),
        span(1, "send", 23, 3, process=0, order=3),
        span(2, "recv", 40, 2, process=0, order=4),
    ]
    ffn = [
        span(i, phase, 20.0 * i, 4, process=1, peer=0 if phase != "compute" else -1)
        for i in range(2)
        for phase in ORDER
    ]
    trace = trace_of([*attention, *ffn])
    trace.processes[0]["role"] = "attention"
    trace.processes[1]["role"] = "ffn"
    one = figures(trace)[0]
    assert one.bound == 3 + 12 + 2 + 1 + 3 + 12 + 2
    assert one.serial_bound == one.bound


def test_both_directions_counts_receives_beside_sends() -> None:
    spans = [span(0, "send", 0, 10), span(1, "recv", 5, 10), span(2, "recv", 20, 1)]
    assert both_directions(trace_of(spans), 0) == (1, 5.0)


def test_only_the_asked_step_counts() -> None:
    first, second = pipeline(3, 2, 5, 3), pipeline(3, 2, 5, 3)
    later = [
        Span(s.name, s.category, 0, s.track, s.start + 1000, s.duration,
             {**s.args, "step": 1, "item": s.args["item"] + 3, "order": s.args["order"] + 9})
        for s in second
    ]  # fmt: skip
    trace = trace_of([*first, *later])
    assert figures(trace)[0].measured == figures(trace, step=0)[0].measured == 20


def test_a_trace_without_device_work_has_no_figures() -> None:
    with pytest.raises(ConfigError, match="no device work"):
        figures(Trace([], {0: {"rank": 0, "role": "ffn", "mode": "serial"}}, {}))


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "trace.json"
    spans = pipeline(6, 200, 500, 300)
    write(
        Trace(spans, trace_of(spans).processes, {"schema": "xmoe.pipeline.trace/1", "device": "d"}),
        path,
    )
    picture = tmp_path / "out.png"
    assert main(["pipeline", "timeline", str(path), str(picture)]) == 0
    assert picture.read_bytes()[:4] == b"\x89PNG"
    assert main(["pipeline", "timeline", str(path), str(picture), "--mode", "serial"]) == 2
    assert main(["pipeline", "timeline", str(path), str(tmp_path / "out.txt")]) == 2
    assert main(["pipeline", "timeline", str(path), str(picture), "--from-ms", "900"]) == 2


def test_without_matplotlib_the_error_names_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"pip install 'xmoe\[bench\]'"):
        draw(trace_of(pipeline(1, 1, 1, 1)), tmp_path / "out.png")
