# SPDX-License-Identifier: Apache-2.0
"""Start the ranks of one group as forked processes of this one, watch them, and leave nothing
behind.

Python, torch and the model library are imported once in the parent; a rank is then ready within
milliseconds. A rank reports where it is (`report`); a rank that stays silent longer than the
deadline, raises, or dies ends the whole group, and the error names rank, phase and layer.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from xmoe.errors import CommError, ConfigError

_PR_SET_PDEATHSIG = 1
_GRACE_S = 3.0


@dataclass
class RankError:
    """What one rank failed with."""

    rank: int
    kind: str
    message: str
    trace: str
    last: str


@dataclass
class RankContext:
    """Handed to a rank's function; `report` is the sign of life the parent waits for."""

    rank: int
    size: int
    store_path: str
    _conn: Connection = field(repr=False)

    def report(self, phase: str, **details: object) -> None:
        """Tell the parent where this rank is. Local; costs one small write."""
        self._conn.send(("report", phase, details))

    def init_process_group(self, timeout_s: float) -> Any:
        """Join the gloo group of these ranks over 127.0.0.1. Collective. Returns the
        ProcessGroup.
        """
        from datetime import timedelta

        import torch.distributed as dist

        # Without this gloo binds to whatever address the host name resolves to.
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        store = dist.FileStore(self.store_path, self.size)  # type: ignore[attr-defined]
        dist.init_process_group(
            "gloo",
            store=store,
            rank=self.rank,
            world_size=self.size,
            timeout=timedelta(seconds=timeout_s),
        )
        return dist.group.WORLD


RankFn = Callable[..., Any]
OnReport = Callable[[int, str, dict[str, object]], None]


class RanksFailed(CommError):
    """At least one rank failed; `errors` holds each rank's own account."""

    def __init__(self, message: str, errors: Sequence[RankError]) -> None:
        super().__init__(message)
        self.errors = tuple(errors)


def run_ranks(
    fn: RankFn,
    size: int,
    *args: object,
    silence_s: float = 120.0,
    on_report: OnReport | None = None,
    on_start: Callable[[int], None] | None = None,
    threads: int = 1,
    environ: Mapping[str, str] | None = None,
) -> list[Any]:
    """Run `fn(context, *args)` in `size` forked ranks and return their results by rank. Local.

    Args:
        size: number of ranks, at least 1.
        silence_s: seconds a rank may go without reporting, returning or failing.
        on_report: called in this process for each report (rank, phase, details).
        on_start: called in this process with each rank's process id.
        threads: torch threads per rank.
        environ: variables that the ranks have besides this process's.

    Raises:
        RanksFailed: a rank raised, died or stayed silent. All ranks are gone when it is raised.
    """
    if size < 1:
        raise ConfigError(f"run_ranks: size={size}; allowed: 1 or more; next: pass the EP size")
    import torch  # noqa: F401  once here, inherited by every rank

    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="xmoe-ranks-") as folder:
        store_path = os.path.join(folder, "store")
        group = _Group(size)
        try:
            for rank in range(size):
                parent, child = context.Pipe()
                about = (os.getpid(), dict(environ or {}))
                process = context.Process(
                    target=_child,
                    args=(fn, rank, size, store_path, child, threads, *about, args),
                    name=f"xmoe-rank-{rank}",
                    daemon=True,
                )
                process.start()
                child.close()
                group.add(process, parent)
                if on_start is not None and process.pid is not None:
                    on_start(process.pid)
            return group.collect(silence_s, on_report)
        finally:
            group.kill()


class _Group:
    """The parent's view of its ranks."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._processes: list[BaseProcess] = []
        self._conns: list[Connection] = []
        self._last = ["start"] * size
        self._heard = [time.monotonic()] * size
        self._results: dict[int, Any] = {}
        self._errors: dict[int, RankError] = {}

    def add(self, process: BaseProcess, conn: Connection) -> None:
        self._heard[len(self._processes)] = time.monotonic()
        self._processes.append(process)
        self._conns.append(conn)

    def collect(self, silence_s: float, on_report: OnReport | None) -> list[Any]:
        open_ranks = set(range(self._size))
        while open_ranks and not self._errors:
            self._receive(open_ranks, 0.2, on_report)
            self._check_silence(open_ranks, silence_s)
        if self._errors:
            # The others usually fail a moment later for the same cause: their account helps.
            deadline = time.monotonic() + _GRACE_S
            while open_ranks and time.monotonic() < deadline:
                self._receive(open_ranks, 0.2, on_report)
            raise self._failure()
        for rank, process in enumerate(self._processes):
            process.join(_GRACE_S)
            if process.exitcode != 0:
                self._fail(rank, "PeerLost", _death(process.exitcode), "")
        if self._errors:
            raise self._failure()
        return [self._results[rank] for rank in range(self._size)]

    def _receive(self, open_ranks: set[int], timeout: float, on_report: OnReport | None) -> None:
        by_conn = {self._conns[rank]: rank for rank in open_ranks}
        for ready in wait(list(by_conn), timeout):
            rank = by_conn[ready]  # type: ignore[index]
            try:
                kind, *payload = self._conns[rank].recv()
            except (EOFError, ConnectionResetError):
                self._processes[rank].join(_GRACE_S)
                code = self._processes[rank].exitcode
                self._fail(rank, "PeerLost", _death(code), "")
                open_ranks.discard(rank)
                continue
            self._heard[rank] = time.monotonic()
            if kind == "report":
                phase, details = payload
                where = " ".join(f"{key}={value}" for key, value in details.items())
                self._last[rank] = f"{phase} {where}".strip()
                if on_report is not None:
                    on_report(rank, phase, details)
            elif kind == "result":
                self._results[rank] = payload[0]
                open_ranks.discard(rank)
            else:
                self._fail(rank, *payload)
                open_ranks.discard(rank)

    def _check_silence(self, open_ranks: set[int], silence_s: float) -> None:
        now = time.monotonic()
        for rank in sorted(open_ranks):
            if now - self._heard[rank] > silence_s:
                self._fail(rank, "FenceTimeout", f"no sign of life for {silence_s:g} s", "")

    def _fail(self, rank: int, kind: str, message: str, trace: str) -> None:
        self._errors.setdefault(rank, RankError(rank, kind, message, trace, self._last[rank]))

    def _failure(self) -> RanksFailed:
        errors = [self._errors[rank] for rank in sorted(self._errors)]
        # A rank that died is the cause; ranks that merely noticed it come after.
        errors.sort(key=lambda error: (error.kind != "PeerLost" or bool(error.trace), error.rank))
        groups: dict[tuple[str, str], list[int]] = {}
        for error in errors:
            groups.setdefault((error.kind, error.message), []).append(error.rank)
        lines = []
        for (kind, message), ranks in groups.items():
            who = "all ranks" if len(ranks) == self._size else f"rank {_ranges(ranks)}"
            where = self._errors[ranks[0]].last
            lines.append(f"{who} [{kind}] at {where}: {message}")
        return RanksFailed("\n".join(lines), errors)

    def kill(self) -> None:
        """End every rank still running. Only processes started here."""
        for process in self._processes:
            if process.is_alive() and process.pid is not None:
                os.kill(process.pid, signal.SIGKILL)
        for process in self._processes:
            process.join()
            process.close()
        for conn in self._conns:
            conn.close()


def _death(code: int | None) -> str:
    if code is not None and code < 0:
        return f"the process was ended by {signal.Signals(-code).name}"
    if code is None:
        return f"the process did not end within {_GRACE_S:g} s of its result"
    return f"the process ended with exit code {code}"


def _ranges(ranks: Sequence[int]) -> str:
    parts: list[str] = []
    start = previous = None
    for rank in [*sorted(ranks), None]:
        if start is None or previous is None:
            start = previous = rank
        elif rank is not None and rank == previous + 1:
            previous = rank
        else:
            parts.append(str(start) if start == previous else f"{start}-{previous}")
            start = previous = rank
    return ",".join(parts)


def _child(
    fn: RankFn,
    rank: int,
    size: int,
    store_path: str,
    conn: Connection,
    threads: int,
    parent_pid: int,
    environ: Mapping[str, str],
    args: tuple[object, ...],
) -> None:
    # A parent that is killed can't clean up; the kernel then ends its ranks.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    os.environ.update(environ)
    try:
        import torch

        torch.set_num_threads(threads)
        result = fn(RankContext(rank, size, store_path, conn), *args)
        conn.send(("result", result))
    except Exception as error:  # the parent must learn of every failure, whatever its type
        conn.send(("error", type(error).__name__, str(error), traceback.format_exc()))
    finally:
        conn.close()
