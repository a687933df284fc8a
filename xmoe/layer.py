# SPDX-License-Identifier: Apache-2.0
"""One MoE layer on both paths, as items of the shared executor.

MegaMoe is one compute phase on its resource's channel; FusedMoE is recv (dispatch), compute
(grouped product) and send (combine). Which of the two runs comes from the runner's decision alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from xmoe.comm.agree import agree_success
from xmoe.comm.resource import MegaMoeCommResource
from xmoe.comm.transport import CollectiveTransport
from xmoe.config import XmoeConfig
from xmoe.errors import ConfigError
from xmoe.executor import Phase, PhaseContext, PhaseKind, StreamExecutor, WorkItem, prefetch
from xmoe.kernels.ops.fused_moe import expert_mlp
from xmoe.kernels.ops.mega_moe import MegaMoe
from xmoe.kernels.ops.routing import check_ids, clean_ids, pad_batch, unpad
from xmoe.multistream import StreamMode
from xmoe.policy.decision import Decision
from xmoe.types import ExpertWeights, MoeShape, Path, TokenBatch


class MoeLayer(Protocol):
    """The routed experts of one layer, over all ranks of the group.

    hidden_states [T, H] model dtype, topk_ids [T, K] int32 or int64 global ids (-1 = slot unused),
    topk_weights [T, K] float -> [T, H] in the dtype and of the length of the input, memory of its
    own. T may be 0 and may differ between ranks. The shared expert is not included. COLLECTIVE.
    """

    def __call__(self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Shared:
    """What all layers of one runner have in common.

    counts: from this rank's token count to all ranks' (collective outside of a step).
    launches: layer calls so far by path. resource: None when the decision is FusedMoE.
    """

    shape: MoeShape
    config: XmoeConfig
    group: ProcessGroup | None
    rank: int
    decision: Decision
    counts: Callable[[int], tuple[int, ...]]
    launches: dict[Path, int]
    executor: StreamExecutor
    transport: CollectiveTransport
    resource: MegaMoeCommResource | None


class TwoPathLayer:
    """One MoE layer on both paths over the same weights; see MoeLayer."""

    def __init__(
        self, shared: Shared, weights: ExpertWeights, index: int, fused: MegaMoe | None
    ) -> None:
        self._shared = shared
        self._weights = weights
        self._index = index
        self._fused = fused

    def __call__(self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        shared = self._shared
        batch = TokenBatch(hidden_states, topk_ids, topk_weights)
        num_tokens = hidden_states.shape[0] if hidden_states.dim() else 0
        counts = shared.counts(num_tokens)
        step = shared.decision.for_step(counts)
        shared.launches[step.path] += 1
        if step.path is Path.MEGA_MOE:
            announced = counts[shared.rank]
            return self._run_fused(self._prepared(batch, announced), step.rows_per_rank)
        return self._run_split(batch, counts)

    def _prepared(self, batch: TokenBatch, announced: int) -> TokenBatch:
        """The batch in the operator's types, or one error on all ranks before anything is
        launched.
        """
        shared = self._shared
        device = self._weights.gate_up.device
        problem = _problem(batch, shared.shape, announced, device, shared.config.validate_ids)
        if shared.config.validate_ids == "checked":
            what = f"layer {self._index}, before the launch"
            agree_success(shared.group, what, problem, shared.config.step_timeout_s)
        elif problem is not None:
            raise problem
        return clean_ids(batch, shared.shape.num_experts)[0]

    def _run_fused(self, batch: TokenBatch, rows: int) -> Tensor:
        """MegaMoe as one compute phase on its resource's channel."""
        shared, fused, resource = self._shared, self._fused, self._shared.resource
        assert fused is not None and resource is not None
        padded = pad_batch(batch, rows, shared.config.padding, num_experts=shared.shape.num_experts)

        def compute(context: PhaseContext) -> None:
            launch = resource.launch(
                context.stream, lambda stream: fused.launch(padded.batch, stream, padded.mask)
            )
            context.own(launch)
            context.values["output"] = launch.hidden_states

        phase = Phase(PhaseKind.COMPUTE, resource.channel, compute)
        ticket = shared.executor.submit(WorkItem("mega_moe", self._index, (phase,)))
        output: Tensor = ticket.result()["output"]
        return unpad(output, padded)

    def _run_split(self, batch: TokenBatch, counts: tuple[int, ...]) -> Tensor:
        """FusedMoE in one item, or, with overlap, in chunks of it.

        The number of chunks comes from all ranks' counts, so it is the same everywhere; a rank
        whose chunk is empty dispatches it all the same.
        """
        shared = self._shared
        if shared.executor.options.mode is not StreamMode.OVERLAP:
            ticket = shared.executor.submit(self._split_item(batch))
            output: Tensor = ticket.result()["output"]
            return output
        chunks = -(-max(counts) // shared.config.split_chunk_tokens)
        items = [self._split_item(part) for part in _chunks(batch, max(1, chunks))]
        tickets = prefetch(shared.executor, items)
        outputs = [ticket.result()["output"] for ticket in tickets]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _split_item(self, batch: TokenBatch) -> WorkItem:
        """Recv (dispatch), compute (grouped product) and send (combine)."""
        shared, shape, transport = self._shared, self._shared.shape, self._shared.transport

        def recv(context: PhaseContext) -> None:
            context.values["received"] = transport.dispatch(batch)

        def compute(context: PhaseContext) -> None:
            tokens, counts, handle = context.values.pop("received")
            expert_out = expert_mlp(
                tokens,
                counts.tolist(),
                self._weights,
                activation=shape.activation,
                clamp=shape.activation_clamp,
                layout=shape.gate_up_layout,
                deterministic=shared.config.deterministic,
            )
            context.values["computed"] = (expert_out, handle)

        def send(context: PhaseContext) -> None:
            context.values["output"] = transport.combine(*context.values.pop("computed"))

        phases = (
            Phase(PhaseKind.RECV, "fused_moe", recv),
            Phase(PhaseKind.COMPUTE, "experts", compute),
            Phase(PhaseKind.SEND, "fused_moe", send),
        )
        return WorkItem("fused_moe", self._index, phases)


def _chunks(batch: TokenBatch, count: int) -> list[TokenBatch]:
    """`count` parts of the rows, as even as possible, some maybe empty."""
    hidden, ids, weights = batch.hidden_states, batch.topk_ids, batch.topk_weights
    if min(hidden.dim(), ids.dim(), weights.dim()) < 1:
        return [batch] * count  # no batch at all: dispatch refuses it, on every rank
    edges = [hidden.shape[0] * n // count for n in range(count + 1)]
    edges[-1] = max(hidden.shape[0], ids.shape[0], weights.shape[0])  # lets a mismatch show
    return [
        TokenBatch(hidden[a:b], ids[a:b], weights[a:b])
        for a, b in zip(edges, edges[1:], strict=False)
    ]


def _problem(
    batch: TokenBatch,
    shape: MoeShape,
    announced: int,
    device: torch.device,
    validate_ids: str,
) -> Exception | None:
    """Why this rank's batch can't be launched; found without talking to anybody."""
    hidden, ids, weights = batch.hidden_states, batch.topk_ids, batch.topk_weights
    fits = (
        tuple(hidden.shape) == (announced, shape.hidden)
        and tuple(ids.shape) == (announced, shape.topk)
        and ids.shape == weights.shape
        and str(hidden.dtype) == f"torch.{shape.dtype}"
        and not ids.dtype.is_floating_point
        and weights.dtype.is_floating_point
    )
    if {hidden.device, ids.device, weights.device} != {device}:
        return ConfigError(
            f"hidden_states on {hidden.device}, topk_ids on {ids.device}, topk_weights on "
            f"{weights.device}; allowed: {device}, where the expert weights are; next: move them"
        )
    if not fits:
        return ConfigError(
            f"hidden_states {list(hidden.shape)} {hidden.dtype}, topk_ids {list(ids.shape)} "
            f"{ids.dtype}, "
            f"topk_weights {list(weights.shape)} {weights.dtype}; allowed: [{announced}, "
            f"{shape.hidden}] "
            f"{shape.dtype}, [{announced}, {shape.topk}] integer, [{announced}, {shape.topk}] "
            "float "
            f"({announced} tokens were announced for this step); next: correct the engine's batch"
        )
    if validate_ids == "checked":
        found = check_ids(ids, shape.num_experts)
        if found:
            return ConfigError(found.sentence(shape.num_experts))
    return None
