# SPDX-License-Identifier: Apache-2.0
"""Tiny vendor libraries compiled by the tests, and a toolkit tree around them.

The base libraries are stubs whose few calls do the least that the binding layer needs; they know no
streams and no device. The recorder library stores the arguments it was called with.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

BASE_SYMBOLS = {
    "libascendcl.so": """
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
static __thread const char* text;
void stubSetText(const char* t) { text = t; }
const char* aclGetRecentErrMsg(void) { const char* t = text; text = 0; return t; }
int aclInit(const char* c) { (void)c; return 0; }
const char* aclrtGetSocName(void) { return "Ascend910_9391"; }
int aclrtSetDevice(int d) { (void)d; return 0; }
int allocated = 0;
int aclrtMalloc(void** p, size_t n, int policy) {
  (void)policy; allocated++; *p = aligned_alloc(64, (n + 63) / 64 * 64); return 0; }
int aclrtFree(void* p) { allocated--; free(p); return 0; }
int aclrtMemcpy(void* d, size_t m, const void* s, size_t n, int k) {
  (void)k; if (n > m) { stubSetText("EE1001 too long"); return 107000; }
  memcpy(d, s, n); return 0; }
int aclrtCreateStream(void** s) { *s = malloc(1); return 0; }
int aclrtDestroyStream(void* s) { free(s); return 0; }
int aclrtSynchronizeStream(void* s) { (void)s; return 507035; }
""",
    "libnnopbase.so": """
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
int tensors = 0, lists = 0, arrays = 0, executors = 0, repeatable = 0;
float array_values[8]; uint64_t array_size = 0;
void* aclCreateTensor(const int64_t* v, uint64_t n, int t, const int64_t* s, int64_t o, int f,
                      const int64_t* sd, uint64_t m, void* p) {
  (void)v; (void)n; (void)t; (void)s; (void)o; (void)f; (void)sd; (void)m; (void)p;
  tensors++; return malloc(1); }
int aclDestroyTensor(void* t) { tensors--; free(t); return 0; }
struct list { uint64_t n; void* items[64]; };
void* aclCreateTensorList(void* const* v, uint64_t n) {
  struct list* l = malloc(sizeof *l); l->n = n; memcpy(l->items, v, n * sizeof(void*));
  lists++; return l; }
int aclDestroyTensorList(struct list* l) {
  for (uint64_t i = 0; i < l->n; i++) aclDestroyTensor(l->items[i]);
  lists--; free(l); return 0; }
void* aclCreateFloatArray(const float* v, uint64_t n) {
  arrays++; array_size = n; memcpy(array_values, v, n * sizeof *v); return malloc(1); }
int aclDestroyFloatArray(void* a) { arrays--; free(a); return 0; }
int aclSetAclOpExecutorRepeatable(void* e) { if (!e) return 561103; repeatable++; return 0; }
int aclDestroyAclOpExecutor(void* e) { (void)e; executors--; return 0; }
""",
    "libhccl.so": "\n".join(
        f"int {name}(void) {{ return 0; }}"
        for name in (
            "HcclGetRootInfo",
            "HcclCommInitRootInfoConfig",
            "HcclCommDestroy",
            "HcclGetRankSize",
            "HcclGetRankId",
            "HcclKfcAllocOpArgs",
            "HcclKfcFreeOpArgs",
            "HcclKfcOpArgsSetAlgConfig",
            "HcclKfcOpArgsSetCommEngine",
            "HcclCreateOpResCtx",
            "HcclGetHcclBuffer",
        )
    ),
    "libhccl_fwk.so": (
        "int HcclGetRemoteIpcHcclBuf(void) { return 0; }\n"
        "int HcclCommGetHandleWithName(void) { return 0; }\n"
    ),
}

LAUNCH = "int aclnnMegaMoe(void* w, unsigned long n, void* e, void* s) { return 0; }\n"
# The checks that variant B makes before anything else, so that the return-code probe knows it.
WORKSPACE = """
#include <stdint.h>
int aclnnMegaMoeGetWorkspaceSize(void* context, void* x, void* ids, void* weights, void* w1,
    void* w2, void* s1, void* s2, void* b1, void* b2, void* mask, int64_t experts, int64_t ep,
    int64_t ccl, int64_t recv, int64_t quant, int64_t dtype, int64_t combine, char* alg,
    int64_t tokens, char* activation, float clamp, void* y, void* counts, uint64_t* size,
    void** executor) {
  if (!context || !x || !ids || !weights || !w1 || !w2 || !y || !counts) return 161001;
  if (experts <= 0 || ep <= 0 || recv < 0) return 161002;
  return 161001; }
"""
BOTH = LAUNCH + WORKSPACE
NEITHER = "int aclnnSomethingElse(void) { return 0; }\n"


def compile_library(path: Path, source: str, *flags: str) -> Path:
    """Compile C source to a shared library."""
    path.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(
        ["gcc", "-w", "-shared", "-fPIC", "-o", str(path), "-xc", "-", "-xnone", *flags],
        input=source,
        text=True,
        check=True,
        timeout=60,
    )
    return path


def build_base(folder: Path) -> Path:
    """The four base libraries, built once per session; `make_toolkit` copies them."""
    for name, source in BASE_SYMBOLS.items():
        compile_library(folder / name, source)
    return folder


def make_toolkit(root: Path, base: Path, version: str | None = "9.1.0") -> Path:
    """A toolkit tree without any operator library."""
    (root / "lib64").mkdir(parents=True)
    for name in BASE_SYMBOLS:
        shutil.copy(base / name, root / "lib64" / name)
    (root / "opp" / "vendors").mkdir(parents=True)
    if version is not None:
        (root / "version.info").write_text(f"Version={version}\n")
    return root


def make_vendor(root: Path, source: str | None, version: str = "9.1.0", *flags: str) -> Path:
    """A vendor folder; `source` None leaves the library out."""
    library = root / "op_api" / "lib" / "libcust_opapi.so"
    library.parent.mkdir(parents=True)
    if source is not None:
        compile_library(library, source, *flags)
    (root / "version.info").write_text(f"Version={version}\n")
    return root


PRELUDE = """
import ctypes, json, os, sys, threading
from xmoe.kernels.acl import toolkit, loader, vendor, problems
from xmoe.kernels.acl.problems import Problem
def found(**kw):
    runtime = loader.load(toolkit.find_toolkit())
    got = runtime.find_mega_moe(**kw)
    if isinstance(got, Problem):
        return {"code": got.code.value, "text": got.text}
    return {"code": "", "library": str(got.library.path), "variant": got.variant and got.variant.id,
            "origins": [[p.symbol, p.resolved_path, p.global_path, p.ok] for p in got.provenance]}
def say(value):
    print("RESULT " + json.dumps(value))
"""


def environment(root: Path | None, **extra: str) -> dict[str, str]:
    """A child's environment: only this toolkit, nothing inherited from the machine's."""
    kept = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("XMOE_", "ASCEND_", "HCCL_", "LD_"))
    }
    kept.update(OMP_NUM_THREADS="1", PYTHONWARNINGS="error")
    if root is not None:
        kept["ASCEND_HOME_PATH"] = str(root)
    return {**kept, **extra}


def run_child(code: str, env: dict[str, str], cwd: Path | None = None) -> Any:
    """Run code in a fresh process (loader state is per process) and return what it `say`s."""
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + code],
        env=env,
        cwd=cwd or "/",
        capture_output=True,
        text=True,
        timeout=120,
    )
    lines = [x for x in done.stdout.splitlines() if x.startswith("RESULT ")]
    assert done.returncode == 0 and lines, f"child failed:\n{done.stdout}\n{done.stderr}"
    assert "ResourceWarning" not in done.stderr, done.stderr
    return json.loads(lines[-1].removeprefix("RESULT "))
