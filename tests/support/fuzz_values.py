# SPDX-License-Identifier: Apache-2.0
"""What the fuzz targets share: memory, the accepted call's values, and when a refusal
counts.
"""

from __future__ import annotations

import ctypes as C
import mmap
from typing import Any

from support.fuzz_cases import Case
from support.fuzz_plan_cases import PlanCase
from xmoe.errors import AclError, ConfigError, UnsupportedError, XmoeError
from xmoe.kernels.acl import status
from xmoe.kernels.acl.variants import FLT_MAX

UNMAPPED = 0x100000  # above the lowest address Linux maps for anybody, below every program
DEVICE_BYTES = 64 << 10
MEMORY_BYTES = 96 << 20
MIB = 1 << 20
# Where the arguments of the accepted call lie in the host memory.
PLACES = {
    "x": 0, "yOut": MIB, "topkIds": 2 * MIB, "topkWeights": 2 * MIB + 0x10000,
    "expertTokenNumsOut": 2 * MIB + 0x20000, "context": 2 * MIB + 0x30000,
    "xActiveMaskOptional": 2 * MIB + 0x40000, "weight1": 4 * MIB, "weight2": 16 * MIB,
}  # fmt: skip
OTHERS_AT, SECOND_RANK = 32 * MIB, 48 * MIB
BF16, INT32, FLOAT, INT8, ND = 27, 3, 0, 2, 2
DTYPE_OF = {"x": BF16, "yOut": BF16, "topkWeights": FLOAT, "xActiveMaskOptional": INT8}
KNOWN = frozenset(status.NAMES)


class Finding(Exception):
    """Something that must not happen, and did not even crash."""


def right(key: str, sizes: tuple[int, int, int, int, int], base: int) -> dict[str, Any]:
    """The accepted tensor for a parameter; lists by what each member is."""
    bs, topk, hidden, inter, experts = sizes
    shapes = {
        "context": [4100], "x": [bs, hidden], "yOut": [bs, hidden], "topkIds": [bs, topk],
        "topkWeights": [bs, topk], "xActiveMaskOptional": [bs], "expertTokenNumsOut": [experts],
        "weight1": [hidden, 2 * inter], "weight2": [inter, hidden],
    }  # fmt: skip
    dtype = BF16 if key.startswith("weight") else DTYPE_OF.get(key, INT32)
    shape = shapes.get(key, [bs])
    at = base + PLACES.get(key, OTHERS_AT)
    return {"ptr": at, "shape": shape, "strides": None, "dtype": dtype, "format": ND,
            "storage": None, "offset": 0}  # fmt: skip


def dense(shape: list[int]) -> list[int]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.insert(0, step)
        step *= max(size, 1)
    return strides


class Memory:
    """Host memory for the arguments, its pages made when touched, and a little device memory."""

    def __init__(self, device: int) -> None:
        self._map = mmap.mmap(-1, MEMORY_BYTES)
        self._view = (C.c_char * MEMORY_BYTES).from_buffer(self._map)
        self.base = C.addressof(self._view)
        self.device = device

    def pointer(self, value: Any, right_at: int) -> int:
        named = {"null": 0, "odd": right_at + 1, "unmapped": UNMAPPED, "device": self.device,
                 "behind device": self.device + DEVICE_BYTES}  # fmt: skip
        if isinstance(value, str):
            return named[value]
        # Any other number as an address would say nothing: nobody can tell it from a mapped one
        # by looking. Its low bits still choose places in the memory that is there.
        return self.base + value % MEMORY_BYTES

    def fields(self, key: str, case: Case, changes: tuple[Any, ...]) -> dict[str, Any]:
        made = right(key, case.sizes, self.base)
        for name, value in changes:
            shape = list(made["shape"])
            if name == "ptr":
                made["ptr"] = self.pointer(value, made["ptr"])
            elif name in ("first", "last"):
                if shape:
                    shape[0 if name == "first" else -1] = value
                made["shape"] = shape
            elif name == "rank":
                made["shape"] = shape[1:] if value < 0 else [1, *shape]
            else:
                made[name] = value
        return made

    def fill(self, case: Case | PlanCase, shift: int = 0) -> None:
        """Ids that are distinct in a row, equal weights, all tokens live."""
        bs, topk = case.sizes[:2]
        count = bs * topk
        start = self.base + shift
        ids = (C.c_int32 * count)(*(i % topk for i in range(count)))
        C.memmove(start + PLACES["topkIds"], ids, 4 * count)
        C.memmove(start + PLACES["topkWeights"], (C.c_float * count)(*[0.5] * count), 4 * count)
        C.memset(start + PLACES["xActiveMaskOptional"], 1, bs)


def scalars(case: Case | PlanCase) -> dict[str, Any]:
    """The accepted values of everything that is not a tensor."""
    return {
        "moeExpertNum": 2 * case.sizes[4], "epWorldSize": 2, "cclBufferSize": 32 * MIB,
        "maxRecvTokenNum": 0, "dispatchQuantMode": 0, "dispatchQuantOutDtype": 28,
        "combineQuantMode": 0, "commAlg": "", "numMaxTokensPerRank": 0, "activation": "swiglu",
        "activationClamp": FLT_MAX, "activationParams": (FLT_MAX,),
    }  # fmt: skip


def named(error: XmoeError) -> str:
    """The kind of a refusal of the contract layer; a Finding when it explains nothing."""
    if isinstance(error, AclError):
        if error.code == 0 or status.name_of(error.call, error.code) == "UNKNOWN":
            raise Finding(f"a status without a name: {error}")
        return f"AclError {error.code}"
    if isinstance(error, (ConfigError, UnsupportedError)) and "allowed" not in str(error):
        raise Finding(f"a refusal that does not say what is allowed: {error}")
    return type(error).__name__


def wrap(value: int) -> int:
    return C.c_int64(value % (1 << 64)).value


def int32(value: int) -> C.c_int32:
    return C.c_int32(value % (1 << 32))


def int64s(values: Any) -> Any:
    return (C.c_int64 * max(1, len(values)))(*(wrap(v) for v in values))


def extent(shape: list[int], strides: list[int], offset: int) -> int:
    return wrap(offset + 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=False)))


def float32(value: float) -> float:
    try:
        return C.c_float(value).value
    except OverflowError:
        return float("inf")
