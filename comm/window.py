# SPDX-License-Identifier: Apache-2.0
"""Checks of the ranks' windows, and the context structure that tells the operator where they are.

Sizes come from `xmoe.layout` alone.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from xmoe.errors import CommError, WindowTooSmall
from xmoe.layout import (
    WindowSpec,
    min_hccl_buffsize_mb,
    required_ccl_buffer_bytes,
    required_window_bytes,
)

MAX_RANKS = 1024
CONTEXT_BYTES = 16400
# Flags and counts in the window are read in lines of this size.
WINDOW_ALIGNMENT_BYTES = 512
_ADDRESS_LIMIT = 1 << 64


@dataclass(frozen=True)
class Span:
    """Where one rank's communication buffer is mapped in this process: both halves, in bytes."""

    rank: int
    address: int
    size_bytes: int


def check_capacity(soc_family: str, spec: WindowSpec, ccl_buffer_bytes: int) -> None:
    """Does a communicator's buffer hold this batch?

    Raises:
        WindowTooSmall: names the need and the smallest setting that satisfies it.
    """
    need = required_ccl_buffer_bytes(soc_family, spec)
    if ccl_buffer_bytes < need:
        smallest = min_hccl_buffsize_mb(soc_family, spec)
        raise WindowTooSmall(
            f"the communicator's buffer of {ccl_buffer_bytes} bytes cannot hold "
            f"{spec.tokens_per_rank} tokens per rank (hidden={spec.hidden}, topk={spec.topk}, "
            f"ep_size={spec.ep_size}); allowed: {need} bytes or more; next: set "
            f"HCCL_BUFFSIZE={smallest} or ccl_buffer_mb={smallest} (MiB of one half), or lower "
            "max_tokens_per_rank"
        )


def check_spans(soc_family: str, spec: WindowSpec, own_rank: int, spans: Sequence[Span]) -> None:
    """Check every rank's span: present, aligned, in bounds, large enough, apart from the others.

    A remote span may be larger than the own one (a vendor adds its own area), never smaller.

    Raises:
        WindowTooSmall or CommError.
    """
    own = spans[own_rank]
    check_capacity(soc_family, spec, own.size_bytes)
    window_bytes = required_window_bytes(soc_family, spec)
    if own.size_bytes % 2 or own.size_bytes // 2 < window_bytes:
        raise _bad(own, f"two equal halves of at least {window_bytes} bytes")
    for span in spans:
        if span.address == 0:
            raise _bad(span, "an address other than null")
        if span.address % WINDOW_ALIGNMENT_BYTES:
            raise _bad(span, f"an address that is a multiple of {WINDOW_ALIGNMENT_BYTES}")
        if span.address + span.size_bytes > _ADDRESS_LIMIT:
            raise _bad(span, "an end within 64 bits")
        if span.size_bytes < own.size_bytes:
            raise _bad(span, f"at least the {own.size_bytes} bytes of rank {own_rank}")
    # The payload is what this rank will address at a peer; a larger span's rest may be shared.
    ordered = sorted(spans, key=lambda span: span.address)
    for first, second in zip(ordered, ordered[1:], strict=False):
        if first.address + own.size_bytes > second.address:
            raise _bad(second, f"memory apart from rank {first.rank}'s at {first.address:#x}")


def _bad(span: Span, allowed: str) -> CommError:
    return CommError(
        f"window of rank {span.rank}: address {span.address:#x}, {span.size_bytes} bytes; allowed: "
        f"{allowed}; next: give every rank the same HCCL_BUFFSIZE and the same CANN, run xmoe "
        "doctor"
    )


def context_bytes(rank: int, kfc_context: int, spans: Sequence[Span]) -> bytes:
    """The operator's context structure.

    u32 rank; u32 ranks per server (0: not used on A2/A3); u64 KFC context; u64[1024] buffers;
    u64[1024] channel handles (0). Kernels of 9.1.0 read a prefix of it.

    Source: ops-transformer 9.1.0 mc2_moe_context, master of 2026-07-21 for the second array.
    """
    buffers = [0] * MAX_RANKS
    for span in spans:
        buffers[span.rank] = span.address
    packed = struct.pack("<IIQ1024Q1024Q", rank, 0, kfc_context, *buffers, *([0] * MAX_RANKS))
    assert len(packed) == CONTEXT_BYTES
    return packed
