# SPDX-License-Identifier: Apache-2.0
"""The two forms a limit takes. Each carries the source its numbers were read from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Span:
    """Whole numbers from `low` to `high` (None: no upper bound stated), multiples of `step`."""

    low: int
    high: int | None
    step: int
    source: str

    def accepts(self, value: object) -> bool:
        """True when `value` lies in the span."""
        if isinstance(value, bool) or not isinstance(value, int):
            return False
        if value < self.low or (self.high is not None and value > self.high):
            return False
        return value % self.step == 0

    def __str__(self) -> str:
        text = f"{self.low} or more" if self.high is None else f"{self.low}..{self.high}"
        return text if self.step == 1 else f"{text}, multiple of {self.step}"


@dataclass(frozen=True)
class OneOf:
    """A fixed list of values."""

    values: tuple[int | str, ...]
    source: str

    def accepts(self, value: object) -> bool:
        """True when `value` is listed."""
        return not isinstance(value, bool) and value in self.values

    def __str__(self) -> str:
        return ", ".join(str(value) for value in self.values)


Limit = Span | OneOf
