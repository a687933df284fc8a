/* SPDX-License-Identifier: Apache-2.0 */
/* libascendcl that only answers: what is left is the caller's own cost. */
#include <stdint.h>
#include <stdlib.h>
static int context;
static long counts[4];
enum { RECORDED, WAITED, SYNCHRONISED, ALLOCATED };
long* stubCounts(void) { return counts; }
/* Its memory is the host's, as the software device's is, so CPU tensors may be handed to it. */
const char* xsdIdentity(void) { return "stub"; }
const char* aclGetRecentErrMsg(void) { return NULL; }
int aclInit(const char* c) { (void)c; return 0; }
const char* aclrtGetSocName(void) { return "Ascend910_9391"; }
int aclrtSetDevice(int d) { (void)d; return 0; }
int aclrtResetDevice(int d) { (void)d; return 0; }
int aclrtGetCurrentContext(void** c) { *c = &context; return 0; }
int aclrtSetCurrentContext(void* c) { (void)c; return 0; }
int aclrtMalloc(void** p, size_t n, int policy) {
  (void)policy; counts[ALLOCATED]++; *p = aligned_alloc(64, (n + 63) / 64 * 64); return 0; }
int aclrtFree(void* p) { free(p); return 0; }
int aclrtMemcpy(void* d, size_t m, const void* s, size_t n, int k) {
  (void)d; (void)m; (void)s; (void)n; (void)k; return 0; }
int aclrtCreateStream(void** s) { *s = malloc(1); return 0; }
int aclrtDestroyStream(void* s) { free(s); return 0; }
int aclrtSynchronizeStream(void* s) { (void)s; counts[SYNCHRONISED]++; return 0; }
int aclrtSynchronizeStreamWithTimeout(void* s, int t) {
  (void)s; (void)t; counts[SYNCHRONISED]++; return 0; }
int aclrtSynchronizeDevice(void) { counts[SYNCHRONISED]++; return 0; }
int aclrtStreamWaitEvent(void* s, void* e) { (void)s; (void)e; counts[WAITED]++; return 0; }
int aclrtCreateEvent(void** e) { *e = malloc(1); return 0; }
int aclrtDestroyEvent(void* e) { free(e); return 0; }
int aclrtRecordEvent(void* e, void* s) { (void)e; (void)s; counts[RECORDED]++; return 0; }
int aclrtQueryEventStatus(void* e, int* s) { (void)e; *s = 1; return 0; }
int aclrtSynchronizeEvent(void* e) { (void)e; counts[SYNCHRONISED]++; return 0; }
int aclrtSynchronizeEventWithTimeout(void* e, int t) {
  (void)e; (void)t; counts[SYNCHRONISED]++; return 0; }
