# SPDX-License-Identifier: Apache-2.0
"""Forked ranks with a gloo group, for tests of what stands on torch."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from support.forked import Ended, RanksFailed, fork_ranks, values

# Before torch is imported: ranks share few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

__all__ = ["Ended", "RanksFailed", "run_ranks", "values"]


def run_ranks(
    fn: Callable[..., Any],
    size: int,
    *args: Any,
    deadline_s: float = 60.0,
    env: Mapping[str, str] | None = None,
    group: bool = True,
    group_timeout_s: float = 30.0,
    check: bool = True,
    kill: Sequence[tuple[int, float]] = (),
) -> list[Ended]:
    """Run `fn(rank, group, *args)` in `size` forked processes. Returns how they ended, by rank.

    Args:
        group: make a gloo group over all ranks and pass it; else None is passed.
        deadline_s, env, check, kill: as `fork_ranks`.
    """
    import torch.distributed as dist

    def body(rank: int, folder: Path, *rest: Any) -> Any:
        import torch

        torch.set_num_threads(1)
        if not group:
            return fn(rank, None, *rest)
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(str(folder / "store"), size),
            rank=rank,
            world_size=size,
            timeout=datetime.timedelta(seconds=group_timeout_s),
        )
        return fn(rank, dist.group.WORLD, *rest)

    return fork_ranks(
        body,
        size,
        *args,
        env={"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **(env or {})},
        deadline_s=deadline_s,
        check=check,
        kill=kill,
    )
