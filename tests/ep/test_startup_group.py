# SPDX-License-Identifier: Apache-2.0
"""The start-up check over a group: every rank raises the same error, or none does."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from support import abi_vendors
from support.ranks import run_ranks, values
from xmoe.errors import XmoeError

pytestmark = [pytest.mark.ep, pytest.mark.timeout(180)]


def _check(rank: int, group: Any, paths: list[str], settings: dict[str, str]) -> str:
    import xmoe

    os.environ.update(settings, XMOE_DEVICE="soft", ASCEND_CUSTOM_OPP_PATH=paths[rank])
    try:
        report = xmoe.check_vendor_chain(group, timeout_s=30)
    except XmoeError as error:
        return f"{type(error).__name__}: {error}"
    return str(report["verdict"])


def test_all_ranks_agree_on_a_good_chain() -> None:
    assert values(run_ranks(_check, 2, ["", ""], {})) == ["valid", "valid"]


def test_one_bad_rank_fails_all_alike(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    found = values(run_ranks(_check, 3, ["", str(tmp_path / "empty"), ""], {}))
    assert len(set(found)) == 1
    assert found[0].startswith("ProvenanceError: vendor chain failed on rank 1: [wrong_vendor]")


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ to build variants with")
def test_different_libraries_are_a_disagreement(tmp_path: Path) -> None:
    folders = [abi_vendors.vendor_folder(tmp_path / v, v) for v in "BD"]
    found = values(run_ranks(_check, 2, [str(f) for f in folders], {}))
    assert found[0] == found[1]
    assert found[0].startswith("RankDisagreement: vendor chain: ranks hold different values of abi")
    found = values(run_ranks(_check, 2, [str(folders[1])] * 2, {"XMOE_ABI_VARIANT": "B"}))
    assert found[0] == found[1] and "[variant_mismatch]" in found[0]
