# SPDX-License-Identifier: Apache-2.0
"""The runner on both paths, over forked ranks and the software device, against the float64
oracle.
"""

from __future__ import annotations

import time
import warnings
from typing import Any

import numpy as np
import pytest
import torch

from xmoe.config import XmoeConfig
from xmoe.errors import ConfigError, UnsupportedError, XmoeError
from xmoe.ranks import RankContext, RanksFailed, run_ranks
from xmoe.reference import BF16_ROW_TOLERANCE, moe_reference, row_errors
from xmoe.runner import MoeRunner
from xmoe.types import ExpertWeights, MoeShape, Path

SHAPE = MoeShape(hidden=1024, intermediate=512, num_experts=8, topk=2)
DEADLINE_S = 60.0


def _weights(shape: MoeShape = SHAPE) -> tuple[torch.Tensor, torch.Tensor]:
    make = torch.Generator().manual_seed(11)
    gate_up = torch.randn(shape.num_experts, shape.hidden, 2 * shape.intermediate, generator=make)
    down = torch.randn(shape.num_experts, shape.intermediate, shape.hidden, generator=make)
    return (gate_up * 0.03).bfloat16(), (down * 0.04).bfloat16()


def _batch(rank: int, num_tokens: int, step: int = 0) -> tuple[torch.Tensor, ...]:
    make = torch.Generator().manual_seed(1000 * step + rank)
    hidden = torch.randn(num_tokens, SHAPE.hidden, generator=make).bfloat16()
    scores = torch.rand(num_tokens, SHAPE.num_experts, generator=make)
    ids = scores.topk(SHAPE.topk, dim=1).indices
    return hidden, ids, torch.rand(num_tokens, SHAPE.topk, generator=make)


def _local(context: RankContext, shape: MoeShape = SHAPE) -> ExpertWeights:
    gate_up, down = _weights(shape)
    share = shape.num_experts // context.size
    mine = slice(context.rank * share, (context.rank + 1) * share)
    return ExpertWeights(gate_up[mine].contiguous(), down[mine].contiguous())


def _check(output: torch.Tensor, batch: tuple[torch.Tensor, ...]) -> None:
    hidden, ids, weights = batch
    gate_up, down = (tensor.double().numpy() for tensor in _weights())
    want = moe_reference(hidden.double().numpy(), ids.numpy(), weights.numpy(), gate_up, down)
    assert output.shape == hidden.shape and output.dtype == hidden.dtype
    assert (row_errors(output.double().numpy(), want) <= BF16_ROW_TOLERANCE).all()


def _run(context: RankContext, mode: str, counts: list[list[int]], settings: dict[str, Any]) -> Any:
    group = context.init_process_group(DEADLINE_S)
    config = XmoeConfig.from_mapping({"mode": mode, "step_timeout_s": DEADLINE_S, **settings})
    with MoeRunner.create(SHAPE, config, group=group) as runner:
        layers = [runner.layer(_local(context), index) for index in range(2)]
        kept = []
        for number, step_counts in enumerate(counts):
            batch = _batch(context.rank, step_counts[context.rank], number)
            with runner.step(step_counts[context.rank]) as seen:
                assert list(seen) == step_counts
                kept += [(layer(*batch), batch) for layer in layers]
        for output, batch in kept:  # at the end: no output may have changed since
            _check(output, batch)
        return {
            "path": runner.decision.path,
            "launches": dict(runner.launches),
            "outputs": [output.view(torch.int16).numpy() for output, _ in kept],
        }


UNEVEN = [[0, 2, 0, 5], [0, 0, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1], [3, 0, 0, 2]]


@pytest.mark.parametrize("padding", ["zero_weight", "mask"])
@pytest.mark.parametrize("mode", ["on", "off"])
def test_uneven_and_empty_shards_equal_the_reference(mode: str, padding: str) -> None:
    results = run_ranks(_run, 4, mode, UNEVEN, {"padding": padding}, silence_s=DEADLINE_S)
    wanted = Path.MEGA_MOE if mode == "on" else Path.FUSED_MOE
    assert {result["path"] for result in results} == {wanted}
    assert all(result["launches"][wanted] == 10 for result in results)


def test_same_bits_again() -> None:
    first = run_ranks(_run, 2, "on", [[3, 1], [1, 0]], {}, silence_s=DEADLINE_S)
    again = run_ranks(_run, 2, "on", [[3, 1], [1, 0]], {}, silence_s=DEADLINE_S)
    for one, two in zip(first, again, strict=True):
        for left, right in zip(one["outputs"], two["outputs"], strict=True):
            np.testing.assert_array_equal(left, right)


def test_too_many_tokens_leave_the_path_on_all_ranks_in_auto() -> None:
    """V3.1: a prefill larger than the window's capacity, then a small step again."""
    counts = [[4, 4], [4, 9], [4, 4]]
    results = run_ranks(_run, 2, "auto", counts, {"max_tokens_per_rank": 8}, silence_s=DEADLINE_S)
    for result in results:
        assert result["path"] is Path.MEGA_MOE
        assert result["launches"] == {Path.MEGA_MOE: 4, Path.FUSED_MOE: 2}


def test_too_many_tokens_are_one_error_on_all_ranks_in_on() -> None:
    with pytest.raises(RanksFailed, match=r"all ranks \[UnsupportedError\].*9 tokens") as caught:
        run_ranks(_run, 2, "on", [[4, 9]], {"max_tokens_per_rank": 8}, silence_s=DEADLINE_S)
    assert len(caught.value.errors) == 2


@pytest.mark.parametrize("mode", ["on", "off"])
def test_checked_bad_ids_of_one_rank_are_one_error_on_all_ranks(mode: str) -> None:
    def bad(context: RankContext) -> None:
        group = context.init_process_group(DEADLINE_S)
        config = XmoeConfig.from_mapping(
            {"mode": mode, "step_timeout_s": DEADLINE_S, "validate_ids": "checked"}
        )
        with MoeRunner.create(SHAPE, config, group=group) as runner:
            hidden, ids, weights = _batch(context.rank, 2)
            if context.rank == 1:
                ids[0, 1] = SHAPE.num_experts
            runner.layer(_local(context), 0)(hidden, ids, weights)

    with pytest.raises(RanksFailed, match=r"all ranks \[ConfigError\].*row 0, slot 1, id 8"):
        run_ranks(bad, 2, silence_s=DEADLINE_S)


BAD_IDS = (8, -7, 2**31 - 1, 2**32 + 1, -(2**40))


@pytest.mark.parametrize("padding", ["zero_weight", "mask"])
@pytest.mark.parametrize("mode", ["on", "off"])
def test_bad_ids_are_left_out_and_counted(mode: str, padding: str) -> None:
    """The default: whatever a router delivers, the launch ends, good slots count in full, and the
    next drain or close says how many were bad."""

    def drop(context: RankContext) -> tuple[int, list[str]]:
        group = context.init_process_group(DEADLINE_S)
        settings = {"mode": mode, "step_timeout_s": DEADLINE_S, "padding": padding}
        config = XmoeConfig.from_mapping(settings)
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            with MoeRunner.create(SHAPE, config, group=group) as runner:
                layer = runner.layer(_local(context), 0)
                hidden, ids, weights = _batch(context.rank, 7)
                if context.rank == 1:
                    for row, bad in enumerate(BAD_IDS):
                        ids[row, row % 2] = bad
                    ids[5] = 3  # the first of them stays
                    ids[6, 0], ids[6, 1] = 99, -1  # no usable slot at all
                    hidden[6] = float("nan")
                output = layer(hidden, ids, weights)
                runner.drain()
                said = len(heard)
                layer(hidden, ids, weights)
                counted = runner.stats().dropped_ids
        good = (ids >= 0) & (ids < SHAPE.num_experts)
        good[:, 1] &= ids[:, 1] != ids[:, 0]
        kept = torch.where(good, ids, -1)
        _check(output, (hidden.nan_to_num(0.0), kept, weights))
        assert said == (context.rank == 1) and len(heard) == 2 * said
        return counted, [str(one.message) for one in heard]

    (_, silent), (counted, texts) = run_ranks(drop, 2, silence_s=DEADLINE_S)
    assert silent == [] and counted == 2 * (len(BAD_IDS) + 2)
    assert all(text.startswith("7 expert ids") and "rank 1" in text for text in texts)


def test_a_batch_of_another_shape_does_not_hold_the_peers() -> None:
    """The rank that has it raises; the others' launch goes on without its tokens."""

    def run(context: RankContext) -> str | None:
        group = context.init_process_group(DEADLINE_S)
        config = XmoeConfig.from_mapping({"mode": "on", "step_timeout_s": DEADLINE_S})
        with MoeRunner.create(SHAPE, config, group=group) as runner:
            layer = runner.layer(_local(context), 0)
            hidden, ids, weights = batch = _batch(context.rank, 3)
            with runner.step(3):
                if context.rank == 1:
                    with pytest.raises(ConfigError) as caught:
                        layer(hidden[:2], ids[:2], weights[:2])
                    return str(caught.value)
                _check(layer(*batch), batch)
        return None

    started = time.monotonic()
    first, second = run_ranks(run, 2, silence_s=DEADLINE_S)
    assert first is None and second is not None and "3 tokens were announced" in second
    assert time.monotonic() - started < DEADLINE_S / 2  # no wait ran into its limit


@pytest.mark.parametrize("ids", ["drop", "checked"])
def test_no_memory_for_one_ranks_output_does_not_hold_the_peers(ids: str) -> None:
    def run(context: RankContext) -> str:
        group = context.init_process_group(DEADLINE_S)
        settings = {"mode": "on", "step_timeout_s": DEADLINE_S, "validate_ids": ids}
        said = ""
        with MoeRunner.create(SHAPE, XmoeConfig.from_mapping(settings), group=group) as runner:
            layer, batch = runner.layer(_local(context), 0), _batch(context.rank, 3)

            def full(like: torch.Tensor, **how: Any) -> torch.Tensor:
                if like.shape == batch[0].shape:
                    raise torch.OutOfMemoryError("the device is full")
                return torch.empty(like.shape, dtype=like.dtype)

            with runner.step(3), pytest.MonkeyPatch.context() as patch:
                if context.rank == 1:
                    patch.setattr(torch, "empty_like", full)
                try:
                    _check(layer(*batch), batch)
                except (RuntimeError, XmoeError) as error:
                    said = str(error)
            with runner.step(3):
                _check(layer(*batch), batch)
        return said

    started = time.monotonic()
    first, second = run_ranks(run, 2, silence_s=DEADLINE_S)
    # With "checked" all ranks agree before they launch.
    assert "the device is full" in second and ("is full" in first) == (ids == "checked")
    assert time.monotonic() - started < DEADLINE_S / 2  # no wait ran into its limit


@pytest.mark.parametrize("chunked", [False, True])
def test_a_bad_batch_on_the_split_path_is_refused_on_all_ranks_and_costs_nothing(
    chunked: bool,
) -> None:
    """Width, type, rows and output are judged before a row is sent: the runner goes on."""

    def run(context: RankContext) -> list[str]:
        group = context.init_process_group(DEADLINE_S)
        settings: dict[str, object] = {"mode": "off", "step_timeout_s": DEADLINE_S}
        if chunked:
            settings |= {"split_streams": "overlap", "split_chunk_tokens": 2}
        said = []
        with MoeRunner.create(SHAPE, XmoeConfig.from_mapping(settings), group=group) as runner:
            layer = runner.layer(_local(context), 0)
            hidden, ids, weights = batch = _batch(context.rank, 3)
            for bad in (
                (hidden[:, :-1], ids, weights),
                (hidden.float(), ids, weights),
                (hidden[:2], ids[:2], weights[:2]),
                (*batch, torch.empty(3, 3, SHAPE.hidden, dtype=hidden.dtype)),
            ):
                with runner.step(3), pytest.raises(ConfigError) as caught:
                    layer(*(bad if context.rank == 1 else batch))
                said.append(str(caught.value))
            with runner.step(3):
                _check(layer(*batch), batch)
        return said

    first, second = run_ranks(run, 2, silence_s=DEADLINE_S)
    assert first == second and all("rank 1" in text for text in first)
    assert "3 tokens were announced" in first[2] and "out is [3, 3, " in first[3]


@pytest.mark.parametrize("tokens", [-1, "x", 2.5, None, 2**70])
def test_a_step_of_no_number_of_tokens_is_one_error_on_all_ranks(tokens: Any) -> None:
    def run(context: RankContext) -> str:
        group = context.init_process_group(DEADLINE_S)
        config = XmoeConfig.from_mapping({"mode": "off", "step_timeout_s": DEADLINE_S})
        with MoeRunner.create(SHAPE, config, group=group) as runner:
            with pytest.raises(ConfigError) as caught:
                with runner.step(tokens if context.rank == 1 else 3):
                    pass
            with runner.step(2) as counts:
                assert counts == (2, 2)
        return str(caught.value)

    first, second = run_ranks(run, 2, silence_s=DEADLINE_S)
    assert first == second and f"rank 1: a step of {tokens!r} tokens" in first


def test_unused_slots_contribute_nothing() -> None:
    def unused(context: RankContext, mode: str) -> Any:
        group = context.init_process_group(DEADLINE_S)
        config = XmoeConfig.from_mapping({"mode": mode, "step_timeout_s": DEADLINE_S})
        with MoeRunner.create(SHAPE, config, group=group) as runner:
            hidden, ids, weights = _batch(context.rank, 3)
            ids[0, 1] = -1
            ids[2] = -1
            output = runner.layer(_local(context), 0)(hidden, ids, weights)
            _check(output, (hidden, ids, weights))
            assert not output[2].any()

    for mode in ("on", "off"):
        run_ranks(unused, 2, mode, silence_s=DEADLINE_S)


def test_ineligible_model_launches_nothing_fused_and_says_why() -> None:
    """V2.2: no launch, no window; the one decision is all that is consulted."""

    def create(context: RankContext, mode: str) -> Any:
        group = context.init_process_group(DEADLINE_S)
        shape = MoeShape(hidden=1024, intermediate=512, num_experts=8, topk=2, activation="gelu")
        config = XmoeConfig.from_mapping({"mode": mode, "step_timeout_s": DEADLINE_S})
        try:
            with MoeRunner.create(shape, config, group=group) as runner:
                return runner.decision.path, runner.decision.reasons, runner._resource
        except UnsupportedError as error:
            return error.rejections

    for path, reasons, resource in run_ranks(create, 2, "auto", silence_s=DEADLINE_S):
        assert path is Path.FUSED_MOE and resource is None
        assert any(reason.startswith("activation") for reason in reasons)
    assert len(set(run_ranks(create, 2, "on", silence_s=DEADLINE_S))) == 1


def test_different_settings_are_a_disagreement_on_all_ranks() -> None:
    def create(context: RankContext) -> None:
        group = context.init_process_group(DEADLINE_S)
        mode = "off" if context.rank else "auto"
        MoeRunner.create(SHAPE, XmoeConfig.from_mapping({"mode": mode}), group=group)

    with pytest.raises(RanksFailed, match=r"all ranks \[RankDisagreement\].*settings"):
        run_ranks(create, 2, silence_s=DEADLINE_S)


def test_a_skipped_step_is_found_at_the_next_one() -> None:
    """V5.3."""

    def drift(context: RankContext) -> None:
        group = context.init_process_group(DEADLINE_S)
        config = XmoeConfig.from_mapping({"mode": "off", "step_timeout_s": DEADLINE_S})
        with MoeRunner.create(SHAPE, config, group=group) as runner:
            if context.rank == 1:
                runner._sequence += 1  # what an engine's early return amounts to
            with runner.step(1):
                pass

    with pytest.raises(RanksFailed, match=r"all ranks \[RankDisagreement\].*different steps"):
        run_ranks(drift, 2, silence_s=DEADLINE_S)


def test_single_rank_without_group_takes_the_split_path() -> None:
    def alone(context: RankContext) -> Path:
        with MoeRunner.create(SHAPE, XmoeConfig.from_mapping({"mode": "auto"})) as runner:
            gate_up, down = _weights()
            batch = _batch(0, 5)
            _check(runner.layer(ExpertWeights(gate_up, down), 0)(*batch), batch)
            return runner.decision.path

    # In a process of its own: the probe loads libraries, which later tests' ranks must not inherit.
    assert run_ranks(alone, 1) == [Path.FUSED_MOE]
