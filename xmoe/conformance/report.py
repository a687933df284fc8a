# SPDX-License-Identifier: Apache-2.0
"""Conformance results as a table for people and as JSON for machines."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from xmoe import outputs
from xmoe.conformance.case import Case, Result, Verdict
from xmoe.conformance.run import SOFTWARE

NOTE = "software device: nothing here was run on an NPU"
_COLOURS = {Verdict.PASS: "green", Verdict.FAIL: "red", Verdict.SKIP: "yellow"}


def document(
    device: str, tensors: str, ranks: int, results: Sequence[Result], seconds: float
) -> dict[str, Any]:
    """Everything a script needs."""
    counts = Counter(result.verdict.value for result in results)
    return {
        "command": "conformance",
        "device": device,
        "tensors": tensors,
        "note": NOTE if device == SOFTWARE else "",
        "ranks": ranks,
        "passed": counts["fail"] == 0,
        "counts": {verdict.value: counts[verdict.value] for verdict in Verdict},
        "results": [result.to_dict() for result in results],
        "seconds": round(seconds, 2),
    }


def progress() -> Callable[[Result], None]:
    """A line that counts, on a terminal."""
    done = 0

    def on_result(result: Result) -> None:
        nonlocal done
        done += 1
        if sys.stderr.isatty():
            outputs.note(f"\r{done} cases, {result.name:<40}", end="")

    return on_result


def print_list(cases: Sequence[Case]) -> None:
    """Names and meanings."""
    from rich.table import Table

    table = Table("case", "ranks", "assumed", "who relies on it", title="conformance cases")
    for one in cases:
        ranks = ("all" if one.ranks else "1") + (", harmful" if one.harmful else "")
        table.add_row(one.name, ranks, one.meaning, one.relies)
    outputs.say(outputs.render(table), end="")


def table(found: dict[str, Any]) -> str:
    """The table, and one closing line."""
    from rich.markup import escape
    from rich.table import Table

    if sys.stderr.isatty():
        outputs.note("")
    rows = Table("case", "device", "result", "evidence or reason")
    for one in found["results"]:
        colour = _COLOURS[Verdict(one["verdict"])]
        result = f"[{colour}]{one['verdict']}[/]"
        rows.add_row(one["name"], one["device"], result, escape(one["evidence"]))
    counts = found["counts"]
    summary = (
        f"{counts['pass']} passed, {counts['fail']} failed, {counts['skip']} skipped on "
        f"{found['device']} with {found['ranks']} ranks and {found['tensors']} tensors "
        f"in {found['seconds']} s"
    )
    return outputs.render(rows, *filter(None, (escape(summary), escape(found["note"]))))
