# SPDX-License-Identifier: Apache-2.0
"""Many threads, several devices, one process: loading, looking up, probing, launching, closing.

Each protection is shown to be needed: without it the same test is red.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support import acl_stubs
from support.acl_stubs import environment, run_child
from support.tree import ROOT
from xmoe.kernels.acl import problems, toolkit, variants

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(
        not (toolkit.SOFTWARE_ROOT / "lib64" / "libascendcl.so").exists(),
        reason="the software device is not built; run kernels/softdev/build.py",
    ),
]
VENDOR = toolkit.SOFTWARE_ROOT / "opp" / "vendors" / "xmoe_transformer"


def stress(call: str, **settings: str) -> Any:
    code = f"sys.path.insert(0, {str(ROOT / 'tests')!r})\nfrom support import thread_stress\n"
    return run_child(f"{code}say(thread_stress.{call})", environment(None, **settings))


@pytest.fixture
def companion(tmp_path: Path) -> Path:
    return acl_stubs.make_vendor(tmp_path / "companion", acl_stubs.NEITHER)


def test_first_calls_from_many_threads(companion: Path) -> None:
    assert stress(f"first_calls({str(VENDOR)!r}, {str(companion)!r})") == []


@pytest.mark.parametrize(
    ("guard", "words"),
    [
        ("load", "loads of the base libraries"),
        ("symbols", "look-ups of the vendor"),
        ("probe", "probe processes"),
        ("open", "taken for loaded by somebody else"),
    ],
)
def test_first_calls_need_each_lock(guard: str, words: str, companion: Path) -> None:
    found = stress(f"first_calls({str(VENDOR)!r}, {str(companion)!r}, {guard!r}, 8)")
    assert any(words in problem for problem in found), found


def test_objects_are_given_back_once() -> None:
    assert stress("churn()") == []


def test_giving_back_needs_the_single_step() -> None:
    assert stress("churn('take')") != []


def test_one_op_executor_is_launched_once() -> None:
    assert stress("one_executor()") == []


def test_launching_needs_its_lock() -> None:
    found = stress("one_executor('launch')")
    assert any("launched" in problem for problem in found), found


def test_devices_launch_while_others_load_and_close() -> None:
    assert stress("device_workers()", HCCL_BUFFSIZE="14", XSD_WAIT_TIMEOUT_MS="20000") == []


def test_tables_are_read_only() -> None:
    code = """
runtime = loader.load(toolkit.find_toolkit("soft"))
def refused(act):
    try:
        act()
    except (TypeError, AttributeError) as error:
        return type(error).__name__
    return ""
symbols = runtime.mega_moe
say([refused(lambda: setattr(runtime.acl, "aclrtMalloc", None)),
     refused(lambda: delattr(runtime.acl, "aclrtMalloc")),
     refused(lambda: setattr(symbols, "launch_addr", 0)),
     refused(lambda: runtime._symbols.clear()),
     runtime.acl.has("aclrtMalloc")])
"""
    assert run_child(code, environment(None)) == [
        "TypeError", "TypeError", "FrozenInstanceError", "AttributeError", True
    ]  # fmt: skip
    for table in (
        variants.VARIANTS, variants.NEUTRAL, variants.CTYPES, variants.REFUSED, variants.RELEASES,
        problems.REMEDIES,
    ):  # fmt: skip
        with pytest.raises(TypeError):
            table["new"] = None  # type: ignore[index]
