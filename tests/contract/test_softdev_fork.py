# SPDX-License-Identifier: Apache-2.0
"""The software device after a fork, and what killed set-ups leave in shared memory."""

from __future__ import annotations

import ctypes as C
import json
import os
import signal
import threading
import time
from pathlib import Path

from support import softdev
from support.forked import fork_ranks


def _kill_me() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _swept(rank: int, folder: Path) -> list[bool]:
    """A file left by a set-up whose ranks were all killed goes with a later root info."""
    shared = Path(os.environ["XSD_SHM_DIR"])

    def start_and_die() -> None:
        root = softdev.root_info(0, folder, "dead")
        api, made = softdev.device(), softdev.config(1)
        threading.Timer(0.3, _kill_me).start()
        api.HcclCommInitRootInfoConfig(2, C.byref(root), 0, C.byref(made), C.byref(C.c_void_p()))

    pid = os.fork()
    if pid == 0:
        start_and_die()
    os.waitpid(pid, 0)
    (left,) = shared.iterdir()
    softdev.root_info(0, folder, "young")
    out = [left.exists()]
    os.utime(left, (0, 0))
    softdev.root_info(0, folder, "old")
    return [*out, left.exists()]


def test_files_of_killed_set_ups_are_swept(tmp_path):
    env = {"XSD_SHM_DIR": str(tmp_path)}
    assert fork_ranks(_swept, 1, env=env)[0].value == [True, False]


def _forked(rank: int, folder: Path, used: bool) -> list[int]:
    api = softdev.Api()
    root = softdev.root_info(0, folder)
    api.aclrtGetDeviceCount(C.byref(C.c_uint32()))
    api.status("aclrtGetDevice", C.byref(C.c_int32()))
    assert api.libs[0].aclrtGetSocName()
    stream = None
    if used:
        api.aclrtSetDevice(0)
        stream = api.stream()
        api.task(stream, lambda: time.sleep(0.1))  # its worker is busy during the fork
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            codes = [api.status("aclrtSetDevice", 0), api.status("aclInit", None)]
            codes.append(api.status("aclrtSynchronizeStream", stream))
            codes.append(api.status("aclrtMalloc", C.byref(C.c_void_p()), C.c_size_t(8), 0))
            codes.append(int(api.tensor((0,), None) is None))
            made = softdev.config(1)
            comm = C.c_void_p()
            codes.append(
                api.status(
                    "HcclCommInitRootInfoConfig", 1, C.byref(root), 0, C.byref(made), C.byref(comm)
                )
            )
            os.write(write, json.dumps(codes).encode())
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    if used:
        api.aclrtSynchronizeStream(stream)  # the parent goes on as before
    return list(json.loads(os.read(read, 1000)))


def test_after_a_fork_calls_fail_instead_of_hanging():
    assert fork_ranks(_forked, 1, True)[0].value == [500000] * 4 + [1, 4]


def test_looking_at_the_device_does_not_forbid_a_fork():
    assert fork_ranks(_forked, 1, False)[0].value == [0] * 6
