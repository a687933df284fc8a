// SPDX-License-Identifier: Apache-2.0
// Executors: what phase one of an operator prepares and phase two launches, once.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <string>
#include <vector>

#include "../common/registry.h"
#include "internal.h"

namespace xsd {
namespace {

constexpr unsigned char kTailByte = 0xA5;
constexpr uint64_t kTailBytes = 4096;
constexpr uintptr_t kAlignment = 32;
constexpr int kDeviceMemory = 507053;

// The prepared kernel; a repeatable executor and its queued launches share it.
struct Kernel {
  std::string op;
  uint64_t workspace_bytes = 0;
  xsdKernelFn run = nullptr;
  void* ctx = nullptr;
  xsdReleaseFn release = nullptr;
  const XsdRebind* rebind = nullptr;
  std::atomic<int> queued{0};  // launches that will still read ctx
  ~Kernel() {
    if (release != nullptr) release(ctx);
  }
};

struct Executor {
  uint64_t id = 0;
  std::mutex mutex;
  std::shared_ptr<Kernel> kernel;
  bool repeatable = false;
  bool launched = false;
};

struct Launch {
  std::shared_ptr<Kernel> kernel;
  unsigned char* workspace = nullptr;
  uint64_t bytes = 0;
  void* hold = nullptr;
};

Registry<Executor>& executors() {
  static auto& registry = *new Registry<Executor>(0x5804);
  return registry;
}

// Handles of executors that were used up, so that the text can say so. Bounded.
struct Spent {
  std::mutex mutex;
  std::deque<const void*> handles;
};

Spent& spent() {
  static auto& instance = *new Spent;
  return instance;
}

void remember_spent(const void* handle) {
  std::lock_guard<std::mutex> lock(spent().mutex);
  spent().handles.push_back(handle);
  if (spent().handles.size() > 4096) spent().handles.pop_front();
}

int not_alive(const char* call, const void* handle) {
  bool used;
  {
    std::lock_guard<std::mutex> lock(spent().mutex);
    const auto& handles = spent().handles;
    used = std::find(handles.begin(), handles.end(), handle) != handles.end();
  }
  return fail(kRuntimeError, "EE9999: %s: executor %p %s", call, handle,
              used
                  ? "was launched before: an executor is good for one launch unless made repeatable"
                  : "is not alive");
}

uint64_t tail_bytes(const Launch& launch) {
  return std::min(kTailBytes, launch.bytes - launch.kernel->workspace_bytes);
}

int run_launch(void* ctx) {
  auto& launch = *static_cast<Launch*>(ctx);
  const bool strict = xsdSettings()->strict;
  if (strict && xsdMapped(launch.workspace, launch.workspace == nullptr ? 0 : launch.bytes) == 0) {
    xsdTaskError("the workspace of %s is not mapped", launch.kernel->op.c_str());
    return kDeviceMemory;
  }
  unsigned char* tail = launch.workspace + launch.kernel->workspace_bytes;
  const uint64_t guarded = strict && launch.workspace != nullptr ? tail_bytes(launch) : 0;
  if (guarded > 0) std::memset(tail, kTailByte, guarded);
  const int code = launch.kernel->run(launch.kernel->ctx, launch.workspace, launch.bytes);
  int bits = xsdMemoryRelease(launch.hold);
  launch.hold = nullptr;
  if (code != 0) return code;
  if (bits & XSD_FREED_WHILE_HELD) {
    xsdTaskError("the workspace of %s was freed before the launch was done",
                 launch.kernel->op.c_str());
    return kDeviceMemory;
  }
  const bool tail_broken =
      std::any_of(tail, tail + guarded, [](unsigned char byte) { return byte != kTailByte; });
  if (strict && (tail_broken || (bits & XSD_GUARD_BROKEN))) {
    xsdTaskError("guard words behind the %llu-byte workspace of %s were overwritten",
                 static_cast<unsigned long long>(launch.kernel->workspace_bytes),
                 launch.kernel->op.c_str());
    return kDeviceMemory;
  }
  return 0;
}

void release_launch(void* ctx) {
  auto* launch = static_cast<Launch*>(ctx);
  xsdMemoryRelease(launch->hold);
  launch->kernel->queued.fetch_sub(1, std::memory_order_release);
  delete launch;
}

// Launches that are queued go on with the addresses they were launched with.
void make_private(std::shared_ptr<Kernel>* kernel) {
  if ((*kernel)->queued.load(std::memory_order_acquire) == 0) return;
  auto copy = std::make_shared<Kernel>();
  copy->op = (*kernel)->op;
  copy->workspace_bytes = (*kernel)->workspace_bytes;
  copy->run = (*kernel)->run;
  copy->release = (*kernel)->release;
  copy->rebind = (*kernel)->rebind;
  copy->ctx = (*kernel)->rebind->clone((*kernel)->ctx);
  *kernel = std::move(copy);
}

int set_address(const char* call, aclOpExecutor* handle, int is_output, size_t index,
                aclTensor* tensor, void* addr) {
  if (xsdForked()) return kRuntimeError;
  if (handle == nullptr || tensor == nullptr) {
    return fail(kInnerNull, "EZ9999: %s: %s is null", call,
                handle == nullptr ? "executor" : "tensor");
  }
  if (const char* problem = address_problem(tensor, addr)) {
    return fail(kParamInvalid, "EZ1001: %s: %s (tensor %p, addr %p)", call, problem,
                static_cast<const void*>(tensor), addr);
  }
  auto executor = executors().find(handle);
  if (executor == nullptr) return not_alive(call, handle);
  std::lock_guard<std::mutex> lock(executor->mutex);
  if (!executor->repeatable) {
    return fail(kParamInvalid, "EZ1001: %s: executor %p was not made repeatable", call,
                static_cast<const void*>(handle));
  }
  if (executor->kernel->rebind == nullptr) {
    return fail(kParamInvalid, "EZ1001: %s: %s cannot follow moved tensors", call,
                executor->kernel->op.c_str());
  }
  make_private(&executor->kernel);
  const uint64_t bytes = static_cast<uint64_t>(tensor->offset) * xsdDtypeBits(tensor->dtype) / 8;
  void* first = static_cast<char*>(addr) + bytes;
  const int moved = executor->kernel->rebind->move(executor->kernel->ctx, is_output, index, first);
  if (moved < 0) {
    return fail(kParamInvalid,
                "EZ1001: %s: what tensor %zu of %s covers is not inside one live allocation at %p",
                call, index, executor->kernel->op.c_str(), first);
  }
  if (moved == 0) {
    return fail(kParamInvalid, "EZ1001: %s: index %zu names no tensor of %s", call, index,
                executor->kernel->op.c_str());
  }
  tensor->data = addr;
  return kOk;
}

int check_workspace(const char* op, const Kernel& kernel, const void* workspace, uint64_t bytes) {
  const uint64_t need = kernel.workspace_bytes;
  if (need > 0 && workspace == nullptr) {
    return fail(kParamNull, "EZ1001: %s: workspace is null but %llu bytes are needed", op,
                static_cast<unsigned long long>(need));
  }
  if (bytes < need) {
    return fail(kParamInvalid, "EZ1001: %s: workspaceSize %llu, needed are %llu", op,
                static_cast<unsigned long long>(bytes), static_cast<unsigned long long>(need));
  }
  if (workspace == nullptr) return kOk;
  if (xsdSettings()->strict && reinterpret_cast<uintptr_t>(workspace) % kAlignment != 0) {
    return fail(kParamInvalid, "EZ1001: %s: workspace %p is not 32-byte aligned", op, workspace);
  }
  if (xsdCheckRange(workspace, bytes) < 0) {
    return fail(kParamInvalid,
                "EZ1001: %s: workspace [%p, +%llu) is not inside one live allocation", op,
                workspace, static_cast<unsigned long long>(bytes));
  }
  return kOk;
}

}  // namespace
}  // namespace xsd

using namespace xsd;

aclOpExecutor* xsdExecutorCreate(const char* op, uint64_t workspace_bytes, xsdKernelFn run,
                                 void* ctx, xsdReleaseFn release) {
  auto kernel = std::make_shared<Kernel>();
  kernel->op = op == nullptr ? "operator" : op;
  kernel->workspace_bytes = workspace_bytes;
  kernel->run = run;
  kernel->ctx = ctx;
  kernel->release = release;
  if (run == nullptr || xsdForked()) return nullptr;
  auto executor = std::make_shared<Executor>();
  executor->kernel = std::move(kernel);
  return static_cast<aclOpExecutor*>(executors().add(executor));
}

void xsdExecutorSetRebind(aclOpExecutor* handle, const XsdRebind* rebind) {
  auto executor = executors().find(handle);
  if (executor == nullptr) return;
  std::lock_guard<std::mutex> lock(executor->mutex);
  executor->kernel->rebind = rebind;
}

aclnnStatus xsdExecutorLaunch(const char* op, void* workspace, uint64_t bytes,
                              aclOpExecutor* handle, aclrtStream stream) {
  const char* name = op == nullptr ? "operator" : op;
  if (xsdForked()) return kRuntimeError;
  if (handle == nullptr) return fail(kInnerNull, "EZ9999: %s: executor is null", name);
  auto executor = executors().find(handle);
  if (executor == nullptr) return not_alive(name, handle);
  std::lock_guard<std::mutex> lock(executor->mutex);
  const auto& kernel = executor->kernel;
  if (executor->launched && !executor->repeatable) return not_alive(name, handle);
  if (kernel->op != name) {
    return fail(kParamInvalid, "EZ1001: %s: the executor was prepared by %s", name,
                kernel->op.c_str());
  }
  if (int code = check_workspace(name, *kernel, workspace, bytes)) return code;
  auto* launch = new Launch;
  launch->kernel = kernel;
  kernel->queued.fetch_add(1, std::memory_order_relaxed);
  launch->workspace = static_cast<unsigned char*>(workspace);
  launch->bytes = workspace == nullptr ? kernel->workspace_bytes : bytes;
  launch->hold = workspace == nullptr ? nullptr : xsdMemoryHold(workspace);
  const int status = xsdStreamEnqueue(stream, name, run_launch, launch, release_launch);
  if (status != 0) return kRuntimeError;  // the text says what the stream refused
  executor->launched = true;
  if (!executor->repeatable) {
    executors().take(handle);
    remember_spent(handle);
  }
  return kOk;
}

aclnnStatus aclSetInputTensorAddr(aclOpExecutor* handle, const size_t index, aclTensor* tensor,
                                  void* addr) {
  return set_address("aclSetInputTensorAddr", handle, 0, index, tensor, addr);
}

aclnnStatus aclSetOutputTensorAddr(aclOpExecutor* handle, const size_t index, aclTensor* tensor,
                                   void* addr) {
  return set_address("aclSetOutputTensorAddr", handle, 1, index, tensor, addr);
}

aclnnStatus aclSetAclOpExecutorRepeatable(aclOpExecutor* handle) {
  if (xsdForked()) return kRuntimeError;
  if (handle == nullptr) {
    return fail(kInnerNull, "EZ9999: aclSetAclOpExecutorRepeatable: executor is null");
  }
  auto executor = executors().find(handle);
  if (executor == nullptr) return not_alive("aclSetAclOpExecutorRepeatable", handle);
  std::lock_guard<std::mutex> lock(executor->mutex);
  executor->repeatable = true;
  return kOk;
}

aclnnStatus aclDestroyAclOpExecutor(aclOpExecutor* handle) {
  if (xsdForked()) return kRuntimeError;
  if (handle == nullptr)
    return fail(kInnerNull, "EZ9999: aclDestroyAclOpExecutor: executor is null");
  if (executors().take(handle) == nullptr) return not_alive("aclDestroyAclOpExecutor", handle);
  return kOk;  // launches that are queued keep the kernel until they ran
}
