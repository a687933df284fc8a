# SPDX-License-Identifier: Apache-2.0
"""A compiled launch plan: one layer's MegaMoe call with everything constant made once.

    plan = LaunchPlan(runtime, symbols, constants, hidden=H, local_experts=L)
    plan.step(T, K, x, ids, weights, mask, y, counts, stream, workspace)

A step is one compiled call: it fills in the descriptors of the small tensors, asks phase one, and
launches phase two (`native/plan.c`). What is cached, by shape and bounded, are those descriptors;
with `reuse_executor` the op_executor and the workspace size too, so that phase one is asked once
per shape. The argument list comes from the variant table, as in `xmoe.kernels.acl.op`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from xmoe.errors import ConfigError
from xmoe.kernels.acl.dtypes import BITS, dtype_code, format_code
from xmoe.kernels.acl.handles import DATA_ALIGNMENT_BYTES
from xmoe.kernels.acl.native_plan import SECOND, TOKENS, NativePlan, StepTensor, function_table
from xmoe.kernels.acl.op import LAUNCH_CALL, check_arguments, convert
from xmoe.kernels.acl.status import check

if TYPE_CHECKING:
    from xmoe.kernels.acl.loader import Runtime
    from xmoe.kernels.acl.vendor import MegaMoeSymbols

STEP_TENSORS = (
    "x",
    "topkIds",
    "topkWeights",
    "xActiveMaskOptional",
    "yOut",
    "expertTokenNumsOut",
)
"""Parameters that change with every step, in the order in which a step gives them."""

_MAX_MEMBERS, _MAX_DIMS = 4096, 8


class Workspace(Protocol):
    """Where a step finds scratch memory. The block stays valid until the next `take`."""

    address: int
    nbytes: int

    def take(self, nbytes: int) -> None:
        """Make the block at least this large."""


@dataclass(frozen=True)
class Packed:
    """Constant tensors that lie one behind the other in one piece of memory: a weight list, or with
    `is_list` False a single tensor.

    address: of the first, 32-byte aligned. shape: of each, contiguous. step_bytes: from one to the
    next; None for the size of one. storage: sizes of the storage where a format needs others.
    """

    address: int
    shape: tuple[int, ...]
    dtype: str | int
    count: int = 1
    is_list: bool = True
    step_bytes: int | None = None
    format: str | int = "ND"
    storage: tuple[int, ...] | None = None

    def step(self) -> int:
        """Bytes from one member to the next."""
        if self.step_bytes is not None:
            return self.step_bytes
        items = 1
        for size in self.storage or self.shape:
            items *= size
        return items * BITS[dtype_code(self.dtype)] // 8


def _step_tensors(hidden: int, local_experts: int) -> tuple[StepTensor, ...]:
    """In every variant known the inner operator's first four inputs are context, x, ids, weights,
    and its outputs are y and counts. The mask stands behind optional lists: no index is certain for
    it, so launches with a mask never reuse an executor."""
    for name, size in (("hidden", hidden), ("local_experts", local_experts)):
        if not isinstance(size, int):
            raise ConfigError(
                f"launch plan: {name}={size!r}; allowed: a whole number; next: take the layer's"
            )
    rows, pairs = (TOKENS, hidden), (TOKENS, SECOND)
    x, ids, weights, mask, y, counts = STEP_TENSORS
    return (
        StepTensor(x, "bfloat16", rows, executor_index=1),
        StepTensor(ids, "int32", pairs, executor_index=2),
        StepTensor(weights, "float32", pairs, executor_index=3),
        StepTensor(mask, "int8", (TOKENS,), optional=True),
        StepTensor(y, "bfloat16", rows, is_output=True, executor_index=0),
        StepTensor(counts, "int32", (local_experts,), is_output=True, executor_index=1),
    )


class LaunchPlan(NativePlan):
    """See the module's text. Steps of one plan exclude each other; any thread may make them, with
    the device bound.

    Args:
        constants: value by parameter key for all parameters but those of `STEP_TENSORS`: `Packed`
            for tensors and lists, else as `xmoe.kernels.acl.op.prepare` takes them.
        hidden: columns of x and y. local_experts: length of the counts.
        reuse_executor: keep one op_executor per shape. Only for operators known to allow it. Has
            no effect where the library cannot move addresses, or refuses.

    Raises:
        ConfigError: a missing, unknown or mistyped constant.
        UnsupportedError: a value that the variant has no parameter for.
        LibraryError: the variant is not known, or the native module was compiled from another
            argument list.
    """

    def __init__(
        self,
        runtime: Runtime,
        symbols: MegaMoeSymbols,
        constants: Mapping[str, object],
        *,
        hidden: int,
        local_experts: int,
        reuse_executor: bool = False,
    ) -> None:
        variant = symbols.require_variant()
        self.symbols = symbols
        self._runtime = runtime
        self._keep = contextlib.ExitStack()
        check_arguments(variant, {**constants, **dict.fromkeys(STEP_TENSORS)})
        super().__init__(
            runtime.native,
            variant.id,
            variant.signature,
            _functions(runtime, symbols),
            _step_tensors(hidden, local_experts),
            LAUNCH_CALL,
            lambda status, call: check(runtime, status, call),
            reuse_executor=reuse_executor,
        )
        self._step = self._lib.xm_plan_step
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            self._slots: dict[str, int] = {}
            self._packed: dict[str, Packed] = {}
            for slot, param in enumerate(variant.params):
                if param.kind not in ("W", "X"):
                    self._slots[param.key] = slot
                    self._set(slot, param, constants)
            undo.pop_all()

    def _set(self, slot: int, param: Any, constants: Mapping[str, object]) -> None:
        lib, native = self._lib, self._native
        if param.key in STEP_TENSORS:
            status = lib.xm_plan_set_step(native, slot, STEP_TENSORS.index(param.key))
        elif isinstance(constants[param.key], Packed) and param.kind in ("T", "L"):
            status = self._set_packed(slot, param, constants[param.key])
        else:
            value = convert(self._runtime, param, constants[param.key], self._keep)
            if param.kind == "i64":
                status = lib.xm_plan_set_int(native, slot, value)
            elif param.kind == "F":
                status = lib.xm_plan_set_float(native, slot, value)
            else:
                status = lib.xm_plan_set_pointer(native, slot, value)
        if status != 0:
            self._raise(status)

    def _set_packed(self, slot: int, param: Any, packed: Any) -> int:
        if packed.is_list != (param.kind == "L"):
            raise ConfigError(
                f"argument {param.key} got {'a list' if packed.is_list else 'a single tensor'}; "
                f"allowed: {'a list' if param.kind == 'L' else 'a single tensor'}; set is_list"
            )
        _check_packed(param.key, packed)
        self._packed[param.key] = packed
        storage = packed.storage or packed.shape
        return int(
            self._lib.xm_plan_set_packed(
                self._native,
                slot,
                packed.is_list,
                packed.address,
                packed.count,
                packed.step(),
                len(packed.shape),
                packed.shape,
                dtype_code(packed.dtype),
                format_code(packed.format),
                len(storage),
                storage,
            )
        )

    def step(
        self,
        tokens: int,
        topk: int,
        x: int,
        ids: int,
        weights: int,
        mask: int,
        y: int,
        counts: int,
        stream: int,
        workspace: Workspace,
    ) -> None:
        """One launch. Queues it and returns before it is done. Addresses of contiguous tensors
        x [T, H], ids and weights [T, K], mask [T] (0 for none), y [T, H], counts [L].

        Raises:
            ConfigError: an address is not aligned, two tensors overlap, or the plan is closed;
                nothing was queued.
            AclError: the vendor refused.
        """
        # A step that asks for workspace holds the plan for this thread until it is resumed or
        # abandoned. An interrupt may come before its status is known here.
        try:
            try:
                status = self._step(
                    self._native,
                    tokens,
                    topk,
                    x,
                    ids,
                    weights,
                    mask,
                    y,
                    counts,
                    workspace.address,
                    workspace.nbytes,
                    stream,
                )
            except (TypeError, OverflowError, AttributeError) as error:
                # Of an argument that is no number of 64 bits; the native part was not entered.
                raise ConfigError(
                    f"a step of the launch plan got something else than numbers: {error}; "
                    f"allowed: whole numbers below 2**63 as sizes, addresses below 2**64, and a "
                    f"workspace; next: correct the caller"
                ) from error
            if status:
                status = self._more(status, stream, workspace)
        except BaseException:
            self._lib.xm_plan_abandon(self._native)
            raise
        if status:
            self._raise(status)

    def _more(self, status: int, stream: int, workspace: Workspace) -> int:
        lib, native = self._lib, self._native
        if status != lib.XM_MORE_WORKSPACE:
            return status
        workspace.take(lib.xm_plan_need(native))
        address, nbytes = _unsigned(workspace.address), _unsigned(workspace.nbytes)
        return int(lib.xm_plan_resume(native, address, nbytes, stream))

    def rebind(self, key: str, address: int) -> None:
        """A constant's memory moved: make its descriptors anew, and forget what was prepared with
        the old address. Launches that are queued already still use the old memory."""
        if not isinstance(key, str) or key not in self._packed:
            raise ConfigError(
                f"rebind of {key!r}; allowed: {', '.join(self._packed) or 'nothing'}; next: name a "
                f"constant that was given as Packed"
            )
        _check_packed(key, dataclasses.replace(self._packed[key], address=address))
        status = self._lib.xm_plan_rebind(self._native, self._slots[key], address)
        if status:
            self._raise(status)

    def rebuild(self) -> None:
        """Make every descriptor of the plan anew, as if nothing had been cached."""
        status = self._lib.xm_plan_rebuild(self._native)
        if status:
            self._raise(status)

    @property
    def reuses_executor(self) -> bool:
        """Whether op_executors are kept: asked for, possible, and not refused by the vendor."""
        return not self.closed and bool(self._lib.xm_plan_reuses(self._native))

    @property
    def reuse_refused(self) -> int:
        """The vendor's status when it refused to make an op_executor repeatable, else 0."""
        return 0 if self.closed else int(self._lib.xm_plan_reuse_refused(self._native))

    def close(self) -> None:
        """See NativePlan; what the constants needed goes too. After the last launch ended."""
        with self._keep:
            super().close()


def _functions(runtime: Runtime, symbols: MegaMoeSymbols) -> Any:
    nnop = runtime.nnop

    def find(name: str) -> Any:
        # The C function behind a bound call.
        return getattr(nnop, name).args[0] if nnop.has(name) else runtime.ffi.NULL

    return function_table(runtime.ffi, find, symbols.workspace_addr, symbols.launch_addr)


def _unsigned(value: object) -> int:
    """A number that C takes as unsigned 64 bits."""
    if isinstance(value, int) and 0 <= value < 1 << 64:
        return value
    raise ConfigError(
        f"the workspace has the address or size {value!r}; allowed: whole numbers below 2**64; "
        f"next: correct its take()"
    )


def _check_packed(key: str, packed: Packed) -> None:
    """Everything that C would take on trust."""
    for what, sizes in (("shape", packed.shape), ("storage", packed.storage or ())):
        if not _are_sizes(sizes):
            raise ConfigError(
                f"argument {key}: {what} {sizes!r}; allowed: at most {_MAX_DIMS} whole numbers, "
                f"none below 0, of less than 2**59 elements; next: correct it"
            )
    dtype_code(packed.dtype)
    format_code(packed.format)
    numbers = (packed.address, packed.count, 0 if packed.step_bytes is None else packed.step_bytes)
    if all(isinstance(number, int) and not isinstance(number, bool) for number in numbers):
        step, last = packed.step(), packed.count - 1
        aligned = packed.address % DATA_ALIGNMENT_BYTES == 0 and (
            last == 0 or step % DATA_ALIGNMENT_BYTES == 0
        )
        inside = packed.address > 0 and step >= 0 and packed.address + last * step < 1 << 64
        if aligned and inside and step < 1 << 64 and 0 <= last < _MAX_MEMBERS:
            return
    raise ConfigError(
        f"argument {key}: {packed.count!r} tensors from address {packed.address!r} on, "
        f"{packed.step_bytes!r} bytes apart (None: one behind the other); allowed: "
        f"1..{_MAX_MEMBERS}, each at a multiple of {DATA_ALIGNMENT_BYTES} bytes, all below 2**64; "
        f"copy them to memory of their own"
    )


def _are_sizes(sizes: object) -> bool:
    return (
        isinstance(sizes, (tuple, list))
        and len(sizes) <= _MAX_DIMS
        and all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in sizes)
        and math.prod(max(n, 1) for n in sizes) < 1 << 59
    )
