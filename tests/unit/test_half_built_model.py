# SPDX-License-Identifier: Apache-2.0
"""A model whose construction fails half-way, and the same model again in the same process."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from support import qwen3_5 as toy
from xmoe.errors import CheckpointError
from xmoe.models.qwen3_5 import engine_transformers as engine
from xmoe.models.qwen3_5.weights import WeightReader
from xmoe.types import ExpertWeights

PROMPT = torch.tensor([[5, 17, 3, 88, 41, 2, 9]])


class Broken(Exception):
    pass


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """transformers' own model, and its checkpoint."""
    model = toy.make_model(torch.float32, seed=3)
    model.set_experts_implementation("eager")
    tensors = toy.per_expert(toy.fused_tensors(model))
    return model, toy.write(
        tmp_path_factory.mktemp("half"), toy.config_of(model), tensors, shards=2
    )


def _in_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the meta device, while transformers makes the model."""
    from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as library

    def broken(*_: Any, **__: Any) -> None:
        raise Broken

    monkeypatch.setattr(library.Qwen3_5MoeForCausalLM, "post_init", broken)


def _in_another_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """When all layers are made and the other tensors are read."""
    others = WeightReader.others

    def broken(self: WeightReader) -> Any:
        for number, found in enumerate(others(self)):
            if number == 3:
                raise CheckpointError("the disk is gone")
            yield found

    monkeypatch.setattr(WeightReader, "others", broken)


def _in_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing to prepare: the second layer is not made."""


Where = Callable[[pytest.MonkeyPatch], None]


@pytest.mark.parametrize("where", [_in_the_library, _in_a_layer, _in_another_tensor])
@torch.no_grad()
def test_the_next_construction_meets_nothing_of_the_failed_one(
    where: Where, stored: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.integrations.moe import ExpertsInterface

    reference, directory = stored
    held: list[weakref.ref[torch.Tensor]] = []
    make = toy.eager_layer([])

    def failing(index: int, weights: ExpertWeights) -> Any:
        held.append(weakref.ref(weights.gate_up))
        if where is _in_a_layer and index == 1:
            raise Broken
        return make(index, weights)

    for _ in range(2):
        with monkeypatch.context() as patch:
            where(patch)
            with pytest.raises((Broken, CheckpointError)):
                engine.load_model(directory, 0, 1, failing, widen=None, dtype=None)
    gc.collect()
    assert len(held) == {_in_the_library: 0, _in_a_layer: 4}.get(where, 2 * _layers(reference))
    assert all(one() is None for one in held), "experts of a failed construction are still held"
    assert ExpertsInterface._global_mapping["xmoe"] is engine.experts_forward
    assert torch.empty(0).device.type == "cpu"

    loaded = engine.load_model(directory, 0, 1, make, widen=None, dtype=None)
    assert torch.equal(loaded.model(PROMPT).logits, reference(PROMPT).logits)
    # The library's own way to make one is what it was.
    plain = toy.make_model(torch.float32, seed=3)
    plain.set_experts_implementation("eager")
    assert torch.equal(plain(PROMPT).logits, reference(PROMPT).logits)


def _layers(model: Any) -> int:
    return len(model.model.layers)
