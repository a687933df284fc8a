# SPDX-License-Identifier: Apache-2.0
"""What aclnnMegaMoe wants to be given for each kind of weights: data, one row per kind.

Sources: ops-transformer 9.1.0, mc2/mega_moe (documentation and arch22, arch35 tiling); the MXFP
rows with FP4 weights: hicann 2abd43b1, torch extension mega_moe.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from xmoe.errors import ConfigError
from xmoe.kernels.acl.variants import GE_DTYPE_UNDEFINED


@dataclass(frozen=True)
class QuantMode:
    """One kind of weights.

    weight_dtype, weight_format   names of aclDataType and aclFormat for the weight descriptors
    scale_dtype                   of the scales, None when there are none
    needs_bias                    whether bias lists are mandatory; otherwise they must be absent
    dispatch_quant_mode           0 none, 2 int8 per token, 4 MXFP
    out_dtypes                    accepted dispatchQuantOutDtype codes; the first is the one to pass
    prepared                      whether xmoe prepares such weights
    """

    name: str
    title: str
    soc_families: tuple[str, ...]
    weight_dtype: str
    weight_format: str
    scale_dtype: str | None
    needs_bias: bool
    dispatch_quant_mode: int
    out_dtypes: tuple[int, ...]
    prepared: bool


_ARCH22 = ("A2", "A3")
_ARCH35 = ("A5",)
_ROWS = (
    QuantMode("none", "A16W16", _ARCH22, "bfloat16", "ND", None, False, 0,
              (GE_DTYPE_UNDEFINED, 27), True),
    QuantMode("w8a8", "A8W8-INT", _ARCH22, "int8", "FRACTAL_NZ", "uint64", False, 2, (2,), True),
    # Eight int4 in an int32: torch has no 4-bit type, and the operator's wrapper unfolds these.
    QuantMode("w4a8", "A8W4-INT", _ARCH22, "int32", "FRACTAL_NZ", "uint64", True, 2, (2,), True),
    QuantMode("mxfp8", "A8W8-FP", _ARCH35, "float8_e4m3fn", "ND", "float8_e8m0fnu", False, 4,
              (36, 35), False),
    QuantMode("mxfp8_w4", "A8W4-FP", _ARCH35, "float4_e2m1", "FRACTAL_NZ", "float8_e8m0fnu", False,
              4, (36,), False),
    QuantMode("mxfp4", "A4W4-FP", _ARCH35, "float4_e2m1", "ND", "float8_e8m0fnu", False, 4, (40,),
              False),
)  # fmt: skip
QUANT_MODES: dict[str, QuantMode] = {row.name: row for row in _ROWS}
PREPARED_QUANTS: tuple[str, ...] = tuple(row.name for row in _ROWS if row.prepared)


def quant_mode(name: str) -> QuantMode:
    """The row called `name`, for weights that xmoe prepares; ConfigError for any other."""
    row = QUANT_MODES.get(name)
    if row is None or not row.prepared:
        why = (
            "is unknown" if row is None else f"({row.title}, {row.soc_families[0]}) is not prepared"
        )
        raise ConfigError(
            f"weight quantisation {name!r} {why} by this release; allowed: "
            f"{', '.join(PREPARED_QUANTS)}; use weights of one of these kinds"
        )
    return row
