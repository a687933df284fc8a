# SPDX-License-Identifier: Apache-2.0
"""Which file the CAM operators are bound from: a vendor that is named, its own symbols, nobody in
between, and the chain as it stands now."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from support import acl_stubs
from support.acl_stubs import environment, make_vendor, run_child
from xmoe.kernels.ops.cam import binding, torch_ops

WORKSPACE = "int aclnnA2eGetWorkspaceSize(void) { return 0; }\n"
CAM = WORKSPACE + "int aclnnA2e(void) { return 0; }\n"
CODE = """
from xmoe.errors import XmoeError
from xmoe.kernels.ops.cam.binding import open_cam
def opened():
    try:
        return str(open_cam(toolkit.find_toolkit()).path)
    except XmoeError as error:
        return f"{type(error).__name__}: {error}"
def bound(*names):
    library = open_cam(toolkit.find_toolkit())
    found = []
    for name in names:
        try:
            library._bind(name, "cam", "void*")
            found.append("bound")
        except XmoeError as error:
            found.append(f"{type(error).__name__}: {error}")
    return found
"""


@pytest.fixture
def root(stub_base: Path, tmp_path: Path) -> Path:
    return acl_stubs.make_toolkit(tmp_path / "cann", stub_base)


def ask(code: str, root: Path, *vendors: Path, **extra: str) -> Any:
    chain = ":".join(map(str, vendors))
    return run_child(CODE + code, environment(root, ASCEND_CUSTOM_OPP_PATH=chain, **extra))


def test_a_folder_that_no_setting_names_is_never_loaded(root: Path, tmp_path: Path) -> None:
    """It would run its constructors, and win over the real one by its name."""
    marker = tmp_path / "ran"
    run = f'__attribute__((constructor)) void run(void) {{ fopen("{marker}", "w"); }}\n'
    source = CAM + "#include <stdio.h>\n" + run
    make_vendor(root / "opp/vendors/aaa_evil", source)
    said = ask("say(opened())", root)
    assert said.startswith("SymbolMissing") and "ASCEND_CUSTOM_OPP_PATH" in said
    real = make_vendor(tmp_path / "real", CAM)
    assert ask("say(opened())", root, real) == str(real / "op_api/lib/libcust_opapi.so")
    assert not marker.exists()


def test_the_first_named_vendor_with_the_operators_is_taken(root: Path, tmp_path: Path) -> None:
    without = make_vendor(tmp_path / "without", "int other(void) { return 0; }\n")
    first, second = (make_vendor(tmp_path / name, CAM) for name in ("first", "second"))
    assert str(first) in ask("say(opened())", root, without, first, second)


def test_an_operator_out_of_a_dependency_is_refused(root: Path, tmp_path: Path) -> None:
    """A handle finds symbols of the library's dependencies too."""
    other = acl_stubs.compile_library(tmp_path / "libother.so", "int aclnnA2e(void) { return 0; }")
    vendor = make_vendor(tmp_path / "v", WORKSPACE, "9.1.0", "-Wl,--no-as-needed", str(other))
    workspace, launch = ask('say(bound("aclnnA2eGetWorkspaceSize", "aclnnA2e"))', root, vendor)
    assert workspace == "bound"
    assert launch.startswith("ProvenanceError") and str(other) in launch
    say = 'say(open_cam(toolkit.find_toolkit()).has("aclnnA2e"))'
    assert ask(say, root, vendor) is False


def test_an_operator_that_is_shadowed_in_the_process_is_refused(root: Path, tmp_path: Path) -> None:
    vendor = make_vendor(tmp_path / "v", CAM)
    shadow = acl_stubs.compile_library(
        tmp_path / "libshadow.so", "int aclnnA2e(void) { return 9; }"
    )
    code = 'say(bound("aclnnA2eGetWorkspaceSize", "aclnnA2e"))'
    workspace, launch = ask(code, root, vendor, LD_PRELOAD=str(shadow))
    assert workspace == "bound" and launch.startswith("ProvenanceError")
    assert str(shadow) in launch


def test_a_later_chain_is_seen(root: Path, tmp_path: Path) -> None:
    """A platform's start-up code may extend the variable after the first look."""
    first, second = (make_vendor(tmp_path / name, CAM) for name in ("first", "second"))
    code = f"""
before, same = opened(), opened()
os.environ["ASCEND_CUSTOM_OPP_PATH"] = {str(second)!r}
say([before, same, opened()])
"""
    before, same, after = ask(code, root, first)
    assert str(first) in before and before == same and str(second) in after


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("module", [binding, torch_ops])
def test_a_lock_held_at_fork_does_not_stay_locked_in_the_child(module: Any) -> None:
    entered, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with module._lock:
            entered.set()
            leave.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    assert entered.wait(30)
    child = os.fork()
    if child == 0:
        os._exit(0 if module._lock.acquire(timeout=1) else 1)
    leave.set()
    thread.join(30)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
