# SPDX-License-Identifier: Apache-2.0
"""`xmoe pipeline`: run both roles on the software device; draw a trace; probe a device."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from xmoe.errors import ConfigError
from xmoe.multistream import HostFence, MultistreamConfig, RecvGate, StreamMode
from xmoe.pipeline import more

_NOTE = "figures of the software device on this machine; nothing here has run on an NPU"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `xmoe pipeline`."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    run = actions.add_parser("run", help="run both roles on forked ranks", allow_abbrev=False)
    run.add_argument("--connector", choices=("camp2p", "camasync"), required=True)
    run.add_argument("--mode", choices=("serial", "overlap", "both"), default="both")
    run.add_argument("--attn", type=int, default=2, metavar="N", help="Attention ranks (2)")
    run.add_argument("--ffn", type=int, default=1, metavar="M", help="FFN ranks (1)")
    run.add_argument("--layers", type=int, default=4, metavar="L", help="MoE layers (4)")
    run.add_argument("--stages", type=int, choices=(1, 2), help="micro-batches (2; camasync: 1)")
    run.add_argument("--steps", type=int, default=3, help="steps, the first one warms up (3)")
    run.add_argument("--tokens", type=int, default=32, help="per Attention rank and stage (32)")
    run.add_argument("--uneven", action="store_true", help="one token fewer on every second rank")
    run.add_argument("--hidden", type=int, default=64, help="hidden size (64)")
    run.add_argument("--topk", type=int, default=2, help="experts per token (2)")
    run.add_argument("--experts", type=int, default=4, help="experts per FFN rank (4)")
    run.add_argument("--tp", type=int, default=1, help="ranks of one Attention group (1)")
    run.add_argument(
        "--routing", choices=("mixed", "skewed", "one", "low"), default="mixed", help="(mixed)"
    )
    run.add_argument("--dynamic-quant", action="store_true", help="int8 rows (camasync)")
    run.add_argument("--compute-us", type=int, default=200, help="FFN kernel time (200)")
    run.add_argument("--attention-us", type=int, default=200, help="Attention kernel time (200)")
    run.add_argument("--max-inflight", type=int, default=3, help="slots in overlap mode (3)")
    run.add_argument("--gate", choices=[g.value for g in RecvGate], help="before a receive")
    run.add_argument("--fence", choices=[f.value for f in HostFence], default="step")
    run.add_argument(
        "--roles", choices=("ffn", "both"), default="ffn", help="sides that overlap (ffn)"
    )
    run.add_argument(
        "--multistream", metavar="JSON", help="further settings, as in the configuration"
    )
    run.add_argument("--buffer-mb", type=int, default=16, help="half of a group's window (16)")
    run.add_argument("--timeout", type=float, default=30.0, help="seconds for one wait (30)")
    run.add_argument("--trace", type=Path, metavar="FILE", help="write a Chrome trace")
    run.add_argument("--json", type=Path, metavar="FILE", help="write the report")
    more.add_actions(actions)


def spec_of(args: argparse.Namespace) -> Any:
    """The run that the command line describes, checked.

    Raises:
        ConfigError: with the reason; no rank was started.
    """
    from xmoe.kernels.ops.cam.topology import receive_capacity
    from xmoe.pipeline.deployment import RunSpec

    p2p = args.connector == "camp2p"
    if args.dynamic_quant and p2p:
        raise ConfigError(
            "--dynamic-quant with camp2p; allowed: camasync, a2e carries the model's type only; "
            "next: leave it out"
        )
    overlap = args.mode != "serial"
    gate = args.gate or ("none" if p2p or not overlap else "ready_probe")
    settings: dict[str, object] = {
        "mode": "overlap" if overlap else "serial",
        "roles": ["ffn", "attention"] if args.roles == "both" else ["ffn"],
        "max_inflight": args.max_inflight,
        "recv_gate": gate,
        "fence": args.fence,
        "wait_timeout_s": args.timeout,
        "trace": args.trace is not None,
    }
    if not p2p:
        itemsize = 1 if args.dynamic_quant else 2
        settings["memory_budget_bytes"] = (
            receive_capacity() * args.hidden * itemsize * args.max_inflight
        )
    if args.multistream:
        try:
            extra = json.loads(args.multistream)
        except json.JSONDecodeError as error:
            raise ConfigError(
                f"--multistream {args.multistream!r} is not JSON ({error}); allowed: an object; "
                "next: correct it"
            ) from None
        settings.update(extra)
    return RunSpec(
        connector=args.connector,
        attn=args.attn,
        ffn=args.ffn,
        layers=args.layers,
        stages=args.stages or (2 if p2p else 1),
        steps=args.steps,
        tokens=args.tokens,
        hidden=args.hidden,
        topk=args.topk,
        experts=args.experts,
        tp_size=args.tp,
        dynamic_quant=args.dynamic_quant,
        uneven=args.uneven,
        routing=args.routing,
        compute_us=args.compute_us,
        attention_us=args.attention_us,
        buffer_mb=args.buffer_mb,
        timeout_s=args.timeout,
        config=MultistreamConfig.from_mapping(settings),
    )


def main(args: argparse.Namespace) -> int:
    """Run it. 0: done, and with both modes their outputs are equal bit for bit; 1: they are not."""
    if args.action != "run":
        return more.main(args)
    from xmoe.pipeline.overlap import figures
    from xmoe.pipeline.report import report, trace_of
    from xmoe.pipeline.run import check, run
    from xmoe.pipeline.trace import write

    spec = spec_of(args)
    modes = {
        "both": (StreamMode.SERIAL, StreamMode.OVERLAP),
        "serial": (StreamMode.SERIAL,),
        "overlap": (StreamMode.OVERLAP,),
    }[args.mode]
    check(spec, modes)
    results = run(spec, modes)
    found = report(spec, modes, results)
    found["note"] = _NOTE
    if args.trace is not None:
        trace = trace_of(spec, results)
        write(trace, args.trace)
        found["overlap"] = [one.to_json() for one in figures(trace)]
    for line in _lines(found):
        print(line)
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0 if found["equal"] in (True, None) and not found["violations"] else 1


def _lines(found: dict[str, Any]) -> list[str]:
    lines = [f"{found['connector']}: {found['attn']} Attention, {found['ffn']} FFN ranks"]
    for mode, row in found["modes"].items():
        lines.append(
            f"  {mode:<8} {row['step_ms']:9.3f} ms a step  {row['layer_us']:9.1f} us a layer  "
            f"{row['tokens_per_s']:11.0f} tokens/s  {row['items']} items"
        )
    if found["equal"] is not None:
        lines.append(f"  outputs equal bit for bit: {'yes' if found['equal'] else 'NO'}")
        lines.append(f"  order of operations equal: {found['order_equal']}")
    for one in found.get("overlap", ()):
        lines.append(f"  {one['mode']:<8} {_bound(one)}")
    lines.append(f"  protocol violations: {found['violations']}")
    lines.append(f"  ({found['note']})")
    return lines


def _bound(one: dict[str, Any]) -> str:
    hidden = [f"{100 * r['hidden_share']:.0f}%" for r in one["ranks"] if r["role"] == "ffn"]
    ratio = one["overlap_achieved_over_possible"]
    saved = "nothing to save" if ratio is None else f"achieved / possible overlap {ratio:.3f}"
    return (
        f"communication hidden on FFN ranks {', '.join(hidden)}; dependencies allow "
        f"{one['bound_us'] / 1e3:.3f} of {one['measured_us'] / 1e3:.3f} ms; {saved}"
    )
