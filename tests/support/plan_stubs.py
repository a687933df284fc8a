# SPDX-License-Identifier: Apache-2.0
"""Launch plans against recording libraries, each test in a process of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support import acl_stubs, launch_build

# Each child has one library of stubs; lists have two members, all addresses lie in `memory`.
SETUP = """
import contextlib, dataclasses
from xmoe.errors import AclError, ConfigError, LibraryError
from xmoe.kernels.acl.plan import STEP_TENSORS, LaunchPlan, Packed
runtime = loader.load(toolkit.find_toolkit())
symbols = runtime.require_mega_moe(abi_variant=VARIANT)
memory = runtime.ffi.new("char[]", 1 << 20)
base = (int(runtime.ffi.cast("uintptr_t", memory)) + 63) // 64 * 64
H, L, T, K = 64, 4, 2, 2
CONTEXT, LISTS = base, base + 0x1000

def constants():
    values = {}
    for index, param in enumerate(symbols.require_variant().params):
        if param.key in STEP_TENSORS or param.kind in ("W", "X"):
            continue
        at = LISTS + 0x400 * index
        values[param.key] = {
            "T": Packed(at, (8,), "int32", is_list=False),
            "L": Packed(at, (4, 8), "bfloat16", 2, step_bytes=0x100),
            "i64": 2**40 + index, "S": f"text {param.key}", "F": 7.25, "FA": (7.25, 1.5),
        }[param.kind]
    return values

class Scratch:
    address, nbytes = 0, 0
    def __init__(self): self.asked = []
    def take(self, nbytes):
        self.asked.append(nbytes)
        self.address, self.nbytes = base + 0xC0000, nbytes

def addresses(number=0, tokens=T):
    start = base + 0x40000 + number * 0x8000
    return [start + i * 0x1000 for i in range(6)]

def step(plan, number=0, tokens=T, topk=K, mask=False, scratch=None, stream=0x5150):
    x, ids, weights, m, y, counts = addresses(number)
    plan.step(tokens, topk, x, ids, weights, m if mask else 0, y, counts, stream,
              scratch if scratch is not None else Scratch())

def make(reuse=False, **changes):
    return LaunchPlan(runtime, symbols, {**constants(), **changes}, hidden=H, local_experts=L,
                      reuse_executor=reuse)

vendor_lib = ctypes.CDLL(str(symbols.library.path))
class Slot(ctypes.Structure):
    _fields_ = [(n, ctypes.c_int64) for n in
                ("number", "count", "second", "type", "format", "rows", "columns")]
    _fields_ += [("real", ctypes.c_double), ("text", ctypes.c_char * 64)]
slots = (Slot * 64).in_dll(vendor_lib, "slots")
launched = (ctypes.c_int64 * 10).in_dll(vendor_lib, "launched")
number_of = lambda name: ctypes.c_int64.in_dll(vendor_lib, name)
status_of = lambda name: ctypes.c_int.in_dll(vendor_lib, name)
nnop = ctypes.CDLL(str(runtime.toolkit.lib_dirs[0] / "libnnopbase.so"))
nnop.stubNnopCounts.restype = ctypes.POINTER(ctypes.c_long)
NAMES = ("tensors", "lists", "dead_tensors", "dead_lists", "moved", "repeatable",
         "dead_executors", "arrays")
def counts():
    return dict(zip(NAMES, nnop.stubNnopCounts()[:8]))
def refused(call):
    try:
        call()
    except (AclError, ConfigError, LibraryError) as error:
        return f"{type(error).__name__}: {error}"
    return ""
"""


def child(tmp_path: Path, code: str, variant: str = "B", *flags: str) -> Any:
    root = launch_build.toolkit(tmp_path / "cann", *flags, variant=variant)
    env = acl_stubs.environment(root, XMOE_ABI_PROBE="off")
    return acl_stubs.run_child(f"VARIANT = {variant!r}\n" + SETUP + code, env)
