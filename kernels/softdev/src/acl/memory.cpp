// SPDX-License-Identifier: Apache-2.0
// Device and pinned host memory: poison, guard words, range checks, holds by queued tasks.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>

#include "internal.h"

namespace xsd {
namespace {

constexpr size_t kAlign = 512;  // device allocations start here; also room for the front guard
constexpr size_t kGuard =
    64;  // bytes of guard behind, starting right after the last byte asked for
constexpr unsigned char kGuardByte = 0xA5;
constexpr int kPoison = 0xCD;
constexpr size_t kQuarantineBytes = 32u << 20;  // freed blocks that stay readable as poison

struct Block {
  unsigned char* user = nullptr;
  size_t size = 0;
  int32_t device = -1;  // -1: pinned host memory
  uint32_t holds = 0;
  bool freed = false;
  bool freed_while_held = false;
};

struct Heap {
  std::mutex mutex;
  std::map<uintptr_t, std::shared_ptr<Block>>
      blocks;  // by address of the first byte; freed ones too
  std::deque<std::shared_ptr<Block>> quarantine;
  size_t quarantined = 0;
  std::map<int32_t, uint64_t> used;
};

Heap& heap() {
  static auto& instance = *new Heap;
  return instance;
}

// First damaged guard byte as an offset from the block's start (negative: in front), or 0 = intact.
int64_t damaged_guard(const Block& block) {
  for (size_t i = 0; i < kGuard; ++i) {
    if (block.user[block.size + i] != kGuardByte) return static_cast<int64_t>(block.size + i);
  }
  for (size_t i = 1; i <= kGuard; ++i) {
    if (block.user[-static_cast<int64_t>(i)] != kGuardByte) return -static_cast<int64_t>(i);
  }
  return 0;
}

void give_back(Heap& memory, const std::shared_ptr<Block>& block) {
  memory.blocks.erase(reinterpret_cast<uintptr_t>(block->user));
  std::free(block->user - kAlign);
}

// Freed blocks nobody holds leave the quarantine, oldest first, when it is over its size.
void trim(Heap& memory) {
  for (auto it = memory.quarantine.begin();
       it != memory.quarantine.end() && memory.quarantined > kQuarantineBytes;) {
    if ((*it)->holds > 0) {
      ++it;
      continue;
    }
    memory.quarantined -= (*it)->size;
    give_back(memory, *it);
    it = memory.quarantine.erase(it);
  }
}

// The block whose bytes or guards contain the address.
std::shared_ptr<Block> around(Heap& memory, uintptr_t address) {
  auto it = memory.blocks.upper_bound(address + kGuard);
  if (it == memory.blocks.begin()) return nullptr;
  --it;
  const Block& block = *it->second;
  return address < it->first + block.size + kGuard ? it->second : nullptr;
}

int allocate(void** out, size_t size, int32_t device, const char* call) {
  if (out == nullptr || size == 0) {
    return fail(kParamInvalid, "EE1003: %s: %s", call,
                out == nullptr ? "the result pointer is null" : "size is 0");
  }
  Heap& memory = heap();
  std::lock_guard<std::mutex> lock(memory.mutex);
  const uint64_t total = settings()->memory_bytes;
  uint64_t& used = memory.used[device];
  if (size > total || used > total - size) {
    return fail(kMemoryAllocation,
                "EE9999: %s: %zu bytes asked for, %llu of %llu bytes in use (XSD_MEMORY_BYTES)",
                call, size, static_cast<unsigned long long>(used),
                static_cast<unsigned long long>(total));
  }
  const size_t whole = (kAlign + size + kGuard + kAlign - 1) / kAlign * kAlign;
  auto* start = static_cast<unsigned char*>(std::aligned_alloc(kAlign, whole));
  if (start == nullptr) {
    return fail(kMemoryAllocation, "EE9999: %s: this machine has no %zu bytes left", call, size);
  }
  auto block = std::make_shared<Block>();
  block->user = start + kAlign;
  block->size = size;
  block->device = device;
  std::memset(block->user - kGuard, kGuardByte, kGuard);
  std::memset(block->user, kPoison, size);
  std::memset(block->user + size, kGuardByte, kGuard);
  used += size;
  memory.blocks[reinterpret_cast<uintptr_t>(block->user)] = block;
  *out = block->user;
  return kOk;
}

int release(void* ptr, bool host, const char* call) {
  Heap& memory = heap();
  std::lock_guard<std::mutex> lock(memory.mutex);
  auto it = memory.blocks.find(reinterpret_cast<uintptr_t>(ptr));
  const bool live = it != memory.blocks.end() && !it->second->freed;
  if (!live || (it->second->device < 0) != host) {
    const char* why =
        live ? (host ? "is device memory: use aclrtFree" : "is host memory: use aclrtFreeHost")
             : "is not the start of a live allocation";
    return fail(kParamInvalid, "EE1003: %s: %p %s", call, ptr, why);
  }
  auto block = it->second;
  const int64_t damage = damaged_guard(*block);
  block->freed = true;
  block->freed_while_held = block->holds > 0;
  memory.used[block->device] -= block->size;
  if (!block->freed_while_held) std::memset(block->user, kPoison, block->size);
  memory.quarantine.push_back(block);
  memory.quarantined += block->size;
  trim(memory);
  if (damage == 0) return kOk;
  return fail(kDeviceMemory,
              "EE9999: %s: guard bytes around the %zu bytes at %p were overwritten at offset %lld: "
              "something wrote outside its allocation",
              call, block->size, ptr, static_cast<long long>(damage));
}

}  // namespace

bool is_pinned(const void* ptr, uint64_t bytes) {
  Heap& memory = heap();
  std::lock_guard<std::mutex> lock(memory.mutex);
  const auto address = reinterpret_cast<uintptr_t>(ptr);
  auto block = around(memory, address);
  if (block == nullptr || block->freed || block->device >= 0) return false;
  const auto start = reinterpret_cast<uintptr_t>(block->user);
  return address >= start && address + bytes <= start + block->size;
}

}  // namespace xsd

using namespace xsd;

int xsdCheckRange(const void* ptr, uint64_t bytes) {
  Heap& memory = heap();
  std::lock_guard<std::mutex> lock(memory.mutex);
  const auto address = reinterpret_cast<uintptr_t>(ptr);
  if (address + bytes < address) return -1;
  if (auto block = around(memory, address)) {
    if (block->freed) return -1;
    const auto start = reinterpret_cast<uintptr_t>(block->user);
    return address >= start && address + bytes <= start + block->size ? 1 : -1;
  }
  // Starts outside: it must not run into the next allocation either.
  auto next = memory.blocks.lower_bound(address);
  if (next != memory.blocks.end() && address + bytes > next->first - kGuard) return -1;
  return 0;
}

int xsdMapped(const void* ptr, uint64_t bytes) {
  if (bytes == 0) return 1;
  static const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto start = reinterpret_cast<uintptr_t>(ptr) / page * page;
  const uintptr_t end = reinterpret_cast<uintptr_t>(ptr) + bytes;
  if (end < start) return 0;
  // With MS_ASYNC this writes nothing on Linux: it only looks whether the range is mapped.
  return msync(reinterpret_cast<void*>(start), end - start, MS_ASYNC) == 0 ? 1 : 0;
}

void* xsdMemoryHold(const void* ptr) {
  Heap& memory = heap();
  std::lock_guard<std::mutex> lock(memory.mutex);
  auto block = around(memory, reinterpret_cast<uintptr_t>(ptr));
  if (block == nullptr || block->freed) return nullptr;
  ++block->holds;
  return new std::shared_ptr<Block>(block);
}

int xsdMemoryRelease(void* hold) {
  if (hold == nullptr) return 0;
  Heap& memory = heap();
  std::lock_guard<std::mutex> lock(memory.mutex);
  auto* owned = static_cast<std::shared_ptr<Block>*>(hold);
  auto block = *owned;
  delete owned;
  int bits = damaged_guard(*block) != 0 ? XSD_GUARD_BROKEN : 0;
  if (block->freed_while_held) bits |= XSD_FREED_WHILE_HELD;
  if (--block->holds == 0 && block->freed) {
    std::memset(block->user, kPoison, block->size);
    trim(memory);
  }
  return bits;
}

aclError aclrtMalloc(void** out, size_t size, int) {
  if (int code = enter()) return code;
  auto context = current_context();
  if (context == nullptr) return kContextNull;
  return allocate(out, size, context->device, "aclrtMalloc");
}

aclError aclrtMallocAlign32(void** out, size_t size, int policy) {
  return aclrtMalloc(out, size, policy);
}

aclError aclrtFree(void* ptr) {
  if (int code = enter()) return code;
  return release(ptr, false, "aclrtFree");
}

aclError aclrtMallocHost(void** out, size_t size) {
  if (int code = enter()) return code;
  return allocate(out, size, -1, "aclrtMallocHost");
}

aclError aclrtFreeHost(void* ptr) {
  if (int code = enter()) return code;
  return release(ptr, true, "aclrtFreeHost");
}

aclError aclrtGetMemInfo(int attribute, size_t* free_bytes, size_t* total_bytes) {
  if (int code = enter()) return code;
  if (free_bytes == nullptr || total_bytes == nullptr) {
    return fail(kParamInvalid, "EE1003: aclrtGetMemInfo: null argument");
  }
  if (attribute < 0 || attribute > 15) {
    return fail(kParamInvalid, "EE1003: aclrtGetMemInfo: attribute %d (0 to 15)", attribute);
  }
  auto context = current_context();
  if (context == nullptr) return kContextNull;
  Heap& memory = heap();
  std::lock_guard<std::mutex> lock(memory.mutex);
  *total_bytes = settings()->memory_bytes;
  *free_bytes = *total_bytes - std::min<uint64_t>(*total_bytes, memory.used[context->device]);
  return kOk;
}
