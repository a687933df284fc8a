/* SPDX-License-Identifier: Apache-2.0 */
/* The launch plan's C (kernels/acl/native/plan.c) against counting stubs, built and run under
   sanitizers. First by hand what a wrong size or place would break, then many random steps, then
   threads that step while others rebind and close. Prints "done". */
#include <inttypes.h>
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "types.h"

#include "plan_types.h"

#include "plan.c"

#define CHECK(what)                                                       \
  do {                                                                    \
    if (!(what)) {                                                        \
      fprintf(stderr, "line %d: %s does not hold\n", __LINE__, #what);    \
      exit(1);                                                            \
    }                                                                     \
  } while (0)

/* ---- libraries: every object is a block of its own, so that a use after it was given back, a
   second giving back and a lost one are findings. */

typedef struct {
  int64_t dims[XM_MAX_DIMS];
  uint64_t ndim;
  void* address;
} tensor;
typedef struct {
  uint64_t count;
  tensor* member[4096];
} list;

static _Atomic long tensors, lists, executors, launches;
static _Atomic int fail_create, fail_list, fail_phase_one, fail_phase_two, fail_move;
static _Atomic uint64_t wanted;

static aclTensor* create_tensor(const int64_t* dims, uint64_t n, int32_t dtype,
                                const int64_t* strides, int64_t offset, int32_t format,
                                const int64_t* storage, uint64_t m, void* address) {
  (void)dtype, (void)offset, (void)format;
  if (fail_create) return NULL;
  tensor* made = calloc(1, sizeof *made);
  int64_t sum = 0; /* reads all of them */
  for (uint64_t i = 0; i < n; ++i) sum ^= dims[i] ^ strides[i];
  for (uint64_t i = 0; i < m; ++i) sum ^= storage[i];
  CHECK(n <= XM_MAX_DIMS && sum != INT64_MIN);
  memcpy(made->dims, dims, n * sizeof *dims);
  made->ndim = n;
  made->address = address;
  ++tensors;
  return (aclTensor*)made;
}
static aclnnStatus destroy_tensor(const void* made) {
  free((void*)made);
  --tensors;
  return 0;
}
static aclTensorList* create_list(const aclTensor* const* members, uint64_t count) {
  if (fail_list) return NULL;
  list* made = malloc(sizeof *made);
  made->count = count;
  memcpy(made->member, members, count * sizeof *members);
  ++lists;
  return (aclTensorList*)made;
}
static aclnnStatus destroy_list(const void* handle) {
  list* made = (list*)handle;
  for (uint64_t i = 0; i < made->count; ++i) destroy_tensor(made->member[i]);
  free(made);
  --lists;
  return 0;
}
/* An executor that is not repeatable belongs to the library; it frees it with its launch, also when
   that fails (CANN's documents do not say). */
typedef struct {
  int repeatable;
} executor;
static aclnnStatus set_repeatable(const void* handle) {
  ((executor*)handle)->repeatable = 1;
  return 0;
}
static aclnnStatus destroy_executor(const void* handle) {
  CHECK(((executor*)handle)->repeatable);
  free((void*)handle);
  --executors;
  return 0;
}
static aclnnStatus set_raw(aclTensor* made, void* address) {
  if (fail_move) return 561002;
  ((tensor*)made)->address = address;
  return 0;
}
static aclnnStatus set_moved(aclOpExecutor* handle, size_t index, aclTensor* made, void* address) {
  (void)index;
  if (fail_move) return 561002;
  CHECK(((executor*)handle)->repeatable && made != NULL && address != NULL);
  return 0;
}
static aclnnStatus phase_one(const xm_slot* slot, int slots, uint64_t* size,
                             aclOpExecutor** out) {
  for (int i = 0; i < slots; ++i) {
    /* Even slots hold tensors here, the last even one a list; all are read. */
    const tensor* t = i % 2 == 0 && i < 6 ? slot[i].p : NULL;
    if (t != NULL) CHECK(t->ndim <= 2);
  }
  if (fail_phase_one) return 161002;
  *size = wanted;
  executor* made = calloc(1, sizeof *made);
  *out = (aclOpExecutor*)made;
  ++executors;
  return 0;
}
static aclnnStatus phase_two(void* workspace, uint64_t bytes, aclOpExecutor* handle,
                             aclrtStream stream) {
  (void)stream;
  CHECK(bytes == 0 || workspace != NULL);
  executor* made = (executor*)handle;
  const int failed = fail_phase_two;
  if (!failed) ++launches;
  if (!made->repeatable) {
    free(made);
    --executors;
  }
  return failed ? 361001 : 0;
}

static aclnnStatus call(const xm_slot* slot, void* fn, uint64_t* size, aclOpExecutor** out) {
  (void)fn;
  return phase_one(slot, 8, size, out);
}
static const xm_list all_lists[] = {{"one", "TiTiTiLi", 8, call}, {NULL, NULL, 0, NULL}};
static const xm_list* xm_all_lists(void) { return all_lists; }

/* ---- plans */

enum { X = 0, MASK = 1, Y = 2, HIDDEN = 64 };

static xm_plan* make(int reuse, int moves) {
  const xm_functions fn = {
      .create_tensor = (void*)create_tensor, .destroy_tensor = (void*)destroy_tensor,
      .create_list = (void*)create_list, .destroy_list = (void*)destroy_list,
      .set_repeatable = (void*)set_repeatable, .destroy_executor = (void*)destroy_executor,
      .set_raw_address = moves ? (void*)set_raw : NULL,
      .set_input_address = moves ? (void*)set_moved : NULL,
      .set_output_address = moves ? (void*)set_moved : NULL,
      .phase_one = NULL, .phase_two = (void*)phase_two};
  const xm_step_tensor shapes[] = {
      {27, 2, {XM_TOKENS, HIDDEN}, 0, 0, 0, 1},
      {2, 1, {XM_TOKENS, 1}, 0, 1, 0, -1},
      {27, 2, {XM_TOKENS, XM_SECOND}, 1, 0, 0, 0},
  };
  xm_plan* plan = xm_plan_new("one", &fn, reuse, 3, shapes);
  CHECK(plan != NULL);
  const int64_t dims[] = {4, 8};
  CHECK(xm_plan_set_step(plan, 0, X) == 0 && xm_plan_set_step(plan, 2, MASK) == 0 &&
        xm_plan_set_step(plan, 4, Y) == 0);
  CHECK(xm_plan_set_packed(plan, 6, 1, 0x1000, 3, 64, 2, dims, 27, 2, 2, dims) == 0);
  CHECK(xm_plan_set_follow(plan, 1, XM_TOKENS) == 0 && xm_plan_set_int(plan, 3, 7) == 0);
  return plan;
}

static int32_t step(xm_plan* plan, int64_t tokens, int64_t second, uintptr_t x, uintptr_t mask,
                    uintptr_t y, uintptr_t workspace, uint64_t bytes) {
  int32_t status =
      xm_plan_step(plan, tokens, second, x, mask, y, 0, 0, 0, workspace, bytes, 0x99);
  if (status != XM_MORE_WORKSPACE) return status;
  return tokens % 3 == 2 ? xm_plan_abandon(plan)
                         : xm_plan_resume(plan, tokens % 3 ? 0x7000 : 0, xm_plan_need(plan), 0x99);
}

static void end(xm_plan* plan) {
  xm_plan_close(plan);
  CHECK(xm_plan_close(plan) == 0 && xm_plan_closed(plan) && xm_plan_rebuild(plan) == XM_CLOSED);
  CHECK(xm_plan_step(plan, 1, 8, 64, 0, 4096, 0, 0, 0, 1, 1, 1) == XM_CLOSED);
  CHECK(xm_plan_rebind(plan, 6, 64) == XM_CLOSED);
  xm_plan_free(plan);
}

static void by_hand(void) {
  xm_step_tensor three = {27, 3, {1, 1}, 0, 0, 0, -1};
  const xm_functions none = {0};
  CHECK(xm_plan_new("one", &none, 0, 1, &three) == NULL);
  CHECK(xm_plan_new("two", &none, 0, 0, &three) == NULL && xm_plan_signature("two") == NULL);
  CHECK(xm_plan_new("one", &none, 0, 9, &three) == NULL && xm_plan_new("one", &none, 0, -1, &three) == NULL);
  xm_plan* plan = make(0, 1);
  const int64_t huge[] = {INT64_MAX, INT64_MAX}, below[] = {-1, 2}, eight[8] = {1};
  for (int slot = -2; slot < 60; slot += 10) {
    const int32_t want = slot == 8 || slot < 0 || slot >= 8 ? XM_BAD_SLOT : 0;
    CHECK(xm_plan_set_int(plan, slot, 1) == want && xm_plan_set_float(plan, slot, 1) == want);
    CHECK(xm_plan_set_pointer(plan, slot, NULL) == want && xm_plan_set_double(plan, slot, 1) == want);
    CHECK(xm_plan_set_step(plan, slot, 0) == want && xm_plan_set_follow(plan, slot, 0) == want);
  }
  CHECK(xm_plan_set_step(plan, 0, 3) == XM_BAD_SLOT && xm_plan_set_step(plan, 0, -1) == XM_BAD_SLOT);
  CHECK(xm_plan_set_packed(plan, 5, 0, 64, 1, 0, 2, huge, 27, 2, 2, huge) == XM_BAD_SLOT);
  CHECK(xm_plan_set_packed(plan, 5, 0, 64, 1, 0, 2, below, 27, 2, 2, below) == XM_BAD_SLOT);
  CHECK(xm_plan_set_packed(plan, 5, 0, 64, 1, 0, 9, eight, 27, 2, 2, eight) == XM_BAD_SLOT);
  CHECK(xm_plan_set_packed(plan, 5, 0, 64, 1, 0, 2, eight, 27, 2, -1, eight) == XM_BAD_SLOT);
  CHECK(xm_plan_set_packed(plan, 5, 1, 64, 4097, 0, 2, eight, 27, 2, 2, eight) == XM_BAD_SLOT);
  CHECK(xm_plan_set_packed(plan, 5, 1, 64, 0, 0, 2, eight, 27, 2, 2, eight) == XM_BAD_SLOT);
  CHECK(xm_plan_set_packed(plan, 5, 1, UINTPTR_MAX - 63, 4096, UINT64_MAX, 8, eight, 27, 2, 8,
                           eight) == 0);
  const int64_t odd[] = {-1, -2, -3, INT64_MIN, INT64_MAX, INT64_C(1) << 62};
  for (size_t i = 0; i < sizeof odd / sizeof *odd; ++i) {
    CHECK(step(plan, odd[i], 8, 64, 0, 4096, 1, 1) <= XM_TOO_LARGE);
    CHECK(step(plan, 1, odd[i], 64, 0, 4096, 1, 1) <= XM_TOO_LARGE);
  }
  CHECK(step(plan, 1, 8, UINTPTR_MAX - 63, 0, 4096, 1, 1) == XM_TOO_LARGE - X);
  CHECK(step(plan, 1, 8, 4096, 0, 4096 + 64, 1, 1) == XM_SHARED - 8 * X - Y);
  CHECK(step(plan, 1, 8, 4096, 48, 8192, 1, 1) == XM_MISALIGNED - MASK);
  CHECK(step(plan, 0, 0, 0, 0, 0, 1, 1) == 0); /* nothing in them: the library's to judge */
  CHECK(xm_plan_rebind(plan, 3, 64) == XM_BAD_SLOT);
  /* Used for something else while the step waits, by the same thread. */
  wanted = 100;
  for (int what = 0; what < 4; ++what) {
    CHECK(xm_plan_step(plan, 3, 8, 64, 0, 4096, 0, 0, 0, 0, 0, 1) == XM_MORE_WORKSPACE);
    if (what == 0) CHECK(xm_plan_rebind(plan, 6, 0x2000) == 0);
    if (what == 1) CHECK(xm_plan_rebuild(plan) == 0);
    if (what == 2) CHECK(step(plan, 4, 8, 64, 0, 4096, 0, 0) == 0);
    if (what == 3) CHECK(xm_plan_close(plan) == 0);
    CHECK(xm_plan_resume(plan, 0x7000, 100, 1) == (what < 3 ? XM_NOTHING_PENDING : XM_CLOSED));
  }
  wanted = 0;
  end(plan);
}

static uint64_t next(uint64_t* state) {
  *state ^= *state << 13, *state ^= *state >> 7, *state ^= *state << 17;
  return *state;
}

static uint64_t random_steps(uint64_t seed) {
  uint64_t state = seed * 2654435761u + 1, done = 0;
  for (int round = 0; round < 60; ++round) {
    xm_plan* plan = make((int)(next(&state) % 2), (int)(next(&state) % 3));
    for (int i = 0; i < 200; ++i) {
      const uint64_t r = next(&state);
      fail_create = r % 97 == 0;
      fail_list = r % 101 == 0;
      fail_phase_one = r % 61 == 0;
      fail_phase_two = r % 67 == 0;
      fail_move = r % 71 == 0;
      wanted = r % 3 ? 0 : r % 5000;
      const uintptr_t at = 0x10000 + 32 * (next(&state) % 64);
      switch (r % 11) {
        case 0: xm_plan_rebind(plan, (int)(next(&state) % 9), at); break;
        case 1: xm_plan_rebuild(plan); break;
        case 2: step(plan, (int64_t)next(&state), (int64_t)next(&state), at, at, at, at, r); break;
        default:
          done += step(plan, 1 + (int64_t)(next(&state) % 40), 8, at, r % 2 ? at + 0x8000 : 0,
                       at + 0x10000, r % 5 ? 0x7000 : 0, r % 7000) == 0;
      }
    }
    fail_create = fail_list = fail_phase_one = fail_phase_two = fail_move = 0;
    uint64_t counters[XM_COUNTERS];
    xm_plan_counters(plan, counters);
    CHECK(xm_plan_buckets(plan) <= XM_BUCKETS && xm_plan_failed_call(plan) >= 0);
    CHECK(counters[XM_COUNT_LAUNCHES] <= counters[XM_COUNT_PHASE_ONE] + counters[XM_COUNT_REUSED]);
    CHECK(xm_plan_reuses(plan) >= 0 && xm_plan_reuse_refused(plan) == 0);
    end(plan);
  }
  return done;
}

static void* stepper(void* shared) {
  for (int i = 0; i < 400; ++i) {
    const int32_t status = step(shared, 1 + i % 20, 8, 0x10000, 0, 0x40000, i % 2 ? 0x7000 : 0, 4096);
    CHECK(status == 0 || status == XM_CLOSED || status == XM_MORE_WORKSPACE);
  }
  return NULL;
}
static void* changer(void* shared) {
  for (int i = 0; i < 200; ++i) {
    CHECK(xm_plan_rebind(shared, 6, 64 + 64 * (uintptr_t)i) <= 0);
    if (i % 50 == 0) CHECK(xm_plan_rebuild(shared) <= 0);
    (void)xm_plan_need(shared), (void)xm_plan_closed(shared);
  }
  return NULL;
}
static void* closer(void* shared) {
  for (int i = 0; i < 100; ++i) (void)xm_plan_buckets(shared);
  CHECK(xm_plan_close(shared) == 0);
  return NULL;
}

int main(void) {
  by_hand();
  CHECK(random_steps(1) + random_steps(2) > 1000);
  wanted = 64;
  for (int round = 0; round < 8; ++round) {
    xm_plan* plan = make(round % 2, 1);
    pthread_t thread[6];
    for (int i = 0; i < 6; ++i)
      CHECK(pthread_create(&thread[i], NULL, i < 4 ? stepper : i == 4 ? changer : closer, plan) == 0);
    for (int i = 0; i < 6; ++i) CHECK(pthread_join(thread[i], NULL) == 0);
    end(plan);
  }
  CHECK(tensors == 0 && lists == 0 && executors == 0 && launches > 1000);
  puts("done");
  return 0;
}
