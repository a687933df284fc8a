// SPDX-License-Identifier: Apache-2.0
// Copies and fills, at once or in a stream's order.
#include <cstring>

#include "internal.h"

namespace xsd {
namespace {

constexpr int kLastKind = 7;  // ACL_MEMCPY_INTER_DEVICE_TO_DEVICE
constexpr size_t kBriefBytes = 4096;

bool in_device_memory(const void* ptr, uint64_t bytes) {
  return xsdCheckRange(ptr, bytes) == 1 && !is_pinned(ptr, bytes);
}

int check_range(const char* call, const char* side, const void* ptr, uint64_t bytes) {
  if (ptr == nullptr) return fail(kParamInvalid, "EE1003: %s: %s is null", call, side);
  if (xsdCheckRange(ptr, bytes) >= 0) return kOk;
  return fail(kParamInvalid, "EE1003: %s: %s [%p, +%llu) is not inside one live allocation", call,
              side, ptr, static_cast<unsigned long long>(bytes));
}

int check_copy(const char* call, void* dst, size_t room, const void* src, size_t count,
               aclrtMemcpyKind kind) {
  if (count > room) {
    return fail(kParamInvalid, "EE1003: %s: %zu bytes do not fit the %zu of the destination", call,
                count, room);
  }
  if (static_cast<int>(kind) < 0 || static_cast<int>(kind) > kLastKind) {
    return fail(kParamInvalid, "EE1003: %s: kind %d (0 to %d)", call, static_cast<int>(kind),
                kLastKind);
  }
  if (count == 0) return kOk;
  if (int code = check_range(call, "destination", dst, count)) return code;
  if (int code = check_range(call, "source", src, count)) return code;
  if (!xsdSettings()->strict) return kOk;
  // Memory the device did not hand out may stand for either side; its own may not.
  const bool host_source = kind == ACL_MEMCPY_HOST_TO_HOST || kind == ACL_MEMCPY_HOST_TO_DEVICE;
  const bool host_target = kind == ACL_MEMCPY_HOST_TO_HOST || kind == ACL_MEMCPY_DEVICE_TO_HOST;
  const bool known = static_cast<int>(kind) <= ACL_MEMCPY_DEVICE_TO_DEVICE;
  const bool wrong =
      known && ((host_source ? in_device_memory(src, count) : is_pinned(src, count)) ||
                (host_target ? in_device_memory(dst, count) : is_pinned(dst, count)));
  if (!wrong) return kOk;
  return fail(kInvalidMemoryType,
              "EE1003: %s: kind %d does not match the memory: source %p, destination %p", call,
              static_cast<int>(kind), src, dst);
}

// What a queued copy or fill needs until it ran, or was skipped.
struct Held {
  const char* what;
  void* target = nullptr;
  void* source = nullptr;
  std::vector<unsigned char> staged;

  explicit Held(const char* kind) : what(kind) {}
  Held(const Held&) = delete;
  ~Held() { let_go(); }

  int let_go() {
    const int bits = xsdMemoryRelease(target) | xsdMemoryRelease(source);
    target = source = nullptr;
    if ((bits & XSD_FREED_WHILE_HELD) == 0) return 0;
    xsdTaskError("memory of a queued %s was freed before it ran", what);
    return kDeviceMemory;
  }
};

}  // namespace
}  // namespace xsd

using namespace xsd;

aclError aclrtMemcpy(void* dst, size_t room, const void* src, size_t count, aclrtMemcpyKind kind) {
  if (int code = enter()) return code;
  if (current_context() == nullptr) return kContextNull;
  if (int code = check_copy("aclrtMemcpy", dst, room, src, count, kind)) return code;
  if (count > 0) std::memmove(dst, src, count);
  return kOk;
}

aclError aclrtMemcpyAsync(void* dst, size_t room, const void* src, size_t count,
                          aclrtMemcpyKind kind, aclrtStream handle) {
  if (int code = enter()) return code;
  if (int code = check_copy("aclrtMemcpyAsync", dst, room, src, count, kind)) return code;
  std::shared_ptr<Stream> stream;
  if (int code = resolve_stream(handle, &stream)) return code;
  if (count == 0) return kOk;
  auto held = std::make_shared<Held>("copy");
  const bool from_host = kind == ACL_MEMCPY_HOST_TO_DEVICE || kind == ACL_MEMCPY_HOST_TO_HOST;
  if (from_host && !is_pinned(src, count)) {
    // Pageable memory is read before the call returns; pinned memory when the copy really runs.
    const auto* bytes = static_cast<const unsigned char*>(src);
    held->staged.assign(bytes, bytes + count);
  } else {
    held->source = xsdMemoryHold(src);
  }
  held->target = xsdMemoryHold(dst);
  Task task;
  task.name = "memcpy";
  task.brief = count <= kBriefBytes;
  task.run = [held, dst, src, count] {
    std::memmove(dst, held->staged.empty() ? src : held->staged.data(), count);
    return held->let_go();
  };
  return enqueue(stream, std::move(task));
}

aclError aclrtMemset(void* ptr, size_t room, int32_t value, size_t count) {
  if (int code = enter()) return code;
  if (current_context() == nullptr) return kContextNull;
  if (count > room) {
    return fail(kParamInvalid, "EE1003: aclrtMemset: %zu bytes do not fit %zu", count, room);
  }
  if (int code = check_range("aclrtMemset", "destination", ptr, count)) return code;
  std::memset(ptr, value, count);
  return kOk;
}

aclError aclrtMemsetAsync(void* ptr, size_t room, int32_t value, size_t count, aclrtStream handle) {
  if (int code = enter()) return code;
  if (count > room) {
    return fail(kParamInvalid, "EE1003: aclrtMemsetAsync: %zu bytes do not fit %zu", count, room);
  }
  if (int code = check_range("aclrtMemsetAsync", "destination", ptr, count)) return code;
  std::shared_ptr<Stream> stream;
  if (int code = resolve_stream(handle, &stream)) return code;
  auto held = std::make_shared<Held>("fill");
  held->target = xsdMemoryHold(ptr);
  Task task;
  task.name = "memset";
  task.brief = count <= kBriefBytes;
  task.run = [held, ptr, value, count] {
    std::memset(ptr, value, count);
    return held->let_go();
  };
  return enqueue(stream, std::move(task));
}
