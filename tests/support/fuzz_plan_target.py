# SPDX-License-Identifier: Apache-2.0
"""Carries a fuzz case out through the compiled launch plan.

`run(case)` returns what became of the plan and of its last use ("make ConfigError", "step ok",
"step AclError 561002", ...) and raises Finding when a refusal has no name, when a count is wrong,
or when the plan stays locked. A crash or a hang is for the parent to see: use it in a child process
only. Addresses are mapped, null or noticeably not mapped, as everywhere in this fuzz.
"""

from __future__ import annotations

import contextlib
import ctypes as C
import threading
import zlib
from collections.abc import Callable
from typing import Any

from support.fuzz_pair import Pair
from support.fuzz_plan_cases import PlanCase, Spec
from support.fuzz_values import (
    DEVICE_BYTES,
    PLACES,
    UNMAPPED,
    Finding,
    Memory,
    named,
    right,
    scalars,
)
from xmoe.errors import AclError, ConfigError, LibraryError, XmoeError
from xmoe.kernels.acl import status
from xmoe.kernels.acl.handles import AclStream, DeviceMemory
from xmoe.kernels.acl.loader import load
from xmoe.kernels.acl.plan import STEP_TENSORS, LaunchPlan, Packed
from xmoe.kernels.acl.toolkit import find_toolkit
from xmoe.kernels.acl.variants import NEUTRAL, VARIANTS

LAST_PAGE = (1 << 64) - 4096
WORKSPACE_BYTES = 1 << 20
LOCKED_S = 20.0


class TakeFailed(Exception):
    """What a workspace raises that cannot grow; it has to come out of the step as it is."""


class Scratch:
    """A step's workspace; `kind` says what is odd about it."""

    def __init__(self, target: Plan, case: PlanCase, kind: str, plan: LaunchPlan) -> None:
        self.address: Any = 0
        self.nbytes: Any = 0
        self._target, self._case, self._kind, self._plan = target, case, kind, plan
        self._odd: dict[str, tuple[Any, Any]] = {
            "null": (0, 1 << 40),
            "odd": (target.workspace.handle + 1, WORKSPACE_BYTES),
            "unmapped": (UNMAPPED, WORKSPACE_BYTES),
            "text": ("address", "bytes"),
            "huge": (1 << 64, 1 << 64),
            "negative": (-1, -1),
        }
        if kind in self._odd:
            self.address, self.nbytes = self._odd[kind]

    def take(self, nbytes: int) -> None:
        kind, plan = self._kind, self._plan
        if kind == "raises":
            raise TakeFailed("no memory")
        if kind == "stops":
            raise KeyboardInterrupt
        if kind == "steps":
            self._target.step(plan, self._case, (), "good")
        if kind == "closes":
            plan.close()
        if kind == "rebinds":
            plan.rebind("weight1", self._target.memory.base + PLACES["weight1"])
        if kind == "rebuilds":
            plan.rebuild()
        if kind.removeprefix("late ") in self._odd:
            self.address, self.nbytes = self._odd[kind.removeprefix("late ")]
        elif kind == "short":
            self.address, self.nbytes = self._target.workspace.handle, min(16, nbytes - 1)
        else:
            self._target.grow(nbytes)
            self.address, self.nbytes = self._target.workspace.handle, self._target.workspace.nbytes


class Plan:
    """Cases through xmoe.kernels.acl.plan."""

    def __init__(self, variant: str) -> None:
        self.runtime = load(find_toolkit())
        self.symbols = self.runtime.require_mega_moe(abi_variant=variant)
        self.variant = VARIANTS[variant]
        acl = self.runtime.acl
        code = acl.aclInit(self.runtime.ffi.NULL)
        if code not in (0, status.REPEAT_INITIALIZE):
            status.check(self.runtime, code, "aclInit")
        self.bind()
        self.device = DeviceMemory(self.runtime, DEVICE_BYTES)
        self.memory = Memory(self.device.handle)
        self.stream = AclStream(self.runtime)
        self.workspace = DeviceMemory(self.runtime, WORKSPACE_BYTES)
        self.group: Pair | None = None
        self.launched = 0

    def bind(self) -> None:
        """The device, for the calling thread."""
        status.check(self.runtime, self.runtime.acl.aclrtSetDevice(0), "aclrtSetDevice")

    def grow(self, nbytes: int) -> None:
        """A workspace of that size, which only a few shapes need."""
        if nbytes > self.workspace.nbytes:
            if nbytes > 1 << 28:
                raise TakeFailed(f"{nbytes} bytes")
            self.stream.synchronize(20)
            self.workspace.close()
            self.workspace = DeviceMemory(self.runtime, nbytes)

    def run(self, case: PlanCase) -> str:
        self.memory.fill(case)
        self.launched = 0
        deep = self._prepare_context(case)
        try:
            plan = self._make(case)
        except LibraryError as error:
            raise Finding(f"a library error where there was none: {error}") from error
        except XmoeError as error:
            return f"make {named(error)}"
        result = "unused"
        try:
            for use in case.uses:
                result = f"{use[0]} {self._attempt(lambda use=use: self._use(plan, case, use))}"
            if not plan.closed and plan.counters()["launches"] != self.launched:
                raise Finding(f"{self.launched} launches were accepted: {plan.counters()}")
            if deep and result == "step ok" and self.group is not None:
                self.group.join(case, self.memory)
        finally:
            self._close(plan, case)
        settled = self._settle()
        return f"{result} {settled}" if self.launched else result

    def _prepare_context(self, case: PlanCase) -> bool:
        """Some plain steps run to their end, with a second rank."""
        plain = not case.changes and case.uses == (("step", (), "good"),)
        deep = plain and zlib.crc32(repr(case).encode()) % 4 == 0
        if deep and self.group is None:
            self.group = Pair(self.symbols.library.path, self.variant.id)
        context = self.memory.base + PLACES["context"]
        C.memset(context, 0, 16)
        if deep and self.group is not None:
            C.memmove(context, self.group.contexts[0], 16)
        return deep

    # ---- making one

    def _make(self, case: PlanCase) -> LaunchPlan:
        changed = dict(case.changes)
        constants: dict[str, Any] = {}
        values = scalars(case)
        for param in self.variant.params:
            key = param.key
            if param.kind in ("W", "X") or key in STEP_TENSORS:
                continue
            if key in values:
                constants[key] = values[key]
            elif param.optional or key in NEUTRAL:
                constants[key] = NEUTRAL.get(key, (None,))[0]
            else:
                constants[key] = self._packed(param, case, ())
            if key in changed and changed[key][0] == "packed":
                constants[key] = self._packed(param, case, changed[key][1])
        how: dict[str, Any] = {
            "hidden": case.sizes[2],
            "local_experts": case.sizes[4],
            "reuse_executor": False,
        }
        for key, spec in case.changes:
            if spec[0] == "missing":
                constants.pop(key, None)
            elif spec[0] == "is":
                (how if key in how else constants)[key] = spec[1]
        return LaunchPlan(self.runtime, self.symbols, constants, **how)

    def _packed(self, param: Any, case: PlanCase, fields: tuple[Spec, ...]) -> Packed:
        f = right(param.key, case.sizes, self.memory.base)
        count = case.sizes[4] if param.kind == "L" else 1
        made: dict[str, Any] = {
            "address": f["ptr"], "shape": tuple(f["shape"]), "dtype": f["dtype"], "count": count,
            "is_list": param.kind == "L", "step_bytes": None, "format": f["format"],
            "storage": None,
        }  # fmt: skip
        for name, value in fields:
            addressed = name == "address" and isinstance(value, (str, int))
            made[name] = self._pointer(value, made["address"]) if addressed else value
        return Packed(**made)

    def _pointer(self, value: Any, right_at: int) -> Any:
        known = ("null", "odd", "unmapped", "device", "behind device")
        if value == "last page":
            return LAST_PAGE
        if isinstance(value, str) and value not in known:
            return value
        return self.memory.pointer(value, right_at)

    # ---- using one

    def _attempt(self, use: Callable[[], None]) -> str:
        try:
            use()
        except LibraryError as error:
            raise Finding(f"a library error where there was none: {error}") from error
        except XmoeError as error:
            return named(error)
        except TakeFailed:
            return "no workspace"
        except KeyboardInterrupt:
            return "interrupted"
        return "ok"

    def _use(self, plan: LaunchPlan, case: PlanCase, use: Spec) -> None:
        word = use[0]
        if word == "step":
            self.step(plan, case, use[1], use[2])
        elif word == "shapes":
            for tokens in range(1, use[1] + 1):
                changed = (("tokens", ("is", 1 + tokens % 16)), ("topk", ("is", 1 + tokens // 16)))
                self.step(plan, case, changed, "good")
            if not plan.closed and not 1 <= plan.counters()["shapes"] <= 16:
                raise Finding(f"shapes are not bounded: {plan.counters()}")
        elif word == "rebind":
            kind, value = use[2]
            at = self.memory.base + PLACES.get(use[1] if isinstance(use[1], str) else "", 0)
            plan.rebind(use[1], self._pointer(value, at) if kind == "pointer" else value)
        elif word == "rebuild":
            plan.rebuild()
        elif word == "close":
            plan.close()
        elif word == "look":
            seen = (plan.counters(), plan.workspace_bytes, plan.reuses_executor, plan.closed)
            if plan.reuse_refused < 0 or not isinstance(seen[1], int):
                raise Finding(f"odd state {seen}")
        else:
            self._race(plan, case, use[1])

    def step(self, plan: LaunchPlan, case: PlanCase, changed: Any, workspace: str) -> None:
        """One step; counts it when it was accepted."""
        tokens, topk = case.sizes[:2]
        args: dict[str, Any] = {"tokens": tokens, "topk": topk, "stream": self.stream.read()}
        for key in STEP_TENSORS:
            args[key] = right(key, case.sizes, self.memory.base)["ptr"]
        args["xActiveMaskOptional"] = 0
        for name, (kind, *values) in changed:
            if kind == "is":
                args[name] = values[0]
            elif kind == "pointer":
                at = self.memory.base + PLACES.get(name, 0)
                args[name] = self._pointer(values[0], at)
            else:
                args[name] = args[values[0]] + values[1] if isinstance(args[values[0]], int) else 0
        scratch = None if workspace == "none" else Scratch(self, case, workspace, plan)
        order = ("tokens", "topk", *STEP_TENSORS, "stream")
        plan.step(*(args[name] for name in order), scratch)
        self.launched += 1

    def _race(self, plan: LaunchPlan, case: PlanCase, count: int) -> None:
        """Steps from several threads while another one closes the plan."""
        said: list[str] = []
        lock, begin = threading.Lock(), threading.Barrier(count + 1)

        def body(use: Callable[[], None]) -> None:
            try:
                self.bind()
                begin.wait(LOCKED_S)
                for _ in range(3):
                    self._attempt(use)
            except Exception as error:
                with lock:
                    said.append(f"{type(error).__name__}: {error}")

        uses: list[Callable[[], None]] = [lambda: self.step(plan, case, (), "good")] * count
        uses.append(plan.close)
        threads = [threading.Thread(target=body, args=(use,), daemon=True) for use in uses]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LOCKED_S)
        if any(thread.is_alive() for thread in threads):
            raise Finding("a thread never came back from the plan")
        if said:
            raise Finding(f"in another thread: {said[0]}")

    def _close(self, plan: LaunchPlan, case: PlanCase) -> None:
        """From another thread: a step that left the plan locked would stop it."""
        errors: list[str] = []

        def close() -> None:
            try:
                plan.close()
                plan.close()
            except XmoeError as error:
                errors.append(named(error))
            except Exception as error:
                errors.append(f"{type(error).__name__}: {error}")

        thread = threading.Thread(target=close, daemon=True)
        thread.start()
        thread.join(LOCKED_S)
        if thread.is_alive():
            raise Finding("the plan stays locked")
        if errors:
            raise Finding(f"closing failed: {errors[0]}")
        with contextlib.suppress(ConfigError):
            self.step(plan, case, (), "good")
            raise Finding("a closed plan took a step")

    def _settle(self) -> str:
        other = "0"
        try:
            self.stream.synchronize(20)
            result = "0"
        except AclError as error:
            self.stream.close()
            self.stream = AclStream(self.runtime)
            result = named(error)
        if self.group is not None:
            other = self.group.settle()
            if result != "0" or other != "0":
                self.group.close()
                self.group = None
        return result
