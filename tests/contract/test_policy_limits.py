# SPDX-License-Identifier: Apache-2.0
"""The policy's limits against the software vendor's own copy of them: either may be wrong."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from xmoe.policy.limits import OneOf, Span
from xmoe.policy.profiles import profile_named, soc_family

HEADER = Path(__file__).parents[2] / "kernels" / "softdev" / "src" / "vendor" / "limits.h"
ROW = re.compile(r'^\s*\{"([^"]+)", "([^"]+)", ([0-9, ]+)\},?$', re.MULTILINE)
POLICY_NAME = {"seed": "seed", "9.1.0": "9.1.0-ga"}


def vendor_rows() -> list[tuple[str, str, tuple[int, ...]]]:
    found = ROW.findall(HEADER.read_text(encoding="utf-8"))
    return [(name, soc, tuple(map(int, numbers.split(",")))) for name, soc, numbers in found]


def test_the_header_was_understood() -> None:
    assert {(name, soc_family(soc)) for name, soc, _ in vendor_rows()} == {
        (name, family) for name in ("seed", "9.1.0") for family in ("A2", "A3")
    }


@pytest.mark.parametrize(
    ("name", "soc", "numbers"), vendor_rows(), ids=lambda value: str(value)[:14]
)
def test_both_copies_say_the_same(name: str, soc: str, numbers: tuple[int, ...]) -> None:
    family = soc_family(soc)
    assert family is not None
    row = profile_named(f"{family.lower()}-{POLICY_NAME[name]}")
    hidden, intermediate, topk, ep = row.hidden, row.intermediate, row.topk, row.ep_size
    assert isinstance(hidden, Span) and isinstance(intermediate, Span)
    assert isinstance(topk, Span) and isinstance(ep, OneOf)
    powers = tuple(2**n for n in range(1, 11) if 2**n <= numbers[-1])  # as the vendor checks it
    assert ep.values == powers
    assert numbers == (
        *(intermediate.low, intermediate.high, intermediate.step),
        *(hidden.low, hidden.high, hidden.step),
        row.tokens_per_rank.high,
        topk.high,
        row.local_experts.high,
        row.num_experts.high,
        max(powers),
    )
