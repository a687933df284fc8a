# SPDX-License-Identifier: Apache-2.0
"""Owned objects close once and in order; descriptors refuse what the ABI cannot express."""

from __future__ import annotations

from pathlib import Path

import pytest

from support import acl_stubs
from support.acl_stubs import environment, run_child


@pytest.fixture
def env(stub_base: Path, tmp_path: Path) -> dict[str, str]:
    return environment(acl_stubs.make_toolkit(tmp_path / "cann", stub_base))


START = """
from xmoe.errors import *
from xmoe.kernels.acl.handles import *
from xmoe.kernels.acl import status
runtime = loader.load(toolkit.find_toolkit())
folder = runtime.toolkit.lib_dirs[0]
nnop = ctypes.CDLL(str(folder / "libnnopbase.so"))
acl = ctypes.CDLL(str(folder / "libascendcl.so"))
count = lambda name, lib=nnop: ctypes.c_int.in_dll(lib, name).value
def refused(call):
    try:
        call()
    except XmoeError as error:
        return f"{type(error).__name__}: {error}"
    return ""
"""


def test_descriptors_refuse_contradictions(env: dict[str, str]) -> None:
    code = (
        START
        + """
def tensor(ptr=4096, shape=(4, 8), strides=None, dtype="bfloat16", **more):
    return lambda: TensorDesc(runtime, ptr, shape, strides, dtype=dtype, **more).close()
say({
    "negative": refused(tensor(shape=(4, -1))),
    "float": refused(tensor(shape=(4.0, 8))),
    "bool": refused(tensor(shape=(True, 8))),
    "huge": refused(tensor(shape=(2**40, 2**40))),
    "huge broadcast": refused(tensor(shape=(2**40, 2**40), strides=(0, 0))),
    "huge bytes": refused(tensor(shape=(2**62,), dtype="float32")),
    "rank": refused(tensor(shape=(1,) * 9)),
    "strides": refused(tensor(strides=(8,))),
    "negative stride": refused(tensor(strides=(-8, 1))),
    "storage": refused(tensor(storage=(31,))),
    "offset": refused(tensor(storage=(32,), offset=1)),
    "negative offset": refused(tensor(offset=-1)),
    "null": refused(tensor(ptr=0)),
    "unaligned": refused(tensor(ptr=4096 + 16)),
    "address": refused(tensor(ptr=2**64)),
    "dtype": refused(tensor(dtype="int128")),
    "dtype code": refused(tensor(dtype=28)),
    "format": refused(tensor(format="NZ")),
    "left": count("tensors"),
    "fine": [refused(tensor(ptr=0, shape=(0, 8))), refused(tensor(strides=(16, 2))),
             refused(tensor(storage=(40,), offset=8)), refused(tensor(dtype="torch.int32")),
             refused(tensor(shape=())), refused(tensor(strides=(0, 1)))],
})
"""
    )
    got = run_child(code, env)
    assert got.pop("fine") == [""] * 6
    assert got.pop("left") == 0
    for name, text in got.items():
        assert text.startswith("ConfigError: ") and "allowed: " in text, (name, text)


def test_a_list_owns_and_destroys_its_members(env: dict[str, str]) -> None:
    code = (
        START
        + """
a, b, c = (TensorDesc(runtime, 4096, (2,), dtype="int32") for _ in range(3))
both = TensorListDesc(runtime, [a, b])
seen = [count("tensors"), a.closed, b.closed, len(both)]
a.close()
seen += [count("tensors"), refused(lambda: TensorListDesc(runtime, [a, c])),
         refused(lambda: TensorListDesc(runtime, [c, c])),
         refused(lambda: TensorListDesc(runtime, [])), c.closed]
both.close(); both.close(); c.close()
seen += [count("tensors"), count("lists"), refused(lambda: both.handle)]
say(seen)
"""
    )
    got = run_child(code, env)
    assert got[:4] == [3, True, True, 2] and got[4] == 3
    assert "is closed" in got[5] and "holds one twice" in got[6] and "0 members" in got[7]
    assert got[8] is False and got[9:11] == [0, 0] and "is closed" in got[11]


def test_handles_close_in_reverse_order_and_once(env: dict[str, str]) -> None:
    code = (
        START
        + """
import contextlib
order = []
class Noted(DeviceMemory):
    def _release(self, handle):
        order.append(self.nbytes); super()._release(handle)
with contextlib.ExitStack() as stack:
    for n in (1, 2, 3):
        stack.enter_context(Noted(runtime, n))
    inside = count("allocated", acl)
say([order, inside, count("allocated", acl), refused(lambda: DeviceMemory(runtime, 0))])
"""
    )
    order, inside, left, text = run_child(code, env)
    assert order == [3, 2, 1] and inside == 3 and left == 0 and "0 bytes" in text


def test_a_forgotten_handle_warns_and_is_not_freed(env: dict[str, str]) -> None:
    code = (
        START
        + """
import gc, warnings
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    memory = DeviceMemory(runtime, 64)
    del memory; gc.collect()
    with DeviceMemory(runtime, 64):
        pass
    gc.collect()
say([[w.category.__name__, str(w.message)] for w in seen] + [count("allocated", acl)])
"""
    )
    first, left = run_child(code, env)
    assert first[0] == "ResourceWarning" and "DeviceMemory was not closed" in first[1]
    assert left == 1


def test_memory_copies_and_bounds(env: dict[str, str]) -> None:
    code = (
        START
        + """
with DeviceMemory(runtime, 8) as memory:
    memory.write(b"abcdefgh"); memory.write(b"XY", 3)
    say([memory.read().decode(), memory.read(2, 3).decode(),
         refused(lambda: memory.write(b"12", 7)), refused(lambda: memory.read(9)),
         refused(lambda: memory.read(1, -1))])
"""
    )
    whole, part, *refusals = run_child(code, env)
    assert whole == "abcXYfgh" and part == "XY"
    assert all("within 8 bytes" in text for text in refusals)


def test_status_has_name_vendor_text_and_hint(env: dict[str, str]) -> None:
    code = (
        START
        + """
def error_of(code, call, text=b""):
    acl.stubSetText(ctypes.c_char_p(text) if text else None)
    try:
        status.check(runtime, code, call)
    except AclError as error:
        return [error.code, error.name, error.detail, str(error)]
with AclStream(runtime) as stream:
    sync = refused(stream.synchronize)
say([status.check(runtime, 0, "aclInit"),
     error_of(561002, "aclnnMegaMoeGetWorkspaceSize", b"EZ9999 H"),
     error_of(161001, "aclnnMegaMoeGetWorkspaceSize"), error_of(561114, "aclnnMegaMoe"),
     error_of(999, "aclnnMegaMoe"), error_of(9, "HcclCommDestroy"),
     error_of(561000, "aclnnMegaMoe", b"EZ1001 activation must not be nullptr."), sync,
     refused(stream.synchronize)])
"""
    )
    ok, tiling, null, attrs, odd, hccl, activation, sync, closed = run_child(code, env)
    assert ok is None
    assert tiling[:3] == [561002, "ACLNN_ERR_INNER_TILING_ERROR", "EZ9999 H"]
    assert "xmoe explain" in tiling[3] and "returned 561002" in tiling[3]
    for mismatch in (null, attrs, activation):
        assert "different packages or of another ABI variant" in mismatch[3]
        assert "libnnopbase.so from /" in mismatch[3]
    assert odd[1] == "UNKNOWN" and hccl[1] == "HCCL_E_TIMEOUT"
    assert "507035 (ACL_ERROR_RT_VECTOR_CORE_EXCEPTION)" in sync
    assert closed.startswith("ConfigError")
