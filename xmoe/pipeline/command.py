# SPDX-License-Identifier: Apache-2.0
"""`xmoe pipeline`: run both roles on the software device; draw a trace; probe a device."""

from __future__ import annotations

import argparse
from typing import Any

from xmoe import arguments, env, inputs, outputs
from xmoe.errors import ConfigError
from xmoe.multistream import MAX_INFLIGHT, HostFence, MultistreamConfig, RecvGate, StreamMode
from xmoe.pipeline import limits, more

# Settings that have an option of their own.
_OPTIONS = {
    "mode": "--mode",
    "roles": "--roles",
    "max_inflight": "--max-inflight",
    "memory_budget_bytes": "--memory-budget",
    "recv_gate": "--gate",
    "fence": "--fence",
    "wait_timeout_s": "--timeout",
    "trace": "--trace",
}
_MEMORY_BUDGET = 1 << 30
_NOTE = "figures of the software device on this machine; nothing here has run on an NPU"


def _number(name: str) -> Any:
    return arguments.of(limits.RUN[name])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `xmoe pipeline`."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    run = actions.add_parser("run", help="run both roles on forked ranks", allow_abbrev=False)
    run.add_argument("--connector", choices=("camp2p", "camasync"), required=True)
    run.add_argument("--mode", choices=("serial", "overlap", "both"), default="both")
    run.add_argument(
        "--attn", type=_number("attn"), default=2, metavar="N", help="Attention ranks (2)"
    )
    run.add_argument("--ffn", type=_number("ffn"), default=1, metavar="M", help="FFN ranks (1)")
    run.add_argument(
        "--layers", type=_number("layers"), default=4, metavar="L", help="MoE layers (4)"
    )
    run.add_argument("--stages", type=_number("stages"), help="micro-batches (2; camasync: 1)")
    run.add_argument(
        "--steps", type=_number("steps"), default=3, help="steps, the first one warms up (3)"
    )
    run.add_argument(
        "--tokens", type=_number("tokens"), default=32, help="per Attention rank and stage (32)"
    )
    run.add_argument("--uneven", action="store_true", help="one token fewer on every second rank")
    run.add_argument("--hidden", type=_number("hidden"), default=64, help="hidden size (64)")
    run.add_argument("--topk", type=_number("topk"), default=2, help="experts per token (2)")
    run.add_argument(
        "--experts", type=_number("experts"), help="camasync: experts per FFN rank (4)"
    )
    run.add_argument(
        "--tp", type=_number("tp_size"), help="camasync: ranks of one Attention group (1)"
    )
    run.add_argument(
        "--routing", choices=("mixed", "skewed", "one", "low"), help="camasync: (mixed)"
    )
    run.add_argument("--dynamic-quant", action="store_true", help="int8 rows (camasync)")
    run.add_argument(
        "--shared-expert", action="store_true", help="camasync: the older operators, with one more"
    )
    run.add_argument(
        "--compute-us", type=_number("compute_us"), default=200, help="FFN kernel time (200)"
    )
    run.add_argument(
        "--attention-us",
        type=_number("attention_us"),
        default=200,
        help="Attention kernel time (200)",
    )
    slots = arguments.of(env.integer(1, MAX_INFLIGHT))
    run.add_argument("--max-inflight", type=slots, help="slots in overlap mode (3)")
    run.add_argument(
        "--memory-budget",
        type=arguments.of(env.integer(1, 1 << 50)),
        metavar="BYTES",
        help="camasync: for the buffers of all slots of an FFN rank (1073741824)",
    )
    run.add_argument("--gate", choices=[g.value for g in RecvGate], help="before a receive")
    run.add_argument("--fence", choices=[f.value for f in HostFence], default="step")
    run.add_argument("--roles", choices=("ffn", "both"), help="sides that overlap (ffn)")
    run.add_argument(
        "--multistream", metavar="JSON", help="further settings, as in the configuration"
    )
    run.add_argument(
        "--device", choices=("host", "npu"), default="host", help="whose tensors (host: the CPU's)"
    )
    run.add_argument(
        "--buffer-mb", type=_number("buffer_mb"), default=16, help="half of a group's window (16)"
    )
    run.add_argument(
        "--timeout", type=_number("timeout_s"), default=30.0, help="seconds for one wait (30)"
    )
    run.add_argument("--trace", metavar="FILE", help="write a Chrome trace")
    outputs.add_json(run)
    more.add_actions(actions)


def spec_of(args: argparse.Namespace) -> Any:
    """The run that the command line describes, checked.

    Raises:
        ConfigError: with the reason; no rank was started.
    """
    from xmoe.pipeline.deployment import RunSpec

    p2p = args.connector == "camp2p"
    overlap = args.mode != "serial"
    for option in ("experts", "tp", "routing", "memory_budget", "shared_expert"):
        word = "--" + option.replace("_", "-")
        arguments.need(word, getattr(args, option), not p2p, "with --connector camasync")
    for option in ("gate", "roles", "max_inflight"):
        word = "--" + option.replace("_", "-")
        arguments.need(word, getattr(args, option), overlap, "with --mode overlap or both")
    if args.dynamic_quant and p2p:
        raise ConfigError(
            "--dynamic-quant with camp2p; allowed: camasync, a2e carries the model's type only; "
            "next: leave it out"
        )
    slots = 3 if args.max_inflight is None else args.max_inflight
    gate = args.gate or ("none" if p2p or not overlap else "ready_probe")
    settings: dict[str, object] = {
        "mode": "overlap" if overlap else "serial",
        "roles": ["ffn", "attention"] if args.roles == "both" else ["ffn"],
        "max_inflight": slots,
        "recv_gate": gate,
        "fence": args.fence,
        "wait_timeout_s": args.timeout,
        "trace": args.trace is not None,
    }
    if not p2p:
        settings["memory_budget_bytes"] = args.memory_budget or _MEMORY_BUDGET
    settings.update(_further(args.multistream))
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
        experts=args.experts or 4,
        tp_size=args.tp or 1,
        dynamic_quant=args.dynamic_quant,
        shared_expert=args.shared_expert,
        uneven=args.uneven,
        routing=args.routing or "mixed",
        compute_us=args.compute_us,
        attention_us=args.attention_us,
        buffer_mb=args.buffer_mb,
        timeout_s=args.timeout,
        device=args.device,
        config=MultistreamConfig.from_mapping(settings),
    )


def _further(text: str | None) -> dict[str, object]:
    """The settings of --multistream."""
    if text is None:
        return {}
    allowed = "allowed: an object with settings that have no option of their own"
    try:
        found = inputs.parse_json(text)
    except ValueError as error:
        raise ConfigError(
            f"--multistream {env.shown(text)} is not JSON ({error}); {allowed}; next: correct it"
        ) from None
    if not isinstance(found, dict):
        raise ConfigError(
            f"--multistream {env.shown(text)} is no object; {allowed}; next: correct it"
        )
    for key in found:
        if key in _OPTIONS:
            raise ConfigError(
                f"--multistream sets {key!r}; {allowed}; next: use {_OPTIONS[key]} instead"
            )
    return found


def main(args: argparse.Namespace) -> int:
    """Run it. 0: done, and with both modes their outputs are equal bit for bit; 1: they are not."""
    if args.action != "run":
        return more.main(args)
    from xmoe.kernels.capability import require_torch

    require_torch()
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
    trace_file, target = outputs.prepare(("--trace", args.trace), ("--json", args.json))
    results = run(spec, modes)
    found = report(spec, modes, results)
    found["note"] = _NOTE
    jobs, problem = [], None
    if trace_file is not None:
        trace = trace_of(spec, results)
        try:
            found["overlap"] = [one.to_json() for one in figures(trace)]
        except ConfigError as error:  # told after what the run is worth has been delivered
            problem = error
        jobs.append(lambda: write(trace, trace_file))
    jobs.append(lambda: outputs.deliver_report(target, found, lambda: _text(found), trace_file))
    outputs.deliver(*jobs)
    if problem is not None:
        raise problem
    return 0 if found["equal"] in (True, None) and not found["violations"] else 1


def _text(found: dict[str, Any]) -> str:
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
    return "\n".join(lines) + "\n"


def _bound(one: dict[str, Any]) -> str:
    hidden = [f"{100 * r['hidden_share']:.0f}%" for r in one["ranks"] if r["role"] == "ffn"]
    ratio = one["overlap_achieved_over_possible"]
    saved = "nothing to save" if ratio is None else f"achieved / possible overlap {ratio:.3f}"
    return (
        f"communication hidden on FFN ranks {', '.join(hidden)}; dependencies allow "
        f"{one['bound_us'] / 1e3:.3f} of {one['measured_us'] / 1e3:.3f} ms; {saved}"
    )
