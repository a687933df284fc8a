# SPDX-License-Identifier: Apache-2.0
"""The vendor library's C ABI through ctypes, for tests that must not depend on our binding.

Parameter lists are written out here a second time on purpose: a mistake in one place shows.
"""

from __future__ import annotations

import ctypes as C
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from support.tree import ROOT

SOFTDEV = ROOT / "kernels" / "softdev"
LIB64 = SOFTDEV / "ascend" / "lib64"
VENDOR = SOFTDEV / "ascend/opp/vendors/xmoe_transformer/op_api/lib/libcust_opapi.so"

FLOAT, INT8, INT32, UINT64, BF16, INT4, ND, NZ = 0, 2, 3, 10, 27, 29, 2, 29
FLT_MAX = float(np.finfo(np.float32).max)
DTYPES = {"float32": FLOAT, "int8": INT8, "int32": INT32, "uint16": BF16, "uint64": UINT64}

_B = """context:T x:T topkIds:T topkWeights:T weight1:L weight2:L weightScales1:L
weightScales2:L bias1:L bias2:L xActiveMask:T moeExpertNum:i epWorldSize:i cclBufferSize:i
maxRecvTokenNum:i dispatchQuantMode:i dispatchQuantOutDtype:i combineQuantMode:i commAlg:S
numMaxTokensPerRank:i activation:S activationClamp:F yOut:T expertTokenNumsOut:T""".split()
_A = """context:T x:T topkIds:T topkWeights:T weight1:L weight2:L weightScales1:L weightScales2:L
xActiveMask:T scales:T moeExpertNum:i epWorldSize:i cclBufferSize:i maxRecvTokenNum:i
dispatchQuantMode:i dispatchQuantOutDtype:i combineQuantMode:i commAlg:S numMaxTokensPerRank:i
yOut:T expertTokenNumsOut:T""".split()
SHARED = [
    f"shared{name}:L" for name in "Weight1 Weight2 WeightScales1 WeightScales2 Bias1 Bias2".split()
]


def _after(params: Sequence[str], anchor: str, *new: str) -> list[str]:
    at = [p.split(":")[0] for p in params].index(anchor) + 1
    return [*params[:at], *new, *params[at:]]


def _variants() -> dict[str, list[str]]:
    v = {"A": _A, "B": _B}
    v["C"] = _after(v["B"], "activationClamp", "topoType:i")
    v["D"] = _after(v["C"], "topoType", "rankNumPerServer:i")
    v["E"] = _after(v["D"], "xActiveMask", *SHARED)
    v["F"] = _after(v["E"], "rankNumPerServer", "topkWeightsType:i")
    v["G"] = ["activationParams:P" if p == "activationClamp:F" else p for p in v["F"]]
    v["H"] = _after(v["G"], "sharedBias2", "maskBuffer:T")
    v["I"] = _after(v["H"], "dispatchQuantOutDtype", "sharedExpertQuantOutDtype:i")
    v["J"] = _after(v["I"], "xActiveMask", "scales:T")
    return v


VARIANTS = _variants()
COUNTS = dict(zip("ABCDEFGHIJ", (23, 26, 27, 28, 34, 35, 35, 36, 37, 38), strict=True))
KINDS = {
    "T": C.c_void_p,
    "L": C.c_void_p,
    "P": C.c_void_p,
    "i": C.c_int64,
    "S": C.c_char_p,
    "F": C.c_float,
}
DEFAULTS: dict[str, Any] = {
    "dispatchQuantOutDtype": 28,
    "sharedExpertQuantOutDtype": 28,
    "commAlg": b"",
    "activation": b"swiglu",
    "activationClamp": FLT_MAX,
    "rankNumPerServer": 2,
}


def aligned(shape: Sequence[int] | int, dtype: Any) -> np.ndarray:
    """An uninitialised array whose address is a multiple of 64, as a device wants it."""
    count = int(np.prod(shape))
    raw = np.empty(count * np.dtype(dtype).itemsize + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : raw.size - 64 + start].view(dtype)[:count].reshape(shape)


def place(array: np.ndarray) -> np.ndarray:
    out = aligned(array.shape, array.dtype)
    out[...] = array
    return out


def to_bf16(values: np.ndarray) -> np.ndarray:
    """Bits of the nearest bfloat16, ties to even; uint16."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return place(((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16))


def from_bf16(bits: np.ndarray) -> np.ndarray:
    return (np.ascontiguousarray(bits).astype(np.uint32) << 16).view(np.float32)


class SoftError(RuntimeError):
    """A call returned something other than 0; `code` and the vendor's `text`."""

    def __init__(self, call: str, code: int, text: str) -> None:
        super().__init__(f"{call} -> {code}: {text}")
        self.code = code
        self.text = text

    def __reduce__(self) -> Any:
        return (RuntimeError, (str(self),))


@dataclass
class Soft:
    """The libraries of the software device, loaded in this process. Call only in a forked rank."""

    device: int = 0
    vendor: Path = VENDOR
    variant: str = "B"
    keep: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        names = ("libascendcl.so", "libnnopbase.so", "libhccl.so", "libhccl_fwk.so")
        self.acl, self.nnop, self.hccl, self.fwk = (
            C.CDLL(str(LIB64 / name), os.RTLD_NOW | os.RTLD_GLOBAL) for name in names
        )
        self.op = C.CDLL(str(self.vendor), os.RTLD_NOW | os.RTLD_LOCAL)
        self.acl.aclGetRecentErrMsg.restype = C.c_char_p
        for name in ("aclCreateTensor", "aclCreateTensorList", "aclCreateFloatArray"):
            getattr(self.nnop, name).restype = C.c_void_p
        self.params = VARIANTS[self.variant]
        self.phase1 = self.op.aclnnMegaMoeGetWorkspaceSize
        self.phase1.argtypes = [KINDS[p.split(":")[1]] for p in self.params] + [C.c_void_p] * 2
        self.phase2 = self.op.aclnnMegaMoe
        self.phase2.argtypes = [C.c_void_p, C.c_uint64, C.c_void_p, C.c_void_p]
        self.check("aclInit", self.acl.aclInit(None))
        self.check("aclrtSetDevice", self.acl.aclrtSetDevice(self.device))

    def text(self) -> str:
        # The device's buffers are short: a long argument may be cut inside a character.
        return (self.acl.aclGetRecentErrMsg() or b"").decode(errors="replace")

    def check(self, call: str, code: int) -> None:
        if code != 0:
            raise SoftError(call, code, self.text())

    def stream(self) -> C.c_void_p:
        handle = C.c_void_p()
        self.check("aclrtCreateStream", self.acl.aclrtCreateStream(C.byref(handle)))
        return handle

    def synchronize(self, stream: C.c_void_p) -> tuple[int, str]:
        code = self.acl.aclrtSynchronizeStream(stream)
        return code, self.text() if code else ""

    def malloc(self, num_bytes: int) -> C.c_void_p:
        pointer = C.c_void_p()
        self.check("aclrtMalloc", self.acl.aclrtMalloc(C.byref(pointer), C.c_size_t(num_bytes), 0))
        return pointer

    def tensor(
        self,
        array: np.ndarray,
        dtype: int | None = None,
        fmt: int = ND,
        shape: Sequence[int] | None = None,
    ) -> C.c_void_p:
        """Describes `array`, with its strides, or a contiguous `shape` over its memory; the array
        must outlive the launch."""
        self.keep.append(array)
        shown = array.shape if shape is None else tuple(shape)
        n = len(shown)
        dims = (C.c_int64 * n)(*shown)
        steps = [s // array.itemsize for s in array.strides]
        if shape is not None:
            steps = [int(np.prod(shown[i + 1 :])) for i in range(n)]
        strides = (C.c_int64 * n)(*steps)
        extent = 1 + sum((d - 1) * s for d, s in zip(dims, strides, strict=True) if d > 0)
        storage = (C.c_int64 * 1)(extent if array.size else 0)
        code = DTYPES[array.dtype.name] if dtype is None else dtype
        handle = self.nnop.aclCreateTensor(
            dims, C.c_uint64(n), code, strides, C.c_int64(0), fmt, storage, C.c_uint64(1),
            C.c_void_p(array.ctypes.data),
        )  # fmt: skip
        if not handle:
            raise SoftError("aclCreateTensor", -1, self.text())
        return C.c_void_p(handle)

    def tensors(self, arrays: Sequence[np.ndarray], **how: Any) -> C.c_void_p:
        members = (C.c_void_p * len(arrays))(*(self.tensor(a, **how).value for a in arrays))
        return C.c_void_p(self.nnop.aclCreateTensorList(members, C.c_uint64(len(arrays))))

    def floats(self, *values: float) -> C.c_void_p:
        array = (C.c_float * max(1, len(values)))(*values)
        return C.c_void_p(self.nnop.aclCreateFloatArray(array, C.c_uint64(len(values))))

    def prepare(self, args: Mapping[str, Any]) -> tuple[int, int, C.c_void_p]:
        """Phase one: (status, workspace bytes, executor). Missing arguments take their defaults."""
        values = []
        for name, kind in (p.split(":") for p in self.params):
            value = args.get(name, DEFAULTS.get(name, 0 if kind in "iF" else None))
            if name == "activationParams" and name not in args:
                value = self.floats()
            values.append(value)
        size, executor = C.c_uint64(), C.c_void_p()
        code = self.phase1(*values, C.byref(size), C.byref(executor))
        return code, size.value, executor

    def launch(self, args: Mapping[str, Any], stream: C.c_void_p) -> C.c_void_p:
        """Both phases with a fresh workspace; returns the executor, which is used up then."""
        code, size, executor = self.prepare(args)
        self.check("aclnnMegaMoeGetWorkspaceSize", code)
        workspace = self.malloc(size)
        self.check("aclnnMegaMoe", self.phase2(workspace, size, executor, stream))
        return executor


class Group:
    """A communicator over the ranks of one run and what the operator needs of it."""

    def __init__(self, soft: Soft, rank: int, size: int, folder: Path, name: str = "root") -> None:
        self.soft, self.rank, self.size = soft, rank, size
        self.comm = C.c_void_p()
        root = C.create_string_buffer(self._root(folder / name), 4108)
        self._call("HcclCommInitRootInfo", size, root, rank, C.byref(self.comm))
        op_args, address = C.c_void_p(), C.c_void_p()
        self._call("HcclKfcAllocOpArgs", C.byref(op_args))
        self._call("HcclKfcOpArgsSetCommEngine", op_args, C.c_uint8(4))
        config = C.create_string_buffer(b"AlltoAll=level0:fullmesh;level1:pairwise")
        self._call("HcclKfcOpArgsSetAlgConfig", op_args, config)
        self._call("HcclCreateOpResCtx", self.comm, C.c_uint8(8), op_args, C.byref(address))
        self._call("HcclKfcFreeOpArgs", op_args)
        self.buffer, size64 = C.c_void_p(), C.c_uint64()
        self._call("HcclGetHcclBuffer", self.comm, C.byref(self.buffer), C.byref(size64))
        self.buffer_bytes = size64.value
        self.context = aligned(4100, np.int32)
        self.context[:] = 0
        self.context[:4].view(np.uint64)[1] = address.value

    def _root(self, path: Path) -> bytes:
        if self.rank == 0:
            root = C.create_string_buffer(4108)
            self._call("HcclGetRootInfo", root)
            path.with_suffix(".part").write_bytes(root.raw)
            path.with_suffix(".part").rename(path)
        deadline = time.monotonic() + 20
        while not path.exists():
            if time.monotonic() > deadline:
                raise RuntimeError("rank 0 did not publish the root info within 20 s")
            time.sleep(0.002)
        return path.read_bytes()

    def _call(self, name: str, *args: Any) -> None:
        code = getattr(self.soft.hccl, name)(*args)
        if code != 0:
            raise SoftError(name, code, self.soft.text())

    def close(self) -> None:
        self._call("HcclCommDestroy", self.comm)


@dataclass
class Layer:
    """One MoE layer's routed experts, all ranks: bf16 bits and their values."""

    gate_up: np.ndarray  # [E, H, 2I] uint16
    down: np.ndarray  # [E, I, H] uint16

    @classmethod
    def random(cls, experts: int, hidden: int, inter: int, seed: int = 0) -> Layer:
        rng = np.random.default_rng(seed)

        def part(*shape: int) -> np.ndarray:
            values = rng.integers(-(2**15), 2**15, shape, np.int32).astype(np.float32)
            return to_bf16(values * np.float32(1.7 / 2**15 / np.sqrt(shape[1])))

        return cls(part(experts, hidden, 2 * inter), part(experts, inter, hidden))

    @property
    def values(self) -> tuple[np.ndarray, np.ndarray]:
        return from_bf16(self.gate_up), from_bf16(self.down)


@dataclass
class Batch:
    """One rank's input: x [T, H] bf16 bits, topk_ids [T, K] int32, topk_weights [T, K] float32."""

    x: np.ndarray
    ids: np.ndarray
    weights: np.ndarray

    @classmethod
    def random(
        cls, tokens: int, topk: int, experts: int, hidden: int, seed: int, hot: int | None = None
    ) -> Batch:
        rng = np.random.default_rng(seed)
        ids = np.stack([rng.permutation(experts)[:topk] for _ in range(tokens)]).astype(np.int32)
        if hot is not None:
            for row in ids:
                row[row == hot] = row[0]
                row[0] = hot
        weights = rng.random((tokens, topk), np.float32)
        weights /= weights.sum(axis=1, keepdims=True)
        x = to_bf16(rng.standard_normal((tokens, hidden), np.float32))
        return cls(x, place(ids), place(weights))


@dataclass
class Call:
    """Arrays of one launch; `args` are the operator's arguments over them."""

    batch: Batch
    y: np.ndarray
    counts: np.ndarray
    args: dict[str, Any]

    @classmethod
    def make(cls, soft: Soft, group: Group, layer: Layer, batch: Batch, **changes: Any) -> Call:
        experts = layer.gate_up.shape[0]
        local = experts // group.size
        mine = range(group.rank * local, (group.rank + 1) * local)
        y = aligned(batch.x.shape, np.uint16)
        y[...] = 0x7FC0  # NaN: a row nobody writes is seen
        counts = aligned(local, np.int32)
        counts[...] = -1
        args = {
            "context": soft.tensor(group.context),
            "x": soft.tensor(batch.x),
            "topkIds": soft.tensor(batch.ids),
            "topkWeights": soft.tensor(batch.weights),
            "weight1": soft.tensors([layer.gate_up[e] for e in mine]),
            "weight2": soft.tensors([layer.down[e] for e in mine]),
            "moeExpertNum": experts,
            "epWorldSize": group.size,
            "cclBufferSize": group.buffer_bytes,
            "yOut": soft.tensor(y),
            "expertTokenNumsOut": soft.tensor(counts),
        }
        args.update(changes)
        return cls(batch, y, counts, args)
