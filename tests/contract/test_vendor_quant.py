# SPDX-License-Identifier: Apache-2.0
"""Integer modes of the software device's aclnnMegaMoe: bits, accuracy, layouts, what is refused."""

from __future__ import annotations

import functools
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.forked import fork_ranks
from support.quant import QuantLayer, emulate, quant_call
from support.vendor import (
    FLOAT,
    INT8,
    INT32,
    ND,
    NZ,
    SOFTDEV,
    Batch,
    Call,
    Group,
    Layer,
    Soft,
    aligned,
    from_bf16,
    place,
    to_bf16,
)
from xmoe.layout import WindowSpec, required_ccl_buffer_bytes
from xmoe.reference import (
    INT8_ROW_TOLERANCE,
    int8_error_bound,
    moe_reference,
    row_errors,
    tokens_per_expert,
)

pytestmark = pytest.mark.ep

HIDDEN, INTER, EXPERTS = 1024, 512, 4
ENV = {"HCCL_BUFFSIZE": "16", "XSD_WAIT_TIMEOUT_MS": "20000"}
TILING, EXCEPTION = 561002, 507035
MODES = [pytest.param(False, id="w8a8"), pytest.param(True, id="w4a8")]


@functools.cache
def layer(int4: bool) -> QuantLayer:
    return QuantLayer.random(EXPERTS, HIDDEN, INTER, int4)


def batches(size: int, tokens: int, topk: int = 2) -> list[Batch]:
    return [Batch.random(tokens, topk, EXPERTS, HIDDEN, 40 + r) for r in range(size)]


def _run(
    rank: int, folder: Path, inputs: list[Batch], weights: QuantLayer, how: dict[str, Any],
    changes: dict[str, Any], rounds: int = 1,
) -> Any:  # fmt: skip
    soft = Soft(rank)
    group = Group(soft, rank, len(inputs), folder)
    stream = soft.stream()
    calls = [quant_call(soft, group, weights, inputs[rank], how, **changes) for _ in range(rounds)]
    for call in calls:
        soft.launch(call.args, stream)
    code, text = soft.synchronize(stream)
    group.close()
    return code, text, [call.y for call in calls], calls[0].counts


def outputs(
    inputs: list[Batch], weights: QuantLayer, env: dict[str, str] | None = None,
    changes: dict[str, Any] | None = None, rounds: int = 1, **how: Any,
) -> list[np.ndarray]:  # fmt: skip
    ended = fork_ranks(
        _run, len(inputs), inputs, weights, how, changes or {}, rounds, env={**ENV, **(env or {})}
    )
    for end in ended:
        code, text, rows, counts = end.value
        assert (code, text) == (0, "")
        assert all(np.array_equal(y, rows[0]) for y in rows), "rounds differ"
    counts = np.concatenate([end.value[3] for end in ended])
    assert np.array_equal(counts, sum(tokens_per_expert(b.ids, EXPERTS) for b in inputs))
    return [end.value[2][0] for end in ended]


def oracle(batch: Batch, weights: QuantLayer, clamp: float | None = None) -> tuple[Any, ...]:
    return (from_bf16(batch.x), batch.ids, batch.weights, *weights.values, clamp)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("int4", MODES)
def test_bits_are_the_documented_arithmetic(int4: bool, size: int) -> None:
    inputs = batches(size, tokens=2)
    for batch, y in zip(inputs, outputs(inputs, layer(int4), rounds=2), strict=True):
        np.testing.assert_array_equal(y, emulate(batch, layer(int4)))


@pytest.mark.parametrize("int4", MODES)
def test_within_bound_and_tolerance_of_the_reference(int4: bool) -> None:
    inputs = batches(2, tokens=12, topk=3)
    for batch, y in zip(inputs, outputs(inputs, layer(int4)), strict=True):
        args = oracle(batch, layer(int4))
        want = moe_reference(*args)
        errors = row_errors(from_bf16(y), want)
        assert errors.max() <= INT8_ROW_TOLERANCE
        assert errors.max() > INT8_ROW_TOLERANCE / 16  # the tolerance is of the right size
        bound = int8_error_bound(*args, int4_weights=int4)
        assert (np.abs(from_bf16(y) - want) <= bound).all()


@pytest.mark.parametrize("int4", MODES)
def test_clamp(int4: bool) -> None:
    inputs = batches(2, tokens=2)
    got = outputs(inputs, layer(int4), changes={"activationClamp": 0.4})
    for batch, y in zip(inputs, got, strict=True):
        np.testing.assert_array_equal(y, emulate(batch, layer(int4), clamp=0.4))
        assert not np.array_equal(y, emulate(batch, layer(int4)))


def test_int4_and_packed_int32_are_the_same_weights() -> None:
    inputs = batches(2, tokens=2)
    packed = outputs(inputs, layer(True))
    for y, other in zip(packed, outputs(inputs, layer(True), as_int4=True), strict=True):
        np.testing.assert_array_equal(y, other)


@pytest.mark.parametrize("int4", MODES)
def test_weights_in_plain_order_under_the_nz_label_give_wrong_results(int4: bool) -> None:
    inputs = batches(2, tokens=2)
    for batch, y in zip(inputs, outputs(inputs, layer(int4), row_major=True), strict=True):
        assert row_errors(from_bf16(y), moe_reference(*oracle(batch, layer(int4)))).min() > 0.3


def test_int4_encoding_is_a_setting() -> None:
    inputs = batches(2, tokens=2)
    want = outputs(inputs, layer(True))
    env = {"XSD_MEGAMOE_INT4": "offset_binary"}
    same = outputs(inputs, layer(True), env=env, offset_binary=True)
    wrong = outputs(inputs, layer(True), offset_binary=True)
    for one, two, three in zip(want, same, wrong, strict=True):
        np.testing.assert_array_equal(one, two)
        assert row_errors(from_bf16(three), from_bf16(one)).min() > 0.3


@pytest.mark.parametrize("int4", MODES)
def test_scale_bits_are_a_setting(int4: bool) -> None:
    inputs = batches(2, tokens=1)
    env = {"XSD_MEGAMOE_SCALE_BITS": "19"}
    for batch, y in zip(inputs, outputs(inputs, layer(int4), env=env), strict=True):
        np.testing.assert_array_equal(y, emulate(batch, layer(int4), mask=0xFFFFE000))
        assert not np.array_equal(y, emulate(batch, layer(int4)))


@pytest.mark.parametrize("int4", MODES)
def test_rows_of_zeros_stay_zero_and_a_nan_spoils_its_row_only(int4: bool) -> None:
    inputs = batches(2, tokens=4)
    for batch in inputs:
        batch.x[1] = 0
        batch.x[2, 5] = 0x7FC0
    for batch, y in zip(inputs, outputs(inputs, layer(int4)), strict=True):
        assert not y[1].any()
        assert np.isnan(from_bf16(y[2])).all()
        batch.x[2] = 0
        np.testing.assert_array_equal(y[[0, 3]], emulate(batch, layer(int4))[[0, 3]])


def test_extreme_rows() -> None:
    """Very small and very large tokens reach int8 without overflow; infinity is NaN."""
    inputs = batches(2, tokens=4)
    for batch in inputs:
        row = from_bf16(batch.x[0])
        batch.x[1] = to_bf16(row * np.float32(2.0**-100))
        batch.x[2] = to_bf16(row * np.float32(2.0**40))
        batch.x[3, 7] = 0x7F80
        batch.ids[1:] = batch.ids[0]
    for batch, y in zip(inputs, outputs(inputs, layer(False)), strict=True):
        np.testing.assert_array_equal(y[:3], emulate(batch, layer(False), rows=3))
        assert not y[1].any()  # near 0 the activation is a square, here below float32
        assert np.isfinite(from_bf16(y[2])).all() and y[2].any()
        assert np.isnan(from_bf16(y[3])).all()


@pytest.mark.parametrize("int4", MODES)
def test_many_launches_with_delays_never_mix(int4: bool) -> None:
    inputs = batches(4, tokens=2)
    env = {"XSD_DELAY_SEED": "3", "XSD_DELAY_MAX_US": "1500"}
    got = outputs(inputs, layer(int4), env=env, rounds=6)
    for y, quiet in zip(got, outputs(inputs, layer(int4)), strict=True):
        np.testing.assert_array_equal(y, quiet)


def _masked(rank: int, folder: Path, inputs: list[Batch], mask: np.ndarray) -> Any:
    soft = Soft(rank)
    group = Group(soft, rank, len(inputs), folder)
    stream = soft.stream()
    ids = inputs[rank].ids.copy()
    call = quant_call(soft, group, layer(True), inputs[rank], {}, xActiveMask=soft.tensor(mask))
    soft.launch(call.args, stream)
    assert soft.synchronize(stream) == (0, "")
    group.close()
    return call.y, ids


def test_masked_tokens() -> None:
    inputs = batches(2, tokens=4)
    mask = place(np.array([1, 0, 0, 1], np.int8))
    for end in fork_ranks(_masked, 2, inputs, mask, env=ENV):
        want = emulate(inputs[end.rank], layer(True))
        np.testing.assert_array_equal(end.value[0][[0, 3]], want[[0, 3]])


def _two_kinds(rank: int, folder: Path, inputs: list[Batch], plain: Layer) -> Any:
    soft = Soft(rank)
    group = Group(soft, rank, len(inputs), folder)
    stream = soft.stream()
    soft.launch(quant_call(soft, group, layer(False), inputs[rank], {}).args, stream)
    first = soft.synchronize(stream)
    soft.launch(Call.make(soft, group, plain, inputs[rank]).args, stream)
    second = soft.synchronize(stream)
    group.close()
    return first, second


def test_one_window_serves_one_kind_of_barrier() -> None:
    plain = Layer.random(EXPERTS, HIDDEN, INTER)
    for end in fork_ranks(_two_kinds, 2, batches(2, tokens=1), plain, env=ENV):
        first, (code, text) = end.value
        assert first == (0, "") and code != 0
        assert "int8" in text or "remote" in text or "dirty" in text


def _disagree(rank: int, folder: Path, inputs: list[Batch]) -> Any:
    soft = Soft(rank)
    group = Group(soft, rank, len(inputs), folder)
    stream = soft.stream()
    soft.launch(quant_call(soft, group, layer(rank == 1), inputs[rank], {}).args, stream)
    code, text = soft.synchronize(stream)
    return code, text


def test_ranks_with_different_weights_are_told() -> None:
    ended = fork_ranks(_disagree, 2, batches(2, tokens=1), env=ENV)
    assert all(end.value[0] != 0 for end in ended)
    assert any("bits of a weight" in end.value[1] for end in ended)


def _scale_words(rank: int, folder: Path, inputs: list[Batch]) -> Any:
    soft = Soft(rank)
    group = Group(soft, rank, len(inputs), folder)
    stream = soft.stream()
    call = quant_call(soft, group, layer(False), inputs[rank], {})
    # Two float32 in each element: what comes of passing floats as they are.
    pairs = [place(np.tile(layer(False).first.scale[0], 2).view(np.uint64)) for _ in range(2)]
    call.args["weightScales1"] = soft.tensors(pairs)
    soft.launch(call.args, stream)
    return soft.synchronize(stream)


def test_scales_that_are_plain_floats_are_told() -> None:
    for end in fork_ranks(_scale_words, 2, batches(2, tokens=1), env=ENV):
        code, text = end.value
        assert code != 0
        assert "upper 32 bits" in text or "remote" in text


# ---- phase one -------------------------------------------------------------------------------


def base(soft: Soft, int4: bool = False, experts: int = 2, bs: int = 1) -> dict[str, Any]:
    """Arguments that phase one accepts, for one rank of two; weights are never read."""
    args: dict[str, Any] = {
        "context": soft.tensor(aligned(4100, np.int32)),
        "x": soft.tensor(aligned((bs, HIDDEN), np.uint16)),
        "topkIds": soft.tensor(aligned((bs, 2), np.int32)),
        "topkWeights": soft.tensor(aligned((bs, 2), np.float32)),
        "moeExpertNum": 2 * experts,
        "epWorldSize": 2,
        "cclBufferSize": 1 << 40,
        "dispatchQuantMode": 2,
        "dispatchQuantOutDtype": INT8,
        "yOut": soft.tensor(aligned((bs, HIDDEN), np.uint16)),
        "expertTokenNumsOut": soft.tensor(aligned(experts, np.int32)),
    }
    for number, rows, columns in ((1, HIDDEN, 2 * INTER), (2, INTER, HIDDEN)):
        kind, width = (np.int32, columns // 8) if int4 else (np.int8, columns)
        args[f"weight{number}"] = soft.tensors([aligned((rows, width), kind)] * experts, fmt=NZ)
        args[f"weightScales{number}"] = soft.tensors([aligned(columns, np.uint64)] * experts)
        if int4:
            args[f"bias{number}"] = soft.tensors([aligned(columns, np.float32)] * experts)
    return args


def _lists(name: str, shape: Any, kind: Any, count: int = 2, **how: Any) -> Any:
    return lambda s: {name: s.tensors([aligned(shape, kind)] * count, **how)}


def _scalars(**values: Any) -> Any:
    return lambda s: values


REFUSED: list[tuple[str, bool, Any, str]] = [
    ("nd", False, _lists("weight1", (1024, 1024), np.int8, fmt=ND), "INT8 weights must be FRACTAL"),
    ("nd 2", False, _lists("weight2", (512, 1024), np.int8, fmt=ND), "weight2[0] has format 2"),
    ("mixed", False, _lists("weight2", (512, 128), np.int32, fmt=NZ), "makes it INT8 weights"),
    ("mixed 4", True, _lists("weight2", (512, 1024), np.int8, fmt=NZ), "makes it INT4 weights"),
    ("columns", False, _lists("weight1", (1024, 2048), np.int8, fmt=NZ), "2*I=1024"),
    ("packed", True, _lists("weight1", (1024, 1024), np.int32, fmt=NZ), "columns=8192"),
    ("mxfp", False, _lists("weight1", (1024, 1024), np.int8, dtype=36), "A8W8-FP"),
    ("no scales", False, _scalars(weightScales1=None), "weightScales1 is absent"),
    ("no scales 2", True, _scalars(weightScales2=None), "2 tensors of UINT64 (10) [1024]"),
    ("no bias", True, _scalars(bias1=None), "bias1 is absent; INT4 weights need it"),
    ("bias", False, _lists("bias2", 1024, np.float32), "must be absent for INT8"),
    ("scale type", False, _lists("weightScales1", 1024, np.float32), "UINT64"),
    ("scale rank", False, _lists("weightScales1", (1, 1024), np.uint64), "1-dimension, got 2"),
    ("scale length", False, _lists("weightScales1", 1023, np.uint64), "columns of its weight"),
    ("scale count", False, _lists("weightScales2", 1024, np.uint64, 1), "length of weightScales2"),
    ("bias type", True, _lists("bias1", 1024, np.float32, dtype=INT32), "FLOAT (0)"),
    ("bias length", True, _lists("bias2", 512, np.float32), "bias2[0]=512"),
    ("mode 0", False, _scalars(dispatchQuantMode=0), "2 (int8 per token) for INT8 weights"),
    ("mode 4", True, _scalars(dispatchQuantMode=4), "dispatch_quant_mode=4"),
    ("out type", False, _scalars(dispatchQuantOutDtype=FLOAT), "dispatch_quant_out_dtype=0"),
    ("out undefined", False, _scalars(dispatchQuantOutDtype=28), "must be INT8 (2) in quant mode"),
    # 28 passes the attribute check and falls only behind the size of the buffer.
    ("order", True, _scalars(dispatchQuantOutDtype=28, cclBufferSize=0), "ccl_buffer_size=0"),
]


def _refused(rank: int, folder: Path) -> dict[str, tuple[int, int, bool, str]]:
    soft = Soft(rank)
    found = {}
    for name, int4, make, _ in REFUSED:
        code, size, executor = soft.prepare({**base(soft, int4), **make(soft)})
        found[name] = (code, size, bool(executor.value), soft.text())
    return found


def test_every_refusal() -> None:
    found = fork_ranks(_refused, 1)[0].value
    problems = []
    for name, _, _, text in REFUSED:
        code, size, made, said = found[name]
        if code != TILING or text not in said or size or made:
            problems.append(f"{name}: {code} {said!r}, wanted {text!r}")
    assert not problems, "\n".join(problems)


def _phase_one(rank: int, folder: Path, int4: bool, changes: dict[str, Any], bs: int) -> Any:
    soft = Soft(rank)
    code, size, executor = soft.prepare({**base(soft, int4, bs=bs), **changes})
    return code, soft.text() if code else "", size


@pytest.mark.parametrize("bs", [1, 64, 4096])
@pytest.mark.parametrize("int4", MODES)
def test_smallest_buffer_is_the_policys(int4: bool, bs: int) -> None:
    spec = WindowSpec(bs, HIDDEN, 2, 2, 2, quantised=True)
    need = required_ccl_buffer_bytes("A3", spec)
    below = fork_ranks(_phase_one, 1, int4, {"cclBufferSize": need - 1}, bs)[0].value
    exact = fork_ranks(_phase_one, 1, int4, {"cclBufferSize": need}, bs)[0].value
    assert below[0] == TILING and f" {need} bytes" in below[1]
    assert exact[0] == 0 and exact[2] > 0


@pytest.mark.parametrize(
    ("env", "text"),
    [
        ({"XSD_MEGAMOE_INT4": "gray"}, "XSD_MEGAMOE_INT4 (twos_complement, offset_binary)"),
        ({"XSD_MEGAMOE_SCALE_BITS": "16"}, "XSD_MEGAMOE_SCALE_BITS (32, 19)"),
        ({"XSD_SOC": "Ascend910B2"}, "1024..3072"),  # A2: the same checks, other limits
    ],
)
def test_settings_and_limits(env: dict[str, str], text: str) -> None:
    code, said, _ = fork_ranks(_phase_one, 1, True, {}, 1, env=env)[0].value
    assert code == TILING and text in said


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ to build the native test with")
def test_native_arithmetic_under_sanitizers(tmp_path: Path) -> None:
    program = tmp_path / "quant"
    sources = [SOFTDEV / "src" / "tests" / "quant.cpp", SOFTDEV / "src" / "vendor" / "quant.cpp"]
    flags = "-std=c++17 -O1 -g1 -Wall -Wextra -Werror -fsanitize=address,undefined".split()
    flags += ["-fno-sanitize-recover=all", "-ffp-contract=off", "-I", str(SOFTDEV / "include")]
    command = ["g++", *flags, *map(str, sources), "-o", str(program)]
    built = subprocess.run(command, capture_output=True, text=True)
    if "cannot find" in built.stderr and "asan" in built.stderr:
        pytest.skip("the compiler has no sanitizer libraries")
    assert built.returncode == 0, built.stderr
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr[-4000:]
