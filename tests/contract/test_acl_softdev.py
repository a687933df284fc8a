# SPDX-License-Identifier: Apache-2.0
"""The binding layer over the software device's real libraries."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from support.acl_stubs import environment, run_child
from support.tree import ROOT
from xmoe.kernels.acl import prototypes, toolkit

pytestmark = pytest.mark.skipif(
    not (toolkit.SOFTWARE_ROOT / "lib64" / "libascendcl.so").exists(),
    reason="the software device is not built; run kernels/softdev/build.py",
)
START = """
from xmoe.errors import *
from xmoe.kernels.acl.handles import *
from xmoe.kernels.acl.status import check, REPEAT_INITIALIZE
runtime = loader.load(toolkit.find_toolkit("soft"))
acl, ffi = runtime.acl, runtime.ffi
"""


def test_every_declared_function_is_exported() -> None:
    code = START + "say([acl.missing(), runtime.nnop.missing(), runtime.hccl.missing()])"
    assert run_child(code, environment(None)) == [{}, {}, {}]


def test_mega_moe_is_found_and_verified() -> None:
    code = START + "say([found(), runtime.identity, loader.interposed_functions(runtime)])"
    found, identity, interposed = run_child(code, environment(None))
    assert found["code"] == "" and found["variant"] == "B"
    assert [origin[3] for origin in found["origins"]] == [True, True]
    assert "software device" in identity and interposed == []


def test_memory_streams_events_and_tensors() -> None:
    code = (
        START
        + """
check(runtime, acl.aclInit(ffi.NULL), "aclInit")
again = acl.aclInit(ffi.NULL)
check(runtime, acl.aclrtSetDevice(0), "aclrtSetDevice")
with DeviceMemory(runtime, 256) as memory, AclStream(runtime) as stream, AclEvent(runtime) as event:
    memory.write(bytes(range(256)))
    status = acl.aclrtMemsetAsync(memory.pointer, 256, 7, 16, stream.pointer)
    check(runtime, status, "aclrtMemsetAsync")
    event.record(stream)
    stream.wait_event(event)
    event.synchronize(10.0)
    stream.synchronize(10.0)
    done, data = event.query(), list(memory.read(18))
    with TensorDesc(runtime, memory.handle, (4, 8), (16, 1), dtype="bfloat16") as tensor:
        dims, count, dtype = ffi.new("int64_t**"), ffi.new("uint64_t*"), ffi.new("int32_t*")
        check(runtime, runtime.nnop.aclGetViewShape(tensor.pointer, dims, count), "aclGetViewShape")
        shape = [dims[0][i] for i in range(count[0])]
        check(runtime, runtime.nnop.aclGetDataType(tensor.pointer, dtype), "aclGetDataType")
try:
    check(runtime, acl.aclrtSetDevice(999), "aclrtSetDevice")
except AclError as error:
    text = str(error)
say([again == REPEAT_INITIALIZE, done, data, shape, dtype[0], text])
"""
    )
    again, done, data, shape, dtype, text = run_child(code, environment(None))
    assert again and done and data == [7] * 16 + [16, 17]
    assert shape == [4, 8] and dtype == 27
    assert text.startswith("aclrtSetDevice returned ") and "999" in text


def test_structures_have_the_declared_layout(tmp_path: Path) -> None:
    source = tmp_path / "sizes.c"
    source.write_text(
        '#include <stdio.h>\n#include <stddef.h>\n#include "hccl.h"\nint main(void) {\n'
        'printf("%zu %zu %zu %zu", sizeof(HcclCommConfig), offsetof(HcclCommConfig, hcclCommName),'
        "offsetof(HcclCommConfig, hcclQos), sizeof(HcclRootInfo)); }\n"
    )
    include = ROOT / "kernels" / "softdev" / "include"
    program = tmp_path / "sizes"
    subprocess.run(["gcc", f"-I{include}", "-o", program, source], check=True, timeout=60)
    wanted = subprocess.run([program], capture_output=True, text=True, check=True).stdout
    code = (
        START
        + """
size, at = ffi.sizeof, ffi.offsetof
say([size("HcclCommConfig"), at("HcclCommConfig", "hcclCommName"),
     at("HcclCommConfig", "hcclQos"), size("HcclRootInfo")])
"""
    )
    assert run_child(code, environment(None)) == [int(x) for x in wanted.split()]


def plain_type(text: str) -> str:
    """A C type without spaces around stars, and with enumerations as the integers they are."""
    text = re.sub(r"\s*\*\s*", "*", " ".join(text.split()))
    if text in ("int", "aclDataType", "aclFormat", "HcclDataType", "HcclReduceOp") or (
        re.fullmatch(r"aclrt\w+(Kind|Status|BlockType|Policy|Attr)\*?", text)
    ):
        return "int32_t" + "*" * text.endswith("*")
    enumerations = r"(aclDataType|aclFormat|aclrt\w+Status)\*"
    text = re.sub(enumerations, "int32_t*", text)
    return text.replace("aclrtHostFunc", "aclrtCallback").replace("_Bool", "bool")


def device_prototypes() -> dict[str, tuple[str, list[str]]]:
    """Function -> (return type, parameter types), out of the software device's own headers."""
    found = {}
    for name in ("acl_rt.h", "aclnn_base.h", "hccl.h"):
        text = prototypes.strip_comments(
            (ROOT / "kernels" / "softdev" / "include" / name).read_text()
        )
        text = re.sub(r"^\s*#.*$", "", text, flags=re.MULTILINE)
        for ret, function, inside in re.findall(
            r"([A-Za-z_][\w\s*]*?)\b(\w+)\s*\(([^()]*)\)\s*;", text
        ):
            inside = " ".join(inside.split())
            parts = [] if inside in ("", "void") else inside.split(",")
            types = [re.sub(r"\w+$", "", part.strip()) for part in parts]
            found[function] = (plain_type(ret), [plain_type(t.strip()) for t in types])
    return found


def test_both_sides_declare_the_same_functions() -> None:
    # The two headers were written independently from the vendor's: a slip in one shows here.
    device = device_prototypes()
    folder = ROOT / "kernels" / "acl" / "decl"
    compared = 0
    for _, mine in prototypes.read_groups(folder):
        types = [plain_type(t) for t, _ in mine.params]
        assert device[mine.name] == (plain_type(mine.ret), types), mine.name
        compared += 1
    assert compared > 80
