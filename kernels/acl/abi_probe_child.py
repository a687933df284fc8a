# SPDX-License-Identifier: Apache-2.0
"""Runs in a process of its own: opens one operator library and makes the calls it is told to.

Started by `abi_probe.py` by path, in an isolated interpreter; imports nothing of this package. The
request is JSON on stdin, answers are JSON lines on the file descriptor named on the command line,
since a vendor library may print. Whatever the library does to this process is an answer too.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import resource
import signal
import sys
from typing import Any

WORKSPACE_SYMBOL = b"aclnnMegaMoeGetWorkspaceSize"
_PR_SET_PDEATHSIG = 1


class _DlInfo(ctypes.Structure):
    _fields_ = [
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    ]


def _limit_this_process(seconds: float) -> None:
    """End with the parent, at the latest after `seconds`, and leave no core file."""
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # The default action of SIGALRM ends the process even inside a C loop.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(int(seconds) + 5)


def _file_of(address: int) -> str:
    info = _DlInfo()
    found = ctypes.CDLL(None).dladdr(ctypes.c_void_p(address), ctypes.byref(info))
    return os.path.realpath(os.fsdecode(info.file)) if found and info.file else ""


def _open(request: dict[str, Any]) -> tuple[Any, Any, str]:
    """(phase one, recent-text function or None, problem)."""
    for path in request["base_libraries"]:
        with contextlib.suppress(OSError):  # one that matters is missed by the library itself
            ctypes.CDLL(path, os.RTLD_NOW | os.RTLD_LOCAL)
    path = request["library"]
    try:
        library = ctypes.CDLL(path, os.RTLD_NOW | os.RTLD_LOCAL)
        call = library[WORKSPACE_SYMBOL.decode()]
    except (OSError, AttributeError, ValueError) as error:
        return None, None, str(error)
    address = ctypes.cast(call, ctypes.c_void_p).value or 0
    if _file_of(address) != os.path.realpath(path):
        return None, None, f"the symbol resolves into {_file_of(address) or 'no file'}"
    found = os.stat(path)
    times = (found.st_mtime_ns, found.st_ctime_ns)
    identity = [found.st_dev, found.st_ino, *times, found.st_size]
    if identity != request["identity"]:
        return None, None, "the file was replaced meanwhile"
    call.restype = ctypes.c_int32
    call.argtypes = [ctypes.c_void_p] * request["slots"]
    try:
        recent = library.aclGetRecentErrMsg  # a handle finds symbols of dependencies too
        recent.restype = ctypes.c_char_p
    except (AttributeError, ValueError):  # the latter when the error's own text cannot be decoded
        recent = None
    return call, recent, ""


def main() -> None:
    request = json.load(sys.stdin)
    answers = os.fdopen(int(sys.argv[1]), "w", encoding="utf-8")

    def say(**values: Any) -> None:
        answers.write(json.dumps(values) + "\n")
        answers.flush()

    _limit_this_process(request["timeout_s"])
    say(stage="started")
    call, recent, problem = _open(request)
    if problem:
        say(stage="not_opened", text=problem)
        return
    say(stage="opened")
    # Each slot has a page of zeros of its own: whatever reads or writes there does no harm.
    count, page = request["slots"], mmap.PAGESIZE
    pages = mmap.mmap(-1, count * page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    for name, zeros in request["calls"]:
        say(stage="calling", name=name)
        values = [None if slot in zeros else start + slot * page for slot in range(count)]
        code = call(*values)
        text = recent() if recent is not None else None
        say(stage="called", name=name, code=code, text=(text or b"").decode(errors="replace"))
    say(stage="done")


if __name__ == "__main__":
    main()
    # No interpreter shutdown and no destructors of the library: the answer is complete.
    os._exit(0)
