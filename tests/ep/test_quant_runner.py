# SPDX-License-Identifier: Apache-2.0
"""The runner with integer weights on both paths, over forked ranks and the software device."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch

from support.quant import Matrices, QuantLayer, emulate
from support.vendor import Batch
from xmoe.config import XmoeConfig
from xmoe.errors import UnsupportedError
from xmoe.kernels.ops.quant import dequantise_experts, load, quantise_experts
from xmoe.ranks import RankContext, RanksFailed, run_ranks
from xmoe.reference import INT8_ROW_TOLERANCE, int8_error_bound, moe_reference, row_errors
from xmoe.runner import MoeRunner
from xmoe.types import ExpertWeights, MoeShape, Path

HIDDEN, INTER, EXPERTS, TOPK = 1024, 512, 8, 2
DEADLINE_S = 60.0
KINDS = ["w8a8", "w4a8"]
COUNTS = {2: [[3, 1], [0, 2], [2, 2]], 4: [[0, 2, 0, 3], [1, 1, 1, 1], [0, 0, 0, 0]]}


def shape_of(kind: str) -> MoeShape:
    return MoeShape(HIDDEN, INTER, EXPERTS, TOPK, quant=kind)


@functools.cache
def all_experts(kind: str) -> ExpertWeights:
    """All experts, prepared before the ranks are forked."""
    make = torch.Generator().manual_seed(23)
    gate_up = torch.randn(EXPERTS, HIDDEN, 2 * INTER, generator=make) * 0.03
    down = torch.randn(EXPERTS, INTER, HIDDEN, generator=make) * 0.04
    return quantise_experts(gate_up.bfloat16(), down.bfloat16(), kind)


def local(kind: str, context: RankContext) -> ExpertWeights:
    whole = all_experts(kind)
    share = EXPERTS // context.size
    mine = slice(context.rank * share, (context.rank + 1) * share)

    def part(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor[mine].clone()

    names = ("gate_up_scales", "down_scales", "gate_up_bias", "down_bias")
    gate_up, down = part(whole.gate_up), part(whole.down)
    assert gate_up is not None and down is not None
    return ExpertWeights(gate_up, down, kind, *(part(getattr(whole, name)) for name in names))


def batch_of(rank: int, tokens: int, step: int) -> Batch:
    return Batch.random(tokens, TOPK, EXPERTS, HIDDEN, 100 * step + rank) if tokens else EMPTY


EMPTY = Batch(
    np.zeros((0, HIDDEN), np.uint16), np.zeros((0, TOPK), np.int32), np.zeros((0, TOPK), np.float32)
)


def tensors(batch: Batch) -> tuple[torch.Tensor, ...]:
    hidden = torch.from_numpy(batch.x.view(np.int16).copy()).view(torch.bfloat16)
    return hidden, torch.from_numpy(batch.ids.copy()), torch.from_numpy(batch.weights.copy())


def _run(context: RankContext, kind: str, padding: str) -> Any:
    """The same steps on both paths, over one copy of the weights."""
    group = context.init_process_group(DEADLINE_S)
    weights = local(kind, context)
    found: dict[str, Any] = {}
    for mode in ("on", "off"):
        config = XmoeConfig.from_mapping(
            {"mode": mode, "padding": padding, "step_timeout_s": DEADLINE_S}
        )
        with MoeRunner.create(shape_of(kind), config, group=group) as runner:
            layer = runner.layer(weights, 0)
            outputs = []
            for step, counts in enumerate(COUNTS[context.size]):
                batch = batch_of(context.rank, counts[context.rank], step)
                outputs.append(layer(*tensors(batch)).view(torch.int16).numpy().view(np.uint16))
            found[mode] = (runner.decision.path, outputs)
    return found


@pytest.mark.parametrize(("size", "padding"), [(2, "zero_weight"), (4, "mask")])
@pytest.mark.parametrize("kind", KINDS)
def test_both_paths_run_the_same_weights(kind: str, size: int, padding: str) -> None:
    gate_up, down = (w.double().numpy() for w in dequantise_experts(all_experts(kind)))
    results = run_ranks(_run, size, kind, padding, silence_s=DEADLINE_S)
    same = total = 0
    for rank, result in enumerate(results):
        assert [result[mode][0] for mode in ("on", "off")] == [Path.MEGA_MOE, Path.FUSED_MOE]
        for step, counts in enumerate(COUNTS[size]):
            fused, split = (result[mode][1][step] for mode in ("on", "off"))
            batch = batch_of(rank, counts[rank], step)
            args = (*(t.double().numpy() for t in tensors(batch)), gate_up, down)
            args = (args[0], batch.ids, *args[2:])
            want = moe_reference(*args)
            bound = int8_error_bound(*args, int4_weights=kind == "w4a8")
            for bits in (fused, split):
                y = (bits.astype(np.uint32) << 16).view(np.float32)
                assert y.shape == want.shape
                assert (row_errors(y, want) <= INT8_ROW_TOLERANCE).all()
                assert (np.abs(y - want) <= bound).all()
            same += int((fused == split).sum())
            total += fused.size
            np.testing.assert_array_equal(fused, emulate(batch, as_layer(kind)))
    # A last bit of exp moves a rounding now and then; otherwise the arithmetic is one.
    assert same > 0.9 * total


@functools.cache
def as_layer(kind: str) -> QuantLayer:
    """The prepared weights in the emulation's form."""
    whole = all_experts(kind)

    def part(stored: torch.Tensor, scales: torch.Tensor | None) -> Matrices:
        assert scales is not None
        bits = scales.numpy().astype(np.uint64).astype(np.uint32)
        return Matrices(load(stored, kind).numpy(), bits.view(np.float32))

    return QuantLayer(
        part(whole.gate_up, whole.gate_up_scales),
        part(whole.down, whole.down_scales),
        kind == "w4a8",
    )


def _bits(context: RankContext, kind: str, scale_bits: str) -> Any:
    import os

    os.environ["XSD_MEGAMOE_SCALE_BITS"] = scale_bits
    group = context.init_process_group(DEADLINE_S)
    config = XmoeConfig.from_mapping({"mode": "on", "step_timeout_s": DEADLINE_S})
    with MoeRunner.create(shape_of(kind), config, group=group) as runner:
        output = runner.layer(local(kind, context), 0)(*tensors(batch_of(context.rank, 2, 9)))
        return output.view(torch.int16).numpy()


@pytest.mark.parametrize("kind", KINDS)
def test_prepared_scales_do_not_depend_on_how_many_bits_count(kind: str) -> None:
    all_experts(kind)
    full, short = (run_ranks(_bits, 2, kind, bits, silence_s=DEADLINE_S) for bits in ("32", "19"))
    for one, two in zip(full, short, strict=True):
        np.testing.assert_array_equal(one, two)


def _create(context: RankContext, mode: str, kind: str, soc: str | None = None) -> Any:
    import os

    if soc is not None:
        os.environ["XSD_SOC"] = soc
    group = context.init_process_group(DEADLINE_S)
    config = XmoeConfig.from_mapping({"mode": mode, "step_timeout_s": DEADLINE_S})
    try:
        with MoeRunner.create(shape_of(kind), config, group=group) as runner:
            return runner.decision.path, runner.decision.reasons
    except UnsupportedError as error:
        return "unsupported", error.rejections


def test_demanding_what_the_device_has_not_names_the_check_on_all_ranks() -> None:
    for kind, soc in (("mxfp8", None), ("fp8-e5m2", None), ("w8a8", "Ascend950PR_9599")):
        for outcome, reasons in run_ranks(_create, 2, "on", kind, soc, silence_s=DEADLINE_S):
            assert outcome == "unsupported"
            assert any(reason.startswith("quant: ") for reason in reasons)


@pytest.mark.parametrize("mode", ["auto", "off"])
@pytest.mark.parametrize("kind", ["mxfp8", "fp8-e5m2"])
def test_weights_that_no_path_can_use_are_refused_with_the_known_names(
    kind: str, mode: str
) -> None:
    with pytest.raises(RanksFailed, match=r"all ranks \[ConfigError\].*none, w8a8, w4a8"):
        run_ranks(_create, 2, mode, kind, silence_s=DEADLINE_S)


def test_integer_weights_fall_back_on_a_device_without_them() -> None:
    for path, reasons in run_ranks(_create, 2, "auto", "w8a8", "Ascend950PR_9599"):
        assert path is Path.FUSED_MOE and any("mxfp8" in reason for reason in reasons)


def test_weights_of_another_kind_than_the_shape_are_refused() -> None:
    for shape, kind in ((shape_of("none"), "w8a8"), (shape_of("w4a8"), "w8a8")):
        with MoeRunner.create(shape, XmoeConfig.from_mapping({"mode": "off"})) as runner:
            with pytest.raises(ValueError, match=f"w8a8 weights.*quant {shape.quant}"):
                runner.layer(all_experts(kind), 0)


def test_single_rank_takes_the_split_path() -> None:
    def alone(context: RankContext) -> tuple[Path, list[bool]]:
        batch = Batch.random(3, TOPK, EXPERTS, HIDDEN, 5)
        batch.x[1] = 0
        config = XmoeConfig.from_mapping({"mode": "auto"})
        with MoeRunner.create(shape_of("w8a8"), config) as runner:
            output = runner.layer(all_experts("w8a8"), 0)(*tensors(batch))
            return runner.decision.path, [bool(row.any()) for row in output[:2]]

    # In a process of its own: the probe loads libraries, which later tests' ranks must not inherit.
    assert run_ranks(alone, 1) == [(Path.FUSED_MOE, [True, False])]
