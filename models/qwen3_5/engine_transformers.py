# SPDX-License-Identifier: Apache-2.0
"""Runs transformers' own Qwen3.5-MoE with xmoe's experts.

transformers keeps a registry of functions that stand in for a model's experts module. One function
is registered under the name "xmoe"; it hands each call to the object attached to that module. The
module's own expert parameters are removed before anything is allocated, so routed experts exist
once, in the layout of `ExpertWeights`, and only the local ones.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from xmoe.errors import ConfigError
from xmoe.models.qwen3_5.weights import BytesRead, WeightReader, open_checkpoint
from xmoe.models.qwen3_5.widen import (
    Widening,
    is_hidden_norm,
    plan_widening,
    widened_config,
    widened_shape,
)
from xmoe.prepare import choose_experts, known_quant, prepared
from xmoe.types import ExpertWeights, MoeShape

NAME = "xmoe"
_ATTRIBUTE = "xmoe_layer"
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class ExpertsLayer(Protocol):
    """The routed experts of one layer, over all ranks of the group.

    hidden_states [T, H], topk_ids [T, K] int64 global ids, topk_weights [T, K] -> [T, H] in the
    dtype of hidden_states; T may be 0. Collective.
    """

    def __call__(self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor: ...


MakeLayer = Callable[[int, ExpertWeights], ExpertsLayer]

_lock = threading.Lock()
_previous: list[Any] = []
_ABSENT = object()


def _new_lock() -> None:
    """A forked child must not inherit a lock that a thread of its parent holds."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_new_lock)


def experts_forward(
    module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, **_: Any
) -> Tensor:
    """The registered function: runs the layer attached to this experts module."""
    layer: ExpertsLayer | None = module.__dict__.get(_ATTRIBUTE)
    if layer is None:
        raise ConfigError(
            f"experts_implementation is {NAME!r} but this {type(module).__name__} has no xmoe "
            "layer; only models built by load_model have one; use load_model, or another "
            "experts_implementation"
        )
    return layer(hidden_states, top_k_index, top_k_weights)


def register() -> None:
    """Puts the experts function into transformers' registry. Local; may be called again, from any
    thread, and in a forked or spawned child."""
    from transformers.integrations.moe import ExpertsInterface

    mapping = ExpertsInterface._global_mapping
    with _lock:
        current = mapping.get(NAME, _ABSENT)
        if current is not experts_forward:
            _previous[:] = [current]
            ExpertsInterface.register(NAME, experts_forward)


def unregister() -> None:
    """Restores what the registry held under the name before. Local; may be called again."""
    from transformers.integrations.moe import ExpertsInterface

    mapping: dict[str, Any] = ExpertsInterface._global_mapping
    with _lock:
        # Somebody else's later entry stays.
        if mapping.get(NAME) is experts_forward:
            before = _previous.pop() if _previous else _ABSENT
            if before is _ABSENT:
                del mapping[NAME]
            else:
                mapping[NAME] = before
        _previous.clear()


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run on this rank, until its layers are closed by whoever made them.

    Attributes:
        model: transformers' Qwen3_5MoeForCausalLM, in eval mode.
        tokenizer: transformers' tokenizer, or None when the directory holds none.
        shape: what the layers see, widened sizes included.
        stored_shape: the shape in the checkpoint.
        layers: what `make_layer` returned, in layer order.
        bytes_read: bytes read from the checkpoint by this rank.
        notices: one line per thing that was ignored on purpose.
    """

    model: Any
    tokenizer: Any
    shape: MoeShape
    stored_shape: MoeShape
    layers: tuple[ExpertsLayer, ...]
    bytes_read: BytesRead
    notices: tuple[str, ...]

    @property
    def end_ids(self) -> frozenset[int]:
        """Token ids that end an answer."""
        value = self.model.config.eos_token_id
        if value is None:
            return frozenset()
        return frozenset([value] if isinstance(value, int) else value)

    def run_empty_step(self) -> None:
        """Takes part in one step without a token of its own. Collective.

        Calls every MoE layer once with no rows, in layer order, as a rank with a request does.
        """
        embedding = self.model.get_input_embeddings().weight
        dtype, device = embedding.dtype, embedding.device
        hidden = torch.zeros((0, self.shape.hidden), dtype=dtype, device=device)
        ids = torch.zeros((0, self.shape.topk), dtype=torch.int64, device=device)
        weights = torch.zeros((0, self.shape.topk), dtype=dtype, device=device)
        with torch.no_grad():
            for layer in self.layers:
                layer(hidden, ids, weights)


def preload() -> None:
    """Imports what `load_model` needs of transformers, so that processes forked later share it."""
    from transformers import AutoTokenizer, DynamicCache  # noqa: F401
    from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe  # noqa: F401


def load_model(
    model_dir: Path | str,
    ep_rank: int,
    ep_size: int,
    make_layer: MakeLayer,
    *,
    widen: tuple[int, int] | None = (1024, 512),
    dtype: torch.dtype | None = torch.bfloat16,
    convert_dtype: bool = False,
    device: torch.device | None = None,
    attention: str | None = None,
    quant: str = "none",
) -> LoadedModel:
    """Builds the model with this rank's experts. Local, apart from what `make_layer` does.

    Args:
        model_dir: a Hugging Face model directory.
        ep_rank: this rank in the EP group.
        ep_size: ranks of the EP group; divides the number of experts.
        make_layer: called once per layer in order with (layer index, local weights); what it
            returns is called as `layer(hidden_states [T, H], topk_ids [T, K], topk_weights
            [T, K]) -> [T, H]`.
        widen: least (hidden, intermediate); smaller sizes are padded exactly. None keeps sizes.
        dtype: what the weights must be stored as; None takes the checkpoint's.
        convert_dtype: convert to `dtype` instead of refusing another one.
        device: where the weights go; None is the CPU. Each tensor is moved as it is read.
        attention: transformers' name of the attention function; None is the library's own choice.
        quant: "w8a8" or "w4a8" prepares the routed experts in that form as they are read, one layer
            at a time; everything else stays as it is stored.

    Returns:
        The model; its experts function is "xmoe". On npu tensors its router is torch_npu's gating
        operator where there is one.

    Raises:
        CheckpointError: the directory is incomplete or does not fit its config; raised after
            reading headers only.
        ConfigError: the sizes, the dtype, the rank numbers or the quantisation are not acceptable.
    """
    quant = known_quant(quant)
    catalogue = open_checkpoint(model_dir, convert_dtype=convert_dtype)
    stored = _DTYPES[catalogue.shape.dtype]
    dtype = stored if dtype is None else dtype
    if dtype != stored and not convert_dtype:
        raise ConfigError(
            f"dtype={dtype} but {model_dir} is stored as {stored}; the stored dtype is allowed; "
            "pass dtype=None, or convert_dtype=True to convert"
        )
    plan = plan_widening(catalogue.shape, widen)
    register()
    model = _empty_model(widened_config(catalogue.config, plan), plan)
    layers = []
    with WeightReader(catalogue, plan, dtype if convert_dtype else None) as reader:
        for index, block in enumerate(model.model.layers):
            weights = prepared(reader.experts(index, ep_rank, ep_size), quant)
            layer = make_layer(index, _moved(weights, device))
            # Not through setattr: a layer that is a Module must not become a child of this one.
            block.mlp.experts.__dict__[_ATTRIBUTE] = layer
            layers.append(layer)
        for name, tensor in reader.others():
            owner, _, leaf = name.rpartition(".")
            model.get_submodule(owner)._parameters[leaf] = torch.nn.Parameter(
                tensor if device is None else tensor.to(device), requires_grad=False
            )
        bytes_read = reader.bytes_read
    if model.config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    if device is not None and device.type != "cpu":
        model.to(device)  # what is left: buffers
        if device.type == "npu":
            for block in model.model.layers:
                _use_device_router(block.mlp.gate)
    if attention is not None:
        model.set_attn_implementation(attention)
    tokenizer, notice = load_tokenizer(Path(model_dir))
    return LoadedModel(
        model=model.eval(),
        tokenizer=tokenizer,
        shape=replace(
            widened_shape(catalogue.shape, plan),
            dtype=str(dtype).removeprefix("torch."),
            quant=quant,
        ),
        stored_shape=catalogue.shape,
        layers=tuple(layers),
        bytes_read=bytes_read,
        notices=catalogue.notices + notice,
    )


def _moved(weights: ExpertWeights, device: torch.device | None) -> ExpertWeights:
    if device is None or device.type == "cpu":
        return weights
    held = {field.name: getattr(weights, field.name) for field in fields(weights)}
    tensors: dict[str, Any] = {
        key: value.to(device) for key, value in held.items() if isinstance(value, Tensor)
    }
    return replace(weights, **tensors)


def _use_device_router(gate: Any) -> None:
    """Let a router of the library choose with the device's own operator, from the same logits."""

    def forward(hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = F.linear(hidden_states.reshape(-1, gate.hidden_dim), gate.weight)
        ids, weights = choose_experts(logits, gate.top_k)
        return logits, weights.to(logits.dtype), ids

    gate.forward = forward


def _empty_model(text: dict[str, Any], plan: Widening | None) -> Any:
    """transformers' model on the meta device, without expert parameters, with real buffers."""
    from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as library
    from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig

    config = Qwen3_5MoeTextConfig(**text)
    with torch.device("meta"):
        model: Any = library.Qwen3_5MoeForCausalLM(config)
    # Its frequencies are computed, not stored, so the meta device would lose them.
    model.model.rotary_emb = library.Qwen3_5MoeTextRotaryEmbedding(config=config)
    for block in model.model.layers:
        block.mlp.experts._parameters.clear()
    model.set_experts_implementation(NAME)
    if plan is not None:
        for name, module in model.named_modules():
            if is_hidden_norm(f"{name}.weight"):
                module.eps *= plan.mean_factor
    return model


def load_tokenizer(directory: Path) -> tuple[Any, tuple[str, ...]]:
    """transformers' tokenizer of a model directory, or None, and notices. Local."""
    if not (directory / "tokenizer_config.json").exists():
        return None, ("no tokenizer_config.json: prompts must be given as token ids",)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory, local_files_only=True), ()
