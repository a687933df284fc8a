// SPDX-License-Identifier: Apache-2.0
// Life cycle, devices, contexts and identity.
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>

#include "internal.h"

namespace xsd {
namespace {

struct Device {
  std::shared_ptr<Context> primary;
  uint32_t references = 0;
};

std::mutex& device_mutex() {
  static auto& mutex = *new std::mutex;
  return mutex;
}

std::map<int32_t, Device>& devices() {
  static auto& map = *new std::map<int32_t, Device>;
  return map;
}

std::atomic<bool> g_initialized{false};
thread_local uint64_t t_context = 0;

int check_device(int32_t device) {
  const int32_t count = settings()->device_count;
  if (device >= 0 && device < count) return kOk;
  return fail(kInvalidDevice,
              "EE1003: device %d does not exist (0 to %d; XSD_DEVICE_COUNT sets it)", device,
              count - 1);
}

const char* version() {
  const char* text = std::getenv("XSD_CANN_VERSION");
  return text != nullptr && *text != '\0' ? text : "9.1.0";
}

bool known_package(const char* name) {
  static const char* const names[] = {"runtime", "metadef",  "opp",  "ops_transformer",
                                      "hccl",    "compiler", "hcomm"};
  for (const char* known : names) {
    if (std::strcmp(known, name) == 0) return true;
  }
  return false;
}

}  // namespace

Registry<Context>& contexts() {
  static auto& registry = *new Registry<Context>(0x5801);
  return registry;
}

std::shared_ptr<Context> current_context() {
  auto context = t_context == 0 ? nullptr : contexts().find(reinterpret_cast<void*>(t_context));
  if (context == nullptr) {
    xsdSetError(
        "EE1001: this thread has no device; call aclrtSetDevice (or aclrtSetCurrentContext) on it");
  }
  return context;
}

}  // namespace xsd

using namespace xsd;

aclError aclInit(const char* config) {
  if (int code = enter()) return code;
  if (config != nullptr && *config != '\0' && access(config, R_OK) != 0) {
    return fail(kInvalidFile, "EE1004: aclInit cannot read its configuration file %.300s", config);
  }
  if (g_initialized.exchange(true)) {
    return fail(kRepeatInit, "EE1005: aclInit was called before in this process");
  }
  return kOk;
}

aclError aclFinalize() {
  if (int code = enter()) return code;
  if (!g_initialized.exchange(false)) {
    return fail(kRepeatFinalize, "EE1005: aclFinalize without an aclInit that is still in force");
  }
  std::vector<std::shared_ptr<Context>> leaving;
  {
    std::lock_guard<std::mutex> lock(device_mutex());
    for (auto& context : contexts().all()) {
      contexts().take(reinterpret_cast<void*>(context->id));
      leaving.push_back(context);
    }
    devices().clear();
  }
  // Outside the lock: a host callback that is still queued may set a device.
  for (auto& context : leaving) stop_streams_of(context);
  return kOk;
}

aclError aclrtSetDevice(int32_t device) {
  if (int code = enter()) return code;
  if (int code = check_device(device)) return code;
  std::lock_guard<std::mutex> lock(device_mutex());
  Device& entry = devices()[device];
  if (entry.primary == nullptr) {
    entry.primary = std::make_shared<Context>();
    entry.primary->device = device;
    entry.primary->primary = true;
    contexts().add(entry.primary);
  }
  // A thread that sets the device it already has does not take another reference.
  if (t_context != entry.primary->id) ++entry.references;
  t_context = entry.primary->id;
  return kOk;
}

aclError aclrtGetDevice(int32_t* device) {
  if (xsdForked()) return kInternal;  // a look alone does not forbid a later fork
  if (device == nullptr) return fail(kParamInvalid, "EE1003: aclrtGetDevice: deviceId is null");
  auto context = current_context();
  if (context == nullptr) return kContextNull;
  *device = context->device;
  return kOk;
}

aclError aclrtResetDevice(int32_t device) {
  if (int code = enter()) return code;
  if (int code = check_device(device)) return code;
  std::shared_ptr<Context> primary;
  {
    std::lock_guard<std::mutex> lock(device_mutex());
    auto it = devices().find(device);
    if (it == devices().end()) {
      return fail(kContextNull, "EE1001: device %d is not set in this process", device);
    }
    if (t_context == it->second.primary->id) t_context = 0;
    if (--it->second.references > 0) return kOk;
    primary = it->second.primary;
    devices().erase(it);
    contexts().take(reinterpret_cast<void*>(primary->id));
  }
  stop_streams_of(primary);
  return kOk;
}

aclError aclrtGetDeviceCount(uint32_t* count) {
  if (count == nullptr) return fail(kParamInvalid, "EE1003: aclrtGetDeviceCount: count is null");
  *count = static_cast<uint32_t>(settings()->device_count);
  return kOk;
}

aclError aclrtGetRunMode(aclrtRunMode* mode) {
  if (mode == nullptr) return fail(kParamInvalid, "EE1003: aclrtGetRunMode: runMode is null");
  *mode = ACL_HOST;
  return kOk;
}

const char* aclrtGetSocName() {
  const char* name = std::getenv("XSD_SOC");
  return name != nullptr && *name != '\0' ? name : "Ascend910_9391";
}

aclError aclrtCreateContext(aclrtContext* out, int32_t device) {
  if (int code = enter()) return code;
  if (out == nullptr) return fail(kParamInvalid, "EE1003: aclrtCreateContext: context is null");
  if (int code = check_device(device)) return code;
  auto context = std::make_shared<Context>();
  context->device = device;
  *out = contexts().add(context);
  t_context = context->id;
  return kOk;
}

aclError aclrtDestroyContext(aclrtContext handle) {
  if (int code = enter()) return code;
  auto context = contexts().find(handle);
  if (context == nullptr) {
    return fail(kContextNull, "EE1001: aclrtDestroyContext: %p is not a live context", handle);
  }
  if (context->primary) {
    return fail(kParamInvalid,
                "EE1003: aclrtDestroyContext: %p is the default context of device %d; "
                "use aclrtResetDevice",
                handle, context->device);
  }
  if (contexts().take(handle) == nullptr) return kContextNull;
  stop_streams_of(context);
  if (t_context == context->id) t_context = 0;
  return kOk;
}

aclError aclrtSetCurrentContext(aclrtContext handle) {
  if (int code = enter()) return code;
  auto context = contexts().find(handle);
  if (context == nullptr) {
    return fail(kContextNull, "EE1001: aclrtSetCurrentContext: %p is not a live context", handle);
  }
  t_context = context->id;
  return kOk;
}

aclError aclrtGetCurrentContext(aclrtContext* out) {
  if (xsdForked()) return kInternal;  // a look alone does not forbid a later fork
  if (out == nullptr) return fail(kParamInvalid, "EE1003: aclrtGetCurrentContext: context is null");
  auto context = current_context();
  if (context == nullptr) return kContextNull;
  *out = reinterpret_cast<void*>(context->id);
  return kOk;
}

aclError aclsysGetVersionStr(char* package, char* out) {
  if (package == nullptr || out == nullptr) {
    return fail(kParamInvalid, "EE1003: aclsysGetVersionStr: null argument");
  }
  if (!known_package(package)) {
    return fail(kParamInvalid, "EE1003: aclsysGetVersionStr: no package %.64s here", package);
  }
  std::snprintf(out, 128, "%s", version());
  return kOk;
}

aclError aclsysGetVersionNum(char* package, int32_t* out) {
  if (package == nullptr || out == nullptr) {
    return fail(kParamInvalid, "EE1003: aclsysGetVersionNum: null argument");
  }
  if (!known_package(package)) {
    return fail(kParamInvalid, "EE1003: aclsysGetVersionNum: no package %.64s here", package);
  }
  int major = 0, minor = 0, patch = 0;
  std::sscanf(version(), "%d.%d.%d", &major, &minor, &patch);
  *out = major * 10000000 + minor * 100000 + patch * 1000;
  return kOk;
}

const char* xsdIdentity() { return "xmoe software device (CPU threads; not an NPU)"; }
