# SPDX-License-Identifier: Apache-2.0
"""An operator package that cannot be used, seen from the policy: the reason names file and symbol
before anything is allocated; auto falls back with it, on is refused with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from support import acl_stubs
from support.acl_stubs import BOTH, LAUNCH, WORKSPACE, environment, make_vendor, run_child

CHOOSE = """
from xmoe.config import XmoeConfig
from xmoe.errors import UnsupportedError
from xmoe.facts import facts_of
from xmoe.kernels import capability
from xmoe.policy.select import select
from xmoe.types import Mode, MoeShape
shape = MoeShape(hidden=2048, intermediate=512, num_experts=256, topk=8)
found = capability.probe()
facts = facts_of(XmoeConfig.resolve(), found, 8, assumed=("ranks", "ccl_buffer_bytes"))
decision = select(Mode.AUTO, facts, shape)
try:
    select(Mode.ON, facts, shape)
    refused = ""
except UnsupportedError as error:
    refused = str(error)
say([decision.path.value, list(decision.reasons), refused])
"""
FAULTS = {
    "no library": "file_missing",
    "text": "not_elf",
    "dependency": "unresolved_dependency",
    "launch only": "only_launch_symbol",
    "workspace only": "only_workspace_symbol",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_auto_falls_back_and_on_refuses_with_the_reason(
    fault: str, stub_base: Path, tmp_path: Path
) -> None:
    root = acl_stubs.make_toolkit(tmp_path / "cann", stub_base)
    sources = {"launch only": LAUNCH, "workspace only": WORKSPACE}
    vendor = make_vendor(tmp_path / "v", sources.get(fault))
    library = vendor / "op_api/lib/libcust_opapi.so"
    if fault == "text":
        library.write_text("no library\n")
    elif fault == "dependency":
        needed = acl_stubs.compile_library(tmp_path / "libneeded.so", "int needed;\n")
        acl_stubs.compile_library(library, BOTH, "-Wl,--no-as-needed", str(needed))
        needed.unlink()
    env = environment(root, ASCEND_CUSTOM_OPP_PATH=str(vendor))
    path, reasons, refused = run_child(CHOOSE, env)
    code = FAULTS[fault]
    assert path == "fused_moe"
    assert any(text.startswith(f"library: {code}: ") or code in text for text in reasons)
    for text in (" ".join(reasons), refused):
        assert code in text and str(library) in text
        if "only" in fault:
            assert "aclnnMegaMoe" in text and "lacks" in text
    assert run_child(CHOOSE, environment(root, **{**env, "ASCEND_CUSTOM_OPP_PATH": str(
        make_vendor(tmp_path / "good", BOTH))}))[0] == "mega_moe"  # fmt: skip
