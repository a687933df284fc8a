/* SPDX-License-Identifier: Apache-2.0 */
/* libhccl_fwk.so, CANN 9.1.0. Source: ops-transformer torch_extension comm_context.cpp and
   hccl_common.h. The remote rank is 64 bits wide here, unlike in libhccl's own calls. */
HcclResult HcclGetRemoteIpcHcclBuf(HcclComm comm, uint64_t remoteRank, void** buffer, uint64_t* size);
HcclResult HcclCommGetHandleWithName(const char* commName, HcclComm* comm);
HcclResult HcomGetCommHandleByGroup(const char* group, HcclComm* comm);
