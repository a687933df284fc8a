// SPDX-License-Identifier: Apache-2.0
// The calls that the vendor keeps in libhccl_fwk; the work is libhccl's.
#include "../hccl/comm.h"

HcclResult HcclGetRemoteIpcHcclBuf(HcclComm comm, uint64_t rank, void** buffer, uint64_t* size) {
  return xsdHcclRemoteBuffer(comm, rank, buffer, size);
}

HcclResult HcclCommGetHandleWithName(const char* name, HcclComm* comm) {
  return xsdHcclByName(name, comm, "HcclCommGetHandleWithName");
}

HcclResult HcomGetCommHandleByGroup(const char* group, HcclComm* comm) {
  return xsdHcclByName(group, comm, "HcomGetCommHandleByGroup");
}
