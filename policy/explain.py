# SPDX-License-Identifier: Apache-2.0
"""A decision as lines of text, for logs and for readers without a terminal."""

from __future__ import annotations

from xmoe.policy.decision import Check, Decision
from xmoe.types import Mode, Path

_WORDS = {True: "pass", False: "FAIL", None: "-"}


def outcome(check: Check) -> str:
    """pass, FAIL, or - when there was nothing to compare with."""
    return _WORDS[check.passed]


def headline(decision: Decision) -> str:
    """One line: the path, and the main reason when it is not mega_moe."""
    requested = f"mode {decision.mode.value}, EP{decision.ep_size}"
    if decision.path is Path.MEGA_MOE:
        return f"{requested}: mega_moe (limits {decision.profile})"
    main = decision.rejections[0]
    more = len(decision.rejections) - 1
    tail = f" (and {more} more)" if more else ""
    if decision.mode is Mode.ON:
        return f"{requested}: rejected, {main.code}: {main.sentence}{tail}"
    return f"{requested}: fused_moe, {main.code}: {main.sentence}{tail}"


def lines(decision: Decision) -> list[str]:
    """The headline and one line per check, with value, limit and source."""
    text = [headline(decision)]
    for check in decision.checks:
        value = "-" if check.value is None else str(check.value)
        source = f" [{check.source}]" if check.source != "-" else ""
        text.append(f"{outcome(check):4} {check.code}: {value}; limit {check.limit}{source}")
    return text
