# SPDX-License-Identifier: Apache-2.0
"""Reads a checkpoint: all headers are checked first, then each rank reads its own bytes.

A rank reads the bytes of its routed experts and of everything that is no routed expert, straight
from the file into one expert-sized buffer, and from there into the layout both paths share. Nothing
of another rank's experts is read or held, and there is no second copy of a layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import torch
from torch import Tensor

from xmoe.errors import CheckpointError, ConfigError
from xmoe.models.qwen3_5.checkpoint import CheckpointFiles, TensorHeader, listing, read_headers
from xmoe.models.qwen3_5.config import (
    experts_of_rank,
    gate_up_layout,
    layer_types,
    read_config,
    shape_from_config,
)
from xmoe.models.qwen3_5.names import (
    IGNORED,
    ExpertKey,
    canonical_name,
    expert_key,
    expert_shapes,
    other_shapes,
    prefix_hint,
)
from xmoe.models.qwen3_5.widen import Widening, widen_tensor
from xmoe.types import ExpertWeights, MoeShape

_TORCH_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
}
_STORED = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
# The state-space part is published in float32 beside bf16 weights; it is kept as stored.
_MAY_BE_FLOAT32 = ("linear_attn.A_log", "linear_attn.dt_bias", "linear_attn.norm.weight")


@dataclass
class BytesRead:
    """What was read from the files, in bytes."""

    headers: int = 0
    experts: int = 0
    others: int = 0


@dataclass(frozen=True)
class Catalogue:
    """A checkpoint whose headers were all checked; holds no weights."""

    files: CheckpointFiles
    config: dict[str, Any]
    shape: MoeShape
    num_layers: int
    fused: bool
    interleaved: bool
    experts: dict[ExpertKey, TensorHeader]
    others: dict[str, TensorHeader]
    notices: tuple[str, ...]


def open_checkpoint(directory: Path | str, *, convert_dtype: bool = False) -> Catalogue:
    """Checks config and headers; reads no weights and allocates none. Local.

    Args:
        directory: a Hugging Face model directory.
        convert_dtype: accept floating-point tensors of another dtype than the config's.

    Raises:
        CheckpointError: tensors are missing, unexpected, stored twice, or have a wrong shape or
            dtype; or a file is absent or damaged.
        ConfigError: config.json lacks a size or names something unknown.
    """
    config = read_config(directory)
    shape = shape_from_config(config)
    if shape.quant != "none":
        raise ConfigError(
            f"quantization_config names {shape.quant!r}; only unquantised weights are loaded; "
            "use the bf16 checkpoint"
        )
    num_layers = len(layer_types(config))
    files = read_headers(directory)
    sorter = _Sorter()
    for name, header in files.tensors.items():
        sorter.add(name, header)
    fused = sorter.layout()
    expected_experts = expert_shapes(shape, num_layers, fused)
    sorter.compare(sorter.experts, expected_experts, _STORED[shape.dtype], convert_dtype)
    sorter.compare(sorter.others, other_shapes(config), _STORED[shape.dtype], convert_dtype)
    sorter.finish(files.directory)
    notices = files.notices
    if sorter.ignored:
        notices += (f"ignored, not part of the text model: {listing(sorter.ignored)}",)
    return Catalogue(
        files=files,
        config=config,
        shape=shape,
        num_layers=num_layers,
        fused=fused,
        # Per-expert checkpoints store gate and up apart; only fused rows can be interleaved.
        interleaved=fused and gate_up_layout(config) == "interleaved",
        experts=sorter.experts,
        others=sorter.others,
        notices=notices,
    )


@dataclass
class _Sorter:
    """Sorts stored tensors by what they are and collects everything that is wrong with them."""

    experts: dict[ExpertKey, TensorHeader] = field(default_factory=dict)
    others: dict[str, TensorHeader] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)
    problems: dict[str, list[str]] = field(default_factory=dict)
    hints: set[str] = field(default_factory=set)

    def note(self, kind: str, item: str) -> None:
        self.problems.setdefault(kind, []).append(item)

    def add(self, name: str, header: TensorHeader) -> None:
        if name.startswith(IGNORED):
            self.ignored.append(name)
            return
        canonical = canonical_name(name)
        if canonical is None:
            self.note("unexpected", name)
            if hint := prefix_hint(name):
                self.hints.add(hint)
            return
        key = expert_key(canonical)
        known = self.others.get(canonical) if key is None else self.experts.get(key)
        if known is not None:
            self.note("stored twice", f"{known.name} and {name}")
        elif key is None:
            self.others[canonical] = header
        else:
            self.experts[key] = header

    def layout(self) -> bool:
        """True for fused tensors; a file with both layouts is refused, as either may be stale."""
        fused = sorted(key for key in self.experts if key.expert < 0)
        single = sorted(key for key in self.experts if key.expert >= 0)
        if fused and single:
            pair = f"{self.experts[fused[0]].name} and {self.experts[single[0]].name}"
            raise CheckpointError(
                f"routed experts are stored in both layouts: {pair}; one layout is allowed, fused "
                "or per expert; save the checkpoint again"
            )
        return not single

    def compare(
        self,
        found: Mapping[Any, TensorHeader],
        expected: Mapping[Any, tuple[int, ...]],
        dtype: str,
        convert: bool,
    ) -> None:
        for key in expected.keys() - found.keys():
            self.note("missing", str(key))
        for key, header in found.items():
            if key not in expected:
                self.note("unexpected", header.name)
                continue
            if header.shape != expected[key]:
                self.note(
                    "wrong shape",
                    f"{header.name} {list(header.shape)}, expected {list(expected[key])}",
                )
            kept = header.dtype == "F32" and str(key).endswith(_MAY_BE_FLOAT32)
            fine = header.dtype in _TORCH_DTYPES if convert else header.dtype == dtype
            if not (fine or kept):
                self.note("wrong dtype", f"{header.name} {header.dtype}, expected {dtype}")

    def finish(self, directory: Path) -> None:
        if not self.problems:
            return
        parts = [f"{kind}: {listing(items)}" for kind, items in sorted(self.problems.items())]
        text = "; ".join([*sorted(self.hints), *parts])
        advice = "use the weights that belong to config.json"
        if self.problems.keys() == {"wrong dtype"}:
            advice = "ask for a conversion (convert_dtype=True) or save the checkpoint again"
        raise CheckpointError(
            f"{directory} is not the checkpoint its config.json describes: {text}; every expected "
            f"tensor is needed once, with its shape and dtype, and no other; {advice}"
        )


class WeightReader:
    """Reads tensors of one catalogue and counts the bytes. Use as a context manager."""

    def __init__(
        self,
        catalogue: Catalogue,
        widening: Widening | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """`dtype` None keeps what is stored; otherwise every tensor is converted to it."""
        self.catalogue = catalogue
        self.bytes_read = BytesRead(headers=catalogue.files.header_bytes)
        self._widening = widening
        self._dtype = dtype
        self._open: dict[Path, BinaryIO] = {}

    def __enter__(self) -> WeightReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the files; may be called again."""
        while self._open:
            self._open.popitem()[1].close()

    def experts(self, layer: int, ep_rank: int, ep_size: int) -> ExpertWeights:
        """Reads the routed experts of one layer that this rank holds. Local.

        Returns:
            gate_up [L, H, 2I] and down [L, I, H], contiguous, on the CPU, owned by the caller;
            with the widened sizes when the reader widens.
        """
        local = experts_of_rank(self.catalogue.shape.num_experts, ep_rank, ep_size)
        shape, plan = self.catalogue.shape, self._widening
        hidden, inner = shape.hidden, shape.intermediate
        wide_hidden = plan.wide_hidden if plan else hidden
        wide_inner = plan.wide_intermediate if plan else inner
        dtype = self._dtype or _TORCH_DTYPES[_STORED[shape.dtype]]
        gate_up = torch.zeros((len(local), wide_hidden, 2 * wide_inner), dtype=dtype)
        down = torch.zeros((len(local), wide_inner, wide_hidden), dtype=dtype)
        for slot, expert in enumerate(local):
            gate, up, back = self._one_expert(layer, expert)
            gate_up[slot, :hidden, :inner].copy_(gate.T)
            gate_up[slot, :hidden, wide_inner : wide_inner + inner].copy_(up.T)
            down[slot, :inner, :hidden].copy_(back.T)
        return ExpertWeights(gate_up, down)

    def others(self) -> Iterator[tuple[str, Tensor]]:
        """Reads everything that is no routed expert, one tensor at a time. Local.

        Yields:
            Canonical name and tensor on the CPU, widened when the reader widens; norm scales that
            were widened are float32, see `widen`.
        """
        for name, header in sorted(self.catalogue.others.items()):
            tensor = self._read(header, 0, 1)
            self.bytes_read.others += header.size_bytes
            if self._dtype is not None:
                tensor = tensor.to(self._dtype)
            yield name, widen_tensor(name, tensor, self._widening)

    def _one_expert(self, layer: int, expert: int) -> tuple[Tensor, Tensor, Tensor]:
        """gate [I, H], up [I, H], down [H, I] of one expert."""
        tensors, count = self.catalogue.experts, self.catalogue.shape.num_experts
        if not self.catalogue.fused:
            parts = []
            for part in ("gate_proj", "up_proj", "down_proj"):
                header = tensors[ExpertKey(layer, expert, part)]
                parts.append(self._read(header, 0, 1))
                self.bytes_read.experts += header.size_bytes
            return parts[0], parts[1], parts[2]
        header = tensors[ExpertKey(layer, -1, "gate_up_proj")]
        rows = self._read(header, expert, count)[0]
        self.bytes_read.experts += header.size_bytes // count
        header = tensors[ExpertKey(layer, -1, "down_proj")]
        back = self._read(header, expert, count)[0]
        self.bytes_read.experts += header.size_bytes // count
        if self.catalogue.interleaved:
            return rows[0::2], rows[1::2], back
        inner = self.catalogue.shape.intermediate
        return rows[:inner], rows[inner:], back

    def _read(self, header: TensorHeader, part: int, parts: int) -> Tensor:
        """Part number `part` of `parts` equal parts along the first dimension."""
        shape = list(header.shape)
        shape[:1] = [shape[0] // parts] if shape else []
        size = header.size_bytes // parts
        tensor = torch.empty(shape, dtype=_TORCH_DTYPES[header.dtype])
        stream = self._open.get(header.file)
        if stream is None:
            stream = self._open[header.file] = header.file.open("rb", buffering=0)
        stream.seek(header.offset + part * size)
        # numpy has no bf16: the bytes go into the tensor's memory as bytes.
        raw: Any = tensor.view(torch.uint8).numpy()
        target = memoryview(raw).cast("B")
        done = 0
        while done < size:
            count = stream.readinto(target[done:])  # type: ignore[attr-defined]
            if not count:
                raise CheckpointError(
                    f"{header.file.name} ended while {header.name} was read; the size checked at "
                    "opening is needed; do not change files that are in use"
                )
            done += count
        return tensor
