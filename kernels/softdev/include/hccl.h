/* SPDX-License-Identifier: Apache-2.0 */
/* Functions of libhccl and libhccl_fwk that the software device exports, with CANN's C ABI.
   Sources: hccl.h and hccl_types.h as shipped with torch_npu 2.13.0; the KFC calls as
   ops-transformer 9.1.0 declares them. */
#pragma once
#include "acl_types.h"

/* HcclCommConfig, version 10 of CANN 9.1. The first 24 bytes are {size_t size; uint32_t magicWord;
   uint32_t version; uint64_t reserved;}. Callers of an older version pass a smaller `size`: fields
   beyond it are not read. Only hcclBufferSize (MiB) and hcclCommName matter to this device. */
typedef struct HcclCommConfigDef {
  char reserved[24];
  uint32_t hcclBufferSize;    /* MiB; 0xffffffff = not set */
  uint32_t hcclDeterministic; /* 0xffffffff = not set */
  char hcclCommName[128];     /* empty = a name is made */
  char hcclUdi[128];
  uint32_t hcclOpExpansionMode;
  uint32_t hcclRdmaTrafficClass; /* 0xffffffff = not set */
  uint32_t hcclRdmaServiceLevel; /* 0xffffffff = not set */
  uint32_t hcclWorldRankID;
  uint64_t hcclJobID;
  uint8_t aclGraphZeroCopyEnable;
  int32_t hcclExecTimeOut; /* -1 = not set */
  char hcclAlgo[1600];
  char hcclRetryEnable[50];
  char hcclRetryParams[128];
  char hcclBufferName[128];
  uint32_t hcclQos;                     /* 0xffffffff = not set */
  uint64_t hcclSymWinMaxMemSizePerRank; /* GiB, default 16 */
} HcclCommConfig;
#define HCCL_COMM_CONFIG_MAGIC_WORD 0xf0f0f0f0u
#define HCCL_COMM_CONFIG_VERSION 10u
#define HCCL_COMM_NOT_SET 0xffffffffu

enum {
  HCCL_SUCCESS = 0,
  HCCL_E_PARA = 1,
  HCCL_E_PTR = 2,
  HCCL_E_MEMORY = 3,
  HCCL_E_INTERNAL = 4,
  HCCL_E_NOT_SUPPORT = 5,
  HCCL_E_NOT_FOUND = 6,
  HCCL_E_UNAVAIL = 7,
  HCCL_E_SYSCALL = 8,
  HCCL_E_TIMEOUT = 9,
  HCCL_E_RUNTIME = 15,
  HCCL_E_REMOTE = 21,
  HCCL_E_OOM = 24
};

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

/* ---- libhccl: communicators ---- */
HcclResult HcclGetRootInfo(HcclRootInfo* rootInfo);
HcclResult HcclCommInitRootInfo(uint32_t nRanks, const HcclRootInfo* rootInfo, uint32_t rank,
                                HcclComm* comm);
HcclResult HcclCommInitRootInfoConfig(uint32_t nRanks, const HcclRootInfo* rootInfo, uint32_t rank,
                                      const HcclCommConfig* config, HcclComm* comm);
HcclResult HcclCommDestroy(HcclComm comm);
HcclResult HcclGetRankSize(HcclComm comm, uint32_t* rankSize);
HcclResult HcclGetRankId(HcclComm comm, uint32_t* rank);
HcclResult HcclGetCommName(HcclComm comm, char* commName); /* 128 bytes */
HcclResult HcclGetCommAsyncError(HcclComm comm, HcclResult* asyncError);
const char* HcclGetErrorString(HcclResult code);
uint32_t HcclGetCommConfigCapability(void);

/* ---- libhccl: collectives, run on the stream ---- */
HcclResult HcclAllReduce(void* sendBuf, void* recvBuf, uint64_t count, HcclDataType dataType,
                         HcclReduceOp op, HcclComm comm, aclrtStream stream);
HcclResult HcclReduceScatter(void* sendBuf, void* recvBuf, uint64_t recvCount,
                             HcclDataType dataType, HcclReduceOp op, HcclComm comm,
                             aclrtStream stream);
HcclResult HcclBroadcast(void* buf, uint64_t count, HcclDataType dataType, uint32_t root,
                         HcclComm comm, aclrtStream stream);
HcclResult HcclAllGather(void* sendBuf, void* recvBuf, uint64_t sendCount, HcclDataType dataType,
                         HcclComm comm, aclrtStream stream);
HcclResult HcclAlltoAll(const void* sendBuf, uint64_t sendCount, HcclDataType sendType,
                        const void* recvBuf, uint64_t recvCount, HcclDataType recvType,
                        HcclComm comm, aclrtStream stream);
/* counts and displacements: host arrays of uint64_t, one per rank, in elements; read at call time
 */
HcclResult HcclAlltoAllV(const void* sendBuf, const void* sendCounts, const void* sdispls,
                         HcclDataType sendType, const void* recvBuf, const void* recvCounts,
                         const void* rdispls, HcclDataType recvType, HcclComm comm,
                         aclrtStream stream);
HcclResult HcclBarrier(HcclComm comm, aclrtStream stream);

/* ---- libhccl: kernel fetch context (KFC) and windows ---- */
HcclResult HcclKfcAllocOpArgs(void** opArgs);
HcclResult HcclKfcFreeOpArgs(void* opArgs);
HcclResult HcclKfcOpArgsSetAlgConfig(void* opArgs, char* algConfig);
HcclResult HcclKfcOpArgsSetCommEngine(void* opArgs, uint8_t engine);
HcclResult HcclCreateOpResCtx(HcclComm comm, uint8_t opType, void* opArgs, void** opResCtx);
HcclResult HcclGetHcclBuffer(HcclComm comm, void** buffer, uint64_t* size);

/* ---- libhccl_fwk ---- */
HcclResult HcclGetRemoteIpcHcclBuf(HcclComm comm, uint64_t remoteRank, void** buffer,
                                   uint64_t* size);
HcclResult HcclCommGetHandleWithName(const char* commName, HcclComm* comm);
HcclResult HcomGetCommHandleByGroup(const char* group, HcclComm* comm);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
