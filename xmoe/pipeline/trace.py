# SPDX-License-Identifier: Apache-2.0
"""Chrome trace JSON of a pipeline: the executor's phases, and what the device did for them.

    RankTrace (one rank and mode) -> merge() -> Trace -> write() -> Perfetto, timeline, figures

A process for each rank, a track for each stream and one for the host. Waiting is an event of its
own ("wait": for an event, for cores, for a peer) beside "work", so that a receive that spins does
not look like communication. Host and device times are both CLOCK_MONOTONIC; ranks of one machine
share it.
"""

from __future__ import annotations

import bisect
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xmoe.errors import ConfigError
from xmoe.inputs import read_json
from xmoe.outputs import Output
from xmoe.pipeline.items import PhaseKind, TraceEntry

if TYPE_CHECKING:
    from xmoe.kernels.ops.cam.soft import KernelTrace, TaskTrace

SCHEMA = "xmoe.pipeline.trace/1"
TRACKS = ("host", "recv", "compute", "send", "main")
WORK, WAIT, HOST = "work", "wait", "host"
_RECORD, _EVENT_WAIT = "event record", "event wait"
_SHORT_NS = 100  # a wait that was over before it began is no event
_KINDS = [kind.value for kind in PhaseKind]


@dataclass(frozen=True)
class RankTrace:
    """What one rank recorded in one mode.

    Attributes:
        entries: the executor's own.
        kernels, tasks: the device's; empty where a device gives none.
        streams: number of a device stream -> its track; from `executor.stream_handles`.
        marks: number of entries at the end of each step.
    """

    rank: int
    role: str
    mode: str
    entries: Sequence[TraceEntry]
    kernels: Sequence[KernelTrace] = ()
    tasks: Sequence[TaskTrace] = ()
    streams: Mapping[int, str] = field(default_factory=dict)
    marks: Sequence[int] = ()


@dataclass(frozen=True)
class Span:
    """One event: microseconds since the trace's zero."""

    name: str
    category: str
    process: int
    track: str
    start: float
    duration: float
    args: Mapping[str, Any]

    @property
    def end(self) -> float:
        return self.start + self.duration


@dataclass
class Trace:
    """A whole trace; `processes` holds rank, role and mode of each."""

    spans: list[Span]
    processes: dict[int, dict[str, Any]]
    about: dict[str, Any] = field(default_factory=dict)

    def of(self, process: int, *categories: str) -> list[Span]:
        """The process's spans, optionally of some categories only, by time."""
        found = [s for s in self.spans if s.process == process]
        return [s for s in found if not categories or s.category in categories]


def merge(ranks: Sequence[RankTrace], *, device: str, about: Mapping[str, Any] = {}) -> Trace:
    """One trace out of the ranks' records. `device` is what the report calls it."""
    modes = list(dict.fromkeys(rank.mode for rank in ranks))
    offset = _clock_offset_ns()
    built: list[Span] = []
    processes = {}
    unmatched = 0
    for rank in ranks:
        process = rank.rank + 1000 * modes.index(rank.mode)
        processes[process] = {"rank": rank.rank, "role": rank.role, "mode": rank.mode}
        spans, missing = _rank_spans(rank, process, offset)
        built += spans
        unmatched += missing
    zero = min((span.start for span in built), default=0.0)
    shifted = [
        Span(s.name, s.category, s.process, s.track, s.start - zero, s.duration, s.args)
        for s in sorted(built, key=lambda s: (s.start, -s.duration))
    ]
    notes = {
        "schema": SCHEMA,
        "device": device,
        "clock": {"kind": "CLOCK_MONOTONIC", "boot": _boot_id(), "zero_us": zero},
        "unmatched_phases": unmatched,
        **about,
    }
    return Trace(shifted, processes, notes)


def _clock_offset_ns() -> int:
    """What to add to a host time. On Linux both are one clock; elsewhere the closest of several
    readings, because the process may be interrupted between the two."""
    if "CLOCK_MONOTONIC" in time.get_clock_info("perf_counter").implementation:
        return 0
    host, device = time.perf_counter_ns, time.monotonic_ns
    readings = [(host(), device(), host()) for _ in range(32)]
    before, middle, after = min(readings, key=lambda one: one[2] - one[0])
    return middle - (before + after) // 2


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _rank_spans(rank: RankTrace, process: int, offset_ns: int) -> tuple[list[Span], int]:
    labels = _labels(rank.entries, rank.marks)
    spans = []
    for entry, args in zip(rank.entries, labels, strict=True):
        start = entry.start * 1e6 + offset_ns / 1e3
        took = (entry.end - entry.start) * 1e6
        spans.append(Span(f"{entry.phase} {entry.op}", HOST, process, "host", start, took, args))
    missing = 0
    for number, track in rank.streams.items():
        tasks = sorted((t for t in rank.tasks if t.stream == number), key=lambda t: t.start_ns)
        kernels = sorted((k for k in rank.kernels if k.stream == number), key=lambda k: k.start_ns)
        phases = [
            args for entry, args in zip(rank.entries, labels, strict=True) if entry.stream == track
        ]
        found = _phases_of(tasks)
        # An event recording ends each phase; other counts mean that something else used the stream.
        if len(found) != len(phases):
            missing += abs(len(found) - len(phases))
            phases = [{} for _ in found]
        for group, args in zip(found, phases, strict=True):
            for task in group:
                spans += _task_spans(task, kernels, process, track, args)
    return spans, missing


def _labels(entries: Sequence[TraceEntry], marks: Sequence[int]) -> list[dict[str, Any]]:
    """Each phase's arguments; `item` counts the rank's items, `order` its phases."""
    last: dict[int, tuple[int, int, int]] = {}
    found = []
    items = 0
    for order, entry in enumerate(entries):
        position = _KINDS.index(entry.phase)
        before = last.get(entry.slot)
        other = before is not None and before[2] not in (-1, entry.layer)
        if before is None or other or position <= before[1]:
            number, items = items, items + 1
        else:
            number = before[0]
        last[entry.slot] = (number, position, entry.layer)
        found.append(
            {
                "item": number,
                "order": order,
                "step": bisect.bisect_right(marks, order),
                "phase": entry.phase,
                "slot": entry.slot,
                "layer": entry.layer,
                "stage": entry.stage,
                "channel": entry.channel,
                "sequence": entry.sequence,
                "generation": entry.generation,
                "connector": entry.op,
            }
        )
    # Only the metadata phase learns the layer of a CAMAsync item.
    layers = {args["item"]: args["layer"] for args in found}
    for args in found:
        args["layer"] = layers[args["item"]]
    return found


def _phases_of(tasks: Iterable[TaskTrace]) -> list[list[TaskTrace]]:
    groups: list[list[TaskTrace]] = []
    current: list[TaskTrace] = []
    for task in tasks:
        if task.name == _RECORD:
            groups.append(current)
            current = []
        else:
            current.append(task)
    return groups


def _task_spans(
    task: TaskTrace,
    kernels: Sequence[KernelTrace],
    process: int,
    track: str,
    args: Mapping[str, Any],
) -> list[Span]:
    kernel = next((k for k in kernels if task.start_ns <= k.start_ns <= task.end_ns), None)
    parts: list[tuple[str, str, int, int]]
    more: dict[str, Any] = dict(args)
    if task.name == _EVENT_WAIT:
        parts = [("wait for event", WAIT, task.start_ns, task.end_ns)]
    elif kernel is None:
        parts = [(task.name, WORK, task.start_ns, task.end_ns)]
    else:
        more |= {"group": kernel.group, "tag": kernel.tag, "vector_cores": kernel.vector_cores}
        more |= {"cube_cores": kernel.cube_cores, "peer": kernel.peer, "status": kernel.status}
        parts = [
            ("wait for cores", WAIT, kernel.start_ns, kernel.cores_ns),
            ("wait for peer", WAIT, kernel.cores_ns, kernel.ready_ns),
            (kernel.op, WORK, kernel.ready_ns, kernel.end_ns),
        ]
    return [
        Span(name, category, process, track, begin / 1e3, (end - begin) / 1e3, more)
        for name, category, begin, end in parts
        if category == WORK or end - begin > _SHORT_NS
    ]


def to_json(trace: Trace) -> dict[str, Any]:
    """The trace as Chrome's trace format: metadata, then complete ("X") events."""
    events: list[dict[str, Any]] = []
    for process, what in sorted(trace.processes.items()):
        name = f"rank {what['rank']} {what['role']} {what['mode']}"
        events.append(_meta("process_name", process, 0, name=name))
        used = {span.track for span in trace.spans if span.process == process}
        for tid, track in enumerate(TRACKS):
            if track in used:
                events.append(_meta("thread_name", process, tid, name=track))
                events.append(_meta("thread_sort_index", process, tid, sort_index=tid))
    for span in trace.spans:
        events.append(
            {
                "ph": "X",
                "name": span.name,
                "cat": span.category,
                "pid": span.process,
                "tid": TRACKS.index(span.track),
                "ts": round(span.start, 3),
                "dur": round(span.duration, 3),
                "args": dict(span.args),
            }
        )
    about = {**trace.about, "processes": {str(k): v for k, v in trace.processes.items()}}
    return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": about}


def _meta(kind: str, process: int, tid: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": tid, "args": args}


def write(trace: Trace, file: Output | Path) -> None:
    """Write the file; readers never see half of it.

    Raises:
        OutputError: it cannot be written.
    """
    output = Output("trace", file) if isinstance(file, Path) else file
    output.write(json.dumps(to_json(trace), separators=(",", ":")) + "\n")


def read(path: Path) -> Trace:
    """Read a file that `write` made.

    Raises:
        ConfigError: not readable, not JSON, or not such a trace: the first thing that is wrong.
    """
    try:
        data = read_json(path, "check the path, or make a new one with `pipeline run --trace`")
    except FileNotFoundError:
        raise _bad(path, "does not exist") from None
    if not isinstance(data, dict) or not isinstance(data.get("traceEvents"), list):
        raise _bad(path, 'has no list "traceEvents"')
    about = data.get("otherData")
    if not isinstance(about, dict) or about.get("schema") != SCHEMA:
        got = about.get("schema") if isinstance(about, dict) else None
        raise _bad(path, f"has otherData.schema={got!r}, not {SCHEMA!r}")
    processes = about.get("processes")
    if not isinstance(processes, dict):
        raise _bad(path, 'has no object "otherData.processes"')
    found = {}
    for key, what in processes.items():
        if (
            not str(key).isdigit()
            or not isinstance(what, dict)
            or {"rank", "role", "mode"} - set(what)
        ):
            raise _bad(path, f"has process {key!r} without rank, role and mode")
        found[int(key)] = what
    spans = [
        _span(path, number, event, found)
        for number, event in enumerate(data["traceEvents"])
        if not (isinstance(event, dict) and event.get("ph") == "M")
    ]
    rest = {key: value for key, value in about.items() if key != "processes"}
    return Trace(spans, found, rest)


_FIELDS = (("name", str), ("cat", str), ("pid", int), ("tid", int), ("args", dict))


def _span(path: Path, number: int, event: Any, processes: Mapping[int, Any]) -> Span:
    where = f"has event {number} "
    if not isinstance(event, dict) or event.get("ph") != "X":
        raise _bad(path, where + 'that is neither "X" nor "M"')
    for key, kind in _FIELDS:
        if not isinstance(event.get(key), kind):
            raise _bad(path, where + f"with {key}={event.get(key)!r}, not {kind.__name__}")
    for key in ("ts", "dur"):
        value = event.get(key)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
            raise _bad(path, where + f"with {key}={value!r}, not a number of microseconds")
    if event["pid"] not in processes or not 0 <= event["tid"] < len(TRACKS):
        raise _bad(path, where + f"on unknown process {event['pid']} or track {event['tid']}")
    if event["cat"] not in (WORK, WAIT, HOST):
        raise _bad(path, where + f"with cat={event['cat']!r}")
    track, times = TRACKS[event["tid"]], (float(event["ts"]), float(event["dur"]))
    return Span(event["name"], event["cat"], event["pid"], track, *times, event["args"])


def _bad(path: Path, problem: str) -> ConfigError:
    return ConfigError(
        f"{path} {problem}; allowed: a file of `xmoe pipeline run --trace`; next: make a new one"
    )
