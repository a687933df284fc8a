# SPDX-License-Identifier: Apache-2.0
"""How much communication a trace hides behind compute, and how much its dependencies would allow.

The bound is the longest path through the graph of the trace's own phases, each as long as its
measured work (waiting left out), with the edges the schedule has: an item's phases, order on a
stream, slot reuse, channel rules, cores that two kernels cannot share, and messages between
ranks. No schedule with the same work and the same order can be shorter. What host and
device add on top is the distance to it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from xmoe.errors import ConfigError
from xmoe.pipeline.trace import WAIT, WORK, Span, Trace

_COMMUNICATION = ("recv", "send")


@dataclass
class Node:
    """One phase of one item: microseconds of work, and when that was."""

    process: int
    track: str
    item: int
    order: int
    phase: str
    slot: int
    channel: str
    connector: str
    peer: int
    cores: int = 0
    work: float = 0.0
    start: float = float("inf")
    end: float = 0.0
    before: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class RankFigures:
    """One rank's share, microseconds.

    Attributes:
        hidden: part of the communication work during which compute ran too, 0 to 1.
        waiting: by reason: event, cores, peer.
    """

    rank: int
    role: str
    communication: float
    compute: float
    hidden: float
    waiting: dict[str, float]


@dataclass(frozen=True)
class Figures:
    """One mode of a trace, microseconds.

    Attributes:
        measured: from the first work to the last.
        bound: longest path of the dependencies; serial_bound: the same with one stream per rank.
        critical: work on the longest path by (role, phase).
    """

    mode: str
    items: int
    measured: float
    bound: float
    serial_bound: float
    critical: dict[str, float]
    ranks: tuple[RankFigures, ...]

    @property
    def efficiency(self) -> float:
        """bound / measured: 1 when nothing but dependencies and work took time."""
        return self.bound / self.measured if self.measured else 0.0

    @property
    def possible(self) -> float:
        """Microseconds that overlap can save."""
        return self.serial_bound - self.bound

    @property
    def achieved(self) -> float:
        """Microseconds that it did save, against one stream without any overhead."""
        return self.serial_bound - self.measured

    @property
    def ratio(self) -> float | None:
        """achieved / possible; None where there is nothing to save."""
        return self.achieved / self.possible if self.possible > 1e-3 * self.bound else None

    def to_json(self) -> dict[str, Any]:
        """The figures as JSON values."""
        return {
            "mode": self.mode,
            "items": self.items,
            "measured_us": round(self.measured, 1),
            "bound_us": round(self.bound, 1),
            "serial_bound_us": round(self.serial_bound, 1),
            "bound_over_measured": round(self.efficiency, 4),
            "overlap_achieved_over_possible": None if self.ratio is None else round(self.ratio, 4),
            "critical_path_us": {key: round(value, 1) for key, value in self.critical.items()},
            "ranks": [
                {
                    "rank": r.rank,
                    "role": r.role,
                    "communication_us": round(r.communication, 1),
                    "compute_us": round(r.compute, 1),
                    "hidden_share": round(r.hidden, 4),
                    "waiting_us": {key: round(value, 1) for key, value in r.waiting.items()},
                }
                for r in self.ranks
            ],
        }


def figures(trace: Trace, step: int | None = None) -> list[Figures]:
    """The figures of each mode in the trace, for one step: the last one, since the first warms up.

    Raises:
        ConfigError: the trace has no device work that could be matched with phases.
    """
    steps = [span.args["step"] for span in trace.spans if "step" in span.args]
    wanted = max(steps, default=0) if step is None else step
    chosen = [s for s in trace.spans if s.args.get("step") == wanted]
    part = Trace(chosen, trace.processes, trace.about)
    modes = list(dict.fromkeys(what["mode"] for what in trace.processes.values()))
    return [_mode_figures(part, mode) for mode in modes]


def _mode_figures(trace: Trace, mode: str) -> Figures:
    processes = [p for p, what in trace.processes.items() if what["mode"] == mode]
    nodes = _nodes(trace, processes)
    if not nodes:
        raise ConfigError(
            f"mode {mode}: no device work with phases in this trace; allowed: a trace with device "
            "times; next: record it with tracing on from the first item"
        )
    _add_edges(trace, nodes, one_stream=False)
    bound, path = _longest(nodes)
    critical: dict[str, float] = defaultdict(float)
    for number in path:
        node = nodes[number]
        critical[f"{trace.processes[node.process]['role']} {node.phase}"] += node.work
    _add_edges(trace, nodes, one_stream=True)
    serial, _ = _longest(nodes)
    ffn = {p for p in processes if trace.processes[p]["role"] == "ffn"}
    return Figures(
        mode,
        len({(n.process, n.item) for n in nodes if n.process in ffn}),
        max(n.end for n in nodes) - min(n.start for n in nodes),
        bound,
        serial,
        dict(sorted(critical.items(), key=lambda entry: -entry[1])),
        tuple(_rank_figures(trace, process) for process in sorted(processes)),
    )


def _rank_figures(trace: Trace, process: int) -> RankFigures:
    work = [s for s in trace.of(process, WORK) if "phase" in s.args]
    communication = _union(s for s in work if s.args["phase"] in _COMMUNICATION)
    compute = _union(s for s in work if s.args["phase"] == "compute")
    hidden = _length(_common(communication, compute))
    total = _length(communication)
    waiting: dict[str, float] = defaultdict(float)
    for span in trace.of(process, WAIT):
        waiting[span.name.removeprefix("wait for ")] += span.duration
    what = trace.processes[process]
    return RankFigures(
        what["rank"], what["role"], total, _length(compute), hidden / total if total else 0.0,
        dict(waiting),
    )  # fmt: skip


Interval = tuple[float, float]


def _union(spans: Iterable[Span]) -> list[Interval]:
    merged: list[Interval] = []
    for span in sorted(spans, key=lambda s: s.start):
        if merged and span.start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], span.end))
        else:
            merged.append((span.start, span.end))
    return merged


def _common(left: Sequence[Interval], right: Sequence[Interval]) -> list[Interval]:
    found = []
    a = b = 0
    while a < len(left) and b < len(right):
        begin, end = max(left[a][0], right[b][0]), min(left[a][1], right[b][1])
        if begin < end:
            found.append((begin, end))
        if left[a][1] < right[b][1]:
            a += 1
        else:
            b += 1
    return found


def _length(intervals: Iterable[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)


def _nodes(trace: Trace, processes: Sequence[int]) -> list[Node]:
    found: dict[tuple[int, int], Node] = {}
    for span in trace.spans:
        if span.category != WORK or span.process not in processes or "order" not in span.args:
            continue
        args = span.args
        key = (span.process, args["order"])
        node = found.get(key)
        if node is None:
            node = found[key] = Node(
                span.process, span.track, args["item"], args["order"], args["phase"], args["slot"],
                args["channel"], args["connector"], args.get("peer", -1),
            )  # fmt: skip
        node.work += span.duration
        node.cores = max(node.cores, args.get("vector_cores", 0))
        node.start = min(node.start, span.start)
        node.end = max(node.end, span.end)
    return [found[key] for key in sorted(found)]


def _add_edges(trace: Trace, nodes: list[Node], *, one_stream: bool) -> None:
    """`before` of every node. Nodes of a process are in the order in which they were issued."""
    last_stream: dict[tuple[int, str], int] = {}
    last_item: dict[tuple[int, int], int] = {}
    last_slot: dict[tuple[int, int], int] = {}
    last_channel: dict[tuple[int, str], int] = {}
    for number, node in enumerate(nodes):
        process = node.process
        stream = (process, "main" if one_stream else node.track)
        item, slot, channel = (process, node.item), (process, node.slot), (process, node.channel)
        edges = [last_stream.get(stream), last_item.get(item)]
        if item not in last_item:
            edges.append(last_slot.get(slot))
        exclusive = node.connector == "camp2p" and node.phase in _COMMUNICATION
        credit = trace.processes[process]["role"] == "attention" and node.phase == "send"
        if exclusive or credit:
            edges.append(last_channel.get(channel))
        node.before = [edge for edge in edges if edge is not None]
        last_stream[stream] = last_item[item] = last_slot[slot] = number
        if node.phase in _COMMUNICATION and (node.connector == "camp2p" or node.phase == "recv"):
            last_channel[channel] = number
    if not one_stream:
        _add_core_conflicts(nodes, int(trace.about.get("vector_cores", 0)))
    _add_messages(trace, nodes)


def _add_core_conflicts(nodes: list[Node], vector_cores: int) -> None:
    """Kernels that together need more cores than there are follow one another, as they did."""
    latest: dict[tuple[int, str], int] = {}
    for number in sorted(range(len(nodes)), key=lambda n: nodes[n].start):
        node = nodes[number]
        for (process, track), other in latest.items():
            together = nodes[other].cores + node.cores
            if process == node.process and track != node.track and 0 < vector_cores < together:
                node.before.append(other)
        latest[node.process, node.track] = number


def _add_messages(trace: Trace, nodes: list[Node]) -> None:
    """The k-th send of one rank to another is the other's k-th receive from it."""
    ffn = [p for p in {n.process for n in nodes} if trace.processes[p]["role"] == "ffn"]
    sent: dict[tuple[int, int, str], list[int]] = defaultdict(list)
    received: dict[tuple[int, int, str], list[int]] = defaultdict(list)
    others = {n.process for n in nodes} - set(ffn)
    width = int(trace.about.get("tp_size", 1))
    for number, node in enumerate(nodes):
        if node.phase not in _COMMUNICATION:
            continue
        for peer in ffn if node.process in others else sorted(others):
            if not _talk(trace, node, peer, len(ffn), width):
                continue
            if node.phase == "send":
                sent[node.process, peer, node.channel].append(number)
            else:
                received[peer, node.process, node.channel].append(number)
    for key, receives in received.items():
        for send, receive in zip(sent.get(key, ()), receives, strict=False):
            nodes[receive].before.append(send)


def _talk(trace: Trace, node: Node, peer: int, ffn_ranks: int, tp_size: int) -> bool:
    mine, other = trace.processes[node.process], trace.processes[peer]
    ranks = {mine["role"]: mine["rank"], other["role"]: other["rank"]}
    if node.connector == "camp2p":  # FFN ranks come first; each serves every F-th Attention rank
        return bool((ranks["attention"] - ffn_ranks) % ffn_ranks == ranks["ffn"])
    if mine["role"] == "ffn":
        return bool(node.peer <= ranks["attention"] < node.peer + tp_size)
    return True


def _longest(nodes: Sequence[Node]) -> tuple[float, list[int]]:
    """Length of the longest path and its nodes. Raises ConfigError when the edges form a circle."""
    waiting = [len(node.before) for node in nodes]
    after: list[list[int]] = [[] for _ in nodes]
    for number, node in enumerate(nodes):
        for edge in node.before:
            after[edge].append(number)
    ready = [number for number, count in enumerate(waiting) if count == 0]
    finish = [0.0] * len(nodes)
    previous = [-1] * len(nodes)
    done = 0
    while ready:
        number = ready.pop()
        done += 1
        begin = 0.0
        for edge in nodes[number].before:
            if finish[edge] > begin:
                begin, previous[number] = finish[edge], edge
        finish[number] = begin + nodes[number].work
        for follower in after[number]:
            waiting[follower] -= 1
            if waiting[follower] == 0:
                ready.append(follower)
    if done != len(nodes):
        raise ConfigError(
            f"{len(nodes) - done} phases of the trace wait for each other; allowed: a schedule; "
            "next: record the trace from the first item to the last"
        )
    last = max(range(len(nodes)), key=finish.__getitem__)
    path = []
    at = last
    while at >= 0:
        path.append(at)
        at = previous[at]
    return finish[last], path[::-1]


def both_directions(trace: Trace, process: int) -> tuple[int, float]:
    """How often, and for how many microseconds, work of receives and of sends ran side by side."""
    work = [s for s in trace.of(process, WORK) if "phase" in s.args]
    receives = _union(s for s in work if s.args["phase"] == "recv")
    sends = _union(s for s in work if s.args["phase"] == "send")
    common = _common(receives, sends)
    return len(common), _length(common)
