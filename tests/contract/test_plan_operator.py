# SPDX-License-Identifier: Apache-2.0
"""MegaMoe over its launch plan, against a recording library: stale plans, and what a launch costs
in memory and waits."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from support import acl_stubs, launch_build

SETUP = """
import contextlib, dataclasses, gc, tracemalloc, warnings
import torch
from xmoe.comm.fence import LaunchFence
from xmoe.errors import CommError, ConfigError
from xmoe.kernels.device import HostDevice
from xmoe.kernels.ops.mega_moe import MegaMoe
from xmoe.kernels.ops.workspace import WorkspaceCache
from xmoe.types import CommHandle, ExpertWeights, FenceMode, TokenBatch
runtime = loader.load(toolkit.find_toolkit())
symbols = runtime.require_mega_moe("B")
vendor_lib = ctypes.CDLL(str(symbols.library.path))
slots = (ctypes.c_char * (64 * 128)).in_dll(vendor_lib, "slots")
launched = (ctypes.c_int64 * 10).in_dll(vendor_lib, "launched")
launches = ctypes.c_int64.in_dll(vendor_lib, "launches")
acl = ctypes.CDLL(str(runtime.toolkit.lib_dirs[0] / "libascendcl.so"))
acl.stubCounts.restype = ctypes.POINTER(ctypes.c_long)
acl_counts = lambda: dict(zip(("recorded", "waited", "synchronised", "allocated"),
                              acl.stubCounts()[:4]))
nnop = ctypes.CDLL(str(runtime.toolkit.lib_dirs[0] / "libnnopbase.so"))
nnop.stubNnopCounts.restype = ctypes.POINTER(ctypes.c_long)
def number(index):
    return ctypes.c_int64.from_buffer(slots, index * 128).value
WEIGHT1, CONTEXT = 4, 0
H, I, L, T, K = 256, 128, 4, 3, 2
stack = contextlib.ExitStack()
device = stack.enter_context(HostDevice(runtime))
stack.enter_context(device.bind())
stream = device.create_stream()
stack.callback(stream.close)
fence = LaunchFence(FenceMode.STREAM, device)
stack.callback(fence.close)
workspace = WorkspaceCache(runtime, fence.wait_for_stream)
stack.callback(workspace.close)
handle = CommHandle("g", 0, 2, 1 << 20, torch.zeros(4100, dtype=torch.int32))
weights = ExpertWeights(torch.zeros(L, H, 2 * I, dtype=torch.bfloat16),
                        torch.zeros(L, I, H, dtype=torch.bfloat16))
batch = TokenBatch(torch.zeros(T, H, dtype=torch.bfloat16),
                   torch.zeros(T, K, dtype=torch.int32), torch.zeros(T, K))
op = MegaMoe(runtime, handle, weights, 2 * L, workspace, symbols=symbols, reuse_executor=REUSE)
stack.callback(op.close)
def once(**kw):
    with fence.acquire(stream) as lease:
        launch = op.launch(batch, stream, **kw)
        lease.record()
    return launch
def refused(call):
    before = launches.value
    try:
        call()
    except (CommError, ConfigError) as error:
        assert launches.value == before
        return f"{type(error).__name__}: {error}"
    return ""
"""


# Imports torch once, then runs each request in a fork of its own.
SERVER = """
import torch, traceback
import xmoe.comm.fence, xmoe.kernels.device, xmoe.kernels.ops.mega_moe
for line in sys.stdin:
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            exec(compile(json.loads(line), "case", "exec"), dict(globals()))
            code = 0
        except BaseException:
            print(json.dumps(traceback.format_exc()))
        sys.stdout.flush()
        os._exit(code)
    print("END", os.waitpid(child, 0)[1], flush=True)
"""
Run = Callable[..., Any]


@pytest.fixture(scope="module")
def child(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    root = launch_build.toolkit(tmp_path_factory.mktemp("plan") / "cann", variant="B")
    server = subprocess.Popen(
        [sys.executable, "-W", "error::ResourceWarning", "-c", acl_stubs.PRELUDE + SERVER],
        env=acl_stubs.environment(root, XMOE_ABI_PROBE="off"),
        cwd="/",
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdin is not None and server.stdout is not None

    def run(code: str, reuse: bool = False) -> Any:
        assert server.stdin is not None and server.stdout is not None
        whole = f"REUSE = {reuse}\n{SETUP}{code}\nstack.close()\n"
        server.stdin.write(json.dumps(whole) + "\n")
        server.stdin.flush()
        lines = []
        for line in server.stdout:
            if line.startswith("END "):
                break
            lines.append(line)
        results = [one for one in lines if one.startswith("RESULT ")]
        assert line == "END 0\n" and len(results) == 1, "".join(lines)
        return json.loads(results[0].removeprefix("RESULT "))

    with server:
        yield run
        server.stdin.close()


def test_a_closed_resource_is_refused(child: Run) -> None:
    got = child("""
once()
handle.validity.valid = False
seen = refused(once)
op._refuse_if_stale = lambda: None
unguarded = refused(once)
say({"seen": seen, "unguarded": unguarded})
""")
    assert got["seen"].startswith("CommError") and "closed" in got["seen"]
    assert got["unguarded"] == ""  # nothing else would have stopped it


@pytest.mark.parametrize("reuse", [False, True])
def test_weights_with_new_memory_are_followed(reuse: bool, child: Run) -> None:
    got = child(
        """
once()
old = weights.gate_up.data_ptr()
assert number(WEIGHT1) == old
held = weights.gate_up.data
weights.gate_up.data = torch.ones_like(weights.gate_up)
guard, op._refuse_if_stale = op._refuse_if_stale, lambda: None
once()
unguarded = number(WEIGHT1) == old
op._refuse_if_stale = guard
once()
followed = number(WEIGHT1) == weights.gate_up.data_ptr() != old
handle.context.data = torch.zeros_like(handle.context)
once()
context = number(CONTEXT) == handle.context.data_ptr()
lists = nnop.stubNnopCounts()[1]
once()
say({"unguarded": unguarded, "followed": followed, "context": context,
     "settled": nnop.stubNnopCounts()[1] == lists})
""",
        reuse,
    )
    # "unguarded": without the guard the vendor would have been given the old memory.
    assert got == {"unguarded": True, "followed": True, "context": True, "settled": True}


def test_weights_that_are_gone_or_changed_are_refused(child: Run) -> None:
    got = child("""
once()
kept = weights.down.data
seen = {}
weights.down.data = torch.zeros(L, I, H)
seen["type"] = refused(once)
weights.down.data = torch.zeros(L, I, H + 1, dtype=torch.bfloat16)
seen["shape"] = refused(once)
weights.down.data = torch.zeros(L, H, I, dtype=torch.bfloat16).transpose(1, 2)
seen["order"] = refused(once)
weights.down.data = torch.zeros(L * I * H + 1, dtype=torch.bfloat16)[1:].view(L, I, H)
seen["alignment"] = refused(once)
weights.down.data = torch.empty(0, dtype=torch.bfloat16)
seen["gone"] = refused(once)
weights.down.data = kept
once()
say(seen)
""")
    for name, text in got.items():
        assert text.startswith("ConfigError") and "weight2" in text, (name, text)
    assert "without memory" in got["gone"]


def test_a_plan_of_another_library_is_refused(child: Run) -> None:
    got = child("""
once()
from xmoe.kernels.acl.variants import VARIANTS
identified = dataclasses.replace(symbols.identified, variant=VARIANTS["D"])
op._symbols = dataclasses.replace(symbols, identified=identified)
say(refused(once))
""")
    assert "variant B" in got and " D " in got


def test_every_batch_the_checks_refuse_is_explained(child: Run) -> None:
    got = child("""
ok = {"hidden_states": batch.hidden_states, "topk_ids": batch.topk_ids,
      "topk_weights": batch.topk_weights}
def attempt(mask=None, **changed):
    one = TokenBatch(**{**ok, **changed})
    return refused(lambda: op.launch(one, stream, mask))
seen = [
    attempt(hidden_states=torch.zeros(T, H)),
    attempt(hidden_states=torch.zeros(T, H + 1, dtype=torch.bfloat16)),
    attempt(hidden_states=torch.zeros(T + 1, H, dtype=torch.bfloat16)),
    attempt(hidden_states=torch.zeros(H, T, dtype=torch.bfloat16).t()),
    attempt(hidden_states=torch.zeros(T * H + 8, dtype=torch.bfloat16)[8:].view(T, H)),
    attempt(hidden_states=torch.zeros((), dtype=torch.bfloat16)),
    attempt(topk_ids=torch.zeros(T, K, dtype=torch.int64)),
    attempt(topk_ids=torch.zeros(T, dtype=torch.int32)),
    attempt(topk_ids=torch.zeros(T, 0, dtype=torch.int32), topk_weights=torch.zeros(T, 0)),
    attempt(topk_ids=torch.zeros(T, 9, dtype=torch.int32), topk_weights=torch.zeros(T, 9)),
    attempt(topk_weights=torch.zeros(T, K + 1)),
    attempt(topk_weights=torch.zeros(T, K, dtype=torch.bfloat16)),
    attempt(topk_weights=torch.zeros(K, T).t()),
    attempt(mask=torch.ones(T, dtype=torch.bool)),
    attempt(mask=torch.ones(T + 1, dtype=torch.int8)),
    attempt(**{k: v[:0] for k, v in ok.items()}),
    attempt(topk_weights=batch.hidden_states.view(torch.float32)[:, :K].contiguous()[:0]),
]
shared = torch.zeros(T * K * 2, dtype=torch.int32)
both = dict(topk_ids=shared[: T * K].view(T, K),
            topk_weights=shared[: T * K].view(torch.float32).view(T, K))
seen.append(attempt(**both))
say({"seen": seen, "fine": attempt(), "masked": attempt(mask=torch.ones(T, dtype=torch.int8))})
""")
    assert all(text.startswith("ConfigError") and "; next: " in text for text in got["seen"]), got
    assert got["fine"] == got["masked"] == ""


@pytest.mark.parametrize("reuse", [False, True])
def test_a_hundred_launches_allocate_nothing_and_wait_for_nothing(reuse: bool, child: Run) -> None:
    got = child(
        """
for _ in range(20):
    once()
gc.collect()
tracemalloc.start()
for _ in range(20):
    once()
gc.collect()
before, acl_before = tracemalloc.get_traced_memory()[0], acl_counts()
nnop_before = list(nnop.stubNnopCounts()[:4])
for _ in range(100):
    once()
gc.collect()
grown = tracemalloc.get_traced_memory()[0] - before
acl_after = acl_counts()
say({"grown": grown, "acl": {k: acl_after[k] - acl_before[k] for k in acl_after},
     "nnop": [a - b for a, b in zip(nnop.stubNnopCounts()[:4], nnop_before)],
     "blocks": workspace.nbytes})
""",
        reuse,
    )
    assert got["grown"] < 2000, got  # bytes; a leak of one object a launch would be 5000 or more
    # One event recorded a launch (the fence's), no wait on host or device, no device memory.
    assert got["acl"] == {"recorded": 100, "waited": 0, "synchronised": 0, "allocated": 0}
    assert got["nnop"] == [0, 0, 0, 0]
    assert got["blocks"] == 2 << 20


def test_workspace_grows_after_its_last_launch_and_streams_are_bounded(child: Run) -> None:
    got = child("""
size = ctypes.c_int64.in_dll(vendor_lib, "workspace_bytes")
once()
first = acl_counts()
size.value = 3 << 20
once()
grown = acl_counts()
again = workspace.nbytes
streams = [device.create_stream() for _ in range(6)]
for stream in [*streams, streams[0]]:
    once()
held = workspace.nbytes
for one in streams:
    one.close()
say({"waits": grown["synchronised"] - first["synchronised"], "again": again, "held": held})
""")
    assert got["waits"] == 1 and got["again"] == 4 << 20
    assert got["held"] == 4 * (4 << 20)
