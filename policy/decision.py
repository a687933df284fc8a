# SPDX-License-Identifier: Apache-2.0
"""The outcome of the policy: one frozen value per model, and one per step derived from it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from xmoe.errors import ConfigError, UnsupportedError
from xmoe.types import Mode, Path

Value = bool | int | float | str | None


@dataclass(frozen=True)
class Check:
    """One rule's outcome.

    `passed` is True, False, or None when there was nothing to compare with (no profile, or a size
    not known yet). Only False rejects. `value`, `limit` and `source` say what was compared and
    where the limit was read; `sentence` is the same for a human.
    """

    code: str
    passed: bool | None
    value: Value
    limit: str
    source: str
    sentence: str


@dataclass(frozen=True)
class StepDecision:
    """What all ranks of the group do in one step.

    `rows_per_rank` is the number of rows every rank brings: the group's maximum, at least 1, so a
    rank without tokens joins with one dummy row. `code` and `sentence` are empty unless the step
    leaves the path of the Decision.
    """

    path: Path
    rows_per_rank: int
    code: str = ""
    sentence: str = ""


@dataclass(frozen=True)
class Decision:
    """Which path a model's MoE layers take, and every check that led there.

    Equal on all ranks when made from merged facts; compare `digest()` to be sure. It is the only
    thing that loading, sizing, padding and launching may consult: none of them decides again.
    """

    path: Path
    mode: Mode
    ep_size: int
    max_tokens_per_rank: int
    profile: str | None
    checks: tuple[Check, ...]

    @property
    def rejections(self) -> tuple[Check, ...]:
        """The failed checks, in order; the first one is the main reason."""
        return tuple(check for check in self.checks if check.passed is False)

    @property
    def reasons(self) -> tuple[str, ...]:
        """The failed checks as "code: sentence"."""
        return tuple(f"{check.code}: {check.sentence}" for check in self.rejections)

    def check(self, code: str) -> Check:
        """The outcome of one rule; KeyError when that rule was not evaluated (mode off)."""
        for candidate in self.checks:
            if candidate.code == code:
                return candidate
        raise KeyError(code)

    def to_json(self) -> str:
        """One line of JSON; equal decisions give equal text."""
        return json.dumps(asdict(self), sort_keys=True)

    def digest(self) -> str:
        """SHA-256 of `to_json()`: ranks with equal digests decided alike, for the same reasons."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def for_step(self, tokens_per_rank: Sequence[int]) -> StepDecision:
        """The path and the row count of one step, from numbers that are equal on every rank.

        Args:
            tokens_per_rank: tokens of each rank of the group, in rank order, 0 for an idle rank.

        A step with more tokens than the capacity runs fused_moe on every rank in mode auto and
        raises UnsupportedError on every rank in mode on. Local. Raises ConfigError for a list that
        cannot be the group's.
        """
        if len(tokens_per_rank) != self.ep_size:
            raise ConfigError(
                f"{len(tokens_per_rank)} token counts for a group of {self.ep_size} ranks; "
                f"allowed: one per rank; gather the counts of the whole group first"
            )
        for rank, tokens in enumerate(tokens_per_rank):
            if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 0:
                raise ConfigError(
                    f"rank {rank} reports {tokens!r} tokens; allowed: 0 or more; "
                    f"report 0 for an idle rank"
                )
        rows = max([1, *tokens_per_rank])
        if self.path is Path.FUSED_MOE or rows <= self.max_tokens_per_rank:
            return StepDecision(self.path, rows)
        rank = tokens_per_rank.index(rows)
        sentence = (
            f"rank {rank} has {rows} tokens in this step; allowed: {self.max_tokens_per_rank} "
            f"per rank; raise max_tokens_per_rank or let the engine split the batch"
        )
        if self.mode is Mode.ON:
            raise UnsupportedError(
                f"mega_moe is demanded (mode on) but {sentence}", (f"step_tokens: {sentence}",)
            )
        return StepDecision(Path.FUSED_MOE, rows, "step_tokens", sentence)
