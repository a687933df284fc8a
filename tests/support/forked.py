# SPDX-License-Identifier: Apache-2.0
"""Runs a function in forked processes, one per rank, without torch: for the C libraries."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass
class Ended:
    """How one process ended: its `value`, what it raised as `error`, or the `signal` it died of."""

    rank: int
    value: Any = None
    error: str = ""
    signal: int = 0
    seconds: float = 0.0


def fork_ranks(
    fn: Callable[..., Any],
    size: int,
    *args: Any,
    env: Mapping[str, str] | None = None,
    deadline_s: float = 60.0,
    check: bool = True,
) -> list[Ended]:
    """Runs `fn(rank, folder, *args)` in `size` processes; `folder` is shared and starts empty.

    All are killed at the deadline. With `check`, one that did not return normally fails the test.
    Shared memory files left by the run fail it in any case.
    """
    prefix = f"xmoe-fork-{uuid.uuid4().hex[:10]}-"
    sys.stdout.flush()
    sys.stderr.flush()
    with tempfile.TemporaryDirectory(prefix="xmoe-fork-") as name:
        folder = Path(name)
        start = time.monotonic()
        pids = {}
        for rank in range(size):
            pid = os.fork()
            if pid == 0:
                _child(fn, rank, folder, args, {"XSD_SHM_PREFIX": prefix, **(env or {})})
            pids[rank] = pid
        ended = [Ended(rank) for rank in range(size)]
        killed = False
        while pids:
            if not killed and time.monotonic() - start > deadline_s:
                killed = True
                for pid in pids.values():
                    os.kill(pid, signal.SIGKILL)
            for rank, pid in list(pids.items()):
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    del pids[rank]
                    ended[rank].seconds = time.monotonic() - start
                    _fill(ended[rank], status, folder)
            time.sleep(0.002)
    left = [path.name for path in Path("/dev/shm").iterdir() if path.name.startswith(prefix)]
    for path in left:
        (Path("/dev/shm") / path).unlink()
    assert not left, f"shared memory left behind: {left}"
    assert not killed, f"not ended after {deadline_s} s: {ended}"
    if check:
        bad = [f"rank {e.rank}: signal {e.signal}: {e.error}" for e in ended if e.error or e.signal]
        assert not bad, "\n".join(bad)
    return ended


def _child(
    fn: Callable[..., Any], rank: int, folder: Path, args: tuple[Any, ...], env: Mapping[str, str]
) -> None:
    outcome: dict[str, Any] = {}
    try:
        os.environ.update(env)
        outcome["value"] = fn(rank, folder, *args)
    except BaseException:
        outcome["error"] = traceback.format_exc()
    try:
        part = folder / f"part{rank}"
        part.write_bytes(pickle.dumps(outcome))
        part.rename(folder / f"result{rank}")
    finally:
        # No interpreter exit: the copy of the test runner must not run its exit handlers.
        os._exit(0)


def _fill(ended: Ended, status: int, folder: Path) -> None:
    if os.WIFSIGNALED(status):
        ended.signal = os.WTERMSIG(status)
    result = folder / f"result{ended.rank}"
    if result.exists():
        for key, value in pickle.loads(result.read_bytes()).items():
            setattr(ended, key, value)
    elif not ended.signal:
        ended.error = f"ended with status {status} and no result"
