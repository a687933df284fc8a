# SPDX-License-Identifier: Apache-2.0
"""The ABI variants of `aclnnMegaMoeGetWorkspaceSize`, as data.

The vendor changed the argument list many times under one symbol name, with no version symbol, so a
caller has to say which list it means. Nothing else in this project spells an argument list: the C
trampolines (`build.py`) and the call (`op.py`) are both derived from this table.

Standard library only: the build script loads this file by path, before the package exists.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

FLT_MAX = 3.4028234663852886e38
GE_DTYPE_UNDEFINED = 28
"""GE's code for "no data type"; aclDataType has no such member (its own is -1)."""

# All tables here are read-only views: many threads read them, and nobody may add to one.
CTYPES: Mapping[str, str] = MappingProxyType({
    "T": "const aclTensor*",
    "O": "aclTensor*",
    "L": "const aclTensorList*",
    "i64": "int64_t",
    "S": "const char*",
    "F": "float",
    "FA": "const aclFloatArray*",
    "W": "uint64_t*",
    "X": "aclOpExecutor**",
})  # fmt: skip
"""Parameter kind -> C type."""


NULL_CHECKED_INPUTS = ("context", "x", "topkIds", "topkWeights", "weight1", "weight2")
"""Every variant's wrapper checks these first, in this order."""


@dataclass(frozen=True)
class Param:
    """One parameter of phase one.

    `name` is the vendor's spelling in this variant. `key` is the spelling of variant B (or of the
    first variant that has it), so that one dict of values serves variants that only renamed it.
    """

    name: str
    kind: str
    optional: bool = False
    key: str = ""

    def __post_init__(self) -> None:
        if self.kind not in CTYPES:
            raise ValueError(f"parameter {self.name!r} has kind {self.kind!r}, not {list(CTYPES)}")
        if not self.key:
            object.__setattr__(self, "key", self.name)


@dataclass(frozen=True)
class Variant:
    """One ABI variant: its ordered parameters and where they were read."""

    id: str
    params: tuple[Param, ...]
    source: str
    notes: str = ""

    def has(self, key: str) -> bool:
        """Whether the variant has a parameter with this key."""
        return any(p.key == key for p in self.params)

    def keys(self) -> tuple[str, ...]:
        """Keys of the parameters a caller supplies: all but the two outputs of phase one."""
        return tuple(p.key for p in self.params if p.kind not in ("W", "X"))

    @property
    def signature(self) -> str:
        """The whole list as text; the native module holds the one that it was compiled for."""
        return " ".join(f"{p.kind}:{p.name}" for p in self.params)

    def position(self, key: str) -> int:
        """1-based position of a parameter, as documents count."""
        return [p.key for p in self.params].index(key) + 1

    def integer_slot(self, key: str) -> int:
        """0-based place among the parameters that travel as integers or pointers (floats do not).

        Both calling conventions in use (System V x86-64, AAPCS64) pass floats in registers of
        their own, so only these count when one list is called as another.
        """
        return [p.key for p in self.params if p.kind != "F"].index(key)

    def null_checked(self) -> tuple[str, ...]:
        """Keys whose null pointer the library's wrapper answers with 161001, in its order.

        Source: op_api of each variant; the two of the activation from the variant on that has
        activationParams.
        """
        extra = ("activation", "activationParams") if self.has("activationParams") else ()
        return (*NULL_CHECKED_INPUTS, *extra, "yOut", "expertTokenNumsOut")

    @property
    def checks_integers(self) -> bool:
        """Whether the wrapper refuses moeExpertNum <= 0 with 161002 after the null checks."""
        return self.has("activation")


NEUTRAL: Mapping[str, tuple[object, ...]] = MappingProxyType({
    "bias1Optional": (None,),
    "bias2Optional": (None,),
    "activation": ("swiglu",),
    "activationClamp": (FLT_MAX, 0.0, float("inf")),
    "activationParams": (None, (), (FLT_MAX,), (0.0,)),
    "scales": (None,),
    "topoType": (0,),
    "rankNumPerServer": (0, 2),
    "sharedWeight1Optional": (None,),
    "sharedWeight2Optional": (None,),
    "sharedWeightScales1Optional": (None,),
    "sharedWeightScales2Optional": (None,),
    "sharedBias1Optional": (None,),
    "sharedBias2Optional": (None,),
    "topkWeightsType": (0,),
    "maskBufferOptional": (None,),
    "sharedExpertQuantOutDtype": (0, GE_DTYPE_UNDEFINED),
})  # fmt: skip
"""For parameters some variants lack: the values that mean "not used".

A call may carry such a value for a variant without the parameter; any other value would be dropped
silently, which is refused. rankNumPerServer is 2 by default in the operator's own definition, and
unused with topoType 0.
"""


def _plain(kind: str, *names: str) -> tuple[Param, ...]:
    return tuple(Param(name, kind) for name in names)


def _optional(kind: str, *names: str) -> tuple[Param, ...]:
    return tuple(Param(name, kind, optional=True) for name in names)


def _index(params: tuple[Param, ...], key: str) -> int:
    return [p.key for p in params].index(key)


def _after(params: tuple[Param, ...], key: str, *new: Param) -> tuple[Param, ...]:
    at = _index(params, key) + 1
    return params[:at] + new + params[at:]


_INPUTS = _plain("T", "context", "x", "topkIds", "topkWeights") + _plain("L", "weight1", "weight2")
_SCALES = _optional("L", "weightScales1Optional", "weightScales2Optional")
_OUTPUTS = (
    *_plain("O", "yOut", "expertTokenNumsOut"),
    Param("workspaceSize", "W"),
    Param("executor", "X"),
)
_SIZES = _plain(
    "i64", "moeExpertNum", "epWorldSize", "cclBufferSize", "maxRecvTokenNum", "dispatchQuantMode"
)

_A = (
    *_INPUTS,
    *_SCALES,
    *_optional("T", "xActiveMaskOptional"),
    Param("scalesOptional", "T", optional=True, key="scales"),
    *_SIZES,
    Param("dispatchQuantOutType", "i64", key="dispatchQuantOutDtype"),
    *_plain("i64", "combineQuantMode"),
    *_plain("S", "commAlg"),
    Param("globalBs", "i64", key="numMaxTokensPerRank"),
    *_OUTPUTS,
)
_B = (
    *_INPUTS,
    *_SCALES,
    *_optional("L", "bias1Optional", "bias2Optional"),
    *_optional("T", "xActiveMaskOptional"),
    *_SIZES,
    *_plain("i64", "dispatchQuantOutDtype", "combineQuantMode"),
    *_plain("S", "commAlg"),
    *_plain("i64", "numMaxTokensPerRank"),
    *_plain("S", "activation"),
    *_plain("F", "activationClamp"),
    *_OUTPUTS,
)
_C = _after(_B, "activationClamp", *_plain("i64", "topoType"))
_D = _after(_C, "topoType", *_plain("i64", "rankNumPerServer"))
_E = _after(
    _D,
    "xActiveMaskOptional",
    *_optional(
        "L",
        "sharedWeight1Optional",
        "sharedWeight2Optional",
        "sharedWeightScales1Optional",
        "sharedWeightScales2Optional",
        "sharedBias1Optional",
        "sharedBias2Optional",
    ),
)
_F = _after(_E, "rankNumPerServer", *_plain("i64", "topkWeightsType"))
_G = tuple(Param("activationParams", "FA") if p.key == "activationClamp" else p for p in _F)
_H = _after(_G, "sharedBias2Optional", *_optional("T", "maskBufferOptional"))
_I = _after(_H, "dispatchQuantOutDtype", *_plain("i64", "sharedExpertQuantOutDtype"))
_J = _after(_I, "xActiveMaskOptional", *_optional("T", "scales"))

_REPO = "ops-transformer mc2/mega_moe/op_api/aclnn_mega_moe.cpp"

VARIANTS: Mapping[str, Variant] = MappingProxyType({
    v.id: v
    for v in (
        Variant("A", _A, f"{_REPO}, tags 9.1.0-beta.2 and 9.1.0-beta.3 (953394157)",
                "Atlas A5 only; null checks only, no integer checks; no source that was read "
                "states its limits, so the policy refuses it by name"),
        Variant("B", _B, f"{_REPO}, branch 9.1.0 (69baeed80 and later)",
                "CANN 9.1.0; numMaxTokensPerRank is accepted and dropped by the wrapper"),
        Variant("C", _C, f"{_REPO}, master 4cccb6393 (2026-07-01)"),
        Variant("D", _D, f"{_REPO}, master 8b981bf49 (2026-07-08)"),
        Variant("E", _E, f"{_REPO}, master b88c404e3 (2026-07-20)", "shared expert lists"),
        Variant("F", _F, f"{_REPO}, later development 24d42e043"),
        Variant("G", _G, f"{_REPO}, later development",
                "activationParams replaces the float activationClamp"),
        Variant("H", _H, f"{_REPO}, later development 754c853e7",
                "first variant that forwards numMaxTokensPerRank"),
        Variant("I", _I, f"{_REPO}, later development 1d9bb2e9"),
        Variant("J", _J, "inferred from the call in the vendor's torch extension",
                "no source of the wrapper itself was read"),
    )
})  # fmt: skip

REFUSED: Mapping[str, str] = MappingProxyType({
    "K": "a document names its attribute combine_comm_mode, but no source read gives the position "
    "of the new parameter in the argument list",
    "P0": "a prototype header without weights; no library with it is known",
})  # fmt: skip
"""Variants known by name whose argument list is not known well enough to call."""

LAUNCH_CTYPES = ("void*", "uint64_t", "aclOpExecutor*", "aclrtStream")
"""Phase two never changed: workspace, workspaceSize, executor, stream. Source: all variants."""

RELEASES: Mapping[str, str] = MappingProxyType({"9.1.0": "B"})
"""Operator package releases whose variant is known from public source.

Pre-releases are left out on purpose: packages that call themselves 9.1.0-beta.3 exist with
variant A and with variant D.
"""


def find_variant(variant_id: str) -> Variant:
    """The variant with this id.

    Raises:
        ConfigError: unknown id, or one whose argument list is not known.
    """
    from xmoe.errors import ConfigError

    known = ", ".join(VARIANTS)
    if variant_id in VARIANTS:
        return VARIANTS[variant_id]
    if variant_id in REFUSED:
        raise ConfigError(
            f"ABI variant {variant_id!r} of aclnnMegaMoe cannot be called: {REFUSED[variant_id]}; "
            f"callable are {known}"
        )
    raise ConfigError(
        f"abi_variant={variant_id!r} is not a known ABI variant of aclnnMegaMoe; allowed: {known}; "
        f"9.1.0 operator packages are B"
    )
