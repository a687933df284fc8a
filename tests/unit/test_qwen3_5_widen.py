# SPDX-License-Identifier: Apache-2.0
"""A widened model computes the same function as the narrow one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from support import qwen3_5 as toy
from xmoe.errors import ConfigError
from xmoe.models.qwen3_5.engine_transformers import LoadedModel, load_model
from xmoe.models.qwen3_5.widen import plan_widening, widen_tensor
from xmoe.types import ExpertWeights, MoeShape


class Float64(TorchFunctionMode):
    """Turns the library's own casts to float32 into float64, so that no rounding hides an error."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.float:
            return args[0].double()
        wide = {torch.float32: torch.float64}

        def swap(value: Any) -> Any:
            return wide.get(value, value) if isinstance(value, torch.dtype) else value

        kwargs = {key: swap(value) for key, value in (kwargs or {}).items()}
        return func(*[swap(value) for value in args], **kwargs)


def plain_layer(_layer: int, weights: ExpertWeights) -> Any:
    """Routed experts by the formula, one token and slot at a time."""

    def layer(hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        rows = []
        for x, ids, scores in zip(hidden_states, topk_ids, topk_weights, strict=True):
            y = torch.zeros_like(x)
            for expert, score in zip(ids.tolist(), scores, strict=True):
                gate, up = (x @ weights.gate_up[expert]).chunk(2)
                act = torch.nn.functional.silu(gate) * up
                y = y + score * (act @ weights.down[expert])
            rows.append(y)
        return torch.stack(rows) if rows else hidden_states

    return layer


def load(directory: Path, widen: tuple[int, int] | None, dtype: torch.dtype) -> LoadedModel:
    return load_model(directory, 0, 1, plain_layer, widen=widen, dtype=dtype, convert_dtype=True)


@torch.no_grad()
def logits(loaded: LoadedModel) -> Tensor:
    ids = torch.tensor([[5, 17, 3, 88, 41, 2, 9, 60, 33, 7]])
    result: Tensor = loaded.model(ids).logits
    return result


def relative(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).abs().max() / b.double().abs().max())


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = toy.make_model(attention_bias=True)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".bias"):
                parameter.normal_()
    return toy.write(
        tmp_path_factory.mktemp("narrow"), toy.config_of(model), toy.fused_tensors(model)
    )


@pytest.mark.parametrize("widen", [(128, 32), (40, 8), (32, 24)])
def test_float64_logits_are_equal(directory: Path, widen: tuple[int, int]) -> None:
    with Float64():
        narrow = load(directory, None, torch.float64)
        wide = load(directory, widen, torch.float64)
        assert logits(narrow).dtype == torch.float64
        assert relative(logits(wide), logits(narrow)) < 1e-10
    assert (wide.shape.hidden, wide.shape.intermediate) == widen
    assert (wide.stored_shape.hidden, wide.stored_shape.intermediate) == (32, 8)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-4), (torch.bfloat16, 0.15)])
def test_float32_and_bf16_logits_are_close(
    directory: Path, dtype: torch.dtype, limit: float
) -> None:
    # bf16: the sums are blocked differently once a row is longer, and a last bit may pick
    # another expert; the weights are random, so one flip shows.
    narrow, wide = load(directory, None, dtype), load(directory, (128, 32), dtype)
    assert relative(logits(wide), logits(narrow)) < limit


def test_the_defaults_reach_the_sizes_of_the_operator(directory: Path) -> None:
    loaded = load_model(directory, 3, 4, plain_layer)
    assert (loaded.shape.hidden, loaded.shape.intermediate) == (1024, 512)
    for layer in loaded.model.model.layers:
        # Only the norms over the hidden state take the smaller epsilon.
        assert layer.input_layernorm.eps == pytest.approx(1e-6 * 32 / 1024)
        if hasattr(layer, "self_attn"):
            assert layer.self_attn.q_norm.eps == 1e-6
        else:
            assert layer.linear_attn.norm.variance_epsilon == 1e-6


def test_the_added_part_of_the_state_stays_zero(directory: Path) -> None:
    seen: list[Tensor] = []
    loaded = load(directory, (64, 16), torch.bfloat16)
    loaded.model.model.norm.register_forward_hook(lambda _m, _i, output: seen.append(output))
    logits(loaded)
    assert seen[0][..., :32].abs().min() > 0
    assert seen[0][..., 32:].abs().max() == 0


def test_sizes_that_suffice_are_left_alone() -> None:
    shape = MoeShape(hidden=2048, intermediate=512, num_experts=8, topk=2)
    assert plan_widening(shape, (1024, 512)) is None
    assert plan_widening(shape, None) is None
    plan = plan_widening(shape, (1024, 1024))
    assert plan is not None and (plan.wide_hidden, plan.wide_intermediate) == (2048, 1024)
    with pytest.raises(ConfigError, match="two positive sizes"):
        plan_widening(shape, (0, 512))


def test_an_unknown_tensor_is_refused() -> None:
    plan = plan_widening(MoeShape(4, 4, 2, 1), (8, 8))
    with pytest.raises(ConfigError, match="mystery.weight has no widening rule"):
        widen_tensor("model.layers.0.mystery.weight", torch.zeros(4, 4), plan)
