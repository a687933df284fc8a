# SPDX-License-Identifier: Apache-2.0
"""Run a function in N forked ranks with a gloo group, gather what each returned or raised.

Every run has a deadline; ranks that are left then are killed and their stacks shown. After each run
the helper checks that no process and no shared memory file of the run is left.
"""

from __future__ import annotations

import datetime
import faulthandler
import glob
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Before torch is imported: ranks share few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@dataclass
class RankResult:
    """How one rank ended: `value`, or `error` (class name), `message`, `trace`, or `signal`."""

    rank: int
    value: Any = None
    error: str = ""
    message: str = ""
    trace: str = ""
    signal: int = 0
    exit_code: int = 0
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return not self.error and not self.signal and self.exit_code == 0


class RanksFailed(AssertionError):
    """Some rank did not end as the test wanted."""


def run_ranks(
    fn: Callable[..., Any],
    size: int,
    *args: Any,
    deadline_s: float = 60.0,
    env: Mapping[str, str] | None = None,
    group: bool = True,
    group_timeout_s: float = 30.0,
    check: bool = True,
    kill: Sequence[tuple[int, float]] = (),
) -> list[RankResult]:
    """Run `fn(rank, group, *args)` in `size` forked processes. Returns their results by rank.

    Args:
        deadline_s: seconds for all ranks together.
        env: environment set in the ranks.
        group: make a gloo group over all ranks and pass it; else None is passed.
        check: raise RanksFailed unless every rank returned normally.
        kill: (rank, seconds after the start) at which a rank gets SIGKILL.
    """
    prefix = f"xmoetest{uuid.uuid4().hex[:10]}"
    with tempfile.TemporaryDirectory(prefix="xmoe-test-") as folder:
        pids = []
        sys.stdout.flush()
        sys.stderr.flush()
        for rank in range(size):
            pid = os.fork()
            if pid == 0:
                _child(
                    fn, rank, size, args, Path(folder), prefix, env or {}, group, group_timeout_s
                )
            pids.append(pid)
        results = _collect(pids, Path(folder), deadline_s, list(kill))
    left = glob.glob(f"/dev/shm/*{prefix}*")
    for path in left:
        os.unlink(path)
    if left:
        raise RanksFailed(f"shared memory left behind: {left}")
    if check:
        bad = [r for r in results if not r.ok]
        if bad:
            raise RanksFailed(
                "\n".join(
                    f"rank {r.rank}: {r.error or r.signal} {r.message}\n{r.trace}" for r in bad
                )
            )
    return results


def values(results: Sequence[RankResult]) -> list[Any]:
    return [result.value for result in results]


def _child(
    fn: Callable[..., Any],
    rank: int,
    size: int,
    args: tuple[Any, ...],
    folder: Path,
    prefix: str,
    env: Mapping[str, str],
    group: bool,
    group_timeout_s: float,
) -> None:
    outcome: dict[str, Any] = {}
    code = 1
    try:
        os.environ.update(
            {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "XSD_SHM_PREFIX": prefix, **env}
        )
        stacks = open(folder / f"stack{rank}", "w")  # noqa: SIM115 - kept open for the fault handler
        # Not dump_traceback_later: the test runner's own watchdog thread does not survive a fork,
        # and arming a new one waits for the old one for ever.
        faulthandler.register(signal.SIGUSR1, file=stacks)
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        world = None
        if group:
            dist.init_process_group(
                "gloo",
                store=dist.FileStore(str(folder / "store"), size),
                rank=rank,
                world_size=size,
                timeout=datetime.timedelta(seconds=group_timeout_s),
            )
            world = dist.group.WORLD
        outcome["value"] = fn(rank, world, *args)
        code = 0
    except BaseException as error:
        outcome = {
            "error": type(error).__name__,
            "message": str(error),
            "trace": traceback.format_exc(),
        }
    try:
        temporary = folder / f"part{rank}"
        temporary.write_bytes(pickle.dumps(outcome))
        temporary.rename(folder / f"result{rank}")
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        # No interpreter exit: a forked copy of the test runner must not run its exit handlers.
        os._exit(code)


def _collect(
    pids: list[int], folder: Path, deadline_s: float, kill: list[tuple[int, float]]
) -> list[RankResult]:
    start = time.monotonic()
    results = [RankResult(rank) for rank in range(len(pids))]
    running = dict(enumerate(pids))
    late = False
    while running:
        elapsed = time.monotonic() - start
        for rank, when in [entry for entry in kill if entry[1] <= elapsed]:
            kill.remove((rank, when))
            if rank in running:
                os.kill(running[rank], signal.SIGKILL)
        if elapsed > deadline_s and not late:
            late = True
            for number in (signal.SIGUSR1, signal.SIGKILL):
                for pid in running.values():
                    os.kill(pid, number)
                time.sleep(0.3)
        for rank, pid in list(running.items()):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                del running[rank]
                _fill(results[rank], status, folder, late)
                results[rank].seconds = time.monotonic() - start
        time.sleep(0.01)
    return results


def _fill(result: RankResult, status: int, folder: Path, late: bool) -> None:
    if os.WIFSIGNALED(status):
        result.signal = os.WTERMSIG(status)
        result.message = "killed at the deadline" if late else "ended by a signal"
        stack = folder / f"stack{result.rank}"
        result.trace = stack.read_text() if stack.exists() else ""
    else:
        result.exit_code = os.WEXITSTATUS(status)
    path = folder / f"result{result.rank}"
    if path.exists():
        for key, value in pickle.loads(path.read_bytes()).items():
            setattr(result, key, value)
