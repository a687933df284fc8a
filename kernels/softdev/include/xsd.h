// SPDX-License-Identifier: Apache-2.0
// Private interface between the software device's own libraries. Nothing outside
// kernels/softdev may include it. Everything exported here starts with "xsd".
#pragma once

#include <cstdarg>
#include <cstdint>
#include <vector>

#include "acl_types.h"  // aclnnStatus, aclrtStream, aclDataType, aclFormat (the public C ABI)

#define XSD_API extern "C" __attribute__((visibility("default")))

// ---- opaque ABI objects, owned by libnnopbase -------------------------------------------------
struct aclTensor {
  std::vector<int64_t> view_dims, strides, storage_dims;
  int64_t offset = 0;  // elements
  aclDataType dtype;
  aclFormat format;
  void* data = nullptr;  // storage base as given by the caller
  uint64_t magic;        // XSD_MAGIC_TENSOR while alive, poisoned on destroy
};
struct aclTensorList {
  std::vector<aclTensor*> items;
  uint64_t magic;
};
struct aclScalar {
  aclDataType dtype;
  unsigned char bytes[16];
  uint64_t magic;
};
struct aclIntArray {
  std::vector<int64_t> values;
  uint64_t magic;
};
struct aclFloatArray {
  std::vector<float> values;
  uint64_t magic;
};
struct aclBoolArray {
  std::vector<uint8_t> values;
  uint64_t magic;
};
constexpr uint64_t XSD_MAGIC_TENSOR = 0x58534454454e534fULL;
constexpr uint64_t XSD_MAGIC_LIST = 0x585344544c495354ULL;
constexpr uint64_t XSD_MAGIC_SCALAR = 0x5853445343414c41ULL;
constexpr uint64_t XSD_MAGIC_ARRAY = 0x5853444152524159ULL;
// Is this a live object made by aclCreate* (1) or not (0)? Safe for any pointer value: nothing is
// read through it before it was found among the live ones.
XSD_API int xsdTensorAlive(const aclTensor* tensor);
XSD_API int xsdTensorListAlive(const aclTensorList* list);
XSD_API int xsdFloatArrayAlive(const aclFloatArray* array);

// ---- libascendcl ------------------------------------------------------------------------------
// Set the calling thread's text for aclGetRecentErrMsg, printf style.
XSD_API void xsdSetError(const char* fmt, ...) __attribute__((format(printf, 1, 2)));
// Queue `run(ctx)` on the stream's worker; `release(ctx)` is always called once, also when the task
// is skipped because the stream already failed. A non-zero return of `run` is the device error code
// (5070xx) that later synchronise calls report. Returns an acl status; `release` is called as well
// when that status is not 0. A null stream is the default stream of the calling thread's context.
typedef int (*xsdTaskFn)(void* ctx);
typedef void (*xsdReleaseFn)(void* ctx);
XSD_API int xsdStreamEnqueue(aclrtStream stream, const char* name, xsdTaskFn run, void* ctx,
                             xsdReleaseFn release);
// Device-side text for the error a task is about to return (shown with the code at synchronise).
XSD_API void xsdTaskError(const char* fmt, ...) __attribute__((format(printf, 1, 2)));
// The text that the running task has set so far; valid until it sets another one.
XSD_API const char* xsdTaskErrorText(void);
// Is [ptr, ptr + bytes) inside one live aclrtMalloc allocation (1), outside all of them (0: memory
// the device does not manage, e.g. a host tensor), or does it run over the end of one (-1)?
XSD_API int xsdCheckRange(const void* ptr, uint64_t bytes);
// Is every page of [ptr, ptr + bytes) mapped in this process (1)? A kernel asks before it reads
// memory the device does not manage: hardware reports a wild address, it doesn't end the process.
XSD_API int xsdMapped(const void* ptr, uint64_t bytes);
// Settings, read once per process from the environment (documented in README.md).
struct XsdSettings {
  bool strict;               // XSD_STRICT (default 1)
  uint64_t delay_seed;       // XSD_DELAY_SEED, 0 = no delays
  uint32_t delay_max_us;     // XSD_DELAY_MAX_US (default 2000)
  uint32_t wait_timeout_ms;  // XSD_WAIT_TIMEOUT_MS (default 20000): this device's own; hardware
                             // spins for ever
};
XSD_API const XsdSettings* xsdSettings();
// A seeded random delay; a no-op when delays are off. `site` makes different call sites differ.
XSD_API void xsdDelay(uint32_t site);
// Spin with yield until `ready(arg)` is true or the wait timeout passes. 0 = ready, else timed out.
// While waiting it also looks for dead peers of this process's communicators and then sets the
// abort word of their group, so a `ready` that also looks at that word (after its own condition)
// ends at once. A kernel that waits for another rank should rather use xsdWaitPeer below.
XSD_API int xsdWait(int (*ready)(void*), void* arg);
// Keep the allocation around `ptr` (device or pinned host) in place while a queued task needs it,
// also when it is freed meanwhile. Null when the device does not manage that memory.
// xsdMemoryRelease returns bits: 1 = it was freed while held, 2 = its guard words were overwritten.
XSD_API void* xsdMemoryHold(const void* ptr);
XSD_API int xsdMemoryRelease(void* hold);
constexpr int XSD_FREED_WHILE_HELD = 1;
constexpr int XSD_GUARD_BROKEN = 2;
// Fork safety: 1 (error text set) in a child whose parent had used the device before the fork.
XSD_API int xsdForked();
// From here on a fork makes the device unusable in the child.
XSD_API void xsdMarkUsed();
// Makes the delays of this process differ from those of other ranks, reproducibly.
XSD_API void xsdDelaySalt(uint32_t salt);
// Every task of this process's streams, while tracing is on: CLOCK_MONOTONIC nanoseconds. `stream` is
// the number aclrtStreamGetId gives. An event wait is a task, and so is an event record.
struct XsdTaskEntry {
  char name[32];
  uint64_t stream;
  uint32_t device, status;
  uint64_t start_ns, end_ns;
};
XSD_API void xsdTaskTraceEnable(int on);
// Moves up to `capacity` entries out in the order in which tasks ended; *dropped counts lost ones.
XSD_API uint32_t xsdTaskTraceRead(XsdTaskEntry* out, uint32_t capacity, uint64_t* dropped);
// How often the host waited: for a device, a stream, an event.
constexpr uint32_t XSD_COUNTERS = 3;
XSD_API void xsdCounters(uint64_t out[XSD_COUNTERS]);
// Number of the stream whose worker calls; 0 on any other thread.
XSD_API uint64_t xsdCurrentStream();
// Called every few milliseconds from inside xsdWait (libhccl looks for dead peers there).
XSD_API void xsdSetWaitHook(void (*hook)());

// ---- libnnopbase ------------------------------------------------------------------------------
// An executor for one launch. `run(ctx, workspace, bytes)` runs on the stream's worker.
typedef int (*xsdKernelFn)(void* ctx, void* workspace, uint64_t workspace_bytes);
XSD_API aclOpExecutor* xsdExecutorCreate(const char* op, uint64_t workspace_bytes, xsdKernelFn run,
                                         void* ctx, xsdReleaseFn release);
// How an operator follows aclSetInputTensorAddr and aclSetOutputTensorAddr; without it they are
// refused. `clone` copies a ctx (launches that are queued keep the old one); `move` writes a new
// address and returns 1, 0 when `index` (tensors of one direction, members of lists one by one)
// names none, -1 when what the operator uses there does not fit behind the address.
struct XsdRebind {
  void* (*clone)(const void* ctx);
  int (*move)(void* ctx, int is_output, uint64_t index, void* address);
};
XSD_API void xsdExecutorSetRebind(aclOpExecutor* executor, const XsdRebind* rebind);
// Phase two of every operator: checks that the executor is alive, belongs to `op`, was not launched
// before (unless repeatable), that the workspace is large enough, then queues the kernel and
// returns. In strict mode guard words behind the workspace (in the allocation's tail) are verified
// afterwards.
XSD_API aclnnStatus xsdExecutorLaunch(const char* op, void* workspace, uint64_t workspace_bytes,
                                      aclOpExecutor* executor, aclrtStream stream);
XSD_API uint64_t xsdDtypeBits(aclDataType dtype);  // 0 = unknown

// ---- libhccl: what kfcContextAddr points to on this device -------------------------------------
constexpr uint32_t XSD_MAX_RANKS = 1024;
constexpr uint64_t XSD_MAGIC_RESCTX = 0x5853444b46435458ULL;
struct XsdOpResCtx {
  uint64_t magic;
  uint32_t rank, size;
  uint64_t window_bytes;           // one half: winIn; the whole buffer is twice this
  uint64_t window[XSD_MAX_RANKS];  // address of every rank's winIn in THIS process
  uint64_t busy;                   // in strict mode: non-zero while a launch uses the window
  uint64_t abort_flag;             // address of the group's shared abort word (uint32, 0 = healthy)
};
// Wait until `ready(arg)` is true for something that rank `peer` has to do (XSD_ANY_PEER: any of
// them). 0 = ready; 507057 = that rank died, left or the group was aborted; 507034 = the wait
// timeout passed. Sets xsdTaskError (naming the rank) and, on failure, the group's abort word. For
// kernels on a worker.
constexpr uint32_t XSD_ANY_PEER = 0xffffffffu;
XSD_API int xsdWaitPeer(const XsdOpResCtx* ctx, uint32_t peer, int (*ready)(void*), void* arg);
// Brackets around a kernel's use of the window. Enter returns 0, or a device code (xsdTaskError
// set) when `ctx` is not a live context of a healthy communicator, or - in strict mode - when
// another launch is using this window right now (sets `busy`). While entered, HcclCommDestroy keeps
// the window mapped.
XSD_API int xsdWindowEnter(const XsdOpResCtx* ctx);
XSD_API void xsdWindowLeave(const XsdOpResCtx* ctx);
// The same for kernels that may overlap on one window (the connectors' operators), by communicator.
// Null (and xsdSetError) for a dead handle. While held, HcclCommDestroy keeps the window mapped.
// Check is 0, or a device code with xsdTaskError when the group is not healthy. Wait is xsdWaitPeer
// with a text of its own.
XSD_API void* xsdWindowHold(HcclComm comm);
XSD_API void xsdWindowRelease(void* hold);
XSD_API int xsdWindowCheck(void* hold, const char* what);
XSD_API int xsdWindowWait(void* hold, uint32_t peer, const char* what, int (*ready)(void*),
                          void* arg);
