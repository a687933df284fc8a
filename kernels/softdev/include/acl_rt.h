/* SPDX-License-Identifier: Apache-2.0 */
/* Functions of libascendcl that the software device exports, with CANN's C ABI.
   Source of the prototypes: acl_rt.h and acl_base_rt.h as shipped with torch_npu 2.13.0 (CANN 9.1).
 */
#pragma once
#include "acl_types.h"

typedef void (*aclrtCallback)(void* userData);
typedef void (*aclrtHostFunc)(void* args);

typedef enum { ACL_CALLBACK_NO_BLOCK = 0, ACL_CALLBACK_BLOCK = 1 } aclrtCallbackBlockType;
typedef enum {
  ACL_EVENT_RECORDED_STATUS_NOT_READY = 0,
  ACL_EVENT_RECORDED_STATUS_COMPLETE = 1
} aclrtEventRecordedStatus;
typedef enum { ACL_STREAM_STATUS_COMPLETE = 0, ACL_STREAM_STATUS_NOT_READY = 1 } aclrtStreamStatus;
typedef enum { ACL_DEVICE = 0, ACL_HOST = 1 } aclrtRunMode;

/* aclrtMemMallocPolicy and aclrtMemAttr are enums in CANN: same size and passing as int. */
enum {
  ACL_MEM_MALLOC_HUGE_FIRST = 0,
  ACL_MEM_MALLOC_HUGE_ONLY = 1,
  ACL_MEM_MALLOC_NORMAL_ONLY = 2
};
enum { ACL_DDR_MEM = 0, ACL_HBM_MEM = 1 };

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

/* life cycle */
aclError aclInit(const char* configPath); /* second call: 100002 */
aclError aclFinalize(void);
aclError aclrtSetDevice(int32_t deviceId);
aclError aclrtGetDevice(int32_t* deviceId); /* 107002 when this thread has no device */
aclError aclrtResetDevice(int32_t deviceId);
aclError aclrtGetDeviceCount(uint32_t* count);
aclError aclrtGetRunMode(aclrtRunMode* runMode);
const char* aclrtGetSocName(void);
aclError aclrtCreateContext(aclrtContext* context, int32_t deviceId);
aclError aclrtDestroyContext(aclrtContext context);
aclError aclrtSetCurrentContext(aclrtContext context);
aclError aclrtGetCurrentContext(aclrtContext* context);

/* identity and errors */
/* This thread's last text, then cleared; NULL when there is none. */
const char* aclGetRecentErrMsg(void);
aclError aclsysGetVersionStr(char* pkgName, char* versionStr); /* versionStr: 128 bytes */
aclError aclsysGetVersionNum(char* pkgName, int32_t* versionNum);

/* memory */
aclError aclrtMalloc(void** devPtr, size_t size, int policy);
aclError aclrtMallocAlign32(void** devPtr, size_t size, int policy);
aclError aclrtFree(void* devPtr);
aclError aclrtMallocHost(void** hostPtr, size_t size);
aclError aclrtFreeHost(void* hostPtr);
aclError aclrtGetMemInfo(int attr, size_t* free, size_t* total);
aclError aclrtMemcpy(void* dst, size_t destMax, const void* src, size_t count,
                     aclrtMemcpyKind kind);
aclError aclrtMemcpyAsync(void* dst, size_t destMax, const void* src, size_t count,
                          aclrtMemcpyKind kind, aclrtStream stream);
aclError aclrtMemset(void* devPtr, size_t maxCount, int32_t value, size_t count);
aclError aclrtMemsetAsync(void* devPtr, size_t maxCount, int32_t value, size_t count,
                          aclrtStream stream);

/* streams; a null stream is the current context's default stream */
aclError aclrtCreateStream(aclrtStream* stream);
aclError aclrtCreateStreamWithConfig(aclrtStream* stream, uint32_t priority, uint32_t flag);
aclError aclrtDestroyStream(aclrtStream stream);      /* runs what is queued first */
aclError aclrtDestroyStreamForce(aclrtStream stream); /* drops what has not started */
aclError aclrtSynchronizeStream(aclrtStream stream);
aclError aclrtSynchronizeStreamWithTimeout(aclrtStream stream,
                                           int32_t timeout); /* ms, -1 = for ever */
aclError aclrtSynchronizeDevice(void);
aclError aclrtSynchronizeDeviceWithTimeout(int32_t timeout);
aclError aclrtStreamQuery(aclrtStream stream, aclrtStreamStatus* status);
aclError aclrtStreamGetId(aclrtStream stream, int32_t* streamId);
aclError aclrtStreamWaitEvent(aclrtStream stream, aclrtEvent event);

/* events */
aclError aclrtCreateEvent(aclrtEvent* event);
aclError aclrtCreateEventWithFlag(aclrtEvent* event, uint32_t flag);
aclError aclrtCreateEventExWithFlag(aclrtEvent* event, uint32_t flag);
aclError aclrtDestroyEvent(aclrtEvent event);
aclError aclrtRecordEvent(aclrtEvent event, aclrtStream stream);
aclError aclrtQueryEventStatus(aclrtEvent event, aclrtEventRecordedStatus* status);
aclError aclrtSynchronizeEvent(aclrtEvent event);
aclError aclrtSynchronizeEventWithTimeout(aclrtEvent event,
                                          int32_t timeout); /* ms, -1 = for ever */
aclError aclrtEventElapsedTime(float* ms, aclrtEvent startEvent, aclrtEvent endEvent);

/* host callbacks */
aclError aclrtSubscribeReport(uint64_t threadId, aclrtStream stream);
aclError aclrtUnSubscribeReport(uint64_t threadId, aclrtStream stream);
aclError aclrtLaunchCallback(aclrtCallback fn, void* userData, aclrtCallbackBlockType blockType,
                             aclrtStream stream);
aclError aclrtProcessReport(int32_t timeout); /* ms, -1 = for ever; run by the subscribed thread */
aclError aclrtLaunchHostFunc(aclrtStream stream, aclrtHostFunc fn, void* args);

/* the software device's own: lets reports name it; no product decision may depend on it */
const char* xsdIdentity(void);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
