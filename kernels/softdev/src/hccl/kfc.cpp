// SPDX-License-Identifier: Apache-2.0
// Operator arguments and resource contexts for kernels, the windows, and how kernels use them.
#include <cstring>
#include <unordered_map>

#include "comm.h"

namespace xsd {
namespace {

constexpr uint8_t kEngineAiv = 4;
constexpr uint8_t kEngineLast = 5;
constexpr uint8_t kOpAllToAll = 8;
constexpr uint8_t kOpBatchWrite = 18;

struct OpArgs {
  uint64_t id = 0;
  std::mutex mutex;
  int engine = -1;  // not set
  std::string algorithm;
};

Registry<OpArgs>& op_args() {
  static auto& registry = *new Registry<OpArgs>(0x5806);
  return registry;
}

// Whose context is it? Entries stay, as the contexts do, so that a late kernel is told why it
// fails.
struct Owners {
  std::mutex mutex;
  std::unordered_map<const XsdOpResCtx*, std::weak_ptr<Comm>> comms;
};

Owners& owners() {
  static auto& instance = *new Owners;
  return instance;
}

std::shared_ptr<OpArgs> find_args(void* handle, const char* call) {
  if (xsdForked()) return nullptr;
  auto args = op_args().find(handle);
  if (args == nullptr) hccl_fail(HCCL_E_PARA, "%s: %p is not a live op args", call, handle);
  return args;
}

// "<Name>=level<N>:<algorithm>", further levels after ';'.
bool well_formed(const std::string& text) {
  const size_t equal = text.find('=');
  if (equal == 0 || equal == std::string::npos) return false;
  size_t at = equal + 1;
  for (;;) {
    const size_t end = text.find(';', at);
    const std::string part = text.substr(at, end == std::string::npos ? end : end - at);
    if (part.size() < 8 || part.compare(0, 5, "level") != 0 || part[5] < '0' || part[5] > '9' ||
        part[6] != ':') {
      return false;
    }
    if (end == std::string::npos || end + 1 == text.size()) return true;
    at = end + 1;
  }
}

HcclResult check_args(const OpArgs& args, uint8_t op_type) {
  if (args.engine != kEngineAiv) {
    return hccl_fail(HCCL_E_NOT_SUPPORT,
                     "HcclCreateOpResCtx: communication engine %d; this device has %u (AIV) only",
                     args.engine, kEngineAiv);
  }
  const char* needed = op_type == kOpAllToAll     ? "AlltoAll="
                       : op_type == kOpBatchWrite ? "BatchWrite="
                                                  : nullptr;
  if (needed == nullptr) {
    return hccl_fail(HCCL_E_NOT_SUPPORT,
                     "HcclCreateOpResCtx: opType %u (8 AlltoAll, 18 BatchWrite)", op_type);
  }
  if (args.algorithm.compare(0, std::strlen(needed), needed) != 0) {
    return hccl_fail(HCCL_E_PARA,
                     "HcclCreateOpResCtx: opType %u needs an algorithm %s..., it is \"%s\"",
                     op_type, needed, args.algorithm.c_str());
  }
  return HCCL_SUCCESS;
}

XsdOpResCtx* make_context(Comm& comm) {
  auto* context = new XsdOpResCtx;
  std::memset(context, 0, sizeof *context);
  context->magic = XSD_MAGIC_RESCTX;
  context->rank = comm.group.rank();
  context->size = comm.group.size();
  context->window_bytes = comm.group.half_bytes();
  for (uint32_t r = 0; r < comm.group.size(); ++r) {
    context->window[r] = reinterpret_cast<uint64_t>(comm.group.window(r));
  }
  context->abort_flag = reinterpret_cast<uint64_t>(&comm.group.abort_word());
  return context;
}

}  // namespace

std::shared_ptr<Comm> comm_of_context(const XsdOpResCtx* context) {
  std::lock_guard<std::mutex> lock(owners().mutex);
  auto it = owners().comms.find(context);
  return it == owners().comms.end() ? nullptr : it->second.lock();
}

void kill_contexts(Comm& comm) {
  std::lock_guard<std::mutex> lock(comm.mutex);
  for (const auto& each : comm.contexts) {
    __atomic_store_n(&each.address->magic, uint64_t{0xdeaddeaddeaddead}, __ATOMIC_RELEASE);
  }
}

}  // namespace xsd

using namespace xsd;

HcclResult HcclKfcAllocOpArgs(void** out) {
  if (out == nullptr) return hccl_fail(HCCL_E_PTR, "HcclKfcAllocOpArgs: opArgs is null");
  if (xsdForked()) return HCCL_E_INTERNAL;
  xsdMarkUsed();
  *out = op_args().add(std::make_shared<OpArgs>());
  return HCCL_SUCCESS;
}

HcclResult HcclKfcFreeOpArgs(void* handle) {
  if (find_args(handle, "HcclKfcFreeOpArgs") == nullptr) return HCCL_E_PARA;
  if (op_args().take(handle) == nullptr) return HCCL_E_PARA;
  return HCCL_SUCCESS;
}

HcclResult HcclKfcOpArgsSetAlgConfig(void* handle, char* text) {
  auto args = find_args(handle, "HcclKfcOpArgsSetAlgConfig");
  if (args == nullptr) return HCCL_E_PARA;
  if (text == nullptr) return hccl_fail(HCCL_E_PTR, "HcclKfcOpArgsSetAlgConfig: algConfig is null");
  const std::string algorithm(text, ::strnlen(text, 256));
  if (!well_formed(algorithm)) {
    return hccl_fail(HCCL_E_PARA,
                     "HcclKfcOpArgsSetAlgConfig: \"%s\" is not of the form "
                     "AlltoAll=level0:fullmesh;level1:pairwise",
                     algorithm.c_str());
  }
  std::lock_guard<std::mutex> lock(args->mutex);
  args->algorithm = algorithm;
  return HCCL_SUCCESS;
}

HcclResult HcclKfcOpArgsSetCommEngine(void* handle, uint8_t engine) {
  auto args = find_args(handle, "HcclKfcOpArgsSetCommEngine");
  if (args == nullptr) return HCCL_E_PARA;
  if (engine > kEngineLast) {
    return hccl_fail(HCCL_E_PARA, "HcclKfcOpArgsSetCommEngine: engine %u (0 to %u)", engine,
                     kEngineLast);
  }
  std::lock_guard<std::mutex> lock(args->mutex);
  args->engine = engine;
  return HCCL_SUCCESS;
}

HcclResult HcclCreateOpResCtx(HcclComm handle, uint8_t op_type, void* args_handle, void** out) {
  auto comm = find_comm(handle, "HcclCreateOpResCtx");
  if (comm == nullptr) return HCCL_E_PARA;
  if (out == nullptr) return hccl_fail(HCCL_E_PTR, "HcclCreateOpResCtx: opResCtx is null");
  auto args = find_args(args_handle, "HcclCreateOpResCtx");
  if (args == nullptr) return HCCL_E_PARA;
  std::string algorithm;
  {
    std::lock_guard<std::mutex> lock(args->mutex);
    const HcclResult code = check_args(*args, op_type);
    if (code != HCCL_SUCCESS) return code;
    algorithm = args->algorithm;
  }
  std::lock_guard<std::mutex> lock(comm->mutex);
  for (const auto& each : comm->contexts) {
    if (each.op_type == op_type && each.algorithm == algorithm) {
      *out = each.address;
      return HCCL_SUCCESS;
    }
  }
  comm->contexts.push_back({make_context(*comm), op_type, algorithm});
  {
    std::lock_guard<std::mutex> owner_lock(owners().mutex);
    owners().comms[comm->contexts.back().address] = comm;
  }
  *out = comm->contexts.back().address;
  return HCCL_SUCCESS;
}

HcclResult HcclGetHcclBuffer(HcclComm handle, void** buffer, uint64_t* size) {
  auto comm = find_comm(handle, "HcclGetHcclBuffer");
  if (comm == nullptr) return HCCL_E_PARA;
  if (buffer == nullptr || size == nullptr) {
    return hccl_fail(HCCL_E_PTR, "HcclGetHcclBuffer: null argument");
  }
  *buffer = comm->group.window(comm->group.rank());
  *size = 2 * comm->group.half_bytes();
  return HCCL_SUCCESS;
}

HcclResult xsdHcclRemoteBuffer(HcclComm handle, uint64_t rank, void** buffer, uint64_t* size) {
  auto comm = find_comm(handle, "HcclGetRemoteIpcHcclBuf");
  if (comm == nullptr) return HCCL_E_PARA;
  if (buffer == nullptr || size == nullptr) {
    return hccl_fail(HCCL_E_PTR, "HcclGetRemoteIpcHcclBuf: null argument");
  }
  if (rank >= comm->group.size() || rank == comm->group.rank()) {
    return hccl_fail(
        HCCL_E_PARA,
        "HcclGetRemoteIpcHcclBuf: rank %llu is not a peer of rank %u (%u ranks; the own "
        "buffer comes from HcclGetHcclBuffer)",
        static_cast<unsigned long long>(rank), comm->group.rank(), comm->group.size());
  }
  *buffer = comm->group.window(static_cast<uint32_t>(rank));
  *size = 2 * comm->group.half_bytes() + kRemoteExtra;
  return HCCL_SUCCESS;
}

HcclResult xsdHcclByName(const char* name, HcclComm* out, const char* call) {
  if (name == nullptr || out == nullptr) return hccl_fail(HCCL_E_PTR, "%s: null argument", call);
  if (xsdForked()) return HCCL_E_INTERNAL;
  auto comm = find_comm_by_name(name);
  if (comm == nullptr) {
    return hccl_fail(HCCL_E_NOT_FOUND, "%s: no communicator named %.128s in this process", call,
                     name);
  }
  *out = reinterpret_cast<void*>(comm->id);
  return HCCL_SUCCESS;
}

int xsdWindowEnter(const XsdOpResCtx* context) {
  auto comm = comm_of_context(context);
  if (comm == nullptr) {
    xsdTaskError("the context %p belongs to no live communicator",
                 static_cast<const void*>(context));
    return kSuspectRemote;
  }
  comm->users.fetch_add(1);
  int code = 0;
  if (comm->closed.load()) {
    xsdTaskError("the communicator of context %p was destroyed", static_cast<const void*>(context));
    code = kSuspectRemote;
  } else if (comm->group.check() != 0) {
    code = comm->group.report_abort("launch");
  } else if (xsdSettings()->strict && comm->launches.fetch_add(1) != 0) {
    // The other launch would read wrong flags from here on, on every rank: the group is done for.
    comm->launches.fetch_sub(1);
    comm->group.abort(AbortReason::kWindowBusy, comm->group.rank());
    code = comm->group.report_abort("launch");
  } else {
    __atomic_store_n(&const_cast<XsdOpResCtx*>(context)->busy, uint64_t{1}, __ATOMIC_RELEASE);
    return 0;
  }
  comm->users.fetch_sub(1);
  return code;
}

void xsdWindowLeave(const XsdOpResCtx* context) {
  auto comm = comm_of_context(context);
  if (comm == nullptr) return;
  __atomic_store_n(&const_cast<XsdOpResCtx*>(context)->busy, uint64_t{0}, __ATOMIC_RELEASE);
  if (xsdSettings()->strict) comm->launches.fetch_sub(1);
  comm->users.fetch_sub(1);
}

int xsdWaitPeer(const XsdOpResCtx* context, uint32_t peer, int (*ready)(void*), void* arg) {
  auto comm = comm_of_context(context);
  if (comm == nullptr) {
    xsdTaskError("the communicator of context %p was destroyed", static_cast<const void*>(context));
    return kSuspectRemote;
  }
  return comm->group.wait(peer, "launch", [=] { return ready(arg) != 0; });
}

void* xsdWindowHold(HcclComm handle) {
  auto comm = find_comm(handle, "xsdWindowHold");
  if (comm == nullptr) return nullptr;
  comm->users.fetch_add(1);
  return new std::shared_ptr<Comm>(comm);
}

void xsdWindowRelease(void* hold) {
  auto* comm = static_cast<std::shared_ptr<Comm>*>(hold);
  (*comm)->users.fetch_sub(1);
  delete comm;
}

int xsdWindowCheck(void* hold, const char* what) {
  Comm& comm = **static_cast<std::shared_ptr<Comm>*>(hold);
  if (comm.closed.load()) {
    xsdTaskError("%s: the communicator %s was destroyed", what, comm.name.c_str());
    return kSuspectRemote;
  }
  return comm.group.check() != 0 ? comm.group.report_abort(what) : 0;
}

int xsdWindowWait(void* hold, uint32_t peer, const char* what, int (*ready)(void*), void* arg) {
  Comm& comm = **static_cast<std::shared_ptr<Comm>*>(hold);
  return comm.group.wait(peer, what, [=] { return ready(arg) != 0; });
}
