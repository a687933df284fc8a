// SPDX-License-Identifier: Apache-2.0
// Identity, capabilities and versions as torch_npu asks for them, and application logging.
#include <unistd.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "acl_npu.h"
#include "internal.h"

namespace xsd {
namespace {

// Numbers of an Ascend 910_93 (A3). Nothing here depends on them; front ends size their grids by them.
constexpr int64_t kCubeCores = 24;
constexpr int64_t kVectorCores = 48;
constexpr int64_t kL2Bytes = 192ll << 20;
constexpr int64_t kUnifiedBufferBytes = 192ll << 10;

int check_device(const char* call, int64_t device, const void* out) {
  if (out == nullptr) return fail(kParamInvalid, "EE1003: %s: the result pointer is null", call);
  if (device >= 0 && device < settings()->device_count) return kOk;
  return fail(kInvalidDevice, "EE1003: %s: device %lld does not exist (0 to %d)", call,
              static_cast<long long>(device), settings()->device_count - 1);
}

void copy_text(char* out, size_t room, const std::string& text) {
  std::snprintf(out, room, "%s", text.c_str());
}

}  // namespace
}  // namespace xsd

using namespace xsd;

aclError aclrtGetDeviceInfo(uint32_t device, int attribute, int64_t* value) {
  if (int code = check_device("aclrtGetDeviceInfo", device, value)) return code;
  switch (attribute) {
    case 101:  // AI cores
    case 102:  // cube cores
      *value = kCubeCores;
      return kOk;
    case 201:
      *value = kVectorCores;
      return kOk;
    case 204:
      *value = kUnifiedBufferBytes;
      return kOk;
    case 301:
      *value = static_cast<int64_t>(settings()->memory_bytes);
      return kOk;
    case 302:
      *value = kL2Bytes;
      return kOk;
    case 402:  // chip, for the group layout: one device each
    case 403:
      *value = device;
      return kOk;
    case 404:  // super pod server and super pod: one of each
    case 405:
    case 501:  // virtual device
      *value = 0;
      return kOk;
    default:
      return fail(kParamInvalid, "EE1003: aclrtGetDeviceInfo: attribute %d is not known here", attribute);
  }
}

aclError aclGetDeviceCapability(uint32_t device, int what, int64_t* value) {
  if (int code = check_device("aclGetDeviceCapability", device, value)) return code;
  const int64_t known[] = {kCubeCores, kVectorCores, kL2Bytes};
  if (what < 0 || what > 2) {
    return fail(kParamInvalid, "EE1003: aclGetDeviceCapability: deviceInfo %d (0 to 2)", what);
  }
  *value = known[what];
  return kOk;
}

aclError aclrtDeviceGetUuid(int32_t device, aclrtUuid* uuid) {
  if (int code = check_device("aclrtDeviceGetUuid", device, uuid)) return code;
  std::memset(uuid->bytes, 0, sizeof uuid->bytes);
  std::snprintf(uuid->bytes, sizeof uuid->bytes, "xsd-%ld-%d", gethostid() & 0xffff, device);
  return kOk;
}

aclError aclrtDeviceGetBareTgid(int32_t* pid) {
  if (pid == nullptr) return fail(kParamInvalid, "EE1003: aclrtDeviceGetBareTgid: pid is null");
  *pid = static_cast<int32_t>(getpid());
  return kOk;
}

aclError aclrtDeviceCanAccessPeer(int32_t* answer, int32_t device, int32_t peer) {
  if (int code = check_device("aclrtDeviceCanAccessPeer", device, answer)) return code;
  if (int code = check_device("aclrtDeviceCanAccessPeer", peer, answer)) return code;
  *answer = device == peer ? 0 : 1;  // all devices of a process share its memory
  return kOk;
}

aclError aclrtDeviceEnablePeerAccess(int32_t peer, uint32_t flags) {
  if (int code = check_device("aclrtDeviceEnablePeerAccess", peer, &peer)) return code;
  if (flags != 0) return fail(kParamInvalid, "EE1003: aclrtDeviceEnablePeerAccess: flags %u (0)", flags);
  return kOk;
}

aclError aclrtGetLogicDevIdByUserDevId(const int32_t user, int32_t* const logical) {
  if (int code = check_device("aclrtGetLogicDevIdByUserDevId", user, logical)) return code;
  *logical = user;
  return kOk;
}

aclError aclrtGetPrimaryCtxState(int32_t device, uint32_t* flags, int32_t* active) {
  if (int code = check_device("aclrtGetPrimaryCtxState", device, active)) return code;
  if (flags != nullptr) *flags = 0;
  *active = 0;
  for (auto& context : contexts().all()) {
    if (context->primary && context->device == device) *active = 1;
  }
  return kOk;
}

namespace {
// infinities and NaN, bf16: both as processors have them. No compilation at run time.
constexpr int32_t kAttributes[] = {0, 1};
}  // namespace

aclError aclGetCannAttributeList(const int32_t** list, size_t* count) {
  if (list == nullptr || count == nullptr) {
    return fail(kParamInvalid, "EE1003: aclGetCannAttributeList: null argument");
  }
  *list = kAttributes;
  *count = 2;
  return kOk;
}

aclError aclGetCannAttribute(int attribute, int32_t* value) {
  if (value == nullptr || attribute < 0 || attribute > 2) {
    return fail(kParamInvalid, "EE1003: aclGetCannAttribute: attribute %d (0 to 2), value %p", attribute,
                static_cast<void*>(value));
  }
  *value = attribute < 2 ? 1 : 0;
  return kOk;
}

aclError aclsysGetCANNVersion(int name, aclCANNPackageVersion* version) {
  // CANN, RUNTIME, COMPILER, HCCL, TOOLKIT, OPP, OPP_KERNEL; there is no driver.
  if (version == nullptr || name < 0 || name > 6) {
    return fail(kParamInvalid, "EE1003: aclsysGetCANNVersion: package %d (0 to 6)", name);
  }
  char package[] = "runtime", text[128] = "";
  if (int code = aclsysGetVersionStr(package, text)) return code;
  std::memset(version, 0, sizeof *version);
  copy_text(version->version, sizeof version->version, text);
  int parts[3] = {0, 0, 0};
  std::sscanf(text, "%d.%d.%d", &parts[0], &parts[1], &parts[2]);
  copy_text(version->majorVersion, sizeof version->majorVersion, std::to_string(parts[0]));
  copy_text(version->minorVersion, sizeof version->minorVersion, std::to_string(parts[1]));
  copy_text(version->releaseVersion, sizeof version->releaseVersion, std::to_string(parts[2]));
  copy_text(version->patchVersion, sizeof version->patchVersion, "0");
  return kOk;
}

void aclAppLog(int level, const char* function, const char* file, uint32_t line, const char* format, ...) {
  static const bool wanted = std::getenv("XSD_APP_LOG") != nullptr;
  if (!wanted || format == nullptr) return;
  char text[1024];
  va_list args;
  va_start(args, format);
  std::vsnprintf(text, sizeof text, format, args);
  va_end(args);
  std::fprintf(stderr, "[app log %d] %s:%u %s: %s\n", level, file == nullptr ? "?" : file, line,
               function == nullptr ? "?" : function, text);
}
