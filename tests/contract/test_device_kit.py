# SPDX-License-Identifier: Apache-2.0
"""The parts of the hardware kit that can be tried without hardware: header comparison, skips."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.hardware import missing_toolkit
from support.headers import compare, include_folder, mega_moe_variants, prototypes
from support.tree import ROOT
from xmoe.kernels.acl.toolkit import SOFTWARE_ROOT
from xmoe.kernels.acl.variants import CTYPES, VARIANTS

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ to compare with")

SOFT = ROOT / "kernels" / "softdev" / "include"
LAYOUT = {"acl/acl.h": "acl_rt.h", "aclnn/acl_meta.h": "aclnn_base.h", "hccl/hccl.h": "hccl.h"}


@pytest.fixture
def toolkit(tmp_path: Path) -> Path:
    """A toolkit whose headers are those of the software device, laid out as the vendor's."""
    include = tmp_path / "cann" / "include"
    for source in SOFT.glob("*.h"):
        include.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, include)
    for name, target in LAYOUT.items():
        (include / name).parent.mkdir(exist_ok=True)
        (include / name).write_text(f'#include "../{target}"\n')
    return tmp_path / "cann"


def drift(toolkit: Path, file: str, old: str, new: str) -> None:
    path = toolkit / "include" / file
    text = path.read_text()
    assert old in text, f"{file} has no {old!r}"
    path.write_text(text.replace(old, new, 1))


def test_equal_headers_show_no_drift(toolkit: Path, tmp_path: Path) -> None:
    include = include_folder(toolkit)
    assert include is not None
    found = compare(include, tmp_path)
    assert found.drifted == {} and found.absent == []
    reader = prototypes()
    folder = ROOT / "kernels" / "acl" / "decl"
    names = {p.name for file in reader.GROUPS for p in reader.parse((folder / file).read_text())}
    assert set(found.equal) == {n for n in names if not n.startswith("xsd")} | {
        "HcclRootInfo",
        "HcclCommConfig",
    }


@pytest.mark.parametrize(
    ("file", "old", "new", "name"),
    [
        ("acl_rt.h", "aclrtCreateStreamWithConfig(aclrtStream* stream, uint32_t priority",
         "aclrtCreateStreamWithConfig(aclrtStream* stream, uint64_t priority",
         "aclrtCreateStreamWithConfig"),
        ("acl_rt.h", "aclrtMalloc(void** ", "aclrtMalloc(void* ", None),
        ("acl_rt.h", "aclrtSubscribeReport(uint64_t threadId, aclrtStream stream)",
         "aclrtSubscribeReport(aclrtStream stream, uint64_t threadId)", "aclrtSubscribeReport"),
        ("acl_rt.h", "aclrtEventElapsedTime(float*", "aclrtEventElapsedTime(double*",
         "aclrtEventElapsedTime"),
        ("hccl.h", "HcclGetRankId(HcclComm comm, uint32_t*",
         "HcclGetRankId(HcclComm comm, uint64_t*", "HcclGetRankId"),
        ("hccl.h", "HcclBarrier(HcclComm comm, aclrtStream stream)",
         "HcclBarrier(HcclComm comm, aclrtStream stream, int flags)", "HcclBarrier"),
    ],
)  # fmt: skip
def test_a_drifted_signature_is_caught(
    toolkit: Path, tmp_path: Path, file: str, old: str, new: str, name: str | None
) -> None:
    drift(toolkit, file, old, new)
    found = compare(toolkit / "include", tmp_path)
    # What is behind a void pointer cannot be told from the types: ABI-equal, so no drift.
    assert set(found.drifted) == ({name} if name else set())


def test_a_grown_structure_is_caught(toolkit: Path, tmp_path: Path) -> None:
    drift(toolkit, "acl_types.h", "4108", "4112")
    assert set(compare(toolkit / "include", tmp_path).drifted) == {"HcclRootInfo"}


def test_a_missing_function_is_told_from_a_drifted_one(toolkit: Path, tmp_path: Path) -> None:
    drift(toolkit, "hccl.h", "HcclKfcAllocOpArgs(", "HcclKfcAllocOtherArgs(")
    found = compare(toolkit / "include", tmp_path)
    assert found.absent == ["HcclKfcAllocOpArgs"] and found.drifted == {}


def test_a_toolkit_without_headers_compares_nothing(tmp_path: Path) -> None:
    assert include_folder(tmp_path) is None
    found = compare(tmp_path, tmp_path)
    assert found.equal == [] and len(found.absent) > 80


@pytest.mark.parametrize("variant", ["A", "B", "G", "J"])
def test_the_operators_header_tells_the_variant(variant: str, tmp_path: Path) -> None:
    header = tmp_path / "op_api" / "include" / "aclnn_mega_moe.h"
    header.parent.mkdir(parents=True)
    kinds = ", ".join(f"{CTYPES[p.kind]} {p.name}" for p in VARIANTS[variant].params)
    types = "aclTensor aclTensorList aclFloatArray aclOpExecutor".split()
    header.write_text(
        "#include <cstdint>\n" + "".join(f"struct {name};\n" for name in types)
        + f'extern "C" int aclnnMegaMoeGetWorkspaceSize({kinds});\n'
    )  # fmt: skip
    assert mega_moe_variants(header, tmp_path) == [variant]


def test_the_missing_fact_is_named(tmp_path: Path) -> None:
    assert "ASCEND_HOME_PATH is not set" in missing_toolkit({})
    assert "is no folder" in missing_toolkit({"ASCEND_HOME_PATH": str(tmp_path / "none")})
    assert "software device" in missing_toolkit({"ASCEND_HOME_PATH": str(SOFTWARE_ROOT)})
    assert missing_toolkit({"ASCEND_HOME_PATH": str(tmp_path)}) == ""


@pytest.mark.timeout(300)
def test_the_kit_skips_here_and_fails_when_strict() -> None:
    env = {k: v for k, v in os.environ.items() if k not in ("ASCEND_HOME_PATH", "XMOE_STRICT")}
    command = [sys.executable, "-m", "pytest", "tests/device/test_headers.py", "-q", "-p",
               "no:cacheprovider"]  # fmt: skip
    for strict, code in (("0", 0), ("1", 1)):
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, env={**env, "XMOE_STRICT": strict}
        )
        assert done.returncode == code, done.stdout
        assert "ASCEND_HOME_PATH is not set" in done.stdout
