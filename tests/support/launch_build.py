# SPDX-License-Identifier: Apache-2.0
"""Stub libraries for launch plans, and what else the launch benchmark compiles.

Compiled files are kept by content below the software device's objects.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

from support import acl_stubs
from support.tree import ROOT
from support.vendor import VARIANTS

NATIVE = ROOT / "tests" / "bench" / "native"
CACHE = ROOT / "kernels" / "softdev" / ".obj" / "bench"


def compiled(
    compiler: str, source: Path, flags: list[str], name: str = "", *, salt: str = ""
) -> Path:
    """The shared library of one source, compiled when source or flags are new."""
    digest = hashlib.sha256(" ".join([compiler, *flags, salt]).encode())
    for file in (source, *sorted(NATIVE.glob("*.h"))):
        digest.update(file.read_bytes())
    folder = CACHE / digest.hexdigest()[:16]
    target = folder / (name or f"lib{source.stem}.so")
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        fresh = target.with_suffix(f".{os.getpid()}")
        command = [compiler, "-O2", "-shared", "-fPIC", f"-I{NATIVE}", str(source)]
        command += [*flags, "-o", str(fresh)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=900)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")
        fresh.replace(target)
    return target


def vendor_library() -> Path:
    """The recording operator library, variant B."""
    return compiled("gcc", NATIVE / "stub_vendor.c", ["-Wall"])


_C_TYPES = {"T": "struct tensor*", "L": "struct list*", "i": "int64_t", "S": "const char*",
            "F": "float", "P": "float*"}  # fmt: skip


def recorder(variant: str) -> Path:
    """An operator library of this variant that remembers what each parameter led to: the address
    behind a tensor, the length and the addresses of a list, a number, a text."""
    params = [entry.split(":") for entry in VARIANTS[variant]]
    declared = ", ".join(f"{_C_TYPES[kind]} p{i}" for i, (_, kind) in enumerate(params))
    noted = "\n".join(f"  NOTE_{kind}({i}, p{i})" for i, (_, kind) in enumerate(params))
    small = {name: i for i, (name, _) in enumerate(params)}
    moving = ("x", "topkIds", "topkWeights", "yOut", "expertTokenNumsOut")
    kept = " ".join(f"executor_[0]->small[{k}] = p{small[n]};" for k, n in enumerate(moving))
    source = f"""/* SPDX-License-Identifier: Apache-2.0 */
#include "recorder.h"
int aclnnMegaMoeGetWorkspaceSize({declared}, uint64_t* size_, struct executor** executor_) {{
  if (phase_one_status) return phase_one_status;
  if (*executor_) return 561000;
{noted}
  prepared++;
  *size_ = workspace_bytes;
  *executor_ = calloc(1, sizeof **executor_);
  {kept}
  return 0;
}}
"""
    folder = CACHE / "recorder"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{variant}.c"
    if not path.exists() or path.read_text() != source:
        path.write_text(source)
    return compiled("gcc", path, ["-Wall"])


def toolkit(root: Path, *nnop_flags: str, variant: str = "") -> Path:
    """A toolkit tree of stubs with one operator library: the one of the benchmark, or with
    `variant` the recorder of that one."""
    lib64 = root / "lib64"
    lib64.mkdir(parents=True)
    shutil.copy(compiled("gcc", NATIVE / "stub_acl.c", ["-Wall"]), lib64 / "libascendcl.so")
    nnop = compiled("gcc", NATIVE / "stub_nnop.c", ["-Wall", *nnop_flags])
    shutil.copy(nnop, lib64 / "libnnopbase.so")
    for name in ("libhccl.so", "libhccl_fwk.so"):
        acl_stubs.compile_library(lib64 / name, acl_stubs.BASE_SYMBOLS[name])
    vendor_folder(root / "opp" / "vendors" / "recorder", recorder(variant) if variant else None)
    (root / "opp" / "vendors" / "config.ini").write_text("load_priority=recorder\n")
    (root / "version.info").write_text("Version=9.1.0\n")
    return root


def vendor_folder(folder: Path, built: Path | None = None) -> Path:
    """An operator package of that library, by default the benchmark's."""
    library = folder / "op_api" / "lib" / "libcust_opapi.so"
    library.parent.mkdir(parents=True)
    shutil.copy(built or vendor_library(), library)
    (folder / "version.info").write_text("Version=9.1.0\n")
    return folder


def macro_library() -> Path:
    """The C++ extension, compiled; takes a minute the first time. Does not import torch, which may
    need an environment that only a child has."""
    found = importlib.util.find_spec("torch")
    assert found is not None and found.origin is not None
    base = Path(found.origin).parent
    flags = [
        "-std=c++17",
        "-w",
        *(f"-I{base / 'include' / part}" for part in ("", "torch/csrc/api/include")),
        f"-I{sysconfig.get_paths()['include']}",
        "-DTORCH_API_INCLUDE_EXTENSION_H",
        f"-L{base / 'lib'}",
        f"-Wl,-rpath,{base / 'lib'}",
        *("-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python", "-ldl"),
    ]
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    return compiled(
        "g++", NATIVE / "macro_path.cpp", flags, f"macro_path{suffix}", salt=version("torch")
    )


def macro_module() -> ModuleType:
    """The C++ extension. Needs torch imported."""
    spec = importlib.util.spec_from_file_location("macro_path", macro_library())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["macro_path"] = module
    spec.loader.exec_module(module)
    return module
