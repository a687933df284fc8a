# SPDX-License-Identifier: Apache-2.0
"""Pinned copies of an item's metadata, and the stop buffer: order, refusals, what is seen when."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from support.cam_ranks import cam_rank
from support.ranks import run_ranks, values
from xmoe.errors import ConfigError
from xmoe.kernels.ops.cam.host_memory import PinnedCopy, StopBuffer

WORDS = 6
LATE_US = 100_000


def copies(rank: int, _: Any, folder: str) -> None:
    with cam_rank(rank, 1, folder) as one:
        stream, copy = one.stream(), PinnedCopy(one.library, WORDS)
        rows, out = torch.full((1, 16), 3.0), torch.zeros(1, 16)
        # int64 words that the kernel writes late: a copy in the stream's order brings them.
        words = out.view(torch.int64)[0, :WORDS]
        for number in range(3):
            out.zero_()
            one.soft.timed_kernel(
                stream=stream, microseconds=LATE_US, vector_cores=1, rows=rows, out=out,
                alpha=float(number + 1),
            )  # fmt: skip
            copy.queue(words, stream)
            assert not copy.arrived  # nobody waited
            one.sync(stream)
            assert copy.arrived and copy.read() == words.tolist()
            assert copy.read()[0] != 0
        copy.queue(words[:2], stream)
        one.sync(stream)
        assert copy.read() == words[:2].tolist()
        for bad in (torch.zeros(WORDS + 1, dtype=torch.int64), torch.zeros(2, dtype=torch.int32),
                    torch.zeros(8, dtype=torch.int64)[::2]):  # fmt: skip
            with pytest.raises(ConfigError, match="at most 6 int64 values, contiguous"):
                copy.queue(bad, stream)
        assert copy.read() == words[:2].tolist()  # a refused copy changes nothing


def test_a_copy_comes_in_the_streams_order_and_shows_when_it_was_made(tmp_path: Path) -> None:
    values(run_ranks(copies, 1, str(tmp_path), group=False))


def memory(rank: int, _: Any, folder: str) -> int:
    """Every piece of pinned memory is given back: the runtime would refuse a second time."""
    freed = []
    with cam_rank(rank, 1, folder) as one:
        base = one.library.base

        def counted(name: str, ctype: str, library: str = "nnop") -> Any:
            call = base(name, ctype, library)
            if name != "aclrtFreeHost":
                return call
            return lambda pointer: freed.append(call(pointer))

        one.library.base = counted  # type: ignore[method-assign]
        for _i in range(50):
            PinnedCopy(one.library, WORDS)
        StopBuffer(one.library)
        gc.collect()
        assert set(freed) == {0}
    return len(freed)


def test_pinned_memory_is_given_back_once(tmp_path: Path) -> None:
    assert values(run_ranks(memory, 1, str(tmp_path), group=False)) == [51]


def stop(rank: int, _: Any, folder: str) -> list[int]:
    with cam_rank(rank, 1, folder) as one:
        busy, buffer = one.stream(), StopBuffer(one.library)
        words = buffer.tensor.view(torch.int64)
        with pytest.raises(ConfigError, match="layer=-1"):
            buffer.write(busy, layer=-1)
        assert not buffer.written and words.tolist() == [0, 0, 0, 0]
        one.soft.timed_kernel(stream=busy, microseconds=LATE_US, vector_cores=1)
        buffer.write(busy, layer=9)
        assert buffer.written and words.tolist() == [0, 0, 0, 0]  # it does not wait
        one.sync(busy)
        buffer.write(busy, layer=9)
        one.sync(busy)
        return words.tolist()


def test_the_stop_buffer_is_written_by_a_stream(tmp_path: Path) -> None:
    assert values(run_ranks(stop, 1, str(tmp_path), group=False)) == [[1, 9, 0, 0]]
