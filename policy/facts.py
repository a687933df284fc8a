# SPDX-License-Identifier: Apache-2.0
"""What was found out about the devices and the group, before anything is decided."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from xmoe.errors import ConfigError
from xmoe.policy.profiles import soc_family


@dataclass(frozen=True)
class Facts:
    """Facts of one rank, or of a whole group after `merge_facts`. JSON-able; None means not known.

    library_problem, comm_problem  None when fine, else "code: text" or "[code] text"
    max_tokens_per_rank            the capacity asked for, per rank
    ccl_buffer_bytes               both halves of the communicator's buffer
    callable_variants              ABI variants this installation can call
    runtime_quants                 weight formats this installation's operator wrapper can pass on
    weight_bytes, weight_budget_bytes   routed expert weights of all layers, and the room for them
    config_digest                  XmoeConfig.digest(); ranks with different settings disagree
    assumed                        names of facts that were assumed, not found out
    disagreements                  filled by merge_facts: one sentence per fact that ranks differ in
    """

    soc: str | None
    cann_version: str | None
    vendor_version: str | None
    abi_variant: str | None
    ep_size: int
    max_tokens_per_rank: int
    moe_tp_size: int = 1
    graph_mode: bool = False
    library_problem: str | None = None
    comm_problem: str | None = None
    ccl_buffer_bytes: int | None = None
    callable_variants: tuple[str, ...] = ("B",)
    runtime_quants: tuple[str, ...] = ("none",)
    weight_bytes: int | None = None
    weight_budget_bytes: int | None = None
    config_digest: str = ""
    assumed: tuple[str, ...] = ()
    disagreements: tuple[str, ...] = ()

    def to_json(self) -> str:
        """One line of JSON; equal facts give equal text."""
        return json.dumps(asdict(self), sort_keys=True)


# Facts that must be equal: they are baked into the launch or into what the group agreed on.
_EQUAL = (
    "cann_version",
    "vendor_version",
    "abi_variant",
    "ep_size",
    "max_tokens_per_rank",
    "moe_tp_size",
    "graph_mode",
    "config_digest",
)


def merge_facts(all_facts: Sequence[Facts]) -> Facts:
    """The facts of a group, from those of its ranks in rank order.

    Sizes become the minimum, lists the intersection, problems the first with its rank; facts that
    must be equal and are not become named disagreements. Equal input gives an equal result.
    """
    if not all_facts:
        raise ConfigError("merge_facts got no facts; allowed: those of every rank; pass them all")
    first = all_facts[0]
    disagreements = [text for rank_facts in all_facts for text in rank_facts.disagreements]
    families = [soc_family(rank_facts.soc) or rank_facts.soc for rank_facts in all_facts]
    for name, values in [("soc", families)] + [(n, _column(all_facts, n)) for n in _EQUAL]:
        odd = next((rank for rank, value in enumerate(values) if value != values[0]), None)
        if odd is not None:
            disagreements.append(
                f"{name} differs: rank 0 has {values[0]!r}, rank {odd} has {values[odd]!r}"
            )
    if len(all_facts) not in (1, first.ep_size):
        disagreements.append(f"ep_size is {first.ep_size} but {len(all_facts)} ranks answered")
    return replace(
        first,
        library_problem=_problem(all_facts, "library_problem"),
        comm_problem=_problem(all_facts, "comm_problem"),
        ccl_buffer_bytes=_smallest(all_facts, "ccl_buffer_bytes"),
        weight_budget_bytes=_smallest(all_facts, "weight_budget_bytes"),
        weight_bytes=max((f.weight_bytes for f in all_facts if f.weight_bytes), default=None),
        callable_variants=_common(all_facts, "callable_variants"),
        runtime_quants=_common(all_facts, "runtime_quants"),
        assumed=tuple(sorted({name for rank_facts in all_facts for name in rank_facts.assumed})),
        disagreements=tuple(dict.fromkeys(disagreements)),
    )


def _column(all_facts: Sequence[Facts], name: str) -> list[Any]:
    return [getattr(rank_facts, name) for rank_facts in all_facts]


def _problem(all_facts: Sequence[Facts], name: str) -> str | None:
    """The first rank's problem, its code kept in front; how many ranks share the fate is added."""
    found = [(rank, text) for rank, text in enumerate(_column(all_facts, name)) if text is not None]
    if not found or len(all_facts) == 1:
        return found[0][1] if found else None
    rank, text = found[0]
    more = f" (and {len(found) - 1} more ranks)" if len(found) > 1 else ""
    return f"{problem_code(text)}: rank {rank}: {problem_text(text)}{more}"


def _smallest(all_facts: Sequence[Facts], name: str) -> int | None:
    # One rank that does not know its size makes the group's smallest unknown.
    values = _column(all_facts, name)
    return None if any(value is None for value in values) else min(values)


def _common(all_facts: Sequence[Facts], name: str) -> tuple[str, ...]:
    columns = _column(all_facts, name)
    return tuple(value for value in columns[0] if all(value in column for column in columns))


def _split_problem(problem: str) -> tuple[str, str]:
    # The library layer writes "[code] text", everybody else "code: text".
    match = re.fullmatch(r"(?:\[(\w+)\]|(\w+):)\s*(.*)", problem, re.DOTALL)
    return (match[1] or match[2], match[3]) if match else ("problem", problem)


def problem_code(problem: str) -> str:
    """The code of a problem text; "problem" when it has none."""
    return _split_problem(problem)[0]


def problem_text(problem: str) -> str:
    """A problem text without its code."""
    return _split_problem(problem)[1]
