# SPDX-License-Identifier: Apache-2.0
"""Finds what a test run should have cleaned up: child processes and shared memory files."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

# Helpers of Python's own multiprocessing live as long as the interpreter, by design.
_ALLOWED = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
_SHM = Path("/dev/shm")


@dataclass(frozen=True)
class _Process:
    pid: int
    parent: int
    group: int
    state: str
    start: int

    @classmethod
    def read(cls, pid: int) -> _Process | None:
        try:
            text = Path(f"/proc/{pid}/stat").read_text()
        except OSError:  # ended since it was listed
            return None
        # The command name in parentheses may itself hold blanks and parentheses.
        fields = text.rpartition(")")[2].split()
        return cls(pid, int(fields[1]), int(fields[2]), fields[0], int(fields[19]))


def processes(grace_s: float = 0.0) -> list[str]:
    """Live processes this one started, directly or not, after waiting up to `grace_s` seconds.

    Orphans are found too: a process whose parent died, started after us in our process group by
    the same interpreter. One that made a session of its own and lost its parent is not found.
    """
    deadline = time.monotonic() + grace_s
    while found := _processes():
        if time.monotonic() > deadline:
            return found
        time.sleep(0.1)
    return []


def _processes() -> list[str]:
    table = {
        process.pid: process
        for name in os.listdir("/proc")
        if name.isdigit() and (process := _Process.read(int(name)))
    }
    me = table[os.getpid()]
    ancestors = set()
    pid = me.parent
    while pid in table and pid not in ancestors:
        ancestors.add(pid)
        pid = table[pid].parent
    found = []
    for process in table.values():
        if process.pid == me.pid or process.pid in ancestors or process.state in "ZX":
            continue
        orphan = (
            process.group == me.group
            and process.start > me.start
            and process.parent in ancestors | {1}
            and _executable(process.pid) == _executable(me.pid)
        )
        if (orphan or _descends(process, me.pid, table)) and not _is_allowed(process.pid):
            found.append(f"pid {process.pid}: {_command_line(process.pid)}")
    return sorted(found)


def _descends(process: _Process, ancestor: int, table: dict[int, _Process]) -> bool:
    pid = process.parent
    for _ in range(len(table)):
        if pid == ancestor:
            return True
        if pid not in table:
            return False
        pid = table[pid].parent
    return False


def _executable(pid: int) -> str | None:
    try:
        return os.readlink(f"/proc/{pid}/exe")
    except OSError:
        return None


def _command_line(pid: int) -> str:
    try:
        return (
            Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        )
    except OSError:
        return ""


def _is_allowed(pid: int) -> bool:
    line = _command_line(pid)
    return not line or any(name in line for name in _ALLOWED)


def shared_memory(prefix: str) -> list[str]:
    """Files in /dev/shm of this session: with the device's prefix, or with our pid in the name."""
    if not _SHM.is_dir():
        return []
    mine = (prefix, f"torch_{os.getpid()}_")
    return sorted(str(path) for path in _SHM.iterdir() if path.name.startswith(mine))
