# SPDX-License-Identifier: Apache-2.0
"""The software device's C++ under thread, address and undefined-behaviour sanitizers.

`stress`: threads on shared streams, events, memory, executors, with ranks as threads.
`objects`: arrays, scalars, tensors and executors that move, callbacks, from several threads.
`collectives`: all of them against plain loops, ranks as threads. `connectors`: the CAM operators
over a group of processes. `mega_moe`: the operator over one, with weights of three kinds. `opapi`:
the general operators, which torch_npu calls elsewhere; libtorch below them is not instrumented, so
they have no thread sanitizer, whose reports about it would be about nothing.
`bash ci/test.sh sanitize` runs this folder.
"""

from __future__ import annotations

import os
import runpy
import shlex
import subprocess
from pathlib import Path

import pytest
import torch

from support.leftovers import shared_memory
from support.softdev import SOFTDEV

FOLDERS = ("acl", "nnop", "hccl", "hccl_fwk", "vendor", "cam")
VENDOR = "opp/vendors/xmoe_transformer/op_api/lib"
CAM_VENDOR = "opp/vendors/xmoe_cam/op_api/lib"
SANITIZERS = ("thread", "address,undefined")
TORCH = Path(torch.__file__).parent
OPTIONS = {
    # A finding ends the program with a code of its own; leaks count as findings.
    "TSAN_OPTIONS": "halt_on_error=1 exitcode=66",
    "ASAN_OPTIONS": "detect_leaks=1 exitcode=66",
    "UBSAN_OPTIONS": "halt_on_error=1 print_stacktrace=1",
}
DELAYS = {"XSD_DELAY_SEED": "5", "XSD_DELAY_MAX_US": "200"}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


def _command(sources: list[Path], target: Path, sanitize: str, *extra: str) -> list[str]:
    compiler = shlex.split(os.environ.get("CXX", "g++"))
    flags = ["-std=c++17", "-g1", "-O1", "-pthread", "-Wall", "-Wextra", "-Werror"]
    flags += [f"-fsanitize={sanitize}"]
    if "undefined" in sanitize:
        flags += ["-fno-sanitize-recover=undefined"]
    return [*compiler, *flags, *map(str, sources), *extra, "-o", str(target)]


def _run(program: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(program), *words], capture_output=True, text=True, timeout=1200,
        env={**os.environ, **OPTIONS, **DELAYS, **env},
    )  # fmt: skip


@pytest.fixture(scope="module", params=SANITIZERS)
def sanitize(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A sanitizer that compiler and system have."""
    name: str = request.param
    folder = tmp_path_factory.mktemp("supported")
    source = folder / "empty.cpp"
    source.write_text("int main() { return 0; }\n")
    program = folder / "empty"
    built = subprocess.run(_command([source], program, name), capture_output=True, text=True)
    if built.returncode != 0 or _run(program).returncode != 0:
        pytest.skip(f"the compiler has no working -fsanitize={name}")
    return name


@pytest.fixture(scope="module")
def tree(sanitize: str) -> Path:
    """The libraries, instrumented. Kept between runs, so that only what changed is compiled."""
    made = SOFTDEV / ".obj" / f"sanitize-{sanitize.replace(',', '-')}" / "ascend"
    runpy.run_path(str(SOFTDEV / "build.py"))["build"](made, sanitize=sanitize, folders=FOLDERS)
    return made


def _program(
    name: str,
    tree: Path,
    sanitize: str,
    folder: Path,
    operators: str = "-l:libcust_opapi.so",
    vendor: str = VENDOR,
) -> Path:
    target = folder / name
    places = [tree / "lib64", tree / vendor]
    below = TORCH / "lib"
    done = subprocess.run(
        _command(
            [SOFTDEV / "src" / "tests" / f"{name}.cpp"], target, sanitize,
            f"-I{SOFTDEV / 'include'}", *(f"-L{p}" for p in places),
            *(f"-Wl,-rpath,{p}" for p in places), f"-Wl,-rpath-link,{below}",
            "-Wl,--no-as-needed", operators, "-lhccl", "-lnnopbase", "-lascendcl", "-ldl",
        ),
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return target


@pytest.mark.parametrize("seed", ["5", "0"])
def test_threads(sanitize: str, tree: Path, tmp_path: Path, seed: str) -> None:
    """With delays every task is run by its own stream's worker, without also by others'."""
    done = _run(_program("stress", tree, sanitize, tmp_path), XSD_DELAY_SEED=seed)
    assert done.returncode == 0 and done.stdout == "done\n", done.stderr[-8000:]


def test_objects(sanitize: str, tree: Path, tmp_path: Path) -> None:
    done = _run(_program("objects", tree, sanitize, tmp_path))
    assert done.returncode == 0 and done.stdout == "done\n", done.stderr[-8000:]


def test_collectives(sanitize: str, tree: Path, tmp_path: Path) -> None:
    program = _program("collectives", tree, sanitize, tmp_path)
    for ranks in ("2", "3"):
        done = _run(program, ranks, HCCL_BUFFSIZE="16", XSD_WAIT_TIMEOUT_MS="300000")
        assert done.returncode == 0 and done.stdout == "done\n", done.stderr[-8000:]


def test_connectors_in_processes(sanitize: str, tree: Path, tmp_path: Path) -> None:
    program = _program("connectors", tree, sanitize, tmp_path, vendor=CAM_VENDOR)
    prefix = f"xmoe-sanitize-{os.getpid()}-"
    done = _run(
        program, HCCL_BUFFSIZE="16", XSD_SHM_PREFIX=prefix, XSD_WAIT_TIMEOUT_MS="300000"
    )  # fmt: skip
    assert done.returncode == 0 and done.stdout.endswith("done\n"), done.stderr[-8000:]
    assert shared_memory(prefix) == []


@pytest.mark.parametrize("ranks", [2, 4])
def test_operator_in_processes(sanitize: str, tree: Path, tmp_path: Path, ranks: int) -> None:
    program = _program("mega_moe", tree, sanitize, tmp_path)
    prefix = f"xmoe-sanitize-{os.getpid()}-"
    done = _run(
        program, str(ranks), "2", HCCL_BUFFSIZE="16", XSD_SHM_PREFIX=prefix,
        XSD_WAIT_TIMEOUT_MS="300000",
    )  # fmt: skip
    assert done.returncode == 0 and done.stdout.endswith("done\n"), done.stderr[-8000:]
    assert shared_memory(prefix) == []


@pytest.mark.parametrize("sanitize", ["address,undefined"], indirect=True)
def test_general_operators(sanitize: str, tree: Path, tmp_path: Path) -> None:
    """Without torch_npu. The first time they are compiled takes minutes, the run a second."""
    build = runpy.run_path(str(SOFTDEV / "build.py"))["build"]
    build(tree, sanitize=sanitize, folders=(), opapi=True)
    program = _program("opapi", tree, sanitize, tmp_path, "-lopapi")
    done = _run(program, LD_LIBRARY_PATH=str(TORCH / "lib"))
    assert done.returncode == 0 and done.stdout == "done\n", done.stderr[-8000:]


def test_a_defect_is_seen(sanitize: str, tmp_path: Path) -> None:
    """The flags and options do find what they are meant to find."""
    source, program = tmp_path / "defect.cpp", tmp_path / "defect"
    if sanitize == "thread":
        source.write_text(
            "#include <thread>\nint shared = 0;\nint main() {\n"
            "  std::thread one([] { for (int i = 0; i < 100000; ++i) ++shared; });\n"
            "  for (int i = 0; i < 100000; ++i) ++shared;\n  one.join();\n"
            "  return shared == 1;\n}\n"
        )
    else:
        source.write_text(
            "#include <cstdlib>\nint main(int argc, char**) {\n"
            "  auto* memory = static_cast<volatile char*>(std::calloc(4, 1));\n"
            "  return memory[argc + 3];\n}\n"
        )
    built = subprocess.run(_command([source], program, sanitize), capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    done = _run(program)
    assert done.returncode != 0
    # Of two sanitizers in one program the one that looks first reports it.
    said = ("ThreadSanitizer",) if sanitize == "thread" else ("AddressSanitizer", "runtime error")
    assert any(words in done.stderr for words in said), done.stderr
