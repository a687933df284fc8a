# SPDX-License-Identifier: Apache-2.0
"""The ways to make one MegaMoe launch that `bench_launch.py` compares. Variant B, 32 local experts.

Each is a function without arguments that makes one launch with tensors that exist already, unless
its name says that it allocates the output. All call the same two libraries.
"""

from __future__ import annotations

import contextlib
import ctypes as C
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cffi
import torch

from xmoe.comm.fence import LaunchFence
from xmoe.kernels.acl.loader import Runtime
from xmoe.kernels.acl.plan import LaunchPlan
from xmoe.kernels.ops.mega_moe import MegaMoe
from xmoe.kernels.ops.workspace import WorkspaceCache
from xmoe.types import CommHandle, ExpertWeights, FenceMode, TokenBatch

LOCAL, EP, HIDDEN, INTER, TOKENS, TOPK = 32, 8, 2048, 512, 8, 8
EXPERTS = LOCAL * EP
CCL_BYTES = 400 << 20
FLT_MAX = 3.4028234663852886e38
ACL = {torch.bfloat16: 27, torch.int32: 3, torch.float32: 0}
ND = 2
Launch = Callable[[], object]


@dataclass
class Step:
    """The tensors of one step."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    y: torch.Tensor
    counts: torch.Tensor

    @property
    def all(self) -> tuple[torch.Tensor, ...]:
        return (self.x, self.ids, self.weights, self.y, self.counts)


@dataclass
class Case:
    """What all contenders share. Weights are never read, so they are not filled."""

    runtime: Runtime
    device: Any
    base: Path
    vendor: Path
    stream: Any
    context: torch.Tensor = field(init=False)
    experts: ExpertWeights = field(init=False)
    steps: tuple[Step, Step] = field(init=False)

    def __post_init__(self) -> None:
        make, where = torch.empty, self.device.torch_device
        bf16 = {"dtype": torch.bfloat16, "device": where}
        self.context = torch.zeros(4100, dtype=torch.int32, device=where)
        self.experts = ExpertWeights(
            make(LOCAL, HIDDEN, 2 * INTER, **bf16), make(LOCAL, INTER, HIDDEN, **bf16)
        )
        self.steps = (self._step(), self._step())
        self.workspace = make(2 << 20, dtype=torch.uint8, device=where)

    def _step(self) -> Step:
        where = self.device.torch_device
        ids = torch.arange(TOPK, dtype=torch.int32).repeat(TOKENS, 1).to(where)
        return Step(
            torch.zeros(TOKENS, HIDDEN, dtype=torch.bfloat16, device=where),
            ids,
            torch.ones(TOKENS, TOPK, dtype=torch.float32, device=where),
            torch.empty(TOKENS, HIDDEN, dtype=torch.bfloat16, device=where),
            torch.empty(LOCAL, dtype=torch.int32, device=where),
        )


def naive_ctypes(case: Case) -> Launch:
    """Every descriptor made through ctypes, one call each; prototypes declared."""
    base, vendor = C.CDLL(str(case.base)), C.CDLL(str(case.vendor))
    p, i64, u64, i32 = C.c_void_p, C.c_int64, C.c_uint64, C.c_int32
    create = base.aclCreateTensor
    create.restype = p
    create.argtypes = [p, u64, i32, p, i64, i32, p, u64, p]
    create_list = base.aclCreateTensorList
    create_list.restype, create_list.argtypes = p, [p, u64]
    base.aclDestroyTensor.argtypes = base.aclDestroyTensorList.argtypes = [p]
    phase_one, phase_two = vendor.aclnnMegaMoeGetWorkspaceSize, vendor.aclnnMegaMoe
    phase_one.argtypes = [p] * 11 + [i64] * 7 + [C.c_char_p, i64, C.c_char_p, C.c_float] + [p] * 4
    phase_two.argtypes = [p, u64, p, p]

    def tensor(one: torch.Tensor) -> int:
        n = one.dim()
        dims, strides = (i64 * n)(*one.shape), (i64 * n)(*one.stride())
        return create(dims, n, ACL[one.dtype], strides, 0, ND, dims, n, one.data_ptr())

    def packed(one: torch.Tensor) -> int:
        members = [tensor(part) for part in one]
        return create_list((p * len(members))(*members), len(members))

    def launch() -> None:
        step = case.steps[0]
        x, ids, weights, y, counts = (tensor(one) for one in step.all)
        context = tensor(case.context)
        w1, w2 = packed(case.experts.gate_up), packed(case.experts.down)
        size, executor = u64(0), p(None)
        status = phase_one(
            context, x, ids, weights, w1, w2, None, None, None, None, None, EXPERTS, EP, CCL_BYTES,
            0, 0, 28, 0, b"", 0, b"swiglu", FLT_MAX, y, counts, C.byref(size), C.byref(executor),
        )  # fmt: skip
        assert status == 0
        stream = case.stream.handle()
        assert phase_two(case.workspace.data_ptr(), size, executor, stream) == 0
        for one in (context, x, ids, weights, y, counts):
            base.aclDestroyTensor(one)
        base.aclDestroyTensorList(w1)
        base.aclDestroyTensorList(w2)

    return launch


_ABI = """
void* aclCreateTensor(const int64_t*, uint64_t, int, const int64_t*, int64_t, int, const int64_t*,
                      uint64_t, void*);
void* aclCreateTensorList(void* const*, uint64_t);
int aclDestroyTensor(void*);
int aclDestroyTensorList(void*);
int aclnnMegaMoeGetWorkspaceSize(void*, void*, void*, void*, void*, void*, void*, void*, void*,
    void*, void*, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, const char*,
    int64_t, const char*, float, void*, void*, uint64_t*, void**);
int aclnnMegaMoe(void*, uint64_t, void*, void*);
"""


def naive_cffi(case: Case) -> Launch:
    """The same through cffi's ABI mode (no compiler)."""
    ffi = cffi.FFI()
    ffi.cdef(_ABI)
    base, vendor = ffi.dlopen(str(case.base)), ffi.dlopen(str(case.vendor))
    new, cast, null = ffi.new, ffi.cast, ffi.NULL

    def tensor(one: torch.Tensor) -> Any:
        n = one.dim()
        dims, strides = new("int64_t[]", list(one.shape)), new("int64_t[]", list(one.stride()))
        address = cast("void*", one.data_ptr())
        return base.aclCreateTensor(dims, n, ACL[one.dtype], strides, 0, ND, dims, n, address)

    def packed(one: torch.Tensor) -> Any:
        members = [tensor(part) for part in one]
        return base.aclCreateTensorList(new("void*[]", members), len(members))

    def launch() -> None:
        step = case.steps[0]
        x, ids, weights, y, counts = (tensor(one) for one in step.all)
        context = tensor(case.context)
        w1, w2 = packed(case.experts.gate_up), packed(case.experts.down)
        size, executor = new("uint64_t*"), new("void**")
        status = vendor.aclnnMegaMoeGetWorkspaceSize(
            context, x, ids, weights, w1, w2, null, null, null, null, null, EXPERTS, EP, CCL_BYTES,
            0, 0, 28, 0, b"", 0, b"swiglu", FLT_MAX, y, counts, size, executor,
        )  # fmt: skip
        assert status == 0
        stream = cast("void*", case.stream.handle())
        workspace = cast("void*", case.workspace.data_ptr())
        assert vendor.aclnnMegaMoe(workspace, size[0], executor[0], stream) == 0
        for one in (context, x, ids, weights, y, counts):
            base.aclDestroyTensor(one)
        base.aclDestroyTensorList(w1)
        base.aclDestroyTensorList(w2)

    return launch


def macro_path(case: Case, module: Any) -> Launch:
    """torch_npu's way: C++ over at::Tensor, all descriptors in one call from Python."""
    module.open(str(case.base), str(case.vendor))
    w1, w2 = list(case.experts.gate_up), list(case.experts.down)
    step, workspace = case.steps[0], case.workspace.data_ptr()

    def launch() -> None:
        module.launch(
            case.context, step.x, step.ids, step.weights, w1, w2, EXPERTS, EP, CCL_BYTES, step.y,
            step.counts, workspace, case.stream.handle(),
        )  # fmt: skip

    return launch


@dataclass
class Ours:
    """This project's launch path, from the plan alone to the whole of it."""

    case: Case
    op: MegaMoe
    fence: LaunchFence
    workspace: WorkspaceCache

    @property
    def plan(self) -> LaunchPlan:
        return self.op.plan

    def step(self, steps: Iterator[Step]) -> None:
        """The plan alone: addresses read from tensors that exist."""
        step, stream = next(steps), self.case.stream.handle()
        self.plan.step(
            TOKENS,
            TOPK,
            step.x.data_ptr(),
            step.ids.data_ptr(),
            step.weights.data_ptr(),
            0,
            step.y.data_ptr(),
            step.counts.data_ptr(),
            stream,
            self.workspace.block(stream),
        )

    def same_tensors(self) -> Launch:
        steps = itertools.repeat(self.case.steps[0])
        return lambda: self.step(steps)

    def moving_tensors(self) -> Launch:
        steps = itertools.cycle(self.case.steps)
        return lambda: self.step(steps)

    def rebuilt(self) -> Launch:
        steps = itertools.cycle(self.case.steps)

        def launch() -> None:
            self.plan.rebuild()
            self.step(steps)

        return launch

    def operator(self) -> Launch:
        """Checks, stale guards, output allocation, plan."""
        step = self.case.steps[0]
        batch = TokenBatch(step.x, step.ids, step.weights)
        return lambda: self.op.launch(batch, self.case.stream)

    def given(self) -> Launch:
        """Checks, stale guards, plan, into memory that exists: as a layer launches."""
        step = self.case.steps[0]
        batch = TokenBatch(step.x, step.ids, step.weights)
        return lambda: self.op.launch(batch, self.case.stream, output=step.y, counts=step.counts)

    def whole(self) -> Launch:
        """What a resource does around `given`: bind the device, fence, record."""
        step = self.case.steps[0]
        batch = TokenBatch(step.x, step.ids, step.weights)
        device, fence, stream = self.case.device, self.fence, self.case.stream

        def launch() -> None:
            with device.bind(), fence.acquire(stream) as lease:
                self.op.launch(batch, stream, output=step.y, counts=step.counts)
                lease.record()

        return launch


@contextlib.contextmanager
def ours(case: Case, reuse_executor: bool) -> Iterator[Ours]:
    """The operator over the case's tensors."""
    with contextlib.ExitStack() as stack:
        fence = LaunchFence(FenceMode.STREAM, case.device)
        stack.callback(fence.close)
        workspace = WorkspaceCache(
            case.runtime, fence.wait_for_stream, getattr(case.device, "allocate", None)
        )
        stack.callback(workspace.close)
        handle = CommHandle("bench", 0, EP, CCL_BYTES, case.context)
        op = MegaMoe(
            case.runtime,
            handle,
            case.experts,
            EXPERTS,
            workspace,
            symbols=case.runtime.require_mega_moe("B"),
            reuse_executor=reuse_executor,
        )
        stack.callback(op.close)
        yield Ours(case, op, fence, workspace)
