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
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from xmoe.errors import ConfigError, LibraryError
from xmoe.kernels.acl.dtypes import BITS, dtype_code, format_code
from xmoe.kernels.acl.handles import DATA_ALIGNMENT_BYTES
from xmoe.kernels.acl.op import LAUNCH_CALL, WORKSPACE_CALL, check_arguments, convert
from xmoe.kernels.acl.status import check, make_error

if TYPE_CHECKING:
    from xmoe.kernels.acl.loader import Functions, Runtime
    from xmoe.kernels.acl.vendor import MegaMoeSymbols

STEP_TENSORS = {
    "x": "bfloat16",
    "topkIds": "int32",
    "topkWeights": "float32",
    "xActiveMaskOptional": "int8",
    "yOut": "bfloat16",
    "expertTokenNumsOut": "int32",
}
"""Parameters that change with every step, in the order of the native plan, and their types."""

_CALLS = (
    "aclCreateTensor",
    "aclCreateTensorList",
    "aclDestroyTensor or aclDestroyTensorList",
    "aclSetRawTensorAddr, aclSetInputTensorAddr or aclSetOutputTensorAddr",
    WORKSPACE_CALL,
    LAUNCH_CALL,
    "aclDestroyAclOpExecutor",
)
_COUNTERS = ("descriptors", "phase_one", "launches", "reused", "evicted")
_MAX_MEMBERS = 4096


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


class LaunchPlan:
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
        self._lib = lib = runtime.native.lib
        self._step = lib.xm_plan_step
        self._keep = contextlib.ExitStack()
        ffi_null = runtime.ffi.NULL
        check_arguments(variant, {**constants, **dict.fromkeys(STEP_TENSORS)})
        compiled = lib.xm_plan_signature(variant.id.encode())
        if compiled == ffi_null or runtime.ffi.string(compiled).decode() != variant.signature:
            raise LibraryError(
                f"the native module was compiled from another argument list of ABI variant "
                f"{variant.id} than variants.py has now; allowed: the same one; run "
                f"kernels/acl/build.py, or install xmoe again"
            )
        types = [dtype_code(name) for name in STEP_TENSORS.values()]
        functions = _functions(runtime, symbols)
        made = lib.xm_plan_new(
            variant.id.encode(), functions, reuse_executor, hidden, local_experts, types
        )
        if made == ffi_null:
            raise MemoryError("a launch plan could not be allocated")
        # A thread may still be on its way into a plan that another closes.
        self._native = runtime.ffi.gc(made, lib.xm_plan_free)
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            self._slots: dict[str, int] = {}
            for slot, param in enumerate(variant.params):
                if param.kind not in ("W", "X"):
                    self._slots[param.key] = slot
                    self._set(slot, param, constants)
            undo.pop_all()

    def _set(self, slot: int, param: Any, constants: Mapping[str, object]) -> None:
        lib, native = self._lib, self._native
        if param.key in STEP_TENSORS:
            status = lib.xm_plan_set_step(native, slot, list(STEP_TENSORS).index(param.key))
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
        _check_packed(param, packed)
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
        if status:
            self._more(status, stream, workspace)

    def _more(self, status: int, stream: int, workspace: Workspace) -> None:
        lib, native = self._lib, self._native
        if status == lib.XM_MORE_WORKSPACE:
            # The step holds the plan for this thread until it is resumed or abandoned.
            try:
                workspace.take(lib.xm_plan_need(native))
                address, nbytes = workspace.address, workspace.nbytes
            except BaseException:
                lib.xm_plan_abandon(native)
                raise
            status = lib.xm_plan_resume(native, address, nbytes, stream)
        if status:
            self._raise(status)

    def rebind(self, key: str, address: int) -> None:
        """A constant's memory moved: make its descriptors anew, and forget what was prepared with
        the old address. Launches that are queued already still use the old memory."""
        status = self._lib.xm_plan_rebind(self._native, self._slots.get(key, -1), address)
        if status:
            self._raise(status)

    def rebuild(self) -> None:
        """Make every descriptor of the plan anew, as if nothing had been cached."""
        status = self._lib.xm_plan_rebuild(self._native)
        if status:
            self._raise(status)

    @property
    def workspace_bytes(self) -> int:
        """What the last step needed."""
        return 0 if self.closed else int(self._lib.xm_plan_need(self._native))

    @property
    def reuses_executor(self) -> bool:
        """Whether op_executors are kept: asked for, possible, and not refused by the vendor."""
        return not self.closed and bool(self._lib.xm_plan_reuses(self._native))

    @property
    def reuse_refused(self) -> int:
        """The vendor's status when it refused to make an op_executor repeatable, else 0."""
        return 0 if self.closed else int(self._lib.xm_plan_reuse_refused(self._native))

    def counters(self) -> dict[str, int]:
        """What was done so far: descriptors made, phase one asked, launches, launches of a kept
        op_executor, shapes evicted; and `shapes` held now."""
        if self.closed:
            return {}
        out = self._runtime.ffi.new("uint64_t[]", len(_COUNTERS))
        self._lib.xm_plan_counters(self._native, out)
        found = dict(zip(_COUNTERS, list(out), strict=True))
        return {**found, "shapes": int(self._lib.xm_plan_buckets(self._native))}

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return bool(self._lib.xm_plan_closed(self._native))

    def close(self) -> None:
        """Destroy all descriptors. After the last launch ended. Twice is harmless.

        Raises:
            AclError: the vendor refuses; the plan counts as closed all the same.
        """
        with self._keep:
            status = self._lib.xm_plan_close(self._native)
            if status:
                self._raise(status)

    def __enter__(self) -> LaunchPlan:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _raise(self, status: int) -> None:
        """The error for a native status."""
        lib, names = self._lib, list(STEP_TENSORS)
        if status > 0:
            check(self._runtime, status, _CALLS[lib.xm_plan_failed_call(self._native)])
        if status == lib.XM_CLOSED:
            raise ConfigError(
                "launch plan is closed; allowed: launches before close(); next: make a new one"
            )
        if status == lib.XM_NO_EXECUTOR:
            raise make_error(self._runtime, 561101, WORKSPACE_CALL)
        if status <= lib.XM_SHARED:
            first, second = divmod(lib.XM_SHARED - status, 8)
            raise ConfigError(
                f"{names[first]} and {names[second]} share memory; allowed: separate tensors; "
                f"next: clone one of them"
            )
        if status <= lib.XM_MISALIGNED:
            raise ConfigError(
                f"{names[lib.XM_MISALIGNED - status]} does not start at a multiple of "
                f"{DATA_ALIGNMENT_BYTES} bytes; allowed: multiples of {DATA_ALIGNMENT_BYTES}; "
                f"next: copy the slice to memory of its own with .clone()"
            )
        if status == lib.XM_MORE_WORKSPACE:
            raise ConfigError(
                f"{LAUNCH_CALL} got no workspace; allowed: {self._lib.xm_plan_need(self._native)} "
                f"bytes of device memory; allocate what is asked for"
            )
        raise ConfigError(
            f"launch plan: the native part answered {status}; allowed: a parameter of ABI variant "
            f"{self.symbols.require_variant().id}; next: check the key"
        )


def _functions(runtime: Runtime, symbols: MegaMoeSymbols) -> Any:
    """Addresses of all calls a plan makes. The last three exist from some CANN on."""
    nnop, ffi = runtime.nnop, runtime.ffi
    table = ffi.new("xm_functions*")
    table.create_tensor = _address(nnop, "aclCreateTensor")
    table.destroy_tensor = _address(nnop, "aclDestroyTensor")
    table.create_list = _address(nnop, "aclCreateTensorList")
    table.destroy_list = _address(nnop, "aclDestroyTensorList")
    optional = {
        "set_repeatable": "aclSetAclOpExecutorRepeatable",
        "destroy_executor": "aclDestroyAclOpExecutor",
        "set_raw_address": "aclSetRawTensorAddr",
        "set_input_address": "aclSetInputTensorAddr",
        "set_output_address": "aclSetOutputTensorAddr",
    }
    for field, name in optional.items():
        setattr(table, field, _address(nnop, name) if nnop.has(name) else ffi.NULL)
    table.phase_one = ffi.cast("void*", symbols.workspace_addr)
    table.phase_two = ffi.cast("void*", symbols.launch_addr)
    return table


def _address(functions: Functions, name: str) -> Any:
    """The C function behind a bound call."""
    return getattr(functions, name).args[0]


def _check_packed(param: Any, packed: Packed) -> None:
    if packed.is_list != (param.kind == "L"):
        raise ConfigError(
            f"argument {param.key} got {'a list' if packed.is_list else 'a single tensor'}; "
            f"allowed: {'a list' if param.kind == 'L' else 'a single tensor'}; set is_list"
        )
    step = packed.step()
    aligned = packed.address % DATA_ALIGNMENT_BYTES == 0 and (
        packed.count == 1 or step % DATA_ALIGNMENT_BYTES == 0
    )
    if packed.address <= 0 or not aligned or not 1 <= packed.count <= _MAX_MEMBERS:
        raise ConfigError(
            f"argument {param.key}: {packed.count} tensors from address {packed.address:#x} on, "
            f"{step} bytes apart; allowed: 1..{_MAX_MEMBERS}, each at a multiple of "
            f"{DATA_ALIGNMENT_BYTES} bytes; copy them to memory of their own"
        )
