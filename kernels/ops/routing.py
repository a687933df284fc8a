# SPDX-License-Identifier: Apache-2.0
"""Expert ids looked at and made fit for the split path. Pure torch functions; local; any device.

Ids are data: a router may deliver -1 for "slot unused", stale or sentinel values, 64-bit numbers,
or (after NaN logits) whatever came out of a sort. Everything here looks at the ids in the type in
which they arrived, before any narrowing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from xmoe.types import TokenBatch


@dataclass(frozen=True)
class IdProblems:
    """What is wrong with a batch's ids; all zero when nothing is.

    `out_of_range` counts ids outside [-1, E), `duplicated` counts slots that repeat an expert of
    their row. `first` describes the first offender for an error message.
    """

    out_of_range: int = 0
    duplicated: int = 0
    first: str = ""

    def __bool__(self) -> bool:
        return bool(self.out_of_range or self.duplicated)

    def sentence(self, num_experts: int) -> str:
        """The four-part message of a ConfigError for these ids."""
        return (
            f"topk_ids: {self.out_of_range} ids out of range and {self.duplicated} repeated within "
            f"their row; first: {self.first}; allowed: distinct ids in [0, {num_experts}) per row, "
            'or -1 for an unused slot; next: repair the router, or set validate_ids="drop" to leave'
            " such slots out and count them"
        )


def check_ids(topk_ids: Tensor, num_experts: int) -> IdProblems:
    """Look for ids outside [-1, E) and for repeated experts within a row.

    Args:
        topk_ids: [T, K] any integer type. Synchronises with the device.
        num_experts: E.
    """
    if topk_ids.numel() == 0:
        return IdProblems()
    ids = topk_ids.to(torch.int64)
    bad = (ids < -1) | (ids >= num_experts)
    repeated = _repeated(ids, (ids >= 0) & ~bad)
    num_bad, num_repeated = int(bad.sum()), int(repeated.sum())
    if not num_bad and not num_repeated:
        return IdProblems()
    row, slot = (int(i) for i in (bad | repeated).nonzero()[0])
    return IdProblems(num_bad, num_repeated, f"row {row}, slot {slot}, id {int(ids[row, slot])}")


def clean_ids(batch: TokenBatch, num_experts: int) -> tuple[TokenBatch, Tensor]:
    """Make unusable slots unused: id -1 and weight 0. Returns the batch and how many slots changed.

    Ids outside [-1, E) and repeats of an expert within a row (the first stays) are unusable. Slots
    that were -1 already only have their weight set to 0. Ids come back as contiguous int32, weights
    as contiguous float32; 64-bit ids are judged before they are narrowed. No host synchronisation:
    the count is a 0-d tensor.
    """
    ids = batch.topk_ids.to(torch.int64)
    in_range = (ids >= 0) & (ids < num_experts)
    usable = in_range & ~_repeated(ids, in_range)
    changed = (~usable & (ids != -1)).sum()
    return (
        TokenBatch(
            batch.hidden_states,
            torch.where(usable, ids, -1).to(torch.int32).contiguous(),
            torch.where(usable, batch.topk_weights.to(torch.float32), 0.0).contiguous(),
        ),
        changed,
    )


def _repeated(ids: Tensor, valid: Tensor) -> Tensor:
    """Bool [T, K]: the slot holds a valid id that an earlier slot of its row holds too."""
    topk = ids.shape[1]
    same = (ids.unsqueeze(2) == ids.unsqueeze(1)) & valid.unsqueeze(2) & valid.unsqueeze(1)
    earlier = torch.ones(topk, topk, dtype=torch.bool, device=ids.device).tril(-1)
    return (same & earlier).any(dim=2)
