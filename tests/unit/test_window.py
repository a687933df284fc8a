# SPDX-License-Identifier: Apache-2.0
"""Window checks and the context structure."""

from __future__ import annotations

import struct

import pytest

from xmoe.comm.window import CONTEXT_BYTES, Span, check_capacity, check_spans, context_bytes
from xmoe.errors import CommError, WindowTooSmall
from xmoe.layout import MIB, WindowSpec, min_hccl_buffsize_mb, required_ccl_buffer_bytes

SPEC = WindowSpec(tokens_per_rank=32, hidden=2048, topk=8, ep_size=4, local_experts=4)
NEED = required_ccl_buffer_bytes("A3", SPEC)
BASE = 1 << 40
STEP = 1 << 32


def spans(size=NEED, **changes):
    made = [Span(rank, BASE + rank * STEP, size) for rank in range(4)]
    for rank, span in changes.items():
        made[int(rank[1:])] = span
    return made


def test_exact_need_is_enough_and_one_byte_less_is_not():
    check_capacity("A3", SPEC, NEED)
    check_spans("A3", SPEC, 1, spans())
    with pytest.raises(WindowTooSmall) as caught:
        check_capacity("A3", SPEC, NEED - 1)
    smallest = min_hccl_buffsize_mb("A3", SPEC)
    assert str(NEED) in str(caught.value) and f"HCCL_BUFFSIZE={smallest}" in str(caught.value)
    check_capacity("A3", SPEC, 2 * smallest * MIB)
    with pytest.raises(WindowTooSmall):
        check_capacity("A3", SPEC, 2 * (smallest - 1) * MIB)


def test_remote_spans_may_be_larger():
    check_spans("A3", SPEC, 0, spans(r2=Span(2, BASE + 2 * STEP, NEED + MIB)))


@pytest.mark.parametrize(
    "span,words",
    [
        (Span(2, 0, NEED), "other than null"),
        (Span(2, BASE + 2 * STEP + 256, NEED), "multiple of 512"),
        (Span(2, (1 << 64) - 512, NEED), "within 64 bits"),
        (Span(2, BASE + 2 * STEP, NEED - 2), "at least the"),
        (Span(2, BASE + STEP + 512, NEED), "apart from rank 1"),
        (Span(2, BASE, NEED), "apart from rank"),
    ],
)
def test_bad_spans_name_the_rank(span, words):
    with pytest.raises(CommError, match=words) as caught:
        check_spans("A3", SPEC, 0, spans(r2=span))
    assert "rank 2" in str(caught.value)


def test_an_odd_size_has_no_two_halves():
    with pytest.raises(CommError, match="two equal halves"):
        check_spans("A3", SPEC, 0, spans(size=NEED + 1))


def test_context_structure():
    packed = context_bytes(1, 0x1234567890, spans())
    assert len(packed) == CONTEXT_BYTES == 4 * 4100
    assert struct.unpack_from("<IIQ", packed) == (1, 0, 0x1234567890)
    buffers = struct.unpack_from("<1024Q", packed, 16)
    assert list(buffers[:5]) == [span.address for span in spans()] + [0]
    assert set(struct.unpack_from("<1024Q", packed, 16 + 8192)) == {0}
