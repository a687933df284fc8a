# SPDX-License-Identifier: Apache-2.0
"""Argument lists of two-phase operators that exist in one form only (MegaMoe's: see variants.py).

Prototypes of aclnnA2e and aclnnE2a: afd-plugin csrc/npu/ascend_kernels/{a2e,e2a}/op_api; of the
four aclnnAfdAsync*: csrc/npu/pybind/torch_binding_cam_async.cpp (both read 2026-10). aclnnXsd*
exist on the software device only. Read at build time too: standard library only.
"""

from __future__ import annotations

# One letter per parameter: T tensor, i int64, d double, s char*. Behind them come, in each list,
# uint64_t* workspaceSize and aclOpExecutor** executor.
OPERATORS: dict[str, str] = {
    "aclnnA2e": "TTT" + "i" * 6 + "s" + "ii" + "TTTTT",
    "aclnnE2a": "TT" + "i" * 6 + "s" + "i" + "T",
    "aclnnAfdAsyncDispatchSend": "TTT" + "i" * 13 + "s" + "T",
    "aclnnAfdAsyncDispatchRecv": "TT" + "i" * 11 + "s" + "TTTT",
    "aclnnAfdAsyncCombineSend": "TTT" + "i" * 10 + "s" + "T",
    "aclnnAfdAsyncCombineRecv": "TTTT" + "i" * 9 + "s" + "T",
    "aclnnXsdUmdkAsyncDispatchSend": "TTT" + "i" * 13 + "s",
    "aclnnXsdUmdkAsyncDispatchRecv": "TT" + "i" * 11 + "s" + "T" * 7,
    "aclnnXsdUmdkAsyncCombineSend": "TTTT" + "i" * 10 + "s",
    "aclnnXsdUmdkAsyncCombineRecv": "TTTT" + "i" * 9 + "s" + "T",
    "aclnnXsdTimedKernel": "TTTT" + "iiii" + "ddd" + "T",
}
CTYPES = {"T": "const aclTensor*", "i": "int64_t", "d": "double", "s": "char*"}
