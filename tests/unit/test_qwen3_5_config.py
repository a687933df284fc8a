# SPDX-License-Identifier: Apache-2.0
"""config.json -> MoeShape: strict, never defaulted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from xmoe.errors import CheckpointError, ConfigError
from xmoe.models.qwen3_5 import config as reader
from xmoe.types import MoeShape


def text(**changes: Any) -> dict[str, Any]:
    """The sizes published for 35B-A3B."""
    value: dict[str, Any] = {
        "model_type": "qwen3_5_moe_text",
        "hidden_size": 2048,
        "moe_intermediate_size": 512,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 8,
        "full_attention_interval": 4,
        "hidden_act": "silu",
        "dtype": "bfloat16",
    }
    value.update(changes)
    return {key: item for key, item in value.items() if item is not ...}


def test_flat_and_nested_configs_give_the_same_shape() -> None:
    expected = MoeShape(hidden=2048, intermediate=512, num_experts=256, topk=8)
    assert reader.shape_from_config(text()) == expected
    nested = {"model_type": "qwen3_5_moe", "text_config": text(dtype=...), "dtype": "bfloat16"}
    assert reader.shape_from_config(nested) == expected
    old = {"model_type": "qwen3_5_moe", "text_config": text(dtype=..., torch_dtype="bfloat16")}
    assert reader.shape_from_config(old) == expected


@pytest.mark.parametrize(
    "key",
    ["hidden_size", "moe_intermediate_size", "num_experts", "num_experts_per_tok"]
    + ["num_hidden_layers", "hidden_act", "dtype"],
)
def test_a_missing_key_is_named_and_never_guessed(key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key} is missing"):
        reader.shape_from_config(text(**{key: ...}))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": "2048"}, "hidden_size is '2048'"),
        ({"hidden_size": True}, "hidden_size is True"),
        ({"num_experts": 0}, "num_experts is 0"),
        ({"num_experts_per_tok": 300}, "at most num_experts"),
        ({"dtype": "fp8"}, "dtype is 'fp8'"),
        ({"model_type": "qwen3_moe"}, "model_type is 'qwen3_moe'"),
        ({"norm_topk_prob": False}, "norm_topk_prob is False"),
        ({"mlp_only_layers": [0]}, "mlp_only_layers"),
        ({"swiglu_limit": "7"}, "swiglu_limit is '7'"),
        ({"swiglu_limit": 10**400}, "up to 16777216 or null"),
        ({"swiglu_limit": float("inf")}, "up to 16777216 or null"),
        ({"hidden_size": 10**5000}, "hidden_size is a number of very many digits; a positive"),
        ({"quantization_config": {"quant_method": "mystery"}}, "mystery.*known are none"),
        ({"gate_up_layout": "mixed"}, "gate_up_layout is 'mixed'"),
        ({"layer_types": ["linear_attention"]}, "num_hidden_layers=8"),
        ({"layer_types": ["mamba"] * 8}, "layer_types.0. is 'mamba'"),
        ({"full_attention_interval": ...}, "layer_types is None"),
    ],
)
def test_a_wrong_value_is_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        reader.shape_from_config(text(**changes))


def test_two_different_dtypes_are_refused() -> None:
    nested = {"model_type": "qwen3_5_moe", "text_config": text(), "dtype": "float16"}
    with pytest.raises(ConfigError, match="'float16' outside and 'bfloat16' inside"):
        reader.shape_from_config(nested)


@pytest.mark.parametrize("value", [None, "", "none", "NONE", {"quant_method": None}])
def test_every_spelling_of_no_quantisation_is_the_same(value: object) -> None:
    assert reader.shape_from_config(text(quantization_config=value)) == reader.shape_from_config(
        text()
    )


def test_activation_and_clamp_are_read() -> None:
    shape = reader.shape_from_config(text(hidden_act="gelu_pytorch_tanh", swiglu_limit=7))
    assert (shape.activation, shape.activation_clamp) == ("gelu_pytorch_tanh", 7.0)


def test_layer_types_from_the_interval() -> None:
    kinds = reader.layer_types(text())
    assert [index for index, kind in enumerate(kinds) if kind == "full_attention"] == [3, 7]


def test_experts_of_a_rank() -> None:
    assert list(reader.experts_of_rank(8, 1, 4)) == [2, 3]
    with pytest.raises(ConfigError, match="ep_size=3 does not divide num_experts=8.*1, 2, 4, 8"):
        reader.experts_of_rank(8, 0, 3)
    with pytest.raises(ConfigError, match="ep_rank=4 with ep_size=4"):
        reader.experts_of_rank(8, 4, 4)


@pytest.mark.parametrize("content", [b"", b"[1]", b"{", b"\xff\xfe"])
def test_an_unreadable_file_is_a_checkpoint_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match="JSON"):
        reader.read_config(tmp_path)


def test_a_missing_file_and_a_file_path(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no config.json"):
        reader.read_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(text()), encoding="utf-8")
    assert reader.read_config(tmp_path / "config.json") == reader.read_config(tmp_path)


def test_reading_a_config_needs_no_torch() -> None:
    code = (
        "import sys; from xmoe.models.qwen3_5 import config, names, widen; "
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.timeout(20)
def test_layers_without_end_are_refused_before_they_are_counted_out() -> None:
    with pytest.raises(ConfigError, match="num_hidden_layers is 10+; a positive integer up to"):
        reader.layer_types(text(num_hidden_layers=10**18))
