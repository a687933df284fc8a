# SPDX-License-Identifier: Apache-2.0
"""Integer weights and the operator's arithmetic on them, in numpy, written from the documents.

Shares no code with kernels/ops or the vendor library, so that equal bits mean something.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from support.vendor import (
    INT4,
    INT8,
    INT32,
    NZ,
    Batch,
    Call,
    Group,
    Soft,
    aligned,
    from_bf16,
    place,
    to_bf16,
)

_libm = ctypes.CDLL(ctypes.util.find_library("m") or "libm.so.6")
_libm.expf.argtypes, _libm.expf.restype = [ctypes.c_float], ctypes.c_float
# numpy's exp differs from the C library's in the last bit now and then.
_exp = np.vectorize(_libm.expf, otypes=[np.float32])

F32 = np.float32


def nz(matrix: np.ndarray, row_bytes: int = 32) -> np.ndarray:
    """Byte [K, W] in FRACTAL_NZ order, by the definition of each element's place."""
    rows, width = matrix.shape
    out = aligned(rows * width, np.uint8)
    k, b = np.meshgrid(np.arange(rows), np.arange(width), indexing="ij")
    block = (b // row_bytes) * (rows // 16) + k // 16  # block columns one after the other
    out[block * 16 * row_bytes + (k % 16) * row_bytes + b % row_bytes] = matrix.view(np.uint8)
    return out


def nibbles(q: np.ndarray, offset_binary: bool = False) -> np.ndarray:
    """int4 [K, N] to bytes [K, N/2], even columns in the low half."""
    bits = (q.astype(np.int64) + (8 if offset_binary else 0)) % 16
    return (bits[:, 0::2] + 16 * bits[:, 1::2]).astype(np.uint8)


@dataclass
class Matrices:
    """One projection of all experts: integers q [E, K, N] and float32 scales [E, N]."""

    q: np.ndarray
    scale: np.ndarray
    _floats: dict[int, np.ndarray] = field(default_factory=dict, repr=False)

    @classmethod
    def random(cls, experts: int, rows: int, columns: int, largest: int, seed: int) -> Matrices:
        rng = np.random.default_rng(seed)
        q = rng.integers(-largest, largest + 1, (experts, rows, columns)).astype(np.int8)
        spread = 1.7 / np.sqrt(rows) / largest
        scale = (spread * rng.uniform(0.5, 1.5, (experts, columns))).astype(F32)
        return cls(q, scale)

    @functools.cached_property
    def values(self) -> np.ndarray:
        return self.q.astype(np.float64) * self.scale.astype(np.float64)[:, None, :]

    @functools.cached_property
    def biases(self) -> np.ndarray:
        return (8 * self.values.sum(axis=1)).astype(F32)

    def floats(self, expert: int) -> np.ndarray:
        if expert not in self._floats:
            self._floats[expert] = self.q[expert].astype(np.float64)
        return self._floats[expert]

    @property
    def encoded(self) -> np.ndarray:
        return self.scale.view(np.uint32).astype(np.uint64)


@dataclass
class QuantLayer:
    """Routed experts of one layer, all ranks. int4 weights have |q| <= 8."""

    first: Matrices
    second: Matrices
    int4: bool

    @classmethod
    def random(cls, experts: int, hidden: int, inter: int, int4: bool, seed: int = 7) -> QuantLayer:
        largest = 7 if int4 else 127
        return cls(
            Matrices.random(experts, hidden, 2 * inter, largest, seed),
            Matrices.random(experts, inter, hidden, largest, seed + 1),
            int4,
        )

    @property
    def values(self) -> tuple[np.ndarray, np.ndarray]:
        return self.first.values, self.second.values


def expert_args(
    soft: Soft,
    layer: QuantLayer,
    experts: Sequence[int],
    *,
    as_int4: bool = False,
    offset_binary: bool = False,
    row_major: bool = False,
) -> dict[str, Any]:
    """The operator's list arguments for these experts."""
    args: dict[str, Any] = {"dispatchQuantMode": 2, "dispatchQuantOutDtype": INT8}
    for number, part in ((1, layer.first), (2, layer.second)):
        rows, columns = part.q.shape[1:]
        weights = []
        for e in experts:
            raw = nibbles(part.q[e], offset_binary) if layer.int4 else part.q[e]
            data = place(raw.reshape(-1).view(np.uint8)) if row_major else nz(raw)
            if not layer.int4:
                kind = {"dtype": INT8, "shape": (rows, columns)}
            elif as_int4:
                kind = {"dtype": INT4, "shape": (rows, columns)}
            else:
                data, kind = data.view(np.int32), {"dtype": INT32, "shape": (rows, columns // 8)}
            weights.append((data, kind))
        args[f"weight{number}"] = _list(soft, [soft.tensor(d, fmt=NZ, **k) for d, k in weights])
        args[f"weightScales{number}"] = soft.tensors([place(part.encoded[e]) for e in experts])
        if layer.int4:
            args[f"bias{number}"] = soft.tensors([place(part.biases[e]) for e in experts])
    return args


def _list(soft: Soft, members: list[ctypes.c_void_p]) -> ctypes.c_void_p:
    array = (ctypes.c_void_p * len(members))(*(m.value for m in members))
    return ctypes.c_void_p(soft.nnop.aclCreateTensorList(array, ctypes.c_uint64(len(members))))


def quant_call(
    soft: Soft, group: Group, layer: QuantLayer, batch: Batch, how: dict[str, Any], **changes: Any
) -> Call:
    """One launch of this rank's share; `how` as for expert_args."""
    experts = layer.first.q.shape[0]
    local = experts // group.size
    mine = range(group.rank * local, (group.rank + 1) * local)
    y = aligned(batch.x.shape, np.uint16)
    y[...] = 0x7FC0
    counts = aligned(local, np.int32)
    counts[...] = -1
    args = {
        "context": soft.tensor(group.context),
        "x": soft.tensor(batch.x),
        "topkIds": soft.tensor(batch.ids),
        "topkWeights": soft.tensor(batch.weights),
        "moeExpertNum": experts,
        "epWorldSize": group.size,
        "cclBufferSize": group.buffer_bytes,
        "yOut": soft.tensor(y),
        "expertTokenNumsOut": soft.tensor(counts),
        **expert_args(soft, layer, mine, **how),
        **changes,
    }
    return Call(batch, y, counts, args)


# ---- the arithmetic --------------------------------------------------------------------------


def cut_to_half(values: np.ndarray) -> np.ndarray:
    """float32 to float16 towards zero."""
    near = values.astype(np.float16)
    over = np.abs(near.astype(np.float64)) > np.abs(values.astype(np.float64))
    return np.where(over, np.nextafter(near, np.float16(0)), near)


def quantise_token(x: np.ndarray) -> tuple[np.ndarray, np.float32]:
    if not x.any():
        return np.zeros(x.size, np.int64), F32(0)
    scale = F32(np.abs(x).max() / F32(127))
    quotient = cut_to_half((x / scale).astype(F32)).astype(np.float64)
    return np.trunc(quotient + np.copysign(0.5, quotient)).astype(np.int64), scale


def quantise_activation(a: np.ndarray) -> tuple[np.ndarray, np.float32]:
    most = np.abs(a).max()
    if most == 0:
        return np.zeros(a.size, np.int64), F32(0)
    return np.rint(a * F32(F32(127) / most)).astype(np.int64), F32(most / F32(127))


def product(
    q: np.ndarray, s: np.float32, part: Matrices, expert: int, int4: bool, mask: int
) -> np.ndarray:
    weight = part.floats(expert)  # float64 products of int8 are exact, and quick
    scale = (part.scale[expert].view(np.uint32) & np.uint32(mask)).view(F32)

    def dequantised(integers: np.ndarray) -> np.ndarray:
        total = (integers.astype(np.float64) @ weight).astype(np.int64)
        return (total.astype(F32) * scale).astype(np.float16).astype(F32)

    if not int4:
        return dequantised(q) * s
    upper = dequantised(np.floor_divide(q, 16)) * F32(16)
    return ((upper + dequantised((q & 15) - 8)) + part.biases[expert]) * s


def expert_output(
    x: np.ndarray, layer: QuantLayer, expert: int, clamp: float = 0.0, mask: int = 0xFFFFFFFF
) -> np.ndarray:
    """One token through one expert, as bf16 values."""
    inter = layer.second.q.shape[1]
    first = product(*quantise_token(x), layer.first, expert, layer.int4, mask)
    gate, up = first[:inter], first[inter:]
    if clamp:
        gate, up = np.minimum(gate, F32(clamp)), np.clip(up, F32(-clamp), F32(clamp))
    act = gate / (F32(1) + _exp(-gate)) * up
    out = product(*quantise_activation(act), layer.second, expert, layer.int4, mask)
    return from_bf16(to_bf16(out))


def emulate(
    batch: Batch,
    layer: QuantLayer,
    clamp: float = 0.0,
    mask: int = 0xFFFFFFFF,
    rows: int | None = None,
) -> Any:
    """y of the first `rows` tokens (None: all) as bf16 bits."""
    x = from_bf16(batch.x)[:rows]
    y = np.zeros(x.shape, F32)
    with np.errstate(over="ignore", under="ignore"):  # where the operator's values do so as well
        for t, row in enumerate(x):
            for k, expert in enumerate(batch.ids[t]):
                y[t] += batch.weights[t, k] * expert_output(row, layer, int(expert), clamp, mask)
    return to_bf16(y)
