# SPDX-License-Identifier: Apache-2.0
"""Facts and shapes that every check accepts, for tests to spoil one at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from xmoe.policy.facts import Facts
from xmoe.types import MoeShape

A3 = "Ascend910_9391"
MIB = 1 << 20

GOOD_FACTS = Facts(
    soc=A3,
    cann_version="9.1.0",
    vendor_version="9.1.0",
    abi_variant="B",
    ep_size=8,
    max_tokens_per_rank=512,
    ccl_buffer_bytes=400 * MIB,
)
# The released shapes. Qwen3.5-122B-A10B is left out: no source for its sizes could be opened.
QWEN_35B = MoeShape(hidden=2048, intermediate=512, num_experts=256, topk=8)
QWEN_397B = MoeShape(hidden=4096, intermediate=1024, num_experts=512, topk=10)


def facts(**changes: Any) -> Facts:
    """Good facts with some changed."""
    return replace(GOOD_FACTS, **changes)


def shape(hidden: int, intermediate: int, num_experts: int, topk: int, **changes: Any) -> MoeShape:
    """A bf16 shape."""
    return MoeShape(hidden, intermediate, num_experts, topk, **changes)
