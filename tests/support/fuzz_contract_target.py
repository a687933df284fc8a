# SPDX-License-Identifier: Apache-2.0
"""Carries a fuzz case out through the contract layer.

`run(case)` returns what became of it ("accepted", "ConfigError", "launch AclError 507035", ...) and
raises Finding when a refusal has no name. A crash or a hang is for the parent to see: use it in a
child process only.
"""

from __future__ import annotations

import contextlib
from typing import Any

from support.fuzz_cases import Case
from support.fuzz_values import DEVICE_BYTES, UNMAPPED, Finding, Memory, named, scalars
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
