# SPDX-License-Identifier: Apache-2.0
"""The split path on npu tensors: whose operators run, what the host waits for, and the numbers."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from support.npu import child, join_group
from xmoe.config import XmoeConfig
from xmoe.errors import ConfigError
from xmoe.kernels.capability import NPU_OPERATORS, NpuOperators, npu_operators
from xmoe.ranks import RankContext, run_ranks
from xmoe.reference import BF16_ROW_TOLERANCE, moe_reference, row_errors
from xmoe.runner import MoeRunner
from xmoe.types import ExpertWeights, MoeShape

SHAPE = MoeShape(hidden=256, intermediate=128, num_experts=8, topk=3)
DEADLINE_S = 120.0
# Ranks with nothing, uneven ones, a call without any token, and one token each.
COUNTS = ([5, 0], [7, 30], [0, 0], [1, 1])


class Calls(TorchDispatchMode):
    """Names of the operators called, and of those that make the host wait for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.waits: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().split("::")[-1].split(".")[0].removeprefix("_npu").removeprefix("npu")
        name = f"npu{name}" if "npu" in func.name() else name
        self.names.append(name)
        tensors = [one for one in args if isinstance(one, torch.Tensor)]
        out = func(*args, **(kwargs or {}))
        devices = {one.device.type for one in tensors} | (
            {out.device.type} if isinstance(out, torch.Tensor) else set()
        )
        crossing = name in ("_to_copy", "copy_") and len(devices) > 1
        asynchronous = bool((kwargs or {}).get("non_blocking")) or (
            len(args) > 0 and args[-1] is True
        )
        reads = name in ("_local_scalar_dense", "equal", "nonzero", "masked_select")
        if (crossing and not asynchronous) or (reads and "npu" in devices):
            self.waits.append(name)
        return out


def weights() -> tuple[torch.Tensor, torch.Tensor]:
    make = torch.Generator().manual_seed(11)
    gate_up = torch.randn(8, SHAPE.hidden, 2 * SHAPE.intermediate, generator=make) * 0.06
    down = torch.randn(8, SHAPE.intermediate, SHAPE.hidden, generator=make) * 0.08
    return gate_up.bfloat16(), down.bfloat16()


def batch(rank: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Some slots unused; the last token has none at all."""
    make = torch.Generator().manual_seed(100 * tokens + rank)
    hidden = torch.randn(tokens, SHAPE.hidden, generator=make).bfloat16()
    ids = torch.rand(tokens, 8, generator=make).topk(3, dim=1).indices
    ids[torch.rand(tokens, 3, generator=make) < 0.2] = -1
    if tokens > 3:
        ids[-1] = -1
    return hidden, ids, torch.rand(tokens, 3, generator=make)


def reference(rank: int, tokens: int) -> np.ndarray:
    hidden, ids, scales = batch(rank, tokens)
    # The reference takes every slot: an unused one is any expert with weight 0.
    used = scales * (ids >= 0)
    tensors = (hidden, ids.clamp(min=0), used, *weights())
    args = [one.double().numpy() if one.is_floating_point() else one.numpy() for one in tensors]
    return np.asarray(moe_reference(*args))


def run(context: RankContext, how: dict[str, Any]) -> dict[str, Any]:
    """Outputs of all COUNTS as bits, and what the last call with tokens called."""
    os.environ.update(how.get("env", {}))
    device = torch.device("npu", context.rank) if how["device"] == "npu" else torch.device("cpu")
    group = join_group(context, how.get("hccl", False), how["device"] == "npu")
    if how.get("without"):
        found = npu_operators()
        hidden = dict.fromkeys(how["without"], False)
        from xmoe.kernels import capability

        capability._npu_operators[:] = [replace(found, **hidden)]
    settings = {"mode": "off", "step_timeout_s": DEADLINE_S, **how.get("settings", {})}
    gate_up, down = weights()
    share = 8 // context.size
    mine = slice(context.rank * share, (context.rank + 1) * share)
    local = ExpertWeights(*(one[mine].contiguous().to(device) for one in (gate_up, down)))
    outputs, calls = [], Calls()
    config = XmoeConfig.from_mapping(settings)
    with MoeRunner.create(SHAPE, config, group=group, device=device) as runner:
        layer = runner.layer(local, 0)
        for counts in COUNTS:
            inputs = [one.to(device) for one in batch(context.rank, counts[context.rank])]
            # What the split path allocates holds NaN before it is written.
            spoilt = [torch.full((40, SHAPE.hidden), np.nan, device=device) for _ in range(40)]
            del spoilt
            with runner.step(counts[context.rank]), calls:
                if how.get("busy"):  # what the caller's stream still has to do, and then to write
                    big = torch.ones(700, 700, device=device)
                    for _ in range(4):
                        big = big @ big * 1e-3
                    inputs = [torch.zeros_like(one).copy_(one) for one in inputs]
                calls.waits.clear()
                calls.names.clear()
                output = layer(*inputs)
                del inputs
                # Work that would overwrite memory given back too early.
                noise = [torch.full_like(output, 7.0) for _ in range(8)] if output.numel() else []
            outputs.append(output.float().cpu().numpy())
            del noise
            if counts == COUNTS[1]:
                names, waits = list(calls.names), list(calls.waits)
        mode = runner._executor.options.mode.value
    return {"outputs": outputs, "names": names, "waits": waits, "mode": mode}


def both(how: dict[str, Any], size: int = 2) -> list[dict[str, Any]]:
    return run_ranks(run, size, how, silence_s=DEADLINE_S)


@pytest.fixture(scope="module")
def host() -> list[dict[str, Any]]:
    return both({"device": "host"})


def same_bits(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    for one, two in zip(found, expected, strict=True):
        for left, right in zip(one["outputs"], two["outputs"], strict=True):
            np.testing.assert_array_equal(left, right)


def close_to_reference(found: list[dict[str, Any]]) -> None:
    for rank, one in enumerate(found):
        for counts, output in zip(COUNTS, one["outputs"], strict=True):
            want = reference(rank, counts[rank])
            assert output.shape == want.shape
            assert (row_errors(output.astype(np.float64), want) <= BF16_ROW_TOLERANCE).all()


OWN = [
    NPU_OPERATORS[name][0]
    for name in ("init_routing", "grouped_matmul", "swiglu", "token_unpermute")
]


def test_the_devices_own_operators_run_and_give_the_hosts_bits(host: Any) -> None:
    found = both({"device": "npu", "hccl": True})
    same_bits(found, host)
    close_to_reference(found)
    for one in found:
        called = {name: one["names"].count(name) for name in OWN}
        assert called == {name: 2 if name == "npu_grouped_matmul" else 1 for name in OWN}
        # Rows never pass through the host, and the host reads once: the row counts.
        assert one["waits"] == ["_to_copy"]


def test_rows_pass_through_the_host_without_hccl(host: Any) -> None:
    found = both({"device": "npu"})
    same_bits(found, host)
    # Counts, and the rows of two all-to-alls there and back.
    assert all(len(one["waits"]) == 5 for one in found)


def test_without_operators_torch_does_it(host: Any) -> None:
    """All but the grouped product are bit-equal; that one sums in another order."""
    moving = ["init_routing", "token_unpermute", "swiglu"]
    found = both({"device": "npu", "hccl": True, "without": moving})
    same_bits(found, host)
    assert all(not set(OWN) - {"npu_grouped_matmul"} & set(one["names"]) for one in found)
    found = both({"device": "npu", "hccl": True, "without": list(NPU_OPERATORS)})
    close_to_reference(found)
    assert all(not any(name.startswith("npu_") for name in one["names"]) for one in found)


@pytest.mark.parametrize("hccl", [True, False])
def test_overlap_gives_the_bits_of_serial(host: Any, hccl: bool) -> None:
    settings = {"split_streams": "overlap", "split_chunk_tokens": 4}
    # Random pauses before tasks: streams that are not ordered come out wrong.
    env = {"XSD_DELAY_SEED": "9", "XSD_DELAY_MAX_US": "2000"}
    found = both({"device": "npu", "hccl": hccl, "settings": settings, "env": env, "busy": True})
    assert {one["mode"] for one in found} == {"overlap"}
    # 30 tokens at most, 4 a chunk.
    assert all(one["names"].count("npu_moe_token_unpermute") in (7, 8) for one in found)
    same_bits(found, host)


def test_one_rank_waits_once_and_gives_the_hosts_bits() -> None:
    found, expected = both({"device": "npu"}, 1), both({"device": "host"}, 1)
    same_bits(found, expected)
    assert found[0]["waits"] == ["_to_copy"]


def _grouped(device: torch.device, change: Callable[..., Any] | None) -> Any:
    from xmoe.kernels.ops import fused_moe, grouped_matmul

    if change is not None:
        grouped_matmul.launch = change(grouped_matmul.launch)
    gate_up, down = (one.to(device) for one in weights())
    made = [
        fused_moe.SplitExperts(
            ExpertWeights(gate_up, down), deterministic=deterministic, operators=npu_operators()
        )
        for deterministic in (False, True)
    ]
    rows = torch.ones(8, SHAPE.hidden, dtype=torch.bfloat16, device=device)
    return [one(rows, [1] * 8).float().cpu().numpy() for one in made]


def test_rows_that_depend_on_their_company_refuse_deterministic() -> None:
    def company(launch: Any) -> Any:
        def changed(rows: torch.Tensor, *args: Any, **more: Any) -> torch.Tensor:
            return launch(rows, *args, **more) * (1 + 0.01 * rows.shape[0])

        return changed

    def body(device: torch.device) -> None:
        with pytest.raises(ConfigError, match=r"npu_grouped_matmul.*XMOE_DETERMINISTIC=0"):
            _grouped(device, company)

    child(body)
    loose, strict = child(_grouped, None)
    np.testing.assert_array_equal(loose, strict)


def test_router_uses_the_gating_operator() -> None:
    def body(device: torch.device) -> None:
        from xmoe.kernels.ops.router import select_experts

        logits = torch.randn(9, 16, generator=torch.Generator().manual_seed(3))
        logits[2] = float("nan")
        want = select_experts(logits, 4)
        with Calls() as calls:
            got = select_experts(logits.to(device), 4, operators=npu_operators())
        assert "npu_moe_gating_top_k_softmax" in calls.names and calls.waits == ["_to_copy"]
        good = [row for row in range(9) if row != 2]
        for left, right in zip(got, want, strict=True):
            assert torch.equal(left.cpu()[good], right[good])
        # All its probabilities are equal: which experts it gets is open, that they differ is not.
        assert len(set(got[0][2].tolist())) == 4 and got[1][2].isnan().all()

    child(body)


def test_what_is_missing_is_named(tmp_path: Any) -> None:
    from xmoe.kernels.acl.toolkit import find_toolkit
    from xmoe.kernels.capability import find_npu_operators

    kit = find_toolkit()
    assert find_npu_operators(kit).missing == ()
    found = find_npu_operators(replace(kit, vendor_dirs=(), lib_dirs=(tmp_path,)))
    assert found == NpuOperators(missing=found.missing)
    lines = found.sentences()
    assert len(lines) == len(NPU_OPERATORS) and all("torch operators" in line for line in lines)
    assert "aclnnMoeInitRoutingV3" in dict(found.missing)["init_routing"]
