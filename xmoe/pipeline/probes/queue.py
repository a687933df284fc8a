# SPDX-License-Identifier: Apache-2.0
"""P9: torch_npu's host task queue. Does the device see the same order with every queue setting?"""

from __future__ import annotations

import importlib
import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from xmoe.pipeline.probes.evidence import SKIPPED, UNEXPECTED, Evidence, judge

_SETTINGS = [
    {"TASK_QUEUE_ENABLE": queue, "PER_STREAM_QUEUE": each}
    for queue in ("0", "1", "2")
    for each in ("0", "1")
]
_DEADLINE_S = 120.0


def probe() -> Iterator[Evidence]:
    """One line for all settings, or the reason why there is none."""
    if importlib.util.find_spec("torch_npu") is None:
        reason = "torch_npu is not installed here; run it in an environment that has it"
        yield Evidence("P9", "host task queue", SKIPPED, reason)
        return
    base = _software()
    seen = {}
    for setting in _SETTINGS:
        name = " ".join(f"{key}={value}" for key, value in setting.items())
        words = [f"{key}={value}" for key, value in {**base, **setting}.items()]
        try:
            done = subprocess.run(
                ["env", *words, sys.executable, "-m", "xmoe.pipeline.probes.queue"],
                capture_output=True, text=True, timeout=_DEADLINE_S, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            yield Evidence("P9", name, UNEXPECTED, f"did not end in {_DEADLINE_S:g} s")
            return
        if done.returncode != 0:
            text = (done.stderr.strip().splitlines() or ["no message"])[-1]
            yield Evidence("P9", name, UNEXPECTED, f"ended with {done.returncode}: {text}")
            return
        seen[name] = json.loads(done.stdout.splitlines()[-1])
        if seen[name]["tasks"] is None:
            reason = "order on a device is read from the software device; use the vendor's profiler"
            yield Evidence("P9", "host task queue", SKIPPED, reason)
            return
    different = [name for name, order in seen.items() if order != seen[next(iter(seen))]]
    first = next(iter(seen.values()))
    yield judge(
        "P9", "host task queue", not different and bool(first["tasks"]),
        "every queue setting gives the device the same tasks in the same order on each stream",
        f"another order with {', '.join(different)}",
        settings=len(seen), streams=len(first["tasks"]),
        tasks=sum(len(order) for order in first["tasks"]), result=first["result"],
    )  # fmt: skip


def _software() -> dict[str, str]:
    """What makes torch_npu find the software device, where that is the selected one."""
    from xmoe.kernels.acl.toolkit import find_toolkit
    from xmoe.kernels.softdev import environment, root

    return environment() if find_toolkit().root == root() else {}


def _child() -> None:
    """Work on three streams with events between them; prints what the device saw.

    Only the software device can say that. Runs in a process of its own, since the queue's settings
    are read when torch_npu is loaded.
    """
    import torch

    from xmoe.kernels.acl.toolkit import find_toolkit
    from xmoe.kernels.ops.cam.binding import open_cam
    from xmoe.kernels.ops.cam.soft import SoftCam

    npu: Any = importlib.import_module("torch_npu").npu
    npu.set_device(0)
    library = open_cam(find_toolkit())
    if not SoftCam.available(library):
        print(json.dumps({"tasks": None}))
        return
    soft = SoftCam(library)
    device = torch.device("npu", 0)
    values = torch.zeros(64, device=device)
    streams = [npu.Stream() for _ in range(3)]
    events = [npu.Event() for _ in range(3)]
    npu.synchronize()
    soft.trace_tasks(True)
    for turn in range(20):
        for number, stream in enumerate(streams):
            with npu.stream(stream):
                if turn or number:
                    stream.wait_event(events[number - 1])
                values.add_(number + 1).mul_(0.5)
                events[number].record(stream)
    npu.synchronize()
    orders: dict[int, list[str]] = {}
    for task in sorted(soft.read_tasks(), key=lambda task: task.start_ns):
        orders.setdefault(task.stream, []).append(task.name)
    tasks = [orders[stream] for stream in sorted(orders)]
    print(json.dumps({"tasks": tasks, "result": float(values.sum().cpu())}))


if __name__ == "__main__":
    _child()
