# SPDX-License-Identifier: Apache-2.0
"""The split path on npu tensors when a peer never comes: an error by name, within our own limit."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch

from support.npu import join_group
from xmoe.config import XmoeConfig
from xmoe.ranks import RankContext, RanksFailed, run_ranks
from xmoe.runner import MoeRunner
from xmoe.types import ExpertWeights, MoeShape

SHAPE = MoeShape(hidden=256, intermediate=128, num_experts=8, topk=2)
LIMIT_S = 3.0
ENVIRON = {
    # The software device's own limit; far beyond ours, so that it shows whose ended the wait.
    "XSD_WAIT_TIMEOUT_MS": "60000",
    # torch_npu's watchdog would end the process before anybody could tell why.
    "HCCL_ASYNC_ERROR_HANDLING": "0",
}


def _rank(context: RankContext, dies: bool) -> Any:
    """Rank 0 queues a collective and then a layer call; rank 1 takes part in neither."""
    import torch.distributed as dist

    device = torch.device("npu", context.rank)
    group = join_group(context, hccl=True)
    config = XmoeConfig.from_mapping({"mode": "off", "step_timeout_s": LIMIT_S})
    make = torch.Generator().manual_seed(5)
    local = ExpertWeights(
        torch.randn(4, 256, 256, generator=make).bfloat16().to(device),
        torch.randn(4, 128, 256, generator=make).bfloat16().to(device),
    )
    runner = MoeRunner.create(SHAPE, config, group=group, device=device)
    layer = runner.layer(local, 0)
    hidden = torch.randn(4, 256, generator=make).bfloat16().to(device)
    ids = torch.rand(4, 8, generator=make).topk(2, dim=1).indices.to(device)
    scales = torch.rand(4, 2, generator=make).to(device)
    with runner.step(4):
        layer(hidden, ids, scales)
        torch.npu.synchronize()
        if context.rank == 1:
            if dies:
                os.kill(os.getpid(), signal.SIGKILL)
            while not os.path.exists(context.store_path + ".over"):
                time.sleep(0.05)
            os._exit(0)
        dist.all_reduce(hidden)
        began = time.monotonic()
        try:
            layer(hidden, ids, scales)
        except Exception as error:
            found = type(error).__name__, str(error), time.monotonic() - began
        else:
            found = "", "", 0.0
    open(context.store_path + ".over", "w").close()
    context.report("found", found=found)
    os._exit(0)  # the device still waits


def _run(dies: bool) -> Any:
    told: list[Any] = []

    def note(rank: int, phase: str, details: Any) -> None:
        if phase == "found":
            told.append(details["found"])

    with pytest.raises(RanksFailed):  # no rank comes to its end
        run_ranks(_rank, 2, dies, silence_s=100.0, on_report=note, environ=ENVIRON)
    return told[0]


def test_a_dead_peer_is_named() -> None:
    kind, text, seconds = _run(True)
    assert kind == "PeerLost" and "peer 1 lost" in text, text
    assert seconds < 30


def test_a_silent_peer_ends_the_wait_at_the_steps_limit() -> None:
    kind, text, seconds = _run(False)
    assert kind == "FenceTimeout" and "dispatch 2" in text and f"{LIMIT_S:g} s" in text
    assert seconds < 30
