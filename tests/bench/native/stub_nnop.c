/* SPDX-License-Identifier: Apache-2.0 */
/* libnnopbase with objects on the heap and nothing else: as cheap as a vendor's can be. With
   -DNO_ADDRESSES it lacks the calls that move a tensor's address; with -DNO_REPEAT no executor can
   be made repeatable. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "stub_objects.h"
static long counts[8];
enum { TENSORS, LISTS, DEAD_TENSORS, DEAD_LISTS, MOVED, REPEATABLE, DEAD_EXECUTORS, ARRAYS };
long* stubNnopCounts(void) { return counts; }
void* aclCreateTensor(const int64_t* v, uint64_t n, int t, const int64_t* s, int64_t o, int f,
                      const int64_t* sd, uint64_t m, void* p) {
  (void)o;
  struct tensor* made = malloc(sizeof *made);
  memcpy(made->dims[0], v, n * sizeof *v);
  memcpy(made->dims[1], s, n * sizeof *s);
  memcpy(made->dims[2], sd, m * sizeof *sd);
  made->n = n; made->m = m; made->type = t; made->format = f; made->data = p;
  counts[TENSORS]++;
  return made;
}
int aclDestroyTensor(void* t) { counts[DEAD_TENSORS]++; free(t); return 0; }
void* aclCreateTensorList(struct tensor* const* v, uint64_t n) {
  struct list* l = malloc(sizeof *l + n * sizeof *v);
  l->n = n;
  memcpy(l->items, v, n * sizeof *v);
  counts[LISTS]++;
  return l;
}
int aclDestroyTensorList(struct list* l) {
  for (uint64_t i = 0; i < l->n; i++) aclDestroyTensor(l->items[i]);
  counts[DEAD_LISTS]++;
  free(l);
  return 0;
}
void* aclCreateFloatArray(const float* v, uint64_t n) {
  counts[ARRAYS]++; void* p = malloc(n * sizeof *v + 1); memcpy(p, v, n * sizeof *v); return p; }
int aclDestroyFloatArray(void* a) { counts[ARRAYS]--; free(a); return 0; }
int aclSetAclOpExecutorRepeatable(int* e) {
  if (e == NULL) return 561103;
#ifdef NO_REPEAT
  return 561000;
#endif
  counts[REPEATABLE]++;
  *e = 1;
  return 0;
}
int aclDestroyAclOpExecutor(void* e) { counts[DEAD_EXECUTORS]++; free(e); return 0; }
#ifndef NO_ADDRESSES
int aclSetRawTensorAddr(struct tensor* t, void* p) { counts[MOVED]++; t->data = p; return 0; }
int aclSetInputTensorAddr(void* e, size_t i, struct tensor* t, void* p) {
  (void)e; (void)i; counts[MOVED]++; t->data = p; return 0; }
int aclSetOutputTensorAddr(void* e, size_t i, struct tensor* t, void* p) {
  (void)e; (void)i; counts[MOVED]++; t->data = p; return 0; }
#endif
