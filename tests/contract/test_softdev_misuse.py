# SPDX-License-Identifier: Apache-2.0
"""Misuse of every exported function: null pointers, invented and stale handles never crash."""

from __future__ import annotations

import ctypes as C
import random
import re
import subprocess
from pathlib import Path

import pytest

from support import softdev
from support.forked import fork_ranks
from support.softdev import CALLBACK, KERNEL, LIB64, SOFTDEV, TASK, error

# One letter per parameter. h handle, o pointer the call writes through (null or real memory),
# p pointer it reads through (null or real memory), n count or size, i small integer or enum,
# s text, f function, t timeout in ms.
ACL = """
aclInit:s aclFinalize: aclrtSetDevice:i aclrtGetDevice:o aclrtResetDevice:i aclrtGetDeviceCount:o
aclrtGetRunMode:o aclrtGetSocName: aclrtCreateContext:oi aclrtDestroyContext:h
aclrtSetCurrentContext:h aclrtGetCurrentContext:o aclGetRecentErrMsg: aclsysGetVersionStr:so
aclsysGetVersionNum:so aclrtMalloc:oni aclrtMallocAlign32:oni aclrtFree:h aclrtMallocHost:on
aclrtFreeHost:h aclrtGetMemInfo:ioo aclrtMemcpy:onpni aclrtMemcpyAsync:onpnih aclrtMemset:onin
aclrtMemsetAsync:oninh aclrtCreateStream:o aclrtCreateStreamWithConfig:oii aclrtDestroyStream:h
aclrtDestroyStreamForce:h aclrtSynchronizeStream:h aclrtSynchronizeStreamWithTimeout:ht
aclrtSynchronizeDevice: aclrtSynchronizeDeviceWithTimeout:t aclrtStreamQuery:ho aclrtStreamGetId:ho
aclrtStreamWaitEvent:hh aclrtCreateEvent:o aclrtCreateEventWithFlag:oi aclrtCreateEventExWithFlag:oi
aclrtDestroyEvent:h aclrtRecordEvent:hh aclrtQueryEventStatus:ho aclrtSynchronizeEvent:h
aclrtSynchronizeEventWithTimeout:ht aclrtEventElapsedTime:ohh aclrtSubscribeReport:ih
aclrtUnSubscribeReport:ih aclrtLaunchCallback:fpih aclrtProcessReport:t aclrtLaunchHostFunc:hfp
xsdIdentity:
"""
NNOP = """
aclCreateTensor:pnipnipno aclCreateTensorList:hn aclCreateScalar:pi aclCreateIntArray:pn
aclCreateFloatArray:pn aclCreateBoolArray:pn aclDestroyTensor:h aclDestroyTensorList:h
aclDestroyScalar:h aclDestroyIntArray:h aclDestroyFloatArray:h aclDestroyBoolArray:h
aclGetViewShape:hoo aclGetViewStrides:hoo aclGetDataType:ho aclGetFormat:ho aclGetTensorListSize:ho
aclGetIntArraySize:ho aclGetFloatArraySize:ho aclGetBoolArraySize:ho aclSetAclOpExecutorRepeatable:h
aclDestroyAclOpExecutor:h
"""
HCCL = """
HcclGetRootInfo:o HcclCommInitRootInfo:ipio HcclCommInitRootInfoConfig:ipipo HcclCommDestroy:h
HcclGetRankSize:ho HcclGetRankId:ho HcclGetCommName:ho HcclGetCommAsyncError:ho HcclGetErrorString:i
HcclGetCommConfigCapability: HcclAllReduce:pppiihh HcclReduceScatter:poniihh HcclBroadcast:oniihh
HcclAllGather:ponihh HcclAlltoAll:pnionihh HcclAlltoAllV:pppipppihh HcclBarrier:hh
HcclKfcAllocOpArgs:o HcclKfcFreeOpArgs:h HcclKfcOpArgsSetAlgConfig:hs HcclKfcOpArgsSetCommEngine:hi
HcclCreateOpResCtx:hiho HcclGetHcclBuffer:hoo
"""
FWK = """
HcclGetRemoteIpcHcclBuf:hioo HcclCommGetHandleWithName:so HcomGetCommHandleByGroup:so
"""
TABLES = {"ascendcl": ACL, "nnopbase": NNOP, "hccl": HCCL, "hccl_fwk": FWK}


def table(name: str) -> dict[str, str]:
    return dict(entry.split(":") for entry in TABLES[name].split())


@pytest.mark.parametrize("name", TABLES)
def test_exported_names_are_the_declared_ones(name):
    """The libraries export what the public headers declare, plus xsd names, and nothing else."""
    exported = _exported(name)
    own = {symbol for symbol in exported if symbol.startswith("xsd")} - {"xsdIdentity"}
    assert exported - own <= _declared()
    assert set(table(name)) <= exported
    sources = [*(SOFTDEV / "include").glob("*.h"), *(SOFTDEV / "src").rglob("*.h")]
    private = "".join(path.read_text() for path in sources)
    assert own <= set(re.findall(r"\bxsd\w+", private))


def test_headers_declare_every_exported_name():
    names = [path.stem.removeprefix("lib") for path in LIB64.glob("lib*.so")]
    exported = set().union(*(_exported(name) for name in names if name != "opapi"))
    assert _declared() - exported == set()


def _exported(name: str) -> set[str]:
    listing = subprocess.run(
        ["nm", "-D", "--defined-only", str(LIB64 / f"lib{name}.so")],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return {line.split()[-1] for line in listing.splitlines()}


def _declared() -> set[str]:
    found = set()
    for header in ("acl_rt.h", "aclnn_base.h", "hccl.h", "acl_npu.h"):
        text = (SOFTDEV / "include" / header).read_text()
        found |= set(re.findall(r"\b((?:acl|rt|Msprof|Hccl|Hcom|xsd)\w+)\(", text))
    return found


def _fuzz(rank: int, folder: Path, name: str, seed: int) -> int:
    api = softdev.device()
    api.aclrtSetDevice(1)
    api.aclrtSetDevice(0)
    draw = random.Random(seed)
    scratch = C.create_string_buffer(1 << 16)
    # Live and stale handles of every kind, so that one kind is also passed as another.
    handles = [0, 1, 8, 4096, 2**63, 2**64 - 1, C.addressof(scratch), api.malloc(64).value]
    stream, event = api.stream(), api.event()
    api.aclrtDestroyStream(stream)
    api.aclrtDestroyEvent(event)
    tensor = api.tensor((4,), api.malloc(256))
    dead = api.tensor((4,), api.malloc(256))
    api.aclDestroyTensor(C.c_void_p(dead))
    executor = api.executor(lambda ws, n: None)
    handles += [stream.value, event.value, tensor, dead, executor.value]
    handles += [api.stream().value, api.event().value]
    functions = [TASK(lambda arg: 0), CALLBACK(lambda arg: None), KERNEL(lambda *arg: 0)]
    api.kept += functions

    def value(kind: str) -> object:
        if kind == "h":
            return C.c_void_p(draw.choice(handles))
        if kind in "op":
            return draw.choice([None, C.cast(scratch, C.c_void_p)])
        if kind == "n":
            return C.c_uint64(draw.choice([0, 1, 7, 8, 9, 64]))
        if kind == "t":
            return draw.choice([-7, 0, 1])
        if kind == "s":
            return draw.choice([None, b"", b"x", b"runtime", b"/no/such", b"x" * 300])
        if kind == "f":
            return draw.choice([None, functions[1]])
        return C.c_int64(draw.choice([-1, 0, 1, 2, 3, 8, 99, 2**31 - 1]))

    calls = table(name)
    lib = softdev.library(name)
    done = 0
    for _ in range(60):
        for call, kinds in calls.items():
            # The lists read `n` handles through a pointer: give them real memory.
            arguments = [value(kind) for kind in kinds]
            if call == "aclCreateTensorList":
                arguments[0] = value("p")
            if call.startswith("HcclCommInit"):
                arguments[0] = C.c_uint32(1)  # a group of one never waits
            getattr(lib, call)(*arguments)
            error()
            done += 1
    return done


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_wrong_arguments_never_crash(name, seed):
    env = {"XSD_WAIT_TIMEOUT_MS": "200", "HCCL_BUFFSIZE": "1"}
    value = fork_ranks(_fuzz, 1, name, seed, env=env)[0].value
    assert value == 60 * len(table(name))
