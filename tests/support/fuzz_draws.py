# SPDX-License-Identifier: Apache-2.0
"""Numbers, texts and other values that the fuzz draws in place of the right ones."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from xmoe.kernels.acl.dtypes import DTYPES, FORMATS

# Values at which something changes: limits of the operator, of the C types, of alignment.
EDGES = (
    *(0, 1, 2, 3, 4, 7, 8, 15, 16, 17, 27, 28, 31, 32, 33, 64, 127, 128, 129, 512, 1023, 1024),
    *(1025, 1536, 4095, 4096, 4097, 6144, 8192, 8704, 1 << 20, (1 << 31) - 1, 1 << 31, 1 << 32),
    *((1 << 40) + 1, (1 << 56) - 1, 1 << 56, 1 << 62, (1 << 63) - 1),
)
INT64 = st.one_of(
    st.sampled_from([*EDGES, *(-v for v in EDGES if v), -(1 << 63)]),
    st.integers(-(1 << 63), (1 << 63) - 1),
)
WIDE = st.one_of(INT64, st.sampled_from([1 << 63, 1 << 64, -(1 << 63) - 1, 10**30]))
FLOATS = st.one_of(
    st.floats(), st.sampled_from([0.0, -0.0, 1e39, -1e39, 3.4028234663852886e38, 1e-46])
)
JUNK: st.SearchStrategy[Any] = st.one_of(
    st.none(), st.booleans(), WIDE, FLOATS, st.text(max_size=6), st.binary(max_size=6),
    st.lists(st.one_of(WIDE, FLOATS, st.text(max_size=3), st.none()), max_size=3),
    st.sampled_from([(), (1.0,), (float("nan"),), ("7",), {}, {"x": 1}, 1j, "\ud800", "a\0b"]),
)  # fmt: skip
TEXTS = st.one_of(
    st.sampled_from(
        ["", "swiglu", "gelu", "SWIGLU", "swiglu ", "fullmesh", "%s%n%p", "é", "x" * 3000]
    ),
    st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), max_size=40),
)  # fmt: skip
DIMS = st.one_of(st.sampled_from([0, 1, 2, 3, 4, 16, 512, 1024, 2048]), INT64)
TENSOR_DTYPES = st.sampled_from([*DTYPES.values(), -1, 28, 99, 1 << 31])
TENSOR_FORMATS = st.sampled_from([*FORMATS.values(), -1, 12, 77])
