# SPDX-License-Identifier: Apache-2.0
"""The two-phase call of MegaMoe, made once with everything given. Layers launch through
`xmoe.kernels.acl.plan`, which keeps what does not change. Argument lists come from the variant
table only.

    prepared = prepare(runtime, symbols, args)     phase one: workspace size and op_executor
    launch(prepared, workspace, stream)            phase two: queues the work and returns

Source for the life cycle: ops-transformer 9.1.0 documentation of two-phase operators (an
op_executor is launched once unless it was made repeatable right after phase one; repeatable ones
are destroyed by the caller).
"""

from __future__ import annotations

import contextlib
import difflib
import math
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from xmoe.errors import ConfigError, UnsupportedError
from xmoe.kernels.acl.handles import AclStream, OwnedHandle, TensorDesc, TensorListDesc
from xmoe.kernels.acl.status import check, make_error
from xmoe.kernels.acl.variants import FLT_MAX, NEUTRAL, VARIANTS, Param, Variant

if TYPE_CHECKING:
    from xmoe.kernels.acl.loader import Runtime
    from xmoe.kernels.acl.vendor import MegaMoeSymbols

WORKSPACE_CALL = "aclnnMegaMoeGetWorkspaceSize"
LAUNCH_CALL = "aclnnMegaMoe"
_KNOWN_KEYS = frozenset(k for v in VARIANTS.values() for k in v.keys())
_INT64 = range(-(1 << 63), 1 << 63)


class PreparedCall:
    """Phase one's result: `workspace_bytes` and one op_executor.

    Launched once, or many times when `repeatable`. Keeps the argument descriptors alive until
    `close`, which a repeatable or never launched call needs and others may have.
    """

    def __init__(
        self,
        runtime: Runtime,
        symbols: MegaMoeSymbols,
        workspace_bytes: int,
        op_executor: Any,
        repeatable: bool,
        keep: contextlib.ExitStack,
        args: Mapping[str, object],
    ) -> None:
        self.runtime = runtime
        self.symbols = symbols
        self.workspace_bytes = workspace_bytes
        self.op_executor = op_executor
        self.repeatable = repeatable
        self.launches = 0
        # One op_executor is one piece of state in the vendor's library: launches and its
        # destruction exclude each other.
        self._lock = threading.Lock()
        self._keep = keep
        self._args = args

    def close(self) -> None:
        """Destroy an op_executor that phase two did not consume, and drop the arguments. Twice is
        harmless."""
        with self._lock, self._keep:
            executor, self.op_executor = self.op_executor, None
            if executor is None or (self.launches and not self.repeatable):
                return
            nnop = self.runtime.nnop
            if not self.repeatable:
                # Only a repeatable op_executor is documented as the caller's to destroy.
                status = nnop.aclSetAclOpExecutorRepeatable(executor)
                check(self.runtime, status, "aclSetAclOpExecutorRepeatable")
            check(self.runtime, nnop.aclDestroyAclOpExecutor(executor), "aclDestroyAclOpExecutor")

    def __enter__(self) -> PreparedCall:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def prepare(
    runtime: Runtime,
    symbols: MegaMoeSymbols,
    args: Mapping[str, object],
    *,
    repeatable: bool = False,
) -> PreparedCall:
    """Phase one. Local; the calling thread needs a bound device.

    Args:
        args: value by parameter key of the variant: TensorDesc, TensorListDesc, int, str, float, a
            sequence of floats, or None for an absent optional. Every parameter of the variant must
            be there. Parameters that only other variants have may be there with a value that means
            "not used".
        repeatable: allow many launches of the result.

    Raises:
        ConfigError: an unknown, missing or mistyped argument.
        UnsupportedError: a value the variant has no parameter for.
        LibraryError: the library's ABI variant is not known.
        AclError: phase one failed.
    """
    variant = symbols.require_variant()
    check_arguments(variant, args)
    ffi = runtime.ffi
    workspace_size = ffi.new("uint64_t*", 0)
    # The wrapper creates an op_executor only if it finds NULL here; anything else it takes for one.
    executor = ffi.new("aclOpExecutor**", ffi.NULL)
    keep = contextlib.ExitStack()
    with contextlib.ExitStack() as on_failure:
        on_failure.callback(keep.close)
        values = [
            workspace_size
            if param.kind == "W"
            else executor
            if param.kind == "X"
            else convert(runtime, param, args[param.key], keep)
            for param in variant.params
        ]
        trampoline = getattr(runtime.native.lib, f"mega_moe_workspace__{variant.id}")
        address = ffi.cast("void*", symbols.workspace_addr)
        check(runtime, trampoline(address, *values), WORKSPACE_CALL)
        if executor[0] == ffi.NULL:
            raise make_error(runtime, 561101, WORKSPACE_CALL)
        prepared = PreparedCall(
            runtime, symbols, int(workspace_size[0]), executor[0], repeatable, keep, dict(args)
        )
        if repeatable:
            status = runtime.nnop.aclSetAclOpExecutorRepeatable(executor[0])
            check(runtime, status, "aclSetAclOpExecutorRepeatable")
        on_failure.pop_all()
    return prepared


def launch(
    prepared: PreparedCall, workspace: int | OwnedHandle | None, stream: int | AclStream
) -> None:
    """Phase two: queue the work on `stream` and return before it is done. Local.

    The workspace, all tensors and the communication context must stay alive and unchanged until the
    stream was synchronised. Device errors show up there, not here.

    Raises:
        ConfigError: no workspace although one is needed, or a second launch of a call that is not
            repeatable.
        AclError: phase two failed.
    """
    address = workspace.handle if isinstance(workspace, OwnedHandle) else workspace or 0
    queue = stream.handle if isinstance(stream, AclStream) else stream
    # The cast below would cut a wider number down to some other handle, or to the default stream.
    for what, value in (("workspace", address), ("stream", queue)):
        if not isinstance(value, int) or not 0 <= value < 1 << 64:
            raise ConfigError(
                f"{LAUNCH_CALL} got {what}={value!r}; allowed: an address or handle of 64 bits; "
                f"pass what the runtime gave"
            )
    with prepared._lock:
        _launch(prepared, address, queue)


def _launch(prepared: PreparedCall, address: int, queue: int) -> None:
    """Phase two, with the lock of the prepared call held."""
    runtime, symbols = prepared.runtime, prepared.symbols
    if prepared.op_executor is None or (prepared.launches and not prepared.repeatable):
        raise ConfigError(
            f"{LAUNCH_CALL} was launched {prepared.launches} times from one op_executor, or it is "
            f"closed; allowed: once, unless repeatable; call prepare() again"
        )
    if prepared.workspace_bytes and not address:
        raise ConfigError(
            f"{LAUNCH_CALL} got no workspace; allowed: {prepared.workspace_bytes} bytes of device "
            f"memory; allocate what prepare() reports"
        )
    trampoline = getattr(runtime.native.lib, f"mega_moe_launch__{symbols.require_variant().id}")
    cast = runtime.ffi.cast
    prepared.launches += 1
    status = trampoline(
        cast("void*", symbols.launch_addr),
        cast("void*", address),
        prepared.workspace_bytes,
        prepared.op_executor,
        cast("aclrtStream", queue),
    )
    check(runtime, status, LAUNCH_CALL)


def check_arguments(variant: Variant, args: Mapping[str, object]) -> None:
    """Compare the keys of `args` with the variant's parameters.

    Raises:
        ConfigError: a key no variant knows, or a parameter without a value.
        UnsupportedError: a used value for a parameter the variant lacks.
    """
    keys = variant.keys()
    for key in args:
        if key not in _KNOWN_KEYS:
            near = difflib.get_close_matches(key, _KNOWN_KEYS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "remove it"
            raise ConfigError(
                f"argument {key!r} is not a parameter of {WORKSPACE_CALL} in any ABI variant; "
                f"allowed: {', '.join(keys)}; {hint}"
            )
    missing = [key for key in keys if key not in args]
    if missing:
        raise ConfigError(
            f"ABI variant {variant.id} of {WORKSPACE_CALL} has no value for {', '.join(missing)}; "
            f"allowed: a value for each parameter; pass None for an absent optional one"
        )
    dropped = [
        f"{key}={value!r}"
        for key, value in args.items()
        if key not in keys and not _is_neutral(key, value)
    ]
    if dropped:
        raise UnsupportedError(
            f"ABI variant {variant.id} of {WORKSPACE_CALL} has no parameter for "
            f"{', '.join(dropped)}, so the value would be lost; allowed: leave it out or unused; "
            f"use an operator package with a later variant",
            dropped,
        )


def _is_neutral(key: str, value: object) -> bool:
    if isinstance(value, list):
        value = tuple(value)
    if isinstance(value, tuple) or value is None or isinstance(value, str):
        return value in NEUTRAL.get(key, ())
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        # A clamp near FLT_MAX is the same float32 as FLT_MAX.
        return any(
            isinstance(n, (int, float)) and (value == n or math.isclose(value, n, rel_tol=1e-7))
            for n in NEUTRAL.get(key, ())
        )
    return False


def convert(runtime: Runtime, param: Param, value: object, keep: contextlib.ExitStack) -> Any:
    """The cffi value for one parameter; what has to outlive the call is put into `keep`."""
    ffi = runtime.ffi
    if value is None and param.optional:
        return ffi.NULL
    if param.kind in ("T", "O") and isinstance(value, TensorDesc):
        return value.pointer
    if param.kind == "L" and isinstance(value, TensorListDesc):
        return value.pointer
    if param.kind == "i64" and isinstance(value, int) and not isinstance(value, bool):
        if value in _INT64:
            return value
    if param.kind == "S" and isinstance(value, str) and _is_c_text(value):
        # Phase one may keep the address in the op_executor, so the text lives as long as the call.
        text = ffi.new("char[]", value.encode())
        keep.callback(lambda held: None, text)
        return text
    if param.kind == "F" and _is_number(value):
        return float(value)  # type: ignore[arg-type]
    if param.kind == "FA" and isinstance(value, (tuple, list)) and all(map(_is_number, value)):
        return _float_array(runtime, [float(v) for v in value], keep)
    words = {
        "T": "a TensorDesc",
        "O": "a TensorDesc",
        "L": "a TensorListDesc",
        "i64": "a whole number of 64 bits",
        "S": "a text without NUL, in UTF-8",
        "F": "a number",
        "FA": "a sequence of numbers",
    }[param.kind]
    none = " or None" if param.optional else ""
    raise ConfigError(
        f"argument {param.key}={value!r} of {WORKSPACE_CALL} is of type {type(value).__name__}; "
        f"allowed: {words}{none}; convert it"
    )


def _is_c_text(value: str) -> bool:
    """Whether C sees all of it: no NUL, and nothing that has no UTF-8 form."""
    return "\0" not in value and not any("\ud800" <= char <= "\udfff" for char in value)


def _is_number(value: object) -> bool:
    """Whether it fits a double; the conversion to a C float is the compiler's."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return isinstance(value, float) or abs(value) <= FLT_MAX


def _float_array(runtime: Runtime, values: list[float], keep: contextlib.ExitStack) -> Any:
    nnop = runtime.nnop
    array = nnop.aclCreateFloatArray(runtime.ffi.new("float[]", values), len(values))
    if array == runtime.ffi.NULL:
        raise make_error(runtime, 561103, "aclCreateFloatArray")
    keep.callback(lambda: check(runtime, nnop.aclDestroyFloatArray(array), "aclDestroyFloatArray"))
    return array
