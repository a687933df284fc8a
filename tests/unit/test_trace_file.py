# SPDX-License-Identifier: Apache-2.0
"""Trace files: what the merger makes of phases, tasks and kernels, and what a reader refuses."""

from __future__ import annotations

import copy
import json
import time
from pathlib import Path
from typing import Any

import pytest

from xmoe.errors import ConfigError
from xmoe.kernels.ops.cam.soft import KernelTrace, TaskTrace
from xmoe.pipeline.items import TraceEntry
from xmoe.pipeline.trace import HOST, WAIT, WORK, RankTrace, Trace, merge, read, to_json, write

STREAMS = {11: "recv", 12: "compute", 13: "send"}
ZERO = time.clock_gettime_ns(time.CLOCK_MONOTONIC)


def entry(
    phase: str, at_us: float, *, layer: int = 0, slot: int = 0, generation: int = 1
) -> TraceEntry:
    start = time.perf_counter() - (time.clock_gettime_ns(time.CLOCK_MONOTONIC) - ZERO) / 1e9
    stream = "host" if phase == "metadata" else phase
    begin = start + at_us / 1e6
    return TraceEntry(
        "camasync", phase, layer, slot, "afd", 0, begin, begin + 2e-6, stream, 0, generation
    )


def task(name: str, stream: int, start_us: float, end_us: float) -> TaskTrace:
    return TaskTrace(name, stream, 0, 0, ZERO + int(start_us * 1e3), ZERO + int(end_us * 1e3))


def kernel(op: str, stream: int, *times_us: float, peer: int = -1) -> KernelTrace:
    times = [ZERO + int(t * 1e3) for t in times_us]
    return KernelTrace(op, "g", 0, 0, 8, 0, 0, times[0], times[1], times[2], times[3], peer, stream)


def one_item() -> RankTrace:
    """A receive that waits for cores and then its peer, compute behind an event, a send."""
    return RankTrace(
        1,
        "ffn",
        "overlap",
        [
            entry("recv", 0, layer=-1, generation=1),
            entry("metadata", 100, layer=3),
            entry("compute", 110, layer=3, generation=2),
            entry("send", 120, layer=3, generation=3),
        ],
        [kernel("Recv", 11, 5, 15, 60, 90), kernel("Send", 13, 301, 301, 301, 340)],
        [
            task("Recv", 11, 4, 91),
            task("event record", 11, 91, 92),
            task("event wait", 12, 6, 92),
            task("GroupedMatmul", 12, 92, 200),
            task("Activation", 12, 200, 290),
            task("event record", 12, 290, 291),
            task("event wait", 13, 7, 300),
            task("Send", 13, 300, 341),
            task("event record", 13, 341, 342),
            task("memcpy", 99, 0, 5),
        ],
        STREAMS,
        [4],
    )


def by(trace: Trace, name: str) -> Any:
    return next(span for span in trace.spans if span.name == name)


def test_waiting_is_apart_from_work_and_every_span_says_which_item_it_is() -> None:
    trace = merge([one_item()], device="d")
    found = [(s.name, s.category, s.track, round(s.duration)) for s in trace.of(1, WORK, WAIT)]
    assert sorted(found) == sorted(
        [
            ("wait for cores", WAIT, "recv", 10),
            ("wait for peer", WAIT, "recv", 45),
            ("Recv", WORK, "recv", 30),
            ("wait for event", WAIT, "compute", 86),
            ("GroupedMatmul", WORK, "compute", 108),
            ("Activation", WORK, "compute", 90),
            ("wait for event", WAIT, "send", 293),
            ("Send", WORK, "send", 39),
        ]
    )
    assert trace.about["unmatched_phases"] == 0
    for span in trace.spans:
        assert span.args["layer"] == 3  # also of the receive, which did not know it yet
        assert span.args["item"] == 0 and span.args["slot"] == 0 and span.args["step"] == 0
    assert by(trace, "Activation").args["generation"] == 2
    assert by(trace, "Recv").args["vector_cores"] == 8


def test_host_and_device_times_share_one_zero() -> None:
    trace = merge([one_item()], device="d")
    host = by(trace, "recv camasync")
    assert host.category == HOST and host.track == "host"
    assert by(trace, "wait for cores").start - host.start == pytest.approx(5, abs=200)
    assert min(span.start for span in trace.spans) == 0


def test_phases_that_do_not_fit_the_device_tasks_are_counted_and_left_unlabelled() -> None:
    rank = one_item()
    more = RankTrace(
        rank.rank, rank.role, rank.mode, rank.entries, rank.kernels,
        [*rank.tasks, task("event record", 13, 400, 401)], STREAMS,
    )  # fmt: skip
    trace = merge([more], device="d")
    assert trace.about["unmatched_phases"] == 1
    assert "layer" not in by(trace, "Send").args
    assert by(trace, "Recv").args["layer"] == 3


def test_items_are_told_apart_by_slot_phase_and_layer() -> None:
    entries = [
        entry("recv", 0, layer=0), entry("recv", 1, layer=0, slot=1), entry("compute", 2),
        entry("compute", 3, slot=1), entry("recv", 4, layer=1), entry("compute", 5, layer=9),
    ]  # fmt: skip
    trace = merge([RankTrace(0, "ffn", "overlap", entries)], device="d")
    assert [span.args["item"] for span in trace.of(0, HOST)] == [0, 1, 0, 1, 2, 3]


def test_modes_of_one_rank_are_processes_of_their_own() -> None:
    rank = one_item()
    serial = RankTrace(1, "ffn", "serial", rank.entries)
    trace = merge([rank, serial], device="d")
    assert trace.processes[1]["mode"] == "overlap" and trace.processes[1001]["mode"] == "serial"


def test_a_written_file_reads_back_and_is_what_perfetto_expects(tmp_path: Path) -> None:
    trace = merge([one_item()], device="software device", about={"connector": "camasync"})
    path = tmp_path / "trace.json"
    write(trace, path)
    data = json.loads(path.read_text())
    kinds = {event["ph"] for event in data["traceEvents"]}
    assert kinds == {"M", "X"}
    names = [e["args"]["name"] for e in data["traceEvents"] if e["name"] == "thread_name"]
    assert names == ["host", "recv", "compute", "send"]
    back = read(path)
    assert back.processes == trace.processes
    assert back.about["device"] == "software device"
    assert [(s.name, s.track, s.args) for s in back.spans] == [
        (s.name, s.track, dict(s.args)) for s in trace.spans
    ]
    assert not list(tmp_path.glob("*.part"))


def broken(change: str) -> Any:
    data = to_json(merge([one_item()], device="d"))
    data = copy.deepcopy(data)
    event = next(e for e in data["traceEvents"] if e["ph"] == "X")
    if change == "schema":
        data["otherData"]["schema"] = "other/1"
    elif change == "events":
        data["traceEvents"] = {}
    elif change == "processes":
        data["otherData"]["processes"] = {"1": {"rank": 1}}
    elif change == "phase":
        event["ph"] = "B"
    elif change == "negative":
        event["dur"] = -1
    elif change == "not a number":
        event["ts"] = float("nan")
    elif change == "process":
        event["pid"] = 77
    elif change == "track":
        event["tid"] = 9
    elif change == "category":
        event["cat"] = "else"
    else:
        del event[change]
    return data


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("schema", "otherData.schema='other/1'"),
        ("events", 'no list "traceEvents"'),
        ("processes", "process '1' without rank"),
        ("phase", 'neither "X" nor "M"'),
        ("negative", "dur=-1"),
        ("not a number", "ts=nan"),
        ("process", "unknown process 77"),
        ("track", "or track 9"),
        ("category", "cat='else'"),
        ("name", "name=None"),
        ("args", "args=None"),
        ("ts", "ts=None"),
        ("pid", "pid=None"),
    ],
)
def test_a_file_with_something_wrong_is_one_clear_error(
    tmp_path: Path, change: str, told: str
) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(broken(change)))
    with pytest.raises(ConfigError) as caught:
        read(path)
    assert told in str(caught.value) and "allowed:" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "told"), [("{", "read as JSON"), ("[]", "traceEvents"), ("\ud800", "read as JSON")]
)
def test_what_is_no_trace_at_all_is_refused(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(text.encode(errors="surrogatepass"))
    with pytest.raises(ConfigError, match=told):
        read(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        read(tmp_path / "none.json")
