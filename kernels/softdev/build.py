# SPDX-License-Identifier: Apache-2.0
"""Builds the software device with the system's C++ compiler, recompiling only what changed.

    python kernels/softdev/build.py [--output DIR] [--sanitize thread|address,undefined] [--verbose]
    python kernels/softdev/build.py --opapi    # besides: general operators, for torch_npu

The second form compiles against the headers of the torch that belongs to the running interpreter
and works with that torch alone, so it is a step of its own, only made where torch_npu is installed.

Runs from a checkout and from `setup.py`, so it uses the standard library only. Set CXX to choose a
compiler and XSD_BUILD_JOBS to limit parallel compilations.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import importlib.util
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
CANN_VERSION = "9.1.0"
VENDOR = "xmoe_transformer"
CAM_VENDOR = "xmoe_cam"  # the connectors' operators
SANITIZERS = ("thread", "address,undefined")

COMPILE = (
    "-std=c++17 -fPIC -fvisibility=hidden -Wall -Wextra -Werror -g1 -ffp-contract=off -pthread"
).split()
LINK = "-shared -pthread -Wl,-z,defs -Wl,-z,nodelete -Wl,-z,relro -Wl,-z,now".split()


@dataclass(frozen=True)
class Library:
    """One shared library: a folder of sources, its place in the tree and what it links."""

    folder: str
    path: str
    needs: tuple[str, ...]
    rpath: str = "$ORIGIN"
    optimize: str = "-O2"
    extra: tuple[str, ...] = ()  # for both compiler and linker

    @property
    def soname(self) -> str:
        return Path(self.path).name


# In link order: a library only needs those above it.
LIBRARIES = (
    Library("acl", "lib64/libascendcl.so", ()),
    Library("nnop", "lib64/libnnopbase.so", ("ascendcl",)),
    Library("hccl", "lib64/libhccl.so", ("ascendcl",)),
    Library("hccl_fwk", "lib64/libhccl_fwk.so", ("hccl", "ascendcl")),
    # What torch_npu names as dependencies beside these; see src/empty.
    Library("op_compiler", "lib64/libacl_op_compiler.so", ("ascendcl",)),
    Library("empty", "lib64/libhcomm.so", ("hccl", "ascendcl")),
    Library("empty", "lib64/libge_runner.so", ()),
    Library("empty", "lib64/libgraph.so", ()),
    Library("empty", "lib64/libacl_tdt_channel.so", ()),
    Library(
        "vendor",
        f"opp/vendors/{VENDOR}/op_api/lib/libcust_opapi.so",
        ("nnopbase", "hccl", "ascendcl"),
        rpath="$ORIGIN/../../../../../lib64",
        optimize="-O3",
    ),
    Library(
        "cam",
        f"opp/vendors/{CAM_VENDOR}/op_api/lib/libcust_opapi.so",
        ("hccl_fwk", "nnopbase", "hccl", "ascendcl"),
        rpath="$ORIGIN/../../../../../lib64",
    ),
)


def opapi_library() -> Library:
    """The general operators, over the torch of this interpreter."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise BuildError("--opapi needs torch in this interpreter; install the npu extra of xmoe")
    torch = Path(next(iter(spec.submodule_search_locations)))
    include, lib = torch / "include", torch / "lib"
    extra: tuple[str, ...] = ("-isystem", str(include))
    extra += ("-isystem", str(include / "torch" / "csrc" / "api" / "include"))
    needs = ("nnopbase", "ascendcl", "torch_cpu", "c10")
    # Debug information of the templates would be ten times the code; -O1 halves the build's time.
    extra += ("-D_GLIBCXX_USE_CXX11_ABI=1", "-g0", f"-L{lib}", f"-Wl,-rpath-link,{lib}")
    return Library("opapi", "lib64/libopapi.so", needs, optimize="-O1", extra=extra)


# What CANN's own packages write there; readers look for the line that starts with "Version=".
TEXTS = {
    "opp/vendors/config.ini": f"load_priority={VENDOR},{CAM_VENDOR}\n",
    f"opp/vendors/{VENDOR}/version.info": (
        f"Version={CANN_VERSION}\ncustom_opp_compiler_version={CANN_VERSION}\n"
    ),
    f"opp/vendors/{CAM_VENDOR}/version.info": f"Version={CANN_VERSION}\n",
    "version.info": f"Version={CANN_VERSION}\nproduct=xmoe software device\n",
    "share/info/ops_transformer/version.info": f"Version={CANN_VERSION}\n",
    # torch_npu wants these two folders below ASCEND_HOME_PATH.
    "runtime/version.info": f"Version={CANN_VERSION}\n",
    "compiler/version.info": f"Version={CANN_VERSION}\n",
}


class BuildError(Exception):
    """The compiler is missing or refused a source; the message is what it printed."""


@dataclass(frozen=True)
class Settings:
    """What decides whether an existing object file may be reused."""

    compiler: tuple[str, ...]
    extra: tuple[str, ...]
    objects: Path
    verbose: bool

    def stamp(self, command: Sequence[str]) -> str:
        return hashlib.sha256("\0".join(command).encode()).hexdigest()


def build(
    output_root: Path | str | None = None,
    *,
    sanitize: str | None = None,
    verbose: bool = False,
    defines: Sequence[str] = (),
    folders: Sequence[str] | None = None,
    opapi: bool = False,
) -> None:
    """Builds the tree under `output_root`, by default `ascend` beside this file.

    Args:
        output_root: where lib64/ and opp/ go; made when missing.
        sanitize: None, "thread" or "address,undefined".
        verbose: print each command.
        defines: macros such as "XSD_MEGAMOE_VARIANT=D".
        folders: which libraries, by their folder under src; all by default.
        opapi: also the general operators, over the torch of this interpreter.
    Raises:
        BuildError: no compiler, or a source does not compile.
    """
    if sanitize is not None and sanitize not in SANITIZERS:
        raise BuildError(f"sanitize={sanitize!r} is not known; use one of {SANITIZERS} or None")
    root = Path(output_root) if output_root is not None else HERE / "ascend"
    root.mkdir(parents=True, exist_ok=True)
    extra = tuple(f"-D{define}" for define in defines)
    if sanitize is not None:
        extra += (f"-fsanitize={sanitize}", "-fno-omit-frame-pointer", "-O1")
    compiler = tuple(shlex.split(os.environ.get("CXX", "g++")))
    tag = hashlib.sha256("\0".join((*compiler, *extra)).encode()).hexdigest()[:12]
    objects = root.parent / ".obj" / tag
    settings = Settings(compiler, extra, objects, verbose)
    with _only_builder(root.parent / ".obj"):
        for library in LIBRARIES:
            if folders is None or library.folder in folders:
                _build_library(root, library, settings)
        if opapi:
            _build_library(root, opapi_library(), settings)
        for name, text in TEXTS.items():
            _write_text(root / name, text)


def _build_library(root: Path, library: Library, settings: Settings) -> None:
    sources = sorted((HERE / "src" / library.folder).glob("*.cpp"))
    if not sources:
        return
    jobs = int(os.environ.get("XSD_BUILD_JOBS", "0")) or os.cpu_count() or 1
    with ThreadPoolExecutor(jobs) as pool:
        objects = list(pool.map(lambda source: _compile(source, library, settings), sources))
    target = root / library.path
    target.parent.mkdir(parents=True, exist_ok=True)
    exports = HERE / "src" / "exports.map"
    command = [*settings.compiler, *LINK, *settings.extra, *library.extra]
    command += [f"-Wl,-soname,{library.soname}"]
    command += [f"-Wl,--version-script={exports}"]
    command += [f"-Wl,-rpath,{library.rpath}", "-o", str(target)]
    command += [str(each) for each in objects]
    command += [f"-L{root / 'lib64'}", *(f"-l{name}" for name in library.needs)]
    ours = [root / "lib64" / f"lib{name}.so" for name in library.needs]
    needed = [exports, *(path for path in ours if path.exists())]
    stamp = settings.objects / f"{library.folder}-{_short(str(target))}.link"
    if _is_current(target, [*objects, *needed], stamp, settings.stamp(command)):
        return
    # A new file under the old name: programs that have the old one loaded keep it.
    fresh = target.with_name(f".{target.name}.{os.getpid()}")
    command[command.index("-o") + 1] = str(fresh)
    _run(command, settings.verbose)
    os.replace(fresh, target)
    command[command.index("-o") + 1] = str(target)
    stamp.write_text(settings.stamp(command))


def _compile(source: Path, library: Library, settings: Settings) -> Path:
    folder = settings.objects / library.folder
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{source.stem}.o"
    depends = target.with_suffix(".d")
    stamp = target.with_suffix(".cmd")
    command = [*settings.compiler, *COMPILE, library.optimize, *settings.extra, *library.extra]
    command += ["-I", str(HERE / "include"), "-MMD", "-MF", str(depends)]
    command += ["-c", str(source), "-o", str(target)]
    used = [source, *_dependencies(depends)]
    if not _is_current(target, used, stamp, settings.stamp(command)):
        _run(command, settings.verbose)
        stamp.write_text(settings.stamp(command))
    return target


def _is_current(target: Path, used: Sequence[Path], stamp: Path, wanted: str) -> bool:
    try:
        made = target.stat().st_mtime_ns
        return stamp.read_text() == wanted and all(f.stat().st_mtime_ns <= made for f in used)
    except FileNotFoundError:
        return False


def _dependencies(path: Path) -> list[Path]:
    """Files named in the compiler's dependency file; empty when there is none yet."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        return []
    return [Path(name) for name in text.replace("\\\n", " ").split(":", 1)[-1].split()]


def _run(command: Sequence[str], verbose: bool) -> None:
    if verbose:
        print(shlex.join(command), flush=True)
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise BuildError(
            f"the software device needs a C++17 compiler; {command[0]!r} was not found: "
            "install g++ or set CXX"
        ) from error
    if done.returncode != 0:
        raise BuildError(f"{shlex.join(command)}\n{done.stdout}{done.stderr}")


def _write_text(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


@contextmanager
def _only_builder(folder: Path) -> Iterator[None]:
    """Two builds at a time (a test run and a person) must not write the same object files."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Build the software device.")
    parser.add_argument("--output", type=Path, help="tree to write; by default ascend/ here")
    parser.add_argument("--sanitize", choices=SANITIZERS)
    parser.add_argument("--define", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--opapi", action="store_true", help="also operators for torch_npu")
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args(arguments)
    try:
        build(
            options.output,
            sanitize=options.sanitize,
            verbose=options.verbose,
            defines=options.define,
            opapi=options.opapi,
        )
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
