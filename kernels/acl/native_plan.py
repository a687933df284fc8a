# SPDX-License-Identifier: Apache-2.0
"""What every compiled launch plan has: the native object, its descriptors, counters and errors.

    LaunchPlan  one MegaMoe layer             xmoe.kernels.acl.plan
    OpPlan      one operator of one group     xmoe.kernels.acl.op_plan

The work is done by `native/plan.c`. A plan is made for one argument list that was compiled in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from xmoe.errors import ConfigError, LibraryError
from xmoe.kernels.acl.dtypes import dtype_code
from xmoe.kernels.acl.handles import DATA_ALIGNMENT_BYTES

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

TOKENS, SECOND, NUMBER = "tokens", "second", "number"
"""Sizes, and values of parameters, that come with each step."""

_LARGEST_SIZE = 2**31 - 1
_COUNTERS = ("descriptors", "phase_one", "launches", "reused", "evicted")
_OPTIONAL = {
    "set_repeatable": "aclSetAclOpExecutorRepeatable",
    "destroy_executor": "aclDestroyAclOpExecutor",
    "set_raw_address": "aclSetRawTensorAddr",
    "set_input_address": "aclSetInputTensorAddr",
    "set_output_address": "aclSetOutputTensorAddr",
}


@dataclass(frozen=True)
class StepTensor:
    """A tensor that changes with each step.

    name: for messages. dtype: an ACL data type's name or code. shape: at most two sizes; TOKENS and
    SECOND stand for those that come with the step. optional: address 0 means absent. may_share: an
    input that other such inputs may overlap. executor_index: its place among the inputs or outputs
    of a kept op_executor; None when that is not certain.
    """

    name: str
    dtype: str | int
    shape: tuple[int | str, ...]
    is_output: bool = False
    optional: bool = False
    may_share: bool = False
    executor_index: int | None = None


def function_table(ffi: Any, find: Callable[[str], Any], phase_one: Any, phase_two: Any) -> Any:
    """Addresses of all calls that a plan makes. `find` gives the address of one of libnnopbase, or
    NULL; what moves addresses and keeps executors exists from some CANN on."""
    table = ffi.new("xm_functions*")
    table.create_tensor = find("aclCreateTensor")
    table.destroy_tensor = find("aclDestroyTensor")
    table.create_list = find("aclCreateTensorList")
    table.destroy_list = find("aclDestroyTensorList")
    for field, name in _OPTIONAL.items():
        setattr(table, field, find(name))
    table.phase_one = ffi.cast("void*", phase_one)
    table.phase_two = ffi.cast("void*", phase_two)
    return table


class NativePlan:
    """See the module's text. Steps of one plan exclude each other; any thread may make them.

    Args:
        native: the native module. list_id, signature: the argument list.
        tensors: in the order in which a step gives their addresses.
        call: the operator's name. check: raises for a status other than 0 of the call named.

    Raises:
        LibraryError: the native module was compiled from another argument list.
    """

    def __init__(
        self,
        native: Any,
        list_id: str,
        signature: str,
        functions: Any,
        tensors: Sequence[StepTensor],
        call: str,
        check: Callable[[int, str], None],
        *,
        reuse_executor: bool = False,
    ) -> None:
        self._ffi, self._lib = native.ffi, native.lib
        self._names = tuple(tensor.name for tensor in tensors)
        self._call = call
        self._check = check
        compiled = self._lib.xm_plan_signature(list_id.encode())
        if compiled == self._ffi.NULL or self._ffi.string(compiled).decode() != signature:
            raise LibraryError(
                f"the native module was compiled from another argument list of {list_id} than "
                f"the tables have now; allowed: the same one; run kernels/acl/build.py, or install "
                f"xmoe again"
            )
        shapes = self._ffi.new("xm_step_tensor[]", [self._describe(one) for one in tensors])
        made = self._lib.xm_plan_new(
            list_id.encode(), functions, reuse_executor, len(tensors), shapes
        )
        if made == self._ffi.NULL:
            raise MemoryError("a launch plan could not be allocated")
        # A thread may still be on its way into a plan that another closes.
        self._native = self._ffi.gc(made, self._lib.xm_plan_free)

    def _describe(self, tensor: StepTensor) -> dict[str, Any]:
        codes = {TOKENS: self._lib.XM_TOKENS, SECOND: self._lib.XM_SECOND}
        for size in tensor.shape:
            if isinstance(size, int) and not isinstance(size, bool):
                fits = 0 <= size <= _LARGEST_SIZE
            else:
                fits = size in (TOKENS, SECOND)
            if not fits:
                raise ConfigError(
                    f"step tensor {tensor.name} has the size {size!r}; allowed: whole numbers from "
                    f"0 to {_LARGEST_SIZE}; next: correct the layer's sizes"
                )
        if len(tensor.shape) > 2:
            raise ConfigError(
                f"step tensor {tensor.name} has the shape {tensor.shape}; allowed: at most 2 "
                f"sizes; next: merge some"
            )
        sizes = [codes[s] if isinstance(s, str) else s for s in tensor.shape]
        return {
            "dtype": dtype_code(tensor.dtype),
            "ndim": len(sizes),
            "dims": [*sizes, 1, 1][:2],
            "is_output": tensor.is_output,
            "optional": tensor.optional,
            "may_share": tensor.may_share,
            "executor_index": -1 if tensor.executor_index is None else tensor.executor_index,
        }

    @property
    def workspace_bytes(self) -> int:
        """What the last step needed."""
        return 0 if self.closed else int(self._lib.xm_plan_need(self._native))

    def counters(self) -> dict[str, int]:
        """What was done so far: descriptors made, phase one asked, launches, launches of a kept
        op_executor, shapes evicted; and `shapes` held now."""
        if self.closed:
            return {}
        out = self._ffi.new("uint64_t[]", len(_COUNTERS))
        self._lib.xm_plan_counters(self._native, out)
        found = dict(zip(_COUNTERS, list(out), strict=True))
        return {**found, "shapes": int(self._lib.xm_plan_buckets(self._native))}

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return bool(self._lib.xm_plan_closed(self._native))

    def close(self) -> None:
        """Destroy all descriptors. After the last launch was made. Twice is harmless.

        Raises:
            AclError: the vendor refuses; the plan counts as closed all the same.
        """
        status = self._lib.xm_plan_close(self._native)
        if status:
            self._raise(status)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _vendor_calls(self) -> tuple[str, ...]:
        """By the native plan's numbers."""
        return (
            "aclCreateTensor",
            "aclCreateTensorList",
            "aclDestroyTensor or aclDestroyTensorList",
            "aclSetRawTensorAddr, aclSetInputTensorAddr or aclSetOutputTensorAddr",
            self._call + "GetWorkspaceSize",
            self._call,
            "aclDestroyAclOpExecutor",
        )

    def _raise(self, status: int) -> None:
        """The error for a native status."""
        lib, names = self._lib, self._names
        if status > 0:
            self._check(status, self._vendor_calls()[lib.xm_plan_failed_call(self._native)])
        if status == lib.XM_CLOSED:
            raise ConfigError(
                "launch plan is closed; allowed: launches before close(); next: make a new one"
            )
        if status == lib.XM_NO_EXECUTOR:
            self._check(561101, self._call + "GetWorkspaceSize")
        if status == lib.XM_NOTHING_PENDING:
            raise ConfigError(
                f"{self._call}: the plan was used for something else while its step waited for "
                f"workspace; allowed: only memory from take(); next: use another plan there"
            )
        if status <= lib.XM_TOO_LARGE:
            raise ConfigError(
                f"{names[lib.XM_TOO_LARGE - status]} would leave the address space; allowed: sizes "
                f"from 0 on, below 2**62 bytes, within 64-bit addresses; next: correct the step's "
                f"sizes or that address"
            )
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
                f"{self._call} got no workspace; allowed: {lib.xm_plan_need(self._native)} "
                f"bytes of device memory; allocate what is asked for"
            )
        raise ConfigError(
            f"launch plan: the native part answered {status}; allowed: a parameter of "
            f"{self._call}; next: check the key"
        )
