# SPDX-License-Identifier: Apache-2.0
"""How tokens get to their experts' ranks and back on the split path.

One protocol stands between executor and transport: `dispatch`, then `combine` with the handle that
dispatch returned. CollectiveTransport implements it over torch.distributed.

What the host waits for in a dispatch of npu tensors is one copy of E + 1 numbers: an all-to-all
takes its row counts from the host. combine waits for nothing.
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
    as_peer_lost,
    group_rank,
    group_size,
    lost_ranks,
    peer_lost,
    require_equal,
    run_work,
)
from xmoe.comm.fence import wait_event
from xmoe.errors import AclError, ConfigError, FenceTimeout, RankDisagreement
from xmoe.kernels.capability import NpuOperators
from xmoe.kernels.device import Device, InlineDevice
from xmoe.kernels.ops.fused_moe import route_rows, sum_rows
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
            recv_tokens [R, H] sorted by local expert, tokens_per_expert int64 [L] on the host or
            where the rows are, handle.
        """

    def combine(self, expert_out: Tensor, handle: DispatchHandle) -> Tensor:
        """Bring the rows [R, H] back and add them up: hidden_states [T, H], new memory."""


@dataclass(frozen=True)
class _CollectiveHandle(DispatchHandle):
    batch: TokenBatch
    places: Tensor  # int32 [T * K]: where slot t * K + k stands among the rows sent
    back: Tensor  # int64 [R]: for each row received, its place among those handed to the experts
    send_rows: list[int]
    recv_rows: list[int]


_NO_OPERATORS = NpuOperators()


class CollectiveTransport:
    """Dispatch and combine by all-to-all over a process group; needs nothing but torch. COLLECTIVE.

    Experts lie on ranks in blocks: expert g on rank g // L. Rows of an expert are ordered by source
    rank, then token, then slot. Raw expert rows travel back; the weighted sum happens on the
    token's own rank in slot order, so it does not depend on the EP size. Row counts pass through
    the host. Rows on an npu travel by HCCL when the group has it, else through the host.

    Args:
        group: EP group that accepts CPU tensors, or None for EP 1.
        num_experts: E, a multiple of the group's size.
        validate_ids: "checked" raises ConfigError on every rank, before any row is sent, when some
            rank has ids out of range or repeated in a row; "drop" leaves such slots out and counts
            them in `dropped_slots`.
        timeout_s: seconds for each of the host's waits, for peers and for the device.
        device: of the rows; None for CPU tensors.
    """

    def __init__(
        self,
        group: ProcessGroup | None,
        num_experts: int,
        *,
        validate_ids: str = "drop",
        timeout_s: float = DEFAULT_TIMEOUT_S,
        operators: NpuOperators = _NO_OPERATORS,
        device: Device | None = None,
    ) -> None:
        ep_size = group_size(group)
        if num_experts < 1 or num_experts % ep_size:
            raise ConfigError(
                f"num_experts={num_experts} cannot be divided among ep_size={ep_size} ranks; "
                "allowed: a multiple of ep_size; next: choose an EP size that divides the number "
                "of experts"
            )
        if validate_ids not in ("drop", "checked"):
            raise ConfigError(
                f"validate_ids={validate_ids!r}; allowed: drop, checked; next: correct the setting"
            )
        self.num_experts = num_experts
        self.num_local_experts = num_experts // ep_size
        self.dropped_slots = 0
        self._group = group
        self._ep_size = ep_size
        self._checked = validate_ids == "checked"
        self._timeout_s = timeout_s
        self._operators = operators
        self._has_hccl = group is not None and "npu:" in dist.get_backend_config(group)
        self._sequence = 0
        require_equal(group, "transport", {"num_experts": num_experts}, timeout_s)
        self._device = InlineDevice() if device is None else device
        self._known = self._device.create_event()

    def dispatch(
        self, batch: TokenBatch, problem: Exception | None = None
    ) -> tuple[Tensor, Tensor, DispatchHandle]:
        """See Transport. COLLECTIVE.

        Args:
            problem: why the caller cannot take part; raised on all ranks instead.

        Raises:
            ConfigError, RankDisagreement, PeerLost.
            AclError, FenceTimeout: what the device had to do before failed, or did not end in time;
            `translate` gives it a lost peer's name.
        """
        self._sequence += 1
        problem = problem or _batch_problem(batch)
        counts = torch.zeros(self.num_experts, dtype=torch.int64)
        if problem is None:
            given = batch.topk_ids
            batch, changed = clean_ids(batch, self.num_experts)
            routed = route_rows(
                batch.hidden_states, batch.topk_ids, self.num_experts, self._operators
            )
            # The one wait: everything the host has to know, in one copy.
            known = self._to_host(torch.cat([routed.counts, changed.reshape(1)]))
            counts, dropped = known[:-1], int(known[-1])
            if dropped and self._checked:
                found = check_ids(given, self.num_experts)
                problem = ConfigError(found.sentence(self.num_experts))
                counts = torch.zeros_like(counts)
            self.dropped_slots += dropped
        recv_counts = self._exchange_counts(batch, counts, problem)
        send_rows = counts.view(self._ep_size, -1).sum(dim=1).tolist()
        recv_rows = recv_counts.sum(dim=1).tolist()
        sent = routed.rows[: sum(send_rows)]
        received = self._exchange_rows(sent, recv_rows, send_rows, "dispatch")
        order, back, per_expert = self._orders(recv_counts, received.device)
        handle = _CollectiveHandle(batch, routed.places, back, send_rows, recv_rows)
        return received.index_select(0, order), per_expert, handle

    def translate(self, error: Exception) -> Exception:
        """PeerLost for a failure of device work behind which a peer is lost, else the error itself.
        Local.
        """
        kinds = (AclError, FenceTimeout, RuntimeError)
        if isinstance(error, kinds) and lost_ranks(self._group):
            return peer_lost(self._group, "split path", str(error))
        return as_peer_lost(error, self._group, "split path")

    def close(self) -> None:
        """Release what it made; twice is harmless. Local."""
        self._known.close()

    def _to_host(self, values: Tensor) -> Tensor:
        """A copy on the host. The copy alone would wait for a dead peer without a limit of ours."""
        if values.device.type == "cpu":
            return values
        self._known.record(self._device.current_stream())
        wait_event(
            self._known, self._timeout_s, f"dispatch {self._sequence}, the device's work before it"
        )
        return values.cpu()

    def _orders(self, recv_counts: Tensor, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """(order, its inverse, rows of each local expert), int64, the first two on `device`.

        Received: by source rank, then local expert. Wanted: by local expert, then source rank.
        """
        experts = torch.arange(self.num_local_experts).repeat(self._ep_size)
        labels = experts.repeat_interleave(recv_counts.flatten())
        order = torch.argsort(labels, stable=True)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
        per_expert = recv_counts.sum(dim=0)
        if device.type == "cpu":
            return order, back, per_expert
        # One copy that the host does not wait for; the allocator of pinned memory keeps it until
        # then.
        packed = torch.cat([order, back, per_expert]).pin_memory().to(device, non_blocking=True)
        order, back, there = packed.split([len(order), len(order), self.num_local_experts])
        return order, back, there if self._operators.grouped_matmul else per_expert

    def combine(self, expert_out: Tensor, handle: DispatchHandle) -> Tensor:
        """See Transport. COLLECTIVE. Raises PeerLost."""
        if not isinstance(handle, _CollectiveHandle):
            raise ConfigError(
                f"combine: handle of type {type(handle).__name__}; allowed: the one this "
                "transport's dispatch returned; next: pair dispatch and combine of one transport"
            )
        batch = handle.batch
        rows = expert_out.new_empty(batch.topk_ids.numel(), expert_out.shape[1])
        used = sum(handle.send_rows)
        rows[used:].zero_()  # unused slots
        self._exchange_rows(
            expert_out.index_select(0, handle.back), handle.send_rows, handle.recv_rows, "combine",
            into=rows[:used],
        )  # fmt: skip
        return sum_rows(rows, handle.places, batch.topk_ids, batch.topk_weights, self._operators)

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
        self,
        rows: Tensor,
        recv_rows: list[int],
        send_rows: list[int],
        what: str,
        into: Tensor | None = None,
    ) -> Tensor:
        """All-to-all of rows; the result is new memory, or `into` of as many rows."""
        if self._group is None:
            return rows if into is None else into.copy_(rows)
        if rows.device.type != "cpu" and not self._has_hccl:
            # The group only accepts CPU tensors.
            host = self._exchange_rows(rows.cpu(), recv_rows, send_rows, what)
            return host.to(rows.device) if into is None else into.copy_(host)
        if into is None:
            into = rows.new_empty(sum(recv_rows), rows.shape[1])
        label = f"{what} {self._sequence}"
        self._all_to_all(into, rows.contiguous(), recv_rows, send_rows, label)
        return into

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
        if send.device.type != "cpu":
            # Queued on the current stream like any operator; waiting for it is the reader's affair.
            dist.all_to_all_single(received, send, recv_rows, send_rows, group=group)
            return
        run_work(
            lambda: dist.all_to_all_single(
                received, send, recv_rows, send_rows, group=group, async_op=True
            ),
            group,
            what,
            self._timeout_s,
        )


def _batch_problem(batch: TokenBatch) -> Exception | None:
    """Why this rank's batch cannot be sent, by devices, shapes and types. Whatever torch would
    refuse later would leave the peers waiting."""
    hidden, ids, weights = batch.hidden_states, batch.topk_ids, batch.topk_weights
    if not hidden.device == ids.device == weights.device:
        return ConfigError(
            f"dispatch: hidden_states on {hidden.device}, topk_ids on {ids.device}, topk_weights "
            f"on {weights.device}; allowed: one device; next: move them"
        )
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
    return None
