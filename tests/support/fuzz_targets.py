# SPDX-License-Identifier: Apache-2.0
"""Carries a fuzz case out, through the contract layer or straight through the C functions.

`run(case)` returns what became of it ("accepted", "ConfigError", "561002", "launch 507035", ...)
and raises Finding when a refusal has no name. A crash or a hang is for the parent to see: use these
in a child process only. Addresses given as memory are mapped, null or noticeably not mapped; C
arrays and texts are valid or null. Handles (tensors, lists, executors, streams, events,
communicator contexts) are any 64-bit number.
"""

from __future__ import annotations

import contextlib
import ctypes as C
import threading
import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from support.fuzz_cases import Case
from support.fuzz_values import (
    DEVICE_BYTES,
    KNOWN,
    PLACES,
    SECOND_RANK,
    UNMAPPED,
    Finding,
    Memory,
    dense,
    named,
    right,
    scalars,
)
from support.vendor import Soft
from xmoe.errors import AclError, LibraryError, XmoeError
from xmoe.kernels.acl import status
from xmoe.kernels.acl.handles import AclEvent, AclStream, DeviceMemory, TensorDesc, TensorListDesc
from xmoe.kernels.acl.loader import load
from xmoe.kernels.acl.op import launch, prepare
from xmoe.kernels.acl.toolkit import find_toolkit
from xmoe.kernels.acl.variants import NEUTRAL, VARIANTS


class Contract:
    """Cases through xmoe.kernels.acl."""

    def __init__(self, variant: str) -> None:
        self.runtime = load(find_toolkit())
        self.symbols = self.runtime.require_mega_moe(abi_variant=variant)
        self.variant = VARIANTS[variant]
        acl = self.runtime.acl
        code = acl.aclInit(self.runtime.ffi.NULL)
        if code not in (0, status.REPEAT_INITIALIZE):
            status.check(self.runtime, code, "aclInit")
        status.check(self.runtime, acl.aclrtSetDevice(0), "aclrtSetDevice")
        self.device = DeviceMemory(self.runtime, DEVICE_BYTES)
        self.memory = Memory(self.device.handle)
        self.stream = AclStream(self.runtime)
        self.workspace = DeviceMemory(self.runtime, 1 << 20)

    def run(self, case: Case) -> str:
        self.memory.fill(case)
        with contextlib.ExitStack() as stack:
            try:
                if case.changes and case.changes[0][0].startswith("call "):
                    return self._other(case, stack)
                return self._call(case, stack)
            except LibraryError as error:
                raise Finding(f"a library error where there was none: {error}") from error
            except XmoeError as error:
                return named(error)

    def _desc(self, key: str, case: Case, changes: tuple[Any, ...], stack: Any) -> TensorDesc:
        f = self.memory.fields(key, case, changes)
        made = TensorDesc(
            self.runtime, f["ptr"], f["shape"], f["strides"], dtype=f["dtype"],
            format=f["format"], storage=f["storage"], offset=f["offset"],
        )  # fmt: skip
        stack.enter_context(made)
        return made

    def _list(self, key: str, case: Case, specs: list[Any], stack: Any) -> TensorListDesc:
        members = [self._value(key, "T", spec, case, stack) for spec in specs]
        made = TensorListDesc(self.runtime, members)
        stack.enter_context(made)
        return made

    def _value(self, key: str, kind: str, spec: tuple[Any, ...], case: Case, stack: Any) -> Any:
        word = spec[0]
        count = case.sizes[4]
        if word == "null":
            return None
        if word == "right" or (word == "same as x" and kind != "L"):
            of = "x" if word == "same as x" else key
            if kind == "L":
                return self._list(key, case, [("right",)] * count, stack)
            return self._desc(of, case, (), stack)
        if word == "dead":
            made = self._desc(key if kind != "L" else "x", case, (), stack)
            made.close()
            return made
        if word == "tensor":
            return self._desc(key, case, spec[1], stack)
        if word in ("list", "longer"):
            return self._list("x", case, [("right",)] * (1 if word == "list" else count + 1), stack)
        if word == "list of":
            return self._list(key, case, spec[1], stack)
        if word == "tensor as list":
            return self._desc("x", case, (), stack)
        return spec[1]

    def _call(self, case: Case, stack: contextlib.ExitStack) -> str:
        changed = dict(case.changes)
        args: dict[str, Any] = {}
        values = scalars(case)
        for param in self.variant.params:
            key, kind = param.key, param.kind
            if kind in ("W", "X"):
                continue
            if key in changed:
                args[key] = self._value(key, kind, changed[key], case, stack)
            elif key in values:
                args[key] = values[key]
            elif param.optional or key in NEUTRAL:
                args[key] = NEUTRAL.get(key, (None,))[0]
            else:
                args[key] = self._value(key, kind, ("right",), case, stack)
        for key, spec in case.changes:
            if spec[0] == "junk":
                args[key] = spec[1]
        prepared = prepare(self.runtime, self.symbols, args, repeatable=case.then == "twice")
        stack.enter_context(prepared)
        return self._then(case, prepared)

    def _then(self, case: Case, prepared: Any) -> str:
        if case.then == "destroy":
            return "accepted"
        number = case.sizes[0] + len(case.changes)
        if prepared.workspace_bytes > self.workspace.nbytes:
            return "accepted, large"
        workspace: Any = self.workspace
        stream: Any = self.stream
        if case.then == "workspace":
            odd = (None, 0, 1, -1, UNMAPPED, 1 << 64, self.device.handle + 32)
            workspace = odd[number % len(odd)]
        if case.then == "stream":
            stream = (1, -1, UNMAPPED, 1 << 64, self.memory.base)[number % 5]
        try:
            for _ in range(2 if case.then == "twice" else 1):
                launch(prepared, workspace, stream)
        except XmoeError as error:
            return f"launch {named(error)}"
        return f"ran {self._settle()}"

    def _settle(self) -> str:
        try:
            self.stream.synchronize(20)
        except AclError as error:
            self.stream.close()
            self.stream = AclStream(self.runtime)
            return named(error)
        return "0"

    def _other(self, case: Case, stack: contextlib.ExitStack) -> str:
        word, spec = case.changes[0]
        if word == "call tensor":
            self._desc("x", case, spec[1], stack)
        elif word == "call tensors":
            self._value("weight1", "L", spec, case, stack)
        elif word == "call memory":
            which, first, second = spec
            if which == 0 and not (1 << 20 < first < 1 << 37):
                stack.enter_context(DeviceMemory(self.runtime, first))
            elif which == 1:
                self.device.write(bytes(abs(first) % 100_000), second)
            else:
                self.device.read(first % 100_000 if which == 2 else first, second)
        elif word == "call stream":
            which, first, _ = spec
            event = stack.enter_context(AclEvent(self.runtime))
            if which % 2:
                event.record(self.stream)
            # Not a wait for minutes: what is queued is done within milliseconds.
            event.synchronize(max(-5, min(first, 20)))
        return "accepted"


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
            storage = [_extent(shape, strides, f["offset"])]
        if len(strides) != len(shape):  # the C function has one length for both
            strides = [*strides, *[0] * len(shape)][: len(shape)]
        made: int | None = self.soft.nnop.aclCreateTensor(
            _int64s(shape), C.c_uint64(len(shape)), _int32(f["dtype"]), _int64s(strides),
            C.c_int64(_wrap(f["offset"])), _int32(f["format"]), _int64s(storage),
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
                handle = self.soft.floats(*map(_float32, spec[1]))
            stack.callback(self.soft.nnop.aclDestroyFloatArray, handle)
            return handle.value
        if word == "null":
            return None
        if kind == "S":
            return spec[1].encode()
        return _wrap(spec[1]) if kind == "i64" else _float32(spec[1])

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


class SecondRank(Soft):
    """The libraries once more in one process: they are initialised already."""

    def check(self, call: str, code: int) -> None:
        if call != "aclInit" or code != status.REPEAT_INITIALIZE:
            super().check(call, code)


class Pair:
    """A communicator of two ranks, both in this process; rank 1 lives in a thread."""

    def __init__(self, vendor: Path, variant: str) -> None:
        self.contexts: list[bytes] = [b"", b""]
        self.comms: list[C.c_void_p] = [C.c_void_p(), C.c_void_p()]
        self._vendor, self._variant = vendor, variant
        self.stream: C.c_void_p | None = None
        self._error = ""
        self._run(self._join_both)

    def _run(self, fn: Callable[[], None]) -> None:
        """In a thread of rank 1, whose current device must not be that of the main thread."""

        def body() -> None:
            try:
                fn()
            except Exception as error:
                self._error = f"{type(error).__name__}: {error}"

        thread = threading.Thread(target=body)
        thread.start()
        thread.join(30)
        if thread.is_alive():
            raise Finding("rank 1 is stuck")
        if self._error:
            raise Finding(f"rank 1: {self._error}")

    def _join_both(self) -> None:
        hccl = C.CDLL(str(self._libs() / "libhccl.so"))
        acl = C.CDLL(str(self._libs() / "libascendcl.so"))
        root = C.create_string_buffer(4108)
        assert acl.aclrtSetDevice(1) == 0 and hccl.HcclGetRootInfo(root) == 0
        ends: list[int] = []

        def zero() -> None:
            assert acl.aclrtSetDevice(0) == 0
            ends.append(hccl.HcclCommInitRootInfo(2, root, 0, C.byref(self.comms[0])))
            self.contexts[0] = self._context(hccl, self.comms[0])

        thread = threading.Thread(target=zero)
        thread.start()
        ends.append(hccl.HcclCommInitRootInfo(2, root, 1, C.byref(self.comms[1])))
        thread.join(30)
        assert ends == [0, 0], ends
        self.contexts[1] = self._context(hccl, self.comms[1])

    @staticmethod
    def _libs() -> Path:
        from support.vendor import LIB64

        return LIB64

    @staticmethod
    def _context(hccl: C.CDLL, comm: C.c_void_p) -> bytes:
        args, made = C.c_void_p(), C.c_void_p()
        assert hccl.HcclKfcAllocOpArgs(C.byref(args)) == 0
        assert hccl.HcclKfcOpArgsSetCommEngine(args, C.c_uint8(4)) == 0
        text = C.create_string_buffer(b"AlltoAll=level0:fullmesh;level1:pairwise")
        assert hccl.HcclKfcOpArgsSetAlgConfig(args, text) == 0
        assert hccl.HcclCreateOpResCtx(comm, C.c_uint8(8), args, C.byref(made)) == 0
        assert hccl.HcclKfcFreeOpArgs(args) == 0
        return bytes(8) + (made.value or 0).to_bytes(8, "little")

    def join(self, case: Case, memory: Memory) -> None:
        """Launch the accepted call on rank 1."""

        def launch_one() -> None:
            soft = SecondRank(1, self._vendor, self._variant)
            shift = SECOND_RANK
            memory.fill(case, shift)
            C.memmove(memory.base + shift + PLACES["context"], self.contexts[1], 16)
            args: dict[str, Any] = {}
            shared = {"yOut": "yOut", "expertTokenNumsOut": "expertTokenNumsOut"}
            for key in ("context", "x", "topkIds", "topkWeights", *shared):
                f = right(key, case.sizes, memory.base + shift)
                args[key] = _plain(soft, f)
            for key in ("weight1", "weight2"):
                f = right(key, case.sizes, memory.base)
                members = [_plain(soft, f) for _ in range(case.sizes[4])]
                handles = (C.c_void_p * len(members))(*members)
                args[key] = soft.nnop.aclCreateTensorList(handles, C.c_uint64(len(members)))
            values = scalars(case)
            for name in ("moeExpertNum", "epWorldSize", "cclBufferSize"):
                args[name] = values[name]
            self.stream = soft.stream()
            code, size, executor = soft.prepare(args)
            if code == 0:
                workspace = soft.malloc(max(size, 64))
                soft.check("launch", soft.phase2(workspace, max(size, 64), executor, self.stream))

        self._run(launch_one)

    def settle(self) -> str:
        acl = C.CDLL(str(self._libs() / "libascendcl.so"))
        if self.stream is None:
            return "0"
        code = acl.aclrtSynchronizeStreamWithTimeout(self.stream, 20_000)
        acl.aclrtDestroyStream(self.stream)
        self.stream = None
        return str(code)

    def close(self) -> None:
        hccl = C.CDLL(str(self._libs() / "libhccl.so"))
        for comm in self.comms:
            hccl.HcclCommDestroy(comm)


def _plain(soft: Soft, f: dict[str, Any]) -> int:
    shape = f["shape"]
    made: int = soft.nnop.aclCreateTensor(
        _int64s(shape), C.c_uint64(len(shape)), f["dtype"], _int64s(dense(shape)), C.c_int64(0),
        f["format"], _int64s(shape), C.c_uint64(len(shape)), C.c_void_p(f["ptr"]),
    )  # fmt: skip
    return made


def _wrap(value: int) -> int:
    return C.c_int64(value % (1 << 64)).value


def _int32(value: int) -> C.c_int32:
    return C.c_int32(value % (1 << 32))


def _int64s(values: Any) -> Any:
    return (C.c_int64 * max(1, len(values)))(*(_wrap(v) for v in values))


def _extent(shape: list[int], strides: list[int], offset: int) -> int:
    return _wrap(offset + 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=False)))


def _float32(value: float) -> float:
    try:
        return C.c_float(value).value
    except OverflowError:
        return float("inf")
