# SPDX-License-Identifier: Apache-2.0
"""Runs a function in forked processes, one per rank, and tells how each ended. Needs no torch.

Made for tests in which ranks fail, hang and die on purpose: every run has a deadline; what is left
then is killed after its stacks were written down. A shared memory file left behind fails the run.
`support.ranks` adds a gloo group; the product's own launcher is `xmoe.ranks`.
"""

from __future__ import annotations

import faulthandler
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


@dataclass
class Ended:
    """How one process ended: `value`, or `error` (class name), `message`, `trace`, or `signal`."""

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


def fork_ranks(
    fn: Callable[..., Any],
    size: int,
    *args: Any,
    env: Mapping[str, str] | None = None,
    deadline_s: float = 60.0,
    check: bool = True,
    kill: Sequence[tuple[int, float]] = (),
) -> list[Ended]:
    """Runs `fn(rank, folder, *args)` in `size` processes; `folder` is shared and starts empty.

    Args:
        env: environment set in the processes.
        deadline_s: seconds for all of them together.
        check: raise RanksFailed unless every one returned normally.
        kill: (rank, seconds after the start) at which a rank gets SIGKILL.
    """
    prefix = f"xmoe-fork-{uuid.uuid4().hex[:10]}-"
    sys.stdout.flush()
    sys.stderr.flush()
    with tempfile.TemporaryDirectory(prefix="xmoe-fork-") as name:
        folder = Path(name)
        pids = {}
        for rank in range(size):
            pid = os.fork()
            if pid == 0:
                _child(fn, rank, folder, args, {"XSD_SHM_PREFIX": prefix, **(env or {})})
            pids[rank] = pid
        ended = _collect(pids, folder, deadline_s, list(kill))
    left = [path for path in Path("/dev/shm").iterdir() if path.name.startswith(prefix)]
    for path in left:
        path.unlink()
    if left:
        raise RanksFailed(f"shared memory left behind: {[path.name for path in left]}")
    bad = [e for e in ended if not e.ok]
    if check and bad:
        raise RanksFailed(
            "\n".join(f"rank {e.rank}: {e.error or e.signal} {e.message}\n{e.trace}" for e in bad)
        )
    return ended


def values(ended: Sequence[Ended]) -> list[Any]:
    """What each rank returned, by rank."""
    return [one.value for one in ended]


def _child(
    fn: Callable[..., Any], rank: int, folder: Path, args: tuple[Any, ...], env: Mapping[str, str]
) -> None:
    outcome: dict[str, Any] = {}
    code = 1
    try:
        os.environ.update(env)
        stacks = open(folder / f"stack{rank}", "w")  # noqa: SIM115 - kept open for the fault handler
        # Not dump_traceback_later: the test runner's own watchdog thread does not survive a fork,
        # and arming a new one waits for the old one for ever.
        faulthandler.register(signal.SIGUSR1, file=stacks)
        outcome["value"] = fn(rank, folder, *args)
        code = 0
    except BaseException as error:
        outcome = {
            "error": type(error).__name__,
            "message": str(error),
            "trace": traceback.format_exc(),
        }
    try:
        part = folder / f"part{rank}"
        part.write_bytes(pickle.dumps(outcome))
        part.rename(folder / f"result{rank}")
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        # No interpreter exit: the copy of the test runner must not run its exit handlers.
        os._exit(code)


def _collect(
    running: dict[int, int], folder: Path, deadline_s: float, kill: list[tuple[int, float]]
) -> list[Ended]:
    start = time.monotonic()
    ended = [Ended(rank) for rank in running]
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
                _fill(ended[rank], status, folder, late)
                ended[rank].seconds = time.monotonic() - start
        time.sleep(0.005)
    return ended


def _fill(ended: Ended, status: int, folder: Path, late: bool) -> None:
    if os.WIFSIGNALED(status):
        ended.signal = os.WTERMSIG(status)
        ended.message = "killed at the deadline" if late else "ended by a signal"
        stack = folder / f"stack{ended.rank}"
        ended.trace = stack.read_text() if stack.exists() else ""
    else:
        ended.exit_code = os.WEXITSTATUS(status)
    result = folder / f"result{ended.rank}"
    if result.exists():
        for key, value in pickle.loads(result.read_bytes()).items():
            setattr(ended, key, value)
    elif not ended.signal:
        ended.error = f"ended with status {ended.exit_code} and no result"
