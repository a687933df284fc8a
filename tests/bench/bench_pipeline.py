# SPDX-License-Identifier: Apache-2.0
"""Serial against overlap through the product's loops, and what the executor costs an item.

    python tests/bench/bench_pipeline.py [--rounds N] [--layers N] [--json FILE] [--pictures DIR]
                                         [--only workloads|executor] [--no-realtime]

Figures of the software device on this machine: timed kernels sleep, copies last as long as at a set
rate (XSD_CAM_COPY_MBPS). They show what the executor does with given durations, never what an
operator or an NPU takes. Serial and overlap alternate in the same ranks, `rounds` times. Ranks run
with real-time priority where the system allows it, so that other users of the machine count less.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

LABEL = "software device on this machine, timed kernels; no operator's time, nothing ran on an NPU"
GOALS = {"achieved_over_possible": 0.95, "executor_python_us": 2.0, "executor_end_to_end_us": 10.0}
HIDDEN = 512
# The last two have their receive on all vector cores, behind a readiness probe; in the very last
# one the host does not read an item's metadata, so that compute is queued before the receive ends.
CONNECTORS = (
    "camp2p",
    "camasync, core partition",
    "camasync, readiness gate",
    "camasync, gate, metadata on device",
)
# FFN kernel and one full receive or send, microseconds.
WORKLOADS = {
    "communication-bound": (1000, 4000),
    "balanced": (4000, 2000),
    "compute-bound": (8000, 1000),
}


_KEPT = ("measured_us", "bound_us", "serial_bound_us", "step_s")


def machine(before: tuple[float, float, float]) -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(":", 1)[1].strip() for line in lines if "model name" in line), "")
    return {
        "cpu": cpu,
        "cpus": os.cpu_count(),
        "load_before": before,
        "load_after": os.getloadavg(),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "date": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
    }


def _realtime_rank(context: Any, spec: Any, modes: Any, realtime: bool) -> Any:
    from xmoe.pipeline.deployment import rank_main

    granted = False
    if realtime:
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
            granted = True
    return rank_main(context, spec, modes), granted


def _spec(connector: str, compute_us: int, copy_us: int, layers: int) -> tuple[Any, dict[str, str]]:
    from xmoe.multistream import MultistreamConfig
    from xmoe.pipeline.deployment import RunSpec

    p2p = connector == "camp2p"
    tokens = 32
    settings: dict[str, Any] = {
        "mode": "overlap",
        "max_inflight": 2 if p2p else 3,
        "trace": True,
        "memory_budget_bytes": 1 << 31,
    }
    environ = {"BATCH_SIZE_FACTOR": "0.0005"}
    if connector == "camasync, core partition":
        settings |= {"recv_gate": "core_partition", "recv_cores": 16, "send_cores": 8}
        settings["compute_cores"] = 24
    elif not p2p:
        settings["recv_gate"] = "ready_probe"
        if "on device" in connector:
            settings["metadata_read"] = "device"
    spec = RunSpec(
        connector.split(",")[0],
        attn=1 if p2p else 3,
        ffn=1,
        layers=layers,
        stages=2 if p2p else 1,
        steps=2,
        tokens=tokens,
        hidden=HIDDEN,
        topk=1,
        compute_us=compute_us,
        attention_us=100,
        buffer_mb=4,
        config=MultistreamConfig.from_mapping(settings),
    )
    rate = max(1, round(tokens * HIDDEN * 2 / copy_us))  # bytes a microsecond are MB/s
    return spec, {**environ, "XSD_CAM_COPY_MBPS": str(rate)}


def workload(
    connector: str,
    name: str,
    rounds: int,
    layers: int,
    realtime: bool,
    pictures: Path | None,
    scale: int,
) -> dict[str, Any]:
    """One connector and workload: rounds of serial and overlap, alternating in the same ranks."""
    from xmoe.multistream import StreamMode
    from xmoe.pipeline.deployment import step_seconds
    from xmoe.pipeline.overlap import figures
    from xmoe.pipeline.report import trace_of
    from xmoe.pipeline.run import check
    from xmoe.ranks import run_ranks

    compute_us, copy_us = (scale * us for us in WORKLOADS[name])
    spec, environ = _spec(connector, compute_us, copy_us, layers)
    modes = (StreamMode.SERIAL, StreamMode.OVERLAP) * rounds
    check(spec, modes)
    found = run_ranks(
        _realtime_rank, spec.size, spec, modes, realtime, silence_s=120.0, environ=environ
    )
    granted = all(one for _, one in found)
    rounds_of: dict[str, list[dict[str, Any]]] = {"serial": [], "overlap": []}
    for number, mode in enumerate(modes):
        runs = [[rank[number]] for rank, _ in found]
        trace = trace_of(spec, runs)
        one = figures(trace, step=1)[0].to_json()
        one["step_s"] = step_seconds([run[0] for run in runs])
        one["device_waits"] = sum(run[0].counters["host_device_waits"] for run in runs)
        rounds_of[mode.value].append(one)
        if pictures is not None and number == len(modes) - 1:
            title = f"{connector}, {name}"
            file = title.replace(", ", "-").replace(" ", "-") + f"-x{scale}.png"
            _picture(trace, pictures / file, title)
    tokens = spec.tokens * spec.attn * spec.stages * layers
    rows: dict[str, Any] = {}
    for mode, ones in rounds_of.items():
        seconds = statistics.median(one["step_s"] for one in ones)
        ratios = [one["overlap_achieved_over_possible"] for one in ones]
        ffn = [[r for r in one["ranks"] if r["role"] == "ffn"][0] for one in ones]
        rows[mode] = {
            "layer_us": round(seconds * 1e6 / layers, 1),
            "tokens_per_s": round(tokens / seconds / layers, 1),
            "hidden_share": round(statistics.median(r["hidden_share"] for r in ffn), 4),
            "bound_over_measured": _median(one["bound_over_measured"] for one in ones),
            "achieved_over_possible": _median(r for r in ratios if r is not None),
            "lost_us_an_item": _median(
                (one["measured_us"] - one["bound_us"]) / one["items"] for one in ones
            ),
            "device_waits": sum(one["device_waits"] for one in ones),
            "rounds": [{key: one[key] for key in _KEPT} for one in ones],
            "last_round": ones[-1],
        }
    equal = all(len({run.digest for run in rank}) == 1 for rank, _ in found)
    return {
        "connector": connector,
        "workload": name,
        "compute_us": compute_us,
        "copy_us": copy_us,
        "scale": scale,
        "layers": layers,
        "realtime": granted,
        "equal": equal,
        "speedup": round(rows["serial"]["layer_us"] / rows["overlap"]["layer_us"], 3),
        "modes": rows,
    }


def _median(values: Any) -> float | None:
    found = list(values)
    return round(statistics.median(found), 4) if found else None


def _picture(trace: Any, path: Path, title: str) -> None:
    from xmoe.pipeline.timeline import draw

    path.parent.mkdir(parents=True, exist_ok=True)
    start = min(s.start for s in trace.spans) / 1e3
    end = max(s.end for s in trace.spans) / 1e3
    middle = start + (end - start) * 0.6
    draw(
        trace,
        path,
        limits_ms=(middle, min(end, middle + 60)),
        title=f"{title}; software device, timed kernels (not an NPU)",
    )


def executor_cost(rounds: int) -> dict[str, Any]:
    """Microseconds an item: Python alone on a device that does nothing, and over native streams."""
    import torch

    from xmoe.kernels.acl.loader import load
    from xmoe.kernels.acl.toolkit import find_toolkit
    from xmoe.kernels.device import HostDevice, InlineDevice

    runtime = load(find_toolkit())
    ffi, memset = runtime.ffi, runtime.acl.aclrtMemsetAsync
    with HostDevice(runtime) as device, device.bind():
        target = torch.zeros(64, dtype=torch.uint8)
        address = ffi.cast("void*", target.data_ptr())

        def launch(context: Any) -> None:
            stream = ffi.cast("void*", context.stream.handle())
            if memset(address, 4, 0, 4, stream) != 0:
                raise RuntimeError("aclrtMemsetAsync failed")

        def nothing(context: Any) -> None:
            return None

        ways: dict[str, Callable[[], tuple[float, float]]] = {
            "python_only": lambda: _items(InlineDevice(), nothing, 4000),
            "three_native_streams": lambda: _items(device, launch, 4000),
            "native_floor": lambda: _floor(device, launch, 4000),
        }
        samples: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
        for _ in range(rounds):
            for name, way in ways.items():
                samples[name].append(way())
    return {
        name: {
            "us_an_item": round(statistics.median(wall for wall, _ in times), 3),
            "us_an_item_best": round(min(wall for wall, _ in times), 3),
            "issuing_thread_us": round(statistics.median(cpu for _, cpu in times), 3),
            "issuing_thread_us_best": round(min(cpu for _, cpu in times), 3),
        }
        for name, times in samples.items()
    }


def _items(device: Any, run: Callable[[Any], None], count: int) -> tuple[float, float]:
    """Wall and issuing thread's microseconds of an item with three phases, streaming."""
    from xmoe.multistream import StreamMode
    from xmoe.pipeline.executor import StreamExecutor
    from xmoe.pipeline.items import Phase, PhaseKind, WorkItem
    from xmoe.pipeline.options import ExecutorOptions

    kinds = (PhaseKind.RECV, PhaseKind.COMPUTE, PhaseKind.SEND)
    options = ExecutorOptions(mode=StreamMode.OVERLAP, max_inflight=4)
    from xmoe.pipeline.channels import ChannelRule

    rules = [ChannelRule(kind.value) for kind in kinds]
    item = WorkItem("item", 0, tuple(Phase(kind, kind.value, run) for kind in kinds))
    with StreamExecutor(device, options, channels=rules) as executor, executor.session():
        for _ in range(200):
            executor.submit(item)
        executor.drain()
        gc.collect()
        gc.disable()
        try:
            begin, cpu = time.perf_counter(), time.thread_time()
            for _ in range(count):
                executor.submit(item)
            executor.drain()
            return (
                (time.perf_counter() - begin) * 1e6 / count,
                (time.thread_time() - cpu) * 1e6 / count,
            )
        finally:
            gc.enable()


def _floor(device: Any, run: Callable[[Any], None], count: int) -> tuple[float, float]:
    """The same launches, records and waits without an executor: 3 + 3 + 3 calls from Python."""
    from types import SimpleNamespace

    streams = [device.create_stream() for _ in range(3)]
    rings = [[device.create_event() for _ in range(4)] for _ in range(3)]
    contexts = [SimpleNamespace(stream=stream) for stream in streams]
    begin, cpu = time.perf_counter(), time.thread_time()
    for number in range(count):
        slot = number % 4
        if number >= 4:
            rings[2][slot].synchronize(10.0)
        for position, stream in enumerate(streams):
            if position:
                stream.wait_event(rings[position - 1][slot])
            run(contexts[position])
            rings[position][slot].record(stream)
    for stream in streams:
        stream.synchronize(10.0)
    took = (time.perf_counter() - begin) * 1e6 / count, (time.thread_time() - cpu) * 1e6 / count
    for ring in rings:
        for event in ring:
            event.close()
    for stream in streams:
        stream.close()
    return took


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument(
        "--scales", type=int, nargs="+", default=[1, 4], help="factors on all durations (1 4)"
    )
    parser.add_argument("--only", choices=("workloads", "executor"))
    parser.add_argument("--no-realtime", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--pictures", type=Path)
    args = parser.parse_args()
    before = os.getloadavg()
    report: dict[str, Any] = {"label": LABEL, "goals": GOALS}
    if args.only != "executor":
        report["workloads"] = []
        for connector in CONNECTORS:
            for name, scale in itertools.product(WORKLOADS, args.scales):
                one = workload(
                    connector, name, args.rounds, args.layers, not args.no_realtime,
                    args.pictures, scale,
                )  # fmt: skip
                report["workloads"].append(one)
                _print(one)
    if args.only != "workloads":
        from xmoe.ranks import run_ranks

        report["executor"] = run_ranks(_executor_rank, 1, max(3, args.rounds), silence_s=300.0)[0]
        print(json.dumps(report["executor"], indent=1))
    report["machine"] = machine(before)
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(LABEL)
    return 0


def _executor_rank(context: Any, rounds: int) -> dict[str, Any]:
    # A process of its own: one that has used a device cannot fork ranks.
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    return executor_cost(rounds)


def _print(one: dict[str, Any]) -> None:
    for mode, row in one["modes"].items():
        print(
            f"{one['connector']:<35}{one['workload']:<20}x{one['scale']} {mode:<8} "
            f"{row['layer_us']:9.0f} us a layer "
            f"{row['tokens_per_s']:9.0f} tokens/s  hidden {row['hidden_share']:.2f}  "
            f"bound/measured {row['bound_over_measured']:.3f}  "
            f"achieved/possible {row['achieved_over_possible']}  "
            f"lost {row['lost_us_an_item']:.0f} us an item",
            flush=True,
        )
    print(f"    equal={one['equal']} speedup={one['speedup']}", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
