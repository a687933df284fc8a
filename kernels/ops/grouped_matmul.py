# SPDX-License-Identifier: Apache-2.0
"""Grouped matrix product of the split path, with rows whose bits do not depend on their company.

A GEMM library picks its inner loops by the number of rows M. A row's result may then differ in the
last bit between M=1 and M=64, and with it a token's output between EP 1 and EP 8, where an expert's
rows come in other portions. `row_multiple` finds out on this machine, with this library and thread
count, from which multiple of rows on results no longer depend on M; `grouped_matmul` pads to it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from xmoe.errors import ConfigError

_CANDIDATES = (1, 2, 4, 8, 16, 32)
# Used when no multiple makes rows independent of M: blocks of exactly this many rows, M never
# varies.
_FIXED_BLOCK = 32


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
    tokens_per_expert: Sequence[int],
    weight: Tensor,
    *,
    deterministic: bool = True,
) -> Tensor:
    """rows[r] @ weight[expert of r], rows sorted by expert. Local.

    float32 accumulation; the result is rounded once to the type of `rows`. In deterministic mode
    every expert's rows are padded with zeros to `row_multiple`, so that each row's bits depend on
    that row and its expert alone.

    Args:
        rows: [R, K] model dtype, contiguous, sorted by expert.
        tokens_per_expert: L host integers that sum to R.
        weight: [L, K, N] in the type of `rows`.

    Returns:
        [R, N], new memory.
    """
    num_rows, k = rows.shape
    if weight.dim() != 3 or weight.shape[0] != len(tokens_per_expert) or weight.shape[1] != k:
        raise ConfigError(
            f"grouped_matmul: weight {list(weight.shape)} for rows {list(rows.shape)} and "
            f"{len(tokens_per_expert)} experts; allowed: [{len(tokens_per_expert)}, {k}, N]; "
            "next: pass [L, H, 2I] for gate_up and [L, I, H] for down"
        )
    if sum(tokens_per_expert) != num_rows or weight.dtype != rows.dtype:
        raise ConfigError(
            f"grouped_matmul: counts sum to {sum(tokens_per_expert)} for {num_rows} rows, types "
            f"{rows.dtype} and {weight.dtype}; allowed: equal sums and equal types; next: check "
            "the dispatch"
        )
    if rows.device.type == "npu" and num_rows:
        return _grouped_on_npu(rows, tokens_per_expert, weight)
    output = rows.new_empty(num_rows, weight.shape[2])
    multiple = 1
    if deterministic and num_rows:
        multiple = row_multiple(k, weight.shape[2], rows.dtype, rows.device)
    start = 0
    for expert, count in enumerate(tokens_per_expert):
        if count:
            part = slice(start, start + count)
            output[part] = _product(rows[part], weight[expert], multiple)
            start += count
    return output


def _grouped_on_npu(rows: Tensor, tokens_per_expert: Sequence[int], weight: Tensor) -> Tensor:
    """torch_npu's grouped product: one launch; it tiles rows without padding, each on its own."""
    counts = torch.tensor(tokens_per_expert, dtype=torch.int64, device=rows.device)
    # 3: one output tensor; 0: groups along the rows; 1: `counts` holds sizes, not ends.
    (output,) = torch.ops.npu.npu_grouped_matmul(
        [rows], [weight], group_list=counts, split_item=3, group_type=0, group_list_type=1
    )
    return cast(Tensor, output)


def _product(rows: Tensor, weight: Tensor, multiple: int) -> Tensor:
    compute = _compute_dtype(rows.dtype, rows.device)
    count = rows.shape[0]
    weight = weight.to(compute)
    rows = F.pad(rows.to(compute), (0, 0, 0, -count % abs(multiple)))
    if multiple > 0:
        return (rows @ weight)[:count]
    blocks = [block @ weight for block in rows.split(-multiple)]
    return torch.cat(blocks)[:count]
