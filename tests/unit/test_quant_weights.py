# SPDX-License-Identifier: Apache-2.0
"""Weight preparation for the integer modes, and the split path's arithmetic on such weights."""

from __future__ import annotations

import enum
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.quant import Matrices, QuantLayer, emulate, nibbles, nz
from support.vendor import Batch, from_bf16
from xmoe.errors import ConfigError
from xmoe.kernels.acl.quant_modes import PREPARED_QUANTS, QUANT_MODES, quant_mode
from xmoe.kernels.ops import quant
from xmoe.kernels.ops.fused_moe import expert_mlp
from xmoe.kernels.ops.quant_mlp import _integers, quantise_activation, quantise_tokens
from xmoe.layout import routed_weight_bytes_per_rank
from xmoe.policy.rules import KNOWN_QUANTS
from xmoe.types import ExpertWeights, MoeShape

HIDDEN, INTER, LOCAL = 128, 64, 2


def bf16(*shape: int, seed: int = 0) -> torch.Tensor:
    make = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=make) / 8).bfloat16()


def experts(kind: str = "w8a8", **how: Any) -> ExpertWeights:
    gate_up, down = bf16(LOCAL, HIDDEN, 2 * INTER), bf16(LOCAL, INTER, HIDDEN, seed=1)
    return quant.quantise_experts(gate_up, down, kind, **how)


@pytest.mark.parametrize(("rows", "width"), [(16, 32), (32, 32), (16, 96), (64, 128)])
def test_nz_is_the_defined_order_and_has_an_inverse(rows: int, width: int) -> None:
    matrix = torch.arange(rows * width, dtype=torch.int32).to(torch.int8).view(rows, width)
    blocks = quant.to_nz(matrix)
    assert blocks.shape == (width // 32, rows // 16, 16, 32) and blocks.is_contiguous()
    np.testing.assert_array_equal(blocks.view(torch.uint8).numpy().ravel(), nz(matrix.numpy()))
    assert torch.equal(quant.from_nz(blocks), matrix)
    batched = torch.stack([matrix, matrix + 1])
    assert torch.equal(quant.to_nz(batched)[1], quant.to_nz(matrix + 1))
    assert torch.equal(quant.from_nz(quant.to_nz(batched)), batched)


def test_nz_needs_whole_blocks() -> None:
    for shape in ((15, 32), (16, 33)):
        with pytest.raises(ConfigError, match="multiple of 16.*pad"):
            quant.to_nz(torch.zeros(shape, dtype=torch.int8))
    with pytest.raises(ConfigError, match="1-byte"):
        quant.to_nz(torch.zeros(16, 32, dtype=torch.int16))


@pytest.mark.parametrize("encoding", quant.INT4_ENCODINGS)
def test_int4_round_trip(encoding: str) -> None:
    every = torch.arange(-8, 8, dtype=torch.int8)
    pairs = torch.cartesian_prod(every, every).reshape(2, -1)
    packed = quant.pack_int4(pairs, encoding)
    assert packed.shape == (2, 128) and packed.dtype == torch.int8
    want = nibbles(pairs.numpy(), encoding == "offset_binary")
    np.testing.assert_array_equal(packed.view(torch.uint8).numpy(), want)
    assert torch.equal(quant.unpack_int4(packed, encoding), pairs)


def test_unknown_encoding_names_the_known_ones() -> None:
    for call in (quant.pack_int4, quant.unpack_int4):
        with pytest.raises(ConfigError, match="twos_complement, offset_binary"):
            call(torch.zeros(2, 2, dtype=torch.int8), "gray")


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=20))
@settings(max_examples=100, deadline=None)
def test_scales_round_trip(values: list[float]) -> None:
    scale = torch.tensor(values, dtype=torch.float32)
    encoded = quant.encode_scales(scale)
    assert encoded.dtype == torch.int64 and bool((encoded >> 32 == 0).all())
    assert torch.equal(quant.decode_scales(encoded), scale)
    want = scale.numpy().view(np.uint32).astype(np.uint64)
    np.testing.assert_array_equal(encoded.numpy().view(np.uint64), want)


@pytest.mark.parametrize("largest", [127, 7])
def test_columns_are_quantised_to_half_a_step(largest: int) -> None:
    weight = bf16(HIDDEN, 96)
    weight[:, 3] = 0
    weight[5, 4] = 100.0
    q, scale = quant.quantise_columns(weight, largest)
    assert q.dtype == torch.int8 and int(q.abs().max()) == largest
    error = (q * scale - weight.float()).abs()
    assert bool((error <= scale * 0.5001).all())
    assert not q[:, 3].any() and scale[3] == 1
    # 19 bits are enough for every scale, and it is at most a 2**-10 part larger than needed.
    assert not (scale.view(torch.int32) & 0x1FFF).any()
    exact = weight.float().abs().amax(0) / largest
    used = exact > 0
    assert bool((scale[used] >= exact[used]).all())
    assert bool((scale[used] <= exact[used] * (1 + 2.0**-9)).all())


def test_weights_that_are_not_finite_are_refused() -> None:
    weight = bf16(1, HIDDEN, 2 * INTER)
    weight[0, 3, 17] = float("nan")
    with pytest.raises(ConfigError, match="expert 0 holds NaN or infinity in column 17"):
        quant.quantise_experts(weight, bf16(1, INTER, HIDDEN), "w8a8")


@pytest.mark.parametrize("encoding", quant.INT4_ENCODINGS)
@pytest.mark.parametrize("kind", ["w8a8", "w4a8"])
def test_experts_are_stored_once_and_read_back(kind: str, encoding: str) -> None:
    weights = experts(kind, int4_encoding=encoding)
    quant.check_experts(weights)
    assert (weights.num_local_experts, weights.hidden, weights.intermediate) == (2, 128, 64)
    shape = MoeShape(HIDDEN, INTER, LOCAL, 1, quant=kind)
    held = weights.gate_up.nbytes + weights.down.nbytes
    assert held == routed_weight_bytes_per_rank(shape, 1)
    largest = 127 if kind == "w8a8" else 7
    source = (bf16(LOCAL, HIDDEN, 2 * INTER), bf16(LOCAL, INTER, HIDDEN, seed=1))
    for got, want in zip(quant.dequantise_experts(weights), source, strict=True):
        step = want.float().abs().amax(1, keepdim=True) / largest
        assert bool(((got - want.float()).abs() <= step * 0.502).all())


def test_bias_is_eight_column_sums_of_the_dequantised_weights() -> None:
    weights = experts("w4a8")
    for values, bias in zip(
        quant.dequantise_experts(weights), (weights.gate_up_bias, weights.down_bias), strict=True
    ):
        assert bias is not None and bias.dtype == torch.float32
        torch.testing.assert_close(bias, (8 * values.double().sum(1)).float())
    # What it is for: an integer activation split into 16 * high + low + 8.
    q = torch.arange(-127, 1).float()[:HIDDEN].unsqueeze(0)
    high = torch.floor(q / 16)
    low = q - 16 * high - 8
    assert bool((low >= -8).all() and (low <= 7).all() and (high >= -8).all())
    values = quant.dequantise_experts(weights)[0][0].double()
    whole = 16 * (high.double() @ values) + low.double() @ values + weights.gate_up_bias[0]
    torch.testing.assert_close(whole, q.double() @ values, rtol=1e-5, atol=1e-4)


class Engine(enum.Enum):
    NONE = "unquantised"
    W8A8 = "W8A8"


@pytest.mark.parametrize("spelling", [None, "", "none", "NONE", Engine.NONE])
def test_every_spelling_of_none_keeps_the_tensors(spelling: Any) -> None:
    """V8.1: the same weights, the same path, the same bits."""
    gate_up, down = bf16(LOCAL, HIDDEN, 2 * INTER), bf16(LOCAL, INTER, HIDDEN, seed=1)
    weights = quant.quantise_experts(gate_up, down, spelling)
    assert weights.quant == "none"
    assert weights.gate_up is gate_up and weights.down is down
    assert ExpertWeights(gate_up, down, spelling).quant == "none"
    assert MoeShape(1, 1, 1, 1, quant=spelling).quant == "none"
    quant.check_experts(weights)
    rows = bf16(3, HIDDEN, seed=2)
    plain = expert_mlp(rows, [1, 2], ExpertWeights(gate_up, down))
    assert torch.equal(expert_mlp(rows, [1, 2], weights), plain)


def test_an_enum_member_names_its_quantisation() -> None:
    assert MoeShape(1, 1, 1, 1, quant=Engine.W8A8).quant == "w8a8"  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["fp8-e5m2", "w8a16", "mxfp8", "mxfp4"])
def test_other_names_are_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}.*allowed: none, w8a8, w4a8"):
        experts(name)
    with pytest.raises(ConfigError, match="allowed: none, w8a8, w4a8"):
        quant.check_experts(replace(experts(), quant=name))


SPOILED: list[tuple[str, str, Any, str]] = [
    ("w8a8", "down_bias", torch.zeros(2, 128), "down_bias is given for w8a8"),
    ("w4a8", "gate_up_bias", None, "gate_up_bias is absent for w4a8"),
    ("w8a8", "gate_up_scales", None, "gate_up_scales is absent"),
    ("w8a8", "down_scales", torch.zeros(2, 64, dtype=torch.int64), r"\[2, 128\] torch.int64"),
    ("w8a8", "down_scales", torch.zeros(2, 128), r"down_scales.*torch.int64"),
    ("w8a8", "gate_up", torch.zeros(2, 128, 128, dtype=torch.int8), "FRACTAL_NZ blocks"),
    ("w4a8", "int4_encoding", "gray", "twos_complement"),
    ("w4a8", "quant", "w8a8", "FRACTAL_NZ blocks"),
    ("w8a8", "quant", None, "gate_up_scales, down_scales with unquantised"),
]


@pytest.mark.parametrize(("kind", "field", "value", "text"), SPOILED)
def test_parts_that_do_not_fit_are_refused(kind: str, field: str, value: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        quant.check_experts(replace(experts(kind), **{field: value}))


def test_halves_of_different_layers_are_refused() -> None:
    other = quant.quantise_experts(bf16(2, 256, 128), bf16(2, 64, 256), "w8a8")
    mixed = replace(experts(), down=other.down, down_scales=other.down_scales)
    with pytest.raises(ConfigError, match=r"gate_up is \[128, 128\] and down \[64, 256\]"):
        quant.check_experts(mixed)


# ---- the split path's arithmetic ---------------------------------------------------------------


def test_integer_products_are_exact_beyond_what_float32_holds() -> None:
    depth = 3000
    q = torch.full((1, depth), 127.0)
    blocks = torch.full((1, depth, 32), 127, dtype=torch.int8)
    blocks[0, 1::2] = 126
    total = _integers(q, blocks)
    assert total.dtype == torch.int32 and total.shape == (1, 32)
    assert int(total[0, 0]) == 127 * (127 + 126) * depth // 2 > 1 << 24


def test_rows_are_rounded_as_documented() -> None:
    x = torch.tensor([[127.0, 0.5, -0.5, 1.5, 2.4999, 126.97]])
    q, scale = quantise_tokens(x)
    assert q.tolist() == [[127, 1, -1, 2, 2, 127]] and scale.item() == 1
    a, scale = quantise_activation(torch.tensor([[127.0, 0.5, -0.5, 1.5, 2.5]]))
    assert a.tolist() == [[127, 0, 0, 2, 2]] and scale.item() == 1
    for fn in (quantise_tokens, quantise_activation):
        zeros, scale = fn(torch.zeros(1, 4))
        assert not zeros.any() and scale.item() == 0
        _, scale = fn(torch.tensor([[1.0, float("nan")]]))
        assert bool(scale.isnan().all())


@pytest.mark.parametrize("int4", [False, True])
def test_split_path_agrees_with_the_independent_emulation(int4: bool) -> None:
    """Bit for bit, but for elements that a last bit of exp moved over a rounding."""
    layer = QuantLayer.random(2, 1024, 512, int4)
    weights = from_layer(layer)
    quant.check_experts(weights)
    batch = Batch.random(6, 1, 2, 1024, seed=3)
    batch.weights[:] = 1
    batch.x[4] = 0
    order = np.argsort(batch.ids[:, 0], kind="stable")
    rows = torch.from_numpy(from_bf16(batch.x[order])).bfloat16()
    counts = np.bincount(batch.ids[:, 0], minlength=2).tolist()
    got = expert_mlp(rows, counts, weights).float().numpy()
    want = from_bf16(emulate(batch, layer))[order]
    assert (got == want).mean() > 0.9
    np.testing.assert_allclose(got, want, atol=np.abs(want).max() * 0.02)
    assert not got[order.tolist().index(4)].any()


def from_layer(layer: QuantLayer) -> ExpertWeights:
    kind = "w4a8" if layer.int4 else "w8a8"

    def part(m: Matrices) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        q, scale = torch.from_numpy(m.q), torch.from_numpy(m.scale)
        bias = quant.int4_bias(q, scale) if layer.int4 else None
        return quant.store(q, kind), quant.encode_scales(scale), bias

    (w1, s1, b1), (w2, s2, b2) = part(layer.first), part(layer.second)
    return ExpertWeights(w1, w2, kind, s1, s2, b1, b2)


@pytest.mark.parametrize("kind", ["w8a8", "w4a8"])
def test_a_rows_bits_do_not_depend_on_its_company(kind: str) -> None:
    weights = experts(kind)
    rows = bf16(40, HIDDEN, seed=5)
    whole = expert_mlp(rows, [17, 23], weights)
    for r in (0, 16, 17, 39):
        alone = expert_mlp(rows[r : r + 1], [1, 0] if r < 17 else [0, 1], weights)
        assert torch.equal(alone[0], whole[r])
    assert expert_mlp(rows[:0], [0, 0], weights).shape == (0, HIDDEN)


def test_wrong_counts_are_refused() -> None:
    with pytest.raises(ConfigError, match="for 3 experts, weights of 2"):
        expert_mlp(bf16(1, HIDDEN), [1, 0, 0], experts())


def test_contract_and_policy_know_the_same_names() -> None:
    assert set(QUANT_MODES) == set(KNOWN_QUANTS)
    assert PREPARED_QUANTS == ("none", "w8a8", "w4a8")
    for name, row in QUANT_MODES.items():
        assert (row.scale_dtype is None) == (name == "none")
        if not row.prepared:
            assert row.soc_families == ("A5",) and row.dispatch_quant_mode == 4
            with pytest.raises(ConfigError, match=f"{row.title}, A5"):
                quant_mode(name)
