// SPDX-License-Identifier: Apache-2.0
// Communicators of this process.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "../common/registry.h"
#include "group.h"

namespace xsd {

// One context made by HcclCreateOpResCtx. Never freed: a late kernel finds a dead magic.
struct ResContext {
  XsdOpResCtx* address = nullptr;
  uint8_t op_type = 0;
  std::string algorithm;
};

struct Comm {
  uint64_t id = 0;
  std::string name;
  Group group;
  std::mutex op_mutex;  // one collective at a time
  uint64_t phase = 0;   // barriers entered; under op_mutex
  std::mutex mutex;     // the fields below
  std::vector<ResContext> contexts;
  std::atomic<bool> closed{false};
  std::atomic<uint32_t> users{0};  // kernels between xsdWindowEnter and Leave, running collectives
  std::atomic<uint64_t> launches{0};  // strict mode: launches on the window right now
};

Registry<Comm>& comms();
// Null (and an error text) for anything that is not a live communicator.
std::shared_ptr<Comm> find_comm(HcclComm handle, const char* call);
std::shared_ptr<Comm> find_comm_by_name(const char* name);
// Communicator that a context belongs to, also one that is just being destroyed.
std::shared_ptr<Comm> comm_of_context(const XsdOpResCtx* context);
void kill_contexts(Comm& comm);

}  // namespace xsd

// For libhccl_fwk.
XSD_API HcclResult xsdHcclRemoteBuffer(HcclComm comm, uint64_t rank, void** buffer, uint64_t* size);
XSD_API HcclResult xsdHcclByName(const char* name, HcclComm* comm, const char* call);
