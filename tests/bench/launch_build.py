# SPDX-License-Identifier: Apache-2.0
"""Compiles what the launch benchmark needs; kept by content below the software device's objects."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

from support import acl_stubs
from support.tree import ROOT

NATIVE = Path(__file__).resolve().parent / "native"
CACHE = ROOT / "kernels" / "softdev" / ".obj" / "bench"


def compiled(
    compiler: str, source: Path, flags: list[str], name: str = "", *, salt: str = ""
) -> Path:
    """The shared library of one source, compiled when source or flags are new."""
    digest = hashlib.sha256(source.read_bytes() + " ".join([compiler, *flags, salt]).encode())
    folder = CACHE / digest.hexdigest()[:16]
    target = folder / (name or f"lib{source.stem}.so")
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        fresh = target.with_suffix(f".{os.getpid()}")
        command = [compiler, "-O2", "-shared", "-fPIC", str(source), *flags, "-o", str(fresh)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=900)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")
        fresh.replace(target)
    return target


def vendor_library() -> Path:
    """The recording operator library, variant B."""
    return compiled("gcc", NATIVE / "stub_vendor.c", ["-Wall"])


def toolkit(root: Path, *nnop_flags: str) -> Path:
    """A toolkit tree of stubs whose only operator library is the recording one."""
    lib64 = root / "lib64"
    lib64.mkdir(parents=True)
    shutil.copy(compiled("gcc", NATIVE / "stub_acl.c", ["-Wall"]), lib64 / "libascendcl.so")
    nnop = compiled("gcc", NATIVE / "stub_nnop.c", ["-Wall", *nnop_flags])
    shutil.copy(nnop, lib64 / "libnnopbase.so")
    for name in ("libhccl.so", "libhccl_fwk.so"):
        acl_stubs.compile_library(lib64 / name, acl_stubs.BASE_SYMBOLS[name])
    vendor_folder(root / "opp" / "vendors" / "recorder")
    (root / "opp" / "vendors" / "config.ini").write_text("load_priority=recorder\n")
    (root / "version.info").write_text("Version=9.1.0\n")
    return root


def vendor_folder(folder: Path) -> Path:
    """The recording library as an operator package."""
    library = folder / "op_api" / "lib" / "libcust_opapi.so"
    library.parent.mkdir(parents=True)
    shutil.copy(vendor_library(), library)
    (folder / "version.info").write_text("Version=9.1.0\n")
    return folder


def macro_module() -> ModuleType:
    """The C++ extension; takes a minute to compile the first time."""
    import torch

    base = Path(torch.__file__).parent
    flags = [
        "-std=c++17",
        "-w",
        *(f"-I{base / 'include' / part}" for part in ("", "torch/csrc/api/include")),
        f"-I{sysconfig.get_paths()['include']}",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        "-DTORCH_API_INCLUDE_EXTENSION_H",
        f"-L{base / 'lib'}",
        f"-Wl,-rpath,{base / 'lib'}",
        *("-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python", "-ldl"),
    ]
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    path = compiled(
        "g++", NATIVE / "macro_path.cpp", flags, f"macro_path{suffix}", salt=torch.__version__
    )
    spec = importlib.util.spec_from_file_location("macro_path", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["macro_path"] = module
    spec.loader.exec_module(module)
    return module
