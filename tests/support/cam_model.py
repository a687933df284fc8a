# SPDX-License-Identifier: Apache-2.0
"""Explicit-state models of CAMP2P and CAMAsync under a three-stream executor.

A model is a finite set of kernels. A kernel is issued by its host, arrives at the head of its
stream when its events fired, starts when it is first in line and its cores are free, spins, and
finishes when its protocol condition holds. Where the order is open (which host acts next, which
kernel is faster) all orders are explored. `explore` is a breadth-first search, so a counterexample
is a shortest one.

Modelled of the device: exclusive cores in order of arrival; kernels that spin with their cores
held; a wait on an event that was not recorded yet does nothing (torch_npu). Of CAMP2P: one launch
counter per rank and group, flags compared for equality. Of CAMAsync: one slot per Attention group,
round-robin cursor, nothing in the device that enforces the credit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

IDLE, ISSUED, WAITING, RUNNING, DONE = range(5)


@dataclass(frozen=True)
class Kernel:
    """One launch. All references are kernel names.

    `after`: the host waits until these are done (it reads a result, or observes completion).
    `waits`: event waits on the stream. `recorded`: of these the host makes sure they were issued
    before (without it a wait may be a no-op). `gate`: the host asks the protocol before issuing.
    """

    name: str
    stream: str
    cores: int = 0
    after: tuple[str, ...] = ()
    waits: tuple[str, ...] = ()
    recorded: bool = True
    gate: bool = False


State = tuple[tuple[int, ...], tuple[int, ...], frozenset[tuple[int, int]], tuple[int, ...]]
"""Kernel states, kernels in line for cores, dropped waits, protocol variables."""


@dataclass
class Result:
    """What the search found. `trace` leads to the first problem."""

    states: int
    problem: str = ""
    trace: tuple[str, ...] = ()
    stuck: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.problem


@dataclass
class Model:
    """Kernels plus the protocol's hooks; hooks change `v` in place and return a violation or ""."""

    kernels: list[Kernel]
    total_cores: int
    variables: tuple[int, ...]
    start: Callable[[Kernel, list[int]], str]
    ready: Callable[[Kernel, list[int]], bool]
    finish: Callable[[Kernel, list[int]], str]
    gate: Callable[[Model, State], bool] = lambda model, state: True
    index: dict[str, int] = field(default_factory=dict)
    before: list[int | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.index = {k.name: i for i, k in enumerate(self.kernels)}
        last: dict[str, int] = {}
        for i, kernel in enumerate(self.kernels):
            self.before.append(last.get(kernel.stream))
            last[kernel.stream] = i

    def initial(self) -> State:
        # Attention's host runs ahead unhindered, so its kernels count as issued from the start.
        status = tuple(ISSUED if k.stream.startswith("attn") else IDLE for k in self.kernels)
        return status, (), frozenset(), self.variables

    def free(self, status: tuple[int, ...]) -> int:
        used = sum(k.cores for k, s in zip(self.kernels, status, strict=True) if s == RUNNING)
        return self.total_cores - used

    def steps(self, state: State) -> Iterator[tuple[str, State, str]]:
        """(action, next state, violation) for everything that may happen next."""
        status, line, dropped, variables = state
        for i, kernel in enumerate(self.kernels):
            if status[i] == IDLE and self._may_issue(i, state):
                lost = {(i, self.index[w]) for w in kernel.waits if status[self.index[w]] == IDLE}
                yield f"issue {kernel.name}", self._set(state, i, ISSUED, dropped=lost), ""
            elif status[i] == ISSUED and self._at_head(i, status, dropped):
                if kernel.cores:
                    yield f"arrive {kernel.name}", self._set(state, i, WAITING, line + (i,)), ""
                else:
                    yield self._start(state, i, line)
            elif status[i] == WAITING and line[0] == i and self.free(status) >= kernel.cores:
                yield self._start(state, i, line[1:])
            elif status[i] == RUNNING and self.ready(kernel, list(variables)):
                after = list(variables)
                bad = self.finish(kernel, after)
                yield f"finish {kernel.name}", self._set(state, i, DONE, v=tuple(after)), bad

    def _start(self, state: State, i: int, line: tuple[int, ...]) -> tuple[str, State, str]:
        kernel, variables = self.kernels[i], list(state[3])
        bad = self.start(kernel, variables)
        return f"start {kernel.name}", self._set(state, i, RUNNING, line, v=tuple(variables)), bad

    def _may_issue(self, i: int, state: State) -> bool:
        kernel, status = self.kernels[i], state[0]
        prior = self.before[i]
        if prior is not None and status[prior] == IDLE:
            return False  # streams are filled in order
        if any(status[self.index[a]] != DONE for a in kernel.after):
            return False
        if kernel.recorded and any(status[self.index[w]] == IDLE for w in kernel.waits):
            return False
        return not kernel.gate or self.gate(self, state)

    def _at_head(
        self, i: int, status: tuple[int, ...], dropped: frozenset[tuple[int, int]]
    ) -> bool:
        prior = self.before[i]
        if prior is not None and status[prior] != DONE:
            return False
        waits = (self.index[w] for w in self.kernels[i].waits)
        return all(status[w] == DONE or (i, w) in dropped for w in waits)

    @staticmethod
    def _set(
        state: State,
        i: int,
        value: int,
        line: tuple[int, ...] | None = None,
        v: tuple[int, ...] | None = None,
        dropped: set[tuple[int, int]] | None = None,
    ) -> State:
        status = state[0][:i] + (value,) + state[0][i + 1 :]
        lost = state[2] | dropped if dropped else state[2]
        return status, state[1] if line is None else line, lost, state[3] if v is None else v


def explore(model: Model, limit: int = 400_000) -> Result:
    """Visit every reachable state; stop at the first deadlock or violation.

    Raises:
        RuntimeError: more than `limit` states: make the model smaller, nothing was proved.
    """
    first = model.initial()
    came: dict[State, tuple[State, str] | None] = {first: None}
    queue = deque([first])

    def trace(state: State, *more: str) -> tuple[str, ...]:
        actions = list(more)[::-1]
        at = came[state]
        while at is not None:
            actions.append(at[1])
            at = came[at[0]]
        return tuple(reversed(actions))

    while queue:
        state = queue.popleft()
        moved = False
        for action, after, bad in model.steps(state):
            moved = True
            if bad:
                return Result(len(came), bad, trace(state, action))
            if after not in came:
                came[after] = (state, action)
                queue.append(after)
        if not moved and any(s != DONE for s in state[0]):
            names = (k.name for k, s in zip(model.kernels, state[0], strict=True) if s == RUNNING)
            return Result(len(came), "deadlock", trace(state), tuple(names))
        if len(came) > limit:
            raise RuntimeError(f"{len(came)} states and no end; allowed: {limit}")
    return Result(len(came))


# ---- CAMAsync ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AsyncRules:
    """One FFN rank, `groups` Attention groups with one dispatch per layer each.

    The guards: `gate` (receive is posted only when a dispatch waits), `slot_wait` (receive waits
    for the send of the slot's previous user), `credit` (Attention combines before it dispatches
    again), `data_waits` (compute waits for receive, send for compute), `recorded` (a wait is issued
    after the record it waits for). `post_after`: an alternative to the gate, the earliest point at
    which the next receive is posted: "any", or after "compute issued", "compute done", "send done".
    """

    groups: int = 1
    layers: int = 2
    slots: int = 2
    cores: int = 4
    recv_cores: int = 4
    compute_cores: int = 3
    send_cores: int = 1
    gate: bool = True
    slot_wait: bool = True
    credit: bool = True
    data_waits: bool = True
    recorded: bool = True
    post_after: str = "any"


def async_model(rules: AsyncRules) -> Model:
    """The FFN executor of `rules` against Attention groups that run at any speed."""
    r, items = rules, rules.groups * rules.layers
    flag, status, out = 0, r.groups, 2 * r.groups
    cursor, busy = 3 * r.groups, 3 * r.groups + 1
    item = busy + r.slots
    variables = [0] * (item + items)
    kernels = []
    for g in range(r.groups):
        sends = [Kernel(f"S{g}.{x}", f"attn{g}") for x in range(r.layers)]
        recvs = [Kernel(f"R{g}.{x}", f"attn{g}") for x in range(r.layers)]
        pairs = [k for pair in zip(sends, recvs, strict=True) for k in pair]
        kernels += pairs if r.credit else sends + recvs
    for n in range(items):
        free = (f"send{n - r.slots}",) if r.slot_wait and n >= r.slots else ()
        posted = {"any": (), "compute done": (f"comp{n - 1}",), "send done": (f"send{n - 1}",)}
        after = posted.get(r.post_after, ()) if n else ()
        begun = (f"comp{n - 1}",) if n and r.post_after == "compute issued" else ()
        # "issued" is a host order only: as an event wait it would be "done".
        kernels.append(
            Kernel(f"recv{n}", "recv", r.recv_cores, after, free, r.recorded, r.gate or bool(begun))
        )
    for n in range(items):
        # The host reads the item's counts before it can issue compute.
        data = (f"recv{n}",) if r.data_waits else ()
        kernels.append(Kernel(f"comp{n}", "comp", r.compute_cores, data, data, r.recorded))
    for n in range(items):
        data = (f"comp{n}",) if r.data_waits else ()
        kernels.append(Kernel(f"send{n}", "send", r.send_cores, (), data, r.recorded))

    def number(kernel: Kernel) -> int:
        return int(kernel.name[4:])

    def attention(kernel: Kernel) -> tuple[int, int]:
        g, _, layer = kernel.name[1:].partition(".")
        return int(g), int(layer)

    def start(kernel: Kernel, v: list[int]) -> str:
        if kernel.name.startswith("recv"):
            slot = busy + number(kernel) % r.slots
            if v[slot]:
                return f"{kernel.name} writes a slot whose item {v[slot] - 1} is not sent yet"
            v[slot] = number(kernel) + 1
        elif kernel.name.startswith("comp") and v[item + number(kernel)] == 0:
            return f"{kernel.name} reads before it was received"
        elif kernel.name.startswith("send") and v[item + number(kernel)] >= 0:
            return f"{kernel.name} reads before it was computed"
        return ""

    def ready(kernel: Kernel, v: list[int]) -> bool:
        if kernel.name.startswith("recv"):
            return any(v[flag : flag + r.groups])
        return not kernel.name.startswith("R") or v[status + attention(kernel)[0]] != 0

    # Item words: 0 empty, (group * layers + layer) + 1 received, negative once computed.
    def finish(kernel: Kernel, v: list[int]) -> str:
        kind = kernel.name[:4]
        if kind == "recv":
            turn = (v[cursor] + i for i in range(r.groups))
            g = next(g % r.groups for g in turn if v[flag + g % r.groups])
            v[item + number(kernel)] = g * r.layers + v[flag + g]
            v[flag + g], v[cursor] = 0, (g + 1) % r.groups
        elif kind == "comp":
            v[item + number(kernel)] = -v[item + number(kernel)]
        elif kind == "send":
            g, layer = divmod(-v[item + number(kernel)] - 1, r.layers)
            v[status + g] = layer + 1
            v[busy + number(kernel) % r.slots] = 0
        elif kernel.name.startswith("S"):
            g, layer = attention(kernel)
            if v[out + g] or v[flag + g]:
                return f"{kernel.name} dispatches while group {g} has a dispatch outstanding"
            v[flag + g], v[out + g] = layer + 1, 1
        else:
            g, layer = attention(kernel)
            if v[status + g] != layer + 1:
                return f"{kernel.name} takes the result of layer {v[status + g] - 1}"
            v[status + g], v[out + g] = 0, 0
        return ""

    def gate(model: Model, state: State) -> bool:
        receives = [i for i, k in enumerate(model.kernels) if k.stream == "recv"]
        posted = sum(state[0][i] in (ISSUED, WAITING, RUNNING) for i in receives)
        if r.post_after == "compute issued":
            done = sum(state[0][i] != IDLE for i in receives)
            if done and state[0][model.index[f"comp{done - 1}"]] == IDLE:
                return False
        return not r.gate or sum(x != 0 for x in state[3][flag : flag + r.groups]) > posted

    return Model(kernels, r.cores, tuple(variables), start, ready, finish, gate)


# ---- CAMP2P --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class P2PRules:
    """One FFN and one Attention rank, `groups` micro-batches with a group each.

    Guards: `group_edge` (receive waits for the group's previous send), `slot_wait`, `data_waits`,
    `recorded` as in `AsyncRules`. `early_send`: Attention issues a2e(u, L+1) before it waits in
    e2a(u+1, L), as its loop does today.
    """

    groups: int = 2
    layers: int = 2
    slots: int = 2
    cores: int = 4
    comm_cores: int = 1
    compute_cores: int = 2
    group_edge: bool = True
    slot_wait: bool = True
    data_waits: bool = True
    recorded: bool = True
    early_send: bool = True


def p2p_model(rules: P2PRules) -> Model:
    """The FFN executor of `rules` against one Attention rank with one stream."""
    r, items = rules, rules.groups * rules.layers
    names = [f"a{n}" for n in range(r.groups)] if r.early_send else []
    for n in range(items):
        if r.early_send:
            names += [f"e{n}"] + ([f"a{n + r.groups}"] if n + r.groups < items else [])
        elif n % r.groups == 0:
            names += [f"a{n + u}" for u in range(r.groups)] + [f"e{n + u}" for u in range(r.groups)]
    kernels = [Kernel(name, "attn") for name in names]
    for n in range(items):
        waits = [f"send{n - r.slots}"] if r.slot_wait and n >= r.slots else []
        if r.group_edge and n >= r.groups:
            waits.append(f"send{n - r.groups}")
        kernels.append(
            Kernel(f"recv{n}", "recv", r.comm_cores, (), tuple(dict.fromkeys(waits)), r.recorded)
        )
    for n in range(items):
        data = (f"recv{n}",) if r.data_waits else ()
        kernels.append(Kernel(f"comp{n}", "comp", r.compute_cores, (), data, r.recorded))
    for n in range(items):
        data = (f"comp{n}",) if r.data_waits else ()
        kernels.append(Kernel(f"send{n}", "send", r.comm_cores, (), data, r.recorded))
    # Variables: per group both counters, both flags, FFN kernels running; then per item the number
    # its FFN and its Attention kernels drew; then slots; then item progress.
    mine, peer, flag_f, flag_a, running = (r.groups * i for i in range(5))
    drew_f, drew_a = 5 * r.groups, 5 * r.groups + items
    busy = drew_a + items
    progress = busy + r.slots

    def start(kernel: Kernel, v: list[int]) -> str:
        n = int(kernel.name.lstrip("recvomspnda"))
        g = n % r.groups
        if kernel.stream == "attn":
            v[peer + g] += 1
            v[drew_a + n] = v[peer + g]
            return ""
        if kernel.stream == "comp":
            return "" if v[progress + n] == 1 else f"{kernel.name} reads before it was received"
        if v[running + g]:
            return f"{kernel.name} runs beside another kernel of group {g}: counters race"
        v[running + g] = 1
        v[mine + g] += 1
        v[drew_f + n] = v[mine + g]
        if kernel.stream == "send":
            return "" if v[progress + n] == 2 else f"{kernel.name} reads before it was computed"
        slot = busy + n % r.slots
        if v[slot]:
            return f"{kernel.name} writes a slot whose item {v[slot] - 1} is not sent yet"
        v[slot] = n + 1
        return ""

    def ready(kernel: Kernel, v: list[int]) -> bool:
        n = int(kernel.name.lstrip("recvomspnda"))
        if kernel.stream == "recv":
            return v[flag_f + n % r.groups] == v[drew_f + n]
        return not kernel.name.startswith("e") or v[flag_a + n % r.groups] == v[drew_a + n]

    def finish(kernel: Kernel, v: list[int]) -> str:
        n = int(kernel.name.lstrip("recvomspnda"))
        g = n % r.groups
        if kernel.name.startswith("a"):
            v[flag_f + g] = v[drew_a + n]
        elif kernel.stream != "attn":
            v[progress + n] += 1
            if kernel.stream != "comp":
                v[running + g] = 0
            if kernel.stream == "send":
                v[flag_a + g] = v[drew_f + n]
                v[busy + n % r.slots] = 0
        return ""

    total = progress + items
    return Model(kernels, r.cores, (0,) * total, start, ready, finish)
