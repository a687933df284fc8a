# SPDX-License-Identifier: Apache-2.0
"""Tensors, lists, arrays and executors of the software device."""

from __future__ import annotations

import ctypes as C
import threading

import pytest

from support.softdev import FLOAT, child, device, error, library

NZ, INT4, BF16 = 29, 29, 27


def _view(kwargs: dict[str, object], size: int = 4096, shift: int = 0) -> str:
    api = device()
    pointer = api.malloc(size)
    data = C.c_void_p((pointer.value or 0) + shift)
    shape = kwargs.pop("shape", (4, 8))
    tensor = api.tensor(shape, data, **kwargs)  # type: ignore[arg-type]
    if tensor is None:
        return error()
    assert api.status("aclDestroyTensor", C.c_void_p(tensor)) == 0
    return "ok"


@pytest.mark.parametrize(
    ("kwargs", "expected"),
    [
        ({}, "ok"),
        ({"shape": ()}, "ok"),
        ({"shape": (0, 8)}, "ok"),
        ({"strides": (1, 4)}, "ok"),
        ({"strides": (0, 1), "storage": (8,)}, "ok"),
        ({"storage": (1024,), "offset": 992}, "ok"),
        ({"dtype": INT4, "shape": (1, 8192), "storage": (8192,)}, "ok"),
        ({"form": NZ, "dtype": BF16, "shape": (32, 64), "storage": (4, 2, 16, 16)}, "ok"),
        ({"storage": (1024,), "offset": 993}, "outside its storage"),
        ({"strides": (9, 1)}, "outside its storage"),
        ({"storage": (1025,)}, "not inside one live device allocation"),
        ({"dtype": INT4, "shape": (1, 8194), "storage": (8194,)}, "not inside one live device"),
        ({"strides": (-8, 1)}, "stride is negative"),
        ({"strides": (2**62, 1)}, "outside its storage"),
        ({"strides": (2**62, 2**62), "shape": (4, 4)}, "stride is negative or too large"),
        ({"shape": (-1, 8)}, "viewDims are negative"),
        ({"storage": (2**40, 2**40)}, "storageDims are negative or too large"),
        ({"offset": -1}, "negative offset"),
        ({"dtype": 99}, "unknown dataType"),
        ({"dtype": 13}, "unknown dataType"),
        ({"form": 99}, "unknown format"),
        ({"shape": (1,) * 9}, "more than 8 dimensions"),
    ],
)
def test_views_are_checked(kwargs, expected):
    assert expected in child(_view, kwargs)


def test_data_must_be_aligned_and_there():
    assert "32-byte aligned" in child(_view, {}, 4096, 16)
    assert "not inside one live device" in child(_view, {}, 4096, 4096 - 32)


def _null_data() -> list[object]:
    api = device()
    return [api.tensor((2,), None), error(), api.tensor((0,), None) is not None]


def test_only_empty_tensors_may_have_no_data():
    refused, text, empty = child(_null_data)
    assert refused is None and "tensorData is null" in text and empty


def _lists() -> list[object]:
    api = device()
    data = api.malloc(4096)
    members = [api.tensor((4,), data) for _ in range(3)]
    nnop = library("nnopbase")

    def make(*values: int | None) -> int | None:
        pointers = (C.c_void_p * max(1, len(values)))(*values)
        made: int | None = nnop.aclCreateTensorList(pointers, C.c_uint64(len(values)))
        return made

    made = make(*members)
    size = C.c_uint64()
    api.aclGetTensorListSize(C.c_void_p(made), C.byref(size))
    out: list[object] = [size.value]
    out.append(make(members[0]))  # owned by the first list
    out.append(error())
    out.append(api.status("aclDestroyTensor", C.c_void_p(members[1])))
    out.append(error())
    spare = api.tensor((4,), data)
    out.append(make(spare, spare))
    out.append(make(spare, None))
    out.append(make() is not None)
    out.append(api.status("aclDestroyTensorList", C.c_void_p(made)))
    alive = [nnop.xsdTensorAlive(C.c_void_p(member)) for member in members]
    out.append(alive)
    out.append(api.status("aclDestroyTensorList", C.c_void_p(made)))
    out.append(api.status("aclDestroyTensor", C.c_void_p(members[0])))
    out.append(api.status("aclDestroyTensor", C.c_void_p(spare)))
    return out


def test_a_list_owns_its_members():
    out = child(_lists)
    assert out[0] == 3
    assert out[1] is None and "not a live tensor of its own" in out[2]
    assert out[3] == 161002 and "belongs to a tensor list" in out[4]
    assert out[5] is None and out[6] is None and out[7] is True
    assert out[8:] == [0, [0, 0, 0], 161002, 161002, 0]


def _readers() -> list[object]:
    api = device()
    tensor = C.c_void_p(api.tensor((4, 8), api.malloc(4096), strides=(1, 4)))
    dims, n = C.POINTER(C.c_int64)(), C.c_uint64()
    out: list[object] = []
    for call in ("aclGetViewShape", "aclGetViewStrides"):
        getattr(api, call)(tensor, C.byref(dims), C.byref(n))
        out.append([dims[i] for i in range(n.value)])
    value = C.c_int(-5)
    api.aclGetDataType(tensor, C.byref(value))
    out.append(value.value)
    api.aclGetFormat(tensor, C.byref(value))
    out.append(value.value)
    floats = (C.c_float * 3)(1.0, 2.0, 3.0)
    array = C.c_void_p(library("nnopbase").aclCreateFloatArray(floats, C.c_uint64(3)))
    api.aclGetFloatArraySize(array, C.byref(n))
    out.append(n.value)
    out.append(api.status("aclDestroyFloatArray", array))
    out.append(api.status("aclDestroyFloatArray", array))
    out.append(api.status("aclDestroyIntArray", array))
    scalar = C.c_void_p(library("nnopbase").aclCreateScalar(C.byref(C.c_float(2.5)), FLOAT))
    out.append(api.status("aclDestroyScalar", scalar))
    out.append(api.status("aclDestroyScalar", scalar))
    return out


def test_readers_arrays_and_scalars():
    assert child(_readers) == [[4, 8], [1, 4], 0, 2, 3, 0, 161002, 161002, 0, 161002]


def _once() -> list[object]:
    api = device()
    seen: list[int] = []
    stream = api.stream()
    executor = api.executor(lambda ws, n: seen.append(n))
    out: list[object] = [api.launch(executor, stream)]
    out += [api.launch(executor, stream), error()]
    out.append(api.status("aclDestroyAclOpExecutor", executor))
    api.aclrtSynchronizeStream(stream)
    out.append(len(seen))
    unused = api.executor(lambda ws, n: None)
    out += [api.status("aclDestroyAclOpExecutor", unused), api.launch(unused, stream)]
    other = api.executor(lambda ws, n: None)
    out += [api.status("xsdExecutorLaunch", b"other", None, C.c_uint64(0), other, stream), error()]
    out += [api.launch(C.c_void_p(None), stream), api.status("aclSetAclOpExecutorRepeatable", None)]
    return out


def test_an_executor_is_good_for_one_launch():
    out = child(_once)
    assert out[:2] == [0, 361001] and "launched before" in out[2]
    assert out[3:7] == [361001, 1, 0, 361001]
    assert out[7] == 161002 and "prepared by op" in out[8]
    assert out[9:] == [561103, 561103]


def _repeatable() -> list[int]:
    api = device()
    seen: list[int] = []
    stream = api.stream()
    executor = api.executor(lambda ws, n: seen.append(1))
    api.aclSetAclOpExecutorRepeatable(executor)
    out = [api.launch(executor, stream) for _ in range(5)]
    out.append(api.status("aclDestroyAclOpExecutor", executor))  # queued launches still run
    out.append(api.launch(executor, stream))
    api.aclrtSynchronizeStream(stream)
    return [*out, len(seen)]


def test_a_repeatable_executor_until_destroyed():
    assert child(_repeatable) == [0] * 5 + [0, 361001, 5]


def _workspace() -> list[object]:
    api = device()
    stream = api.stream()
    workspace = api.malloc(1024)
    address = workspace.value or 0
    executor = api.executor(lambda ws, n: None, 1000)
    out: list[object] = []
    for pointer, size in ((None, 0), (address, 999), (address, 1025), (address + 8, 1000)):
        out.append((api.launch(executor, stream, C.c_void_p(pointer), size), error()))
    # A refused launch does not use the executor up.
    out.append((api.launch(executor, stream, workspace, 1024), ""))
    api.aclrtSynchronizeStream(stream)
    return out


def test_the_workspace_is_checked():
    null, small, over, odd, good = child(_workspace)
    assert null[0] == 161001 and "1000 bytes are needed" in null[1]
    assert small[0] == 161002 and "workspaceSize 999" in small[1]
    assert over[0] == 161002 and "not inside one live allocation" in over[1]
    assert odd[0] == 161002 and "32-byte aligned" in odd[1]
    assert good[0] == 0


def _overrun(size: int, need: int, at: int) -> tuple[int, str]:
    api = device()
    stream = api.stream()
    workspace = api.malloc(size)
    executor = api.executor(lambda ws, n: (C.memset(ws + at, 0, 1), 0)[1], need)
    assert api.launch(executor, stream, workspace, size) == 0
    return api.status("aclrtSynchronizeStream", stream), error()


@pytest.mark.parametrize(
    ("size", "need", "at", "bad"),
    [(1024, 1024, 1023, 0), (1024, 1024, 1024, 1), (1024, 1024, 1087, 1), (4096, 1000, 1000, 1)],
)
def test_guard_words_behind_the_workspace(size, need, at, bad):
    code, text = child(_overrun, size, need, at)
    assert code == (507053 if bad else 0)
    assert not bad or f"behind the {need}-byte workspace of op" in text


def _freed_workspace() -> tuple[int, str]:
    api = device()
    stream, gate = api.stream(), threading.Event()
    workspace = api.malloc(1 << 20)
    executor = api.executor(lambda ws, n: 0 if gate.wait(20) else 7, 1 << 20)
    assert api.launch(executor, stream, workspace, 1 << 20) == 0
    api.aclrtFree(workspace)
    gate.set()
    return api.status("aclrtSynchronizeStream", stream), error()


def test_freeing_the_workspace_of_a_running_launch_is_found():
    code, text = child(_freed_workspace)
    assert code == 507053 and "freed before the launch was done" in text


def _wrong_thread() -> list[object]:
    """A launch on a thread without a device is refused with a text."""
    api = device()
    stream = api.stream()
    executor = api.executor(lambda ws, n: None)
    out: list[object] = []

    def run() -> None:
        out.extend([api.launch(executor, stream), error()])

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return out


def test_launching_needs_a_device_on_the_thread():
    code, text = child(_wrong_thread)
    assert code == 361001 and "aclrtSetDevice" in text
