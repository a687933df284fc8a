/* SPDX-License-Identifier: Apache-2.0 */
/* Further functions of libascendcl and libacl_op_compiler, those that torch_npu needs beside acl_rt.h.
   Source of the prototypes: acl_rt.h, acl_op.h, acl_op_compiler.h and aprof_pub.h as shipped with
   torch_npu 2.13.0 (CANN 9.1). Enums are passed as int, which has the same size. */
#pragma once
#include "acl_rt.h"

typedef void* aclrtDrvMemHandle;
typedef void* aclmdlRI;
typedef struct aclTensorDesc aclTensorDesc;
typedef struct aclDataBuffer aclDataBuffer;
typedef struct aclopAttr aclopAttr;
typedef struct aclGraphDumpOption aclGraphDumpOption;
typedef struct { char bytes[16]; } aclrtUuid;
typedef struct { uint32_t id; int32_t type; } aclrtMemLocation; /* type: 0 host, 1 device, 2 unregistered */
typedef struct { aclrtMemLocation location; uint32_t pageSize; uint32_t rsv[4]; } aclrtPtrAttributes;
typedef struct {
  int32_t handleType, allocationType, memAttr;
  aclrtMemLocation location;
  uint64_t reserve;
} aclrtPhysicalMemProp;
typedef struct {
  char version[128], majorVersion[64], minorVersion[64], releaseVersion[64], patchVersion[64], reserved[128];
} aclCANNPackageVersion;
typedef union {
  uint64_t failureMode;
  uint32_t overflowSwitch, userCustomTag, cacheOpInfoSwitch, streamPriority, reserve[4];
} aclrtStreamAttrValue;

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

/* identity and devices */
aclError aclrtGetDeviceInfo(uint32_t deviceId, int attr, int64_t* value);
aclError aclGetDeviceCapability(uint32_t deviceId, int deviceInfo, int64_t* value);
aclError aclrtDeviceGetUuid(int32_t deviceId, aclrtUuid* uuid);
aclError aclrtDeviceGetBareTgid(int32_t* pid);
aclError aclrtDeviceCanAccessPeer(int32_t* canAccessPeer, int32_t deviceId, int32_t peerDeviceId);
aclError aclrtDeviceEnablePeerAccess(int32_t peerDeviceId, uint32_t flags);
aclError aclrtGetLogicDevIdByUserDevId(const int32_t userDevid, int32_t* const logicDevId);
aclError aclrtGetPrimaryCtxState(int32_t deviceId, uint32_t* flags, int32_t* active);
aclError aclGetCannAttribute(int cannAttr, int32_t* value);
aclError aclGetCannAttributeList(const int32_t** cannAttrList, size_t* num);
aclError aclsysGetCANNVersion(int name, aclCANNPackageVersion* version);
void aclAppLog(int logLevel, const char* func, const char* file, uint32_t line, const char* fmt, ...);

/* virtual memory: an address range, pieces of memory, and mappings of the one into the other */
aclError aclrtReserveMemAddress(void** virPtr, size_t size, size_t alignment, void* expectPtr, uint64_t flags);
aclError aclrtReleaseMemAddress(void* virPtr);
aclError aclrtMallocPhysical(aclrtDrvMemHandle* handle, size_t size, const aclrtPhysicalMemProp* prop,
                             uint64_t flags);
aclError aclrtFreePhysical(aclrtDrvMemHandle handle);
aclError aclrtMapMem(void* virPtr, size_t size, size_t offset, aclrtDrvMemHandle handle, uint64_t flags);
aclError aclrtUnmapMem(void* virPtr);
aclError aclrtMemGetAllocationGranularity(aclrtPhysicalMemProp* prop, int option, size_t* granularity);
/* refused: memory of one process is not handed to another here (communicator windows are) */
aclError aclrtMemExportToShareableHandle(aclrtDrvMemHandle handle, int handleType, uint64_t flags,
                                         uint64_t* shareableHandle);
aclError aclrtMemImportFromShareableHandle(uint64_t shareableHandle, int32_t deviceId,
                                           aclrtDrvMemHandle* handle);
aclError aclrtMemSetPidToShareableHandle(uint64_t shareableHandle, int32_t* pid, size_t pidNum);
aclError aclrtPointerGetAttributes(const void* ptr, aclrtPtrAttributes* attributes);

/* streams and events */
aclError aclrtSetStreamAttribute(aclrtStream stream, int attr, aclrtStreamAttrValue* value);
aclError aclrtSetStreamFailureMode(aclrtStream stream, uint64_t mode);
aclError aclrtSetStreamOverflowSwitch(aclrtStream stream, uint32_t flag);
aclError aclrtGetStreamOverflowSwitch(aclrtStream stream, uint32_t* flag);
aclError aclrtQueryEventWaitStatus(aclrtEvent event, int* status);
aclError aclrtEventGetTimestamp(aclrtEvent event, uint64_t* timestamp);
aclError aclrtResetEvent(aclrtEvent event, aclrtStream stream); /* refused */

/* settings */
aclError aclrtSetDeviceSatMode(int mode);
aclError aclrtSetOpExecuteTimeOut(uint32_t timeout);
aclError aclrtSetOpExecuteTimeOutV2(uint64_t timeout, uint64_t* actualTimeout);
aclError aclrtSetOpWaitTimeout(uint32_t timeout);
aclError aclrtSetSysParamOpt(int opt, int64_t value);
aclError aclrtGetSysParamOpt(int opt, int64_t* value);
aclError aclrtCtxSetSysParamOpt(int opt, int64_t value);
aclError aclmdlInitDump(void); /* dumps are refused */
aclError aclmdlSetDump(const char* dumpCfgPath);
aclError aclmdlFinalizeDump(void);

/* graph capture: there is none; these two are asked all the time and answer truthfully */
aclError aclmdlRICaptureGetInfo(aclrtStream stream, int* status, aclmdlRI* modelRI);
aclError aclmdlRICaptureThreadExchangeMode(int* mode);

/* kernel binaries: refused, this device has no AI core */
aclError aclrtBinaryLoadFromData(const void* data, size_t length, const void* options, void** binHandle);
aclError aclrtBinaryGetFunction(void* binHandle, const char* kernelName, void** funcHandle);
aclError aclrtGetFunctionAddr(void* funcHandle, void** aicAddr, void** aivAddr);
int32_t rtDevBinaryRegister(const void* bin, void** handle);
int32_t rtFunctionRegister(void* binHandle, const void* stubFunc, const char* stubName, const void* devFunc,
                           uint32_t funcMode);
int32_t rtKernelLaunch(const void* stubFunc, uint32_t numBlocks, void* args, uint32_t argsSize, void* smDesc,
                       void* stream);
int32_t rtGetC2cCtrlAddr(uint64_t* addr, uint32_t* len);

/* profiling: nothing is recorded */
int32_t MsprofRegisterCallback(uint32_t moduleId, int32_t (*handle)(uint32_t type, void* data, uint32_t len));
int32_t MsprofReportApi(uint32_t nonPersistantFlag, const void* api);
int32_t MsprofReportCompactInfo(uint32_t nonPersistantFlag, const void* data, uint32_t length);
int32_t MsprofReportAdditionalInfo(uint32_t nonPersistantFlag, const void* data, uint32_t length);
uint64_t MsprofGetHashId(const char* hashInfo, size_t length);
uint64_t MsprofSysCycleTime(void);

/* descriptions for the old operator interface, which libacl_op_compiler refuses to run */
aclTensorDesc* aclCreateTensorDesc(aclDataType dataType, int numDims, const int64_t* dims, aclFormat format);
void aclDestroyTensorDesc(const aclTensorDesc* desc);
aclDataType aclGetTensorDescType(const aclTensorDesc* desc);
aclFormat aclGetTensorDescFormat(const aclTensorDesc* desc);
size_t aclGetTensorDescNumDims(const aclTensorDesc* desc);
aclError aclGetTensorDescDimV2(const aclTensorDesc* desc, size_t index, int64_t* dimSize);
void aclSetTensorDescName(aclTensorDesc* desc, const char* name);
aclError aclSetTensorFormat(aclTensorDesc* desc, aclFormat format);
aclError aclSetTensorShape(aclTensorDesc* desc, int numDims, const int64_t* dims);
aclError aclSetTensorPlaceMent(aclTensorDesc* desc, int memType);
aclDataBuffer* aclCreateDataBuffer(void* data, size_t size);
aclError aclDestroyDataBuffer(const aclDataBuffer* dataBuffer);
aclopAttr* aclopCreateAttr(void);
void aclopDestroyAttr(const aclopAttr* attr);
aclError aclopSetAttrBool(aclopAttr* attr, const char* attrName, uint8_t attrValue);
aclError aclopSetAttrInt(aclopAttr* attr, const char* attrName, int64_t attrValue);
aclError aclopSetAttrFloat(aclopAttr* attr, const char* attrName, float attrValue);
aclError aclopSetAttrString(aclopAttr* attr, const char* attrName, const char* attrValue);
aclError aclopSetAttrDataType(aclopAttr* attr, const char* attrName, aclDataType attrValue);
aclError aclopSetAttrListBool(aclopAttr* attr, const char* attrName, int numValues, const uint8_t* values);
aclError aclopSetAttrListInt(aclopAttr* attr, const char* attrName, int numValues, const int64_t* values);
aclError aclopSetAttrListFloat(aclopAttr* attr, const char* attrName, int numValues, const float* values);
aclError aclopSetAttrListListInt(aclopAttr* attr, const char* attrName, int numLists, const int* numValues,
                                 const int64_t* const values[]);

/* libacl_op_compiler: options are kept, operators are refused by name */
aclError aclSetCompileopt(int opt, const char* value);
aclError aclGetCompileopt(int opt, char* value, size_t length);
size_t aclGetCompileoptSize(int opt);
aclError aclopSetCompileFlag(int flag);
aclGraphDumpOption* aclCreateGraphDumpOpt(void);
aclError aclDestroyGraphDumpOpt(const aclGraphDumpOption* graphDumpOpt);
aclError aclopCompileAndExecute(const char* opType, int numInputs, const aclTensorDesc* const inputDesc[],
                                const aclDataBuffer* const inputs[], int numOutputs,
                                const aclTensorDesc* const outputDesc[], aclDataBuffer* const outputs[],
                                const aclopAttr* attr, int engineType, int compileFlag, const char* opPath,
                                aclrtStream stream);
aclError aclopCompileAndExecuteV2(const char* opType, int numInputs, aclTensorDesc* inputDesc[],
                                  aclDataBuffer* inputs[], int numOutputs, aclTensorDesc* outputDesc[],
                                  aclDataBuffer* outputs[], aclopAttr* attr, int engineType, int compileFlag,
                                  const char* opPath, aclrtStream stream);
aclError aclGenGraphAndDumpForOp(const char* opType, int numInputs, const aclTensorDesc* const inputDesc[],
                                 const aclDataBuffer* const inputs[], int numOutputs,
                                 const aclTensorDesc* const outputDesc[], aclDataBuffer* const outputs[],
                                 const aclopAttr* attr, int engineType, const char* graphDumpPath,
                                 const aclGraphDumpOption* graphDumpOpt);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
