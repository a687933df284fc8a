# SPDX-License-Identifier: Apache-2.0
"""One MoE layer on both paths.

MegaMoe is one launch in stream order (`xmoe.fused`); FusedMoE is `xmoe.split`. Which of the two
runs comes from the runner's decision alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from xmoe.comm.agree import agree_success
from xmoe.config import XmoeConfig
from xmoe.errors import ConfigError
from xmoe.fused import FusedStep
from xmoe.kernels.ops.fused_moe import SplitExperts
from xmoe.kernels.ops.mega_moe import MegaMoe
from xmoe.kernels.ops.routing import check_ids
from xmoe.policy.decision import Decision
from xmoe.split import SplitPath
from xmoe.types import ExpertWeights, MoeShape, Path, TokenBatch


class MoeLayer(Protocol):
    """The routed experts of one layer, over all ranks of the group.

    hidden_states [T, H] model dtype, topk_ids [T, K] int32 or int64 global ids (-1 = slot unused),
    topk_weights [T, K] float -> [T, H] in the dtype and of the length of the input. T may be 0 and
    may differ between ranks. The shared expert is not included. COLLECTIVE.

    out: [T, H], contiguous, in the input's dtype and on its device: written and returned. Without
    it the result is memory of its own, the only allocation of a fused call.

    On npu tensors the result of a fused call is ready in the order of the caller's current stream,
    and the host waits for nothing; on CPU tensors it is ready on return.

    Ids that are out of range or repeated in their row count as unused; `MoeRunner.stats` says how
    many there were. With validate_ids "checked" they are an error on all ranks instead, found by a
    host read and a collective in each call. A batch of another shape, type or device than announced
    is a ConfigError: on the split path on all ranks, before a row is sent; on the fused one on this
    rank, while its peers' call goes on without its tokens. A call while the current stream is
    captured into a graph is a ConfigError too, and nothing was queued.
    """

    def __call__(
        self,
        hidden_states: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        out: Tensor | None = None,
    ) -> Tensor: ...


@dataclass(frozen=True)
class Shared:
    """What all layers of one runner have in common.

    counts: from this rank's token count to all ranks' (collective outside of a step).
    launches: layer calls so far by path. fused: None when the decision is FusedMoE.
    """

    shape: MoeShape
    config: XmoeConfig
    group: ProcessGroup | None
    rank: int
    decision: Decision
    counts: Callable[[int], tuple[int, ...]]
    launches: dict[Path, int]
    split: SplitPath
    fused: FusedStep | None


class TwoPathLayer:
    """One MoE layer on both paths over the same weights; see MoeLayer."""

    def __init__(
        self, shared: Shared, weights: ExpertWeights, index: int, op: MegaMoe | None
    ) -> None:
        self._shared = shared
        self._weights = weights
        self._index = index
        self._op = op
        self._experts: SplitExperts | None = None
        if op is None:
            self._split_experts()

    def __call__(
        self,
        hidden_states: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        out: Tensor | None = None,
    ) -> Tensor:
        shared = self._shared
        if shared.split.device.capturing():
            raise _captured(self._index)
        batch = TokenBatch(hidden_states, topk_ids, topk_weights)
        num_tokens = hidden_states.shape[0] if hidden_states.dim() else 0
        counts = shared.counts(num_tokens)
        step = shared.decision.for_step(counts)
        shared.launches[step.path] += 1
        device = self._weights.gate_up.device
        problem = _problem(batch, out, shared.shape, counts[shared.rank], device)
        if step.path is Path.MEGA_MOE:
            return self._run_fused(batch, problem, step.rows_per_rank, out)
        output = shared.split.run(self._split_experts(), batch, counts, self._index, problem)
        return output if out is None else out.copy_(output)

    def _run_fused(
        self, batch: TokenBatch, problem: Exception | None, rows: int, out: Tensor | None
    ) -> Tensor:
        shared, fused, op, index = self._shared, self._shared.fused, self._op, self._index
        assert fused is not None and op is not None
        if out is None and problem is None:
            try:
                hidden = batch.hidden_states
                out = torch.empty_like(hidden, memory_format=torch.contiguous_format)
            except RuntimeError as error:  # no memory left
                problem = error
        if shared.config.validate_ids == "checked":
            if problem is None and (found := check_ids(batch.topk_ids, shared.shape.num_experts)):
                problem = ConfigError(found.sentence(shared.shape.num_experts))
            what = f"layer {index}, before the launch"
            agree_success(shared.group, what, problem, shared.config.step_timeout_s)
        elif problem is not None:
            # The peers launch, and a launch without this rank would never end.
            fused.run(op, None, rows, None, index)
            raise problem
        assert out is not None
        fused.run(op, batch, rows, out, index)
        return out

    def _split_experts(self) -> SplitExperts:
        """Made with the layer when the decision is FusedMoE, else for the first step that needs it:
        what a device cannot do on the path that never runs is no reason to refuse."""
        if self._experts is None:
            self._experts = self._shared.split.experts(self._weights)
        return self._experts


def _captured(index: int) -> ConfigError:
    return ConfigError(
        f"layer {index} was called while the current stream is captured into a graph; allowed: "
        "eager calls, since all ranks agree on the host about each step's rows, which a replay "
        "would not repeat; next: leave the MoE layers out of the captured region"
    )


def _problem(
    batch: TokenBatch, out: Tensor | None, shape: MoeShape, announced: int, device: torch.device
) -> Exception | None:
    """Why this rank's batch can't be launched; found without talking to anybody, or to a device."""
    hidden, ids, weights = batch.hidden_states, batch.topk_ids, batch.topk_weights
    if not hidden.device == ids.device == weights.device == device:
        return ConfigError(
            f"hidden_states on {hidden.device}, topk_ids on {ids.device}, topk_weights on "
            f"{weights.device}; allowed: {device}, where the expert weights are; next: move them"
        )
    if not (
        hidden.shape == (announced, shape.hidden)
        and ids.shape == weights.shape == (announced, shape.topk)
        and hidden.dtype is getattr(torch, shape.dtype)
        and (ids.dtype is torch.int64 or ids.dtype is torch.int32)
        and weights.dtype.is_floating_point
    ):
        return ConfigError(
            f"hidden_states {list(hidden.shape)} {hidden.dtype}, topk_ids {list(ids.shape)} "
            f"{ids.dtype}, topk_weights {list(weights.shape)} {weights.dtype}; allowed: "
            f"[{announced}, {shape.hidden}] {shape.dtype}, [{announced}, {shape.topk}] int32 or "
            f"int64, [{announced}, {shape.topk}] float ({announced} tokens were announced for this "
            "step); next: correct the engine's batch"
        )
    if out is not None and not (
        out.shape == hidden.shape
        and out.dtype is hidden.dtype
        and out.device == device
        and out.is_contiguous()
        and (not out.is_inference() or torch.is_inference_mode_enabled())
    ):
        return ConfigError(
            f"out is {list(out.shape)} {out.dtype} on {out.device} with strides "
            f"{list(out.stride())}{', made in inference mode' if out.is_inference() else ''}; "
            f"allowed: {list(hidden.shape)} {hidden.dtype} on {device}, contiguous, which may be "
            "written to in this mode; next: make it with torch.empty_like(hidden_states)"
        )
    return None
