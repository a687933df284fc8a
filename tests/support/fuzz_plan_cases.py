# SPDX-License-Identifier: Apache-2.0
"""What the fuzz of the compiled launch plan draws, as plain values: how a plan is made, and what is
then done with it. Carried out by `support.fuzz_plan_target`.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from support.fuzz_draws import DIMS, INT64, JUNK, TENSOR_DTYPES, TENSOR_FORMATS, WIDE
from xmoe.kernels.acl.plan import STEP_TENSORS
from xmoe.kernels.acl.variants import VARIANTS

Spec = tuple[Any, ...]


@dataclass(frozen=True)
class PlanCase:
    """One plan and its use.

    sizes: (tokens, K, H, I, experts) of the accepted step. changes: (what, what it becomes) of the
    plan's making. uses: what is done with the plan, in order.
    """

    target: str
    variant: str
    sizes: tuple[int, int, int, int, int]
    changes: tuple[tuple[str, Spec], ...]
    uses: tuple[Spec, ...]


WORKSPACES = (
    *("good", "good", "good", "none", "null", "short", "odd", "unmapped", "text", "huge"),
    *("negative", "raises", "steps", "closes", "rebinds", "rebuilds", "stops"),
    *("late text", "late huge", "late negative", "late odd", "late unmapped"),
)
"""What the step finds as workspace. From "raises" on: what it does when it is asked to grow."""

NUMBERS, ADDRESSES = ("tokens", "topk"), (*STEP_TENSORS, "stream")
POINTERS: st.SearchStrategy[Any] = st.one_of(
    st.sampled_from(["null", "odd", "unmapped", "device", "behind device", "last page"]), INT64
)
SPECS: dict[str, st.SearchStrategy[Spec]] = {
    **dict.fromkeys(NUMBERS, st.tuples(st.just("is"), st.one_of(DIMS, WIDE, JUNK))),
    **dict.fromkeys(
        ADDRESSES,
        st.one_of(
            st.tuples(st.just("pointer"), POINTERS),
            st.tuples(st.just("is"), st.one_of(WIDE, JUNK)),
            st.tuples(
                st.just("beside"),
                st.sampled_from(STEP_TENSORS),
                st.sampled_from([0, 32, -32, 64, 1024, 2048, -2048, 4096, 1 << 16]),
            ),
        ),
    ),
}


@st.composite
def steps(draw: st.DrawFn) -> Spec:
    """ "step", the arguments that differ from the right ones, and the workspace."""
    names = draw(st.lists(st.sampled_from(sorted(SPECS)), max_size=2, unique=True))
    changed = tuple((name, draw(SPECS[name])) for name in names)
    return ("step", changed, draw(st.sampled_from(WORKSPACES)))


def packed() -> st.SearchStrategy[Spec]:
    """ "packed" and the fields that differ."""
    sizes = st.lists(DIMS, max_size=10).map(tuple)
    pool: dict[str, st.SearchStrategy[Any]] = {
        "address": st.one_of(POINTERS, JUNK),
        "shape": st.one_of(sizes, JUNK),
        "dtype": st.one_of(TENSOR_DTYPES, JUNK),
        "count": st.one_of(st.sampled_from([0, 1, 2, 4096, 4097, -1]), WIDE, JUNK),
        "is_list": st.booleans(),
        "step_bytes": st.one_of(DIMS, WIDE, JUNK),
        "format": st.one_of(TENSOR_FORMATS, JUNK),
        "storage": st.one_of(sizes, JUNK),
    }

    @st.composite
    def draw_fields(draw: st.DrawFn) -> Spec:
        names = draw(st.lists(st.sampled_from(sorted(pool)), min_size=1, max_size=2, unique=True))
        return ("packed", tuple((name, draw(pool[name])) for name in names))

    return draw_fields()


USES: st.SearchStrategy[Spec] = st.one_of(
    steps(),
    steps(),
    steps(),
    st.tuples(st.just("shapes"), st.sampled_from([2, 15, 16, 17, 33])),
    st.tuples(
        st.just("rebind"),
        st.one_of(st.sampled_from(["weight1", "weight2", "context", "x", "commAlg"]), JUNK),
        st.one_of(st.tuples(st.just("pointer"), POINTERS), st.tuples(st.just("is"), WIDE | JUNK)),
    ),
    st.sampled_from([("rebuild",), ("close",), ("look",), ("race", 2), ("race", 3)]),
)


@st.composite
def plan_families(draw: st.DrawFn, variant: str) -> tuple[PlanCase, ...]:
    """Cases that share what was drawn, as `support.fuzz_cases.families`: each change of the making
    alone and in pairs, the same use after each."""
    sizes = (
        draw(st.sampled_from([1, 2, 3, 16])),
        draw(st.sampled_from([1, 2, 3])),
        draw(st.sampled_from([1024, 1024, 1536])),
        draw(st.sampled_from([512, 512, 1024])),
        draw(st.sampled_from([1, 2, 3])),
    )
    uses = tuple(draw(st.lists(USES, min_size=1, max_size=4)))
    reuse = draw(st.booleans())
    basis: tuple[tuple[str, Spec], ...] = (("reuse_executor", ("is", True)),) if reuse else ()
    params = {p.key: p.kind for p in VARIANTS[variant].params if p.kind not in ("W", "X")}
    changes: list[tuple[str, Spec]] = []
    # Half of all plans are made as they should be, or nothing would be done with them.
    for _ in range(draw(st.sampled_from([0, 0, 1, 2, 3]))):
        key = draw(st.sampled_from(sorted([*params, "hidden", "local_experts", "W", "weight"])))
        if key in ("hidden", "local_experts"):
            changes.append((key, ("is", draw(st.one_of(DIMS, WIDE, JUNK)))))
        elif params.get(key) in ("T", "L") and key not in STEP_TENSORS and draw(st.integers(0, 3)):
            changes.append((key, draw(packed())))
        elif draw(st.integers(0, 5)) == 0:
            changes.append((key, ("missing",)))
        else:
            changes.append((key, ("is", draw(JUNK))))
    subsets: list[tuple[tuple[str, Spec], ...]] = [(one,) for one in changes]
    subsets += [pair for pair in itertools.combinations(changes, 2) if pair[0][0] != pair[1][0]]
    whole = [PlanCase("plan", variant, sizes, (*basis, *some), uses) for some in subsets or [()]]
    # And each use alone.
    whole += [PlanCase("plan", variant, sizes, basis, (one,)) for one in uses if len(uses) > 1]
    return tuple(whole)
