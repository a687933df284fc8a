# SPDX-License-Identifier: Apache-2.0
"""Compiled launches of the connector operators: what is made once, what is refused, what moves."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from support.cam_ranks import CamRank, cam_rank
from support.ranks import run_ranks, values
from xmoe.errors import ConfigError, LibraryError, SymbolMissing
from xmoe.kernels.acl import op_plan
from xmoe.kernels.acl.native_plan import NUMBER, TOKENS, NativePlan, StepTensor
from xmoe.kernels.ops.cam.binding import _MAX_PLANS, PlanCache
from xmoe.kernels.ops.cam.host import HostCamP2POps
from xmoe.kernels.ops.cam.topology import CamP2PTopology

ROWS, HIDDEN = 4, 16
KERNEL = "aclnnXsdTimedKernel"


def kernel_plan(one: CamRank, **change: Any) -> op_plan.OpPlan:
    """Of the timed kernel: rows times `alpha`, the tag is the step's number."""
    rows = StepTensor("rows", "float32", (TOKENS, HIDDEN), may_share=True)
    out = StepTensor("out", "float32", (TOKENS, HIDDEN), is_output=True)
    given = {"rows": rows, "cores": 1, "tag": NUMBER, "alpha": 3.0, "out": out} | change
    return one.library.plan(
        KERNEL,
        (given["rows"], None, None, None, given["cores"], 0, 0, given["tag"], given["alpha"], 0.0,
         0.0, given["out"]),
    )  # fmt: skip


def steady(rank: int, _: Any, folder: str) -> Any:
    with cam_rank(rank, 1, folder) as one:
        stream = one.stream()
        one.soft.trace(True)
        sources = [torch.full((ROWS, HIDDEN), float(n)) for n in range(3)]
        outs = [torch.zeros(ROWS, HIDDEN) for _ in range(3)]
        with kernel_plan(one) as plan:
            for tag in range(30):
                n = tag % 3
                plan.launch(ROWS, 0, tag, stream, sources[n].data_ptr(), outs[n].data_ptr())
            told = plan.counters()
            for tokens in range(1, ROWS + 1):
                plan.launch(tokens, 0, 0, stream, sources[2].data_ptr(), outs[0].data_ptr())
            shapes = plan.counters()["shapes"]
            one.sync(stream)
        tags = [entry.tag for entry in one.soft.read_trace()][:30]
        return told, shapes, tags, [float(out.sum()) for out in outs[1:]], float(outs[0][0, 0])


def test_descriptors_are_made_once_and_their_addresses_move(tmp_path: Path) -> None:
    (found,) = values(run_ranks(steady, 1, str(tmp_path), group=False))
    told, shapes, tags, sums, last = found
    assert told["launches"] == told["phase_one"] == 30 and told["descriptors"] == 2
    assert shapes == ROWS and tags == list(range(30))
    assert sums == [3.0 * n * ROWS * HIDDEN for n in (1, 2)] and last == 6.0


def refusals(rank: int, _: Any, folder: str) -> Any:
    with cam_rank(rank, 1, folder) as one:
        stream, x = one.stream(), torch.zeros(2 * ROWS, HIDDEN)
        at = x.data_ptr()
        seen: dict[str, str] = {}

        def refused(what: str, call: Any) -> None:
            try:
                call()
                seen[what] = "accepted"
            except (ConfigError, LibraryError, SymbolMissing) as error:
                seen[what] = f"{type(error).__name__}: {error}"

        plan = kernel_plan(one)
        refused("misaligned", lambda: plan.launch(ROWS, 0, 0, stream, at + 4, at))
        refused("overlap", lambda: plan.launch(ROWS, 0, 0, stream, at, at + 64))
        plan.close()
        refused("closed", lambda: plan.launch(ROWS, 0, 0, stream, at, at + 4096))
        for what, change in {
            "text": {"cores": "1"},
            "bool": {"cores": True},
            "tensor": {"rows": 7},
            "double": {"alpha": "x"},
            "place": {"alpha": NUMBER},
        }.items():
            refused(what, lambda change=change: kernel_plan(one, **change))
        made, kept = [], (torch.zeros(8).data_ptr(), "float32", 8)
        with pytest.MonkeyPatch.context() as patch:
            free = NativePlan.close
            patch.setattr(NativePlan, "close", lambda plan: made.append(plan) or free(plan))
            refused("late", lambda: kernel_plan(one, rows=kept, alpha="x"))
        seen["undone"] = str([plan.closed for plan in made])
        refused("count", lambda: one.library.plan(KERNEL, (None,)))
        group = (None, None, 0, 1, 1, 1, 1, 0, "a\0b", 1, None)
        refused("nul", lambda: one.library.plan("aclnnE2a", group))
        op_plan.OPERATORS["aclnnE2a"] += "i"
        refused("stale", lambda: one.library.plan("aclnnE2a", (*group, 0)))
        op_plan.OPERATORS["aclnnNothing"] = "T"
        refused("unknown", lambda: one.library.plan("aclnnNothing", (None,)))
        return seen


def test_what_a_plan_refuses(tmp_path: Path) -> None:
    (seen,) = values(run_ranks(refusals, 1, str(tmp_path), group=False))
    assert "rows does not start at a multiple of 32" in seen["misaligned"]
    assert "rows and out share memory" in seen["overlap"]
    assert "closed" in seen["closed"]
    assert seen["undone"] == "[True]", "descriptors of the parameters before it are left behind"
    for what in ("text", "bool", "tensor", "double", "place", "nul", "late"):
        assert seen[what].startswith("ConfigError") and "allowed: a value of kind" in seen[what]
    assert "got 1 parameters; allowed: 12" in seen["count"]
    assert seen["stale"].startswith("LibraryError") and "build.py" in seen["stale"]
    assert seen["unknown"].startswith("SymbolMissing")


def bounded(rank: int, _: Any, folder: str) -> Any:
    """One group after the other, as over many runs: plans of old ones go, and the rest still works.
    The launches are refused by the library, which knows none of the groups."""
    with cam_rank(rank, 1, folder) as one:
        stream, t = one.stream(), CamP2PTopology(1, 1, 0, HIDDEN)
        ops = HostCamP2POps(one.library, t)
        held = []
        for number in range(_MAX_PLANS + 5):
            with pytest.raises(Exception, match="no communicator named"):
                ops.a2e(f"g{number}", None, ROWS, stream=stream)
            held.append(len(ops._plans))
        return max(held), len(ops._plans)


def test_plans_are_bounded(tmp_path: Path) -> None:
    ((most, left),) = values(run_ranks(bounded, 1, str(tmp_path), group=False))
    assert most == left == _MAX_PLANS


def evicted(rank: int, _: Any, folder: str) -> Any:
    """One thread has got a plan; another makes so many that it goes, before the first launches."""
    with cam_rank(rank, 1, folder) as one:
        stream, cache = one.stream(), PlanCache()
        x, out = torch.ones(ROWS, HIDDEN), torch.zeros(ROWS, HIDDEN)
        plan = cache.get(-1, lambda: kernel_plan(one))

        def others() -> None:
            for number in range(_MAX_PLANS):
                cache.get(number, lambda: kernel_plan(one))

        thread = threading.Thread(target=others)
        thread.start()
        thread.join()
        gone = -1 not in cache._plans
        plan.launch(ROWS, 0, 0, stream, x.data_ptr(), out.data_ptr())
        one.sync(stream)
        native, closed = plan._native, plan._lib.xm_plan_closed
        held = bool(closed(native))
        del plan
        return gone, float(out.sum()), held, bool(closed(native)), len(cache)


def test_a_plan_that_goes_is_closed_by_its_last_user(tmp_path: Path) -> None:
    (found,) = values(run_ranks(evicted, 1, str(tmp_path), group=False))
    assert found == (True, 3.0 * ROWS * HIDDEN, False, True, _MAX_PLANS)


def shapes(rank: int, _: Any, folder: str) -> list[str]:
    """Outputs that a caller owns are written by address, so a wrong one must never get through."""
    with cam_rank(rank, 1, folder) as one:
        stream, told = one.stream(), []
        ops = HostCamP2POps(one.library, CamP2PTopology(1, 1, 0, HIDDEN))
        for name, value in {
            "hidden_states": torch.empty(ROWS - 1, HIDDEN, dtype=torch.bfloat16),
            "sim_expert_ids": torch.empty(ROWS - 1, 1, dtype=torch.int32),
            "sim_scales": torch.empty(1, 1),
            "atten_batch_size": torch.empty(1, dtype=torch.int64),
            "x_active_mask": torch.empty(1, dtype=torch.int8),
        }.items():
            out = ops.empty_a2e(ROWS)
            setattr(out, name, value)
            with pytest.raises(ConfigError) as caught:
                ops.a2e("g", None, ROWS, stream=stream, out=out)
            told.append(str(caught.value).split("=")[0])
        with pytest.raises(ConfigError, match="the shape of rows"):
            one.soft.timed_kernel(
                stream=stream, microseconds=0, rows=torch.zeros(2, 16), out=torch.zeros(1, 16)
            )
        return told


def test_outputs_of_another_shape_are_refused(tmp_path: Path) -> None:
    (told,) = values(run_ranks(shapes, 1, str(tmp_path), group=False))
    assert told == [
        f"out.{name}"
        for name in (
            "hidden_states", "sim_expert_ids", "sim_scales", "atten_batch_size", "x_active_mask"
        )
    ]  # fmt: skip
