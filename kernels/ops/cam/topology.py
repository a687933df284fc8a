# SPDX-License-Identifier: Apache-2.0
"""Who talks to whom in CAMP2P and CAMAsync, checked once at construction. No torch.

Further letters (beside those of `xmoe.types`): A Attention ranks, F FFN ranks, N receive capacity
in rows, S tensor-parallel ranks of one Attention group.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

from xmoe import env
from xmoe.errors import ConfigError

MAX_SEQ_LEN = 262144
"""Most rows one dispatch may carry. Source: afd-plugin torch_binding_cam_async.cpp, 2026-10."""

MAX_TOKENS_PER_RANK = 65536
"""Token indices in the window are uint16. Source: afd_async_dispatch_recv.h, 2026-10."""


def refuse(what: str, value: object, allowed: str, action: str) -> NoReturn:
    """Raise ConfigError with its four parts."""
    raise ConfigError(f"{what}={value!r} is not accepted; allowed: {allowed}; {action}")


def require(what: str, value: object, ok: bool, allowed: str, action: str) -> None:
    """Refuse unless `ok`."""
    if not ok:
        refuse(what, value, allowed, action)


def _count(owner: str, name: str, value: int, low: int = 1, high: int = 1 << 30) -> None:
    ok = isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
    require(f"{owner}.{name}", value, ok, f"a whole number from {low} to {high}", "correct it")


@dataclass(frozen=True)
class CamP2PTopology:
    """One rank's place in CAMP2P. World order is FFN first: [0, F) FFN, [F, F+A) Attention.

    `aiv_num` (vector cores) belongs to the rank, not to the operator: the launch counters of a2e
    and e2a lie where the core count puts them, so both must use one value.
    """

    ffn_size: int
    attn_size: int
    rank: int
    hidden: int
    topk: int = 1
    aiv_num: int = 8

    def __post_init__(self) -> None:
        name = "CamP2PTopology"
        _count(name, "ffn_size", self.ffn_size, 1, 1024)
        _count(name, "attn_size", self.attn_size, 1, 1024)
        require(
            f"{name}.attn_size",
            self.attn_size,
            self.attn_size >= self.ffn_size,
            f"ffn_size ({self.ffn_size}) or more",
            "use at least as many Attention ranks as FFN ranks",
        )
        _count(name, "rank", self.rank, 0, self.world_size - 1)
        _count(name, "hidden", self.hidden)
        _count(name, "topk", self.topk, 1, 64)
        _count(name, "aiv_num", self.aiv_num, 1, 1024)

    @property
    def world_size(self) -> int:
        return self.ffn_size + self.attn_size

    @property
    def is_ffn(self) -> bool:
        return self.rank < self.ffn_size

    @property
    def ratio(self) -> int:
        """Attention ranks per FFN rank, rounded up; an FFN batch is split into this many parts."""
        return -(-self.attn_size // self.ffn_size)

    def attention_peers(self) -> tuple[int, ...]:
        """World ranks this FFN rank receives from, in the order of their rows. FFN side only."""
        return tuple(range(self.rank + self.ffn_size, self.world_size, self.ffn_size))


@dataclass(frozen=True)
class CamAsyncTopology:
    """One rank's place in CAMAsync. World order is Attention first: [0, A) Attention, [A, A+F) FFN.

    `experts_per_rank` is ceil(E / F). `max_seq_len` must be equal on all processes: it fixes the
    window layout. `tp_size` ranks form one Attention group and flag their dispatches together.
    """

    attn_size: int
    ffn_size: int
    rank: int
    hidden: int
    topk: int
    experts_per_rank: int
    max_seq_len: int
    tp_size: int = 1
    dynamic_quant: bool = False

    def __post_init__(self) -> None:
        name = "CamAsyncTopology"
        _count(name, "attn_size", self.attn_size, 1, 1024)
        _count(name, "ffn_size", self.ffn_size, 1, 1024)
        _count(name, "rank", self.rank, 0, self.world_size - 1)
        _count(name, "hidden", self.hidden)
        _count(name, "experts_per_rank", self.experts_per_rank, 1, 4096)
        _count(name, "topk", self.topk, 1, self.ffn_size * self.experts_per_rank)
        _count(name, "tp_size", self.tp_size, 1, self.attn_size)
        require(
            f"{name}.tp_size",
            self.tp_size,
            self.attn_size % self.tp_size == 0,
            f"a divisor of attn_size ({self.attn_size})",
            "make the Attention groups equal",
        )
        _count(name, "max_seq_len", self.max_seq_len, self.tp_size, MAX_SEQ_LEN)
        require(
            f"{name}.max_seq_len / tp_size",
            self.max_tokens_per_rank,
            self.max_tokens_per_rank <= MAX_TOKENS_PER_RANK,
            f"up to {MAX_TOKENS_PER_RANK}",
            "lower max_seq_len or raise tp_size",
        )
        require(
            f"{name}.dynamic_quant",
            self.dynamic_quant,
            isinstance(self.dynamic_quant, bool),
            "True, False",
            "pass a bool",
        )

    @property
    def world_size(self) -> int:
        return self.attn_size + self.ffn_size

    @property
    def is_ffn(self) -> bool:
        return self.rank >= self.attn_size

    @property
    def max_tokens_per_rank(self) -> int:
        return self.max_seq_len // self.tp_size

    @property
    def groups(self) -> int:
        """Attention groups; each may have one dispatch outstanding."""
        return self.attn_size // self.tp_size

    def info_length(self, shared: bool) -> int:
        """Elements of batch_info; the older operator set counts a shared expert slot."""
        return 5 + self.tp_size + (self.experts_per_rank + int(shared)) * self.tp_size


def receive_capacity(environ: Mapping[str, str] | None = None) -> int:
    """N: rows of a dispatch_recv output, floor(262144 * BATCH_SIZE_FACTOR). Local.

    Every receive output has this many rows, however few tokens arrive. The operator library reads
    the same variable at the same time, so a value that changes in between is its error to report.

    Raises:
        ConfigError: BATCH_SIZE_FACTOR leaves no row or is above 1.
    """
    text = env.text("BATCH_SIZE_FACTOR", environ) or "1"
    try:
        factor = float(text)
    except ValueError:
        factor = math.nan
    # The library multiplies in float32: 262144 is a power of two, so this is exact there as well.
    rows = int(MAX_SEQ_LEN * _float32(factor)) if 0 < factor <= 1 else 0
    require(
        "BATCH_SIZE_FACTOR",
        text,
        rows > 0,
        "a number above 0, up to 1, that leaves a row",
        "unset it",
    )
    return rows


def _float32(value: float) -> float:
    return float(struct.unpack("f", struct.pack("f", value))[0])
