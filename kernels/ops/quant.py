# SPDX-License-Identifier: Apache-2.0
"""Weight preparation for the integer modes w8a8 and w4a8: torch operators only, once at loading.

Weights are symmetric with one scale per column (output channel): q = round(w / s), |q| <= 127 or 7.

FRACTAL_NZ cuts a [K, N] matrix into blocks of 16 rows and 32 bytes (32 int8 or 64 int4 columns);
blocks lie column by column of blocks, rows and columns inside a block in order. Sources: CANN
TransdataOperation (int8: m0 = 16, n0 = 32), aclnnNpuFormatCast (C0 = 32 bytes / size of the type).

Two things the public text leaves open are met here, see `int4_encoding` and `scale_of`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from xmoe.errors import ConfigError
from xmoe.kernels.acl.quant_modes import PREPARED_QUANTS, quant_mode
from xmoe.types import ExpertWeights, quant_name

BLOCK_ROWS = 16
BLOCK_BYTES = 32
INT4_ENCODINGS = ("twos_complement", "offset_binary")
_LARGEST = {"w8a8": 127, "w4a8": 7}
# The low word's bits that the vendor's matrix unit is said to drop from a scale.
_DROPPED_BITS = 13


def quantise_experts(
    gate_up: Tensor,
    down: Tensor,
    quant: str,
    *,
    int4_encoding: str = "twos_complement",
) -> ExpertWeights:
    """Experts of one layer in the form that both paths share. Local.

    Args:
        gate_up: [L, H, 2I] floating point. down: [L, I, H]. H and I multiples of 64.
        quant: "w8a8", "w4a8", or any spelling of "none", which keeps the tensors as they are.
        int4_encoding: "twos_complement", or "offset_binary" (q + 8), which a published sample uses
            although the type's other uses are two's complement. Never compared with an NPU.

    Returns:
        New memory, one expert converted at a time; the arguments may be freed.

    Raises:
        ConfigError: unknown name, unfit shapes, or weights that are not finite.
    """
    quant = quant_name(quant)
    quant_mode(quant)
    check_encoding(int4_encoding)
    if gate_up.dim() != 3 or down.dim() != 3:
        raise ConfigError(
            f"gate_up {list(gate_up.shape)}, down {list(down.shape)}; allowed: [L, H, 2I] and "
            "[L, I, H]; next: stack the experts of this rank"
        )
    if quant == "none":
        return ExpertWeights(gate_up, down)
    parts = [_quantise_matrices(w, quant, int4_encoding) for w in (gate_up, down)]
    (w1, scales1, bias1), (w2, scales2, bias2) = parts
    return ExpertWeights(w1, w2, quant, scales1, scales2, bias1, bias2, int4_encoding)


def _quantise_matrices(
    weight: Tensor, quant: str, int4_encoding: str
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(stored weights, encoded scales, bias) of [L, K, N]."""
    stored, scales, biases = [], [], []
    for index, one in enumerate(weight.unbind()):
        q, scale = quantise_columns(one, _LARGEST[quant], what=f"expert {index}")
        stored.append(store(q, quant, int4_encoding))
        scales.append(encode_scales(scale))
        if quant == "w4a8":
            biases.append(int4_bias(q, scale))
    return torch.stack(stored), torch.stack(scales), torch.stack(biases) if biases else None


def quantise_columns(weight: Tensor, largest: int, what: str = "weight") -> tuple[Tensor, Tensor]:
    """q int8 [K, N] with |q| <= largest and scale float32 [N], weight ~ q * scale.

    Halves go to the even number. A column of zeros gets scale 1.
    """
    values = weight.to(torch.float32)
    most = values.abs().amax(dim=0)
    if not bool(torch.isfinite(most).all()):
        raise ConfigError(
            f"{what} holds NaN or infinity in column {int((~torch.isfinite(most)).nonzero()[0])}; "
            "allowed: finite weights; next: check the checkpoint"
        )
    scale = scale_of(most, largest)
    return torch.round(values / scale).clamp(-largest, largest).to(torch.int8), scale


def scale_of(most: Tensor, largest: int) -> Tensor:
    """Scales for columns whose largest magnitude is `most`: most / largest, rounded up to 19 bits.

    The matrix unit is said to use the upper 19 bits of a float scale. With scales that have no
    others the result is the same whether it does or not.
    """
    exact = most / largest
    bits = exact.view(torch.int32)
    step = (1 << _DROPPED_BITS) - 1
    scale = ((bits + step) & ~step).view(torch.float32)
    # Below the normal numbers a quotient w / s would lose its meaning.
    return torch.where(exact < torch.finfo(torch.float32).tiny, torch.ones_like(scale), scale)


def encode_scales(scale: Tensor) -> Tensor:
    """float32 to int64: the float's bits in the low word, 0 above. Presented as UINT64."""
    return scale.contiguous().view(torch.int32).to(torch.int64) & 0xFFFFFFFF


def decode_scales(encoded: Tensor) -> Tensor:
    """Inverse of `encode_scales`; the high word is not looked at."""
    low = encoded & 0xFFFFFFFF
    return torch.where(low >= 1 << 31, low - (1 << 32), low).to(torch.int32).view(torch.float32)


def int4_bias(q: Tensor, scale: Tensor) -> Tensor:
    """float32 [N]: 8 times the column sums of q * scale.

    Activations are split as 16 * high + low + 8 with low in -8..7; this is the share of the 8.
    """
    return (q.to(torch.float64).sum(dim=-2) * scale.to(torch.float64) * 8).to(torch.float32)


def store(q: Tensor, quant: str, int4_encoding: str = "twos_complement") -> Tensor:
    """[..., K, N] int8 values to the stored form: blocks of int8, or of int32 with eight int4."""
    if quant == "w8a8":
        return to_nz(q)
    packed = to_nz(pack_int4(q, int4_encoding))
    return packed.view(torch.int32)


def load(stored: Tensor, quant: str, int4_encoding: str = "twos_complement") -> Tensor:
    """Inverse of `store`: int8 [..., K, N]."""
    if quant == "w8a8":
        return from_nz(stored)
    return unpack_int4(from_nz(stored.view(torch.int8)), int4_encoding)


def to_nz(matrix: Tensor) -> Tensor:
    """Bytes [..., K, N] to [..., N/32, K/16, 16, 32], contiguous."""
    rows, width = matrix.shape[-2:]
    if rows % BLOCK_ROWS or width % BLOCK_BYTES or matrix.element_size() != 1:
        raise ConfigError(
            f"FRACTAL_NZ of {list(matrix.shape)} {matrix.dtype}; allowed: 1-byte elements, rows a "
            f"multiple of {BLOCK_ROWS}, row bytes of {BLOCK_BYTES}; next: pad the matrix"
        )
    blocks = matrix.reshape(*matrix.shape[:-1], width // BLOCK_BYTES, BLOCK_BYTES)
    blocks = blocks.transpose(-3, -2).contiguous()
    return blocks.view(*matrix.shape[:-2], width // BLOCK_BYTES, -1, BLOCK_ROWS, BLOCK_BYTES)


def from_nz(blocks: Tensor) -> Tensor:
    """Inverse of `to_nz`."""
    columns, rows = blocks.shape[-4], blocks.shape[-3] * blocks.shape[-2]
    flat = blocks.reshape(*blocks.shape[:-4], columns, rows, blocks.shape[-1])
    return flat.transpose(-3, -2).reshape(*blocks.shape[:-4], rows, -1)


def pack_int4(q: Tensor, encoding: str = "twos_complement") -> Tensor:
    """int8 values -8..7 [..., N] to int8 [..., N/2]: the even column in the low half of a byte."""
    check_encoding(encoding)
    nibbles = (q + 8 if encoding == "offset_binary" else q) & 15
    return (nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)).to(torch.int8).contiguous()


def unpack_int4(packed: Tensor, encoding: str = "twos_complement") -> Tensor:
    """Inverse of `pack_int4`."""
    check_encoding(encoding)
    low = packed & 15
    # No shift: torch_npu has none of its own for this type.
    nibbles = torch.stack([low, ((packed - low) // 16) & 15], dim=-1).flatten(-2)
    if encoding == "offset_binary":
        return nibbles - 8
    return torch.where(nibbles >= 8, nibbles - 16, nibbles)


def check_encoding(encoding: str) -> None:
    """Refuse an unknown way to write an int4."""
    if encoding not in INT4_ENCODINGS:
        raise ConfigError(
            f"int4_encoding={encoding!r}; allowed: {', '.join(INT4_ENCODINGS)}; next: use what the "
            "operator build reads"
        )


def dequantise_experts(weights: ExpertWeights) -> tuple[Tensor, Tensor]:
    """(gate_up [L, H, 2I], down [L, I, H]) as the paths see them: q * scale in float32."""
    if weights.quant == "none":
        return weights.gate_up, weights.down
    assert weights.gate_up_scales is not None and weights.down_scales is not None
    pairs = ((weights.gate_up, weights.gate_up_scales), (weights.down, weights.down_scales))
    first, second = (
        load(stored, weights.quant, weights.int4_encoding).to(torch.float32)
        * decode_scales(scales).unsqueeze(-2)
        for stored, scales in pairs
    )
    return first, second


def check_experts(weights: ExpertWeights) -> None:
    """Refuse weights whose parts do not belong together; ConfigError names the part. Local."""
    mode = quant_mode(weights.quant)
    extra = {
        "gate_up_scales": weights.gate_up_scales,
        "down_scales": weights.down_scales,
        "gate_up_bias": weights.gate_up_bias,
        "down_bias": weights.down_bias,
    }
    if mode.name == "none":
        given = [name for name, tensor in extra.items() if tensor is not None]
        if given:
            raise ConfigError(
                f"{', '.join(given)} with unquantised weights; allowed: quant "
                f"{', '.join(PREPARED_QUANTS[1:])}; next: name the quantisation or drop them"
            )
        return
    check_encoding(weights.int4_encoding)
    per_word = 8 if mode.name == "w4a8" else 1
    dtype, width = (torch.int32, 8) if mode.name == "w4a8" else (torch.int8, BLOCK_BYTES)
    local = weights.num_local_experts
    for name, tensor in (("gate_up", weights.gate_up), ("down", weights.down)):
        if tensor.dim() != 5 or tuple(tensor.shape[3:]) != (BLOCK_ROWS, width):
            raise ConfigError(
                f"{name}: {list(tensor.shape)}; allowed: FRACTAL_NZ blocks [L, N/{width * per_word}"
                f", K/{BLOCK_ROWS}, {BLOCK_ROWS}, {width}]; next: use quantise_experts"
            )
        _check_part(name, tensor, dtype, (local, *tensor.shape[1:]))
    hidden, inter = weights.hidden, weights.intermediate
    columns = [w.shape[1] * width * per_word for w in (weights.gate_up, weights.down)]
    if columns != [2 * inter, hidden]:
        raise ConfigError(
            f"gate_up is [{hidden}, {columns[0]}] and down [{inter}, {columns[1]}]; allowed: "
            "[H, 2I] and [I, H]; next: prepare both from one layer"
        )
    for name, part in extra.items():
        is_bias = name.endswith("bias")
        needed = mode.needs_bias or not is_bias
        if needed != (part is not None):
            state, allowed = ("absent", "given") if needed else ("given", "absent")
            raise ConfigError(
                f"{name} is {state} for {mode.name} weights; allowed: {allowed}; next: prepare "
                "them with quantise_experts"
            )
        if part is not None:
            wanted = (local, 2 * inter if name.startswith("gate_up") else hidden)
            _check_part(name, part, torch.float32 if is_bias else torch.int64, wanted)


def _check_part(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if tensor.dtype != dtype or tuple(tensor.shape) != shape or not tensor.is_contiguous():
        raise ConfigError(
            f"{name}: {list(tensor.shape)} {tensor.dtype}, strides {list(tensor.stride())}; "
            f"allowed: {list(shape)} {dtype}, contiguous; next: use quantise_experts"
        )
