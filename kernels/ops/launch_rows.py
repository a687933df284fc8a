# SPDX-License-Identifier: Apache-2.0
"""The tensors that fused launches read and write: made once, filled by each layer call.

A launch needs the same number of rows on every rank, int32 ids that are in range and distinct
within a row, and float32 weights. What an engine brings is neither: fewer rows, unused slots, ids
out of range after NaN logits. `fill` turns the one into the other with torch operators that write
into memory made beforehand: it allocates nothing, asks the device for nothing and has no branch on
the data, so it can be queued like any other work.

A slot that cannot be used (id -1, out of range, or the repetition of an expert of its row) gets a
valid expert that its row does not name, with weight 0. How many of them were not -1 is counted on
the device.

Source: ops-transformer 9.1.0, mc2/mega_moe: topk_ids lie in [0, E) and differ within a row, what
else does is left open; the ids of masked rows are overwritten with E in the caller's tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from xmoe.errors import ConfigError
from xmoe.types import TokenBatch

PADDINGS = ("zero_weight", "mask")
_ID_TYPES = (torch.int32, torch.int64)
# Views by (tokens, rows); an engine sees few such pairs again and again.
_MAX_VIEWS = 64


class Launch(NamedTuple):
    """What an operator gets, valid until the next `fill`.

    batch: of R rows. mask: int8 [R], 1 = live, or None; the operator writes to the ids when it gets
    one. output: [R, H], for it to write to.
    """

    batch: TokenBatch
    mask: Tensor | None
    output: Tensor


@dataclass(frozen=True)
class _Views:
    """Everything of one (tokens, rows) pair, so that a call makes no view of its own."""

    launch: Launch
    output: Tensor
    hidden: Tensor
    raw: dict[torch.dtype, Tensor]
    named: Tensor
    named_slots: Tensor
    named_by_candidate: Tensor
    named_by_slot: Tensor
    scales: Tensor
    scales_slots: Tensor
    same: Tensor
    taken: Tensor
    bounded: Tensor
    drop: Tensor
    drop_bytes: Tensor
    drop_slots: Tensor
    sorted_bytes: Tensor
    order: Tensor
    chosen: Tensor
    ids: Tensor
    weights: Tensor
    lost: Tensor
    count: Tensor
    unused: Tensor
    unused_column: Tensor
    not_first_unused: Tensor
    not_first_mask: Tensor | None
    rest_ids: Tensor
    rest_fillers: Tensor


class LaunchRows:
    """See the module's text. Not safe for concurrent calls: whoever orders the launches on one
    communication resource orders these too.

    Args:
        capacity: C, rows of the largest launch.
        hidden, topk, num_experts: H, K, E of the model, K <= E.
        local_experts: L.
        padding: "zero_weight": rows beyond the tokens are dispatched with weight 0. "mask": they,
            and rows without a usable slot, are marked in `mask`; row 0 never is, since a launch
            without a live row is not allowed.
        dtype, device: of the hidden states.

    Attributes:
        capacity: C.
        output [C, H], tokens_per_expert int32 [L]: what launches write.

    One thing a weight of 0 can't hide: if a filler's expert overflows to infinity for a token, that
    token's row becomes NaN.
    """

    def __init__(
        self,
        capacity: int,
        hidden: int,
        topk: int,
        num_experts: int,
        *,
        local_experts: int,
        padding: str = "zero_weight",
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | None = None,
    ) -> None:
        if padding not in PADDINGS:
            raise ConfigError(
                f"padding={padding!r}; allowed: {', '.join(PADDINGS)}; next: correct the setting"
            )
        if capacity < 1 or not 1 <= topk <= num_experts:
            raise ConfigError(
                f"launch rows: capacity={capacity}, topk={topk}, num_experts={num_experts}; "
                "allowed: capacity >= 1, 1 <= topk <= num_experts, since a row's ids are distinct; "
                "next: check the model configuration"
            )
        self.capacity = capacity
        self._topk = topk
        self._num_experts = num_experts
        self._used = 0  # rows that the last call filled

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self._hidden = zeros(capacity, hidden, dtype=dtype)
        self.output = zeros(capacity, hidden, dtype=dtype)
        self.tokens_per_expert = zeros(local_experts, dtype=torch.int32)
        # Where fillers come from: K candidates a row, starting at a place that moves with the row,
        # so that the extra work spreads over the experts. At most K - (unused slots) are taken.
        rows = torch.arange(capacity, dtype=torch.int64).unsqueeze(1)
        candidates = (rows * topk + torch.arange(topk)) % num_experts
        self._fillers = candidates.to(torch.int32).to(device)
        self._ids = self._fillers.clone()
        self._weights = zeros(capacity, topk, dtype=torch.float32)
        self._mask = None
        if padding == "mask":
            self._mask = zeros(capacity, dtype=torch.int8)
            self._mask[0] = 1
        # Columns 0..K-1 are the slots, K..2K-1 the row's candidates, which weigh nothing.
        self._named = torch.cat([self._fillers, self._fillers], dim=1)
        self._scales = zeros(capacity, 2 * topk, dtype=torch.float32)
        # same[t, j, k]: column j names what slot k names; it counts for slots before j only.
        self._same = zeros(capacity, 2 * topk, topk, dtype=torch.bool)
        earlier = torch.ones(topk, topk, dtype=torch.bool).tril(-1)
        everything = torch.ones(topk, topk, dtype=torch.bool)
        self._matters = torch.cat([earlier, everything]).to(device)
        self._raw = {kind: zeros(capacity, topk, dtype=kind) for kind in _ID_TYPES}
        self._taken = zeros(capacity, 2 * topk, dtype=torch.bool)
        self._bounded = zeros(capacity, 2 * topk, dtype=torch.int32)
        self._drop = zeros(capacity, 2 * topk, dtype=torch.bool)
        self._sorted_bytes = zeros(capacity, 2 * topk, dtype=torch.uint8)
        self._order = zeros(capacity, 2 * topk, dtype=torch.int64)
        self._lost = zeros(capacity, topk, dtype=torch.bool)
        self._count = zeros(capacity, topk, dtype=torch.int64)
        self._unused = zeros(capacity, dtype=torch.bool)
        self._views: dict[tuple[int, int], _Views] = {}
        self._now: _Views | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All memory that is held."""
        held = [value for value in vars(self).values() if isinstance(value, Tensor)]
        return (*held, *self._raw.values())

    def fill(self, batch: TokenBatch | None, rows: int) -> Launch:
        """Queue, on the current stream, what makes a launch of `rows` rows out of `batch`. Local.

        Args:
            batch: hidden_states [T, H] in the type of these rows, topk_ids [T, K] int32 or int64,
                topk_weights [T, K] of any float type; T <= rows. None for no tokens.
            rows: 1..capacity, the same on all ranks.

        Raises:
            ConfigError: the rows do not hold so many tokens.
        """
        tokens = 0 if batch is None else batch.topk_ids.shape[0]
        views = self._views.get((tokens, rows)) or self._new_views(tokens, rows)
        if tokens < self._used:
            self._empty(tokens, self._used)
        self._used = tokens
        self._now = views
        if tokens and batch is not None:
            views.hidden.copy_(batch.hidden_states)
            self._choose(batch, views)
        if views.not_first_mask is not None:
            torch.logical_not(views.not_first_unused, out=views.not_first_mask)
        if self._mask is not None and tokens < rows:
            views.rest_ids.copy_(views.rest_fillers)  # the last launch may have written there
        return views.launch

    def _choose(self, batch: TokenBatch, v: _Views) -> None:
        """Ids and weights: a row's usable slots in their order, then fillers."""
        raw = v.raw[batch.topk_ids.dtype]
        experts = self._num_experts
        # Judged in the type in which they came: a 64-bit id may look valid in its low half.
        torch.clamp(batch.topk_ids, -2, experts, out=raw)
        v.named_slots.copy_(raw)
        v.scales_slots.copy_(batch.topk_weights)
        torch.eq(v.named_by_candidate, v.named_by_slot, out=v.same)
        v.same.logical_and_(self._matters)
        torch.any(v.same, 2, out=v.taken)
        torch.clamp(v.named, 0, experts - 1, out=v.bounded)
        torch.ne(v.bounded, v.named, out=v.drop)
        v.drop.logical_or_(v.taken)
        # Stable: what may be used moves to the front and keeps its order.
        torch.sort(v.drop_bytes, dim=1, stable=True, out=(v.sorted_bytes, v.order))
        torch.gather(v.named, 1, v.chosen, out=v.ids)
        torch.gather(v.scales, 1, v.chosen, out=v.weights)
        torch.all(v.drop_slots, 1, out=v.unused)
        torch.ne(v.named_slots, -1, out=v.lost)
        v.lost.logical_and_(v.drop_slots)
        v.count.add_(v.lost)

    def finish(self, out: Tensor) -> Tensor:
        """Queue the copy of the tokens' rows to `out` [T, H], T as in the last `fill`. Local.

        Rows without a usable slot become zero: masked ones hold whatever the window held before,
        and what a NaN was multiplied with by 0 is no zero either.
        """
        now = self._now
        if self._used and now is not None:
            out.copy_(now.output)
            out.masked_fill_(now.unused_column, 0)
        return out

    def dropped(self) -> int:
        """Slots so far whose id was neither usable nor -1. Waits for the current stream. Local."""
        return int(self._count.sum())

    def _empty(self, first: int, last: int) -> None:
        """Rows first..last-1 as they were made: no token is left behind in the padding."""
        self._hidden[first:last].zero_()
        self._weights[first:last].zero_()
        self._ids[first:last].copy_(self._fillers[first:last])
        if self._mask is not None:
            self._mask[max(1, first) : last].zero_()

    def _new_views(self, tokens: int, rows: int) -> _Views:
        if not (0 <= tokens <= rows <= self.capacity and rows >= 1):
            raise ConfigError(
                f"{tokens} tokens in {rows} rows; allowed: 0..rows tokens in 1..{self.capacity} "
                "rows; next: pass the group's largest token count as rows"
            )
        topk = self._topk
        named, scales, drop = self._named[:tokens], self._scales[:tokens], self._drop[:tokens]
        order, unused = self._order[:tokens], self._unused[:tokens]
        mask, not_first = self._mask, None
        if mask is not None and tokens > 1:
            not_first = mask[1:tokens].view(torch.bool)
        views = _Views(
            launch=Launch(
                TokenBatch(self._hidden[:rows], self._ids[:rows], self._weights[:rows]),
                None if mask is None else mask[:rows],
                self.output[:rows],
            ),
            output=self.output[:tokens],
            hidden=self._hidden[:tokens],
            raw={kind: raw[:tokens] for kind, raw in self._raw.items()},
            named=named,
            named_slots=named[:, :topk],
            named_by_candidate=named.unsqueeze(2),
            named_by_slot=named[:, :topk].unsqueeze(1),
            scales=scales,
            scales_slots=scales[:, :topk],
            same=self._same[:tokens],
            taken=self._taken[:tokens],
            bounded=self._bounded[:tokens],
            drop=drop,
            drop_bytes=drop.view(torch.uint8),
            drop_slots=drop[:, :topk],
            sorted_bytes=self._sorted_bytes[:tokens],
            order=order,
            chosen=order[:, :topk],
            ids=self._ids[:tokens],
            weights=self._weights[:tokens],
            lost=self._lost[:tokens],
            count=self._count[:tokens],
            unused=unused,
            unused_column=unused.unsqueeze(1),
            not_first_unused=unused[1:],
            not_first_mask=not_first,
            rest_ids=self._ids[tokens:rows],
            rest_fillers=self._fillers[tokens:rows],
        )
        if len(self._views) >= _MAX_VIEWS:
            self._views.clear()
        self._views[tokens, rows] = views
        return views
