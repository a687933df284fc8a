/* SPDX-License-Identifier: Apache-2.0 */
/* Types shared by all declarations here.
   Source: Ascend/pytorch third_party/acl and third_party/hccl headers, as of CANN 9.1.0.
   Enumerations are int32_t: the vendor's compilers give them that size, and a value outside the
   declared list must reach the library unchanged. */
typedef int32_t aclError;
typedef int32_t aclnnStatus;
typedef int32_t HcclResult;
typedef void* aclrtStream;
typedef void* aclrtEvent;
typedef void* aclrtContext;
typedef void* HcclComm;
typedef struct aclTensor aclTensor;
typedef struct aclTensorList aclTensorList;
typedef struct aclScalar aclScalar;
typedef struct aclIntArray aclIntArray;
typedef struct aclFloatArray aclFloatArray;
typedef struct aclBoolArray aclBoolArray;
typedef struct aclOpExecutor aclOpExecutor;
typedef void (*aclrtCallback)(void* userData);
typedef struct { char internal[4108]; } HcclRootInfo;
/* The first 24 bytes are a header {size_t size, uint32 magic 0xf0f0f0f0, uint32 version,
   uint64 reserved}; the library reads only the fields that belong to the stated version. */
typedef struct {
  size_t configSize;
  uint32_t magicWord;
  uint32_t version;
  uint64_t headerReserved;
  uint32_t hcclBufferSize;
  uint32_t hcclDeterministic;
  char hcclCommName[128];
  char hcclUdi[128];
  uint32_t hcclOpExpansionMode;
  uint32_t hcclRdmaTrafficClass;
  uint32_t hcclRdmaServiceLevel;
  uint32_t hcclWorldRankID;
  uint64_t hcclJobID;
  uint8_t aclGraphZeroCopyEnable;
  int32_t hcclExecTimeOut;
  char hcclAlgo[1600];
  char hcclRetryEnable[50];
  char hcclRetryParams[128];
  char hcclBufferName[128];
  uint32_t hcclQos;
  uint64_t hcclSymWinMaxMemSizePerRank;
} HcclCommConfig;
