# SPDX-License-Identifier: Apache-2.0
"""How tokens get to their experts' ranks and back on the split path.

One protocol stands between executor and transport: `dispatch`, then `combine` with the handle that
dispatch returned. CollectiveTransport implements it over torch.distributed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from xmoe.comm.agree import (
    DEFAULT_TIMEOUT_S,
    agree_success,
    group_rank,
    group_size,
    require_equal,
    run_work,
)
from xmoe.errors import ConfigError, RankDisagreement
from xmoe.kernels.ops.fused_moe import sort_slots, weighted_sum
from xmoe.kernels.ops.routing import check_ids, clean_ids
from xmoe.types import TokenBatch

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# Head of the count message: sequence, "this rank cannot go on", H, K, dtype, E. Then the counts.
_HEAD = ("step", "problem", "hidden size", "topk", "dtype", "num_experts")


class DispatchHandle:
    """Opaque; passed from `dispatch` to `combine` of the same transport, once."""


class Transport(Protocol):
    """Moves rows between ranks. COLLECTIVE: all ranks call the same methods in the same order."""

    def dispatch(self, batch: TokenBatch) -> tuple[Tensor, Tensor, DispatchHandle]:
        """Send each used slot's row to its expert's rank.

        Returns:
            recv_tokens [R, H] sorted by local expert, tokens_per_expert int64 [L] on the host,
            handle.
        """

    def combine(self, expert_out: Tensor, handle: DispatchHandle) -> Tensor:
        """Bring the rows [R, H] back and add them up: hidden_states [T, H], new memory."""


@dataclass(frozen=True)
class _CollectiveHandle(DispatchHandle):
    batch: TokenBatch
    pairs: Tensor  # int64 [S]: t * K + k in the order sent
    order: Tensor  # int64 [R]: received position of each row handed to the experts
    send_rows: list[int]
    recv_rows: list[int]


class CollectiveTransport:
    """Dispatch and combine by all-to-all over a process group; needs nothing but torch. COLLECTIVE.

    Experts lie on ranks in blocks: expert g on rank g // L. Rows of an expert are ordered by source
    rank, then token, then slot. Raw expert rows travel back; the weighted sum happens on the
    token's own rank in slot order, so it does not depend on the EP size. Row counts pass through
    the host.

    Args:
        group: EP group that accepts CPU tensors, or None for EP 1.
        num_experts: E, a multiple of the group's size.
        validate_ids: "checked" raises ConfigError on every rank, before any row is sent, when some
            rank has ids out of range or repeated in a row; "unchecked" leaves such slots out and
            counts them in `dropped_slots`.
    """

    def __init__(
        self,
        group: ProcessGroup | None,
        num_experts: int,
        *,
        validate_ids: str = "checked",
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        ep_size = group_size(group)
        if num_experts < 1 or num_experts % ep_size:
            raise ConfigError(
                f"num_experts={num_experts} cannot be divided among ep_size={ep_size} ranks; "
                "allowed: a multiple of ep_size; next: choose an EP size that divides the number "
                "of experts"
            )
        if validate_ids not in ("checked", "unchecked"):
            raise ConfigError(
                f"validate_ids={validate_ids!r}; allowed: checked, unchecked; next: correct the "
                "setting"
            )
        self.num_experts = num_experts
        self.num_local_experts = num_experts // ep_size
        self.dropped_slots = 0
        self._group = group
        self._ep_size = ep_size
        self._checked = validate_ids == "checked"
        self._timeout_s = timeout_s
        self._sequence = 0
        require_equal(group, "transport", {"num_experts": num_experts}, timeout_s)

    def dispatch(self, batch: TokenBatch) -> tuple[Tensor, Tensor, DispatchHandle]:
        """See Transport. COLLECTIVE. Raises ConfigError, RankDisagreement or PeerLost."""
        self._sequence += 1
        problem = self._problem(batch)
        if problem is None:
            batch, dropped = clean_ids(batch, self.num_experts)
            self.dropped_slots += int(dropped)
            slots = sort_slots(batch.topk_ids, self.num_experts)
            counts = slots.counts
        else:
            counts = torch.zeros(self.num_experts, dtype=torch.int64)
        recv_counts = self._exchange_counts(batch, counts, problem)
        send_rows = counts.view(self._ep_size, -1).sum(dim=1).tolist()
        recv_rows = recv_counts.sum(dim=1).tolist()
        topk = max(1, batch.topk_ids.shape[1])
        rows = batch.hidden_states.index_select(0, slots.pairs // topk)
        received = self._exchange_rows(rows, recv_rows, send_rows, "dispatch")
        # Received: by source rank, then local expert. Wanted: by local expert, then source rank.
        experts = torch.arange(self.num_local_experts).repeat(self._ep_size)
        labels = experts.repeat_interleave(recv_counts.flatten())
        order = torch.argsort(labels, stable=True).to(received.device)
        handle = _CollectiveHandle(batch, slots.pairs, order, send_rows, recv_rows)
        return received.index_select(0, order), recv_counts.sum(dim=0), handle

    def combine(self, expert_out: Tensor, handle: DispatchHandle) -> Tensor:
        """See Transport. COLLECTIVE. Raises PeerLost."""
        if not isinstance(handle, _CollectiveHandle):
            raise ConfigError(
                f"combine: handle of type {type(handle).__name__}; allowed: the one this "
                "transport's dispatch returned; next: pair dispatch and combine of one transport"
            )
        back = torch.empty_like(expert_out)
        back[handle.order] = expert_out
        rows = self._exchange_rows(back, handle.send_rows, handle.recv_rows, "combine")
        batch = handle.batch
        num_tokens, topk = batch.topk_ids.shape
        slot_outputs = rows.new_zeros(num_tokens * topk, expert_out.shape[1])
        slot_outputs[handle.pairs] = rows
        return weighted_sum(
            slot_outputs.view(num_tokens, topk, expert_out.shape[1]),
            batch.topk_ids,
            batch.topk_weights,
        )

    def _problem(self, batch: TokenBatch) -> Exception | None:
        """Why this rank's batch cannot be sent; found without talking to anybody."""
        hidden, ids, weights = batch.hidden_states, batch.topk_ids, batch.topk_weights
        if (
            hidden.dim() != 2
            or ids.dim() != 2
            or ids.shape != weights.shape
            or ids.shape[0] != hidden.shape[0]
            or hidden.dtype not in _DTYPES
            or ids.dtype not in (torch.int32, torch.int64)
        ):
            return ConfigError(
                f"dispatch: hidden_states {list(hidden.shape)} {hidden.dtype}, topk_ids "
                f"{list(ids.shape)} {ids.dtype}, topk_weights {list(weights.shape)}; allowed: [T, "
                "H] float, [T, K] int32 or int64, [T, K]; next: pass tensors of these shapes"
            )
        found = check_ids(ids, self.num_experts) if self._checked else None
        return ConfigError(found.sentence(self.num_experts)) if found else None

    def _exchange_counts(
        self, batch: TokenBatch, counts: Tensor, problem: Exception | None
    ) -> Tensor:
        """How many rows come from each rank for each local expert, int64 [P, L] on the host."""
        if self._group is None:
            if problem is not None:
                raise problem
            return counts.view(1, -1)
        hidden = batch.hidden_states
        dtype = _DTYPES.index(hidden.dtype) if hidden.dtype in _DTYPES else -1
        head = torch.tensor(
            [
                self._sequence,
                problem is not None,
                hidden.shape[-1] if hidden.dim() else 0,
                batch.topk_ids.shape[-1] if batch.topk_ids.dim() else 0,
                dtype,
                self.num_experts,
            ]
        )
        send = torch.cat(
            [head.expand(self._ep_size, -1), counts.view(self._ep_size, -1)], dim=1
        ).contiguous()
        received = torch.empty_like(send)
        what = f"dispatch {self._sequence}"
        self._all_to_all(received, send, None, None, what)
        if bool(received[:, 1].any()):
            agree_success(self._group, what, problem, self._timeout_s)
        self._compare_heads(received, what)
        return received[:, len(_HEAD) :]

    def _compare_heads(self, received: Tensor, what: str) -> None:
        own = received[group_rank(self._group)]
        for column, name in enumerate(_HEAD):
            if name != "problem" and not bool((received[:, column] == own[column]).all()):
                raise RankDisagreement(
                    f"{what}: ranks hold different values of {name} "
                    f"(by rank: {received[:, column].tolist()}); allowed: one value on all ranks; "
                    "next: give every rank the same model, and run every step on every rank"
                )

    def _exchange_rows(
        self, rows: Tensor, recv_rows: list[int], send_rows: list[int], what: str
    ) -> Tensor:
        if self._group is None:
            return rows
        # The group is only known to accept CPU tensors; other devices' rows pass through the host.
        send = rows.contiguous().cpu()
        received = send.new_empty(sum(recv_rows), rows.shape[1])
        self._all_to_all(received, send, recv_rows, send_rows, f"{what} {self._sequence}")
        return received.to(rows.device)

    def _all_to_all(
        self,
        received: Tensor,
        send: Tensor,
        recv_rows: list[int] | None,
        send_rows: list[int] | None,
        what: str,
    ) -> None:
        group = self._group
        assert group is not None
        run_work(
            lambda: dist.all_to_all_single(
                received, send, recv_rows, send_rows, group=group, async_op=True
            ),
            group,
            what,
            self._timeout_s,
        )
