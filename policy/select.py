# SPDX-License-Identifier: Apache-2.0
"""From facts and shape to one decision. Pure: no torch, no environment, no device."""

from __future__ import annotations

from xmoe.errors import ConfigError, UnsupportedError
from xmoe.policy.decision import Check, Decision
from xmoe.policy.facts import Facts
from xmoe.policy.profiles import profile_for, profile_named
from xmoe.policy.rules import Case, evaluate
from xmoe.types import Mode, MoeShape, Path


def assess(mode: Mode, facts: Facts, shape: MoeShape, profile: str | None = None) -> Decision:
    """Every check and the path that follows, without raising for a rejection.

    With mode on and a rejection the path reads fused_moe, but `select` would raise: this function
    is for showing, `select` is for deciding.
    """
    pinned = profile is not None
    row = profile_named(profile) if profile is not None else None
    if row is None:
        row = profile_for(facts.soc, facts.vendor_version)
    checks = evaluate(Case(mode, facts, shape, row, pinned))
    accepted = all(check.passed is not False for check in checks)
    return Decision(
        path=Path.MEGA_MOE if accepted else Path.FUSED_MOE,
        mode=mode,
        ep_size=facts.ep_size,
        max_tokens_per_rank=facts.max_tokens_per_rank,
        profile=row.name if row is not None else None,
        checks=checks,
    )


def switched_off(ep_size: int, max_tokens_per_rank: int) -> Decision:
    """The decision of mode off: nothing about devices or libraries is looked at."""
    sentence = "mega_moe is switched off (mode off); set mode auto or on to use it"
    check = Check("mode", False, Mode.OFF.value, "auto, on", "xmoe, this release", sentence)
    return Decision(
        path=Path.FUSED_MOE,
        mode=Mode.OFF,
        ep_size=ep_size,
        max_tokens_per_rank=max_tokens_per_rank,
        profile=None,
        checks=(check,),
    )


def select(mode: Mode | str, facts: Facts, shape: MoeShape, profile: str | None = None) -> Decision:
    """Decide once, for all MoE layers of a model, before anything is allocated or launched.

    Args:
        mode: off, auto or on.
        facts: merged over the group (`merge_facts`), so that every rank decides alike.
        shape: the model's MoE layers.
        profile: name of a limit profile, or None to choose one by SoC and operator version.

    Mode off returns fused_moe and looks at no device fact. Auto returns mega_moe, or fused_moe with
    the reasons. On returns mega_moe, or raises UnsupportedError with all rejections. Local; a pure
    function, so equal arguments raise or return the same on every rank.
    """
    try:
        mode = Mode(mode)
    except ValueError:
        raise ConfigError(
            f"mode={mode!r} is not acceptable; allowed: {', '.join(Mode)}; correct it"
        ) from None
    if mode is Mode.OFF:
        return switched_off(facts.ep_size, facts.max_tokens_per_rank)
    decision = assess(mode, facts, shape, profile)
    if mode is Mode.ON and decision.rejections:
        raise UnsupportedError(demand_message(decision), decision.reasons)
    return decision


def demand_message(decision: Decision) -> str:
    """What mode on says when it cannot be honoured."""
    reasons = decision.reasons
    count = "1 check rejects" if len(reasons) == 1 else f"{len(reasons)} checks reject"
    return (
        f"mega_moe is demanded (mode on) but {count} it: "
        + " | ".join(reasons)
        + "; correct these, or set mode auto to run fused_moe instead"
    )
