# SPDX-License-Identifier: Apache-2.0
"""P4 and P6: many items through the product's own loops, with and without what is in question."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from xmoe.multistream import HostFence, MultistreamConfig, RecvGate, StreamMode
from xmoe.pipeline.deployment import RunSpec, rank_main
from xmoe.pipeline.overlap import both_directions
from xmoe.pipeline.probes.evidence import Evidence, judge
from xmoe.pipeline.report import trace_of
from xmoe.pipeline.run import check
from xmoe.ranks import RankContext, run_ranks

_ATTENTION = 3
_LAYERS = 8
_MODES = (StreamMode.SERIAL, StreamMode.OVERLAP)


def spec_for(items: int, fence: HostFence, *, trace: bool) -> RunSpec:
    """About `items` FFN items: three Attention groups, uneven batches, skewed experts."""
    config = MultistreamConfig(
        mode=StreamMode.OVERLAP,
        recv_gate=RecvGate.READY_PROBE,
        max_inflight=3,
        memory_budget_bytes=1 << 30,
        fence=fence,
        wait_timeout_s=60.0,
        trace=trace,
    )
    return RunSpec(
        "camasync", _ATTENTION, 1, _LAYERS,
        steps=max(1, -(-items // (_ATTENTION * _LAYERS))), tokens=8, hidden=32, uneven=True,
        routing="skewed", compute_us=20, attention_us=20, timeout_s=60.0, config=config,
    )  # fmt: skip


def _memory(context: RankContext, spec: RunSpec, modes: tuple[StreamMode, ...]) -> Any:
    """rank_main, and by how much the process grew at most."""
    before = _status("VmRSS")
    runs = rank_main(context, spec, modes)
    return runs, _status("VmHWM") - before


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) // 1024
    return 0


def soak(
    items: int,
    fence: HostFence,
    modes: tuple[StreamMode, ...],
    environ: Mapping[str, str],
    *,
    trace: bool,
) -> tuple[RunSpec, list[list[Any]], list[int]]:
    """Run it; results by rank then mode, and each rank's growth in MiB."""
    spec = spec_for(items, fence, trace=trace)
    check(spec, modes)
    found = run_ranks(_memory, spec.size, spec, modes, silence_s=120.0, environ=environ)
    return spec, [runs for runs, _ in found], [grown for _, grown in found]


def overlap(items: int, environ: Mapping[str, str]) -> Evidence:
    """P4: receive beside send, random delays, against the serial run of the same ranks."""
    spec, results, grown = soak(items, HostFence.STEP, _MODES, environ, trace=True)
    trace = trace_of(spec, results)
    ffn = next(p for p, what in trace.processes.items() if what["role"] == "ffn"
               and what["mode"] == "overlap")  # fmt: skip
    times, total = both_directions(trace, ffn)
    equal = all(len({run.digest for run in runs}) == 1 for runs in results)
    counters = [run.counters for runs in results for run in runs]
    violations = sum(v for c in counters for k, v in c.items() if "violations" in k)
    served = results[-1][1].items
    return judge(
        "P4", "receive beside send", equal and violations == 0 and times > 0,
        "outputs equal the serial run's bit for bit, and receives did run beside sends",
        "outputs differ, rules were broken, or nothing overlapped",
        items=served, equal=equal, violations=violations, overlapped=times,
        overlapped_us=round(total), grown_mib=grown[-1],
    )  # fmt: skip


def fence(items: int, environ: Mapping[str, str]) -> Evidence:
    """P6: the host's wait at each step's end taken away."""
    outputs, grown, waits, served = {}, {}, {}, 0
    for mode in (HostFence.STEP, HostFence.NONE):
        _, results, growth = soak(items, mode, (StreamMode.OVERLAP,), environ, trace=False)
        outputs[mode] = [runs[0].digest for runs in results]
        grown[mode] = growth[-1]
        served = results[-1][0].items
        counters = [run.counters for runs in results for run in runs]
        waits[mode] = sum(c["host_device_waits"] for c in counters)
    equal = outputs[HostFence.STEP] == outputs[HostFence.NONE]
    device_waits = sum(waits.values())
    ok = equal and device_waits == 0 and grown[HostFence.NONE] <= grown[HostFence.STEP] + 32
    return judge(
        "P6", "fence removed", ok,
        "without the step's host wait outputs are the same and memory is too: slots bound it",
        "the fence is needed: outputs or memory differ without it",
        items=served, equal=equal, device_waits=device_waits,
        grown_with_fence_mib=grown[HostFence.STEP], grown_without_mib=grown[HostFence.NONE],
    )  # fmt: skip
