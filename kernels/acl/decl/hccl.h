/* SPDX-License-Identifier: Apache-2.0 */
/* libhccl.so, CANN 9.1.0. Source: Ascend/pytorch third_party/hccl/inc/hccl/hccl.h; the Kfc group
   from ops-transformer torch_extension comm_context.cpp (no public header declares it). */
HcclResult HcclGetRootInfo(HcclRootInfo* rootInfo);
HcclResult HcclCommInitRootInfo(uint32_t nRanks, const HcclRootInfo* rootInfo, uint32_t rank, HcclComm* comm);
HcclResult HcclCommInitRootInfoConfig(uint32_t nRanks, const HcclRootInfo* rootInfo, uint32_t rank, const HcclCommConfig* config, HcclComm* comm);
HcclResult HcclCommDestroy(HcclComm comm);
HcclResult HcclGetRankSize(HcclComm comm, uint32_t* rankSize);
HcclResult HcclGetRankId(HcclComm comm, uint32_t* rank);
HcclResult HcclGetCommName(HcclComm comm, char* commName);
const char* HcclGetErrorString(HcclResult code);
HcclResult HcclGetCommAsyncError(HcclComm comm, HcclResult* asyncError);
HcclResult HcclAllReduce(void* sendBuf, void* recvBuf, uint64_t count, int32_t dataType, int32_t op, HcclComm comm, aclrtStream stream);
HcclResult HcclAllGather(void* sendBuf, void* recvBuf, uint64_t sendCount, int32_t dataType, HcclComm comm, aclrtStream stream);
HcclResult HcclReduceScatter(void* sendBuf, void* recvBuf, uint64_t recvCount, int32_t dataType, int32_t op, HcclComm comm, aclrtStream stream);
HcclResult HcclBroadcast(void* buf, uint64_t count, int32_t dataType, uint32_t root, HcclComm comm, aclrtStream stream);
HcclResult HcclAlltoAll(const void* sendBuf, uint64_t sendCount, int32_t sendType, const void* recvBuf, uint64_t recvCount, int32_t recvType, HcclComm comm, aclrtStream stream);
HcclResult HcclAlltoAllV(const void* sendBuf, const void* sendCounts, const void* sdispls, int32_t sendType, const void* recvBuf, const void* recvCounts, const void* rdispls, int32_t recvType, HcclComm comm, aclrtStream stream);
HcclResult HcclBarrier(HcclComm comm, aclrtStream stream);

HcclResult HcclKfcAllocOpArgs(void** opArgs);
HcclResult HcclKfcFreeOpArgs(void* opArgs);
HcclResult HcclKfcOpArgsSetAlgConfig(void* opArgs, char* algConfig);
HcclResult HcclKfcOpArgsSetCommEngine(void* opArgs, uint8_t commEngine);
HcclResult HcclCreateOpResCtx(HcclComm comm, uint8_t opType, void* opArgs, void** opResCtx);
HcclResult HcclGetHcclBuffer(HcclComm comm, void** buffer, uint64_t* size);
