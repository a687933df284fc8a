# SPDX-License-Identifier: Apache-2.0
"""Host time of one launch of each connector operator, on the software device.

    python tests/bench/bench_cam_launch.py [--rounds N] [--json FILE]

Two forked ranks, an Attention and an FFN one, exchange small batches; what is timed is the call
that queues an operator, on the host, not the operator. Figures of the software device on this
machine: nothing here says what an operator or an NPU takes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

TOKENS, HIDDEN, TOPK, EXPERTS = 32, 512, 2, 4
LABEL = "host time of a launch, software device on this machine; nothing ran on an NPU"


class Clock:
    """Microseconds of each call, by name."""

    def __init__(self) -> None:
        self.samples: dict[str, list[float]] = {}

    def __call__(self, name: str, call: Callable[..., Any], *args: Any, **kw: Any) -> Any:
        begin = time.perf_counter()
        result = call(*args, **kw)
        self.samples.setdefault(name, []).append((time.perf_counter() - begin) * 1e6)
        return result

    def medians(self) -> dict[str, float]:
        """After the first tenth, which warms up."""
        return {
            name: round(statistics.median(times[len(times) // 10 :]), 2)
            for name, times in self.samples.items()
        }


def camp2p(one: Any, rounds: int, clock: Clock) -> None:
    import torch

    from xmoe.kernels.ops.cam.host import HostCamP2POps
    from xmoe.kernels.ops.cam.topology import CamP2PTopology

    group, stream = one.communicator("p2p"), one.stream()
    t = CamP2PTopology(1, 1, one.rank, HIDDEN, topk=TOPK)
    ops = HostCamP2POps(one.library, t)
    rows, side = torch.zeros(TOKENS, HIDDEN, dtype=torch.bfloat16), "FFN" if t.is_ffn else "Attn"
    out = ops.empty_a2e(TOKENS)
    for _ in range(rounds):
        given = None if t.is_ffn else rows
        clock(f"a2e {side}", ops.a2e, group, given, TOKENS, stream=stream, out=out)
        one.sync(stream)
        state = out.atten_batch_size
        clock(f"e2a {side}", ops.e2a, group, rows, state, stream=stream)
        one.sync(stream)
        work = torch.zeros_like(rows)
        kernel = {"stream": stream, "microseconds": 0, "vector_cores": 1, "rows": rows, "out": work}
        clock("timed kernel", one.soft.timed_kernel, **kernel)
        one.sync(stream)


def camasync(one: Any, rounds: int, clock: Clock) -> None:
    import torch

    from xmoe.kernels.ops.cam.host import HostCamAsyncOps
    from xmoe.kernels.ops.cam.topology import CamAsyncTopology

    group, stream = one.communicator("async"), one.stream()
    t = CamAsyncTopology(1, 1, one.rank, HIDDEN, TOPK, EXPERTS, max_seq_len=TOKENS)
    ops = HostCamAsyncOps(one.library, t)
    rows = torch.zeros(TOKENS * TOPK, HIDDEN, dtype=torch.bfloat16)
    if t.is_ffn:
        item = ops.empty_item()
        for _ in range(rounds):
            clock("dispatch_recv", ops.dispatch_recv, group, stream=stream, out=item)
            one.sync(stream)
            info = item.batch_info
            clock("combine_send", ops.combine_send, group, rows, info, stream=stream)
            one.sync(stream)
        return
    x = rows[:TOKENS].clone()
    ids = torch.arange(TOKENS * TOPK, dtype=torch.int32).reshape(TOKENS, TOPK) % EXPERTS
    ids, weights = ids.contiguous(), torch.ones(TOKENS, TOPK)
    for _ in range(rounds):
        clock("dispatch_send", ops.dispatch_send, group, x, ids, 0, stream=stream)
        one.sync(stream)
        clock("combine_recv", ops.combine_recv, group, ids, weights, stream=stream)
        one.sync(stream)


def _rank(context: Any, folder: str, rounds: int) -> dict[str, float]:
    from support.cam_ranks import cam_rank

    os.environ["BATCH_SIZE_FACTOR"] = "0.0005"
    clock = Clock()
    with cam_rank(context.rank, 2, folder) as one:
        camp2p(one, rounds, clock)
        camasync(one, rounds, clock)
    return clock.medians()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    from xmoe.ranks import run_ranks

    with tempfile.TemporaryDirectory() as folder:
        results = run_ranks(_rank, 2, folder, args.rounds, silence_s=120.0)
    found = {"label": LABEL, "host_us": {**results[0], **results[1]}}
    print(json.dumps(found, indent=1))
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
