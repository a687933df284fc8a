// SPDX-License-Identifier: Apache-2.0
// Stream attributes, event readers, settings, the capture state and what is refused by name.
#include <cstdio>
#include <map>

#include "acl_npu.h"
#include "internal.h"

namespace xsd {
namespace {

std::mutex& options_mutex() {
  static auto& mutex = *new std::mutex;
  return mutex;
}

std::map<int, int64_t>& options() {
  static auto& map = *new std::map<int, int64_t>;
  return map;
}

constexpr int kFailureMode = 1, kOverflow = 2, kPriority = 5;  // aclrtStreamAttr
constexpr uint64_t kStopOnFailure = 1;

int check_stream(aclrtStream handle) {
  if (int code = enter()) return code;
  std::shared_ptr<Stream> stream;
  return resolve_stream(handle, &stream);
}

int refuse(const char* call, const char* why) {
  return fail(kNotSupported, "EE1006: %s: %s", call, why);
}

std::shared_ptr<Recording> latest(aclrtEvent handle, const char* call, int* code) {
  auto event = events().find(handle);
  *code = kOk;
  if (event == nullptr) {
    *code = fail(kInvalidHandle, "EE1003: %s: %p is not a live event", call, handle);
    return nullptr;
  }
  std::lock_guard<std::mutex> lock(event->mutex);
  return event->last;
}

constexpr const char* kNoCores = "this device has no AI core that could run a kernel binary";
constexpr const char* kNoDump = "this device writes no dumps";

}  // namespace
}  // namespace xsd

using namespace xsd;

aclError aclrtSetStreamFailureMode(aclrtStream stream, uint64_t mode) {
  if (int code = check_stream(stream)) return code;
  // A stream here always stops at its first failure.
  if (mode == kStopOnFailure) return kOk;
  return refuse("aclrtSetStreamFailureMode", "only ACL_STOP_ON_FAILURE (1) is possible");
}

aclError aclrtSetStreamAttribute(aclrtStream stream, int attribute, aclrtStreamAttrValue* value) {
  if (value == nullptr) return fail(kParamInvalid, "EE1003: aclrtSetStreamAttribute: value is null");
  if (attribute == kFailureMode) return aclrtSetStreamFailureMode(stream, value->failureMode);
  if (attribute == kOverflow) return aclrtSetStreamOverflowSwitch(stream, value->overflowSwitch);
  if (int code = check_stream(stream)) return code;
  if (attribute > kFailureMode && attribute <= kPriority) return kOk;  // tag, cache and priority: no effect
  return fail(kParamInvalid, "EE1003: aclrtSetStreamAttribute: attribute %d (1 to 5)", attribute);
}

aclError aclrtSetStreamOverflowSwitch(aclrtStream stream, uint32_t flag) {
  if (int code = check_stream(stream)) return code;
  if (flag == 0) return kOk;
  return refuse("aclrtSetStreamOverflowSwitch", "overflow is not detected; infinities are kept");
}

aclError aclrtGetStreamOverflowSwitch(aclrtStream stream, uint32_t* flag) {
  if (int code = check_stream(stream)) return code;
  if (flag == nullptr) return fail(kParamInvalid, "EE1003: aclrtGetStreamOverflowSwitch: flag is null");
  *flag = 0;
  return kOk;
}

aclError aclrtQueryEventWaitStatus(aclrtEvent handle, int* status) {
  if (xsdForked()) return kInternal;
  if (status == nullptr) return fail(kParamInvalid, "EE1003: aclrtQueryEventWaitStatus: status is null");
  int code;
  auto recording = latest(handle, "aclrtQueryEventWaitStatus", &code);
  if (code != kOk) return code;
  *status = 0;  // complete; also when nothing was recorded
  if (recording != nullptr) {
    std::lock_guard<std::mutex> lock(recording->mutex);
    *status = recording->done ? 0 : 1;
  }
  return kOk;
}

aclError aclrtEventGetTimestamp(aclrtEvent handle, uint64_t* timestamp) {
  if (xsdForked()) return kInternal;
  if (timestamp == nullptr) return fail(kParamInvalid, "EE1003: aclrtEventGetTimestamp: timestamp is null");
  int code;
  auto recording = latest(handle, "aclrtEventGetTimestamp", &code);
  if (code != kOk) return code;
  if (recording == nullptr) {
    return fail(kEventNotComplete, "EE1003: aclrtEventGetTimestamp: the event was never recorded");
  }
  std::lock_guard<std::mutex> lock(recording->mutex);
  if (!recording->done) {
    return fail(kEventNotComplete, "EE1003: aclrtEventGetTimestamp: the event has not fired yet");
  }
  using Micro = std::chrono::microseconds;
  const auto since = std::chrono::duration_cast<Micro>(recording->when.time_since_epoch());
  *timestamp = static_cast<uint64_t>(since.count());
  return kOk;
}

aclError aclrtResetEvent(aclrtEvent, aclrtStream) {
  return refuse("aclrtResetEvent", "a recording cannot be taken back; record the event again");
}

aclError aclrtSetDeviceSatMode(int mode) {
  if (mode == 1) return kOk;  // infinities and NaN, as the processor computes
  return refuse("aclrtSetDeviceSatMode", "only the mode that keeps infinities and NaN (1) is possible");
}

// Limits of an operator's run time: accepted; a wait here ends after XSD_WAIT_TIMEOUT_MS.
aclError aclrtSetOpExecuteTimeOut(uint32_t) { return enter(); }

aclError aclrtSetOpExecuteTimeOutV2(uint64_t timeout, uint64_t* actual) {
  if (actual != nullptr) *actual = timeout;
  return enter();
}

aclError aclrtSetOpWaitTimeout(uint32_t) { return enter(); }

aclError aclrtSetSysParamOpt(int option, int64_t value) {
  if (option < 0 || option > 2) {
    return fail(kParamInvalid, "EE1003: aclrtSetSysParamOpt: option %d (0 to 2)", option);
  }
  std::lock_guard<std::mutex> lock(options_mutex());
  options()[option] = value;  // kept for the reader; results here do not depend on it
  return kOk;
}

aclError aclrtCtxSetSysParamOpt(int option, int64_t value) { return aclrtSetSysParamOpt(option, value); }

aclError aclrtGetSysParamOpt(int option, int64_t* value) {
  if (value == nullptr || option < 0 || option > 2) {
    return fail(kParamInvalid, "EE1003: aclrtGetSysParamOpt: option %d (0 to 2), value %p", option,
                static_cast<void*>(value));
  }
  std::lock_guard<std::mutex> lock(options_mutex());
  *value = options()[option];
  return kOk;
}

aclError aclmdlInitDump() { return refuse("aclmdlInitDump", kNoDump); }
aclError aclmdlSetDump(const char*) { return refuse("aclmdlSetDump", kNoDump); }
aclError aclmdlFinalizeDump() { return refuse("aclmdlFinalizeDump", kNoDump); }

aclError aclmdlRICaptureGetInfo(aclrtStream, int* status, aclmdlRI* model) {
  if (status == nullptr) return fail(kParamInvalid, "EE1003: aclmdlRICaptureGetInfo: status is null");
  *status = 0;  // not capturing
  if (model != nullptr) *model = nullptr;
  return kOk;
}

aclError aclmdlRICaptureThreadExchangeMode(int* mode) {
  static thread_local int current = 0;
  if (mode == nullptr || *mode < 0 || *mode > 2) {
    return fail(kParamInvalid, "EE1003: aclmdlRICaptureThreadExchangeMode: mode is null or not 0 to 2");
  }
  std::swap(current, *mode);
  return kOk;
}

aclError aclrtBinaryLoadFromData(const void*, size_t, const void*, void**) {
  return refuse("aclrtBinaryLoadFromData", kNoCores);
}
aclError aclrtBinaryGetFunction(void*, const char*, void**) { return refuse("aclrtBinaryGetFunction", kNoCores); }
aclError aclrtGetFunctionAddr(void*, void**, void**) { return refuse("aclrtGetFunctionAddr", kNoCores); }
int32_t rtDevBinaryRegister(const void*, void**) { return refuse("rtDevBinaryRegister", kNoCores); }
int32_t rtFunctionRegister(void*, const void*, const char*, const void*, uint32_t) {
  return refuse("rtFunctionRegister", kNoCores);
}
int32_t rtKernelLaunch(const void*, uint32_t, void*, uint32_t, void*, void*) {
  return refuse("rtKernelLaunch", kNoCores);
}
int32_t rtGetC2cCtrlAddr(uint64_t*, uint32_t*) { return refuse("rtGetC2cCtrlAddr", kNoCores); }

int32_t MsprofRegisterCallback(uint32_t, int32_t (*)(uint32_t, void*, uint32_t)) { return 0; }
int32_t MsprofReportApi(uint32_t, const void*) { return 0; }
int32_t MsprofReportCompactInfo(uint32_t, const void*, uint32_t) { return 0; }
int32_t MsprofReportAdditionalInfo(uint32_t, const void*, uint32_t) { return 0; }

uint64_t MsprofGetHashId(const char* text, size_t length) {  // FNV-1a
  uint64_t hash = 14695981039346656037ULL;
  for (size_t i = 0; text != nullptr && i < length; ++i) {
    hash = (hash ^ static_cast<unsigned char>(text[i])) * 1099511628211ULL;
  }
  return hash;
}

uint64_t MsprofSysCycleTime() { return static_cast<uint64_t>(Clock::now().time_since_epoch().count()); }
