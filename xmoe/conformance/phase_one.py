# SPDX-License-Identifier: Apache-2.0
"""A call of phase one as a C program makes it: any argument may be wrong, nothing is checked."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from xmoe.conformance.case import NotHere
from xmoe.conformance.session import Session
from xmoe.errors import LibraryError
from xmoe.kernels.acl.handles import TensorDesc, TensorListDesc
from xmoe.kernels.acl.variants import FLT_MAX, GE_DTYPE_UNDEFINED, NEUTRAL, Variant

REGION_BYTES = 72 << 20


@dataclass(frozen=True)
class T:
    """A tensor argument over the shared region."""

    shape: tuple[int, ...]
    dtype: str = "bfloat16"
    format: str = "ND"
    strides: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Answer:
    """What phase one said."""

    code: int
    workspace_bytes: int
    made: bool
    text: str


@dataclass(frozen=True)
class Sizes:
    """Of a call that every known profile accepts."""

    bs: int = 1
    topk: int = 2
    hidden: int = 1024
    inter: int = 1024
    experts: int = 2
    ep: int = 2

    def arguments(self) -> dict[str, Any]:
        """Values by parameter key."""
        bs, hidden, inter = self.bs, self.hidden, self.inter
        return {
            "context": T((4100,), "int32"),
            "x": T((bs, hidden)),
            "topkIds": T((bs, self.topk), "int32"),
            "topkWeights": T((bs, self.topk), "float32"),
            "weight1": [T((hidden, 2 * inter))] * self.experts,
            "weight2": [T((inter, hidden))] * self.experts,
            "weightScales1Optional": None,
            "weightScales2Optional": None,
            "xActiveMaskOptional": None,
            "moeExpertNum": self.ep * self.experts,
            "epWorldSize": self.ep,
            "cclBufferSize": 1 << 40,
            "maxRecvTokenNum": 0,
            "dispatchQuantMode": 0,
            "dispatchQuantOutDtype": GE_DTYPE_UNDEFINED,
            "combineQuantMode": 0,
            "commAlg": "",
            "numMaxTokensPerRank": 0,
            "activation": "swiglu",
            "activationClamp": FLT_MAX,
            "activationParams": (FLT_MAX,),
            "yOut": T((bs, hidden)),
            "expertTokenNumsOut": T((self.experts,), "int32"),
        }


def variant_of(session: Session) -> Variant:
    """The library's ABI variant; the case is skipped when MegaMoe cannot be called."""
    try:
        return session.runtime.mega_moe.require_variant()
    except LibraryError as error:
        raise NotHere(f"MegaMoe cannot be called: {error}") from error


def ask(session: Session, sizes: Sizes, changes: Mapping[str, Any]) -> Answer:
    """Phase one with some arguments changed. What it made is destroyed again."""
    variant = variant_of(session)
    runtime, ffi = session.runtime, session.ffi
    values = {**sizes.arguments(), **changes}
    unknown = [key for key in changes if not variant.has(key)]
    if unknown:
        raise NotHere(f"ABI variant {variant.id} has no {', '.join(unknown)}")
    size, executor = ffi.new("uint64_t*"), ffi.new("aclOpExecutor**", ffi.NULL)
    with contextlib.ExitStack() as stack:
        arguments: list[Any] = []
        for param in variant.params:
            if param.kind in ("W", "X"):
                arguments.append(size if param.kind == "W" else executor)
                continue
            value = values[param.key] if param.key in values else NEUTRAL[param.key][0]
            arguments.append(_convert(session, param.kind, value, stack))
        trampoline = getattr(runtime.native.lib, f"mega_moe_workspace__{variant.id}")
        session.text()
        address = ffi.cast("void*", runtime.mega_moe.workspace_addr)
        code = int(trampoline(address, *arguments))
        text = session.text() if code else ""
        made = executor[0] != ffi.NULL
        if code == 0 and made:
            # As the product does: only a repeatable one is documented as the caller's to destroy.
            session.nnop("aclSetAclOpExecutorRepeatable")(executor[0])
            session.nnop("aclDestroyAclOpExecutor")(executor[0])
        return Answer(code, int(size[0]), made, text)


def _convert(session: Session, kind: str, value: Any, stack: contextlib.ExitStack) -> Any:
    ffi = session.ffi
    if value is None:
        return ffi.NULL
    if isinstance(value, T):
        return stack.enter_context(_tensor(session, value)).pointer
    if kind == "L":
        members = [_tensor(session, one) for one in value]
        return stack.enter_context(TensorListDesc(session.runtime, members)).pointer
    if kind == "S":
        text = ffi.new("char[]", value.encode())
        stack.callback(lambda held: None, text)
        return text
    if kind == "FA":
        array = session.nnop("aclCreateFloatArray")(ffi.new("float[]", list(value)), len(value))
        stack.callback(session.nnop("aclDestroyFloatArray"), array)
        return array
    return value


def _tensor(session: Session, spec: T) -> TensorDesc:
    return TensorDesc(
        session.runtime,
        _region(session),
        spec.shape,
        spec.strides,
        dtype=spec.dtype,
        format=spec.format,
    )


def _region(session: Session) -> int:
    """Address of memory that all tensors of phase one share: it is described, never read."""
    made = session.__dict__.get("_phase_one_region")
    if made is None or made.closed:
        with session.lasting():
            made = session.__dict__["_phase_one_region"] = session.memory(REGION_BYTES)
    return int(made.handle)
