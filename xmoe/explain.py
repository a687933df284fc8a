# SPDX-License-Identifier: Apache-2.0
"""`xmoe explain`: which path a model would take at an EP size, and every check behind it.

Needs a config.json only: no weights, no device, no library. What a device would have told is
assumed and marked so. Which operators FusedMoE would call on npu tensors is read from the files of
this machine's toolkit.

Exit codes: 0 mega_moe would run, 3 fused_moe would run, 1 mode on is rejected, 2 bad input.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass, replace
from typing import Any

from xmoe import arguments, env, layout, outputs
from xmoe.config import XmoeConfig
from xmoe.errors import LibraryError
from xmoe.kernels.acl.quant_modes import PREPARED_QUANTS
from xmoe.kernels.acl.toolkit import find_toolkit
from xmoe.kernels.acl.variants import VARIANTS
from xmoe.kernels.capability import npu_operator_lines
from xmoe.models.qwen3_5.config import layer_types, read_config, shape_from_config
from xmoe.models.qwen3_5.widen import plan_widening, widened_shape
from xmoe.policy import explain as text
from xmoe.policy.decision import Check, Decision
from xmoe.policy.facts import Facts
from xmoe.policy.profiles import PROFILES, LimitProfile, profile_named, soc_family
from xmoe.policy.select import assess, switched_off
from xmoe.types import Mode, MoeShape, Path

ASSUMED_VERSION = "9.1.0"
ASSUMED_VARIANT = "B"
EXIT_MEGA_MOE, EXIT_REJECTED, EXIT_FUSED_MOE = 0, 1, 3
# What the loader pads smaller models to; the same numbers as load_model's default.
WIDEN_TO = (1024, 512)
# Which assumed facts a check rests on.
_RESTS_ON = {
    "rank_agreement": ("ranks",),
    "soc": ("soc",),
    "library": ("library",),
    "comm": ("comm",),
    "abi_variant": ("abi_variant",),
    "cann_version": ("cann_version",),
    "operator_version": ("vendor_version",),
    "moe_tp": ("moe_tp_size",),
    "window": ("ccl_buffer_bytes",),
    "graph_mode": ("graph_mode",),
}


@dataclass(frozen=True)
class Report:
    """Everything the command shows."""

    decision: Decision
    shape: MoeShape
    stored_shape: MoeShape
    facts: Facts
    settings: tuple[tuple[str, str | int | float | bool | None, str], ...]
    sizes: dict[str, int | None]
    fused_moe_on_npu: tuple[str, ...]

    @property
    def exit_code(self) -> int:
        if self.decision.path is Path.MEGA_MOE:
            return EXIT_MEGA_MOE
        return EXIT_REJECTED if self.decision.mode is Mode.ON else EXIT_FUSED_MOE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `xmoe explain`."""
    parser.description = __doc__.split("\n\n")[0].split(": ", 1)[1] if __doc__ else None
    parser.epilog = (
        "exit codes: 0 mega_moe would run, 3 fused_moe would run, "
        "1 mode on is rejected, 2 bad input"
    )
    add = parser.add_argument
    add("--model", required=True, metavar="PATH", help="checkpoint directory, or a config.json")
    ep = arguments.of(arguments.EP)
    add("--ep", required=True, type=ep, metavar="N", help="ranks of the expert-parallel group")
    add("--soc", metavar="NAME", help="A2, A3, A5 or a full device name (assumed: A3)")
    add("--operator-version", metavar="V", help=f"operator package (assumed: {ASSUMED_VERSION})")
    add("--profile", metavar="NAME", help="limit profile instead of the one SoC and version choose")
    add("--abi-variant", metavar="X", help=f"ABI of the operator (assumed: {ASSUMED_VARIANT})")
    add("--max-tokens", metavar="N", help="largest number of tokens per rank and step")
    add("--mode", metavar="MODE", help="off, auto or on")
    add("--ccl-buffer-mb", metavar="N", help="one half of the communicator's buffer, in MiB")
    add(
        "--no-widen", action="store_true", help="sizes as stored, without the loader's zero padding"
    )
    outputs.add_json(parser)


def explain(args: argparse.Namespace) -> Report:
    """Work out the report. Local; reads the config file and the environment only."""
    model = read_config(args.model)
    stored = shape_from_config(model)
    shape = widened_shape(stored, plan_widening(stored, None if args.no_widen else WIDEN_TO))
    ep_size = args.ep
    config = XmoeConfig.resolve(
        explicit={
            "mode": args.mode,
            "profile": args.profile,
            "abi_variant": args.abi_variant,
            "max_tokens_per_rank": args.max_tokens,
            "ccl_buffer_mb": args.ccl_buffer_mb,
        },
        model_config=model,
    )
    pinned = None if config.profile is None else profile_named(config.profile)
    facts = _facts(args, config, ep_size, pinned)
    if config.mode is Mode.OFF:
        decision = switched_off(ep_size, config.max_tokens_per_rank)
    else:
        decision = _mark_assumed(assess(config.mode, facts, shape, config.profile), facts.assumed)
    sizes = _sizes(decision, shape, facts, len(layer_types(model)))
    return Report(decision, shape, stored, facts, config.describe(), sizes, _on_npu())


def _on_npu() -> tuple[str, ...]:
    """What this machine's files say of fused_moe's operators; nothing is loaded."""
    try:
        return npu_operator_lines(find_toolkit())
    except LibraryError as error:
        return (f"torch operators; {error}",)


def _facts(
    args: argparse.Namespace, config: XmoeConfig, ep_size: int, pinned: LimitProfile | None
) -> Facts:
    assumed = {"ranks", "library", "comm", "moe_tp_size", "graph_mode", "cann_version"}
    soc, version = args.soc, args.operator_version
    if soc is None:
        # A profile named without a device says which device is meant.
        soc = pinned.soc_family if pinned else "A3"
        assumed.add("soc")
    if version is None:
        version = ASSUMED_VERSION
        assumed.add("vendor_version")
    variant = config.abi_variant
    if variant is None:
        variant = ASSUMED_VARIANT
        assumed.add("abi_variant")
    buffer_mb = config.ccl_buffer_mb
    if buffer_mb is None:
        found = env.read("HCCL_BUFFSIZE")
        buffer_mb = int(env.get("HCCL_BUFFSIZE") or 0)
        if found is None:
            assumed.add("ccl_buffer_bytes")
    return Facts(
        soc=soc,
        cann_version=version,
        vendor_version=version,
        abi_variant=variant,
        ep_size=ep_size,
        max_tokens_per_rank=config.max_tokens_per_rank,
        ccl_buffer_bytes=layout.ccl_buffer_bytes_of(buffer_mb, soc_family(soc) or "A3"),
        callable_variants=tuple(VARIANTS),
        runtime_quants=PREPARED_QUANTS,
        config_digest=config.digest(),
        assumed=tuple(sorted(assumed)),
    )


def _mark_assumed(decision: Decision, assumed: tuple[str, ...]) -> Decision:
    """Say in the sentence of a check that it rests on something nobody looked up."""

    def marked(check: Check) -> Check:
        if any(name in assumed for name in _RESTS_ON.get(check.code, ())):
            return replace(check, sentence=f"{check.sentence} (assumed)")
        return check

    return replace(decision, checks=tuple(marked(check) for check in decision.checks))


def _sizes(decision: Decision, shape: MoeShape, facts: Facts, layers: int) -> dict[str, int | None]:
    weights = layout.routed_weight_bytes_per_rank(shape, facts.ep_size, layers)
    sizes: dict[str, int | None] = {"routed_weight_bytes_per_rank": weights}
    profile = next((row for row in PROFILES if row.name == decision.profile), None)
    if profile is None or profile.window is None or facts.ccl_buffer_bytes is None:
        return sizes
    spec = layout.window_spec(
        shape, facts.ep_size, facts.max_tokens_per_rank, profile.flag_min_bytes
    )
    sizes["required_ccl_buffer_bytes"] = layout.required_ccl_buffer_bytes(profile.window, spec)
    sizes["ccl_buffer_bytes"] = facts.ccl_buffer_bytes
    sizes["min_hccl_buffsize_mb"] = layout.min_hccl_buffsize_mb(profile.window, spec)
    fit = layout.max_tokens_per_rank_that_fit(profile.window, spec, facts.ccl_buffer_bytes)
    high = profile.tokens_per_rank.high
    sizes["max_tokens_per_rank_that_fit"] = fit if high is None else min(fit, high)
    return sizes


def as_json(report: Report) -> dict[str, Any]:
    """The report as JSON-able values."""
    decision = json.loads(report.decision.to_json())
    for check in decision["checks"]:
        check["assumed"] = check["sentence"].endswith("(assumed)")
    return {
        "path": report.decision.path.value,
        "mode": report.decision.mode.value,
        "rejected": report.exit_code == EXIT_REJECTED,
        "exit_code": report.exit_code,
        "profile": report.decision.profile,
        "reasons": list(report.decision.reasons),
        "checks": decision["checks"],
        "shape": asdict(report.shape),
        "stored_shape": asdict(report.stored_shape),
        "facts": json.loads(report.facts.to_json()),
        "settings": [
            {"name": name, "value": value, "origin": origin}
            for name, value, origin in report.settings
        ],
        "sizes": report.sizes,
        "fused_moe_on_npu": list(report.fused_moe_on_npu),
    }


def _text(report: Report) -> str:
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=escape(_title(report)), title_justify="left", show_lines=False)
    for name in ("check", "result", "value", "limit", "source"):
        table.add_column(name, overflow="fold")
    style = {True: "green", False: "bold red", None: "dim"}
    for check in report.decision.checks:
        value = "-" if check.value is None else str(check.value)
        if check.sentence.endswith("(assumed)"):
            value += " (assumed)"
        outcome = f"[{style[check.passed]}]{text.outcome(check)}[/]"
        table.add_row(check.code, outcome, *map(escape, (value, check.limit, check.source)))
    return outputs.render(table, *map(escape, _footer(report)))


def _title(report: Report) -> str:
    shape, stored = report.shape, report.stored_shape
    title = (
        f"hidden {shape.hidden}, intermediate {shape.intermediate}, {shape.num_experts} experts, "
        f"top-{shape.topk}, {shape.dtype}, quant {shape.quant}, EP{report.decision.ep_size}"
    )
    if shape != stored:
        title += f" (stored {stored.hidden} and {stored.intermediate}, zero-padded when loaded)"
    return title


def _footer(report: Report) -> list[str]:
    settings = [f"{n}={v} ({origin})" for n, v, origin in report.settings if origin != "default"]
    lines = [f"settings not at their default: {', '.join(settings) or 'none'}"]
    lines += [f"{name}: {value}" for name, value in report.sizes.items()]
    if report.decision.path is Path.FUSED_MOE:
        lacking = [line for line in report.fused_moe_on_npu if "torch operators" in line]
        own = len(report.fused_moe_on_npu) - len(lacking)
        lines += [f"fused_moe on npu tensors, on this machine: {own} operators of torch_npu"]
        lines += [f"fused_moe on npu tensors, on this machine: {line}" for line in lacking]
    lines += [f"rejected by {reason}" for reason in report.decision.reasons]
    lines.append(text.headline(report.decision))
    return lines


def main(args: argparse.Namespace) -> int:
    """Print the report and return the exit code."""
    (target,) = outputs.prepare(("--json", args.json))
    report = explain(args)
    outputs.deliver_report(target, as_json(report), lambda: _text(report))
    return report.exit_code
