// SPDX-License-Identifier: Apache-2.0
// Root info, making and destroying communicators, and what can be asked of them.
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "acl_rt.h"
#include "comm.h"

namespace xsd {
namespace {

constexpr char kRootMagic[] = "XSDROOT1 ";
constexpr uint32_t kDefaultMiB = 200;
constexpr uint32_t kMaxMiB = 64 * 1024;
constexpr int64_t kDefaultConnectMs = 120000;
constexpr size_t kNameBytes = 128;

// A whole number from the environment, or the fallback when unset or not one in range.
uint64_t from_environment(const char* name, uint64_t fallback, uint64_t low, uint64_t high) {
  const char* text = std::getenv(name);
  if (text == nullptr || *text == '\0') return fallback;
  char* end = nullptr;
  errno = 0;
  const unsigned long long value = std::strtoull(text, &end, 10);
  if (errno == 0 && *end == '\0' && *text != '-' && value >= low && value <= high) return value;
  std::fprintf(stderr,
               "software device: %s=%s is not a whole number from %llu to %llu; using %llu\n", name,
               text, static_cast<unsigned long long>(low), static_cast<unsigned long long>(high),
               static_cast<unsigned long long>(fallback));
  return fallback;
}

int64_t connect_timeout_ms() {
  const uint64_t seconds = from_environment("HCCL_CONNECT_TIMEOUT", 0, 1, 7200);
  if (seconds > 0) return static_cast<int64_t>(seconds) * 1000;
  const char* own = std::getenv("XSD_WAIT_TIMEOUT_MS");
  if (own != nullptr && *own != '\0') return xsdSettings()->wait_timeout_ms;
  return kDefaultConnectMs;
}

struct Wanted {
  uint32_t mib = 0;  // one half of the buffer
  std::string name;
};

// Reads only the fields that the caller's version of the structure has.
HcclResult read_config(const HcclCommConfig* config, Wanted* wanted) {
  size_t bytes;
  uint32_t magic;
  std::memcpy(&bytes, config->reserved, sizeof bytes);
  std::memcpy(&magic, config->reserved + 8, sizeof magic);
  if (magic != HCCL_COMM_CONFIG_MAGIC_WORD) {
    return hccl_fail(HCCL_E_PARA, "HcclCommConfig: magicWord %#x, must be %#x (HcclCommConfigInit)",
                     magic, HCCL_COMM_CONFIG_MAGIC_WORD);
  }
  auto has = [&](size_t offset, size_t size) { return bytes >= offset + size; };
  if (has(offsetof(HcclCommConfig, hcclBufferSize), 4) &&
      config->hcclBufferSize != HCCL_COMM_NOT_SET) {
    wanted->mib = config->hcclBufferSize;
    if (wanted->mib < 1 || wanted->mib > kMaxMiB) {
      return hccl_fail(HCCL_E_PARA, "HcclCommConfig: hcclBufferSize %u MiB (1 to %u)", wanted->mib,
                       kMaxMiB);
    }
  }
  if (has(offsetof(HcclCommConfig, hcclCommName), kNameBytes)) {
    const size_t length = ::strnlen(config->hcclCommName, kNameBytes);
    if (length == kNameBytes)
      return hccl_fail(HCCL_E_PARA, "HcclCommConfig: hcclCommName has no end");
    wanted->name.assign(config->hcclCommName, length);
  }
  return HCCL_SUCCESS;
}

std::mutex& name_mutex() {
  static auto& mutex = *new std::mutex;
  return mutex;
}

HcclResult init(uint32_t size, const HcclRootInfo* root, uint32_t rank,
                const HcclCommConfig* config, HcclComm* out, const char* call) {
  if (xsdForked()) return HCCL_E_INTERNAL;
  if (root == nullptr || out == nullptr) return hccl_fail(HCCL_E_PTR, "%s: null argument", call);
  if (size < 1 || size > kMaxRanks || rank >= size) {
    return hccl_fail(HCCL_E_PARA, "%s: rank %u of %u (at most %u ranks)", call, rank, size,
                     kMaxRanks);
  }
  const size_t skip = sizeof kRootMagic - 1;
  if (std::memcmp(root->internal, kRootMagic, skip) != 0 || root->internal[skip] != '/' ||
      ::strnlen(root->internal, sizeof root->internal) == sizeof root->internal) {
    return hccl_fail(HCCL_E_PARA, "%s: rootInfo was not made by HcclGetRootInfo of this device",
                     call);
  }
  int32_t device = 0;
  if (aclrtGetDevice(&device) != 0) return HCCL_E_RUNTIME;  // text: no device on this thread
  Wanted wanted;
  wanted.mib = static_cast<uint32_t>(from_environment("HCCL_BUFFSIZE", kDefaultMiB, 1, kMaxMiB));
  if (config != nullptr) {
    const HcclResult code = read_config(config, &wanted);
    if (code != HCCL_SUCCESS) return code;
  }
  xsdMarkUsed();
  const std::string path(root->internal + skip);
  if (wanted.name.empty()) {
    wanted.name = "xsd_" + path.substr(path.rfind('/') + 1) + "_" + std::to_string(rank);
    if (wanted.name.size() >= kNameBytes) wanted.name.erase(4, wanted.name.size() - kNameBytes + 1);
  }
  if (find_comm_by_name(wanted.name.c_str()) != nullptr) {
    return hccl_fail(HCCL_E_PARA, "%s: this process has a communicator named %s already", call,
                     wanted.name.c_str());
  }
  auto comm = std::make_shared<Comm>();
  comm->name = wanted.name;
  const HcclResult code =
      comm->group.open(path, size, rank, uint64_t{wanted.mib} << 20, connect_timeout_ms());
  if (code != HCCL_SUCCESS) return code;
  xsdDelaySalt(rank + 1);
  xsdSetWaitHook([] {
    for (auto& each : comms().all()) each->group.check();
  });
  std::lock_guard<std::mutex> lock(name_mutex());
  if (find_comm_by_name(wanted.name.c_str()) != nullptr) {
    return hccl_fail(HCCL_E_PARA, "%s: two communicators named %s at a time", call,
                     wanted.name.c_str());
  }
  *out = comms().add(comm);
  return HCCL_SUCCESS;
}

// A process that ends in the usual way leaves its groups, so that slower ranks do not take it for
// dead.
__attribute__((destructor)) void leave_all() {
  if (xsdForked()) return;
  for (auto& comm : comms().all()) {
    comm->closed.store(true);
    comm->group.say_left();
  }
}

}  // namespace

Registry<Comm>& comms() {
  static auto& registry = *new Registry<Comm>(0x5805);
  return registry;
}

std::shared_ptr<Comm> find_comm(HcclComm handle, const char* call) {
  if (xsdForked()) return nullptr;
  auto comm = comms().find(handle);
  if (comm == nullptr) hccl_fail(HCCL_E_PARA, "%s: %p is not a live communicator", call, handle);
  return comm;
}

std::shared_ptr<Comm> find_comm_by_name(const char* name) {
  for (auto& comm : comms().all()) {
    if (comm->name == name) return comm;
  }
  return nullptr;
}

}  // namespace xsd

using namespace xsd;

HcclResult HcclGetRootInfo(HcclRootInfo* root) {
  if (root == nullptr) return hccl_fail(HCCL_E_PTR, "HcclGetRootInfo: rootInfo is null");
  const std::string text = kRootMagic + new_group_path();
  if (text.size() >= sizeof root->internal || text[sizeof kRootMagic - 1] != '/') {
    return hccl_fail(HCCL_E_PARA,
                     "HcclGetRootInfo: XSD_SHM_DIR must be an absolute path, not too long");
  }
  std::memset(root->internal, 0, sizeof root->internal);
  std::memcpy(root->internal, text.data(), text.size());
  return HCCL_SUCCESS;
}

HcclResult HcclCommInitRootInfo(uint32_t size, const HcclRootInfo* root, uint32_t rank,
                                HcclComm* out) {
  return init(size, root, rank, nullptr, out, "HcclCommInitRootInfo");
}

HcclResult HcclCommInitRootInfoConfig(uint32_t size, const HcclRootInfo* root, uint32_t rank,
                                      const HcclCommConfig* config, HcclComm* out) {
  if (config == nullptr) {
    return hccl_fail(HCCL_E_PTR, "HcclCommInitRootInfoConfig: config is null");
  }
  return init(size, root, rank, config, out, "HcclCommInitRootInfoConfig");
}

HcclResult HcclCommDestroy(HcclComm handle) {
  if (xsdForked()) return HCCL_E_INTERNAL;
  auto comm = comms().take(handle);
  if (comm == nullptr) {
    return hccl_fail(HCCL_E_PARA, "HcclCommDestroy: %p is not a live communicator", handle);
  }
  comm->closed.store(true);
  comm->group.close_waits();
  kill_contexts(*comm);
  // What runs on a worker right now sees the closing and ends; its pages must stay until then.
  const auto limit = std::chrono::steady_clock::now() +
                     std::chrono::milliseconds(xsdSettings()->wait_timeout_ms + 1000);
  while (comm->users.load() > 0 && std::chrono::steady_clock::now() < limit) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  if (comm->users.load() > 0) {
    comm->group.say_left();
    new std::shared_ptr<Comm>(comm);  // still in use: its memory stays for good
  } else {
    comm->group.leave();
  }
  return HCCL_SUCCESS;
}

HcclResult HcclGetRankSize(HcclComm handle, uint32_t* size) {
  auto comm = find_comm(handle, "HcclGetRankSize");
  if (comm == nullptr) return HCCL_E_PARA;
  if (size == nullptr) return hccl_fail(HCCL_E_PTR, "HcclGetRankSize: rankSize is null");
  *size = comm->group.size();
  return HCCL_SUCCESS;
}

HcclResult HcclGetRankId(HcclComm handle, uint32_t* rank) {
  auto comm = find_comm(handle, "HcclGetRankId");
  if (comm == nullptr) return HCCL_E_PARA;
  if (rank == nullptr) return hccl_fail(HCCL_E_PTR, "HcclGetRankId: rank is null");
  *rank = comm->group.rank();
  return HCCL_SUCCESS;
}

HcclResult HcclGetCommName(HcclComm handle, char* name) {
  auto comm = find_comm(handle, "HcclGetCommName");
  if (comm == nullptr) return HCCL_E_PARA;
  if (name == nullptr) return hccl_fail(HCCL_E_PTR, "HcclGetCommName: commName is null");
  std::snprintf(name, kNameBytes, "%s", comm->name.c_str());
  return HCCL_SUCCESS;
}

HcclResult HcclGetCommAsyncError(HcclComm handle, HcclResult* result) {
  auto comm = find_comm(handle, "HcclGetCommAsyncError");
  if (comm == nullptr) return HCCL_E_PARA;
  if (result == nullptr) return hccl_fail(HCCL_E_PTR, "HcclGetCommAsyncError: asyncError is null");
  const uint32_t word = comm->group.check();
  const auto reason = static_cast<AbortReason>(word >> 24);
  *result = word == 0                          ? HCCL_SUCCESS
            : reason == AbortReason::kTimeout  ? HCCL_E_TIMEOUT
            : reason == AbortReason::kMismatch ? HCCL_E_PARA
                                               : HCCL_E_REMOTE;
  return HCCL_SUCCESS;
}

const char* HcclGetErrorString(HcclResult code) {
  static const char* const texts[] = {"no error",
                                      "parameter error",
                                      "empty pointer",
                                      "memory error",
                                      "internal error",
                                      "feature not supported",
                                      "resource not found",
                                      "resource unavailable",
                                      "system call error",
                                      "timeout",
                                      "cannot open a file",
                                      "tcp connect failed",
                                      "roce connect failed",
                                      "tcp transfer failed",
                                      "roce transfer failed",
                                      "runtime error",
                                      "driver error",
                                      "profiling error",
                                      "cce error",
                                      "network error",
                                      "try again",
                                      "remote error",
                                      "communicator suspending",
                                      "operation retry failed",
                                      "out of memory"};
  const auto count = static_cast<HcclResult>(sizeof texts / sizeof *texts);
  return code >= 0 && code < count ? texts[code] : "unknown error";
}

uint32_t HcclGetCommConfigCapability() { return 3; }  // buffer size, deterministic, name
