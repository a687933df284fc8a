// SPDX-License-Identifier: Apache-2.0
// Virtual memory: reserved address ranges, pieces of memory, and mappings of the one into the other.
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <map>

#include "acl_npu.h"
#include "internal.h"

namespace xsd {
namespace {

constexpr size_t kGranularity = 2u << 20;  // as on the device: pages of 2 MiB
constexpr int kPoison = 0xCD;

struct Piece {
  uint64_t id = 0;
  int file = -1;
  size_t size = 0;
  ~Piece() {
    if (file >= 0) close(file);
  }
};

struct Mapping {
  size_t size;
  std::shared_ptr<Piece> piece;  // freed before it is unmapped: the memory stays until then
};

struct Space {
  std::mutex mutex;
  std::map<uintptr_t, size_t> ranges;
  std::map<uintptr_t, Mapping> mappings;
};

Space& space() {
  static auto& instance = *new Space;
  return instance;
}

Registry<Piece>& pieces() {
  static auto& registry = *new Registry<Piece>(0x5806);
  return registry;
}

bool inside_a_range(uintptr_t start, size_t size) {
  auto it = space().ranges.upper_bound(start);
  if (it == space().ranges.begin()) return false;
  --it;
  return start + size <= it->first + it->second;
}

bool overlaps_a_mapping(uintptr_t start, size_t size) {
  auto it = space().mappings.lower_bound(start);
  if (it != space().mappings.end() && it->first < start + size) return true;
  if (it == space().mappings.begin()) return false;
  --it;
  return it->first + it->second.size > start;
}

bool whole_pages(size_t size) { return size > 0 && size % kGranularity == 0; }

int not_shared(const char* call) {
  return fail(kNotSupported, "EE1006: %s: memory of one process is not handed to another here", call);
}

}  // namespace
}  // namespace xsd

using namespace xsd;

aclError aclrtReserveMemAddress(void** out, size_t size, size_t, void* expected, uint64_t) {
  if (int code = enter()) return code;
  if (out == nullptr || !whole_pages(size)) {
    return fail(kParamInvalid, "EE1003: aclrtReserveMemAddress: %zu bytes (a multiple of %zu)", size,
                kGranularity);
  }
  if (current_context() == nullptr) return kContextNull;
  // One page more, so that a start at a whole page can be cut out.
  void* raw = mmap(expected, size + kGranularity, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (raw == MAP_FAILED) {
    return fail(kMemoryAllocation, "EE9999: aclrtReserveMemAddress: no %zu bytes of address space", size);
  }
  const auto base = reinterpret_cast<uintptr_t>(raw);
  const uintptr_t start = (base + kGranularity - 1) / kGranularity * kGranularity;
  if (start > base) munmap(raw, start - base);
  const uintptr_t rest = base + size + kGranularity - (start + size);
  if (rest > 0) munmap(reinterpret_cast<void*>(start + size), rest);
  std::lock_guard<std::mutex> lock(space().mutex);
  space().ranges[start] = size;
  *out = reinterpret_cast<void*>(start);
  return kOk;
}

aclError aclrtReleaseMemAddress(void* ptr) {
  if (int code = enter()) return code;
  std::lock_guard<std::mutex> lock(space().mutex);
  auto it = space().ranges.find(reinterpret_cast<uintptr_t>(ptr));
  if (it == space().ranges.end()) {
    return fail(kParamInvalid, "EE1003: aclrtReleaseMemAddress: %p is not the start of a range", ptr);
  }
  if (overlaps_a_mapping(it->first, it->second)) {
    return fail(kParamInvalid, "EE1003: aclrtReleaseMemAddress: %p still has mappings", ptr);
  }
  munmap(ptr, it->second);
  space().ranges.erase(it);
  return kOk;
}

aclError aclrtMallocPhysical(aclrtDrvMemHandle* out, size_t size, const aclrtPhysicalMemProp* property,
                             uint64_t) {
  if (int code = enter()) return code;
  if (out == nullptr || property == nullptr || !whole_pages(size)) {
    return fail(kParamInvalid, "EE1003: aclrtMallocPhysical: %zu bytes (a multiple of %zu) or a null argument",
                size, kGranularity);
  }
  if (current_context() == nullptr) return kContextNull;
  auto piece = std::make_shared<Piece>();
  piece->file = memfd_create("xsd-device-memory", MFD_CLOEXEC);
  piece->size = size;
  if (piece->file < 0 || ftruncate(piece->file, static_cast<off_t>(size)) != 0) {
    return fail(kMemoryAllocation, "EE9999: aclrtMallocPhysical: this machine has no %zu bytes left", size);
  }
  *out = pieces().add(piece);
  return kOk;
}

aclError aclrtFreePhysical(aclrtDrvMemHandle handle) {
  if (int code = enter()) return code;
  if (pieces().take(handle) == nullptr) {
    return fail(kParamInvalid, "EE1003: aclrtFreePhysical: %p is not a live handle", handle);
  }
  return kOk;
}

aclError aclrtMapMem(void* ptr, size_t size, size_t offset, aclrtDrvMemHandle handle, uint64_t) {
  if (int code = enter()) return code;
  auto piece = pieces().find(handle);
  if (piece == nullptr) return fail(kParamInvalid, "EE1003: aclrtMapMem: %p is not a live handle", handle);
  const auto start = reinterpret_cast<uintptr_t>(ptr);
  if (!whole_pages(size) || start % kGranularity != 0 || offset != 0 || size > piece->size) {
    return fail(kParamInvalid, "EE1003: aclrtMapMem: %zu bytes at %p, offset %zu of a piece of %zu", size, ptr,
                offset, piece->size);
  }
  std::lock_guard<std::mutex> lock(space().mutex);
  if (!inside_a_range(start, size) || overlaps_a_mapping(start, size)) {
    return fail(kParamInvalid, "EE1003: aclrtMapMem: [%p, +%zu) is not a free part of a reserved range", ptr, size);
  }
  if (mmap(ptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, piece->file, 0) == MAP_FAILED) {
    return fail(kMemoryAllocation, "EE9999: aclrtMapMem: the system refused to map %zu bytes", size);
  }
  std::memset(ptr, kPoison, size);
  space().mappings.emplace(start, Mapping{size, std::move(piece)});
  return kOk;
}

aclError aclrtUnmapMem(void* ptr) {
  if (int code = enter()) return code;
  std::lock_guard<std::mutex> lock(space().mutex);
  auto it = space().mappings.find(reinterpret_cast<uintptr_t>(ptr));
  if (it == space().mappings.end()) {
    return fail(kParamInvalid, "EE1003: aclrtUnmapMem: %p is not the start of a mapping", ptr);
  }
  // The range stays reserved, without access.
  mmap(ptr, it->second.size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  space().mappings.erase(it);
  return kOk;
}

aclError aclrtMemGetAllocationGranularity(aclrtPhysicalMemProp*, int, size_t* out) {
  if (out == nullptr) {
    return fail(kParamInvalid, "EE1003: aclrtMemGetAllocationGranularity: granularity is null");
  }
  *out = kGranularity;
  return kOk;
}

aclError aclrtMemExportToShareableHandle(aclrtDrvMemHandle, int, uint64_t, uint64_t*) {
  return not_shared("aclrtMemExportToShareableHandle");
}

aclError aclrtMemImportFromShareableHandle(uint64_t, int32_t, aclrtDrvMemHandle*) {
  return not_shared("aclrtMemImportFromShareableHandle");
}

aclError aclrtMemSetPidToShareableHandle(uint64_t, int32_t*, size_t) {
  return not_shared("aclrtMemSetPidToShareableHandle");
}

aclError aclrtPointerGetAttributes(const void* ptr, aclrtPtrAttributes* out) {
  if (int code = enter()) return code;
  if (ptr == nullptr || out == nullptr) {
    return fail(kParamInvalid, "EE1003: aclrtPointerGetAttributes: null argument");
  }
  std::memset(out, 0, sizeof *out);
  out->location.type = is_pinned(ptr, 1) ? 0 : xsdCheckRange(ptr, 1) == 1 ? 1 : 2;
  std::lock_guard<std::mutex> lock(space().mutex);
  if (overlaps_a_mapping(reinterpret_cast<uintptr_t>(ptr), 1)) out->location.type = 1;
  return kOk;
}
