# SPDX-License-Identifier: Apache-2.0
"""Checkpoints as found in the field: right ones load bit for bit, wrong ones are named."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from support import qwen3_5 as toy
from xmoe.errors import CheckpointError, ConfigError
from xmoe.models.qwen3_5.engine_transformers import load_model
from xmoe.models.qwen3_5.names import other_shapes
from xmoe.models.qwen3_5.weights import WeightReader, open_checkpoint
from xmoe.types import ExpertWeights

Tensors = dict[str, Tensor]
STEM = "model.layers.1.mlp.experts"


@pytest.fixture(scope="module")
def model() -> Any:
    return toy.make_model()


@pytest.fixture
def fused(model: Any) -> Tensors:
    return toy.fused_tensors(model)


@pytest.fixture
def single(model: Any) -> Tensors:
    return toy.per_expert(toy.fused_tensors(model))


def never(_layer: int, _weights: ExpertWeights) -> Any:
    raise AssertionError("weights were read although the headers are wrong")


def refusal(directory: Path) -> str:
    """The message, which must be the same on every rank and come before any weight is read."""
    messages = []
    for rank in (0, 3):
        with pytest.raises(CheckpointError) as caught:
            load_model(directory, rank, 4, never, widen=None)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
    return messages[0]


def rank_experts(directory: Path, ep_size: int) -> list[Tensor]:
    catalogue = open_checkpoint(directory)
    found = []
    with WeightReader(catalogue) as reader:
        for rank in range(ep_size):
            for layer in range(catalogue.num_layers):
                weights = reader.experts(layer, rank, ep_size)
                assert weights.gate_up.is_contiguous() and weights.down.is_contiguous()
                found += [weights.gate_up, weights.down]
    return found


def equal(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) and all(
        a.dtype == b.dtype and torch.equal(a.view(torch.int16), b.view(torch.int16))
        for a, b in zip(left, right, strict=True)
    )


def test_expected_names_and_shapes_are_those_of_transformers(model: Any) -> None:
    real = {
        name: tuple(tensor.shape)
        for name, tensor in model.state_dict().items()
        if ".experts." not in name
    }
    assert other_shapes(toy.config_of(model)) == real
    tied = toy.config_of(model, tie_word_embeddings=True)
    assert other_shapes(tied).keys() == real.keys() - {"lm_head.weight"}


@pytest.mark.parametrize("ep_size", [1, 2, 8])
@pytest.mark.parametrize("prefix", ["model.", "model.language_model."])
@pytest.mark.parametrize("shards", [0, 3])
def test_both_layouts_and_prefixes_give_the_same_bits(
    tmp_path: Path, model: Any, fused: Tensors, single: Tensors, prefix: str, shards: int,
    ep_size: int,
) -> None:  # fmt: skip
    config = toy.config_of(model)
    one = toy.write(tmp_path / "a", config, toy.with_prefix(fused, prefix), shards)
    two = toy.write(tmp_path / "b", config, toy.with_prefix(single, prefix), shards)
    found = rank_experts(one, ep_size)
    assert equal(found, rank_experts(two, ep_size))
    count = 8 // ep_size
    for rank in range(ep_size):
        for layer in range(3):
            local = slice(rank * count, (rank + 1) * count)
            stem = f"model.layers.{layer}.mlp.experts"
            gate_up, down = found[6 * rank + 2 * layer : 6 * rank + 2 * layer + 2]
            assert torch.equal(gate_up, fused[f"{stem}.gate_up_proj"][local].transpose(1, 2))
            assert torch.equal(down, fused[f"{stem}.down_proj"][local].transpose(1, 2))


def test_the_spellings_w1_w2_w3_and_dot_weight_are_known(
    tmp_path: Path, model: Any, fused: Tensors, single: Tensors
) -> None:
    config = toy.config_of(model)
    short = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}

    def respell(name: str) -> str:
        if ".experts." not in name:
            return name
        head, part, tail = name.rsplit(".", 2)
        return f"{head}.{short[part]}.{tail}"

    renamed = {respell(name): tensor for name, tensor in single.items()}
    dotted = {
        f"{name}.weight" if ".experts." in name else name: tensor for name, tensor in fused.items()
    }
    plain = rank_experts(toy.write(tmp_path / "a", config, fused), 2)
    assert equal(plain, rank_experts(toy.write(tmp_path / "b", config, renamed), 2))
    assert equal(plain, rank_experts(toy.write(tmp_path / "c", config, dotted), 2))


def drop(*names: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        for name in [n for n in tensors if n.startswith(names)]:
            del tensors[name]

    return change


def rename(old: str, new: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        for name in [n for n in tensors if old in n]:
            tensors[name.replace(old, new)] = tensors.pop(name)

    return change


def replace(name: str, make: Callable[[Tensor], Tensor]) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[name] = make(tensors[name]).contiguous()

    return change


def copy(name: str, new: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[new] = tensors[name].clone()

    return change


@pytest.mark.parametrize(
    ("layout", "change", "words"),
    [
        ("single", rename(".experts.", ".specialists."),
         ["unexpected: model.layers.0.mlp.specialists.0.", "missing: model.layers.0.mlp.experts."]),
        ("single", drop(f"{STEM}.5."),
         [f"missing: {STEM}.5.down_proj.weight, {STEM}.5.gate_proj.weight, "
          f"{STEM}.5.up_proj.weight;"]),
        ("single", copy(f"{STEM}.5.up_proj.weight", f"{STEM}.5.w3.weight"),
         ["stored twice", f"{STEM}.5.up_proj.weight", f"{STEM}.5.w3.weight"]),
        ("single", copy(f"{STEM}.5.up_proj.weight", f"{STEM}.8.up_proj.weight"),
         [f"unexpected: {STEM}.8.up_proj.weight"]),
        ("single", copy("model.norm.weight", "model.language_model.norm.weight"),
         ["stored twice: ", "model.norm.weight", "model.language_model.norm.weight"]),
        ("single", drop(*(f"{STEM}.{n}.down_proj" for n in range(8))),
         [f"missing: {STEM}.0.down_proj.weight", f"{STEM}.7.down_proj.weight"]),
        ("fused", drop(f"{STEM}.down_proj"), [f"missing: {STEM}.down_proj;"]),
        ("fused", drop("model.layers.2.mlp.gate.weight"),
         ["missing: model.layers.2.mlp.gate.weight"]),
        ("fused", replace(f"{STEM}.gate_up_proj", lambda t: t[..., :-1]),
         [f"wrong shape: {STEM}.gate_up_proj [8, 16, 31], expected [8, 16, 32]"]),
        ("fused", replace(f"{STEM}.gate_up_proj", lambda t: t.transpose(1, 2)),
         [f"wrong shape: {STEM}.gate_up_proj [8, 32, 16]"]),
        ("single", replace(f"{STEM}.5.up_proj.weight", lambda t: t.float()),
         [f"wrong dtype: {STEM}.5.up_proj.weight F32, expected BF16", "convert_dtype=True"]),
        ("fused", replace("lm_head.weight", lambda t: t.half()),
         ["wrong dtype: lm_head.weight F16"]),
        ("fused", copy("model.norm.weight", "model.layers.7.input_layernorm.weight"),
         ["unexpected: model.layers.7.input_layernorm.weight"]),
        ("fused", copy(f"{STEM}.down_proj", f"{STEM}.3.down_proj.weight"),
         ["both layouts", "experts.down_proj", f"{STEM}.3.down_proj.weight"]),
        ("fused", rename("model.", "model.model."), ["'model.model.'", "nearest is 'model.'"]),
        ("fused", rename("model.", "model.language_model.language_model."),
         ["nearest is 'model.language_model.'"]),
        ("fused", rename("model.", "model.language_model.model.language_model."),
         ["nearest is 'model.language_model.'"]),
        ("fused", rename("model.", "text.decoder."), ["prefix 'text.decoder.' is not known"]),
    ],
)  # fmt: skip
def test_a_wrong_checkpoint_is_refused_by_name(
    tmp_path: Path, model: Any, layout: str, change: Callable[[Tensors], None], words: list[str]
) -> None:
    tensors = toy.fused_tensors(model)
    if layout == "single":
        tensors = toy.per_expert(tensors)
    change(tensors)
    message = refusal(toy.write(tmp_path, toy.config_of(model), tensors))
    for word in words:
        assert word in message


def test_a_name_twice_in_one_header_is_refused(tmp_path: Path, model: Any, fused: Tensors) -> None:
    file = toy.write(tmp_path, toy.config_of(model), fused) / "model.safetensors"
    raw = file.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    header = raw[8 : 8 + length].rstrip()
    header = header[:-1] + b',"model.norm.weight":' + json.dumps(
        json.loads(header)["model.norm.weight"]
    ).encode() + b"}"  # fmt: skip
    file.write_bytes(struct.pack("<Q", len(header)) + header + raw[8 + length :])
    assert "holds model.norm.weight twice" in refusal(tmp_path)


def test_a_conversion_happens_only_on_request(tmp_path: Path, model: Any, single: Tensors) -> None:
    name = f"{STEM}.5.up_proj.weight"
    plain = rank_experts(toy.write(tmp_path / "a", toy.config_of(model), single), 1)
    single[name] = single[name].float()
    directory = toy.write(tmp_path / "b", toy.config_of(model), single)
    catalogue = open_checkpoint(directory, convert_dtype=True)
    with WeightReader(catalogue, dtype=torch.bfloat16) as reader:
        weights = reader.experts(1, 0, 1)
    assert equal([weights.gate_up, weights.down], plain[2:4])
    with pytest.raises(ConfigError, match="stored as torch.bfloat16"):
        load_model(tmp_path / "a", 0, 1, never, dtype=torch.float32)


def test_float32_state_space_tensors_are_accepted_and_kept(
    tmp_path: Path, model: Any, fused: Tensors
) -> None:
    name = "model.layers.0.linear_attn.A_log"
    fused[name] = fused[name].float()
    catalogue = open_checkpoint(toy.write(tmp_path, toy.config_of(model), fused))
    with WeightReader(catalogue) as reader:
        assert dict(reader.others())[name].dtype == torch.float32


def test_other_tensors_round_trip_bit_for_bit(tmp_path: Path, model: Any, fused: Tensors) -> None:
    catalogue = open_checkpoint(toy.write(tmp_path, toy.config_of(model), fused, 2))
    with WeightReader(catalogue) as reader:
        found = dict(reader.others())
    names = [name for name in fused if ".experts." not in name]
    assert sorted(found) == sorted(names)
    assert equal([found[name] for name in names], [fused[name] for name in names])


def test_mtp_and_vision_tensors_are_ignored_with_a_notice(
    tmp_path: Path, model: Any, fused: Tensors
) -> None:
    fused["mtp.layers.0.mlp.experts.0.gate_proj.weight"] = torch.ones(2)
    fused["model.visual.blocks.0.norm.weight"] = torch.ones(2)
    notices = open_checkpoint(toy.write(tmp_path, toy.config_of(model), fused)).notices
    assert len(notices) == 1
    assert "mtp.layers.0.mlp.experts.0.gate_proj.weight" in notices[0]


def test_an_absent_shard_is_named(tmp_path: Path, model: Any, fused: Tensors) -> None:
    toy.write(tmp_path, toy.config_of(model), fused, 3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    message = refusal(tmp_path)
    assert "model-00002-of-00003.safetensors" in message and "incomplete download?" in message


@pytest.mark.parametrize("cut", [10, 100_000, -4])
def test_a_truncated_or_longer_shard_is_named(
    tmp_path: Path, model: Any, fused: Tensors, cut: int
) -> None:
    toy.write(tmp_path, toy.config_of(model), fused, 3)
    file = tmp_path / "model-00002-of-00003.safetensors"
    raw = file.read_bytes()
    file.write_bytes(raw[: max(len(raw) - cut, 0)] if cut > 0 else raw + b"\0" * -cut)
    message = refusal(tmp_path)
    assert file.name in message and "incomplete download?" in message


def test_the_index_of_another_model_is_refused(tmp_path: Path, model: Any, fused: Tensors) -> None:
    toy.write(tmp_path, toy.config_of(model), fused, 3)
    index = tmp_path / "model.safetensors.index.json"
    value = json.loads(index.read_text())
    value["weight_map"]["model.layers.9.mlp.gate.weight"] = "model-00001-of-00003.safetensors"
    del value["weight_map"]["model.norm.weight"]
    index.write_text(json.dumps(value))
    message = refusal(tmp_path)
    assert "model.layers.9.mlp.gate.weight (not in model-00001-of-00003.safetensors)" in message
    assert "model.norm.weight (stored, not in the index)" in message


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "", None, 3])
def test_an_index_cannot_point_outside(
    tmp_path: Path, model: Any, fused: Tensors, name: object
) -> None:
    toy.write(tmp_path, toy.config_of(model), fused, 2)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": name}}))
    assert "a file in the same directory" in refusal(tmp_path)


def test_a_stray_shard_is_ignored_with_one_notice(
    tmp_path: Path, model: Any, fused: Tensors
) -> None:
    toy.write(tmp_path, toy.config_of(model), fused, 3)
    (tmp_path / "model-00004-of-00004.safetensors").write_bytes(b"left over")
    notices = open_checkpoint(tmp_path).notices
    assert len(notices) == 1 and "model-00004-of-00004.safetensors" in notices[0]


def test_an_empty_directory_and_no_directory(tmp_path: Path, model: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps(toy.config_of(model)))
    assert "neither model.safetensors nor" in refusal(tmp_path)
    assert "no config.json" in refusal(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "raw", [b"", b"\0" * 7, struct.pack("<Q", 5) + b"{}", struct.pack("<Q", 1 << 60) + b"{}",
            struct.pack("<Q", 2) + b"[]", struct.pack("<Q", 2) + b"{{",
            struct.pack("<Q", 9) + b'{"a": 17}'],
)  # fmt: skip
def test_damaged_headers_are_refused(tmp_path: Path, model: Any, raw: bytes) -> None:
    (tmp_path / "config.json").write_text(json.dumps(toy.config_of(model)))
    (tmp_path / "model.safetensors").write_bytes(raw)
    assert "model.safetensors" in refusal(tmp_path)


def test_interleaved_rows_are_converted(tmp_path: Path, model: Any, fused: Tensors) -> None:
    config = toy.config_of(model)
    for layer in range(3):
        name = f"model.layers.{layer}.mlp.experts.gate_up_proj"
        rows = torch.arange(8, dtype=torch.bfloat16)
        both = torch.cat([rows + 1, rows + 101])[None, :, None]
        fused[name] = both.expand(8, 16, 32).contiguous()
    plain = rank_experts(toy.write(tmp_path / "a", config, fused), 2)
    for layer in range(3):
        name = f"model.layers.{layer}.mlp.experts.gate_up_proj"
        gate, up = fused[name].chunk(2, dim=1)
        fused[name] = torch.stack([gate, up], dim=2).reshape(8, 16, 32)
    config["gate_up_layout"] = "interleaved"
    converted = rank_experts(toy.write(tmp_path / "b", config, fused), 2)
    assert equal(plain, converted)
    # Column j of gate is j + 1 and of up is j + 101: matching halves, side by side.
    assert converted[0][0, 0].tolist() == [*range(1, 9), *range(101, 109)]


@pytest.mark.parametrize("layout", ["fused", "single"])
def test_a_rank_reads_its_own_experts_and_everything_else(tmp_path: Path, layout: str) -> None:
    model = toy.make_model(hidden_size=64, moe_intermediate_size=64)
    tensors = toy.fused_tensors(model)
    experts = sum(t.numel() * 2 for n, t in tensors.items() if ".experts." in n)
    others = sum(t.numel() * 2 for n, t in tensors.items() if ".experts." not in n)
    if layout == "single":
        tensors = toy.per_expert(tensors)
    directory = toy.write(tmp_path, toy.config_of(model), tensors, 2)
    for ep_size in (1, 2, 4, 8):
        before = _bytes_from_files()
        loaded = load_model(
            directory, ep_size - 1, ep_size, lambda _layer, _weights: (lambda x, i, w: x),
            widen=None,
        )  # fmt: skip
        measured = _bytes_from_files() - before
        counted = loaded.bytes_read
        assert counted.experts == experts // ep_size
        assert counted.others == others
        # What the kernel says this process read, so that nothing is read uncounted.
        total = counted.experts + counted.others + counted.headers
        assert total <= measured <= total + 60_000


def _bytes_from_files() -> int:
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("rchar:"):
            return int(line.split()[1])
    raise AssertionError("no rchar in /proc/self/io")


def test_a_layer_holds_its_experts_once(tmp_path: Path, model: Any, fused: Tensors) -> None:
    directory = toy.write(tmp_path, toy.config_of(model), fused)
    kept: list[ExpertWeights] = []

    def make_layer(_layer: int, weights: ExpertWeights) -> Any:
        kept.append(weights)
        return lambda hidden, ids, scores: hidden

    loaded = load_model(directory, 1, 4, make_layer, widen=None)
    for weights in kept:
        for tensor, shape in ((weights.gate_up, (2, 32, 16)), (weights.down, (2, 8, 32))):
            assert tuple(tensor.shape) == shape and tensor.is_contiguous()
            assert tensor.untyped_storage().nbytes() == tensor.numel() * 2
            assert tensor.data_ptr() % 32 == 0
    assert not [name for name, _ in loaded.model.named_parameters() if ".experts." in name]
    assert not [name for name, p in loaded.model.named_parameters() if p.is_meta]
    assert not [name for name, b in loaded.model.named_buffers() if b.is_meta]
