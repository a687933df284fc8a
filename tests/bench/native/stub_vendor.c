/* SPDX-License-Identifier: Apache-2.0 */
/* Variant B of aclnnMegaMoe that does nothing: it remembers what it was called with, and an executor
   is one word on the heap. */
#include <stdint.h>
#include <stdlib.h>
struct record { long prepared, launched; const void *x, *w1, *y, *stream, *workspace; };
static struct record last;
struct record* stubRecord(void) { return &last; }
#define P const void*
int aclnnMegaMoeGetWorkspaceSize(P context, P x, P ids, P weights, P w1, P w2, P s1, P s2, P b1,
    P b2, P mask, int64_t experts, int64_t ep, int64_t ccl, int64_t recv, int64_t quant,
    int64_t dtype, int64_t combine, const char* alg, int64_t tokens, const char* activation,
    float clamp, P y, P counts, uint64_t* size, int** executor) {
  (void)s1; (void)s2; (void)b1; (void)b2; (void)mask; (void)ccl; (void)quant; (void)dtype;
  (void)combine; (void)alg; (void)tokens; (void)activation; (void)clamp;
  if (!context || !x || !ids || !weights || !w1 || !w2 || !y || !counts) return 161001;
  if (experts <= 0 || ep <= 0 || recv < 0) return 161002;
  if (*executor) return 561101;
  last.prepared++; last.x = x; last.w1 = w1; last.y = y;
  *executor = calloc(1, sizeof **executor);
  *size = 1 << 20;
  return 0;
}
int aclnnMegaMoe(void* workspace, uint64_t size, int* executor, void* stream) {
  if (!workspace || size < 1 << 20 || !executor) return 161002;
  last.launched++; last.stream = stream; last.workspace = workspace;
  if (!*executor) free(executor);  /* not repeatable: used up */
  return 0;
}
