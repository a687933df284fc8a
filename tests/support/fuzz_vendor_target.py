# SPDX-License-Identifier: Apache-2.0
"""Carries a fuzz case out straight through the vendor's C functions.

`run(case)` returns what became of it ("accepted", "561002", "launch 161002", ...) and raises
Finding when a refusal has no name. A crash or a hang is for the parent to see: use it in a child
process only.

Addresses given as memory are mapped, null or noticeably not mapped; C arrays and texts are valid or
null. Handles (tensors, lists, executors, streams, events, communicator contexts) are any 64-bit
number.
"""

from __future__ import annotations

import contextlib
import ctypes as C
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from support.fuzz_cases import Case
from support.fuzz_pair import Pair
from support.fuzz_values import (
    DEVICE_BYTES,
    KNOWN,
    PLACES,
    UNMAPPED,
    Finding,
    Memory,
    dense,
    extent,
    float32,
    int32,
    int64s,
    right,
    scalars,
    wrap,
)
from support.vendor import Soft
from xmoe.kernels.acl.variants import NEUTRAL, VARIANTS


class Vendor:
    """Cases through the C functions, with two ranks as threads of this process."""

    def __init__(self, variant: str, library: Path) -> None:
        self.soft = Soft(0, library, variant)
        self.names = [p.split(":")[0] for p in self.soft.params]
        # The second spelling of the list (support.vendor) is used on purpose.
        self.keys = [p.key for p in VARIANTS[variant].params if p.kind not in ("W", "X")]
        self.kinds = [p.kind for p in VARIANTS[variant].params if p.kind not in ("W", "X")]
        assert len(self.keys) == len(self.names)
        self.memory = Memory(self.soft.malloc(DEVICE_BYTES).value or 0)
        self.stream = self.soft.stream()
        self.workspace = self.soft.malloc(1 << 20)
        self.group: Pair | None = None
        self.dead = self._make(right("x", (1, 1, 1024, 512, 1), self.memory.base))
        self.soft.nnop.aclDestroyTensor(C.c_void_p(self.dead))

    def _make(self, f: dict[str, Any]) -> int | None:
        """aclCreateTensor over fields; None when refused, which has to be explained."""
        shape, storage = f["shape"], f["storage"]
        strides = dense(shape) if f["strides"] is None else f["strides"]
        if storage is None:
            storage = [extent(shape, strides, f["offset"])]
        if len(strides) != len(shape):  # the C function has one length for both
            strides = [*strides, *[0] * len(shape)][: len(shape)]
        made: int | None = self.soft.nnop.aclCreateTensor(
            int64s(shape), C.c_uint64(len(shape)), int32(f["dtype"]), int64s(strides),
            C.c_int64(wrap(f["offset"])), int32(f["format"]), int64s(storage),
            C.c_uint64(len(storage)), C.c_void_p(f["ptr"] % (1 << 64)),
        )  # fmt: skip
        if not made:
            self._explained("aclCreateTensor", -1)
        return made

    def _explained(self, call: str, code: int) -> None:
        text = self.soft.text()
        if not text:
            raise Finding(f"{call} returned {code} without a text")
        if code != -1 and code not in KNOWN:
            raise Finding(f"{call} returned the unknown code {code}: {text}")

    def run(self, case: Case) -> str:
        self.memory.fill(case)
        with contextlib.ExitStack() as stack:
            if case.changes and case.changes[0][0].startswith("call "):
                return self._other(case, stack)
            return self._call(case, stack)

    def _tensor(self, key: str, case: Case, spec: tuple[Any, ...], stack: Any, own: bool) -> Any:
        """Handle of a tensor; None when aclCreateTensor refused it, 0 for a null argument."""
        word = spec[0]
        if word == "null":
            return 0
        if word == "dead":
            return self.dead
        if word == "handle":
            return spec[1] % (1 << 64)
        if word == "list":
            return self._list(key, case, [("right",)], stack)
        f = self.memory.fields("x" if word == "same as x" else key, case,
                               spec[1] if word == "tensor" else ())  # fmt: skip
        made = self._make(f)
        if made and own:
            stack.callback(self.soft.nnop.aclDestroyTensor, C.c_void_p(made))
        return made

    def _list(self, key: str, case: Case, specs: list[Any], stack: Any) -> Any:
        members = [self._tensor(key, case, spec, stack, False) for spec in specs]
        handles = (C.c_void_p * max(1, len(members)))(*members)
        made = self.soft.nnop.aclCreateTensorList(handles, C.c_uint64(len(members)))
        if not made:
            self._explained("aclCreateTensorList", -1)
            for member in members:
                self.soft.nnop.aclDestroyTensor(C.c_void_p(member))
            return None
        stack.callback(self.soft.nnop.aclDestroyTensorList, C.c_void_p(made))
        return made

    def _value(self, key: str, kind: str, spec: tuple[Any, ...], case: Case, stack: Any) -> Any:
        word = spec[0]
        if kind in ("T", "O"):
            return self._tensor(key, case, spec, stack, True)
        if kind == "L":
            if word in ("null", "dead", "handle"):
                return self._tensor("x", case, spec, stack, True)
            if word == "tensor as list":
                return self._tensor("x", case, ("right",), stack, True)
            extra = 1 if word == "longer" else 0
            specs = spec[1] if word == "list of" else [("right",)] * (case.sizes[4] + extra)
            return self._list(key, case, specs, stack)
        if kind == "FA":
            if word in ("null", "dead", "handle"):
                return self._tensor("x", case, spec, stack, True)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a double too large for a float becomes infinite
                handle = self.soft.floats(*map(float32, spec[1]))
            stack.callback(self.soft.nnop.aclDestroyFloatArray, handle)
            return handle.value
        if word == "null":
            return None
        if kind == "S":
            return spec[1].encode()
        return wrap(spec[1]) if kind == "i64" else float32(spec[1])

    def _arguments(self, case: Case, stack: Any) -> list[Any] | None:
        changed, values = dict(case.changes), scalars(case)
        found = []
        for key, kind in zip(self.keys, self.kinds, strict=True):
            if key in changed:
                value = self._value(key, kind, changed[key], case, stack)
                if value is None and kind in ("T", "O", "L"):
                    return None
            elif key in values:
                value = values[key]
                value = value.encode() if isinstance(value, str) else value
                if kind == "FA":
                    value = self._value(key, kind, ("floats", values[key]), case, stack)
            elif key in NEUTRAL or key.endswith("Optional") or key == "scales":
                value = NEUTRAL.get(key, (None,))[0]
            else:
                value = self._value(key, kind, ("right",), case, stack)
            found.append(value)
        return found

    def _call(self, case: Case, stack: contextlib.ExitStack) -> str:
        deep = case.then == "launch" and zlib.crc32(repr(case).encode()) % 4 == 0
        if deep and self.group is None:
            self.group = Pair(self.soft.vendor, self.soft.variant)
        context = self.memory.base + PLACES["context"]
        C.memset(context, 0, 16)
        if deep and self.group is not None:
            C.memmove(context, self.group.contexts[0], 16)
        args = self._arguments(case, stack)
        if args is None:
            return "aclCreateTensor"
        changed = dict(case.changes)
        size, executor = C.c_uint64(), C.c_void_p()
        outputs: list[Any] = [C.byref(size), C.byref(executor)]
        for i, name in enumerate(("workspaceSize", "executor")):
            spec = changed.get(name)
            if spec == ("null",):
                outputs[i] = None
            elif spec is not None and name == "executor":
                executor.value = spec[1] % (1 << 64)
        stale = executor.value
        code = self.soft.phase1(*args, *outputs)
        if code != 0:
            self._explained("aclnnMegaMoeGetWorkspaceSize", code)
            if executor.value != stale:
                raise Finding(f"refused with {code}, but an executor was made")
            return str(code)
        if stale:
            raise Finding("an executor was made over one that was not cleared")
        return self._then(case, size.value, executor, deep)

    def _then(self, case: Case, size: int, executor: C.c_void_p, deep: bool) -> str:
        if case.then == "destroy" or size > 1 << 20:
            self.soft.check("destroy", self.soft.nnop.aclDestroyAclOpExecutor(executor))
            return "accepted"
        number = case.sizes[0] + len(case.changes)
        workspace, stream, told = self.workspace.value or 0, self.stream, 1 << 20
        if case.then == "workspace":
            workspace = (0, 1, UNMAPPED, self.memory.device, workspace + 32, workspace)[number % 6]
            told = (told, size, size, size, told, size - 1 if size else 0)[number % 6]
        if case.then == "stream":
            stream = C.c_void_p((1, (1 << 64) - 1, UNMAPPED, self.memory.base)[number % 4])
        if case.then == "twice":
            self.soft.nnop.aclSetAclOpExecutorRepeatable(executor)
        code = self.soft.phase2(C.c_void_p(workspace), C.c_uint64(told), executor, stream)
        if code != 0:
            self._explained("aclnnMegaMoe", code)
            self.soft.check("destroy", self.soft.nnop.aclDestroyAclOpExecutor(executor))
            return f"launch {code}"
        if case.then == "twice":
            again = self.soft.phase2(C.c_void_p(workspace), C.c_uint64(told), executor, stream)
            if again != 0:
                raise Finding(f"a repeatable executor's second launch gave {again}")
            self.soft.check("destroy", self.soft.nnop.aclDestroyAclOpExecutor(executor))
        elif self.soft.phase2(C.c_void_p(workspace), C.c_uint64(told), executor, stream) == 0:
            raise Finding("an executor was launched twice")
        if deep and self.group is not None:
            self.group.join(case, self.memory)
        result = self._settle()
        if deep and self.group is not None:
            other = self.group.settle()
            if result != "0" or other != "0":
                self.group.close()
                self.group = None
            return f"ran with a peer {result}"
        return f"ran {result}"

    def _settle(self) -> str:
        if self.stream is None:
            return "0"
        code = self.soft.acl.aclrtSynchronizeStreamWithTimeout(self.stream, 20_000)
        if code != 0:
            self._explained("aclrtSynchronizeStream", code)
            if code in (507046, 507047, 107020):
                raise Finding("a launch did not end within 20 s")
            self.soft.acl.aclrtDestroyStream(self.stream)
            self.stream = self.soft.stream()
        return str(code)

    def _other(self, case: Case, stack: contextlib.ExitStack) -> str:
        word, spec = case.changes[0]
        name = word.removeprefix("call ")
        codes = list(getattr(self, f"_call_{name}")(spec, case, stack))
        for call, code in codes:
            if code != 0:
                self._explained(call, code)
        return f"{name} {max((abs(code) for _, code in codes), default=0)}"

    def _call_tensor(self, spec: Any, case: Case, stack: Any) -> Iterator[tuple[str, int]]:
        self._tensor("x", case, spec, stack, True)
        yield "aclCreateTensor", 0  # a refusal was looked at there

    def _call_tensors(self, spec: Any, case: Case, stack: Any) -> Iterator[tuple[str, int]]:
        self._value("weight1", "L", spec, case, stack)
        yield "aclCreateTensorList", 0

    def _call_arrays(self, spec: Any, case: Case, stack: Any) -> Iterator[tuple[str, int]]:
        kind, count = spec
        call = f"aclCreate{'Int' if kind == 'none' else kind}Array"
        create = getattr(self.soft.nnop, call)
        create.restype = C.c_void_p
        # A count is believed by any library, so the memory behind it must be there.
        count = count if kind == "none" or count > 1 << 24 else count % 4096
        made = create(C.c_void_p(None if kind == "none" else self.memory.base), C.c_uint64(count))
        if made:
            yield (
                f"aclDestroy{kind}",
                getattr(self.soft.nnop, call.replace("Create", "Destroy"))(C.c_void_p(made)),
            )
        else:
            self._explained(call, -1)

    def _handle(self, which: str, number: int) -> C.c_void_p:
        other = self.stream.value if self.stream is not None else 0
        return C.c_void_p({"null": 0, "garbage": number % (1 << 64), "other": other}[which])

    def _call_destroy(self, spec: Any, case: Case, stack: Any) -> Iterator[tuple[str, int]]:
        index, which, number = spec
        kinds = ("Tensor", "TensorList", "Scalar", "IntArray", "FloatArray", "BoolArray")
        calls = [f"aclDestroy{kind}" for kind in (*kinds, "AclOpExecutor")]
        call = (*calls, "aclSetAclOpExecutorRepeatable")[index]
        yield call, getattr(self.soft.nnop, call)(self._handle(which, number))

    def _call_read(self, spec: Any, case: Case, stack: Any) -> Iterator[tuple[str, int]]:
        index, which, number = spec
        call = ("aclGetViewShape", "aclGetViewStrides", "aclGetDataType", "aclGetFormat",
                "aclGetTensorListSize")[index]  # fmt: skip
        first, second = C.c_uint64(), C.c_uint64()
        outs = [None if number % 3 == 0 else C.byref(first), C.byref(second)]
        yield (
            call,
            getattr(self.soft.nnop, call)(
                self._handle(which, number), *outs[: 2 if index < 2 else 1]
            ),
        )

    def _call_stream(self, spec: Any, case: Case, stack: Any) -> Iterator[tuple[str, int]]:
        index, first, second = spec
        acl, one, two = self.soft.acl, C.c_void_p(first % (1 << 64)), C.c_void_p(second % (1 << 64))
        state = C.c_int(0)
        calls: list[tuple[str, tuple[Any, ...]]] = [
            ("aclrtSynchronizeStream", (one,)), ("aclrtDestroyStream", (one,)),
            ("aclrtStreamWaitEvent", (self.stream, one)), ("aclrtRecordEvent", (one, two)),
            ("aclrtStreamQuery", (one, C.byref(state))), ("aclrtDestroyEvent", (one,)),
            ("aclrtQueryEventStatus", (one, C.byref(state))), ("aclrtSynchronizeEvent", (one,)),
        ]  # fmt: skip
        call, args = calls[index]
        if index in (0, 1, 4) and not one.value:
            return  # null is the default stream
        yield call, getattr(acl, call)(*args)

    def _call_memory(self, spec: Any, case: Case, stack: Any) -> Iterator[tuple[str, int]]:
        which, first, second = spec
        acl, pointer = self.soft.acl, C.c_void_p()
        size = first % (1 << 64)
        size = size if size > 1 << 37 else size % (1 << 20)
        if which == 0:
            yield "aclrtMalloc", acl.aclrtMalloc(C.byref(pointer), C.c_size_t(size), 0)
            if pointer.value:
                yield "aclrtFree", acl.aclrtFree(pointer)
        elif which == 1:
            if first % (1 << 64) != (self.workspace.value, self.memory.device):
                yield "aclrtFree", acl.aclrtFree(C.c_void_p((first | 1) % (1 << 64)))
        else:
            room = DEVICE_BYTES if which == 2 else second % (1 << 64)
            count = min(size, second % (1 << 64)) if which == 2 else size
            if which == 3 and count <= room:
                count = room + 1 if room < (1 << 64) - 1 else 0
            if which == 2 and count > DEVICE_BYTES:
                room = count  # larger than what is there: only the device's own bounds can tell
            yield "aclrtMemcpy", acl.aclrtMemcpy(
                C.c_void_p(self.memory.device), C.c_size_t(room), C.c_void_p(self.memory.base),
                C.c_size_t(count), 1,
            )  # fmt: skip

    def _call_launch(self, spec: Any, case: Case, stack: Any) -> Iterator[tuple[str, int]]:
        which, first, second = spec
        executor = C.c_void_p(0 if which == "null" else first % (1 << 64))
        yield (
            "aclnnMegaMoe",
            self.soft.phase2(
                C.c_void_p(self.workspace.value),
                C.c_uint64(second % (1 << 64)),
                executor,
                self.stream,
            ),
        )
