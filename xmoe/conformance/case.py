# SPDX-License-Identifier: Apache-2.0
"""A case of the conformance list, and what may become of it."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any


class Verdict(str, enum.Enum):
    """What became of a case. `SKIP` always has a reason."""

    PASS = "pass"
    FAIL = "fail"
    SKIP = "skip"


class Deviation(Exception):
    """The device does something else; the text is the evidence."""


class NotHere(Exception):
    """The case cannot be tried on this device; the text is the missing fact."""


@dataclass(frozen=True)
class Case:
    """One semantic.

    meaning: what is assumed, as a sentence. relies: who in the product relies on it. ranks: False
    for a case of one process, True for one of the whole group. harmful: it makes the device report
    an error, after which a real device may need a restart of the process, so it runs last and in a
    process of its own. `fn` gets a Session or a GroupSession, returns the evidence, or raises
    Deviation or NotHere.
    """

    name: str
    meaning: str
    relies: str
    fn: Callable[[Any], str]
    ranks: bool = False
    harmful: bool = False


@dataclass(frozen=True)
class Result:
    """A case's outcome on one device."""

    name: str
    device: str
    verdict: Verdict
    evidence: str
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "verdict": self.verdict.value, "seconds": round(self.seconds, 4)}


CASES: list[Case] = []
"""All cases, in order; filled when the cases_* modules are imported."""


def case(
    name: str, meaning: str, relies: str, *, ranks: bool = False, harmful: bool = False
) -> Callable[[Callable[[Any], str]], Callable[[Any], str]]:
    """Register the function below as a case."""

    def register(fn: Callable[[Any], str]) -> Callable[[Any], str]:
        add(Case(name, meaning, relies, fn, ranks, harmful))
        return fn

    return register


def add(one: Case) -> None:
    """Register a case. Names are unique."""
    assert all(one.name != known.name for known in CASES), one.name
    CASES.append(one)


def require(holds: bool, evidence: str) -> None:
    """Raise Deviation with the evidence unless it holds."""
    if not holds:
        raise Deviation(evidence)


def all_cases() -> tuple[Case, ...]:
    """Every case, harmful ones last."""
    import importlib

    for name in ("streams", "events", "memory", "refusals", "group", "mega_moe", "cam"):
        importlib.import_module(f"xmoe.conformance.cases_{name}")
    return tuple(sorted(CASES, key=lambda one: (one.harmful, one.ranks)))
