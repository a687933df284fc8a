# SPDX-License-Identifier: Apache-2.0
"""Expert weights as the checkpoint stores them, for the float64 reference.

On purpose not the product's loader: a mistake there must not reach the reference too.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Float64 = NDArray[np.float64]
# (layer, part, expert); no expert for a tensor that holds all of them.
_Key = tuple[int, str, int | None]
_FUSED = re.compile(r"layers\.(\d+)\.mlp\.experts\.(gate_up|down)_proj(?:\.weight)?$")
_SINGLE = re.compile(r"layers\.(\d+)\.mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight$")


class StoredExperts:
    """Reads single experts on demand; holds none.

    Attributes:
        total_bytes: of all routed experts of all layers.
        hidden: the stored hidden size.
    """

    def __init__(self, model_dir: str) -> None:
        from safetensors import safe_open

        self._open: Any = safe_open
        folder = Path(model_dir)
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        text = config.get("text_config", config)
        self.hidden = int(text["hidden_size"])
        self._interleaved = text.get("gate_up_layout") == "interleaved"
        self.total_bytes = 0
        self._where: dict[_Key, tuple[Path, str]] = {}
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():
                    self._note(file, name, tensors)

    def _note(self, file: Path, name: str, tensors: Any) -> None:
        if name.startswith("mtp."):
            return
        key: _Key
        if fused := _FUSED.search(name):
            key = (int(fused[1]), fused[2], None)
        elif single := _SINGLE.search(name):
            key = (int(single[1]), single[3], int(single[2]))
        else:
            return
        self._where[key] = (file, name)
        view = tensors.get_slice(name)
        bits = {"BF16": 16, "F16": 16, "F32": 32}[view.get_dtype()]
        self.total_bytes += int(np.prod(view.get_shape())) * bits // 8

    def experts(self, layer: int, ids: list[int]) -> tuple[Float64, Float64]:
        """gate_up [n, H, 2I], gate columns first, and down [n, I, H] of the experts `ids`, in this
        order."""
        gate_up, down = [], []
        for expert in ids:
            if (layer, "gate_up", None) in self._where:
                stored = self._read((layer, "gate_up", None), expert).T
                if self._interleaved:
                    stored = np.concatenate([stored[:, 0::2], stored[:, 1::2]], axis=1)
                gate_up.append(stored)
                down.append(self._read((layer, "down", None), expert).T)
                continue
            gate, up = (self._read((layer, part, expert)).T for part in ("gate", "up"))
            gate_up.append(np.concatenate([gate, up], axis=1))
            down.append(self._read((layer, "down", expert)).T)
        return np.stack(gate_up), np.stack(down)

    def _read(self, key: _Key, row: int | None = None) -> Float64:
        file, name = self._where[key]
        with self._open(file, framework="pt") as tensors:
            view = tensors.get_slice(name)
            value = view[:] if row is None else view[row]
        result: Float64 = value.double().numpy()
        return result
