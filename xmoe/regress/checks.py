# SPDX-License-Identifier: Apache-2.0
"""Judge what the ranks of a regression run returned. Pure: values in, named verdicts out."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from xmoe.reference import BF16_ROW_TOLERANCE, moe_reference, row_errors
from xmoe.regress.plan import Plan, expected_answer
from xmoe.regress.rank import Capture, RankReport
from xmoe.regress.stored import StoredExperts
from xmoe.types import MoeShape

# What a log line of a run must not contain: device codes, vendor error ids, aclnn codes, crashes.
_ERROR_PATTERN = re.compile(
    r"\b(?:5070\d\d|507\d{3}|561\d{3}|107030|E[EZ]\d{4})\b|[Nn]a[Nn]\b|Segmentation|Traceback|AICore"
)


SHARED_MEMORY = "/dev/shm"


@dataclass(frozen=True)
class Verdict:
    """One check of a run. `path` is empty where the check is about the whole run."""

    name: str
    path: str
    passed: bool
    detail: str


def check_outputs(plan: Plan, reports: Sequence[RankReport]) -> list[Verdict]:
    """Every answer non-empty, byte-identical over rounds and equal prompts, and right where
    known.
    """
    verdicts = []
    for path in (p.value for p in plan.paths):
        total = plan.rounds * len(plan.requests)
        by_prompt: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
        for number in range(plan.rounds):
            for index, prompt in enumerate(plan.requests):
                report = reports[index % plan.ep_size]
                text, tokens = report.outputs[path][number][index // plan.ep_size]
                by_prompt.setdefault(prompt, []).append((text, tuple(tokens)))
        same = sum(
            answer == answers[0] and bool(answer[0])
            for answers in by_prompt.values()
            for answer in answers
        )
        shown = "; ".join(f"{prompt} -> {answers[0][0]}" for prompt, answers in by_prompt.items())
        verdicts.append(
            Verdict("identical", path, same == total, f"{same}/{total} byte-identical: {shown}")
        )
        known = {p: want for p in by_prompt if (want := expected_answer(p)) is not None}
        if known:
            wrong = [
                f"{p} -> {text!r}, right is {want}"
                for p, want in known.items()
                for text in {text for text, _ in by_prompt[p]}
                if text != want
            ]
            verdicts.append(
                Verdict("right", path, not wrong, "; ".join(wrong) or "all sums are right")
            )
    return verdicts


def check_reference(
    captures: Iterable[Capture], stored: StoredExperts, shape: MoeShape
) -> list[Verdict]:
    """Compare captured layer calls with the float64 reference on the checkpoint's own weights, with
    the activation and the clamp that the model's `shape` names.

    The reference works in the stored sizes; columns that widening added must be exactly zero.
    """
    worst: dict[str, float] = {}
    calls: dict[str, int] = {}
    stray: dict[str, float] = {}
    hidden = stored.hidden
    for call in captures:
        used = sorted({int(expert) for expert in call.topk_ids.flatten() if expert >= 0})
        gate_up, down = stored.experts(call.layer, used)
        ids = np.where(call.topk_ids >= 0, np.searchsorted(used, call.topk_ids), -1)
        x = call.hidden_states[:, :hidden].astype(np.float64)
        want = moe_reference(
            x,
            ids,
            call.topk_weights.astype(np.float64),
            gate_up,
            down,
            shape.activation_clamp,
            shape.activation,
        )
        error = float(row_errors(call.output[:, :hidden], want).max())
        worst[call.path] = max(worst.get(call.path, 0.0), error)
        calls[call.path] = calls.get(call.path, 0) + 1
        beyond = np.concatenate([call.hidden_states[:, hidden:], call.output[:, hidden:]], axis=1)
        size = np.nan_to_num(np.abs(beyond), nan=np.inf).max(initial=0.0)
        stray[call.path] = max(stray.get(call.path, 0.0), float(size))
    return [
        Verdict(
            "reference",
            path,
            worst[path] <= BF16_ROW_TOLERANCE and stray[path] == 0.0,
            f"{calls[path]} layer calls; largest row error {worst[path]:.2e}, allowed "
            f"{BF16_ROW_TOLERANCE:.2e} of the row; widened columns "
            f"{'zero' if stray[path] == 0.0 else 'NOT zero'}",
        )
        for path in worst
    ]


def check_ids(reports: Sequence[RankReport]) -> list[Verdict]:
    """The router's ids were all usable: a model's own router gives no others."""
    return [
        Verdict(
            "expert ids",
            path,
            not any(report.dropped_ids[path] for report in reports),
            f"{sum(report.dropped_ids[path] for report in reports)} left out as out of range or "
            "repeated",
        )
        for path in reports[0].dropped_ids
    ]


def check_memory(plan: Plan, reports: Sequence[RankReport], expert_bytes: int) -> list[Verdict]:
    """A rank reads its 1/EP of the stored expert bytes, and holds its experts once.

    Args:
        expert_bytes: bytes of all routed experts in the checkpoint.
    """
    share = expert_bytes / plan.ep_size
    read = max(report.expert_bytes_read for report in reports)
    once = all(report.expert_bytes_held == report.expert_bytes_once for report in reports)
    return [
        Verdict(
            "expert bytes",
            "",
            abs(read - share) <= 0.01 * share and once,
            f"read {read:,} B a rank = {read / expert_bytes:.4f} of {expert_bytes:,} B (1/EP = "
            f"{1 / plan.ep_size:.4f}); held {max(r.expert_bytes_held for r in reports):,} B, "
            f"{'each weight once' if once else 'NOT each weight once'}",
        )
    ]


def check_logs(folder: str) -> Verdict:
    """Scan every rank's log for device, vendor and interpreter errors."""
    hits = []
    for name in sorted(glob.glob(os.path.join(folder, "rank-*.log"))):
        with open(name, errors="replace") as file:
            for line in file:
                if _ERROR_PATTERN.search(line):
                    hits.append(f"{os.path.basename(name)}: {line.strip()[:160]}")
    return Verdict("error scan", "", not hits, "; ".join(hits[:3]) or "nothing found")


def check_released(prefix: str, pids: Sequence[int], folder: str = SHARED_MEMORY) -> Verdict:
    """No process of the run lives on and none of its shared memory files is left.

    Args:
        prefix: what the names of the run's files in `folder` begin with.
    """
    names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    problems = [f"process {pid} still runs" for pid in pids if os.path.exists(f"/proc/{pid}")]
    problems += [f"{folder}/{name} left behind" for name in names if name.startswith(prefix)]
    detail = "; ".join(problems) or "all ranks ended by themselves, no shared memory file is left"
    return Verdict("released", "", not problems, detail)
