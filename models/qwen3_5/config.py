# SPDX-License-Identifier: Apache-2.0
"""Reads a Hugging Face config.json. No torch, no transformers, and nothing is defaulted: a wrong
guess of a size shows up as noise in the answers, a missing key shows up here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from xmoe.env import shown
from xmoe.errors import CheckpointError, ConfigError
from xmoe.inputs import read_json
from xmoe.types import MoeShape

MODEL_TYPES = ("qwen3_5_moe", "qwen3_5_moe_text")
DTYPES = ("bfloat16", "float16", "float32")
LAYER_TYPES = ("linear_attention", "full_attention")
# Activations under their config name -> the name of the gated form.
_GATED = {"silu": "swiglu", "swish": "swiglu"}
_UNQUANTISED = (None, "", "none", "null")
# The largest known has some thousand bytes; what has more is another file.
_MOST_BYTES = 16 << 20
# Far above every model known; what is larger is a mistake that would only take memory.
_MOST, _MOST_LAYERS = 1 << 24, 4096
_QUANT = ("w8a8", "w4a8", "mxfp8", "mxfp4")


def read_config(path: Path | str) -> dict[str, Any]:
    """Reads config.json from a model directory or by its own path.

    Raises:
        CheckpointError: no such file, or not a JSON object.
    """
    file = Path(path)
    if file.is_dir():
        file = file / "config.json"
    try:
        value = read_json(file, "download it again", error=CheckpointError, most_bytes=_MOST_BYTES)
    except FileNotFoundError:
        raise CheckpointError(
            f"no config.json: {file} does not exist; a model directory holds config.json and "
            "safetensors files; check the path"
        ) from None
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{file} holds a {type(value).__name__}; a JSON object is needed; "
            "download the file again"
        )
    return value


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The part that describes the text model: `text_config` if nested, else the whole.

    Raises:
        ConfigError: another model type, or a nesting that does not fit the type.
    """
    kind = config.get("model_type")
    if kind not in MODEL_TYPES:
        raise ConfigError(
            f"model_type is {shown(kind)}; this package reads {', '.join(MODEL_TYPES)}; "
            "choose a Qwen3.5-MoE checkpoint"
        )
    if kind == "qwen3_5_moe_text":
        return dict(config)
    inner = config.get("text_config")
    if not isinstance(inner, Mapping):
        raise ConfigError(
            f"model_type 'qwen3_5_moe' needs text_config, got {shown(inner)}; an object is "
            "allowed; use the config.json that belongs to the weights"
        )
    if inner.get("model_type", "qwen3_5_moe_text") != "qwen3_5_moe_text":
        raise ConfigError(
            f"text_config.model_type is {shown(inner['model_type'])}; allowed is "
            "'qwen3_5_moe_text'; choose a Qwen3.5-MoE checkpoint"
        )
    return {**inner, **_shared_dtype(config, inner)}


def _shared_dtype(config: Mapping[str, Any], inner: Mapping[str, Any]) -> dict[str, Any]:
    """A nested config may give the dtype outside only; two different ones are an error."""
    outside = config.get("dtype", config.get("torch_dtype"))
    inside = inner.get("dtype", inner.get("torch_dtype"))
    if outside is not None and inside is not None and outside != inside:
        raise ConfigError(
            f"dtype is {shown(outside)} outside and {shown(inside)} inside text_config; one value "
            "is allowed; correct config.json"
        )
    found = {} if inside is None and outside is None else {"dtype": inside or outside}
    if "quantization_config" in config and "quantization_config" not in inner:
        found["quantization_config"] = config["quantization_config"]
    return found


def shape_from_config(config: Mapping[str, Any]) -> MoeShape:
    """What the MoE layers of this model look like after loading.

    Args:
        config: the parsed config.json, nested or not.

    Returns:
        The shape. `gate_up_layout` is always "concatenated", since loading converts.

    Raises:
        ConfigError: a key is missing or has a value this package cannot honour.
    """
    text = text_config(config)
    shape = MoeShape(
        hidden=required_int(text, "hidden_size"),
        intermediate=required_int(text, "moe_intermediate_size"),
        num_experts=required_int(text, "num_experts"),
        topk=required_int(text, "num_experts_per_tok"),
        dtype=_dtype(text),
        activation=_activation(text),
        activation_clamp=_clamp(text),
        quant=_quant(text),
    )
    if shape.topk > shape.num_experts:
        raise ConfigError(
            f"num_experts_per_tok is {shape.topk} with num_experts {shape.num_experts}; at most "
            "num_experts is allowed; correct config.json"
        )
    if text.get("norm_topk_prob", True) is not True:
        raise ConfigError(
            f"norm_topk_prob is {shown(text['norm_topk_prob'])}; Qwen3.5 always renormalises, so "
            "only true is allowed; correct config.json"
        )
    if text.get("mlp_only_layers"):
        raise ConfigError(
            f"mlp_only_layers is {shown(text['mlp_only_layers'])}; every Qwen3.5-MoE layer has "
            "experts, so only an empty list is allowed; correct config.json"
        )
    gate_up_layout(config)
    layer_types(config)
    return shape


def layer_types(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The kind of every layer, from `layer_types` or `full_attention_interval`; one is needed.

    Raises:
        ConfigError: neither is given, or they do not fit num_hidden_layers.
    """
    text = text_config(config)
    count = required_int(text, "num_hidden_layers", _MOST_LAYERS)
    kinds = text.get("layer_types")
    if kinds is None and text.get("full_attention_interval") is not None:
        every = required_int(text, "full_attention_interval")
        return tuple(LAYER_TYPES[(index + 1) % every == 0] for index in range(count))
    if not isinstance(kinds, list) or len(kinds) != count:
        raise ConfigError(
            f"layer_types is {shown(kinds)}; a list of num_hidden_layers={count} entries is needed "
            "(or full_attention_interval); correct config.json"
        )
    for index, kind in enumerate(kinds):
        if kind not in LAYER_TYPES:
            raise ConfigError(
                f"layer_types[{index}] is {shown(kind)}; allowed are {', '.join(LAYER_TYPES)}; "
                "correct config.json"
            )
    return tuple(kinds)


def gate_up_layout(config: Mapping[str, Any]) -> str:
    """How fused gate/up rows are stored: "concatenated" (the family's layout, used when the key
    `gate_up_layout` is absent) or "interleaved".

    Raises:
        ConfigError: another name.
    """
    value = text_config(config).get("gate_up_layout", "concatenated")
    if value not in ("concatenated", "interleaved"):
        raise ConfigError(
            f"gate_up_layout is {shown(value)}; allowed are 'concatenated' and 'interleaved'; "
            "correct config.json"
        )
    return str(value)


def experts_of_rank(num_experts: int, ep_rank: int, ep_size: int) -> range:
    """The global ids of the routed experts that a rank holds.

    Raises:
        ConfigError: the rank is not in the group, or the experts do not divide evenly.
    """
    if ep_size < 1 or not 0 <= ep_rank < ep_size:
        raise ConfigError(
            f"ep_rank={ep_rank} with ep_size={ep_size}; 0 <= ep_rank < ep_size is allowed; "
            "check how the ranks were started"
        )
    if num_experts % ep_size:
        allowed = [str(n) for n in range(1, num_experts + 1) if num_experts % n == 0]
        raise ConfigError(
            f"ep_size={ep_size} does not divide num_experts={num_experts}; allowed are "
            f"{', '.join(allowed)}; choose one of them"
        )
    count = num_experts // ep_size
    return range(ep_rank * count, (ep_rank + 1) * count)


def required_int(text: Mapping[str, Any], key: str, most: int = _MOST) -> int:
    """A size that must be there: a positive integer."""
    value = text.get(key)
    # bool is an int in Python; true is no size.
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        got = "missing" if key not in text else shown(value)
        raise ConfigError(
            f"{key} is {got}; a positive integer up to {most} is needed and never guessed; "
            "use the config.json that belongs to the weights"
        )
    return value


def _dtype(text: Mapping[str, Any]) -> str:
    value = text.get("dtype", text.get("torch_dtype"))
    if value not in DTYPES:
        got = "missing" if value is None else shown(value)
        raise ConfigError(
            f"dtype is {got}; allowed are {', '.join(DTYPES)}; "
            "use the config.json that belongs to the weights"
        )
    return str(value)


def _activation(text: Mapping[str, Any]) -> str:
    value = text.get("hidden_act")
    if not isinstance(value, str) or not value:
        got = "missing" if value is None else shown(value)
        raise ConfigError(
            f"hidden_act is {got}; the name of an activation such as 'silu' is needed; "
            "use the config.json that belongs to the weights"
        )
    # Other names pass through: whether a path supports them is decided by the policy.
    return _GATED.get(value, value)


def _clamp(text: Mapping[str, Any]) -> float | None:
    value = text.get("swiglu_limit")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= _MOST:
        raise ConfigError(
            f"swiglu_limit is {shown(value)}; a positive number up to {_MOST} or null is allowed; "
            "correct config.json"
        )
    return float(value)


def _quant(text: Mapping[str, Any]) -> str:
    value = text.get("quantization_config")
    if isinstance(value, Mapping):
        value = value.get("quant_method")
    if isinstance(value, str):
        value = value.lower()
    if value in _UNQUANTISED:
        return "none"
    if value not in _QUANT:
        raise ConfigError(
            f"quantization_config names {shown(value)}; known are none, {', '.join(_QUANT)}; "
            "use an unquantised checkpoint"
        )
    return str(value)
