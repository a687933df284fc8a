# SPDX-License-Identifier: Apache-2.0
"""Grouped matrix product of the split path, with rows whose bits do not depend on their company.

A GEMM library picks its inner loops by the number of rows M. A row's result may then differ in the
last bit between M=1 and M=64, and with it a token's output between EP 1 and EP 8, where an expert's
rows come in other portions. `row_multiple` finds out on this machine, with this library and thread
count, from which multiple of rows on results no longer depend on M; `grouped_matmul` pads to it.

On npu tensors torch_npu's operator does all groups in one launch. It cannot be padded without
knowing the group sizes on the host, so `require_independent_rows` finds out, before any step,
whether its rows depend on their company, and refuses the deterministic mode if they do.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from xmoe.errors import ConfigError
from xmoe.kernels.capability import NpuOperators

_CANDIDATES = (1, 2, 4, 8, 16, 32)
# Used when no multiple makes rows independent of M: blocks of exactly this many rows, M never
# varies.
_FIXED_BLOCK = 32
_NO_OPERATORS = NpuOperators()


def row_multiple(k: int, n: int, dtype: torch.dtype, device: torch.device) -> int:
    """The smallest multiple of rows for which a row of [M, k] @ [k, n] does not depend on M.

    Probed once per process, shape, type, device and thread count; costs some tens of products.
    Local: ranks of one group run on machines of one kind, or their bits differ anyway. Negative: no
    multiple did, the caller must use blocks of exactly that many rows.
    """
    return _probe(k, n, _compute_dtype(dtype, device), device, torch.get_num_threads())


@functools.lru_cache(maxsize=64)
def _probe(k: int, n: int, dtype: torch.dtype, device: torch.device, threads: int) -> int:
    generator = torch.Generator().manual_seed(1)
    most = 4 * _CANDIDATES[-1] + 1
    rows = torch.randn(most, k, generator=generator).to(device=device, dtype=dtype)
    weight = torch.randn(k, n, generator=generator).to(device=device, dtype=dtype)
    whole = rows[: 2 * _CANDIDATES[-1]] @ weight
    for candidate in _CANDIDATES:
        if all(_agrees(rows, weight, whole, candidate * blocks) for blocks in (1, 2, 3, 5, 7, 16)):
            return candidate
    return -_FIXED_BLOCK


def _agrees(rows: Tensor, weight: Tensor, whole: Tensor, num_rows: int) -> bool:
    """Do `num_rows` rows alone give the bits they have within `whole`, at any place?"""
    most = whole.shape[0]
    if num_rows > most:
        # A larger product, compared in the other direction.
        num_rows = min(num_rows, rows.shape[0])
        return torch.equal((rows[:num_rows] @ weight)[:most], whole)
    starts = {0, 1, most - num_rows}
    return all(
        torch.equal(rows[start : start + num_rows] @ weight, whole[start : start + num_rows])
        for start in starts
        if start + num_rows <= most
    )


def _compute_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """CPU: 16-bit types are multiplied as float32, which rounds where an accelerator does (once, at
    the end) and avoids scalar loops on processors without 16-bit arithmetic."""
    if device.type == "cpu" and dtype in (torch.bfloat16, torch.float16):
        return torch.float32
    return dtype


def grouped_matmul(
    rows: Tensor,
    tokens_per_expert: Sequence[int] | Tensor,
    weight: Tensor,
    *,
    deterministic: bool = True,
    operators: NpuOperators = _NO_OPERATORS,
) -> Tensor:
    """rows[r] @ weight[expert of r], rows sorted by expert. Local.

    float32 accumulation; the result is rounded once to the type of `rows`. In deterministic mode
    each row's bits depend on that row and its expert alone: every expert's rows are padded with
    zeros to `row_multiple`. With `operators.grouped_matmul` nothing is padded and the host does not
    look at the counts; call `require_independent_rows` before.

    Args:
        rows: [R, K] model dtype, contiguous, sorted by expert.
        tokens_per_expert: L integers that sum to R, or int64 [L] on any device.
        weight: [L, K, N] in the type of `rows`.

    Returns:
        [R, N], new memory.
    """
    num_rows, k = rows.shape
    experts = len(tokens_per_expert)
    if weight.dim() != 3 or weight.shape[0] != experts or weight.shape[1] != k:
        raise ConfigError(
            f"grouped_matmul: weight {list(weight.shape)} for rows {list(rows.shape)} and "
            f"{experts} experts; allowed: [{experts}, {k}, N]; "
            "next: pass [L, H, 2I] for gate_up and [L, I, H] for down"
        )
    if weight.dtype != rows.dtype:
        raise ConfigError(
            f"grouped_matmul: rows of {rows.dtype}, weight of {weight.dtype}; allowed: equal "
            "types; next: check the dispatch"
        )
    if operators.grouped_matmul and num_rows:
        return launch(rows, weight, group_list(tokens_per_expert, rows.device))
    counts = host_counts(tokens_per_expert)
    if sum(counts) != num_rows:
        raise ConfigError(
            f"grouped_matmul: counts sum to {sum(counts)} for {num_rows} rows; allowed: equal; "
            "next: check the dispatch"
        )
    output = rows.new_empty(num_rows, weight.shape[2])
    multiple = 1
    if deterministic and num_rows:
        multiple = row_multiple(k, weight.shape[2], rows.dtype, rows.device)
    start = 0
    for expert, count in enumerate(counts):
        if count:
            part = slice(start, start + count)
            output[part] = _product(rows[part], weight[expert], multiple)
            start += count
    return output


def host_counts(tokens_per_expert: Sequence[int] | Tensor) -> list[int]:
    """The counts as numbers; waits for the device when they are there."""
    if isinstance(tokens_per_expert, Tensor):
        return [int(count) for count in tokens_per_expert.tolist()]
    return list(tokens_per_expert)


def group_list(tokens_per_expert: Sequence[int] | Tensor, device: torch.device) -> Tensor:
    """The counts as int64 [L] on `device`."""
    if isinstance(tokens_per_expert, Tensor):
        return tokens_per_expert.to(device)
    return torch.tensor(tokens_per_expert, dtype=torch.int64, device=device)


def launch(rows: Tensor, weight: Tensor, groups: Tensor, **more: Any) -> Tensor:
    """torch_npu's grouped product of one tensor each, split along the rows. Local.

    Args:
        groups: int64 [L], sizes. more: scales, biases and the output's type.
    """
    # split_item 3: one output (0 and 1 would read the groups on the host). group_list_type 1: sizes
    # instead of ends, which for a single group is not allowed, and the same.
    (output,) = torch.ops.npu.npu_grouped_matmul(
        [rows], [weight], group_list=groups, split_item=3, group_type=0,
        group_list_type=1 if len(groups) > 1 else 0, **more,
    )  # fmt: skip
    return cast(Tensor, output)


def require_independent_rows(weight: Tensor, operators: NpuOperators) -> None:
    """Refuse the deterministic mode when the device's operator cannot keep it. Local.

    Some launches and waits at the first call for a shape; nothing later. The vendor promises equal
    bits for equal calls only, which says nothing about other group sizes.

    Args:
        weight: [L, K, N] on the device.

    Raises:
        ConfigError: a row's bits depend on which other rows there are.
    """
    if not operators.grouped_matmul:
        return
    _, k, n = weight.shape
    if not _independent(k, n, weight.dtype, weight.device):
        raise ConfigError(
            f"npu_grouped_matmul on {weight.device}: a row of [M, {k}] @ [{k}, {n}] has other bits "
            "when its expert has other rows, and deterministic is true; allowed: deterministic "
            "false (XMOE_DETERMINISTIC=0), or a device whose rows are independent; next: set it, "
            "and do not expect the same bits for every EP size"
        )


@functools.lru_cache(maxsize=64)
def _independent(k: int, n: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Do rows keep their bits in groups of other sizes, and beside another group's rows?"""
    generator = torch.Generator().manual_seed(1)
    most = 4 * _CANDIDATES[-1] + 1
    rows = torch.randn(most, k, generator=generator).to(device=device, dtype=dtype)
    weight = torch.randn(1, k, n, generator=generator).to(device=device, dtype=dtype)
    pair = weight.expand(2, k, n).contiguous()

    def product(part: Tensor, *sizes: int) -> Tensor:
        return launch(part, pair, torch.tensor(sizes, dtype=torch.int64, device=device))

    whole = product(rows, most, 0)
    alone = (1, 2, 3, 15, 16, 17, 33, 64, most - 1)
    return all(
        torch.equal(product(rows[:count].contiguous(), count, 0), whole[:count])
        and torch.equal(product(rows, count, most - count), whole)
        for count in alone
    )


def _product(rows: Tensor, weight: Tensor, multiple: int) -> Tensor:
    compute = _compute_dtype(rows.dtype, rows.device)
    count = rows.shape[0]
    weight = weight.to(compute)
    rows = F.pad(rows.to(compute), (0, 0, 0, -count % abs(multiple)))
    if multiple > 0:
        return (rows @ weight)[:count]
    blocks = [block @ weight for block in rows.split(-multiple)]
    return torch.cat(blocks)[:count]
