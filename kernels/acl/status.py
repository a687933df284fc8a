# SPDX-License-Identifier: Apache-2.0
"""Turns the status of a vendor call into an exception with name, vendor's text and a hint."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xmoe.errors import AclError

if TYPE_CHECKING:
    from xmoe.kernels.acl.loader import Runtime

NAMES: dict[int, str] = {
    0: "SUCCESS",
    # aclnn. Source: ops-transformer 9.1.0 docs/zh/context, aclnn return codes.
    161001: "ACLNN_ERR_PARAM_NULLPTR",
    161002: "ACLNN_ERR_PARAM_INVALID",
    361001: "ACLNN_ERR_RUNTIME_ERROR",
    561000: "ACLNN_ERR_INNER",
    561001: "ACLNN_ERR_INNER_INFERSHAPE_ERROR",
    561002: "ACLNN_ERR_INNER_TILING_ERROR",
    561003: "ACLNN_ERR_INNER_FIND_KERNEL_ERROR",
    561101: "ACLNN_ERR_INNER_CREATE_EXECUTOR",
    561102: "ACLNN_ERR_INNER_NOT_TRANS_EXECUTOR",
    561103: "ACLNN_ERR_INNER_NULLPTR",
    561104: "ACLNN_ERR_INNER_WRONG_ATTR_INFO_SIZE",
    561105: "ACLNN_ERR_INNER_KEY_CONFILICT",
    561106: "ACLNN_ERR_INNER_INVALID_IMPL_MODE",
    561107: "ACLNN_ERR_INNER_OPP_PATH_NOT_FOUND",
    561108: "ACLNN_ERR_INNER_LOAD_JSON_FAILED",
    561109: "ACLNN_ERR_INNER_JSON_VALUE_NOT_FOUND",
    561110: "ACLNN_ERR_INNER_JSON_FORMAT_INVALID",
    561111: "ACLNN_ERR_INNER_JSON_DTYPE_INVALID",
    561112: "ACLNN_ERR_INNER_OPP_KERNEL_PKG_NOT_FOUND",
    561113: "ACLNN_ERR_INNER_OP_FILE_INVALID",
    561114: "ACLNN_ERR_INNER_ATTR_NUM_OUT_OF_BOUND",
    561115: "ACLNN_ERR_INNER_ATTR_LEN_NOT_ENOUGH",
    # Runtime. Source: Ascend/pytorch third_party/acl acl_base.h, rt_error_codes.h.
    100000: "ACL_ERROR_INVALID_PARAM",
    100001: "ACL_ERROR_UNINITIALIZE",
    100002: "ACL_ERROR_REPEAT_INITIALIZE",
    107000: "ACL_ERROR_RT_PARAM_INVALID",
    107001: "ACL_ERROR_RT_INVALID_DEVICEID",
    107002: "ACL_ERROR_RT_CONTEXT_NULL",
    107003: "ACL_ERROR_RT_STREAM_CONTEXT",
    107004: "ACL_ERROR_RT_MODEL_CONTEXT",
    107005: "ACL_ERROR_RT_STREAM_MODEL",
    107006: "ACL_ERROR_RT_EVENT_TIMESTAMP_INVALID",
    107017: "ACL_ERROR_RT_INVALID_HANDLE",
    107019: "ACL_ERROR_RT_WAIT_TIMEOUT",
    107020: "ACL_ERROR_RT_TASK_TIMEOUT",
    107021: "ACL_ERROR_RT_SYSPARAMOPT_NOT_SET",
    107022: "ACL_ERROR_RT_DEVICE_TASK_ABORT",
    200000: "ACL_ERROR_BAD_ALLOC",
    200001: "ACL_ERROR_API_NOT_SUPPORT",
    207000: "ACL_ERROR_RT_FEATURE_NOT_SUPPORT",
    207001: "ACL_ERROR_RT_MEMORY_ALLOCATION",
    207002: "ACL_ERROR_RT_MEMORY_FREE",
    500000: "ACL_ERROR_INTERNAL_ERROR",
    # Device, reported by a later synchronise call. Source: rt_error_codes.h.
    507000: "ACL_ERROR_RT_INTERNAL_ERROR",
    507011: "ACL_ERROR_RT_MODEL_EXECUTE",
    507014: "ACL_ERROR_RT_AICORE_TIMEOUT",
    507015: "ACL_ERROR_RT_AICORE_EXCEPTION",
    507016: "ACL_ERROR_RT_AICORE_TRAP_EXCEPTION",
    507018: "ACL_ERROR_RT_AICPU_EXCEPTION",
    507034: "ACL_ERROR_RT_VECTOR_CORE_TIMEOUT",
    507035: "ACL_ERROR_RT_VECTOR_CORE_EXCEPTION",
    507036: "ACL_ERROR_RT_VECTOR_CORE_TRAP_EXCEPTION",
    507046: "ACL_ERROR_RT_STREAM_SYNC_TIMEOUT",
    507047: "ACL_ERROR_RT_EVENT_SYNC_TIMEOUT",
    507053: "ACL_ERROR_RT_DEVICE_MEM_ERROR",
    507054: "ACL_ERROR_RT_HBM_MULTI_BIT_ECC_ERROR",
    507055: "ACL_ERROR_RT_SUSPECT_DEVICE_MEM_ERROR",
    507056: "ACL_ERROR_RT_LINK_ERROR",
    507057: "ACL_ERROR_RT_SUSPECT_REMOTE_ERROR",
}

HCCL_NAMES: dict[int, str] = {
    0: "HCCL_SUCCESS",
    1: "HCCL_E_PARA",
    2: "HCCL_E_PTR",
    3: "HCCL_E_MEMORY",
    4: "HCCL_E_INTERNAL",
    5: "HCCL_E_NOT_SUPPORT",
    6: "HCCL_E_NOT_FOUND",
    7: "HCCL_E_UNAVAIL",
    8: "HCCL_E_SYSCALL",
    9: "HCCL_E_TIMEOUT",
    10: "HCCL_E_OPEN_FILE_FAILURE",
    11: "HCCL_E_TCP_CONNECT",
    12: "HCCL_E_ROCE_CONNECT",
    13: "HCCL_E_TCP_TRANSFER",
    14: "HCCL_E_ROCE_TRANSFER",
    15: "HCCL_E_RUNTIME",
    16: "HCCL_E_DRV",
    17: "HCCL_E_PROFILING",
    18: "HCCL_E_CCE",
    19: "HCCL_E_NETWORK",
    20: "HCCL_E_AGAIN",
    21: "HCCL_E_REMOTE",
    22: "HCCL_E_SUSPENDING",
    23: "HCCL_E_OPRETRY_FAIL",
    24: "HCCL_E_OOM",
}
"""Source: Ascend/pytorch third_party/hccl/inc/hccl/hccl_types.h."""

REPEAT_INITIALIZE = 100002
DEVICE_ERRORS = frozenset(range(507000, 508000))
"""Work on the device failed; the window of the resource it used is poisoned."""

_HINTS: dict[int, str] = {
    161002: "moeExpertNum and epWorldSize must be positive and maxRecvTokenNum not negative",
    561002: "the operator refused a shape, an attribute or the window size; "
    "xmoe explain shows the limits",
    561003: "no kernel binary for this dtype combination; install the operator package's kernels "
    "for this SoC",
    561103: "no op_executor: phase one must succeed first, and each op_executor is launched once",
    561107: "set ASCEND_OPP_PATH by sourcing the toolkit's set_env.sh",
    107002: "bind a device in this thread first: binding is per thread",
    507034: "a kernel timed out, which also happens when a peer never arrives",
    507035: "a kernel failed; received rows above maxRecvTokenNum are one known cause",
    507057: "a peer died or never launched; look at the other ranks' logs",
}
_MISMATCH = (
    "the front end and the installed operator are probably from different packages or of another "
    "ABI variant"
)
_MISMATCH_CODES = frozenset({561104, 561105, 561114, 561115})
_MISMATCH_TEXT = "activation must not be nullptr"


def name_of(call: str, code: int) -> str:
    """The symbolic name of a status, or "UNKNOWN"."""
    return (HCCL_NAMES if _is_hccl(call) else NAMES).get(code, "UNKNOWN")


def check(runtime: Runtime, status: int, call: str) -> None:
    """Raise AclError unless `status` is zero. Call it directly after the vendor call: the vendor
    keeps its text per thread and drops it when it is read.

    Raises:
        AclError: with the vendor's recent text and a hint.
    """
    if status != 0:
        raise make_error(runtime, int(status), call)


def make_error(runtime: Runtime, status: int, call: str) -> AclError:
    """The exception for a failed call."""
    detail = recent_text(runtime)
    if _is_hccl(call) and not detail and runtime.hccl.has("HcclGetErrorString"):
        text = runtime.hccl.HcclGetErrorString(status)
        if text != runtime.ffi.NULL:
            detail = runtime.ffi.string(text).decode(errors="replace").strip()
    advice = hint(runtime, status, call, detail)
    return AclError(call, status, name_of(call, status), detail, advice)


def recent_text(runtime: Runtime) -> str:
    """The vendor's text for this thread's last failure; empty when there is none."""
    text = runtime.acl.aclGetRecentErrMsg()
    if text == runtime.ffi.NULL:
        return ""
    return str(runtime.ffi.string(text).decode(errors="replace").strip())


def hint(runtime: Runtime, status: int, call: str, detail: str) -> str:
    """What to look at next, or an empty string."""
    if _is_hccl(call):
        return ""
    mismatch = status in _MISMATCH_CODES or _MISMATCH_TEXT in detail
    # All pointers are checked before the call, so a null pointer seen by the library means that it
    # counts the arguments differently.
    if mismatch or (status == 161001 and call.startswith("aclnnMegaMoe")):
        return f"{_MISMATCH}: {loaded_files(runtime)}; check abi_variant and run xmoe doctor"
    return _HINTS.get(status, "")


def loaded_files(runtime: Runtime) -> str:
    """The libraries in play, for messages."""
    files = [f"{lib.name} from {lib.path}" for lib in runtime.libraries]
    return ", ".join(files) or "no libraries recorded"


def _is_hccl(call: str) -> bool:
    return call.startswith(("Hccl", "Hcom"))
