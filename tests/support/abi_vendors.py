# SPDX-License-Identifier: Apache-2.0
"""The software vendor built as each ABI variant, and small stand-ins for other libraries.

Built variants stay in the software device's object folder and are remade when a source changed, so
that several test modules and sessions share them.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

from support.vendor import LIB64, SOFTDEV

LETTERS = "ABCDEFGHIJ"
UNTOLD_VERSION = "9.1.0-beta.3"
"""An operator package of release 9.1.0 whose version does not tell the variant."""

_FLAGS = "-std=c++17 -fPIC -fvisibility=hidden -w -O1".split()


def _build_module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("_xmoe_softdev_build", SOFTDEV / "build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up here
    spec.loader.exec_module(module)
    return module


def library(variant: str) -> Path:
    """The software vendor's library with this variant's parameter list."""
    folder = SOFTDEV / ".obj" / "abi"
    folder.mkdir(parents=True, exist_ok=True)
    include = SOFTDEV / "include"
    vendor = SOFTDEV / "src" / "vendor"
    digest = hashlib.sha256(" ".join(_FLAGS).encode())
    for source in sorted([*vendor.iterdir(), *include.iterdir()]):
        digest.update(source.read_bytes())
    stamp = digest.hexdigest()[:16]
    target = folder / f"{stamp}-{variant}.so"
    if not target.exists():
        common = [_common(source, folder, stamp) for source in sorted(vendor.glob("*.cpp"))
                  if source.name != "abi.cpp"]  # fmt: skip
        libraries = [f"-l:{name}.so" for name in ("libascendcl", "libnnopbase", "libhccl")]
        fresh = folder / f".{target.name}.{os.getpid()}"
        _compile(
            *_FLAGS, f"-DXSD_MEGAMOE_VARIANT={variant}", "-I", str(include), "-shared",
            "-Wl,-soname,libcust_opapi.so", str(vendor / "abi.cpp"), *map(str, common),
            f"-L{LIB64}", *libraries, f"-Wl,-rpath,{LIB64}", "-o", str(fresh),
        )  # fmt: skip
        fresh.replace(target)
        for old in folder.iterdir():
            if old.name.endswith((".so", ".o")) and not old.name.startswith((stamp, ".")):
                old.unlink(missing_ok=True)
    return target


def _common(source: Path, folder: Path, stamp: str) -> Path:
    target = folder / f"{stamp}-{source.stem}.o"
    if not target.exists():
        fresh = folder / f".{target.name}.{os.getpid()}"
        include = str(SOFTDEV / "include")
        level = "-O2" if source.stem == "gemm" else "-O1"
        _compile(*_FLAGS, level, "-I", include, "-c", str(source), "-o", str(fresh))
        fresh.replace(target)
    return target


def _compile(*arguments: str) -> None:
    done = subprocess.run(["g++", *arguments], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def vendor_folder(root: Path, variant: str, version: str = UNTOLD_VERSION, abi: str = "") -> Path:
    """A vendor folder with that library; `abi` is what its version.info states, if anything."""
    lib = root / "op_api" / "lib"
    lib.mkdir(parents=True)
    (lib / "libcust_opapi.so").symlink_to(library(variant))
    stated = f"mega_moe_abi={abi}\n" if abi else ""
    (root / "version.info").write_text(f"Version={version}\n{stated}")
    return root


FAKE_LAUNCH = "int aclnnMegaMoe(void* w, unsigned long n, void* e, void* s) { return 0; }\n"
# Libraries that are no MegaMoe of a known variant, by what they do in phase one.
STRANGERS = {
    "crash": "int aclnnMegaMoeGetWorkspaceSize(void) { return *(volatile int*)8; }\n",
    "abort": "#include <stdlib.h>\nint aclnnMegaMoeGetWorkspaceSize(void) { abort(); }\n",
    "exit": "#include <stdlib.h>\nint aclnnMegaMoeGetWorkspaceSize(void) { _Exit(0); }\n",
    "hang": "int aclnnMegaMoeGetWorkspaceSize(void) { for (;;) ; }\n",
    "fork_hang": (
        "#include <unistd.h>\nint aclnnMegaMoeGetWorkspaceSize(void) "
        "{ fork(); for (;;) pause(); }\n"
    ),
    "zero": "int aclnnMegaMoeGetWorkspaceSize(void) { return 0; }\n",
    "always_null": "int aclnnMegaMoeGetWorkspaceSize(void) { return 161001; }\n",
    "always_invalid": "int aclnnMegaMoeGetWorkspaceSize(void) { return 161002; }\n",
    "other_code": "int aclnnMegaMoeGetWorkspaceSize(void) { return 561002; }\n",
    "noisy": (
        '#include <stdio.h>\nint aclnnMegaMoeGetWorkspaceSize(void) '
        '{ printf("{\\"stage\\": \\"done\\"}\\n"); fflush(stdout); return 7; }\n'
    ),
    # One more null check than B has, at a slot of no variant.
    "later": (
        "#include <stdint.h>\n#define P void*\n"
        "int aclnnMegaMoeGetWorkspaceSize(P a,P b,P c,P d,P e,P f,P g,P h,P i,P j,P k,int64_t l,"
        "P m,P n,P o,P p,P q,P r,P s,P t,P u,P v,P w,P x,P y,P z,P A,P B,P C,P D,P E,P F,P G,P H,"
        "P I,P J,P K,P L) { if (!a||!b||!c||!d||!e||!f||!J||!K) return 161001; return 161002; }\n"
    ),
}  # fmt: skip
