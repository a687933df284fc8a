# SPDX-License-Identifier: Apache-2.0
"""What the tests of the fused operator share: weights and batches by seed, and one rank's set-up.

Parent and ranks make the same tensors from seeds, so that only small results cross the fork.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import numpy as np
import torch
from torch.distributed import ProcessGroup

from xmoe.comm.agree import exchange_step
from xmoe.comm.resource import MegaMoeCommResource, ResourceSpec
from xmoe.executor import (
    ExecutorOptions,
    Phase,
    PhaseContext,
    PhaseKind,
    StreamExecutor,
    Ticket,
    WorkItem,
)
from xmoe.kernels.acl.loader import load
from xmoe.kernels.acl.toolkit import find_toolkit
from xmoe.kernels.device import HostDevice
from xmoe.kernels.ops.launch_rows import LaunchRows
from xmoe.kernels.ops.mega_moe import MegaMoe
from xmoe.reference import bf16_error_bound, moe_reference
from xmoe.types import ExpertWeights, FenceMode, MoeShape, TokenBatch

HIDDEN, INTER = 1024, 512


def experts(first: int, count: int) -> ExpertWeights:
    """Experts first..first+count-1; each from its own seed."""
    gate_up = torch.empty(count, HIDDEN, 2 * INTER, dtype=torch.bfloat16)
    down = torch.empty(count, INTER, HIDDEN, dtype=torch.bfloat16)
    for i in range(count):
        g = torch.Generator().manual_seed(1000 + first + i)
        gate_up[i] = torch.randn(HIDDEN, 2 * INTER, generator=g) / 32
        down[i] = torch.randn(INTER, HIDDEN, generator=g) / 24
    return ExpertWeights(gate_up, down)


def batch(tokens: int, num_experts: int, topk: int, seed: int) -> TokenBatch:
    g = torch.Generator().manual_seed(seed)
    ids = torch.rand(tokens, num_experts, generator=g).argsort(dim=1)[:, :topk]
    return TokenBatch(
        torch.randn(tokens, HIDDEN, generator=g).to(torch.bfloat16),
        ids.to(torch.int32).contiguous(),
        torch.rand(tokens, topk, generator=g),
    )


def check(outputs: Sequence[torch.Tensor], batches: Sequence[TokenBatch], num_experts: int) -> None:
    """Every element within the bound that the operator's rounding points allow."""
    weights = experts(0, num_experts)
    arrays = (weights.gate_up.float().numpy(), weights.down.float().numpy())
    x, ids, w = (
        np.concatenate([getattr(b, name).float().numpy() for b in batches])
        for name in ("hidden_states", "topk_ids", "topk_weights")
    )
    ids = ids.astype(np.int64)
    want = moe_reference(x, ids, w, *arrays)
    bound = bf16_error_bound(x, ids, w, *arrays)
    got = np.concatenate([y.float().numpy() for y in outputs]).astype(np.float64)
    assert got.shape == want.shape
    assert (np.abs(got - want) <= bound).all(), np.abs(got - want).max()


def spec(num_experts: int, topk: int, capacity: int, **changes) -> ResourceSpec:
    shape = MoeShape(HIDDEN, INTER, num_experts, topk)
    values = {"ccl_buffer_mb": 14, "fence_timeout_s": 20.0, "step_timeout_s": 20.0, **changes}
    return ResourceSpec(shape, capacity, **values)


class Rank:
    """One rank with device, resource, executor and one layer. Close it, or use `with`."""

    def __init__(
        self,
        rank: int,
        group: ProcessGroup,
        num_experts: int = 8,
        topk: int = 2,
        capacity: int = 8,
        *,
        fence: FenceMode = FenceMode.STREAM,
        padding: str = "zero_weight",
        max_inflight: int = 1,
        **changes,
    ) -> None:
        self.group, self.num_experts, self.padding = group, num_experts, padding
        self.sequence = 0
        self.stack = contextlib.ExitStack()
        self.device = self.stack.enter_context(HostDevice(load(find_toolkit("soft")), rank))
        asked = spec(num_experts, topk, capacity, fence=fence, **changes)
        self.resource = self.stack.enter_context(
            MegaMoeCommResource.acquire(group, self.device, asked)
        )
        local = num_experts // self.resource.handle.ep_size
        with self.device.bind():
            self.op = MegaMoe(
                self.device.runtime,
                self.resource.handle,
                experts(rank * local, local),
                num_experts,
                self.resource.workspace,
            )
        self.stack.callback(self.op.close)
        self.executor = self.stack.enter_context(
            StreamExecutor(
                self.device,
                ExecutorOptions(max_inflight=max_inflight),
                translate=self.resource.translate,
            )
        )

    def submit(self, tokens: TokenBatch | None, *, error: Exception | None = None) -> Ticket:
        """One step: equal rows by the group's maximum, then the fused operator."""
        if tokens is None:
            tokens = batch(0, self.num_experts, 2, 0)
        self.sequence += 1
        counts = exchange_step(
            self.group, tokens.hidden_states.shape[0], self.sequence, error, timeout_s=20
        )
        capacity = max(1, *counts)
        self.resource.require_rows(capacity)
        # Rows of its own for each step: several may be on their way here.
        made = LaunchRows(
            capacity,
            HIDDEN,
            tokens.topk_ids.shape[1],
            self.num_experts,
            local_experts=self.num_experts // self.resource.handle.ep_size,
            padding=self.padding,
        )
        padded, mask, output = made.fill(tokens, capacity)

        def run(context: PhaseContext) -> None:
            launch = self.resource.launch(
                context.stream,
                lambda stream: self.op.launch(
                    padded, stream, mask, output=output, counts=made.tokens_per_expert
                ),
            )
            context.keep(launch)
            context.values.update(
                y=launch.hidden_states, counts=launch.tokens_per_expert, made=made, rows=counts
            )
            context.values["tokens"] = tokens.hidden_states

        phase = Phase(PhaseKind.COMPUTE, self.resource.channel, run)
        return self.executor.submit(WorkItem("mega_moe", 0, (phase,)))

    def result(self, ticket: Ticket) -> torch.Tensor:
        values = ticket.result()
        out: torch.Tensor = values["made"].finish(torch.empty_like(values["tokens"]))
        return out

    def run(self, tokens: TokenBatch | None) -> torch.Tensor:
        return self.result(self.submit(tokens))

    def close(self) -> None:
        self.stack.close()

    def __enter__(self) -> Rank:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def padding_counts(
    tokens: Sequence[int], rows: int, topk: int, padding: str, num_experts: int
) -> torch.Tensor:
    """Rows per expert that the padding of all ranks added, int64 [E]: row r of the padding names
    the experts r * K, r * K + 1, ... An operator counts every row it saw."""
    counts = torch.zeros(num_experts, dtype=torch.int64)
    for own in tokens:
        last = rows if padding == "zero_weight" else max(own, 1 if own == 0 else 0)
        for row in range(own, last):
            for slot in range(topk):
                counts[(row * topk + slot) % num_experts] += 1
    return counts
