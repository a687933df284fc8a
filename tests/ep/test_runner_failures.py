# SPDX-License-Identifier: Apache-2.0
"""What goes wrong on one rank while a runner is made is one error on all ranks."""

from __future__ import annotations

import gc
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from support import abi_vendors
from xmoe.config import XmoeConfig
from xmoe.errors import AclError, XmoeError
from xmoe.kernels.device import HostDevice
from xmoe.kernels.ops.launch_rows import LaunchRows
from xmoe.ranks import RankContext, run_ranks
from xmoe.runner import MoeRunner
from xmoe.types import ExpertWeights, MoeShape
from xmoe.types import Path as MoePath

SHAPE = MoeShape(hidden=1024, intermediate=512, num_experts=4, topk=2)
# Far below any time limit inside: a rank that waits for another one is a failure here.
SILENCE_S = 40.0
STEP_S = 120.0


def _config(mode: str = "on") -> XmoeConfig:
    return XmoeConfig.from_mapping({"mode": mode, "step_timeout_s": STEP_S})


def _error_of(context: RankContext, prepare: Callable[[int], None], config: Any) -> str:
    """What `MoeRunner.create` raises, once `prepare` has spoilt something on this rank."""
    group = context.init_process_group(STEP_S)
    prepare(context.rank)
    try:
        MoeRunner.create(SHAPE, config, group=group).close()
    except XmoeError as error:
        return f"{type(error).__name__}: {error}"
    return "made"


def _errors(prepare: Callable[[int], None], config: Any) -> str:
    """The one text that all ranks raised."""
    found = run_ranks(_error_of, 2, prepare, config, silence_s=SILENCE_S)
    assert len(set(found)) == 1, found
    return str(found[0])


def _set_on_rank_1(name: str, value: str) -> Callable[[int], None]:
    def prepare(rank: int) -> None:
        if rank == 1:
            os.environ[name] = value

    return prepare


def test_a_bad_setting_in_one_ranks_environment() -> None:
    found = _errors(_set_on_rank_1("XMOE_PADDING", "paper"), None)
    assert found.startswith("ConfigError: settings failed on rank 1:") and "'paper'" in found


def test_a_bad_variable_that_only_the_facts_need() -> None:
    """The settings are the caller's; HCCL_BUFFSIZE is read when the facts are gathered."""
    found = _errors(_set_on_rank_1("HCCL_BUFFSIZE", "much"), _config())
    assert found.startswith("ConfigError: facts failed on rank 1:") and "'much'" in found


def _no_streams_on_rank_1(rank: int) -> None:
    def fail(self: HostDevice) -> None:
        raise AclError("aclrtCreateStream", 207001, "ACL_ERROR_RT_MEMORY_ALLOCATION", "none left")

    if rank == 1:
        HostDevice.create_stream = fail  # type: ignore[method-assign, assignment]


def test_no_stream_for_the_executor_of_one_rank() -> None:
    found = _errors(_no_streams_on_rank_1, _config())
    assert found.startswith("AclError: executor failed on rank 1: aclrtCreateStream returned 2070")


def _no_rows_on_rank_1(rank: int) -> None:
    def fail(self: LaunchRows, *_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("tried to allocate 4 MiB")

    if rank == 1:
        LaunchRows.__init__ = fail  # type: ignore[method-assign, assignment]


def test_no_memory_for_the_rows_of_one_rank() -> None:
    found = _errors(_no_rows_on_rank_1, _config())
    assert found.startswith("XmoeError: launch rows failed on rank 1: OutOfMemoryError: tried")


def test_the_group_can_go_on_after_a_failure() -> None:
    """Nothing is left behind: the same processes make a runner then, and it runs."""

    def again(context: RankContext) -> tuple[str, MoePath]:
        kept = LaunchRows.__init__
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            text = _error_of(context, _no_rows_on_rank_1, _config())
            gc.collect()
        # Also what the rank that did well had made by then.
        assert [one for one in heard if one.category is ResourceWarning] == []
        LaunchRows.__init__ = kept  # type: ignore[method-assign]
        group = torch.distributed.group.WORLD
        share = SHAPE.num_experts // context.size
        weights = ExpertWeights(
            torch.zeros(share, 1024, 1024, dtype=torch.bfloat16),
            torch.zeros(share, 512, 1024, dtype=torch.bfloat16),
        )
        with MoeRunner.create(SHAPE, _config(), group=group) as runner:
            hidden = torch.ones(2, 1024, dtype=torch.bfloat16)
            ids = torch.tensor([[0, 1], [2, 3]])
            output = runner.layer(weights, 0)(hidden, ids, torch.ones(2, 2))
            assert output.shape == hidden.shape and not output.any()
            return text, runner.decision.path

    for text, path in run_ranks(again, 2, silence_s=SILENCE_S):
        assert "launch rows failed on rank 1" in text and path is MoePath.MEGA_MOE


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ to build a vendor with")
@pytest.mark.parametrize("mode", ["on", "auto"])
def test_equal_versions_of_different_builds(tmp_path: Path, mode: str) -> None:
    """Only the content tells them apart, and only the vendor chain's check looks at it."""
    folders = [abi_vendors.vendor_folder(tmp_path / name, "B") for name in ("one", "two")]
    library = folders[1] / "op_api" / "lib" / "libcust_opapi.so"
    content = library.read_bytes()
    library.unlink()  # a link to what other tests use
    library.write_bytes(content + b"another build")

    def prepare(rank: int) -> None:
        os.environ["ASCEND_CUSTOM_OPP_PATH"] = str(folders[rank])

    found = _errors(prepare, _config(mode))
    assert found.startswith(
        "RankDisagreement: vendor chain: ranks hold different values of library"
    )


def test_vendor_chain_check_with_a_bad_variable_on_one_rank() -> None:
    def check(context: RankContext) -> str:
        import xmoe

        group = context.init_process_group(STEP_S)
        _set_on_rank_1("XMOE_PADDING", "paper")(context.rank)
        try:
            xmoe.check_vendor_chain(group, timeout_s=STEP_S)
        except XmoeError as error:
            return f"{type(error).__name__}: {error}"
        return "valid"

    found = run_ranks(check, 3, silence_s=SILENCE_S)
    assert len(set(found)) == 1
    assert str(found[0]).startswith("ConfigError: vendor chain failed on rank 1:")
