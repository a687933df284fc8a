// SPDX-License-Identifier: Apache-2.0
// Shared parts of the CAM operator library of the software device: communication groups and their
// windows, the exclusive vector/cube cores of a device, argument checks, traces. Private to this
// folder. Source of the protocols: afd-plugin csrc/npu (a2e, e2a, afd_async_*), read 2026-10.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "xsd.h"

namespace cam {

constexpr int kErrParamNull = 161001;
constexpr int kErrParam = 161002;
constexpr int kErrTiling = 561002;
constexpr int kTaskTimeout = 507034;  // vector core timeout
constexpr int kTaskFault = 507035;    // vector core exception
constexpr int kTaskRemote = 507057;   // suspected remote error; also used for an aborted group

// The last page of every window belongs to the software device: nothing like it exists on an NPU.
// The operators' own window ends where it begins.
struct Control {
  uint32_t abort_word;   // 0 = healthy, else (reason << 16) | (aborting rank + 1)
  uint32_t outstanding;  // dispatches sent by this rank whose combine_recv has not finished
  uint32_t camp2p_busy;  // a2e or e2a kernels of this rank that run now
  uint32_t recv_busy;    // dispatch_recv kernels of this rank that run now
  uint32_t last_op;      // 1 = a2e, 2 = e2a
  uint32_t credit_violations, order_violations, overlap_violations;
};
constexpr uint64_t kControlBytes = 4096;
constexpr uint64_t kIpcDataOffset = 2u << 20;  // CAMP2P data start; flags and counters lie below

struct Group {
  std::string name;
  HcclComm comm = nullptr;
  uint32_t rank = 0, size = 0;
  uint64_t window_bytes = 0;  // one rank's window without the control page
  std::vector<char*> window;  // every rank's window in this process
  Control* control(uint32_t r) const {
    return reinterpret_cast<Control*>(window[r] + window_bytes);
  }
  Control* own() const { return control(rank); }
};
// Windows of a communicator by its name. Returns 0 or an aclnn status with the error text set.
int find_group(const char* op, const char* name, Group* group);

struct Cores {
  uint32_t vector = 0, cube = 0;
};
Cores device_cores();  // XSD_AIV_COUNT (48), XSD_AIC_COUNT (24)
uint32_t cores_setting(const char* name, uint32_t fallback);  // "all" or a number
// Take cores in order of arrival; waits while others hold them. `abort` (may be null) ends the
// wait.
int take_cores(int32_t device, Cores want, const uint32_t* abort);
void give_cores(int32_t device, Cores had);

class Run;
// Spin until `ready`, or the group is aborted, a peer dies or the device's wait timeout passes: a
// task status. `peer` is the rank waited for, or XSD_ANY_PEER.
int spin(const Run& run, uint32_t peer, const char* what, int (*ready)(void*), void* arg);
inline uint32_t load32(const void* p) {
  return __atomic_load_n(static_cast<const uint32_t*>(p), __ATOMIC_ACQUIRE);
}
inline int64_t load64(const void* p) {
  return __atomic_load_n(static_cast<const int64_t*>(p), __ATOMIC_ACQUIRE);
}
inline void store32(void* p, uint32_t v) {
  __atomic_store_n(static_cast<uint32_t*>(p), v, __ATOMIC_RELEASE);
}
inline void store64(void* p, int64_t v) {
  __atomic_store_n(static_cast<int64_t*>(p), v, __ATOMIC_RELEASE);
}

// ---- trace: one entry per kernel, waiting apart from working
// -------------------------------------
struct TraceEntry {
  char op[32];
  char group[32];
  int64_t tag;  // layer, or the caller's tag of a timed kernel
  uint32_t device, vector_cores, cube_cores, status;
  uint64_t start_ns, cores_ns, ready_ns,
      end_ns;  // CLOCK_MONOTONIC: started, has cores, wait over, done
  int64_t peer;     // first Attention rank of the item, -1 where no such rank was chosen
  uint64_t stream;  // number of the stream
};
uint64_t now_ns();
void sleep_until(uint64_t end_ns);

// One kernel's run: takes cores, keeps times, gives the cores back and writes the trace entry.
class Run {
 public:
  Run(const char* op, const Group* group, int32_t device, Cores cores);  // group may be null
  ~Run();
  Run(const Run&) = delete;
  Run& operator=(const Run&) = delete;
  int status() const { return status_; }
  const Group& group() const { return *group_; }
  void* hold() const { return hold_; }
  const char* op() const { return entry_.op; }
  void ready() {
    entry_.ready_ns = now_ns();
    moved_ = 0;
  }
  void peer(int64_t rank) { entry_.peer = rank; }
  // `bytes` more were copied: with XSD_CAM_COPY_MBPS, not before they would have been at that rate.
  void moved(uint64_t bytes);
  void tag(int64_t value) { entry_.tag = value; }
  int done(int status);  // returns `status`

 private:
  void start(const uint32_t* abort);
  TraceEntry entry_{};
  const Group* group_;
  void* hold_ = nullptr;  // the windows stay mapped while a kernel runs
  int32_t device_;
  Cores cores_;
  bool held_ = false;
  int status_ = 0;
  uint64_t moved_ = 0;
};

// ---- arguments
// -----------------------------------------------------------------------------------
struct View {
  char* data = nullptr;
  std::vector<int64_t> dims;
  aclDataType dtype = ACL_DT_UNDEFINED;
  int64_t numel() const;
};
class Args {
 public:
  explicit Args(const char* op) : op_(op) {}
  // Contiguous tensor of one of `dtypes` (empty: any) with `dims` (-1: any size; empty: any shape).
  View tensor(const aclTensor* t, const char* name, std::vector<aclDataType> dtypes,
              std::vector<int64_t> dims);
  void range(const char* name, int64_t value, int64_t low, int64_t high);
  void require(bool ok, const char* sentence);
  void group(const char* name, Group* group);
  void window(uint64_t need, const Group& group, const char* part);
  int status() const { return status_; }

 private:
  const char* op_;
  int status_ = 0;
};
int32_t calling_device(const char* op, int* status);

template <typename T>
int run_body(void* ctx, void*, uint64_t) {
  return static_cast<T*>(ctx)->run();
}
template <typename T>
void free_body(void* ctx) {
  delete static_cast<T*>(ctx);
}
// Phase one's end: an executor that owns `kernel`. These operators need no workspace.
template <typename T>
int make_executor(const char* op, std::unique_ptr<T> kernel, uint64_t* workspace,
                  aclOpExecutor** out) {
  if (workspace == nullptr || out == nullptr) {
    xsdSetError("%s: workspaceSize and executor must not be NULL", op);
    return kErrParamNull;
  }
  *workspace = 0;
  *out = xsdExecutorCreate(op, 0, run_body<T>, kernel.get(), free_body<T>);
  if (*out == nullptr) return 561103;
  kernel.release();
  return 0;
}

float to_float(const char* p, aclDataType t, int64_t i);
void from_float(char* p, aclDataType t, int64_t i, float v);
inline uint64_t align32(uint64_t n) {
  return (n + 31) / 32 * 32;
}

}  // namespace cam
