# SPDX-License-Identifier: Apache-2.0
"""The launch plan's C under sanitizers: plan_driver.c, which includes kernels/acl/native/plan.c."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from support.tree import ROOT

ACL = ROOT / "kernels" / "acl"
OPTIONS = {
    "TSAN_OPTIONS": "halt_on_error=1 exitcode=66",
    "ASAN_OPTIONS": "detect_leaks=1 exitcode=66",
    "UBSAN_OPTIONS": "halt_on_error=1 print_stacktrace=1",
}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("sanitize", ["address,undefined", "thread"])
def test_steps_of_all_kinds_leave_nothing_and_touch_nothing(sanitize: str, tmp_path: Path) -> None:
    program = tmp_path / "plan"
    flags = ["-std=gnu11", "-g1", "-O1", "-pthread", "-Wall", "-Wextra", "-Werror"]
    # Python reaches some functions only; all are static there.
    flags += ["-Wno-unused-function", f"-fsanitize={sanitize}", "-fno-sanitize-recover=undefined"]
    source = Path(__file__).with_name("plan_driver.c")
    built = subprocess.run(
        [*shlex.split(os.environ.get("CC", "gcc")), *flags, f"-I{ACL / 'decl'}",
         f"-I{ACL / 'native'}", str(source), "-o", str(program)],
        capture_output=True, text=True,
    )  # fmt: skip
    if "cannot find" in built.stderr and "san" in built.stderr:
        pytest.skip(f"the compiler has no -fsanitize={sanitize}")
    assert built.returncode == 0, built.stderr
    done = subprocess.run(
        [str(program)], capture_output=True, text=True, timeout=240, env={**os.environ, **OPTIONS}
    )
    assert done.returncode == 0 and done.stdout == "done\n", done.stderr[-8000:]
