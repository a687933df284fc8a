# SPDX-License-Identifier: Apache-2.0
"""The operators of CAMP2P and CAMAsync as typed protocols.

An adaptor implements them (host: `xmoe.kernels.ops.cam.host`); connectors and the executor know
only these. All launches are asynchronous: outputs may be read, and inputs changed or freed, only
after the stream was seen to have passed the launch. Operators keep raw addresses, no references.

`stream` is the device stream's raw handle. `group` is the name of an HCCL communicator.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from xmoe.kernels.ops.cam.topology import CamAsyncTopology, CamP2PTopology

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class A2EOutput:
    """Outputs of a2e. `hidden_states` [T, H] on an FFN rank, a [1, 1] dummy on an Attention rank.

    `atten_batch_size` int32 [ratio] and `x_active_mask` bool [ratio] are never written by the
    kernels: e2a wants the tensor, nobody may read its values.
    """

    hidden_states: Tensor
    sim_expert_ids: Tensor
    sim_scales: Tensor
    atten_batch_size: Tensor
    x_active_mask: Tensor


@dataclass
class DispatchItem:
    """Outputs of one dispatch_recv: full-capacity buffers, of which a prefix is filled.

    hidden_states [N, H] model dtype, or int8 with dynamic quantisation; scales float32 [N] (else
    [1]); batch_info int64: rows of the whole dispatch, first Attention rank (-1: shutdown item),
    layer, first and last expert slot of this chunk, S prefixes, S x slots counts; tokens_per_expert
    int64 [experts_per_rank], this chunk only. The shared fields exist in the older set only.
    """

    hidden_states: Tensor
    scales: Tensor
    batch_info: Tensor
    tokens_per_expert: Tensor
    shared_hidden_states: Tensor | None = None
    shared_scales: Tensor | None = None
    shared_count: Tensor | None = None


class CamP2POps(Protocol):
    """a2e and e2a of one rank. In one group both roles launch a2e, e2a, a2e ... in the same total
    order."""

    @property
    def topology(self) -> CamP2PTopology:
        """This rank's place."""
        ...

    def empty_a2e(self, num_tokens: int) -> A2EOutput | None:
        """Uninitialised outputs for `a2e`, for a caller that owns them; None where each call makes
        its own (torch operators have no form with outputs)."""
        ...

    def a2e(
        self,
        group: str,
        hidden_states: Tensor | None,
        num_tokens: int,
        *,
        stream: int,
        out: A2EOutput | None = None,
    ) -> A2EOutput:
        """Attention: send [T, H] rows. FFN: receive; `num_tokens` is the sum over its peers, which
        must all send the same number of rows."""
        ...

    def e2a(
        self, group: str, hidden_states: Tensor, atten_batch_size: Tensor, *, stream: int
    ) -> Tensor:
        """FFN: send the [T, H] result back, returns a dummy. Attention: returns its [T, H] result;
        `hidden_states` gives the number of rows."""
        ...


class CamAsyncOps(Protocol):
    """The four asynchronous operators of one rank. One dispatch per Attention rank and group is
    outstanding at most; receives share one stream; sends of one Attention group keep the order of
    receives."""

    @property
    def topology(self) -> CamAsyncTopology:
        """This rank's place."""
        ...

    @property
    def shared_expert(self) -> bool:
        """Whether receive outputs and combine_send carry a shared expert (the older set)."""
        ...

    def empty_item(self, capacity: int | None = None) -> DispatchItem | None:
        """Uninitialised outputs for `dispatch_recv`, for a caller that owns them. `capacity` in
        rows; None asks the operators. None where each call makes its own."""
        ...

    def dispatch_send(
        self, group: str, hidden_states: Tensor, topk_ids: Tensor, layer: int, *, stream: int
    ) -> None:
        """Attention: send [T, H] rows to the ranks of their experts. T may not be 0."""
        ...

    def dispatch_recv(
        self,
        group: str,
        *,
        stream: int,
        out: DispatchItem | None = None,
        stop: Tensor | None = None,
    ) -> DispatchItem:
        """FFN: receive the next item, chosen by the device. Spins on all vector cores until one
        comes. `stop`: a 16-element buffer that ends the wait once its first int64 is not zero."""
        ...

    def combine_send(
        self,
        group: str,
        expert_out: Tensor,
        batch_info: Tensor,
        *,
        stream: int,
        shared_out: Tensor | None = None,
    ) -> None:
        """FFN: send the rows of one item back, unweighted. Model dtype, never int8; at least one
        row, also when no token was routed here."""
        ...

    def combine_recv(
        self, group: str, topk_ids: Tensor, topk_weights: Tensor, *, stream: int
    ) -> Tensor:
        """Attention: wait for all FFN ranks, weight and sum. Returns [T, H]."""
        ...


class ReadinessProbe(Protocol):
    """A gate for dispatch_recv that holds no cores and no stream."""

    def ready(self, topology: CamAsyncTopology, group: str) -> int:
        """How many Attention groups have a dispatch waiting in this FFN rank's window."""
        ...


class HostCopy(Protocol):
    """Pinned host memory of one slot for the words of a small int64 tensor."""

    def queue(self, words: Tensor, stream: int) -> None:
        """Copy `words` (none of them is the smallest int64) in the order of `stream`. Does not
        wait."""
        ...

    @property
    def arrived(self) -> bool:
        """Whether the last copy was made, as the memory itself shows. Does not wait, or ask the
        device; no order of other memory follows from it."""
        ...

    def read(self) -> list[int]:
        """What the last copy brought; only after the stream was seen to have passed it."""
        ...
