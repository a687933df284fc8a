# SPDX-License-Identifier: Apache-2.0
"""Bodies of npu tests in forked children. Nothing here initialises the device in the parent."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from support.forked import fork_ranks, values


def child(fn: Callable[..., Any], *args: Any, deadline_s: float = 120.0) -> Any:
    """Run `fn(device index 0's torch.device, *args)` in a child; returns what it returned."""
    return values(fork_ranks(_body, 1, fn, args, deadline_s=deadline_s))[0]


def _body(rank: int, folder: Any, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    import torch
    import torch_npu  # noqa: F401

    # The wheel says so once at the first tensor of some operators; it is no fault of the caller.
    warnings.filterwarnings("ignore", "Cannot create tensor with internal format")
    torch.set_num_threads(1)
    torch.npu.set_device(rank)
    return fn(torch.device("npu", rank), *args)


def join_group(context: Any, hccl: bool, npu: bool = True) -> Any:
    """This rank's process group over its own device: gloo, with HCCL for device tensors, or None
    for a rank alone."""
    import torch
    import torch.distributed as dist

    if npu:
        import torch_npu  # noqa: F401

        warnings.filterwarnings("ignore", "Cannot create tensor with internal format")
        torch.set_num_threads(1)
        torch.npu.set_device(context.rank)
    if context.size == 1:
        return None
    if not hccl:
        return context.init_process_group(120.0)
    store = dist.FileStore(context.store_path, context.size)
    dist.init_process_group(
        "cpu:gloo,npu:hccl", store=store, rank=context.rank, world_size=context.size
    )
    return dist.group.WORLD
