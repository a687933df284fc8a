# SPDX-License-Identifier: Apache-2.0
"""The two-phase call: one launch per op_executor, failures half-way, argument types."""

from __future__ import annotations

from pathlib import Path

import pytest

from support import acl_stubs
from support.acl_stubs import environment, run_child

VENDOR = """
#include <stdint.h>
#include <stdlib.h>
int result = 0, launch_result = 0, launches = 0, empty = 0, dirty = 0; uint64_t bytes = 128;
int aclnnMegaMoeGetWorkspaceSize(void* a, void* b, void* c, void* d, void* e, void* f, void* g,
    void* h, void* i, void* j, void* k, int64_t l, int64_t m, int64_t n, int64_t o, int64_t p,
    int64_t q, int64_t r, char* s, int64_t t, char* u, float v, void* w, void* x, uint64_t* size,
    void** executor) {
  if (*executor) dirty++;
  if (result) return result;
  *size = bytes; if (!empty) *executor = malloc(1); return 0; }
int aclnnMegaMoe(void* w, uint64_t n, void* e, void* s) { launches++; return launch_result; }
"""

START = """
from xmoe.errors import *
from xmoe.kernels.acl.handles import *
from xmoe.kernels.acl import op, variants
runtime = loader.load(toolkit.find_toolkit())
symbols = runtime.mega_moe
nnop = ctypes.CDLL(str(runtime.toolkit.lib_dirs[0] / "libnnopbase.so"))
stub = ctypes.CDLL(str(symbols.library.path))
number = lambda name, lib=stub: ctypes.c_int.in_dll(lib, name)
tensor = TensorDesc(runtime, 4096, (2,), dtype="int32")
lists = TensorListDesc(runtime, [TensorDesc(runtime, 4096, (2,), dtype="int32")])
sample = {"T": tensor, "O": tensor, "L": lists, "i64": 1, "S": "", "F": 0.0}
args = {p.key: sample[p.kind] for p in symbols.variant.params if p.kind in sample}
def refused(call):
    try:
        call()
    except XmoeError as error:
        return f"{type(error).__name__}: {error}"
    return ""
def close():
    tensor.close(); lists.close()
"""


@pytest.fixture
def env(stub_base: Path, tmp_path: Path) -> dict[str, str]:
    root = acl_stubs.make_toolkit(tmp_path / "cann", stub_base)
    vendor = acl_stubs.make_vendor(tmp_path / "vendor", VENDOR)
    # The stub checks nothing, so the probe would rightly refuse it.
    return environment(root, ASCEND_CUSTOM_OPP_PATH=str(vendor), XMOE_ABI_PROBE="off")


def test_an_op_executor_is_launched_once(env: dict[str, str]) -> None:
    code = (
        START
        + """
prepared = op.prepare(runtime, symbols, args)
seen = [prepared.workspace_bytes, refused(lambda: op.launch(prepared, None, 1)),
        refused(lambda: op.launch(prepared, 64, 1)), refused(lambda: op.launch(prepared, 64, 1))]
prepared.close(); prepared.close()
seen += [number("launches").value, number("executors", nnop).value,
         refused(lambda: op.launch(prepared, 64, 1)), number("dirty").value]
close(); say(seen)
"""
    )
    size, no_workspace, first, second, launches, destroyed, closed, dirty = run_child(code, env)
    assert size == 128 and "128 bytes" in no_workspace
    assert first == "" and "allowed: once" in second and launches == 1
    assert destroyed == 0, "phase two consumed it"
    assert "closed" in closed and dirty == 0


def test_repeatable_and_unlaunched_executors_are_destroyed(env: dict[str, str]) -> None:
    code = (
        START
        + """
with op.prepare(runtime, symbols, args, repeatable=True) as prepared:
    for _ in range(3):
        op.launch(prepared, 64, 1)
seen = [number("launches").value, number("executors", nnop).value, number("repeatable", nnop).value]
op.prepare(runtime, symbols, args).close()
seen += [number("executors", nnop).value, number("repeatable", nnop).value]
close(); say(seen)
"""
    )
    assert run_child(code, env) == [3, -1, 1, -2, 2]


def test_no_workspace_is_needed_when_none_is_asked_for(env: dict[str, str]) -> None:
    code = (
        START
        + """
ctypes.c_uint64.in_dll(stub, "bytes").value = 0
with op.prepare(runtime, symbols, args) as prepared:
    op.launch(prepared, None, 1)
close(); say([prepared.workspace_bytes, number("launches").value])
"""
    )
    assert run_child(code, env) == [0, 1]


def test_failures_of_each_phase_are_named(env: dict[str, str]) -> None:
    code = (
        START
        + """
def both(workspace):
    with op.prepare(runtime, symbols, args) as prepared:
        op.launch(prepared, workspace, 1)
go = lambda: both(64)
number("result").value = 561002
seen = [refused(go)]
number("result").value = 0; number("empty").value = 1
seen.append(refused(go))
number("empty").value = 0; number("launch_result").value = 561103
seen.append(refused(go))
number("launch_result").value = 0
seen += [refused(lambda: both(None)),
         number("executors", nnop).value, refused(go)]
close(); say(seen)
"""
    )
    phase1, no_executor, phase2, workspace, destroyed, good = run_child(code, env)
    assert phase1.startswith("AclError: aclnnMegaMoeGetWorkspaceSize returned 561002")
    assert "561101" in no_executor
    assert phase2.startswith("AclError: aclnnMegaMoe returned 561103")
    assert "got no workspace; allowed: " in workspace and destroyed == -1 and good == ""


def test_wrong_types_are_refused_by_name(env: dict[str, str]) -> None:
    code = (
        START
        + """
bad = {"x": None, "topkIds": lists, "weight1": tensor, "moeExpertNum": "8", "epWorldSize": True,
       "cclBufferSize": 2**63, "commAlg": None, "activation": "a\\0b", "activationClamp": "7"}
seen = {k: refused(lambda: op.prepare(runtime, symbols, {**args, k: v})) for k, v in bad.items()}
close()
closed = refused(lambda: op.prepare(runtime, symbols, args))
say([seen, closed, number("launches").value])
"""
    )
    seen, closed, launches = run_child(code, env)
    for key, text in seen.items():
        assert text.startswith(f"ConfigError: argument {key}=") and "allowed: " in text, text
    assert "is closed" in closed and launches == 0
