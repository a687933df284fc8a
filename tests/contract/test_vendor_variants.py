# SPDX-License-Identifier: Apache-2.0
"""Every ABI variant of aclnnMegaMoe compiles, has its parameters in place and computes the same."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.forked import fork_ranks
from support.quant import QuantLayer, expert_args
from support.vendor import (
    COUNTS,
    LIB64,
    SHARED,
    SOFTDEV,
    VARIANTS,
    Batch,
    Call,
    Group,
    Layer,
    Soft,
    aligned,
    from_bf16,
)
from xmoe.reference import BF16_ROW_TOLERANCE, moe_reference, row_errors

pytestmark = [
    pytest.mark.ep,
    pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ to build other variants with"),
]

HIDDEN, INTER, EXPERTS = 1024, 512, 4
ENV = {"HCCL_BUFFSIZE": "16", "XSD_WAIT_TIMEOUT_MS": "10000"}
NULL, INVALID, TILING = 161001, 161002, 561002
FLAGS = ["-std=c++17", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror"]
LAYER = Layer.random(EXPERTS, HIDDEN, INTER)

Build = Callable[[str], Path]


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """Builds one variant into a folder of its own; everything but abi.cpp is compiled once."""
    folder = tmp_path_factory.mktemp("variants")
    sources = sorted((SOFTDEV / "src" / "vendor").glob("*.cpp"))
    include = ["-I", str(SOFTDEV / "include")]
    common = []
    for source in sources:
        if source.name != "abi.cpp":
            common.append(str(folder / f"{source.stem}.o"))
            level = "-O2" if source.stem == "gemm" else "-O1"
            _compile([*FLAGS, level, *include, "-c", str(source), "-o", common[-1]])
    libraries = [f"-l:{name}.so" for name in ("libascendcl", "libnnopbase", "libhccl")]

    def one(variant: str) -> Path:
        target = folder / variant / "libcust_opapi.so"
        if not target.exists():
            target.parent.mkdir()
            abi = str(SOFTDEV / "src" / "vendor" / "abi.cpp")
            define = f"-DXSD_MEGAMOE_VARIANT={variant}"
            link = ["-shared", "-Wl,-z,defs", f"-L{LIB64}", *libraries, f"-Wl,-rpath,{LIB64}"]
            _compile([*FLAGS, "-O1", define, *include, abi, *common, *link, "-o", str(target)])
        return target

    return one


def _compile(arguments: list[str]) -> None:
    done = subprocess.run(["g++", *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def _extra(variant: str) -> dict[str, Any]:
    """A value other than the default for what a variant may be told and must ignore."""
    names = {p.split(":")[0] for p in VARIANTS[variant]}
    return {key: value for key, value in {"numMaxTokensPerRank": 512}.items() if key in names}


def _compute(rank: int, folder: Path, vendor: Path, variant: str, clamp: float) -> Any:
    soft = Soft(rank, vendor, variant)
    group = Group(soft, rank, 2, folder)
    changes = _extra(variant)
    if "activationParams:P" in VARIANTS[variant]:
        changes["activationParams"] = soft.floats(*([clamp] if clamp else []))
    elif "activationClamp:F" in VARIANTS[variant]:
        changes["activationClamp"] = clamp
    batch = Batch.random(4, 2, EXPERTS, HIDDEN, rank)
    call = Call.make(soft, group, LAYER, batch, **changes)
    stream = soft.stream()
    soft.launch(call.args, stream)
    ended = soft.synchronize(stream)
    group.close()
    return ended, batch, call.y


@pytest.mark.parametrize("variant", list("ABCDEFGHIJ"))
def test_variant_computes(build: Build, variant: str) -> None:
    assert len(VARIANTS[variant]) + 2 == COUNTS[variant]
    clamp = 0.0 if variant == "A" else 0.5  # A has no clamp
    for end in fork_ranks(_compute, 2, build(variant), variant, clamp, env=ENV):
        ended, batch, y = end.value
        assert ended == (0, "")
        want = moe_reference(
            from_bf16(batch.x), batch.ids, batch.weights, *LAYER.values, activation_clamp=clamp
        )
        assert row_errors(from_bf16(y), want).max() <= BF16_ROW_TOLERANCE


def _refuse(rank: int, folder: Path, vendor: Path, variant: str) -> dict[str, tuple[int, str]]:
    soft = Soft(rank, vendor, variant)
    names = {p.split(":")[0] for p in soft.params}

    def arguments(**changes: Any) -> dict[str, Any]:
        return {
            "context": soft.tensor(aligned(4100, np.int32)),
            "x": soft.tensor(aligned((3, HIDDEN), np.uint16)),
            "topkIds": soft.tensor(aligned((3, 2), np.int32)),
            "topkWeights": soft.tensor(aligned((3, 2), np.float32)),
            "weight1": soft.tensors([LAYER.gate_up[0], LAYER.gate_up[1]]),
            "weight2": soft.tensors([LAYER.down[0], LAYER.down[1]]),
            "moeExpertNum": 4,
            "epWorldSize": 2,
            "cclBufferSize": 1 << 40,
            "yOut": soft.tensor(aligned((3, HIDDEN), np.uint16)),
            "expertTokenNumsOut": soft.tensor(aligned(2, np.int32)),
            **changes,
        }

    some = soft.tensor(aligned((4, 4), np.float32))
    cases: dict[str, dict[str, Any]] = {
        "experts 0": {"moeExpertNum": 0},
        "max_recv -1": {"maxRecvTokenNum": -1},
        "activation null": {"activation": None},
        "params null": {"activationParams": None},
        "params two": {"activationParams": soft.floats(1.0, 2.0)},
        "max tokens below bs": {"numMaxTokensPerRank": 2},
        "max tokens above limit": {"numMaxTokensPerRank": 4097},
        "scales": {"scales": some},
        "mask buffer": {"maskBuffer": some},
        "topk weights type": {"topkWeightsType": 1},
        **{
            name: {name: soft.tensors([aligned((4, 4), np.float32)])}
            for name in (entry.split(":")[0] for entry in SHARED)
        },
    }
    results = {}
    for case, changes in cases.items():
        if set(changes) <= names:
            code, _, _ = soft.prepare(arguments(**changes))
            results[case] = (code, soft.text() if code else "")
    return results


# Cases whose outcome is the same in each variant that has the parameter.
ALWAYS = {
    "params null": (NULL, "activationParams must not be nullptr"),
    "params two": (TILING, "activation_params"),
    "scales": (TILING, "scales is given"),
    "mask buffer": (TILING, "maskBuffer is given"),
    "topk weights type": (TILING, "topk_weights_type=1"),
    **{entry.split(":")[0]: (TILING, "no shared experts") for entry in SHARED},
}


@pytest.mark.parametrize("variant", list("ABCDEFGHIJ"))
def test_variant_refuses(build: Build, variant: str) -> None:
    got = fork_ranks(_refuse, 1, build(variant), variant)[0].value
    want = {case: ALWAYS[case] for case in got if case in ALWAYS}
    # A's wrapper checks pointers only; the number is refused later, by the tiling.
    want["experts 0"] = (TILING if variant == "A" else INVALID, "0")
    want["max_recv -1"] = (TILING if variant == "A" else INVALID, "-1")
    if variant >= "G":
        want["activation null"] = (NULL, "activation must not be nullptr.")
    elif variant > "A":
        want["activation null"] = (TILING, "activation is null")
    for case in ("max tokens below bs", "max tokens above limit"):
        want[case] = (TILING, "num_max_tokens_per_rank") if variant >= "H" else (0, "")
    assert set(got) == set(want)
    problems = [
        f"{case}: {got[case]}, wanted {code} with {text!r}"
        for case, (code, text) in want.items()
        if got[case][0] != code or text not in got[case][1]
    ]
    assert not problems, "\n".join(problems)


def _integer_weights(rank: int, folder: Path, vendor: Path, variant: str) -> Any:
    """The outcome of phase one with scales alone, and with biases as well."""
    soft = Soft(rank, vendor, variant)
    results = []
    for int4 in (False, True):
        layer = QuantLayer.random(2, HIDDEN, INTER, int4)
        code, _, _ = soft.prepare(
            {
                "context": soft.tensor(aligned(4100, np.int32)),
                "x": soft.tensor(aligned((3, HIDDEN), np.uint16)),
                "topkIds": soft.tensor(aligned((3, 2), np.int32)),
                "topkWeights": soft.tensor(aligned((3, 2), np.float32)),
                "moeExpertNum": 4,
                "epWorldSize": 2,
                "cclBufferSize": 1 << 40,
                "yOut": soft.tensor(aligned((3, HIDDEN), np.uint16)),
                "expertTokenNumsOut": soft.tensor(aligned(2, np.int32)),
                **expert_args(soft, layer, range(2)),
            }
        )
        results.append((code, soft.text() if code else ""))
    return results


@pytest.mark.parametrize("variant", list("ADJ"))
def test_variant_takes_scales_and_biases(build: Build, variant: str) -> None:
    (int8, _), (int4, text) = fork_ranks(_integer_weights, 1, build(variant), variant)[0].value
    assert int8 == 0
    # A has no parameters for the biases that int4 weights need.
    assert (int4, "bias1 is absent" in text) == ((TILING, True) if variant == "A" else (0, False))


def test_unknown_variant_does_not_compile() -> None:
    with pytest.raises(AssertionError, match="must be one of A, B"):
        abi = str(SOFTDEV / "src" / "vendor" / "abi.cpp")
        include = str(SOFTDEV / "include")
        _compile(["-std=c++17", "-fsyntax-only", "-I", include, "-DXSD_MEGAMOE_VARIANT=K", abi])
