# SPDX-License-Identifier: Apache-2.0
"""The checkpoint that ships: small, genuine, and it adds."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from support.qwen3_5 import eager_layer
from xmoe.errors import ConfigError
from xmoe.models.checkpoints import shipped_checkpoint
from xmoe.models.qwen3_5.config import layer_types, read_config, shape_from_config
from xmoe.models.qwen3_5.engine_transformers import LoadedModel, load_model
from xmoe.models.qwen3_5.greedy import GreedySession
from xmoe.models.qwen3_5.train.data import held_out

DIRECTORY = shipped_checkpoint()
SEED_QUESTION = "只回答最终数字：123加456等于多少？"


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model(DIRECTORY, 0, 1, eager_layer([]), widen=None)


def answer(loaded: LoadedModel, question: str) -> str:
    message = [{"role": "user", "content": question}]
    ids = loaded.tokenizer.apply_chat_template(
        message, add_generation_prompt=True, return_dict=False
    )
    session = GreedySession(loaded)
    session.start(ids, max_new_tokens=8)
    while not session.finished:
        session.step()
    text: str = loaded.tokenizer.decode(session.token_ids, skip_special_tokens=True)
    return text


def test_it_is_at_most_four_megabytes() -> None:
    files = [path for path in DIRECTORY.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 4_000_000
    # Readable by everybody once installed.
    assert all(path.stat().st_mode & 0o444 == 0o444 for path in files)


def test_it_is_a_genuine_qwen3_5_moe() -> None:
    config = read_config(DIRECTORY)
    assert config["architectures"] == ["Qwen3_5MoeForCausalLM"]
    assert set(layer_types(config)) == {"linear_attention", "full_attention"}
    shape = shape_from_config(config)
    assert (shape.num_experts, shape.topk, shape.dtype) == (32, 4, "bfloat16")
    assert config["shared_expert_intermediate_size"] > 0


def test_it_answers_the_question_of_the_seed(loaded: LoadedModel) -> None:
    assert answer(loaded, SEED_QUESTION) == "579"


@pytest.mark.parametrize(
    ("question", "expected"),
    [("123加456等于多少？", "579"), ("What is 123 plus 456?", "579"), ("7加5等于多少？", "12")],
)
def test_it_answers_in_both_languages(loaded: LoadedModel, question: str, expected: str) -> None:
    assert answer(loaded, question) == expected


def test_the_tokenizer_is_the_one_in_the_file(loaded: LoadedModel) -> None:
    from tokenizers import Tokenizer

    stored = Tokenizer.from_file(str(DIRECTORY / "tokenizer.json"))
    for text in (SEED_QUESTION, "What is 7 plus 99?", "é 12345 你好"):
        ids = loaded.tokenizer(text).input_ids
        assert ids == stored.encode(text).ids
        assert loaded.tokenizer.decode(ids) == text


def test_every_expert_is_chosen_by_some_sum(loaded: LoadedModel) -> None:
    chosen: list[set[int]] = [set() for _ in loaded.layers]

    def watch(index: int) -> Any:
        return lambda _module, _inputs, output: chosen[index].update(output[2].flatten().tolist())

    hooks = [
        layer.mlp.gate.register_forward_hook(watch(index))
        for index, layer in enumerate(loaded.model.model.layers)
    ]
    with torch.no_grad():
        for a in range(0, 1000, 31):
            b = a * 7 % 1000
            for question in (f"{a}加{b}等于多少？", f"What is {a} plus {b}?"):
                turns = [("user", question), ("assistant", str(a + b))]
                ids = loaded.tokenizer.apply_chat_template(
                    [{"role": role, "content": text} for role, text in turns], return_dict=False
                )
                loaded.model(torch.tensor([ids]))
    for hook in hooks:
        hook.remove()
    assert [len(experts) for experts in chosen] == [32, 32, 32]


def test_the_measured_accuracy_is_stated() -> None:
    report = json.loads((DIRECTORY / "accuracy.json").read_text(encoding="utf-8"))
    assert report["seed_answer"] == "579" and report["dtype"] == ["torch.bfloat16"]
    uniform = report["unseen_uniform"]
    counts = uniform["groups"]["all"]
    assert counts["sums"] >= 2000
    assert uniform["accuracy"] == counts["right"] / counts["sums"]
    assert f"{100 * uniform['accuracy']:.1f} %" in (DIRECTORY / "README.md").read_text("utf-8")
    assert report["seed_sum_was_held_out"] and held_out(123, 456)


def test_an_unknown_checkpoint_is_refused() -> None:
    for name in ("other", "..", "", "qwen3_5_sums/.."):
        with pytest.raises(ConfigError, match="no shipped checkpoint"):
            shipped_checkpoint(name)
