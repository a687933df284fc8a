# SPDX-License-Identifier: Apache-2.0
"""transformers' model with our experts: registry, equality, generation in lockstep."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from support import qwen3_5 as toy
from xmoe.errors import ConfigError
from xmoe.models.qwen3_5 import engine_transformers as engine
from xmoe.models.qwen3_5.greedy import GreedySession
from xmoe.types import ExpertWeights

PROMPT = [5, 17, 3, 88, 41, 2, 9]


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """transformers' eager model, ours on the same weights, and the calls of our layers."""
    reference = toy.make_model(request.param, seed=3)
    reference.set_experts_implementation("eager")
    directory = toy.write(
        tmp_path_factory.mktemp("engine"),
        toy.config_of(reference),
        toy.per_expert(toy.fused_tensors(reference)),
        shards=2,
    )
    calls: list[tuple[int, int]] = []
    loaded = engine.load_model(directory, 0, 1, toy.eager_layer(calls), widen=None, dtype=None)
    return reference, loaded, calls, directory


@pytest.fixture
def clean_registry() -> Iterator[dict[str, Any]]:
    from transformers.integrations.moe import ExpertsInterface

    mapping: dict[str, Any] = ExpertsInterface._global_mapping
    engine.unregister()
    before = dict(mapping)
    yield mapping
    engine.unregister()
    mapping.clear()
    mapping.update(before)
    engine.register()


@torch.no_grad()
def test_logits_equal_transformers_eager_bit_for_bit(pair: Any) -> None:
    reference, loaded, _, _ = pair
    ids = torch.tensor([PROMPT, PROMPT[::-1]])
    assert torch.equal(loaded.model(ids).logits, reference(ids).logits)


def test_the_model_is_transformers_own_class(pair: Any) -> None:
    from transformers import Qwen3_5MoeForCausalLM

    _, loaded, _, _ = pair
    assert type(loaded.model) is Qwen3_5MoeForCausalLM
    assert loaded.model.config._experts_implementation == "xmoe"
    assert loaded.model.config.model_type == "qwen3_5_moe_text"


def test_generate_and_session_give_the_reference_tokens(pair: Any) -> None:
    reference, loaded, calls, _ = pair
    ids = torch.tensor([PROMPT])
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 6, "do_sample": False}
    expected = reference.generate(ids, **options)[0, len(PROMPT) :].tolist()
    assert loaded.model.generate(ids, **options)[0, len(PROMPT) :].tolist() == expected
    calls.clear()
    session = GreedySession(loaded)
    session.start(PROMPT, max_new_tokens=6)
    while not session.finished:
        session.step()
    assert session.token_ids == expected
    # One call per layer and step, in layer order: the prompt, then one token at a time.
    steps = [len(PROMPT)] + [1] * (len(expected) - 1)
    assert calls == [(layer, tokens) for tokens in steps for layer in range(3)]


def test_an_idle_rank_calls_every_layer_once_per_step(pair: Any) -> None:
    _, loaded, calls, _ = pair
    session = GreedySession(loaded)
    calls.clear()
    assert session.finished
    assert session.step() is None
    session.run_empty_step()
    assert calls == [(layer, 0) for _ in range(2) for layer in range(3)]


def test_a_finished_session_keeps_step_with_the_others(pair: Any) -> None:
    _, loaded, calls, _ = pair
    session = GreedySession(loaded)
    session.start(PROMPT, max_new_tokens=1)
    calls.clear()
    results = [session.step() for _ in range(3)]
    assert results[0] is not None and results[1:] == [None, None]
    assert [layer for layer, _ in calls] == [0, 1, 2] * 3
    session.clear()
    assert session.finished
    # A second request starts from an empty cache.
    first = list(session.token_ids)
    session.start(PROMPT, max_new_tokens=1)
    session.step()
    assert session.token_ids == first


@pytest.mark.parametrize(("ids", "limit"), [([], 4), ([5, 96], 4), ([-1], 4), ([5], 0)])
def test_a_bad_request_is_refused_before_any_step(pair: Any, ids: list[int], limit: int) -> None:
    _, loaded, _, _ = pair
    with pytest.raises(ConfigError, match="vocabulary"):
        GreedySession(loaded).start(ids, limit)


def test_tied_embeddings(tmp_path: Path) -> None:
    reference = toy.make_model(torch.float32, tie_word_embeddings=True)
    reference.set_experts_implementation("eager")
    tensors = toy.fused_tensors(reference)
    tensors.pop("lm_head.weight", None)
    directory = toy.write(tmp_path, toy.config_of(reference), tensors)
    loaded = engine.load_model(directory, 0, 1, toy.eager_layer([]), widen=None, dtype=None)
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        assert torch.equal(loaded.model(ids).logits, reference(ids).logits)


def test_a_multimodal_config_loads_its_text_part(pair: Any, tmp_path: Path) -> None:
    reference, _, _, _ = pair
    text = toy.config_of(reference)
    config = {"model_type": "qwen3_5_moe", "text_config": text, "vision_config": {}}
    tensors = toy.with_prefix(toy.fused_tensors(reference), "model.language_model.")
    directory = toy.write(tmp_path, config, tensors)
    loaded = engine.load_model(directory, 0, 1, toy.eager_layer([]), widen=None, dtype=None)
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        assert torch.equal(loaded.model(ids).logits, reference(ids).logits)


def test_a_rank_outside_the_group_is_refused(pair: Any) -> None:
    directory = pair[3]
    with pytest.raises(ConfigError, match="ep_size=3 does not divide"):
        engine.load_model(directory, 0, 3, toy.eager_layer([]), dtype=None)


def test_registering_twice_and_from_threads(clean_registry: dict[str, Any]) -> None:
    assert "xmoe" not in clean_registry
    threads = [threading.Thread(target=engine.register) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    engine.register()
    assert clean_registry["xmoe"] is engine.experts_forward
    engine.unregister()
    engine.unregister()
    assert "xmoe" not in clean_registry


def test_unregister_restores_what_was_there(clean_registry: dict[str, Any]) -> None:
    def other(*_: Any) -> None: ...

    clean_registry["xmoe"] = other
    engine.register()
    engine.register()
    assert clean_registry["xmoe"] is engine.experts_forward
    engine.unregister()
    assert clean_registry["xmoe"] is other
    # An entry that somebody put there after us is not ours to remove.
    engine.register()
    clean_registry["xmoe"] = other
    engine.unregister()
    assert clean_registry["xmoe"] is other
    del clean_registry["xmoe"]


def test_a_model_without_our_layers_gives_a_clear_error(clean_registry: dict[str, Any]) -> None:
    engine.register()
    model = toy.make_model(torch.float32, num_hidden_layers=1, layer_types=["full_attention"])
    model.set_experts_implementation("xmoe")
    with pytest.raises(ConfigError, match="only models built by load_model"):
        model(torch.tensor([PROMPT]))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_registration_works_in_a_child(method: str) -> None:
    engine.register()
    context: Any = multiprocessing.get_context(method)
    queue = context.Queue()
    # A thread of the parent holds the lock while the child is made.
    with engine._lock:
        child = context.Process(target=toy.registered_in_child, args=(queue,))
        child.start()
    try:
        assert queue.get(timeout=150) == "xmoe.models.qwen3_5.engine_transformers"
    finally:
        child.join(30)
        if child.is_alive():
            child.kill()
            child.join()


@pytest.mark.parametrize("kind", ["w8a8", "w4a8"])
def test_experts_are_quantised_as_they_are_loaded(tmp_path: Path, kind: str) -> None:
    """As they would be afterwards; what is no routed expert stays as it is stored."""
    from dataclasses import fields

    from xmoe.kernels.ops.quant import check_experts, quantise_experts

    reference = toy.make_model(seed=4, hidden_size=64, moe_intermediate_size=64)
    directory = toy.write(
        tmp_path, toy.config_of(reference), toy.per_expert(toy.fused_tensors(reference))
    )
    held: dict[str, list[ExpertWeights]] = {"none": [], kind: []}

    def keep(name: str) -> Any:
        def make(index: int, weights: ExpertWeights) -> Any:
            held[name].append(weights)
            return lambda hidden, ids, scales: hidden

        return make

    plain, loaded = (
        engine.load_model(directory, 1, 2, keep(name), widen=None, quant=name)
        for name in ("none", kind)
    )
    assert (plain.shape.quant, loaded.shape.quant) == ("none", kind)
    for weights, quantised in zip(held["none"], held[kind], strict=True):
        check_experts(quantised)
        want = quantise_experts(weights.gate_up, weights.down, kind)
        for field in fields(want):
            left, right = getattr(quantised, field.name), getattr(want, field.name)
            assert torch.equal(left, right) if torch.is_tensor(left) else left == right
    others = zip(plain.model.named_parameters(), loaded.model.named_parameters(), strict=True)
    assert all(one == two and torch.equal(left, right) for (one, left), (two, right) in others)


def test_an_unknown_quantisation_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'w2a2'.*none, w8a8, w4a8"):
        engine.load_model(tmp_path, 0, 1, lambda index, weights: None, quant="w2a2")


def test_the_device_router_chooses_as_the_librarys() -> None:
    """On CPU tensors; the operator itself is looked at with the npu tests."""
    model = toy.make_model(seed=6)
    gate = model.model.layers[0].mlp.gate
    hidden = torch.randn(11, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    logits, weights, ids = gate(hidden)
    engine._use_device_router(gate)
    found = gate(hidden.unsqueeze(0))
    assert torch.equal(found[0], logits) and torch.equal(found[1], weights)
    assert torch.equal(found[2].long(), ids)
