# SPDX-License-Identifier: Apache-2.0
"""What a probe brings back."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

EXPECTED, UNEXPECTED, SKIPPED = "expected", "unexpected", "skipped"


@dataclass(frozen=True)
class Evidence:
    """One observation.

    Attributes:
        probe: P1..P9. subject: operator or setting.
        outcome: "expected" (what the design relies on), "unexpected" or "skipped".
        finding: one sentence. figures: what was measured.
        device: what it was measured on.
    """

    probe: str
    subject: str
    outcome: str
    finding: str
    figures: dict[str, Any] = field(default_factory=dict)
    device: str = ""

    def line(self) -> str:
        """As printed."""
        figures = " ".join(f"{key}={value}" for key, value in self.figures.items())
        tail = f" ({figures})" if figures else ""
        return (
            f"{self.probe} {self.outcome:<10} [{self.device}] {self.subject}: {self.finding}{tail}"
        )

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return dataclasses.asdict(self)


def judge(
    probe: str, subject: str, ok: bool, finding: str, otherwise: str, **figures: Any
) -> Evidence:
    """`finding` when `ok`, else `otherwise`, marked as unexpected."""
    outcome, text = (EXPECTED, finding) if ok else (UNEXPECTED, otherwise)
    return Evidence(probe, subject, outcome, text, figures)
