# SPDX-License-Identifier: Apache-2.0
"""The training script on a toy model: tokenizer, split, and that a step lowers the loss."""

from __future__ import annotations

import random
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from xmoe.models.qwen3_5.train import __main__ as script
from xmoe.models.qwen3_5.train import data
from xmoe.models.qwen3_5.train.fast import (
    Recorder,
    fast_training,
    one_chunk_delta_rule,
    sorted_experts,
)
from xmoe.models.qwen3_5.train.tokenizer import build_tokenizer, place_characters, save_tokenizer

SEED_QUESTION = "只回答最终数字：123加456等于多少？"
TOY = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 16,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "moe_intermediate_size": 8,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return build_tokenizer()


def toy_model(tokenizer: Any) -> Any:
    from transformers import Qwen3_5MoeForCausalLM

    torch.manual_seed(0)
    return Qwen3_5MoeForCausalLM(script.model_config(tokenizer, **TOY))


_TEXT = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters=list(place_characters()))
)


@settings(deadline=None, max_examples=200)
@given(_TEXT | st.text("0123456789加 +?等于多少？", max_size=30))
def test_any_text_round_trips(text: str) -> None:
    tokenizer = _tokenizer_once()
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def _tokenizer_once(kept: list[Any] = []) -> Any:  # noqa: B006
    if not kept:
        kept.append(build_tokenizer())
    return kept[0]


def test_a_saved_tokenizer_is_the_same(tokenizer: Any, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    # Beside a config.json of this model type AutoTokenizer would bring rules of its own.
    script.model_config(tokenizer, **TOY).save_pretrained(tmp_path)
    save_tokenizer(tokenizer, tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    message = [{"role": "user", "content": SEED_QUESTION}]
    assert loaded.apply_chat_template(
        message, add_generation_prompt=True, return_dict=False
    ) == tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)
    assert loaded(SEED_QUESTION).input_ids == tokenizer(SEED_QUESTION).input_ids
    assert loaded.eos_token == "<|end|>" and loaded.decode(loaded("1000").input_ids) == "1000"


def test_prompts_are_short_and_equal_to_the_chat_template(tokenizer: Any) -> None:
    encoder = data.Encoder(tokenizer)
    for _, template in data.TEMPLATES:
        for a, b in ((123, 456), (7, 99), (0, 0), (999, 1)):
            prompt, answer = encoder.encode(template, a, b)
            message = [{"role": "user", "content": template.format(a=a, b=b)}]
            assert prompt == tokenizer.apply_chat_template(
                message, add_generation_prompt=True, return_dict=False
            )
            assert tokenizer.decode(answer, skip_special_tokens=True) == str(a + b)
            assert len(prompt) + len(answer) <= 16


def test_held_out_sums_are_never_drawn_for_training() -> None:
    rng = random.Random(1)
    assert data.held_out(123, 456)
    share = sum(data.held_out(a, b) for a in range(0, 1000, 7) for b in range(1000)) / 143_000
    assert 0.045 < share < 0.055
    assert not any(data.held_out(*data.draw_sum(rng, 3, unseen=False)) for _ in range(2000))
    assert all(data.held_out(*data.draw_sum(rng, 3, unseen=True)) for _ in range(200))


def test_batches_score_the_answer_only(tokenizer: Any) -> None:
    encoder = data.Encoder(tokenizer)
    batch = next(data.batches(encoder, seed=3, size=16, digits=3))
    for ids, targets, mask in zip(batch.ids, batch.targets, batch.mask, strict=True):
        text = tokenizer.decode(ids[mask])
        answer = tokenizer.decode(targets[targets >= 0])
        assert answer.endswith("<|end|>") and answer.removesuffix("<|end|>").isdigit()
        numbers = [int(n) for n in "".join(c if c.isdigit() else " " for c in text).split()]
        assert sum(numbers[:2]) == int(answer.removesuffix("<|end|>"))


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17])
def test_the_training_delta_rule_equals_the_library(length: int) -> None:
    from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as library

    torch.manual_seed(0)
    query, key = torch.randn(2, length, 2, 16), torch.randn(2, length, 2, 16)
    value, g = torch.randn(2, length, 4, 8), -torch.rand(2, length, 4)
    beta = torch.rand(2, length, 4)
    expected, _ = library.torch_chunk_gated_delta_rule(
        query, key, value, g=g, beta=beta, use_qk_l2norm_in_kernel=True
    )
    found, _ = one_chunk_delta_rule(query, key, value, g, beta)
    assert torch.allclose(found, expected, atol=1e-5)


def test_training_experts_equal_eager_with_gradients(tokenizer: Any) -> None:
    module = toy_model(tokenizer).model.layers[0].mlp.experts
    module.config._experts_implementation = "eager"
    ids = torch.rand(20, 8).topk(2).indices
    results = []
    for run in (module, lambda *args: sorted_experts(module, *args)):
        torch.manual_seed(1)
        hidden = torch.randn(20, 32, requires_grad=True)
        weights = torch.rand(20, 2, requires_grad=True)
        module.zero_grad()
        output = run(hidden, ids, weights)
        output.square().sum().backward()
        grads = (hidden.grad, weights.grad, module.gate_up_proj.grad, module.down_proj.grad)
        results.append([output.detach(), *grads])
    for left, right in zip(*results, strict=True):
        assert torch.allclose(left, right, atol=1e-6, rtol=1e-4)


def test_the_fast_forward_scores_like_the_plain_model(tokenizer: Any) -> None:
    model = toy_model(tokenizer)
    batch = next(data.batches(data.Encoder(tokenizer), seed=0, size=8, digits=3))
    with torch.no_grad():
        plain = model(batch.ids, use_cache=False).logits[batch.targets >= 0]
        with fast_training(model) as recorder:
            fast, _ = script.answer_logits(model, batch, recorder)
        after = model(batch.ids, use_cache=False).logits[batch.targets >= 0]
    assert torch.allclose(fast, plain, atol=1e-4)
    # The library is as it was.
    assert torch.equal(after, plain)


def test_training_lowers_the_loss(tokenizer: Any, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = toy_model(tokenizer)
    encoder = data.Encoder(tokenizer)
    recipe = script.Recipe(
        minutes=5, max_steps=8, batch=32, digits=1, learning_rate=5e-3, warmup_steps=1,
        report_every=4,
    )  # fmt: skip
    lines: list[str] = []
    losses = script.train(
        model, encoder, recipe, report=lines.append,
        save=lambda trained: script.save_checkpoint(trained, tokenizer, tmp_path / "out"),
    )  # fmt: skip
    assert len(losses) == 8 and losses[-1] < losses[0] - 0.5
    assert len(lines) == 2 and "unseen" in lines[0]
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert {str(p.dtype) for p in saved.parameters()} == {"torch.bfloat16"}
    assert next(model.parameters()).dtype == torch.float32


def test_balance_loss_is_one_when_experts_are_equal() -> None:
    recorder = Recorder()
    ids = torch.arange(8).view(4, 2)
    recorder.router.append((torch.zeros(4, 8), ids))
    assert recorder.balance_loss(8).item() == pytest.approx(1.0)
    assert recorder.router_z_loss().item() == pytest.approx(torch.tensor(8.0).log().item() ** 2)


def test_batches_depend_on_the_seed_only(tokenizer: Any) -> None:
    def ids(seed: int) -> list[Any]:
        source = data.batches(data.Encoder(tokenizer), seed, 8, 3)
        return [batch.ids.tolist() for batch in islice(source, 2)]

    assert ids(5) == ids(5) != ids(6)
