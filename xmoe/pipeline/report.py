# SPDX-License-Identifier: Apache-2.0
"""What a run came to: times, equality of the modes, and a trace that Perfetto opens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from xmoe.multistream import StreamMode
from xmoe.pipeline.deployment import RankRun, RunSpec, own_tokens, step_seconds
from xmoe.pipeline.trace import RankTrace, Trace, merge

SOFTWARE_DEVICE = "software device (CPU threads; not an NPU)"


def report(
    spec: RunSpec, modes: Sequence[StreamMode], results: list[list[RankRun]]
) -> dict[str, Any]:
    """The run as JSON values. Times are medians over steps of the slowest Attention rank."""
    rows = {}
    violations = 0
    for number, mode in enumerate(modes):
        runs = [rank[number] for rank in results]
        seconds = step_seconds(runs) or 0.0
        senders = [rank for rank in range(spec.size) if not spec.is_ffn(rank)]
        tokens = spec.stages * sum(own_tokens(spec, rank) for rank in senders)
        rows[mode.value] = {
            "step_ms": seconds * 1e3,
            "layer_us": seconds * 1e6 / spec.layers,
            "tokens_per_s": tokens / seconds if seconds else 0.0,
            "items": sum(run.items for run in runs),
            "counters": [run.counters for run in runs],
        }
        violations += sum(
            value for run in runs for key, value in run.counters.items() if "violations" in key
        )
    equal = order = None
    if len(modes) > 1:
        equal = all(len({run.digest for run in rank}) == 1 for rank in results)
        if spec.config.trace:
            order = all(order_by_channel(rank[0]) == order_by_channel(rank[1]) for rank in results)
    return {
        "connector": spec.connector,
        "attn": spec.attn,
        "ffn": spec.ffn,
        "layers": spec.layers,
        "stages": spec.stages,
        "steps": spec.steps,
        "settings": spec.config.to_mapping(),
        "modes": rows,
        "equal": equal,
        "order_equal": order if order is not None else "not traced",
        "violations": violations,
    }


def order_by_channel(run: RankRun) -> dict[str, list[tuple[str, int, int]]]:
    """(phase, layer, stage) of every channel in the order of issue, metadata left out.

    What a CAMAsync FFN rank receives next is the device's choice, so its layers are not compared.
    """
    found: dict[str, list[tuple[str, int, int]]] = {}
    for op, phase, layer, stage, channel, _, _ in run.phases:
        if phase != "metadata":
            number = -1 if op == "camasync" and run.role == "ffn" else layer
            found.setdefault(channel, []).append((phase, number, stage))
    return found


def trace_of(spec: RunSpec, results: list[list[RankRun]], device: str = SOFTWARE_DEVICE) -> Trace:
    """Executor and device traces of all ranks and modes in one."""
    ranks = [
        RankTrace(
            rank, run.role, run.mode, run.entries, run.kernels, run.tasks, run.streams, run.marks
        )
        for rank, runs in enumerate(results)
        for run in runs
    ]
    about: dict[str, Any] = {
        "connector": spec.connector,
        "tp_size": spec.tp_size,
        "stages": spec.stages,
    }
    about["vector_cores"] = results[0][0].vector_cores
    return merge(ranks, device=device, about=about)
