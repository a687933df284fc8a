# SPDX-License-Identifier: Apache-2.0
"""The result of a regression run as JSON for machines and as a table for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from xmoe import outputs
from xmoe.regress.checks import Verdict
from xmoe.regress.plan import Plan
from xmoe.regress.rank import RankReport


def to_json(
    plan: Plan,
    reports: Sequence[RankReport],
    verdicts: Sequence[Verdict],
    wall_s: float,
) -> dict[str, Any]:
    """Everything a script needs: what ran, on what, what came out, every verdict."""
    return {
        "command": "regress",
        "device": reports[0].identity if reports else "not known: the ranks failed",
        "passed": all(verdict.passed for verdict in verdicts),
        "model": plan.model_dir,
        "ep_size": plan.ep_size,
        "rounds": plan.rounds,
        "requests": list(plan.requests),
        "fence": plan.fence.value,
        "decision": reports[0].decisions if reports else {},
        "outputs": {
            path.value: [
                [
                    reports[i % plan.ep_size].outputs[path.value][number][i // plan.ep_size][0]
                    for i in range(len(plan.requests))
                ]
                for number in range(plan.rounds)
            ]
            for path in plan.paths
            if reports
        },
        "verdicts": [vars(verdict) for verdict in verdicts],
        "ranks": [
            {
                "rank": report.rank,
                "ready_s": round(report.ready_s, 3),
                "expert_bytes_read": report.expert_bytes_read,
                "other_bytes_read": report.other_bytes_read,
                "expert_bytes_held": report.expert_bytes_held,
                "rss_peak_bytes": report.rss_peak_bytes,
                "rss_load_bytes": report.rss_load_bytes,
                "host_seconds": report.seconds,
            }
            for report in reports
        ],
        "wall_s": round(wall_s, 2),
        "note": "seconds are this machine's wall time, not the operator's",
    }


def table(document: dict[str, Any]) -> str:
    """The verdicts as a table for the standard error, so that JSON has the other one."""
    from rich.markup import escape
    from rich.table import Table

    rows = Table(title=escape(f"EP{document['ep_size']} regression on {document['device']}"))
    for column in ("check", "path", "result", "detail"):
        rows.add_column(column, overflow="fold")
    for verdict in document["verdicts"]:
        result = "[green]pass[/green]" if verdict["passed"] else "[red]FAIL[/red]"
        rows.add_row(verdict["name"], verdict["path"] or "-", result, escape(verdict["detail"]))
    ready = max(rank["ready_s"] for rank in document["ranks"])
    peak = max(rank["rss_peak_bytes"] for rank in document["ranks"]) / 2**20
    summary = (
        f"ranks ready after {ready:.1f} s, largest rank {peak:.0f} MiB resident, "
        f"{document['wall_s']:.1f} s in all ({document['note']})"
    )
    return outputs.render(rows, escape(summary), stderr=True)


class Progress:
    """One line per event worth knowing, on stderr; layer reports only feed the watchdog."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._seen: dict[str, int] = {}

    def __call__(self, rank: int, phase: str, details: dict[str, object]) -> None:
        """Called for each report of a rank."""
        if phase == "layer":
            return
        shown = [phase]
        for name in ("path", "round", "wave", "layer"):
            if name in details:
                shown.append(f"{name} {details[name]}")
        line = " ".join(shown)
        count = self._seen[line] = self._seen.get(line, 0) + 1
        if count == self._size:
            outputs.note(f"[regress] {line}")
