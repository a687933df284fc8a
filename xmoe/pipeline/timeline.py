# SPDX-License-Identifier: Apache-2.0
"""Draws a trace: a row for each rank and stream, work solid, waiting hatched."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from xmoe.errors import ConfigError
from xmoe.outputs import Output
from xmoe.pipeline.trace import HOST, WAIT, WORK, Span, Trace

_SHOWN = ("recv", "compute", "send", "main")
_COLOURS = {"recv": "#3b76af", "compute": "#519e3e", "send": "#c8702a"}
_MOST_SPANS = 6000


def draw(
    trace: Trace,
    picture: Output | Path,
    *,
    mode: str | None = None,
    limits_ms: tuple[float | None, float | None] = (None, None),
    title: str | None = None,
) -> None:
    """Write the picture of the trace, or of one mode or a part of it.

    Raises:
        ConfigError: matplotlib is missing, nothing to draw, or too much to see.
        OutputError: the picture cannot be written.
    """
    spans, processes = _select(trace, mode, limits_ms)
    output = Output("picture", picture) if isinstance(picture, Path) else picture
    figure_class, patch_class = _matplotlib()
    rows = [
        (process, track)
        for process in processes
        for track in _SHOWN
        if any(s.process == process and s.track == track for s in spans)
    ]
    begin = min(s.start for s in spans) if limits_ms[0] is None else limits_ms[0] * 1e3
    end = max(s.end for s in spans) if limits_ms[1] is None else limits_ms[1] * 1e3
    figure = figure_class(figsize=(11, 1.1 + 0.34 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for number, (process, track) in enumerate(rows):
        for span in spans:
            if span.process == process and span.track == track:
                _bar(axes, span, number, begin, (end - begin) / 70)
    axes.set_yticks(
        range(len(rows)), [_row_name(trace, process, track) for process, track in rows], fontsize=8
    )
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(0, (end - begin) / 1e3)
    axes.set_xlabel("ms")
    # A user's text is no formula, whatever signs it has.
    axes.set_title(title or _title(trace), fontsize=9, parse_math=False)
    handles = [patch_class(color=colour, label=phase) for phase, colour in _COLOURS.items()]
    handles.append(patch_class(facecolor="white", edgecolor="#888888", hatch="////", label="wait"))
    figure.legend(handles=handles, loc="outside lower right", ncols=4, fontsize=8, frameon=False)
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=90, pil_kwargs={"optimize": True})
    output.write(drawn.getvalue())


def _select(
    trace: Trace, mode: str | None, limits_ms: tuple[float | None, float | None]
) -> tuple[list[Span], list[int]]:
    modes = sorted({what["mode"] for what in trace.processes.values()})
    if mode is not None and mode not in modes:
        raise ConfigError(
            f"mode {mode!r} is not in this trace; allowed: {', '.join(modes)}; next: correct it"
        )
    low, high = (None if x is None else x * 1e3 for x in limits_ms)
    processes = [p for p, what in sorted(trace.processes.items()) if mode in (None, what["mode"])]
    spans = [
        s
        for s in trace.spans
        if s.category != HOST
        and s.process in processes
        and (low is None or s.end > low)
        and (high is None or s.start < high)
    ]
    if not 0 < len(spans) <= _MOST_SPANS:
        raise ConfigError(
            f"{len(spans)} device events to draw; allowed: 1 to {_MOST_SPANS}; next: choose a part "
            "with --from-ms, --to-ms and --mode"
        )
    return spans, processes


def _matplotlib() -> tuple[Any, Any]:
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ConfigError(
            "drawing needs matplotlib, which is not installed; allowed: the bench extra; "
            "next: pip install 'xmoe[bench]'"
        ) from error
    return Figure, Patch


def _bar(axes: Any, span: Span, row: int, begin: float, narrow: float) -> None:
    colour = _COLOURS.get(str(span.args.get("phase")), "#777777")
    place: Sequence[tuple[float, float]] = [((span.start - begin) / 1e3, span.duration / 1e3)]
    if span.category == WAIT:
        style = {"facecolor": "white", "edgecolor": colour, "hatch": "//////", "alpha": 0.5}
        axes.broken_barh(place, (row - 0.2, 0.4), linewidth=0.3, **style)
        return
    axes.broken_barh(place, (row - 0.36, 0.72), facecolor=colour, edgecolor="white", linewidth=0.4)
    if span.category == WORK and span.duration > narrow and "layer" in span.args:
        text = f"L{span.args['layer']}" + (f".{span.args['stage']}" if span.args["stage"] else "")
        middle = (span.start + span.duration / 2 - begin) / 1e3
        axes.text(middle, row, text, ha="center", va="center", fontsize=6, color="white")


def _row_name(trace: Trace, process: int, track: str) -> str:
    what = trace.processes[process]
    return f"{what['role']} {what['rank']} {track}"


def _title(trace: Trace) -> str:
    return f"{trace.about.get('connector', 'pipeline')}, {trace.about.get('device', '')}"
