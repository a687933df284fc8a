# SPDX-License-Identifier: Apache-2.0
"""`xmoe pipeline timeline` and `xmoe pipeline probe`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any


def add_actions(actions: Any) -> None:
    """Declare both commands' options."""
    draw = actions.add_parser("timeline", help="draw a trace as a picture", allow_abbrev=False)
    draw.add_argument("trace", type=Path, metavar="TRACE", help="file of run --trace")
    draw.add_argument("picture", type=Path, metavar="FILE.png")
    draw.add_argument("--mode", help="serial or overlap (all)")
    draw.add_argument("--from-ms", type=float, metavar="MS", help="left edge (the start)")
    draw.add_argument("--to-ms", type=float, metavar="MS", help="right edge (the end)")
    draw.add_argument("--title", help="above the picture")
    probe = actions.add_parser(
        "probe", help="what do the operators of this device guarantee?", allow_abbrev=False
    )
    probe.add_argument("names", nargs="*", metavar="P1..P9", help="which ones, or all (all)")
    probe.add_argument("--items", type=int, default=2000, help="work items of P4 and P6 (2000)")
    probe.add_argument("--json", type=Path, metavar="FILE", help="write the evidence")


def main(args: argparse.Namespace) -> int:
    """Run the command. A probe whose evidence is not the expected one makes it 1."""
    if args.action == "timeline":
        return _timeline(args)
    from xmoe.pipeline.probes import run_probes

    found = run_probes(args.names or ["all"], items=args.items, on_line=print)
    if args.json is not None:
        text = json.dumps([one.to_json() for one in found], indent=1)
        args.json.write_text(text + "\n", encoding="utf-8")
    return 1 if any(one.outcome == "unexpected" for one in found) else 0


def _timeline(args: argparse.Namespace) -> int:
    from xmoe.pipeline.overlap import figures
    from xmoe.pipeline.timeline import draw
    from xmoe.pipeline.trace import read

    trace = read(args.trace)
    limits = (args.from_ms, args.to_ms)
    draw(trace, args.picture, mode=args.mode, limits_ms=limits, title=args.title)
    for one in figures(trace):
        print(json.dumps(one.to_json()))
    return 0
