# SPDX-License-Identifier: Apache-2.0
"""What phase one of aclnnMegaMoe refuses, with which code, in which order, and what it says.

Phase one needs no communicator: every case here is one call in one forked process.
"""

from __future__ import annotations

import ctypes as C
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.forked import fork_ranks
from support.vendor import NZ, Soft, aligned

NULL, INVALID, TILING, NO_KERNEL, EXECUTOR = 161001, 161002, 561002, 561003, 561101
MIB = 1 << 20

# bs 1, K 2, H 1024, EP 2: counts 2 * 384 * 4, rows 2 * (1 * 2 * 1024 * 2), flags 2 * 512, 10 MiB.
NEED = 3072 + 8192 + 1024 + 10 * MIB

Changes = dict[str, Any]
Case = tuple[str, Callable[[Soft], Changes], int, str]


def base(
    soft: Soft,
    bs: int = 1,
    topk: int = 2,
    hidden: int = 1024,
    inter: int = 512,
    experts: int = 2,
    **changes: Any,
) -> Changes:
    """Arguments that phase one accepts, for one rank of two; sizes and single arguments changed."""
    args = {
        "context": soft.tensor(aligned(4100, np.int32)),
        "x": soft.tensor(aligned((bs, hidden), np.uint16)),
        "topkIds": soft.tensor(aligned((bs, topk), np.int32)),
        "topkWeights": soft.tensor(aligned((bs, topk), np.float32)),
        "weight1": soft.tensors([aligned((hidden, 2 * inter), np.uint16)] * experts),
        "weight2": soft.tensors([aligned((inter, hidden), np.uint16)] * experts),
        "moeExpertNum": 2 * experts,
        "epWorldSize": 2,
        "cclBufferSize": 1 << 40,
        "yOut": soft.tensor(aligned((bs, hidden), np.uint16)),
        "expertTokenNumsOut": soft.tensor(aligned(experts, np.int32)),
    }
    args.update(changes)
    return args


def with_sizes(**sizes: int) -> Callable[[Soft], Changes]:
    return lambda soft: base(soft, **sizes)


def with_args(**changes: Any) -> Callable[[Soft], Changes]:
    return lambda soft: base(soft, **changes)


def with_tensor(
    name: str, shape: tuple[int, ...], dtype: Any, **how: Any
) -> Callable[[Soft], Changes]:
    return lambda soft: base(soft, **{name: soft.tensor(aligned(shape, dtype), **how)})


def with_list(
    name: str, *arrays: tuple[tuple[int, ...], Any], **how: Any
) -> Callable[[Soft], Changes]:
    return lambda soft: base(
        soft, **{name: soft.tensors([aligned(s, d) for s, d in arrays], **how)}
    )


def transposed(soft: Soft) -> Changes:
    """weight1 as a transposed view: right shape, wrong memory order."""
    array = aligned((1024, 1024), np.uint16).T
    return base(soft, weight1=soft.tensors([array, array]))


def dead_tensor(soft: Soft) -> Changes:
    args = base(soft)
    soft.nnop.aclDestroyTensor(args["topkIds"])
    return args


REQUIRED = "context x topkIds topkWeights weight1 weight2 yOut expertTokenNumsOut".split()

CASES: list[Case] = [
    # Wrapper. Each case breaks everything that is looked at later, too.
    *(
        (
            name,
            with_args(**dict.fromkeys(REQUIRED[i:]), moeExpertNum=0),
            NULL,
            f"{name} must not be",
        )
        for i, name in enumerate(REQUIRED)
    ),
    ("experts first", with_args(moeExpertNum=0, epWorldSize=0), INVALID, "moeExpertNum=0"),
    ("ep next", with_args(epWorldSize=-1, maxRecvTokenNum=-1), INVALID, "epWorldSize=-1"),
    ("then max_recv", with_args(maxRecvTokenNum=-1, commAlg=None), INVALID, "maxRecvTokenNum=-1"),
    ("dead descriptor", dead_tensor, INVALID, "topk_ids"),
    # Tiling: comm_alg.
    ("comm_alg null", lambda s: base(s, bs=4097, commAlg=None), TILING, "comm_alg"),
    ("comm_alg value", lambda s: base(s, bs=4097, commAlg=b"fullmesh"), TILING, '"fullmesh"'),
    # Input shapes come before attributes.
    ("bs", lambda s: base(s, bs=4097, epWorldSize=3), TILING, "4097"),
    ("bs 0", with_sizes(bs=0), TILING, "bs (rows of x)=0"),
    ("H low", with_sizes(hidden=512), TILING, "H (columns of x)=512"),
    ("H step", with_sizes(hidden=1280), TILING, "1024..8192 in steps of 512"),
    ("H high", with_sizes(hidden=8704), TILING, "8704"),
    ("I low", with_sizes(inter=256), TILING, "I (rows of weight2[0])=256"),
    ("I step", with_sizes(inter=768), TILING, "512..3072 in steps of 512"),
    ("I high", with_sizes(inter=3584), TILING, "3584"),
    ("K", with_sizes(topk=17), TILING, "K (columns of topk_ids)=17"),
    ("x rank", with_tensor("x", (1, 1, 1024), np.uint16), TILING, "x must be 2-dimension, got 3"),
    ("x dtype", with_tensor("x", (1, 1024), np.float32), TILING, "x has data type 0"),
    ("ids dtype", with_tensor("topkIds", (1, 2), np.float32), TILING, "topk_ids has data type"),
    ("ids rows", with_tensor("topkIds", (2, 2), np.int32), TILING, "topk_ids rows=2"),
    ("weights dtype", with_tensor("topkWeights", (1, 2), np.int32), TILING, "topk_weights"),
    ("weights shape", with_tensor("topkWeights", (1, 3), np.float32), TILING, "columns=3"),
    ("context dtype", with_tensor("context", (8,), np.float32), TILING, "context"),
    (
        "w1 rank",
        with_list("weight1", *[((2, 1024, 1024), np.uint16)] * 2),
        TILING,
        "weight1[0] must be 2-dimension, got 3",
    ),
    ("w lengths", with_list("weight2", ((512, 1024), np.uint16)), TILING, "length of weight2=1"),
    ("w1 dtype", with_list("weight1", *[((1024, 1024), np.float32)] * 2), TILING, "BF16 (27)"),
    ("w1 format", with_list("weight1", *[((1024, 1024), np.uint16)] * 2, fmt=NZ), TILING, "ND"),
    ("w1 columns", with_list("weight1", *[((1024, 2048), np.uint16)] * 2), TILING, "2*I=1024"),
    ("w1 rows", with_list("weight1", *[((1536, 1024), np.uint16)] * 2), TILING, "H=1024"),
    (
        "w2 columns",
        with_list("weight2", *[((512, 1536), np.uint16)] * 2),
        TILING,
        "weight2 columns",
    ),
    ("w1 order", transposed, TILING, "must be contiguous"),
    ("mask rank", with_tensor("xActiveMask", (1, 1), np.int8), TILING, "must be 1-dimension"),
    ("mask dtype", with_tensor("xActiveMask", (1,), np.int32), TILING, "x_active_mask"),
    ("mask length", with_tensor("xActiveMask", (2,), np.int8), TILING, "x_active_mask=2"),
    ("scales", with_list("weightScales1", ((1024,), np.float32)), TILING, "weightScales1"),
    ("bias", with_list("bias2", ((1024,), np.float32)), TILING, "bias2"),
    # Attributes come before outputs.
    (
        "experts",
        lambda s: base(s, moeExpertNum=1025, yOut=s.tensor(aligned((2, 2), np.uint16))),
        TILING,
        "moe_expert_num=1025",
    ),
    ("ep not listed", with_args(epWorldSize=6), TILING, "ep_world_size=6"),
    ("ep too large", with_args(epWorldSize=64), TILING, "ep_world_size=64"),
    ("ep 1", with_args(epWorldSize=1), TILING, "ep_world_size=1"),
    ("quant", with_args(dispatchQuantMode=2), TILING, "dispatch_quant_mode=2"),
    ("quant out", with_args(dispatchQuantOutDtype=2), TILING, "dispatch_quant_out_dtype=2"),
    ("combine quant", with_args(combineQuantMode=3), TILING, "combine_quant_mode=3"),
    ("activation null", with_args(activation=None), TILING, "activation is null"),
    ("activation", with_args(activation=b"gelu"), TILING, '"gelu"'),
    ("clamp", with_args(activationClamp=-1.0), TILING, "activation_clamp=-1"),
    ("clamp nan", with_args(activationClamp=float("nan")), TILING, "activation_clamp"),
    # Outputs come before the buffer.
    (
        "y dtype",
        lambda s: {**with_tensor("yOut", (1, 1024), np.float32)(s), "cclBufferSize": 0},
        TILING,
        "y has data type",
    ),
    ("y shape", with_tensor("yOut", (1, 512), np.uint16), TILING, "y columns=512"),
    ("counts dtype", with_tensor("expertTokenNumsOut", (2,), np.float32), TILING, "expert_token"),
    ("counts length", with_tensor("expertTokenNumsOut", (4,), np.int32), TILING, "=4 must equal"),
    ("buffer", with_args(cclBufferSize=2 * NEED - 1), TILING, f"{2 * NEED} bytes"),
    ("buffer 0", with_args(cclBufferSize=0), TILING, "ccl_buffer_size=0"),
]


def _run(rank: int, folder: Path, names: list[str]) -> dict[str, tuple[int, int, bool, str]]:
    soft = Soft(rank)
    results = {}
    for name, make, _, _ in CASES:
        if name in names:
            code, size, executor = soft.prepare(make(soft))
            results[name] = (code, size, bool(executor.value), soft.text())
    return results


def test_case_names_are_unique() -> None:
    assert len({case[0] for case in CASES}) == len(CASES)


def test_every_refusal() -> None:
    results = fork_ranks(_run, 1, [case[0] for case in CASES])[0].value
    problems = []
    for name, _, code, text in CASES:
        got, size, made, said = results[name]
        if got != code or text not in said or size or made or not said.startswith("EZ1001"):
            problems.append(f"{name}: {got} {said!r}, wanted {code} with {text!r}")
    assert not problems, "\n".join(problems)


def _accepted(rank: int, folder: Path, changes: list[Changes]) -> list[tuple[int, int, str]]:
    soft = Soft(rank)
    results = []
    for change in changes:
        code, size, executor = soft.prepare(base(soft, **change))
        results.append((code, size, soft.text() if code else ""))
        if executor.value:
            soft.check("destroy", soft.nnop.aclDestroyAclOpExecutor(executor))
    return results


def accepted(*changes: Changes, **env: str) -> list[tuple[int, int, str]]:
    return fork_ranks(_accepted, 1, list(changes), env=env)[0].value


def test_limits_themselves_are_accepted() -> None:
    changes = [
        {},
        {"bs": 4096},
        {"hidden": 8192},
        {"inter": 3072},
        {"topk": 16},
        {"experts": 128},
        {"epWorldSize": 32, "moeExpertNum": 1024},
        {"dispatchQuantOutDtype": 27},
        {"activationClamp": 0.0},
        {"numMaxTokensPerRank": 10240},  # taken and dropped before variant H
        {"cclBufferSize": 2 * NEED},
    ]
    assert [code for code, _, _ in accepted(*changes)] == [0] * len(changes)


def test_workspace_grows_with_the_rows_received() -> None:
    (_, small, _), (_, large, _), (_, auto, _) = accepted(
        {"maxRecvTokenNum": 100}, {"maxRecvTokenNum": 1100}, {"bs": 64}
    )
    assert large - small == 1000 * 2 * 512 * 2  # the gate and up rows, bf16
    assert small < auto < 64 * MIB


def test_size_named_in_the_refusal_is_the_smallest_accepted() -> None:
    for size in ({"bs": 1}, {"bs": 16}, {"bs": 4096, "topk": 8}):
        (_, _, text), *_ = accepted({**size, "cclBufferSize": 0})
        named = int(text.split(" need ")[1].split(" bytes")[0])
        below, exact = accepted(
            {**size, "cclBufferSize": named - 1}, {**size, "cclBufferSize": named}
        )
        assert (below[0], exact[0]) == (TILING, 0)


@pytest.mark.parametrize(
    ("env", "inter", "code", "text"),
    [
        ({"XSD_SOC": "Ascend910B2"}, 512, TILING, "1024..3072"),
        ({"XSD_SOC": "Ascend910B2"}, 1024, NO_KERNEL, "Ascend910_93"),
        ({"XSD_SOC": "Ascend950PR_9599"}, 1024, TILING, "platform"),
        ({"XSD_MEGAMOE_PROFILE": "9.1.0"}, 512, TILING, "profile 9.1.0"),
        ({"XSD_MEGAMOE_PROFILE": "9.1.0"}, 1024, 0, ""),
        ({"XSD_MEGAMOE_PROFILE": "8.5"}, 1024, TILING, "XSD_MEGAMOE_PROFILE"),
    ],
)
def test_limits_depend_on_soc_and_profile(
    env: dict[str, str], inter: int, code: int, text: str
) -> None:
    got, _, said = accepted({"inter": inter, "cclBufferSize": 0 if code != 0 else 1 << 40}, **env)[
        0
    ]
    assert got == code and text in said


def _stale_executor(rank: int, folder: Path) -> tuple[int, str]:
    soft = Soft(rank)
    args = base(soft)
    values = [args.get(p.split(":")[0]) for p in soft.params]
    values = [
        value if value is not None else {"i": 28, "S": b"", "F": 0.0}.get(p.split(":")[1])
        for p, value in zip(soft.params, values, strict=True)
    ]
    executor = C.c_void_p(0x1000)
    code = soft.phase1(*values, C.byref(C.c_uint64()), C.byref(executor))
    return code, soft.text()


def test_executor_not_cleared_by_the_caller() -> None:
    code, text = fork_ranks(_stale_executor, 1)[0].value
    assert code == EXECUTOR and "must be NULL" in text
