# SPDX-License-Identifier: Apache-2.0
"""What the software device does when ranks die, disagree or do not come: it says so and ends.

`fork_ranks` fails a test that leaves a file in shared memory or does not end in time.
"""

from __future__ import annotations

import ctypes as C
import os
import pickle
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support import softdev
from support.forked import Ended, fork_ranks
from support.softdev import HCCL, SUM, TASK, Failed, context_of, error, join

SHORT = {"XSD_WAIT_TIMEOUT_MS": "400"}


def _all_reduce(api: softdev.Api, comm: C.c_void_p, stream: C.c_void_p) -> tuple[int, str]:
    value = np.ones(4, np.float32)
    p = C.c_void_p(value.ctypes.data)
    api.HcclAllReduce(p, p, C.c_uint64(4), HCCL["fp32"], SUM, comm, stream)
    return api.status("aclrtSynchronizeStream", stream), error()


def _kill_me() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _survivors(ended: list[Ended], dead: int) -> list[Any]:
    assert ended[dead].signal == signal.SIGKILL
    rest = [e for e in ended if e.rank != dead]
    assert not [e.error for e in rest if e.error], rest
    return [e.value for e in rest]


def _dies(rank: int, folder: Path, size: int, dead: int) -> Any:
    api, comm = join(rank, size, folder)
    stream = api.stream()
    code, text = _all_reduce(api, comm, stream)
    assert code == 0, text
    if rank == dead:
        _kill_me()
    start = time.monotonic()
    code, text = _all_reduce(api, comm, stream)
    took = time.monotonic() - start
    state = C.c_int(-1)
    api.HcclGetCommAsyncError(comm, C.byref(state))
    # The group is done for: a new stream does not help, and the answer comes at once.
    again = _all_reduce(api, comm, api.stream())[0]
    api.HcclCommDestroy(comm)
    return code, text, took, state.value, again


@pytest.mark.parametrize(("size", "dead"), [(2, 1), (4, 0), (8, 5)])
def test_a_killed_rank_is_noticed_at_once_by_all(size, dead):
    for code, text, took, state, again in _survivors(
        fork_ranks(_dies, size, size, dead, check=False), dead
    ):
        assert code == 507057 and f"rank {dead} " in text and "died" in text
        assert took < 5 and state == 21 and again == 507057  # the wait timeout is 20 s


def _zombie(rank: int, folder: Path) -> tuple[int, str]:
    """The dead rank's parent has not asked for its end, so its process number still exists."""
    pid = os.fork()
    if pid == 0:
        try:
            join(1, 2, folder)
        finally:
            _kill_me()
    api, comm = join(0, 2, folder)
    code, text = _all_reduce(api, comm, api.stream())
    os.waitpid(pid, 0)
    return code, text


def test_a_zombie_counts_as_dead():
    code, text = fork_ranks(_zombie, 1)[0].value
    assert code == 507057 and "rank 1 " in text and "died" in text


def _dies_early(rank: int, folder: Path) -> Any:
    if rank == 2:
        return None  # never comes, so that the kill happens before the group is complete
    if rank == 1:
        threading.Timer(0.3, _kill_me).start()
    with pytest.raises(Failed) as caught:
        join(rank, 3, folder)
    return caught.value.status, caught.value.text


def test_a_rank_killed_during_set_up_ends_the_set_up():
    ended = fork_ranks(_dies_early, 3, check=False)
    assert ended[1].signal == signal.SIGKILL
    code, text = ended[0].value
    assert code == 21 and "rank 1 " in text and "died" in text


def _missing(rank: int, folder: Path, size: int) -> Any:
    if rank == size - 1:
        return None
    with pytest.raises(Failed) as caught:
        join(rank, size, folder)
    return caught.value.status, caught.value.text


def test_a_rank_that_never_comes_ends_the_set_up():
    ended = fork_ranks(_missing, 3, 3, env=SHORT)
    values = sorted(e.value for e in ended[:2])
    assert [code for code, _ in values] == [9, 21]  # one timed out, the other was told
    assert all("rank 2" in text for _, text in values)


def _disagree(rank: int, folder: Path, kind: str) -> Any:
    try:
        if kind == "size":
            join(rank, 3 + (rank == 1), folder)
        elif kind == "buffer":
            join(rank, 2, folder, mib=1 + rank)
        else:
            api = softdev.device()
            root, comm = softdev.root_info(rank, folder), C.c_void_p()
            made = softdev.config(1)
            api.HcclCommInitRootInfoConfig(
                3, C.byref(root), 0, C.byref(made), C.byref(comm)
            )  # both are rank 0
    except Failed as failure:
        return failure.status, failure.text
    return 0, ""


@pytest.mark.parametrize("kind", ["size", "buffer", "rank"])
def test_ranks_that_disagree_fail_together(kind):
    values = [e.value for e in fork_ranks(_disagree, 2, kind)]
    assert sorted(code for code, _ in values) == [1, 21], values
    assert all(text for _, text in values)


def _mismatch(rank: int, folder: Path, size: int, kind: str) -> tuple[int, str]:
    api, comm = join(rank, size, folder)
    stream = api.stream()
    value, out = np.ones(64, np.int32), np.zeros(64, np.int32)
    p, q = C.c_void_p(value.ctypes.data), C.c_void_p(out.ctypes.data)
    n, i32 = C.c_uint64(4 + (kind == "count" and rank == 1)), HCCL["int32"]
    if kind == "lengths":
        send = softdev.array64([4] * size)
        receive = softdev.array64([4 + (rank == 1 and r == 0) for r in range(size)])
        at = softdev.array64([8 * r for r in range(size)])
        api.HcclAlltoAllV(p, send, at, i32, q, receive, at, i32, comm, stream)
    elif kind == "call" and rank == 1:
        api.HcclAllGather(p, q, n, i32, comm, stream)
    else:
        api.HcclAllReduce(p, q, n, i32, SUM, comm, stream)
    result = api.status("aclrtSynchronizeStream", stream), error()
    api.HcclCommDestroy(comm)
    return result


@pytest.mark.parametrize("kind", ["call", "count", "lengths"])
def test_ranks_that_call_different_collectives_all_fail(kind):
    for ended in fork_ranks(_mismatch, 4, 4, kind):
        code, text = ended.value
        assert code == 507018 and "found another collective or other sizes" in text


def _late(rank: int, folder: Path) -> Any:
    api, comm = join(rank, 2, folder)
    stream = api.stream()
    if rank == 1:
        while not (folder / "gave-up").exists():
            time.sleep(0.01)
    start = time.monotonic()
    code, text = _all_reduce(api, comm, stream)
    took = time.monotonic() - start
    (folder / "gave-up").touch()
    return code, text, took


def test_a_wait_ends_at_the_timeout_and_the_late_rank_is_told():
    first, second = (e.value for e in fork_ranks(_late, 2, env=SHORT))
    assert first[0] == 507034 and "rank 1" in first[1] and 0.3 < first[2] < 5
    assert second[0] == 507057 and "rank 0" in second[1] and second[2] < 0.3


def _leaves(rank: int, folder: Path, how: str) -> Any:
    api, comm = join(rank, 2, folder)
    stream = api.stream()
    code, text = _all_reduce(api, comm, stream)
    if rank == 1:
        if how == "exit":
            (folder / "result1").write_bytes(pickle.dumps({"value": None}))
            C.CDLL(None).exit(0)  # a normal end, without closing the communicator
        api.HcclCommDestroy(comm)
        return None
    assert code == 0, text
    return _all_reduce(api, comm, stream)


@pytest.mark.parametrize("how", ["destroy", "exit"])
def test_a_rank_that_left_is_not_called_dead(how):
    code, text = fork_ranks(_leaves, 2, how)[0].value
    assert code == 507057 and "rank 1 left the communicator" in text


def _finished(rank: int, folder: Path, size: int) -> Any:
    """Ranks end as soon as their own last collective is done; slower ones are not disturbed."""
    api, comm = join(rank, size, folder)
    stream = api.stream()
    for _ in range(50):
        code, text = _all_reduce(api, comm, stream)
        assert code == 0, text
    api.HcclCommDestroy(comm)
    return code


def test_ranks_may_end_at_different_times():
    env = {"XSD_DELAY_SEED": "9", "XSD_DELAY_MAX_US": "400"}
    assert {e.value for e in fork_ranks(_finished, 8, 8, env=env)} == {0}


def _destroyed_in_use(rank: int, folder: Path) -> Any:
    api, comm = join(rank, 2, folder)
    if rank == 1:
        while not (folder / "destroyed").exists():
            time.sleep(0.01)
        return None
    stream = api.stream()
    value = np.ones(4, np.float32)
    p = C.c_void_p(value.ctypes.data)
    for _ in range(3):  # one waits for rank 1, two are queued
        api.HcclAllReduce(p, p, C.c_uint64(4), HCCL["fp32"], SUM, comm, stream)
    time.sleep(0.1)
    start = time.monotonic()
    api.HcclCommDestroy(comm)
    took = time.monotonic() - start
    (folder / "destroyed").touch()
    return api.status("aclrtSynchronizeStream", stream), error(), took


def test_destroying_a_communicator_in_use_ends_what_runs():
    code, text, took = fork_ranks(_destroyed_in_use, 2)[0].value
    assert code == 507057 and "was destroyed" in text and took < 5


def _kernel_waits(rank: int, folder: Path, call: str) -> Any:
    """A kernel waits for a flag in its window that a killed peer never sets."""
    api, comm = join(rank, 2, folder)
    context = context_of(api, comm)
    stream = api.stream()
    if rank == 1:
        api.HcclBarrier(comm, stream)
        api.aclrtSynchronizeStream(stream)
        _kill_me()
    flag = C.c_uint32.from_address(context.window[0])
    abort = C.c_uint32.from_address(context.abort_flag)
    ready = TASK(lambda arg: int(flag.value != 0))
    either = TASK(lambda arg: int(flag.value != 0 or abort.value != 0))
    api.HcclBarrier(comm, stream)
    libs = api.libs

    def wait_peer() -> int:
        assert libs[2].xsdWindowEnter(C.byref(context)) == 0 and context.busy == 1
        code = int(libs[2].xsdWaitPeer(C.byref(context), C.c_uint32(1), ready, None))
        libs[2].xsdWindowLeave(C.byref(context))
        assert context.busy == 0
        return code

    def plain_wait() -> int:
        assert libs[0].xsdWait(either, None) == 0  # the abort word ends it
        return 507035 if flag.value == 0 and abort.value != 0 else 0

    api.task(stream, wait_peer if call == "xsdWaitPeer" else plain_wait, "kernel")
    start = time.monotonic()
    code = api.status("aclrtSynchronizeStream", stream)
    return code, error(), time.monotonic() - start


@pytest.mark.parametrize(("call", "code"), [("xsdWaitPeer", 507057), ("xsdWait", 507035)])
def test_kernels_waiting_for_a_dead_peer_end(call, code):
    (value,) = _survivors(fork_ranks(_kernel_waits, 2, call, check=False), 1)
    assert value[0] == code and value[2] < 5
    assert call != "xsdWaitPeer" or "rank 1 " in value[1]


def _two_launches(rank: int, folder: Path) -> Any:
    """Two launches at a time on one window: the second is refused, and so is the group."""
    api, comm = join(rank, 2, folder)
    context = context_of(api, comm)
    enter, leave = api.libs[2].xsdWindowEnter, api.libs[2].xsdWindowLeave
    streams = [api.stream(), api.stream()]
    if rank == 1:
        while not (folder / "seen").exists():
            time.sleep(0.01)
        api.task(streams[0], lambda: int(enter(C.byref(context))))
        return api.status("aclrtSynchronizeStream", streams[0]), error()
    api.task(streams[0], lambda: int(enter(C.byref(context))))
    api.aclrtSynchronizeStream(streams[0])
    api.task(streams[1], lambda: int(enter(C.byref(context))))
    result = api.status("aclrtSynchronizeStream", streams[1]), error()
    leave(C.byref(context))
    (folder / "seen").touch()
    return result


def test_two_launches_at_a_time_on_one_window():
    for ended in fork_ranks(_two_launches, 2):
        code, text = ended.value
        assert code == 507035 and "rank 0" in text and "two launches at a time" in text


def _dead_context(rank: int, folder: Path) -> list[int]:
    api, comm = join(rank, 1, folder)
    context = context_of(api, comm)
    window = context.window[0]
    api.HcclCommDestroy(comm)
    enter = api.libs[2].xsdWindowEnter
    out = [int(enter(C.byref(context))), int(enter(None)), int(enter(C.c_void_p(4096)))]
    C.memset(window, 1, 4096)  # late use of the memory does not crash
    assert context.magic != 0x5853444B46435458
    return out


def test_a_context_of_a_destroyed_communicator_is_refused():
    assert fork_ranks(_dead_context, 1)[0].value == [507057] * 3
