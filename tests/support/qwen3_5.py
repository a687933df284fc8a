# SPDX-License-Identifier: Apache-2.0
"""Small random Qwen3.5-MoE checkpoints, in every layout found in the field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from xmoe.types import ExpertWeights

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


def make_model(dtype: torch.dtype = torch.bfloat16, seed: int = 0, **changes: Any) -> Any:
    """A model with random weights; norms are random too, so that a lost scale is seen."""
    from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig

    torch.manual_seed(seed)
    model = Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**{**SIZES, **changes}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.config.dtype = dtype
    return model.to(dtype).eval()


def config_of(model: Any, **changes: Any) -> dict[str, Any]:
    """What config.json says of a model."""
    value: dict[str, Any] = json.loads(model.config.to_json_string(use_diff=False))
    value.update(changes)
    return value


def fused_tensors(model: Any) -> dict[str, Tensor]:
    """The state dict: fused experts under the prefix `model.`."""
    return {name: tensor.contiguous() for name, tensor in model.state_dict().items()}


def per_expert(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same weights, one tensor per expert and projection."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        stem, _, leaf = name.rpartition(".")
        if leaf == "gate_up_proj":
            for expert, rows in enumerate(tensor):
                gate, up = rows.chunk(2)
                found[f"{stem}.{expert}.gate_proj.weight"] = gate.contiguous()
                found[f"{stem}.{expert}.up_proj.weight"] = up.contiguous()
        elif leaf == "down_proj" and stem.endswith("experts"):
            for expert, rows in enumerate(tensor):
                found[f"{stem}.{expert}.down_proj.weight"] = rows.contiguous()
        else:
            found[name] = tensor
    return found


def with_prefix(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Puts another prefix in the place of `model.`."""
    return {
        (prefix + name.removeprefix("model.") if name.startswith("model.") else name): tensor
        for name, tensor in tensors.items()
    }


def write(
    directory: Path, config: dict[str, Any], tensors: dict[str, Tensor], shards: int = 0
) -> Path:
    """Writes a model directory; `shards` > 0 writes that many with an index."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if not shards:
        save_file(tensors, directory / "model.safetensors")
        return directory
    weight_map: dict[str, str] = {}
    names = sorted(tensors)
    for number in range(shards):
        file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        part = {name: tensors[name] for name in names[number::shards]}
        save_file(part, directory / file)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return directory


def eager_layer(calls: list[tuple[int, int]]) -> Any:
    """Experts in the order and with the rounding of transformers' eager module."""

    def make_layer(index: int, weights: ExpertWeights) -> Any:
        def layer(hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
            calls.append((index, hidden_states.shape[0]))
            assert topk_ids.dtype == torch.int64 and hidden_states.dim() == 2
            result = torch.zeros_like(hidden_states)
            for expert in range(weights.gate_up.shape[0]):
                tokens, slots = torch.where(topk_ids == expert)
                if tokens.numel() == 0:
                    continue
                gate_up = weights.gate_up[expert].T.contiguous()
                gate, up = torch.nn.functional.linear(hidden_states[tokens], gate_up).chunk(2, -1)
                act = torch.nn.functional.silu(gate) * up
                down = weights.down[expert].T.contiguous()
                rows = torch.nn.functional.linear(act, down) * topk_weights[tokens, slots, None]
                result.index_add_(0, tokens, rows.to(result.dtype))
            return result

        return layer

    return make_layer


def registered_in_child(queue: Any) -> None:
    """Says which function a fresh process registered. Here, since a spawned one must find it."""
    from transformers.integrations.moe import ExpertsInterface

    from xmoe.models.qwen3_5 import engine_transformers as engine

    engine.register()
    found = ExpertsInterface._global_mapping.get("xmoe")
    queue.put(getattr(found, "__module__", None))
