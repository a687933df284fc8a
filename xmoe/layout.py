# SPDX-License-Identifier: Apache-2.0
"""Size and offsets of MegaMoe's communication window. Pure arithmetic on per-rank numbers.

The communicator's buffer has two halves of equal size (winIn, winOut); HCCL_BUFFSIZE gives the size
of one half in MiB. The operator compares the size of one half with what the batch needs.

One list of regions (`_regions_a3`) yields both the size and the offsets, so they cannot disagree.

Every token count here is *per rank*; a group-wide count must be divided by the caller.

Source: ops-transformer 9.1.0, mc2/mega_moe, arch22 tiling CalcLeastCclBufferSize and PeermemInfo of
the A3 kernel; A5: torch extension csrc/mega_moe.cpp (2026-07-21).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from xmoe.errors import ConfigError
from xmoe.types import MoeShape

MIB = 1 << 20
HALVES = 2
BF16_BYTES = 2
RESERVED_BYTES = 10 * MIB  # exception dump at the start of the window
MAX_LOCAL_EXPERTS = 128  # the count matrix is sized for this many, whatever the model has
FLAG_BYTES_PER_RANK = 512
FAMILIES = ("A2", "A3", "A5")


@dataclass(frozen=True)
class WindowSpec:
    """What the size of a window depends on.

    `flag_min_bytes` is the smallest flag area of the operator build: 0 in 9.1.0, 512 KiB later.
    """

    tokens_per_rank: int
    hidden: int
    topk: int
    ep_size: int
    local_experts: int
    quantised: bool = False
    flag_min_bytes: int = 0

    def __post_init__(self) -> None:
        for name in ("tokens_per_rank", "hidden", "topk", "ep_size", "local_experts"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(
                    f"window size: {name}={value!r}; allowed: a whole number, 1 or more; "
                    f"pass per-rank numbers of the model and the group"
                )


@dataclass(frozen=True)
class Region:
    """A byte range of one rank's window; `offset` counts from the start of that window."""

    name: str
    offset: int
    size_bytes: int

    @property
    def end(self) -> int:
        return self.offset + self.size_bytes


@dataclass(frozen=True)
class WindowLayout:
    """Where everything lies in a window: one half of the communicator's buffer."""

    window_bytes: int
    required_bytes: int
    regions: tuple[Region, ...]

    def region(self, name: str) -> Region:
        """The region called `name`."""
        for candidate in self.regions:
            if candidate.name == name:
                return candidate
        raise KeyError(name)


def ceil_div(value: int, unit: int) -> int:
    """Smallest whole number of units that holds `value`."""
    return -(-value // unit)


def ceil_align(value: int, unit: int) -> int:
    """`value` rounded up to a multiple of `unit`."""
    return ceil_div(value, unit) * unit


def max_recv_rows(tokens_per_rank: int, ep_size: int, topk: int, local_experts: int) -> int:
    """Rows one rank may receive at worst (R): the operator's own bound for max_recv_token_num = 0.

    Holds when all ranks bring the same number of tokens and a token's expert ids are distinct.
    """
    return tokens_per_rank * ep_size * min(topk, local_experts)


def _row_bytes(spec: WindowSpec) -> int:
    return spec.hidden + 512 if spec.quantised else BF16_BYTES * spec.hidden


def _count_bytes(spec: WindowSpec) -> int:
    return spec.ep_size * ceil_align(spec.ep_size * MAX_LOCAL_EXPERTS + 1, 128) * 4


_Sizes = tuple[tuple[str, int], ...]


def _regions_a3(spec: WindowSpec) -> tuple[_Sizes, _Sizes]:
    """(name, bytes) from the start of the window on, and (name, bytes) up to its end."""
    slots = spec.tokens_per_rank * spec.topk
    head = [("reserved", RESERVED_BYTES), ("sent_tokens", slots * _row_bytes(spec))]
    if spec.quantised:
        head.append(("sent_scales", slots * 4))
    head.append(("results", slots * BF16_BYTES * spec.hidden))
    # The tiling check reserves one line more per rank for the counts than the kernel addresses by
    # its own formula; the region here is the reserved one, so it covers both readings.
    tail = [
        ("token_counts", _count_bytes(spec)),
        ("flags", max(spec.ep_size * FLAG_BYTES_PER_RANK, spec.flag_min_bytes)),
    ]
    return tuple(head), tuple(tail)


def _window_bytes_a3(spec: WindowSpec) -> int:
    head, tail = _regions_a3(spec)
    return sum(size for _, size in head + tail)


def _window_bytes_a2(spec: WindowSpec) -> int:
    sent = spec.tokens_per_rank * spec.topk
    received = max_recv_rows(spec.tokens_per_rank, spec.ep_size, spec.topk, spec.local_experts)
    row, result = _row_bytes(spec), BF16_BYTES * spec.hidden
    tensors = max(received * row + sent * result, sent * row + received * result)
    if spec.quantised:
        tensors += received * 4
    own_flags = max(spec.ep_size * FLAG_BYTES_PER_RANK, spec.flag_min_bytes)
    flags = own_flags + spec.ep_size * MAX_LOCAL_EXPERTS * 64 + spec.ep_size * 64
    return _count_bytes(spec) + tensors + flags + RESERVED_BYTES


def _buffer_bytes_a5(spec: WindowSpec) -> int:
    mask_words = ceil_align(spec.tokens_per_rank * spec.topk * 4, 256) // 4
    mask_bytes = ceil_align(ceil_div(mask_words, 8), 32)
    token_bytes = ceil_align(ceil_align(spec.hidden, 256) + ceil_div(spec.hidden, 32), 32)
    return (
        60 * 1024
        + ceil_align(spec.local_experts * spec.ep_size * (mask_bytes + 32), 512)
        + ceil_align(spec.tokens_per_rank * token_bytes, 512)
        + ceil_align(spec.tokens_per_rank * spec.hidden * spec.topk * BF16_BYTES, 512)
    )


_WINDOW: dict[str, tuple[Callable[[WindowSpec], int], int]] = {
    "A2": (_window_bytes_a2, HALVES),
    "A3": (_window_bytes_a3, HALVES),
    "A5": (_buffer_bytes_a5, 1),  # A5 has one buffer, allocated by the caller, not two halves
}


def _family(soc_family: str) -> tuple[Callable[[WindowSpec], int], int]:
    if soc_family not in _WINDOW:
        raise ConfigError(
            f"window size: SoC family {soc_family!r} is unknown; allowed: {', '.join(FAMILIES)}; "
            f"pass the family of the device"
        )
    return _WINDOW[soc_family]


def required_window_bytes(soc_family: str, spec: WindowSpec) -> int:
    """Smallest window for this batch: one half of the buffer on A2/A3, all of it on A5."""
    return _family(soc_family)[0](spec)


def required_ccl_buffer_bytes(soc_family: str, spec: WindowSpec) -> int:
    """Smallest communicator buffer (both halves on A2/A3) for this batch, in bytes."""
    size, halves = _family(soc_family)
    return halves * size(spec)


def ccl_buffer_bytes_of(hccl_buffsize_mb: int, soc_family: str = "A3") -> int:
    """Bytes of the communicator's buffer that HCCL_BUFFSIZE=`hccl_buffsize_mb` gives."""
    return _family(soc_family)[1] * hccl_buffsize_mb * MIB


def min_hccl_buffsize_mb(soc_family: str, spec: WindowSpec) -> int:
    """Smallest HCCL_BUFFSIZE (MiB of one half) that holds this batch; exact, nothing added."""
    return ceil_div(required_window_bytes(soc_family, spec), MIB)


def max_tokens_per_rank_that_fit(soc_family: str, spec: WindowSpec, ccl_buffer_bytes: int) -> int:
    """Largest batch per rank that a communicator's buffer holds; 0 if not even one token fits.

    The spec's own tokens_per_rank does not matter.
    """

    def fits(tokens: int) -> bool:
        return (
            required_ccl_buffer_bytes(soc_family, replace(spec, tokens_per_rank=tokens))
            <= ccl_buffer_bytes
        )

    if not fits(1):
        return 0
    low, high = 1, 2
    while fits(high):  # the size grows with every token, so this ends
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def a3_window_layout(spec: WindowSpec, window_bytes: int) -> WindowLayout:
    """Offsets of everything in an A3 window of `window_bytes` (one half).

    Tokens and results lie at the start; counts and flags at the end, so that their place does not
    depend on the batch. All ranks must use equal specs: peers address each other with their own.

    Raises ConfigError when the window is too small.
    """
    head, tail = _regions_a3(spec)
    required = sum(size for _, size in head + tail)
    if window_bytes < required:
        raise ConfigError(
            f"a window of {window_bytes} bytes cannot hold {spec.tokens_per_rank} tokens per rank; "
            f"allowed: {required} bytes or more; set HCCL_BUFFSIZE to at least "
            f"{ceil_div(required, MIB)}"
        )
    regions: list[Region] = []
    offset = 0
    for name, size in head:
        regions.append(Region(name, offset, size))
        offset += size
    offset = window_bytes - sum(size for _, size in tail)
    for name, size in tail:
        regions.append(Region(name, offset, size))
        offset += size
    return WindowLayout(window_bytes, required, tuple(regions))


def physical_experts_per_rank(shape: MoeShape, ep_size: int) -> int:
    """Experts one rank holds, replicas included; rounded up when EP does not divide the experts."""
    return ceil_div(shape.num_experts, ep_size) + shape.num_redundant_experts


def window_spec(
    shape: MoeShape, ep_size: int, tokens_per_rank: int, flag_min_bytes: int = 0
) -> WindowSpec:
    """The window spec of a model's MoE layers."""
    return WindowSpec(
        tokens_per_rank=tokens_per_rank,
        hidden=shape.hidden,
        topk=shape.topk,
        ep_size=ep_size,
        local_experts=physical_experts_per_rank(shape, ep_size),
        quantised=shape.quant != "none",
        flag_min_bytes=flag_min_bytes,
    )


# Bits of one routed expert weight by quantisation; scales and biases are left out of account.
WEIGHT_BITS = {"none": 16, "w8a8": 8, "w4a8": 4, "mxfp8": 8, "mxfp8_w4": 4, "mxfp4": 4}


def routed_weight_bytes_per_rank(shape: MoeShape, ep_size: int, num_layers: int = 1) -> int:
    """Bytes of routed expert weights one rank holds, each weight once; unknown quant as bf16."""
    elements = 3 * shape.hidden * shape.intermediate
    experts = num_layers * physical_experts_per_rank(shape, ep_size)
    return experts * elements * WEIGHT_BITS.get(shape.quant, 16) // 8
