# SPDX-License-Identifier: Apache-2.0
"""Device memory, tensors, lists and op_executors without a launch."""

from __future__ import annotations

import os

from xmoe.conformance.case import NotHere, case, require
from xmoe.conformance.cases_streams import BYTES
from xmoe.conformance.session import TIMEOUT_S, Session
from xmoe.kernels.acl.handles import DATA_ALIGNMENT_BYTES, TensorDesc

HBM = 1  # ACL_HBM_MEM
MIB = 1 << 20


@case(
    "memory.alignment",
    "aclrtMalloc gives addresses that aclTensor accepts (32 bytes)",
    "WorkspaceCache",
)
def alignment(s: Session) -> str:
    addresses = [s.memory(size).handle for size in (1, 33, 100, 4096, MIB)]
    low = min((a & -a) for a in addresses)
    require(low >= DATA_ALIGNMENT_BYTES, f"one is aligned to {low} only")
    return f"all aligned to {low} bytes or more"


@case("memory.copies", "copies between host and device give the bytes back", "everything")
def copies(s: Session) -> str:
    data = os.urandom(BYTES)
    one, two, stream = s.memory(BYTES), s.memory(BYTES), s.stream()
    one.write(data)
    s.copy(two, one, stream)
    stream.synchronize(TIMEOUT_S)
    require(two.read() == data, "the bytes differ")
    return f"{BYTES} bytes to the device, inside it, and back"


@case(
    "memory.info",
    "aclrtGetMemInfo gives free and total bytes, and free falls with an allocation",
    "reports",
)
def info(s: Session) -> str:
    def look() -> tuple[int, int, int]:
        free, total = s.ffi.new("size_t*"), s.ffi.new("size_t*")
        code = s.acl("aclrtGetMemInfo")(HBM, free, total)
        return code, int(free[0]), int(total[0])

    code, before, total = look()
    if code != 0:
        raise NotHere(f"aclrtGetMemInfo(1) gave {code}: {s.text()}")
    s.memory(256 * MIB)
    after = look()[1]
    require(0 < after < before <= total, f"free {before}, then {after}, total {total}")
    return f"total {total >> 30} GiB; 256 MiB took {(before - after) >> 20} MiB"


@case(
    "memory.too_large",
    "an allocation that cannot be made gives a code, and later ones work",
    "errors",
)
def too_large(s: Session) -> str:
    out = s.ffi.new("void**")
    code = s.acl("aclrtMalloc")(out, 1 << 50, 0)
    require(code != 0, "2**50 bytes were granted")
    s.memory(MIB)
    return f"code {code}"


@case("memory.copy_beyond", "a copy larger than its target is refused before it happens", "errors")
def copy_beyond(s: Session) -> str:
    memory = s.memory(64)
    code = s.acl("aclrtMemcpy")(memory.pointer, 32, s.ffi.new("char[64]"), 64, 1)
    require(code != 0, "64 bytes went into 32")
    return f"code {code}"


@case(
    "tensor.read_back",
    "aclTensor holds shape, strides and data type as they were given",
    "TensorDesc",
)
def read_back(s: Session) -> str:
    memory = s.memory(4096)
    made = s.stack.enter_context(
        TensorDesc(s.runtime, memory.handle, (4, 8), (16, 1), dtype="bfloat16", storage=(4, 16))
    )
    dims, count, code = s.ffi.new("int64_t**"), s.ffi.new("uint64_t*"), s.ffi.new("int32_t*")
    seen = []
    for name in ("aclGetViewShape", "aclGetViewStrides"):
        require(s.nnop(name)(made.pointer, dims, count) == 0, f"{name} failed: {s.text()}")
        seen.append([int(dims[0][i]) for i in range(count[0])])
    require(s.nnop("aclGetDataType")(made.pointer, code) == 0, "aclGetDataType failed")
    require(seen == [[4, 8], [16, 1]] and code[0] == 27, f"{seen}, data type {code[0]}")
    return f"shape {seen[0]}, strides {seen[1]}, data type {code[0]}"


@case("tensor.empty", "a tensor without elements may have a null address", "optional arguments")
def empty(s: Session) -> str:
    with TensorDesc(s.runtime, 0, (0,), dtype="float32"):
        return "made and destroyed"


@case("list.takes_members_over", "destroying a list destroys its members", "TensorListDesc")
def takes_members_over(s: Session) -> str:
    if not s.soft:
        raise NotHere("asking a vendor's CANN for a member afterwards would use freed memory")
    memory = s.memory(4096)
    member = TensorDesc(s.runtime, memory.handle, (8,), dtype="float32")
    address = member.release_to_owner()
    array = s.ffi.new("const aclTensor*[]", [address])
    made = s.nnop("aclCreateTensorList")(array, 1)
    code = s.nnop("aclDestroyTensorList")(made)
    again = s.nnop("aclDestroyTensor")(address)
    require(code == 0 and again != 0, f"list {code}, member afterwards {again}")
    s.text()
    return f"the member is gone: {again}"


@case("executor.null", "aclSetAclOpExecutorRepeatable of null gives 561103", "op")
def executor_null(s: Session) -> str:
    code = s.nnop("aclSetAclOpExecutorRepeatable")(s.ffi.NULL)
    require(code == 561103, f"code {code}: {s.text()}")
    return f"code {code}"
