# SPDX-License-Identifier: Apache-2.0
"""Moving tensors and executors to other addresses, as CANN documents it."""

from __future__ import annotations

import ctypes as C
import threading

from support.softdev import child, device, error, library

NULL_PARAMETER, INVALID, INNER_NULL = 161001, 161002, 561103


def _raw():
    api = device()
    first, second = api.malloc(4096), api.malloc(4096)
    tensor = C.c_void_p(api.tensor((4, 8), first))
    got = C.c_void_p()
    seen = {}

    def attempt(name, address, target=tensor):
        seen[name] = api.status("aclSetRawTensorAddr", target, address), error()

    attempt("ok", second)
    seen["get"] = api.status("aclGetRawTensorAddr", tensor, C.byref(got)), got.value == second.value
    attempt("tensor", second, None)
    attempt("null", None)
    attempt("misaligned", C.c_void_p(second.value + 16))
    attempt("too long", C.c_void_p(second.value + 4096 - 64))
    attempt("not a tensor", second, C.c_void_p(first.value))
    seen["get null"] = api.status("aclGetRawTensorAddr", tensor, None), error()
    api.status("aclGetRawTensorAddr", tensor, C.byref(got))
    seen["kept"] = got.value == second.value
    api.aclDestroyTensor(tensor)
    attempt("destroyed", second)
    seen["get destroyed"] = api.status("aclGetRawTensorAddr", tensor, C.byref(got)), error()
    return seen


def test_the_address_of_a_tensor():
    seen = child(_raw)
    assert seen["ok"][0] == 0 and seen["get"] == (0, True) and seen["kept"]
    assert seen["tensor"][0] == seen["get null"][0] == NULL_PARAMETER
    for name, text in {
        "null": "null",
        "misaligned": "32-byte aligned",
        "too long": "not inside one live device allocation",
        "not a tensor": "not a live tensor",
        "destroyed": "not a live tensor",
        "get destroyed": "not a live tensor",
    }.items():
        assert seen[name][0] == INVALID and text in seen[name][1], (name, seen[name])


class _Rebind(C.Structure):
    _fields_ = [
        ("clone", C.CFUNCTYPE(C.c_void_p, C.c_void_p)),
        ("move", C.CFUNCTYPE(C.c_int, C.c_void_p, C.c_int, C.c_uint64, C.c_void_p)),
    ]


def _executor():
    api = device()
    nnop = library("nnopbase")
    stream, memory = api.stream(), api.malloc(4096)
    tensor = C.c_void_p(api.tensor((4, 8), memory))
    moves, clones, release = [], [], threading.Event()
    table = _Rebind(
        _Rebind._fields_[0][1](lambda ctx: clones.append(ctx)),
        _Rebind._fields_[1][1](lambda ctx, out, i, to: moves.append((out, i, to)) or int(i < 2)),
    )
    seen = {}

    def attempt(name, executor, index=1, call="aclSetInputTensorAddr", target=tensor):
        seen[name] = api.status(call, executor, C.c_size_t(index), target, memory), error()

    plain = api.executor(lambda workspace, n: 0)
    attempt("not repeatable", plain)
    api.aclSetAclOpExecutorRepeatable(plain)
    attempt("cannot follow", plain)
    kept = api.executor(lambda workspace, n: release.wait(10) and 0)
    nnop.xsdExecutorSetRebind(kept, C.byref(table))
    api.aclSetAclOpExecutorRepeatable(kept)
    attempt("input", kept)
    attempt("output", kept, 0, "aclSetOutputTensorAddr")
    attempt("index", kept, 2)
    attempt("null executor", None)
    attempt("null tensor", kept, target=None)
    attempt("dead executor", C.c_void_p(12345))
    idle = len(clones)
    assert api.launch(kept, stream) == 0
    attempt("while queued", kept)
    attempt("again", kept)
    queued = len(clones)
    release.set()
    api.aclrtSynchronizeStream(stream)
    assert api.launch(kept, stream) == 0
    api.aclrtSynchronizeStream(stream)
    attempt("afterwards", kept)
    api.aclDestroyAclOpExecutor(kept)
    attempt("destroyed", kept)
    api.aclDestroyAclOpExecutor(plain)
    return seen, idle, queued, len(clones), [m[:2] for m in moves], memory.value == moves[0][2]


def test_the_addresses_of_a_repeatable_executor():
    seen, idle, queued, later, moves, same = child(_executor)
    for name in ("input", "output", "while queued", "again", "afterwards"):
        assert seen[name][0] == 0, (name, seen[name])
    assert seen["null executor"][0] == seen["null tensor"][0] == INNER_NULL
    for name, text in {
        "not repeatable": "not made repeatable",
        "cannot follow": "cannot follow",
        "index": "names no tensor",
    }.items():
        assert seen[name][0] == INVALID and text in seen[name][1], (name, seen[name])
    assert seen["dead executor"][0] != 0 and seen["destroyed"][0] != 0
    # A queued launch keeps what it was launched with: one copy, then the copy is moved in place.
    assert (idle, queued, later) == (0, 1, 1)
    assert moves[:3] == [(0, 1), (1, 0), (0, 2)] and same
