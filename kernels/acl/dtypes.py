# SPDX-License-Identifier: Apache-2.0
"""aclDataType and aclFormat codes. Source: acl_base.h of CANN 9.1.0."""

from __future__ import annotations

from xmoe.errors import ConfigError

DTYPES: dict[str, int] = {
    "float32": 0,
    "float16": 1,
    "int8": 2,
    "int32": 3,
    "uint8": 4,
    "int16": 6,
    "uint16": 7,
    "uint32": 8,
    "int64": 9,
    "uint64": 10,
    "float64": 11,
    "bool": 12,
    "complex64": 16,
    "complex128": 17,
    "bfloat16": 27,
    "int4": 29,
    "uint1": 30,
    "complex32": 33,
    "hifloat8": 34,
    "float8_e5m2": 35,
    "float8_e4m3fn": 36,
    "float8_e8m0fnu": 37,
    "float6_e3m2": 38,
    "float6_e2m3": 39,
    "float4_e2m1": 40,
    "float4_e1m2": 41,
}
"""Name (torch's spelling where torch has the type) -> code."""

BITS: dict[int, int] = {
    0: 32, 1: 16, 2: 8, 3: 32, 4: 8, 6: 16, 7: 16, 8: 32, 9: 64, 10: 64, 11: 64, 12: 8, 16: 64,
    17: 128, 27: 16, 29: 4, 30: 1, 33: 32, 34: 8, 35: 8, 36: 8, 37: 8, 38: 6, 39: 6, 40: 4, 41: 4,
}  # fmt: skip

FORMATS: dict[str, int] = {
    "NCHW": 0,
    "NHWC": 1,
    "ND": 2,
    "NC1HWC0": 3,
    "FRACTAL_Z": 4,
    "FRACTAL_NZ": 29,
    "NCDHW": 30,
    "NCL": 47,
    "FRACTAL_NZ_C0_16": 50,
    "FRACTAL_NZ_C0_32": 51,
    "FRACTAL_NZ_C0_2": 52,
    "FRACTAL_NZ_C0_4": 53,
    "FRACTAL_NZ_C0_8": 54,
}


def dtype_code(dtype: str | int) -> int:
    """The aclDataType code of a name ("bfloat16", "torch.bfloat16") or a code."""
    if isinstance(dtype, int) and dtype in BITS:
        return dtype
    if isinstance(dtype, str) and dtype.removeprefix("torch.") in DTYPES:
        return DTYPES[dtype.removeprefix("torch.")]
    raise ConfigError(
        f"dtype {dtype!r} has no aclDataType; allowed: {', '.join(DTYPES)}; convert the tensor"
    )


def format_code(name: str | int) -> int:
    """The aclFormat code of a name or a code."""
    if isinstance(name, int) and name in FORMATS.values():
        return name
    if isinstance(name, str) and name in FORMATS:
        return FORMATS[name]
    raise ConfigError(
        f"format {name!r} is not an aclFormat known here; allowed: {', '.join(FORMATS)}; use ND"
    )
