# SPDX-License-Identifier: Apache-2.0
"""Names and shapes of a Qwen3.5-MoE checkpoint's tensors. Standard library only.

The canonical name is the one transformers' text model uses: `model.layers.0.mlp.gate.weight`.
Routed experts are keyed by (layer, expert, part); fused tensors have expert None.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from xmoe.models.qwen3_5.config import layer_types, required_int, text_config
from xmoe.types import MoeShape

PREFIXES = ("model.language_model.", "model.")
# Stored in full checkpoints, not used by the text model.
IGNORED = ("mtp.", "model.visual.", "visual.")

_ROOTS = re.compile(r"(layers\.\d+\.|embed_tokens\.|norm\.weight$)")
_FUSED = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(gate_up_proj|down_proj)(?:\.weight)?")
_SINGLE = re.compile(
    r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w3|w2)\.weight"
)
_SPELLING = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


@dataclass(frozen=True, order=True)
class ExpertKey:
    """Where a routed-expert tensor belongs; `expert` is -1 for a tensor that holds all of them."""

    layer: int
    expert: int
    part: str

    def __str__(self) -> str:
        stem = f"model.layers.{self.layer}.mlp.experts."
        if self.expert < 0:
            return f"{stem}{self.part}"
        return f"{stem}{self.expert}.{self.part}.weight"


def canonical_name(name: str) -> str | None:
    """The canonical form of a stored name, or None when its prefix is not known."""
    if name == "lm_head.weight":
        return name
    for prefix in PREFIXES:
        if name.startswith(prefix) and _ROOTS.match(name, len(prefix)):
            return "model." + name[len(prefix) :]
    return None


def expert_key(canonical: str) -> ExpertKey | None:
    """The place of a routed-expert tensor, or None for any other tensor."""
    if match := _FUSED.fullmatch(canonical):
        return ExpertKey(int(match[1]), -1, match[2])
    if match := _SINGLE.fullmatch(canonical):
        return ExpertKey(int(match[1]), int(match[2]), _SPELLING.get(match[3], match[3]))
    return None


def prefix_hint(name: str) -> str:
    """Says which known prefix an unknown one is nearest to; empty when the prefix is known."""
    match = _ROOTS.search(name)
    if match is None or canonical_name(name) is not None:
        return ""
    prefix = name[: match.start()]
    if prefix in PREFIXES:
        return ""
    # A re-saved model repeats a part of the prefix: without repeats it is a known one.
    parts = prefix.split(".")
    single = ".".join(part for index, part in enumerate(parts) if part not in parts[:index])
    single = single.rstrip(".") + "."
    nearest = (
        single
        if single in PREFIXES
        else (difflib.get_close_matches(prefix, PREFIXES, 1, 0.0) or [PREFIXES[-1]])[0]
    )
    return f"prefix {prefix!r} is not known, nearest is {nearest!r}"


def expert_shapes(
    shape: MoeShape, num_layers: int, fused: bool
) -> dict[ExpertKey, tuple[int, ...]]:
    """Shapes of all routed-expert tensors in one of the two stored layouts."""
    experts, hidden, inner = shape.num_experts, shape.hidden, shape.intermediate
    found: dict[ExpertKey, tuple[int, ...]] = {}
    for layer in range(num_layers):
        if fused:
            found[ExpertKey(layer, -1, "gate_up_proj")] = (experts, 2 * inner, hidden)
            found[ExpertKey(layer, -1, "down_proj")] = (experts, hidden, inner)
            continue
        for expert in range(experts):
            found[ExpertKey(layer, expert, "gate_proj")] = (inner, hidden)
            found[ExpertKey(layer, expert, "up_proj")] = (inner, hidden)
            found[ExpertKey(layer, expert, "down_proj")] = (hidden, inner)
    return found


def other_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors that are no routed experts, by canonical name.

    Raises:
        ConfigError: a size is missing from the config.
    """
    text = text_config(config)
    hidden, vocab = required_int(text, "hidden_size"), required_int(text, "vocab_size")
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
    }
    if not text.get("tie_word_embeddings", False):
        found["lm_head.weight"] = (vocab, hidden)
    for index, kind in enumerate(layer_types(config)):
        mixer = _linear_attention(text) if kind == "linear_attention" else _full_attention(text)
        for name, shape in {**mixer, **_block(text)}.items():
            found[f"model.layers.{index}.{name}"] = shape
    return found


def _linear_attention(text: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden = required_int(text, "hidden_size")
    value_heads = required_int(text, "linear_num_value_heads")
    value_dim = required_int(text, "linear_value_head_dim")
    keys = required_int(text, "linear_num_key_heads") * required_int(text, "linear_key_head_dim")
    values = value_heads * value_dim
    channels = 2 * keys + values
    return {
        "linear_attn.in_proj_qkv.weight": (channels, hidden),
        "linear_attn.in_proj_z.weight": (values, hidden),
        "linear_attn.in_proj_b.weight": (value_heads, hidden),
        "linear_attn.in_proj_a.weight": (value_heads, hidden),
        "linear_attn.conv1d.weight": (channels, 1, required_int(text, "linear_conv_kernel_dim")),
        "linear_attn.dt_bias": (value_heads,),
        "linear_attn.A_log": (value_heads,),
        "linear_attn.norm.weight": (value_dim,),
        "linear_attn.out_proj.weight": (hidden, values),
    }


def _full_attention(text: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, head = required_int(text, "hidden_size"), required_int(text, "head_dim")
    queries = required_int(text, "num_attention_heads") * head
    keys = required_int(text, "num_key_value_heads") * head
    found: dict[str, tuple[int, ...]] = {
        # Twice the queries: each head's rows are followed by its gate's.
        "self_attn.q_proj.weight": (2 * queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "self_attn.q_norm.weight": (head,),
        "self_attn.k_norm.weight": (head,),
    }
    if text.get("attention_bias", False):
        for name in ("q", "k", "v", "o"):
            rows = found[f"self_attn.{name}_proj.weight"][0]
            found[f"self_attn.{name}_proj.bias"] = (rows,)
    return found


def _block(text: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden = required_int(text, "hidden_size")
    shared = required_int(text, "shared_expert_intermediate_size")
    return {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate.weight": (required_int(text, "num_experts"), hidden),
        "mlp.shared_expert.gate_proj.weight": (shared, hidden),
        "mlp.shared_expert.up_proj.weight": (shared, hidden),
        "mlp.shared_expert.down_proj.weight": (hidden, shared),
        "mlp.shared_expert_gate.weight": (1, hidden),
    }
