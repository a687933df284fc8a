# SPDX-License-Identifier: Apache-2.0
"""This project's C declarations against the vendor's headers. Needs the toolkit, no device.

The mechanism is tried with made-up headers in tests/contract/test_device_kit.py. It has never seen
a vendor's toolkit so far.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from support.hardware import missing_toolkit
from support.headers import compare, include_folder, mega_moe_variants
from xmoe.kernels.acl.loader import load
from xmoe.kernels.acl.toolkit import find_toolkit

pytestmark = pytest.mark.npu

# Declared by no public header as far as was seen; the rest has to be found.
NOT_PUBLIC = {
    "HcclKfcAllocOpArgs", "HcclKfcFreeOpArgs", "HcclKfcOpArgsSetAlgConfig",
    "HcclKfcOpArgsSetCommEngine", "HcclCreateOpResCtx", "HcclGetHcclBuffer",
    "HcclGetRemoteIpcHcclBuf", "HcclCommGetHandleWithName", "HcomGetCommHandleByGroup",
}  # fmt: skip


def test_declarations_equal_the_vendors(tmp_path: Path) -> None:
    if missing := missing_toolkit():
        pytest.skip(missing)
    include = include_folder(Path(os.environ["ASCEND_HOME_PATH"]))
    if include is None:
        pytest.skip(f"{os.environ['ASCEND_HOME_PATH']} has no include/acl/acl.h (runtime package?)")
    found = compare(include, tmp_path)
    print(f"{len(found.equal)} equal; not declared there: {', '.join(found.absent) or 'none'}")
    assert not found.drifted, found.drifted
    assert set(found.absent) <= NOT_PUBLIC, sorted(set(found.absent) - NOT_PUBLIC)
    assert found.equal


def test_mega_moe_header_tells_the_same_variant(tmp_path: Path) -> None:
    if missing := missing_toolkit():
        pytest.skip(missing)
    runtime = load(find_toolkit("cann"))
    symbols = runtime.mega_moe
    folders = [symbols.vendor.path / "op_api" / "include", Path(os.environ["ASCEND_HOME_PATH"])]
    headers = [h for folder in folders for h in folder.rglob("aclnn_mega_moe.h")]
    if not headers:
        pytest.skip("no aclnn_mega_moe.h in the vendor's package or the toolkit")
    declared = mega_moe_variants(headers[0], tmp_path)
    assert declared == [symbols.require_variant().id], f"{headers[0]} declares {declared}"
