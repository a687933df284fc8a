# SPDX-License-Identifier: Apache-2.0
"""The software device's own instruments: counted host waits, task trace, copy rate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from support.cam_ranks import cam_rank
from support.ranks import run_ranks, values
from xmoe.kernels.ops.cam.host import HostCamP2POps
from xmoe.kernels.ops.cam.topology import CamP2PTopology


def counted(rank: int, _: Any, folder: str) -> Any:
    with cam_rank(rank, 1, folder) as one:
        stream = one.stream()
        before = one.soft.host_waits()
        one.soft.trace_tasks(True)
        one.soft.timed_kernel(stream=stream, microseconds=2000, tag=3)
        one.sync(stream)
        between = one.soft.host_waits()
        one.library.base("aclrtSynchronizeDevice", "int32_t(*)(void)", "acl")()
        after = one.soft.host_waits()
        tasks = one.soft.read_tasks()
        one.soft.trace_tasks(False)
        one.soft.timed_kernel(stream=stream, microseconds=1)
        one.sync(stream)
        number = one.soft.stream_number(stream)
        return before, between, after, tasks, number, one.soft.read_tasks()


def test_device_waits_are_counted_and_tasks_name_their_stream(tmp_path: Path) -> None:
    found = values(run_ranks(counted, 1, str(tmp_path), group=False))[0]
    before, between, after, tasks, number, later = found
    assert between.device == before.device and between.stream == before.stream + 1
    assert after.device == before.device + 1
    assert [(task.name, task.stream, task.status) for task in tasks] == [
        ("aclnnXsdTimedKernel", number, 0)
    ]
    assert tasks[0].end_ns - tasks[0].start_ns >= 2_000_000
    assert later == []


def copied(rank: int, _: Any, folder: str) -> Any:
    with cam_rank(rank, 2, folder) as one:
        group = one.communicator("afd")
        t = CamP2PTopology(1, 1, rank, 512)
        ops, stream = HostCamP2POps(one.library, t), one.stream()
        one.soft.trace(True)
        x = None if t.is_ffn else torch.ones(10, 512, dtype=torch.bfloat16)
        one.keep((x, ops.a2e(group, x, 10, stream=stream)))
        one.sync(stream)
        entry = one.soft.read_trace()[0]
        return (entry.end_ns - entry.ready_ns) / 1e6, entry.stream


def test_a_copy_lasts_as_long_as_at_the_set_rate(tmp_path: Path) -> None:
    env = {"XSD_CAM_COPY_MBPS": "1"}
    for took, stream in values(run_ranks(copied, 2, str(tmp_path), group=False, env=env)):
        assert took >= 10.2  # 10240 bytes at 1 byte a microsecond
        assert stream > 0
