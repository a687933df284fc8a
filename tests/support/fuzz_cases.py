# SPDX-License-Identifier: Apache-2.0
"""What the fuzz of the two-phase call draws: argument sets as plain values, printed by `repr`.

A set is a small accepted call with some arguments replaced. Near misses matter most, since pure
noise is refused by the first check. The same set is given to the contract layer
(`support.fuzz_contract_target`) and to the vendor's C functions (`support.fuzz_vendor_target`).
What the launch plan gets is in `support.fuzz_plan_cases`.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from support.fuzz_draws import (
    DIMS,
    FLOATS,
    INT64,
    JUNK,
    TENSOR_DTYPES,
    TENSOR_FORMATS,
    TEXTS,
    WIDE,
)
from support.fuzz_plan_cases import PlanCase, plan_families
from xmoe.kernels.acl.variants import VARIANTS

TARGETS = ("contract", "vendor", "plan")


@dataclass(frozen=True)
class Case:
    """One argument set.

    sizes: (bs, K, H, I, experts) of the accepted call. changes: (parameter key, what it becomes).
    then: what is done when phase one accepts.
    """

    target: str
    variant: str
    sizes: tuple[int, int, int, int, int]
    changes: tuple[tuple[str, tuple[Any, ...]], ...]
    then: str


@st.composite
def tensor_fields(draw: st.DrawFn) -> tuple[Any, ...]:
    """ "tensor" and the fields that differ from the right tensor's."""
    pool: dict[str, st.SearchStrategy[Any]] = {
        "shape": st.lists(DIMS, max_size=10),
        "strides": st.one_of(st.none(), st.lists(DIMS, max_size=9)),
        "dtype": TENSOR_DTYPES,
        "format": TENSOR_FORMATS,
        "storage": st.one_of(st.none(), st.lists(DIMS, max_size=9)),
        "offset": DIMS,
        "ptr": st.one_of(
            st.sampled_from(["null", "odd", "unmapped", "device", "behind device"]), INT64
        ),
        "first": DIMS,
        "last": DIMS,
        "rank": st.sampled_from([-1, 1]),
    }
    names = draw(st.lists(st.sampled_from(sorted(pool)), min_size=1, max_size=2, unique=True))
    return ("tensor", tuple((name, draw(pool[name])) for name in names))


TENSORS: st.SearchStrategy[tuple[Any, ...]] = st.one_of(
    tensor_fields(),
    st.sampled_from([("null",), ("dead",), ("list",), ("same as x",), ("right",)]),
    st.tuples(st.just("handle"), INT64),
)
LISTS: st.SearchStrategy[tuple[Any, ...]] = st.one_of(
    st.tuples(st.just("list of"), st.lists(TENSORS, max_size=3)),
    st.sampled_from([("null",), ("dead",), ("tensor as list",), ("longer",), ("right",)]),
    st.tuples(st.just("handle"), INT64),
)
BY_KIND: dict[str, st.SearchStrategy[tuple[Any, ...]]] = {
    "T": TENSORS,
    "O": TENSORS,
    "L": LISTS,
    "i64": st.tuples(st.just("int"), st.one_of(INT64, st.integers(-2, 40))),
    "S": st.one_of(st.just(("null",)), st.tuples(st.just("text"), TEXTS)),
    "F": st.tuples(st.just("float"), FLOATS),
    "FA": st.one_of(
        st.sampled_from([("null",), ("dead",)]),
        st.tuples(st.just("floats"), st.lists(FLOATS, max_size=3)),
        st.tuples(st.just("handle"), INT64),
    ),
}
OUTPUTS: st.SearchStrategy[tuple[Any, ...]] = st.one_of(
    st.just(("null",)), st.tuples(st.just("dirty"), INT64)
)
# Calls beside phase one, each with arguments of its own.
OTHER: dict[str, st.SearchStrategy[Any]] = {
    "tensor": tensor_fields(),
    "tensors": LISTS,
    "arrays": st.tuples(st.sampled_from(["Int", "Float", "Bool", "none"]), st.integers(0, 1 << 33)),
    "destroy": st.tuples(st.integers(0, 7), st.sampled_from(["null", "garbage", "other"]), INT64),
    "read": st.tuples(st.integers(0, 4), st.sampled_from(["null", "garbage", "other"]), INT64),
    "stream": st.tuples(st.integers(0, 7), INT64, INT64),
    "memory": st.tuples(st.integers(0, 3), WIDE, WIDE),
    "launch": st.tuples(st.sampled_from(["null", "garbage", "used", "destroyed"]), INT64, INT64),
}

# Of these the contract layer has: the others are C functions it doesn't offer with free arguments.
OF_CONTRACT = ("memory", "stream", "tensor", "tensors")


def families(
    target: str, variant: str
) -> st.SearchStrategy[tuple[Case, ...]] | st.SearchStrategy[tuple[PlanCase, ...]]:
    """Argument sets that share what was drawn, for one target."""
    return plan_families(variant) if target == "plan" else call_families(target, variant)


@st.composite
def call_families(draw: st.DrawFn, target: str, variant: str) -> tuple[Case, ...]:
    """Argument sets that share what was drawn: each replaced argument alone, and in pairs.

    Drawing is the dear part by far, and two faults in one call show the order of the checks.
    """
    small = (1, 1, 1024, 512, 1)
    if draw(st.integers(0, 7)) == 0:
        having = OF_CONTRACT if target == "contract" else tuple(sorted(OTHER))
        names = draw(st.lists(st.sampled_from(having), min_size=1, max_size=4))
        return tuple(
            Case(target, variant, small, ((f"call {name}", draw(OTHER[name])),), "")
            for name in names
        )
    params = {p.key: p.kind for p in VARIANTS[variant].params}
    kinds = {**params, "workspaceSize": "out", "executor": "out"}
    sizes = (
        draw(st.sampled_from([1, 2, 3, 16])),
        draw(st.sampled_from([1, 2, 3])),
        draw(st.sampled_from([1024, 1024, 1536])),
        draw(st.sampled_from([512, 512, 1024])),
        draw(st.sampled_from([1, 2, 3])),
    )
    changes: list[tuple[str, tuple[Any, ...]]] = []
    for _ in range(draw(st.integers(0, 5))):
        key = draw(st.sampled_from(sorted(kinds)))
        if target == "contract" and draw(st.integers(0, 5)) == 0:
            key = draw(st.sampled_from([*sorted(params), "X", "weight", "topoType", "scales"]))
            changes.append((key, ("junk", draw(JUNK))))
        elif kinds[key] in ("out", "W", "X"):
            changes.append((key, draw(OUTPUTS)))
        else:
            changes.append((key, draw(BY_KIND[kinds[key]])))
    then = draw(st.sampled_from(["destroy", "launch", "launch", "workspace", "stream", "twice"]))
    subsets = [(one,) for one in changes]
    subsets += [pair for pair in itertools.combinations(changes, 2) if pair[0][0] != pair[1][0]]
    chosen = subsets or [()]
    return tuple(Case(target, variant, sizes, subset, then) for subset in chosen)
