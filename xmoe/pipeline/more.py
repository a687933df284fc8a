# SPDX-License-Identifier: Apache-2.0
"""`xmoe pipeline timeline` and `xmoe pipeline probe`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from xmoe import arguments, outputs
from xmoe.errors import ConfigError
from xmoe.pipeline import limits

_ITEMS = 2000
# Those that run as many work items as they are told.
_WITH_ITEMS = ("P4", "P6", "ALL")


def add_actions(actions: Any) -> None:
    """Declare both commands' options."""
    milliseconds = arguments.of(limits.MILLISECONDS)
    draw = actions.add_parser("timeline", help="draw a trace as a picture", allow_abbrev=False)
    draw.add_argument("trace", type=Path, metavar="TRACE", help="file of run --trace")
    draw.add_argument("picture", metavar="FILE.png")
    draw.add_argument("--mode", help="serial or overlap (all)")
    draw.add_argument("--from-ms", type=milliseconds, metavar="MS", help="left edge (the start)")
    draw.add_argument("--to-ms", type=milliseconds, metavar="MS", help="right edge (the end)")
    draw.add_argument("--title", help="above the picture")
    probe = actions.add_parser(
        "probe", help="what do the operators of this device guarantee?", allow_abbrev=False
    )
    probe.add_argument("names", nargs="*", metavar="P1..P9", help="which ones, or all (all)")
    items = arguments.of(limits.ITEMS)
    probe.add_argument("--items", type=items, help=f"work items of P4 and P6 ({_ITEMS})")
    probe.add_argument(
        "--tensors", choices=("host", "npu"), help="whose (npu; on the software device: host)"
    )
    outputs.add_json(probe)


def main(args: argparse.Namespace) -> int:
    """Run the command. A probe whose evidence is not the expected one makes it 1."""
    if args.action == "timeline":
        return _timeline(args)
    from xmoe.kernels.capability import require_torch

    require_torch()
    from xmoe.pipeline.probes import run_probes

    names = args.names or ["all"]
    used = any(name.upper() in _WITH_ITEMS for name in names)
    arguments.need("--items", args.items, used, "with P4, P6 or all")
    (target,) = outputs.prepare(("--json", args.json))
    lines = outputs.Lines(target)
    found = run_probes(names, items=args.items or _ITEMS, on_line=lines, tensors=args.tensors)
    jobs = [lines.finish]
    if target is not None:
        jobs.insert(0, lambda: target.write_json([one.to_json() for one in found]))
    outputs.deliver(*jobs)
    return 1 if any(one.outcome == "unexpected" for one in found) else 0


def _timeline(args: argparse.Namespace) -> int:
    from xmoe.pipeline.overlap import figures
    from xmoe.pipeline.timeline import draw
    from xmoe.pipeline.trace import read

    if Path(args.picture).suffix.lower() != ".png":
        raise ConfigError(
            f"picture {args.picture}; allowed: a name that ends with .png; next: correct it"
        )
    if args.from_ms is not None and args.to_ms is not None and args.from_ms >= args.to_ms:
        raise ConfigError(
            f"--from-ms {args.from_ms:g} --to-ms {args.to_ms:g}; allowed: a part of some length; "
            "next: correct them"
        )
    trace = read(args.trace)
    picture = outputs.Output("picture", args.picture)
    if picture.is_file(args.trace):
        raise ConfigError(
            f"picture {args.picture} is the trace itself; allowed: another file; next: correct it"
        )
    limits_ms = (args.from_ms, args.to_ms)
    found = "".join(json.dumps(one.to_json()) + "\n" for one in figures(trace))
    outputs.deliver(
        lambda: draw(trace, picture, mode=args.mode, limits_ms=limits_ms, title=args.title),
        lambda: outputs.say(found, end=""),
    )
    return 0
