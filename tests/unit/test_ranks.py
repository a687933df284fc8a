# SPDX-License-Identifier: Apache-2.0
"""A group of ranks always ends, names the culprit and leaves no process behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from xmoe.errors import ConfigError
from xmoe.ranks import RankContext, RanksFailed, run_ranks


def _gone(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().split(")")[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_results_come_back_in_rank_order() -> None:
    assert run_ranks(lambda context: context.rank * 10, 3) == [0, 10, 20]


def test_process_group_spans_the_ranks() -> None:
    def total(context: RankContext) -> int:
        import torch
        import torch.distributed as dist

        context.init_process_group(30)
        value = torch.tensor([context.rank + 1])
        dist.all_reduce(value)
        dist.destroy_process_group()
        return int(value)

    assert run_ranks(total, 4) == [10, 10, 10, 10]


def test_same_error_on_all_ranks_is_said_once() -> None:
    def fail(context: RankContext) -> None:
        raise ConfigError("topk=99; allowed: 1..16")

    with pytest.raises(RanksFailed) as caught:
        run_ranks(fail, 3)
    assert str(caught.value).count("topk=99") == 1
    assert "all ranks [ConfigError]" in str(caught.value)


def test_a_killed_rank_is_named_with_its_last_phase() -> None:
    pids: list[int] = []

    def die(context: RankContext) -> None:
        context.report("generate", layer=3)
        if context.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

    begin = time.monotonic()
    with pytest.raises(RanksFailed, match=r"rank 1 \[PeerLost\] at generate layer=3: .*SIGKILL"):
        run_ranks(die, 3, on_start=pids.append)
    assert time.monotonic() - begin < 30
    assert all(_gone(pid) for pid in pids)


def test_a_silent_rank_is_ended_at_the_deadline() -> None:
    def hang(context: RankContext) -> None:
        context.report("dispatch", layer=7)
        if context.rank == 2:
            time.sleep(600)

    with pytest.raises(RanksFailed, match=r"rank 2 .*dispatch layer=7.*no sign of life for 1 s"):
        run_ranks(hang, 3, silence_s=1.0)


def test_ranks_die_with_a_killed_parent() -> None:
    code = (
        "import time, sys\n"
        "from xmoe.ranks import run_ranks\n"
        "run_ranks(lambda c: time.sleep(600), 2, on_start=lambda p: print(p, flush=True))\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent.stdout:
        pids = [int(parent.stdout.readline()) for _ in range(2)]
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 10
    while not all(_gone(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert all(_gone(pid) for pid in pids)


def test_a_rank_that_crashes_after_its_result_is_a_failure() -> None:
    def late(context: RankContext) -> int:
        def crash() -> None:
            time.sleep(0.3)
            os._exit(3)

        if context.rank == 1:
            threading.Thread(target=crash).start()  # the interpreter waits for it
        return context.rank

    with pytest.raises(RanksFailed, match=r"rank 1 \[PeerLost\].*exit code 3"):
        run_ranks(late, 2)


def test_size_must_be_positive() -> None:
    with pytest.raises(ConfigError, match="size=0"):
        run_ranks(lambda context: None, 0)
