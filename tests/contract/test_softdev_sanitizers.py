# SPDX-License-Identifier: Apache-2.0
"""The runtime's C++ under thread, address and undefined-behaviour sanitizers."""

from __future__ import annotations

import os
import runpy
import shlex
import subprocess
from pathlib import Path

import pytest

from support.softdev import SOFTDEV

RUNTIME = ("acl", "nnop", "hccl", "hccl_fwk")
OPTIONS = {
    "TSAN_OPTIONS": "halt_on_error=1 exitcode=66",
    "ASAN_OPTIONS": "detect_leaks=1 exitcode=66",
    "UBSAN_OPTIONS": "halt_on_error=1 print_stacktrace=1",
}


def _compile(sources: list[Path], target: Path, sanitize: str, *extra: str) -> list[str]:
    compiler = shlex.split(os.environ.get("CXX", "g++"))
    flags = ["-std=c++17", "-g1", "-O1", "-pthread", "-Wall", "-Wextra", "-Werror"]
    flags += [f"-fsanitize={sanitize}", "-fno-sanitize-recover=undefined"]
    return [*compiler, *flags, *map(str, sources), *extra, "-o", str(target)]


def _supports(sanitize: str, folder: Path) -> bool:
    source = folder / "empty.cpp"
    source.write_text("int main() { return 0; }\n")
    program = folder / "empty"
    if subprocess.run(_compile([source], program, sanitize), capture_output=True).returncode:
        return False
    return subprocess.run([str(program)], capture_output=True).returncode == 0


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("sanitize", ["thread", "address,undefined"])
def test_stress_is_clean(sanitize, tmp_path):
    if not _supports(sanitize, tmp_path):
        pytest.skip(f"the compiler has no -fsanitize={sanitize}")
    # Kept between runs, so that only what changed is compiled again.
    tree = SOFTDEV / ".obj" / f"sanitize-{sanitize.replace(',', '-')}" / "ascend"
    build = runpy.run_path(str(SOFTDEV / "build.py"))["build"]
    build(tree, sanitize=sanitize, folders=RUNTIME)
    program = tmp_path / "stress"
    lib64 = tree / "lib64"
    command = _compile(
        [SOFTDEV / "src" / "tests" / "stress.cpp"], program, sanitize,
        f"-I{SOFTDEV / 'include'}", f"-L{lib64}", f"-Wl,-rpath,{lib64}",
        "-lhccl", "-lnnopbase", "-lascendcl",
    )  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    env = {**os.environ, **OPTIONS, "XSD_DELAY_SEED": "5", "XSD_DELAY_MAX_US": "200"}
    run = subprocess.run([str(program)], capture_output=True, text=True, env=env, timeout=600)
    assert run.returncode == 0 and run.stdout == "done\n", run.stderr[-8000:]
