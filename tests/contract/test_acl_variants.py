# SPDX-License-Identifier: Apache-2.0
"""Every ABI variant: the table has the documented order, and the call really has it too."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from support import acl_stubs
from xmoe.errors import ConfigError, UnsupportedError
from xmoe.kernels.acl import op, variants

HEAD = (
    "T:context T:x T:topkIds T:topkWeights L:weight1 L:weight2 "
    "L:weightScales1Optional L:weightScales2Optional "
)
BIAS = "L:bias1Optional L:bias2Optional "
SHARED = (
    "L:sharedWeight1Optional L:sharedWeight2Optional L:sharedWeightScales1Optional "
    "L:sharedWeightScales2Optional L:sharedBias1Optional L:sharedBias2Optional "
)
SIZES = "i64:moeExpertNum i64:epWorldSize i64:cclBufferSize i64:maxRecvTokenNum "
TAIL = "O:yOut O:expertTokenNumsOut W:workspaceSize X:executor"
# Written out from the documents, not derived from each other as the product's table is.
DOCUMENTED = {
    "A": HEAD + "T:xActiveMaskOptional T:scalesOptional " + SIZES + "i64:dispatchQuantMode "
    "i64:dispatchQuantOutType i64:combineQuantMode S:commAlg i64:globalBs " + TAIL,
    "B": HEAD + BIAS + "T:xActiveMaskOptional " + SIZES + "i64:dispatchQuantMode "
    "i64:dispatchQuantOutDtype i64:combineQuantMode S:commAlg i64:numMaxTokensPerRank "
    "S:activation F:activationClamp " + TAIL,
    "C": HEAD + BIAS + "T:xActiveMaskOptional " + SIZES + "i64:dispatchQuantMode "
    "i64:dispatchQuantOutDtype i64:combineQuantMode S:commAlg i64:numMaxTokensPerRank "
    "S:activation F:activationClamp i64:topoType " + TAIL,
    "D": HEAD + BIAS + "T:xActiveMaskOptional " + SIZES + "i64:dispatchQuantMode "
    "i64:dispatchQuantOutDtype i64:combineQuantMode S:commAlg i64:numMaxTokensPerRank "
    "S:activation F:activationClamp i64:topoType i64:rankNumPerServer " + TAIL,
    "E": HEAD + BIAS + "T:xActiveMaskOptional " + SHARED + SIZES + "i64:dispatchQuantMode "
    "i64:dispatchQuantOutDtype i64:combineQuantMode S:commAlg i64:numMaxTokensPerRank "
    "S:activation F:activationClamp i64:topoType i64:rankNumPerServer " + TAIL,
    "F": HEAD + BIAS + "T:xActiveMaskOptional " + SHARED + SIZES + "i64:dispatchQuantMode "
    "i64:dispatchQuantOutDtype i64:combineQuantMode S:commAlg i64:numMaxTokensPerRank "
    "S:activation F:activationClamp i64:topoType i64:rankNumPerServer i64:topkWeightsType " + TAIL,
    "G": HEAD + BIAS + "T:xActiveMaskOptional " + SHARED + SIZES + "i64:dispatchQuantMode "
    "i64:dispatchQuantOutDtype i64:combineQuantMode S:commAlg i64:numMaxTokensPerRank "
    "S:activation FA:activationParams i64:topoType i64:rankNumPerServer i64:topkWeightsType "
    + TAIL,
    "H": HEAD + BIAS + "T:xActiveMaskOptional " + SHARED + "T:maskBufferOptional " + SIZES
    + "i64:dispatchQuantMode i64:dispatchQuantOutDtype i64:combineQuantMode S:commAlg "
    "i64:numMaxTokensPerRank S:activation FA:activationParams i64:topoType i64:rankNumPerServer "
    "i64:topkWeightsType " + TAIL,
    "I": HEAD + BIAS + "T:xActiveMaskOptional " + SHARED + "T:maskBufferOptional " + SIZES
    + "i64:dispatchQuantMode i64:dispatchQuantOutDtype i64:sharedExpertQuantOutDtype "
    "i64:combineQuantMode S:commAlg i64:numMaxTokensPerRank S:activation FA:activationParams "
    "i64:topoType i64:rankNumPerServer i64:topkWeightsType " + TAIL,
    "J": HEAD + BIAS + "T:xActiveMaskOptional T:scales " + SHARED + "T:maskBufferOptional "
    + SIZES + "i64:dispatchQuantMode i64:dispatchQuantOutDtype i64:sharedExpertQuantOutDtype "
    "i64:combineQuantMode S:commAlg i64:numMaxTokensPerRank S:activation FA:activationParams "
    "i64:topoType i64:rankNumPerServer i64:topkWeightsType " + TAIL,
}  # fmt: skip
COUNTS = dict(zip("ABCDEFGHIJ", (23, 26, 27, 28, 34, 35, 35, 36, 37, 38), strict=True))
RENAMED = {
    "dispatchQuantOutType": "dispatchQuantOutDtype",
    "globalBs": "numMaxTokensPerRank",
    "scalesOptional": "scales",
}
C_TYPES = {"i64": "int64_t", "S": "const char*", "F": "float"}


def documented(variant: str) -> list[tuple[str, str]]:
    return [tuple(p.split(":")) for p in DOCUMENTED[variant].split()]  # type: ignore[misc]


def recorder_source(variant: str) -> str:
    """A vendor library whose phase one stores every argument by position."""
    params, body = [], []
    for index, (kind, _) in enumerate(documented(variant)):
        params.append(f"{C_TYPES.get(kind, 'void*')} p{index}")
        if kind == "F":
            body.append(f"slots[{index}].f = p{index};")
        elif kind == "S":
            body.append(f'snprintf(slots[{index}].s, 64, "%s", p{index} ? p{index} : "(null)");')
        else:
            body.append(f"slots[{index}].i = (int64_t)p{index};")
    last = len(params) - 1
    return f"""
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
struct slot {{ int64_t i; double f; char s[64]; }} slots[64], launched[4];
int aclnnMegaMoeGetWorkspaceSize({", ".join(params)}) {{
  {" ".join(body)}
  if (*(void**)p{last} != NULL) return 561000;
  *(uint64_t*)p{last - 1} = 4096;
  *(void**)p{last} = malloc(1);
  launched[2].f = (double)(int64_t)*(void**)p{last};
  return 0;
}}
int aclnnMegaMoe(void* workspace, uint64_t size, void* executor, void* stream) {{
  launched[0].i = (int64_t)workspace; launched[1].i = size;
  launched[2].i = (double)(int64_t)executor == launched[2].f; launched[3].i = (int64_t)stream;
  return 0;
}}
"""


CALL = """
from xmoe.kernels.acl.handles import TensorDesc, TensorListDesc
from xmoe.kernels.acl import op
import contextlib
runtime = loader.load(toolkit.find_toolkit())
symbols = runtime.require_mega_moe(abi_variant=sys.argv[1] if len(sys.argv) > 1 else VARIANT)
memory = runtime.ffi.new("char[]", 4096)
base = (int(runtime.ffi.cast("uintptr_t", memory)) + 63) // 64 * 64
handles, args = {}, {}
with contextlib.ExitStack() as stack:
    tensor = lambda: TensorDesc(runtime, base, (2, 4), dtype="float32")
    for index, param in enumerate(symbols.variant.params):
        if param.kind in ("T", "O"):
            args[param.key] = stack.enter_context(tensor())
        elif param.kind == "L":
            args[param.key] = stack.enter_context(TensorListDesc(runtime, [tensor(), tensor()]))
        elif param.kind == "i64":
            args[param.key] = 2**40 + index
        elif param.kind == "S":
            args[param.key] = f"text {param.key}"
        elif param.kind == "F":
            args[param.key] = 7.25
        elif param.kind == "FA":
            args[param.key] = (7.25, 1.5)
    for key, value in args.items():
        handles[key] = getattr(value, "handle", value)
    with op.prepare(runtime, symbols, args) as prepared:
        size = prepared.workspace_bytes
        op.launch(prepared, 0xABC0, 0x5150)
library = ctypes.CDLL(str(symbols.library.path))
class Slot(ctypes.Structure):
    _fields_ = [("i", ctypes.c_int64), ("f", ctypes.c_double), ("s", ctypes.c_char * 64)]
slots = (Slot * 64).in_dll(library, "slots")
launched = (Slot * 4).in_dll(library, "launched")
nnop = ctypes.CDLL(str(runtime.toolkit.lib_dirs[0] / "libnnopbase.so"))
left = {n: ctypes.c_int.in_dll(nnop, n).value for n in ("tensors", "lists", "arrays")}
say({"size": size, "handles": handles, "left": left, "launched": [s.i for s in launched],
     "array": list((ctypes.c_float * 2).in_dll(nnop, "array_values")),
     "slots": [[s.i, s.f, s.s.decode()] for s in slots]})
"""


@pytest.mark.parametrize("variant", list(DOCUMENTED))
def test_table_has_the_documented_order(variant: str) -> None:
    table = variants.VARIANTS[variant].params
    assert [(p.kind, p.name) for p in table] == documented(variant)
    assert len(table) == COUNTS[variant]
    for param in table:
        optional = param.name.endswith("Optional") or (variant, param.name) == ("J", "scales")
        assert param.optional is optional, param


def test_positions_named_by_the_documents() -> None:
    where = {v: variants.VARIANTS[v].position for v in "ABCDEFGHIJ"}
    assert where["B"]("moeExpertNum") == 12 and where["B"]("yOut") == 23
    assert where["C"]("topoType") == 23 and where["D"]("rankNumPerServer") == 24
    assert where["E"]("moeExpertNum") == 18 and where["E"]("yOut") == 31
    assert where["F"]("topkWeightsType") == 31 and where["G"]("activationParams") == 28
    assert where["H"]("maskBufferOptional") == 18 and where["H"]("yOut") == 33
    assert where["J"]("scales") == 12 and where["J"]("executor") == 38


@pytest.mark.parametrize("variant", list(DOCUMENTED))
def test_c_function_receives_every_argument_in_its_place(
    variant: str, stub_base: Path, tmp_path: Path
) -> None:
    root = acl_stubs.make_toolkit(tmp_path / "cann", stub_base)
    folder = acl_stubs.make_vendor(tmp_path / "vendor", recorder_source(variant))
    env = acl_stubs.environment(root, ASCEND_CUSTOM_OPP_PATH=str(folder), XMOE_ABI_PROBE="off")
    got = acl_stubs.run_child(f"VARIANT = {variant!r}\n" + CALL, env)
    assert got["size"] == 4096
    assert got["launched"] == [0xABC0, 4096, 1, 0x5150]
    assert got["left"] == {"tensors": 0, "lists": 0, "arrays": 0}
    seen = set()
    for (kind, name), (integer, real, text) in zip(documented(variant), got["slots"], strict=False):
        wanted = got["handles"].get(RENAMED.get(name, name))
        if kind == "F":
            assert real == struct.unpack("f", struct.pack("f", 7.25))[0]
        elif kind == "S":
            assert text == wanted == f"text {name}"
        elif kind == "FA":
            assert integer and got["array"] == [7.25, 1.5]
        elif kind in ("W", "X"):
            assert integer
        else:
            assert integer == wanted, name
            seen.add(integer)
    plain = [k for k, _ in documented(variant) if k in ("T", "O", "L", "i64")]
    assert len(seen) == len(plain), "all values differ, or a swap would go unseen"


def test_optional_arguments_become_null(stub_base: Path, tmp_path: Path) -> None:
    root = acl_stubs.make_toolkit(tmp_path / "cann", stub_base)
    folder = acl_stubs.make_vendor(tmp_path / "vendor", recorder_source("B"))
    env = acl_stubs.environment(root, ASCEND_CUSTOM_OPP_PATH=str(folder), XMOE_ABI_PROBE="off")
    code = CALL.replace(
        "    for key, value in args.items():",
        "    args.update({p.key: None for p in symbols.variant.params if p.optional})\n"
        "    for key, value in args.items():",
    )
    got = acl_stubs.run_child("VARIANT = None\n" + code, env)
    for (_, name), slot in zip(documented("B"), got["slots"], strict=False):
        if name.endswith("Optional"):
            assert slot[0] == 0, name


def full_arguments(variant: str) -> dict[str, object]:
    """Right keys; only the keys are looked at by check_arguments."""
    return {p.key: 1 for p in variants.VARIANTS[variant].params if p.kind not in ("W", "X")}


def test_unknown_missing_and_lost_arguments_are_refused() -> None:
    b = variants.VARIANTS["B"]
    with pytest.raises(ConfigError, match="'activationclamp'.*did you mean 'activationClamp'"):
        op.check_arguments(b, {**full_arguments("B"), "activationclamp": 1.0})
    short = full_arguments("B")
    del short["topkIds"]
    with pytest.raises(ConfigError, match="no value for topkIds"):
        op.check_arguments(b, short)
    with pytest.raises(UnsupportedError, match="topoType=1") as caught:
        op.check_arguments(b, {**full_arguments("B"), "topoType": 1, "sharedWeight1Optional": None})
    assert caught.value.rejections == ("topoType=1",)
    op.check_arguments(b, {**full_arguments("B"), "topoType": 0, "activationParams": ()})


@pytest.mark.parametrize(
    ("variant", "key", "neutral", "used"),
    [
        ("A", "activation", "swiglu", "swigluoai"),
        ("A", "activationClamp", 3.4028234663852886e38, 7.0),
        ("A", "bias1Optional", None, object()),
        ("G", "activationClamp", 0.0, 7.0),
        ("F", "activationParams", (), (7.0,)),
        ("B", "scales", None, object()),
        ("B", "rankNumPerServer", 2, 8),
        ("E", "topkWeightsType", 0, 1),
        ("B", "topoType", 0, True),
    ],
)
def test_a_lacking_parameter_must_be_neutral(
    variant: str, key: str, neutral: object, used: object
) -> None:
    full = full_arguments(variant)
    op.check_arguments(variants.VARIANTS[variant], {**full, key: neutral})
    with pytest.raises(UnsupportedError, match=key):
        op.check_arguments(variants.VARIANTS[variant], {**full, key: used})


def test_uncallable_variants_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="'K'.*combine_comm_mode"):
        variants.find_variant("K")
    with pytest.raises(ConfigError, match="'Z' is not a known"):
        variants.find_variant("Z")
    assert json.dumps(dict(variants.REFUSED))


def test_every_key_only_some_variants_have_has_a_neutral_value() -> None:
    every = {k for v in variants.VARIANTS.values() for k in v.keys()}
    for key in every:
        if not all(v.has(key) for v in variants.VARIANTS.values()):
            assert key in variants.NEUTRAL, key
