# SPDX-License-Identifier: Apache-2.0
"""A compiled launch of an operator of `op_lists`: what does not change is given once.

    plan = OpPlan(native, functions, "aclnnE2a", parameters, check)
    plan.launch(tokens, 0, 0, stream, rows.data_ptr(), state.data_ptr(), out.data_ptr())

These operators declare no workspace; one that wants some is refused at its launch.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from xmoe.errors import ConfigError
from xmoe.kernels.acl.dtypes import dtype_code
from xmoe.kernels.acl.native_plan import NUMBER, SECOND, TOKENS, NativePlan, StepTensor
from xmoe.kernels.acl.op_lists import OPERATORS

Parameter = StepTensor | tuple[int, str, int] | int | float | str | None
"""StepTensor; (address, data type, length) of a one-dimensional tensor that stays; a number, or
TOKENS, SECOND or NUMBER for one that comes with the step; a text; None for an absent tensor."""


class OpPlan(NativePlan):
    """See the module's text, and NativePlan.

    Args:
        op: a name of OPERATORS. parameters: one for each letter of its list. A tensor that stays
            must outlive the plan.

    Raises:
        ConfigError: a parameter that does not fit its place.
    """

    def __init__(
        self,
        native: Any,
        functions: Any,
        op: str,
        parameters: Sequence[Parameter],
        check: Callable[[int, str], None],
    ) -> None:
        letters = OPERATORS[op]
        steps = [one for one in parameters if isinstance(one, StepTensor)]
        super().__init__(native, op, letters, functions, steps, op, check)
        lib = self._lib
        self._run = lib.xm_plan_run
        self._pad = (0,) * (lib.XM_MAX_TENSORS - len(steps))
        self._texts: list[Any] = []  # phase one may keep their addresses
        self._follow = {TOKENS: lib.XM_TOKENS, SECOND: lib.XM_SECOND, NUMBER: lib.XM_NUMBER}
        order = iter(range(len(steps)))
        if len(parameters) != len(letters):
            raise ConfigError(
                f"{op} got {len(parameters)} parameters; allowed: {len(letters)}; next: give one "
                "for each"
            )
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            for slot, (letter, value) in enumerate(zip(letters, parameters, strict=True)):
                status = self._set(slot, letter, value, order)
                if status:
                    self._raise(status)
            undo.pop_all()

    def close_after_last_use(self) -> None:
        """Close the plan when nobody holds it any more; another thread may be about to launch it.
        What the vendor refuses to destroy then stays, unreported."""
        weakref.finalize(self, self._lib.xm_plan_close, self._native).atexit = False

    def _set(self, slot: int, letter: str, value: Parameter, order: Any) -> int:
        lib, native = self._lib, self._native
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if letter == "T" and isinstance(value, StepTensor):
            return int(lib.xm_plan_set_step(native, slot, next(order)))
        if letter == "T" and isinstance(value, tuple):
            address, dtype, length = value
            code = dtype_code(dtype)
            return int(
                lib.xm_plan_set_packed(
                    native, slot, False, address, 1, 0, 1, [length], code, 2, 1, [length]
                )
            )
        if letter == "T" and value is None:
            return int(lib.xm_plan_set_pointer(native, slot, self._ffi.NULL))
        if letter == "i" and value in self._follow:
            return int(lib.xm_plan_set_follow(native, slot, self._follow[str(value)]))
        if letter == "i" and isinstance(value, int) and number:
            return int(lib.xm_plan_set_int(native, slot, value))
        if letter == "d" and number:
            return int(lib.xm_plan_set_double(native, slot, value))
        if letter == "s" and isinstance(value, str) and "\0" not in value:
            self._texts.append(self._ffi.new("char[]", value.encode()))
            return int(lib.xm_plan_set_pointer(native, slot, self._texts[-1]))
        raise ConfigError(
            f"{self._call} got {value!r} as parameter {slot + 1}; allowed: a value of kind "
            f"{letter!r} (T tensor, i whole number, d number, s text); next: correct it"
        )

    def launch(self, tokens: int, second: int, number: int, stream: int, *addresses: int) -> None:
        """Queue the operator on `stream` and return before it runs. `addresses`: of the step
        tensors, contiguous and of the shapes that the plan was given; 0 for an absent one.

        Raises:
            ConfigError: an address is not aligned, an output shares memory with another tensor, the
                operator wants workspace, or the plan is closed; nothing was queued.
            AclError: the library refused.
        """
        status = self._run(self._native, tokens, second, number, stream, *addresses, *self._pad)
        if status:
            self._raise(status)
