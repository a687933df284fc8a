# SPDX-License-Identifier: Apache-2.0
"""Expert ids and rows made fit for an operator. Pure torch functions; local; any device.

Ids are data: a router may deliver -1 for "slot unused", stale or sentinel values, 64-bit numbers,
or (after NaN logits) whatever came out of a sort. Everything here looks at the ids in the type in
which they arrived, before any narrowing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from xmoe.errors import ConfigError
from xmoe.types import TokenBatch

PADDINGS = ("zero_weight", "mask")


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
            "or -1 for an "
            'unused slot; next: repair the router, or set validate_ids="unchecked" to treat such '
            "slots "
            "as unused and count them"
        )


@dataclass(frozen=True)
class PaddedBatch:
    """A batch of exactly `capacity` rows.

    batch: all ids are valid and distinct within a row. mask: int8 [capacity], 1 = live; None for
    "zero_weight". num_tokens: rows of the original batch. zero_rows: bool [num_tokens] or None,
    rows whose output must be zero because no slot of theirs is used.
    """

    batch: TokenBatch
    mask: Tensor | None
    num_tokens: int
    zero_rows: Tensor | None


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


def fill_unused(topk_ids: Tensor, num_experts: int) -> Tensor:
    """Replace each -1 by a valid id that its row does not use yet, so that every row is distinct.

    Which one does not matter for the result (its weight is 0); the search starts at a position that
    moves with the row, so that the extra work spreads over the experts. Needs E >= K.

    Args:
        topk_ids: [T, K] int32, ids in [-1, E), distinct within a row but for -1.
    """
    num_tokens, topk = topk_ids.shape
    if topk > num_experts:
        raise ConfigError(
            f"fill_unused: topk={topk} distinct ids cannot be made from num_experts={num_experts}; "
            "allowed: topk <= num_experts; next: check the model configuration"
        )
    device = topk_ids.device
    # Of any min(E, 2K) experts at most K - unused are taken, so enough are free.
    span = min(num_experts, 2 * topk)
    start = torch.arange(num_tokens, device=device, dtype=torch.int64).unsqueeze(1) * topk
    candidates = (start + torch.arange(span, device=device, dtype=torch.int64)) % num_experts
    unused = topk_ids < 0
    free = ~(candidates.unsqueeze(2) == topk_ids.unsqueeze(1)).any(dim=2)
    # The n-th unused slot of a row takes the row's n-th free candidate.
    order = torch.argsort(free.to(torch.int8), dim=1, descending=True, stable=True)
    nth = (unused.cumsum(dim=1) - 1).clamp(min=0)
    picked = candidates.gather(1, order).gather(1, nth)
    return torch.where(unused, picked.to(torch.int32), topk_ids)


def pad_batch(
    batch: TokenBatch, capacity: int, padding: str = "zero_weight", *, num_experts: int
) -> PaddedBatch:
    """Bring a batch to `capacity` rows, as every rank of a fused launch must pass the same number.

    Extra rows have zero hidden states, K distinct valid ids and weight 0. Unused slots (-1) get a
    distinct valid id and weight 0. Rows without any used slot get zero hidden states too, so that
    what is multiplied by 0 is itself 0. With "mask" the rows that must not be dispatched are marked
    0; a rank without a live row keeps one (zero) live row, since a launch without any is not
    allowed.

    One thing a weight of 0 can't hide: if a filler's expert overflows to infinity for a token, that
    token's row becomes NaN.

    Args:
        batch: [T, H], [T, K] int32 in [-1, E), [T, K] float32; T <= capacity.
        padding: "zero_weight" or "mask".
        num_experts: E.

    Returns:
        New tensors throughout; the operator may write to the ids. Valid as long as they are held.
    """
    num_tokens, topk = batch.topk_ids.shape
    if padding not in PADDINGS:
        raise ConfigError(
            f"padding={padding!r}; allowed: {', '.join(PADDINGS)}; next: correct the setting"
        )
    if not 1 <= num_tokens <= capacity and not (num_tokens == 0 and capacity >= 1):
        raise ConfigError(
            f"pad_batch: {num_tokens} rows do not fit capacity={capacity}; allowed: 0..capacity "
            "with capacity >= 1; next: pass the group's largest token count as capacity"
        )
    hidden = batch.hidden_states.new_zeros(capacity, batch.hidden_states.shape[1])
    ids = batch.topk_ids.new_full((capacity, topk), -1, dtype=torch.int32)
    weights = batch.topk_weights.new_zeros(capacity, topk, dtype=torch.float32)
    unused = batch.topk_ids < 0
    zero_rows = unused.all(dim=1)
    hidden[:num_tokens] = batch.hidden_states.masked_fill(zero_rows.unsqueeze(1), 0.0)
    ids[:num_tokens] = batch.topk_ids
    weights[:num_tokens] = batch.topk_weights.masked_fill(unused, 0.0)
    mask = None
    if padding == "mask":
        mask = torch.zeros(capacity, dtype=torch.int8, device=ids.device)
        mask[:num_tokens] = (~zero_rows).to(torch.int8)
        mask[0] = torch.maximum(mask[0], (mask.sum() == 0).to(torch.int8))
    padded = TokenBatch(hidden, fill_unused(ids, num_experts), weights)
    return PaddedBatch(padded, mask, num_tokens, zero_rows if padding == "mask" else None)


def unpad(output: Tensor, padded: PaddedBatch) -> Tensor:
    """The original rows of an operator's output, as memory of their own.

    Rows that were masked out hold whatever the window held before, so they are set to zero; with
    "zero_weight" the operator already computed zeros for them.
    """
    rows = output[: padded.num_tokens].clone()
    if padded.zero_rows is not None:
        rows.masked_fill_(padded.zero_rows.unsqueeze(1), 0.0)
    return rows


def padding_counts(
    num_tokens_per_rank: Sequence[int], capacity: int, topk: int, padding: str, *, num_experts: int
) -> Tensor:
    """Rows per expert that `pad_batch` added over the whole group: int64 [E] on the host.

    An operator counts every row it saw; subtracting this leaves the real ones. Fillers for single
    unused slots of real rows are not included (ranks do not know each other's).
    """
    counts = torch.zeros(num_experts, dtype=torch.int64)
    for num_tokens in num_tokens_per_rank:
        live = capacity if padding == "zero_weight" else (1 if num_tokens == 0 else 0)
        rows = (
            torch.arange(num_tokens, max(num_tokens, live), dtype=torch.int64).unsqueeze(1) * topk
        )
        ids = (rows + torch.arange(topk, dtype=torch.int64)) % num_experts
        counts += torch.bincount(ids.flatten(), minlength=num_experts)
    return counts


def select_experts(
    logits: Tensor, topk: int, *, renormalize: bool = True
) -> tuple[Tensor, Tensor, int]:
    """Softmax router that keeps a bad row to itself.

    NaN and infinities are replaced by 0 before the choice, ties go to the lowest id, so each row
    gets K distinct ids whatever it holds. The weights of such a row are NaN: its output is NaN in
    that row and nowhere else. Good rows do not depend on bad ones.

    Args:
        logits: [T, E] any float type.

    Returns:
        topk_ids [T, K] int32, topk_weights [T, K] float32, number of bad rows.
    """
    if not 1 <= topk <= logits.shape[1]:
        raise ConfigError(
            f"select_experts: topk={topk}; allowed: 1..{logits.shape[1]}; next: check the model "
            "configuration"
        )
    scores = logits.to(torch.float32)
    bad = ~torch.isfinite(scores).all(dim=1)
    probabilities = torch.softmax(torch.nan_to_num(scores, nan=0.0, posinf=0.0, neginf=0.0), dim=1)
    # A stable sort makes "lowest id first" a property instead of an accident of topk's algorithm.
    weights, ids = torch.sort(probabilities, dim=1, descending=True, stable=True)
    weights, ids = weights[:, :topk], ids[:, :topk]
    if renormalize:
        weights = weights / weights.sum(dim=1, keepdim=True)
    weights = weights.masked_fill(bad.unsqueeze(1), float("nan"))
    return ids.to(torch.int32).contiguous(), weights.contiguous(), int(bad.sum())
