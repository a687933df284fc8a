# SPDX-License-Identifier: Apache-2.0
"""Integer weights on npu tensors: MegaMoe's launch, and the split path on torch_npu's operators."""

from __future__ import annotations

import functools
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch

from support.npu import child, join_group
from support.quant import Matrices, QuantLayer, emulate
from support.vendor import Batch
from xmoe.config import XmoeConfig
from xmoe.kernels import capability
from xmoe.kernels.ops.npu_quant import NpuIntegerExperts
from xmoe.kernels.ops.quant import dequantise_experts, load, quantise_experts
from xmoe.ranks import RankContext, run_ranks
from xmoe.reference import INT8_ROW_TOLERANCE, int8_error_bound, moe_reference, row_errors
from xmoe.runner import MoeRunner
from xmoe.types import ExpertWeights, MoeShape, Path

HIDDEN, INTER, EXPERTS, TOPK = 1024, 512, 8, 2
DEADLINE_S = 120.0
COUNTS = [5, 3]
KINDS = ["w8a8", "w4a8"]


@functools.cache
def experts(kind: str) -> ExpertWeights:
    make = torch.Generator().manual_seed(23)
    gate_up = torch.randn(EXPERTS, HIDDEN, 2 * INTER, generator=make) * 0.03
    down = torch.randn(EXPERTS, INTER, HIDDEN, generator=make) * 0.04
    return quantise_experts(gate_up.bfloat16(), down.bfloat16(), kind)


def changed(weights: ExpertWeights, how: Any) -> ExpertWeights:
    held = {field.name: getattr(weights, field.name) for field in fields(weights)}
    return replace(weights, **{k: how(v) for k, v in held.items() if torch.is_tensor(v)})


def batch_of(rank: int) -> Batch:
    """One token of zeros, which must stay zero and disturb nobody."""
    made = Batch.random(COUNTS[rank], TOPK, EXPERTS, HIDDEN, 40 + rank)
    made.x[1] = 0
    return made


def tensors(batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    hidden = torch.from_numpy(batch.x.view(np.int16).copy()).view(torch.bfloat16)
    return hidden, torch.from_numpy(batch.ids.copy()), torch.from_numpy(batch.weights.copy())


@functools.cache
def as_layer(kind: str) -> QuantLayer:
    """The prepared weights in the emulation's form."""
    whole = experts(kind)

    def part(stored: torch.Tensor, scales: torch.Tensor | None) -> Matrices:
        assert scales is not None
        bits = scales.numpy().astype(np.uint64).astype(np.uint32)
        return Matrices(load(stored, kind).numpy(), bits.view(np.float32))

    first = part(whole.gate_up, whole.gate_up_scales)
    return QuantLayer(first, part(whole.down, whole.down_scales), kind == "w4a8")


def run(context: RankContext, kind: str, where: str) -> dict[str, Any]:
    """Bits of the output by path: MegaMoe, the device's operators, torch operators alone."""
    device = torch.device("npu", context.rank) if where == "npu" else torch.device("cpu")
    group = join_group(context, where == "npu", where == "npu")
    share = EXPERTS // context.size
    mine = slice(context.rank * share, (context.rank + 1) * share)
    local = changed(experts(kind), lambda one: one[mine].clone().to(device))
    before = changed(local, lambda one: one.clone())
    found = {}
    for name, mode in (("mega_moe", "on"), ("operators", "off"), ("torch", "off")):
        if name == "torch":
            capability._npu_operators[:] = [capability.NpuOperators()]
        config = XmoeConfig.from_mapping({"mode": mode, "step_timeout_s": DEADLINE_S})
        shape = MoeShape(HIDDEN, INTER, EXPERTS, TOPK, quant=kind)
        with MoeRunner.create(shape, config, group=group, device=device) as runner:
            assert runner.decision.path is (Path.MEGA_MOE if mode == "on" else Path.FUSED_MOE)
            layer = runner.layer(local, 0)
            output = layer(*(one.to(device) for one in tensors(batch_of(context.rank)))).cpu()
            found[name] = output.view(torch.int16).numpy().view(np.uint16)
            used = layer._experts is not None and layer._experts._integers is not None
            assert used == (name == "operators" and where == "npu")
    for field in fields(local):
        left, right = getattr(local, field.name), getattr(before, field.name)
        assert not torch.is_tensor(left) or torch.equal(left.cpu(), right.cpu())
    return found


def moved(device: torch.device) -> bool:
    """Bits of the experts before and after their weights got other memory."""
    local = changed(experts("w8a8"), lambda one: one.clone().to(device))
    one = NpuIntegerExperts(
        local, capability.npu_operators(), activation="swiglu", clamp=None, layout="concatenated"
    )
    rows = tensors(batch_of(0))[0].to(device)
    counts = [len(rows)] + [0] * (EXPERTS - 1)
    want = one(rows, counts).cpu()
    for weight in (local.gate_up, local.down):
        old = weight.detach()
        weight.data = weight.clone()
        old.zero_()
    return torch.equal(one(rows, counts).cpu(), want) and bool(want.any())


def test_integer_experts_follow_weights_that_move() -> None:
    assert child(moved)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", KINDS)
def test_integer_weights_on_npu_tensors(kind: str) -> None:
    gate_up, down = (one.double().numpy() for one in dequantise_experts(experts(kind)))
    npu = run_ranks(run, 2, kind, "npu", silence_s=DEADLINE_S)
    host = run_ranks(run, 2, kind, "host", silence_s=DEADLINE_S)
    for rank, found in enumerate(npu):
        batch = batch_of(rank)
        hidden, ids, scales = (one.numpy() for one in (t.double() for t in tensors(batch)))
        args = (hidden, batch.ids, scales, gate_up, down)
        want = moe_reference(*args)
        bound = int8_error_bound(*args, int4_weights=kind == "w4a8")
        # The launch is the operator's own arithmetic; so are torch operators on either device.
        np.testing.assert_array_equal(found["mega_moe"], emulate(batch, as_layer(kind)))
        np.testing.assert_array_equal(found["torch"], host[rank]["torch"])
        for name, bits in found.items():
            y = (bits.astype(np.uint32) << 16).view(np.float32)
            assert (row_errors(y, want) <= INT8_ROW_TOLERANCE).all(), name
            assert not y[1].any(), name
            assert (np.abs(y - want) <= bound).all(), name
        assert (found["operators"] != found["mega_moe"]).any()


def answer(context: RankContext, kind: str) -> dict[str, str]:
    """One sum by each path, from the shipped checkpoint quantised as it is loaded."""
    from xmoe.models.checkpoints import shipped_checkpoint
    from xmoe.models.qwen3_5.engine_transformers import load_model
    from xmoe.models.qwen3_5.greedy import GreedySession

    device, group = torch.device("npu", context.rank), join_group(context, True)
    runners: dict[str, MoeRunner] = {}
    layers: list[tuple[int, ExpertWeights]] = []
    path = "on"
    made: dict[tuple[str, int], Any] = {}

    def make_layer(index: int, weights: ExpertWeights) -> Any:
        assert weights.quant == kind and weights.gate_up.device == device
        layers.append((index, weights))
        return lambda *args: made[path, index](*args)

    loaded = load_model(
        shipped_checkpoint(), context.rank, context.size, make_layer, device=device, quant=kind
    )
    turn = [{"role": "user", "content": "What is 123 plus 456?"}]
    text = loaded.tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    found = {}
    for path in ("on", "off"):
        config = XmoeConfig.from_mapping({"mode": path, "step_timeout_s": DEADLINE_S})
        with MoeRunner.create(loaded.shape, config, group=group, device=device) as runner:
            runners[path] = runner
            made.update({(path, index): runner.layer(one, index) for index, one in layers})
            session = GreedySession(loaded)
            session.start(loaded.tokenizer.encode(text, add_special_tokens=False), 8)
            while True:
                with runner.step(session.num_pending) as counts:
                    if not any(counts):
                        break
                    session.step()
            found[path] = loaded.tokenizer.decode(session.token_ids, skip_special_tokens=True)
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", KINDS)
def test_the_checkpoint_quantised_on_load_still_adds(kind: str) -> None:
    from xmoe.models.qwen3_5.engine_transformers import preload

    preload()
    for found in run_ranks(answer, 2, kind, silence_s=DEADLINE_S):
        assert {path: text.strip() for path, text in found.items()} == {"on": "579", "off": "579"}
