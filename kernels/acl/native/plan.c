/* SPDX-License-Identifier: Apache-2.0 */
/* A launch plan: all arguments of a two-phase operator in the order of its argument list, with the
   descriptors of what never changes. A step fills in what does (its small tensors, and numbers that
   follow them), and makes both vendor calls, in one call from Python. One MegaMoe layer has a plan
   of six step tensors; a connector operator has one for each group it works in.

   Buckets hold the small descriptors by shape. Where the library has aclSetRawTensorAddr a step
   moves their addresses; where it has not, it makes those anew whose address changed. With
   executor reuse a bucket keeps its op_executor too and phase one is asked once per shape.

   Calls exclude each other by the plan's own mutex (cffi gives up Python's lock around each call),
   which a step that asks for workspace keeps until the same thread resumes or abandons it. A closed
   plan answers XM_CLOSED; its memory goes with its last user. Phase one may keep the address of a
   text, so texts belong to the plan's owner and outlive it.

   Sources: CANN 9.1 documentation of aclSetRawTensorAddr (not between the two phases),
   aclSetInputTensorAddr and aclSetOutputTensorAddr (repeatable executors only; the index counts the
   tensors of one direction, members of lists one by one), aclSetAclOpExecutorRepeatable. */

#define XM_SLOTS 48
#define XM_BUCKETS 16
#define XM_MAX_DIMS 8
#define XM_ALIGNMENT 32
#define XM_ND 2
#define XM_STATUS_NULL 561103
#define XM_MAX_BYTES ((uint64_t)1 << 62) /* of one tensor */

typedef union {
  int64_t i;
  const void* p;
  float f;
  double d;
} xm_slot;

typedef aclnnStatus (*xm_phase_one_fn)(const xm_slot* slot, void* fn, uint64_t* size,
                                       aclOpExecutor** executor);
typedef struct {
  const char* id;
  const char* signature;
  int slots;
  xm_phase_one_fn call;
} xm_list;
/* Generated behind this file: a row for each argument list, then one without id. */
static const xm_list* xm_all_lists(void);

typedef struct {
  int in_use, slot, is_list, ndim, storage_ndim;
  int64_t count, dims[XM_MAX_DIMS], strides[XM_MAX_DIMS], storage[XM_MAX_DIMS];
  uint64_t step_bytes;
  int32_t dtype, format;
  uintptr_t base;
  void* made; /* aclTensor or aclTensorList */
} xm_packed;

typedef struct {
  int64_t tokens, second;
  unsigned present; /* a bit for each tensor */
  int in_use;
  aclTensor* desc[XM_MAX_TENSORS];
  uintptr_t address[XM_MAX_TENSORS];
  uint64_t bytes[XM_MAX_TENSORS];
  uint64_t workspace_bytes, last_use;
  aclOpExecutor* executor; /* repeatable, or NULL */
} xm_bucket;

struct xm_plan {
  pthread_mutex_t mutex;
  int closed;
  int waiting; /* steps that keep the mutex until they have workspace */
  const xm_list* list;
  xm_functions fn;
  int reuse, failed_call;
  int32_t reuse_refused;
  int num_tensors;
  xm_step_tensor tensor[XM_MAX_TENSORS];
  int where[XM_MAX_TENSORS];          /* slot of each step tensor */
  int follows[XM_SLOTS], num_follows; /* slots of numbers that change with the step, and which */
  int followed[XM_SLOTS];
  xm_slot slot[XM_SLOTS];
  xm_packed packed[XM_SLOTS];
  int num_packed;
  xm_bucket bucket[XM_BUCKETS];
  xm_bucket* latest;
  xm_bucket* pending_bucket;
  aclOpExecutor* pending; /* prepared and not launched */
  uint64_t need, clock;
  uint64_t counter[XM_COUNTERS];
};

typedef aclTensor* (*xm_create_tensor_fn)(const int64_t*, uint64_t, int32_t, const int64_t*,
                                          int64_t, int32_t, const int64_t*, uint64_t, void*);
typedef aclTensorList* (*xm_create_list_fn)(const aclTensor* const*, uint64_t);
typedef aclnnStatus (*xm_pointer_fn)(const void*);
typedef aclnnStatus (*xm_raw_address_fn)(aclTensor*, void*);
typedef aclnnStatus (*xm_address_fn)(aclOpExecutor*, size_t, aclTensor*, void*);
typedef aclnnStatus (*xm_phase_two_fn)(void*, uint64_t, aclOpExecutor*, aclrtStream);

static const xm_list* xm_find_list(const char* id) {
  for (const xm_list* l = xm_all_lists(); l->id != NULL; ++l) {
    if (strcmp(l->id, id) == 0) return l;
  }
  return NULL;
}

static const char* xm_plan_signature(const char* list) {
  const xm_list* found = xm_find_list(list);
  return found == NULL ? NULL : found->signature;
}

static xm_plan* xm_plan_new(const char* list, const xm_functions* functions, int reuse,
                            int tensors, const xm_step_tensor* tensor) {
  const xm_list* found = tensors < 0 || tensors > XM_MAX_TENSORS ? NULL : xm_find_list(list);
  for (int i = 0; found != NULL && i < tensors; ++i) {
    if (tensor[i].ndim < 0 || tensor[i].ndim > 2) return NULL;
  }
  xm_plan* plan = found == NULL ? NULL : calloc(1, sizeof *plan);
  if (plan == NULL) return NULL;
  /* Recursive: a thread that was interrupted while it held the plan can still close it. */
  pthread_mutexattr_t kind;
  pthread_mutexattr_init(&kind);
  pthread_mutexattr_settype(&kind, PTHREAD_MUTEX_RECURSIVE);
  pthread_mutex_init(&plan->mutex, &kind);
  pthread_mutexattr_destroy(&kind);
  plan->list = found;
  plan->fn = *functions;
  plan->reuse = reuse && functions->set_input_address != NULL &&
                functions->set_output_address != NULL && functions->set_repeatable != NULL &&
                functions->destroy_executor != NULL;
  plan->num_tensors = tensors;
  memcpy(plan->tensor, tensor, (size_t)tensors * sizeof *tensor);
  for (int i = 0; i < XM_MAX_TENSORS; ++i) plan->where[i] = -1;
  return plan;
}

static int32_t xm_fail(xm_plan* plan, int call, int32_t status) {
  plan->failed_call = call;
  return status;
}

static int32_t xm_destroy(xm_plan* plan, void* fn, const void* object) {
  if (object == NULL) return XM_DONE;
  const aclnnStatus status = ((xm_pointer_fn)fn)(object);
  return status == 0 ? XM_DONE : xm_fail(plan, XM_CALL_DESTROY, status);
}

static aclTensor* xm_tensor(xm_plan* plan, int ndim, const int64_t* dims, const int64_t* strides,
                            int32_t dtype, int32_t format, int storage_ndim,
                            const int64_t* storage, uintptr_t address) {
  plan->counter[XM_COUNT_DESCRIPTORS]++;
  return ((xm_create_tensor_fn)plan->fn.create_tensor)(
      dims, (uint64_t)ndim, dtype, strides, 0, format, storage, (uint64_t)storage_ndim,
      (void*)address);
}

/* Only a repeatable op_executor is documented as the caller's to destroy. */
static int32_t xm_drop_executor(xm_plan* plan, aclOpExecutor* executor, int repeatable) {
  if (executor == NULL) return XM_DONE;
  if (plan->fn.set_repeatable == NULL || plan->fn.destroy_executor == NULL) return XM_DONE;
  if (!repeatable && ((xm_pointer_fn)plan->fn.set_repeatable)(executor) != 0) return XM_DONE;
  const aclnnStatus status = ((xm_pointer_fn)plan->fn.destroy_executor)(executor);
  return status == 0 ? XM_DONE : xm_fail(plan, XM_CALL_DESTROY_EXECUTOR, status);
}

static int32_t xm_unlocked(xm_plan* plan, int32_t status) {
  pthread_mutex_unlock(&plan->mutex);
  return status;
}

static int32_t xm_abandon(xm_plan* plan) {
  if (plan->pending == NULL) return XM_DONE;
  aclOpExecutor* executor = plan->pending;
  plan->pending = NULL;
  /* One that its bucket keeps is not lost. */
  if (plan->pending_bucket->executor == executor) return XM_DONE;
  return xm_drop_executor(plan, executor, 0);
}

static int32_t xm_empty_bucket(xm_plan* plan, xm_bucket* bucket) {
  int32_t result = xm_drop_executor(plan, bucket->executor, 1);
  for (int i = 0; i < plan->num_tensors; ++i) {
    const int32_t status = xm_destroy(plan, plan->fn.destroy_tensor, bucket->desc[i]);
    if (status != XM_DONE) result = status;
  }
  if (plan->latest == bucket) plan->latest = NULL;
  memset(bucket, 0, sizeof *bucket);
  return result;
}

static int32_t xm_empty_packed(xm_plan* plan, xm_packed* packed) {
  void* made = packed->made;
  packed->made = NULL;
  plan->slot[packed->slot].p = NULL;
  return xm_destroy(plan, packed->is_list ? plan->fn.destroy_list : plan->fn.destroy_tensor, made);
}

/* Everything the vendor made for this plan. The first failure is kept, the rest goes on. */
static int32_t xm_release(xm_plan* plan) {
  int32_t result = xm_abandon(plan), status;
  for (int i = 0; i < XM_BUCKETS; ++i) {
    if (!plan->bucket[i].in_use) continue;
    if ((status = xm_empty_bucket(plan, &plan->bucket[i])) != XM_DONE) result = status;
  }
  for (int i = 0; i < plan->num_packed; ++i) {
    if ((status = xm_empty_packed(plan, &plan->packed[i])) != XM_DONE) result = status;
  }
  return result;
}

static int32_t xm_plan_close(xm_plan* plan) {
  pthread_mutex_lock(&plan->mutex);
  const int closed = plan->closed;
  plan->closed = 1;
  return xm_unlocked(plan, closed ? XM_DONE : xm_release(plan));
}

/* Nobody uses the plan any more. What was not closed is left to the process: queued work may still
   need it. */
static void xm_plan_free(xm_plan* plan) {
  pthread_mutex_destroy(&plan->mutex);
  free(plan);
}

static int xm_bad_slot(const xm_plan* plan, int slot) {
  return slot < 0 || slot >= plan->list->slots;
}

static int32_t xm_plan_set_int(xm_plan* plan, int slot, int64_t value) {
  if (xm_bad_slot(plan, slot)) return XM_BAD_SLOT;
  plan->slot[slot].i = value;
  return XM_DONE;
}

static int32_t xm_plan_set_float(xm_plan* plan, int slot, float value) {
  if (xm_bad_slot(plan, slot)) return XM_BAD_SLOT;
  plan->slot[slot].f = value;
  return XM_DONE;
}

static int32_t xm_plan_set_double(xm_plan* plan, int slot, double value) {
  if (xm_bad_slot(plan, slot)) return XM_BAD_SLOT;
  plan->slot[slot].d = value;
  return XM_DONE;
}

static int32_t xm_plan_set_pointer(xm_plan* plan, int slot, const void* value) {
  if (xm_bad_slot(plan, slot)) return XM_BAD_SLOT;
  plan->slot[slot].p = value;
  return XM_DONE;
}

static int32_t xm_plan_set_step(xm_plan* plan, int slot, int tensor) {
  if (xm_bad_slot(plan, slot) || tensor < 0 || tensor >= plan->num_tensors) return XM_BAD_SLOT;
  plan->where[tensor] = slot;
  return XM_DONE;
}

/* The slot holds a number that comes with each step: XM_TOKENS, XM_SECOND or XM_NUMBER. */
static int32_t xm_plan_set_follow(xm_plan* plan, int slot, int which) {
  if (xm_bad_slot(plan, slot) || plan->num_follows == XM_SLOTS) return XM_BAD_SLOT;
  plan->follows[plan->num_follows] = slot;
  plan->followed[plan->num_follows++] = which;
  return XM_DONE;
}

static int32_t xm_make_packed(xm_plan* plan, xm_packed* p) {
  aclTensor* members[p->count];
  for (int64_t i = 0; i < p->count; ++i) {
    members[i] = xm_tensor(plan, p->ndim, p->dims, p->strides, p->dtype, p->format,
                           p->storage_ndim, p->storage,
                           p->base + (uintptr_t)i * (uintptr_t)p->step_bytes);
    if (members[i] != NULL) continue;
    while (i-- > 0) xm_destroy(plan, plan->fn.destroy_tensor, members[i]);
    return xm_fail(plan, XM_CALL_TENSOR, XM_STATUS_NULL);
  }
  p->made = members[0];
  if (p->is_list) {
    p->made = ((xm_create_list_fn)plan->fn.create_list)((const aclTensor* const*)members,
                                                        (uint64_t)p->count);
    if (p->made == NULL) {
      for (int64_t i = 0; i < p->count; ++i)
        xm_destroy(plan, plan->fn.destroy_tensor, members[i]);
      return xm_fail(plan, XM_CALL_LIST, XM_STATUS_NULL);
    }
  }
  plan->slot[p->slot].p = p->made;
  return XM_DONE;
}

static int32_t xm_plan_set_packed(xm_plan* plan, int slot, int is_list, uintptr_t base,
                                  int64_t count, uint64_t step_bytes, int ndim,
                                  const int64_t* dims, int32_t dtype, int32_t format,
                                  int storage_ndim, const int64_t* storage) {
  if (xm_bad_slot(plan, slot) || plan->num_packed == XM_SLOTS || ndim < 0 || ndim > XM_MAX_DIMS ||
      storage_ndim < 0 || storage_ndim > XM_MAX_DIMS || count < 1 || count > 4096)
    return XM_BAD_SLOT;
  int64_t stride = 1;
  for (int i = 0; i < ndim; ++i) {
    if (dims[i] < 0 || __builtin_mul_overflow(stride, dims[i] > 0 ? dims[i] : 1, &stride))
      return XM_BAD_SLOT;
  }
  xm_packed* p = &plan->packed[plan->num_packed++];
  p->slot = slot;
  p->is_list = is_list;
  p->base = base;
  p->count = is_list ? count : 1;
  p->step_bytes = step_bytes;
  p->ndim = ndim;
  p->dtype = dtype;
  p->format = format;
  p->storage_ndim = storage_ndim;
  stride = 1;
  for (int i = ndim - 1; i >= 0; --i) {
    p->dims[i] = dims[i];
    p->strides[i] = stride;
    stride *= dims[i] > 0 ? dims[i] : 1;
  }
  memcpy(p->storage, storage, (size_t)storage_ndim * sizeof *storage);
  return xm_make_packed(plan, p);
}

/* Executors hold the addresses they were prepared with. */
static int32_t xm_drop_executors(xm_plan* plan) {
  int32_t result = xm_abandon(plan);
  for (int i = 0; i < XM_BUCKETS; ++i) {
    const int32_t status = xm_drop_executor(plan, plan->bucket[i].executor, 1);
    plan->bucket[i].executor = NULL;
    if (status != XM_DONE) result = status;
  }
  return result;
}

static int32_t xm_rebind(xm_plan* plan, int slot, uintptr_t base) {
  if (plan->closed) return XM_CLOSED;
  for (int i = 0; i < plan->num_packed; ++i) {
    xm_packed* p = &plan->packed[i];
    if (p->slot != slot) continue;
    int32_t status = xm_drop_executors(plan);
    if (status == XM_DONE) status = xm_empty_packed(plan, p);
    p->base = base;
    return status != XM_DONE ? status : xm_make_packed(plan, p);
  }
  return XM_BAD_SLOT;
}

static int32_t xm_plan_rebind(xm_plan* plan, int slot, uintptr_t base) {
  pthread_mutex_lock(&plan->mutex);
  return xm_unlocked(plan, xm_rebind(plan, slot, base));
}

static int32_t xm_rebuild(xm_plan* plan) {
  if (plan->closed) return XM_CLOSED;
  int32_t status = xm_release(plan);
  for (int i = 0; i < plan->num_packed && status == XM_DONE; ++i)
    status = xm_make_packed(plan, &plan->packed[i]);
  return status;
}

/* As if nothing had been cached. */
static int32_t xm_plan_rebuild(xm_plan* plan) {
  pthread_mutex_lock(&plan->mutex);
  return xm_unlocked(plan, xm_rebuild(plan));
}

static uint64_t xm_item_bytes(int32_t dtype) {
  switch (dtype) {
    case 2: case 4: case 12: return 1;  /* INT8, UINT8, BOOL */
    case 1: case 27: return 2;          /* FLOAT16, BF16 */
    case 9: case 10: case 11: return 8; /* INT64, UINT64, DOUBLE */
    default: return 4;
  }
}

static int64_t xm_size(const xm_bucket* b, int64_t size) {
  return size == XM_TOKENS ? b->tokens : size == XM_SECOND ? b->second : size;
}

/* Shape of a step tensor; returns the number of dimensions. */
static int xm_step_shape(const xm_plan* plan, const xm_bucket* b, int tensor, int64_t* dims) {
  const xm_step_tensor* t = &plan->tensor[tensor];
  dims[0] = xm_size(b, t->dims[0]);
  dims[1] = xm_size(b, t->dims[1]);
  return t->ndim;
}

/* Bytes of each step tensor at the bucket's sizes. */
static int32_t xm_measure(const xm_plan* plan, xm_bucket* b) {
  for (int i = 0; i < plan->num_tensors; ++i) {
    int64_t dims[2];
    const int ndim = xm_step_shape(plan, b, i, dims);
    uint64_t bytes = xm_item_bytes(plan->tensor[i].dtype);
    for (int d = 0; d < ndim; ++d) {
      if (dims[d] < 0 || __builtin_mul_overflow(bytes, (uint64_t)dims[d], &bytes) ||
          bytes > XM_MAX_BYTES)
        return XM_TOO_LARGE - i;
    }
    b->bytes[i] = b->present >> i & 1 ? bytes : 0;
  }
  return XM_DONE;
}

static int32_t xm_find_bucket(xm_plan* plan, int64_t tokens, int64_t second, unsigned present,
                              xm_bucket** out) {
  xm_bucket* oldest = &plan->bucket[0];
  for (int i = 0; i < XM_BUCKETS; ++i) {
    xm_bucket* b = &plan->bucket[i];
    if (b->in_use && b->tokens == tokens && b->second == second && b->present == present) {
      *out = b;
      return XM_DONE;
    }
    if (oldest->in_use && (!b->in_use || b->last_use < oldest->last_use)) oldest = b;
  }
  xm_bucket fresh = {.tokens = tokens, .second = second, .present = present, .in_use = 1};
  int32_t status = xm_measure(plan, &fresh);
  if (status == XM_DONE && oldest->in_use) {
    plan->counter[XM_COUNT_EVICTED]++;
    status = xm_empty_bucket(plan, oldest);
  }
  if (status != XM_DONE) return status;
  *oldest = fresh;
  *out = oldest;
  return XM_DONE;
}

/* An operator reads its inputs while it writes its outputs, so no two tensors may share memory but
   inputs that only this operator reads. */
static int32_t xm_check_addresses(const xm_plan* plan, const xm_bucket* b,
                                  const uintptr_t* address) {
  for (int i = 0; i < plan->num_tensors; ++i) {
    if (address[i] % XM_ALIGNMENT != 0) return XM_MISALIGNED - i;
    if (b->bytes[i] > UINTPTR_MAX - address[i]) return XM_TOO_LARGE - i;
    for (int j = 0; j < i; ++j) {
      if (plan->tensor[i].may_share && plan->tensor[j].may_share) continue;
      if (address[i] < address[j] + b->bytes[j] && address[j] < address[i] + b->bytes[i])
        return XM_SHARED - 8 * j - i;
    }
  }
  return XM_DONE;
}

static int32_t xm_set_descriptor(xm_plan* plan, xm_bucket* b, int i, uintptr_t address) {
  if (b->desc[i] != NULL && b->address[i] == address) return XM_DONE;
  if (b->desc[i] != NULL && plan->fn.set_raw_address != NULL) {
    const aclnnStatus status =
        ((xm_raw_address_fn)plan->fn.set_raw_address)(b->desc[i], (void*)address);
    if (status != 0) return xm_fail(plan, XM_CALL_ADDRESS, status);
    b->address[i] = address;
    return XM_DONE;
  }
  aclTensor* old = b->desc[i];
  b->desc[i] = NULL;
  const int32_t status = xm_destroy(plan, plan->fn.destroy_tensor, old);
  if (status != XM_DONE) return status;
  int64_t dims[2];
  const int ndim = xm_step_shape(plan, b, i, dims);
  const int64_t strides[2] = {ndim == 2 ? dims[1] : 1, 1};
  b->desc[i] =
      xm_tensor(plan, ndim, dims, strides, plan->tensor[i].dtype, XM_ND, ndim, dims, address);
  if (b->desc[i] == NULL) return xm_fail(plan, XM_CALL_TENSOR, XM_STATUS_NULL);
  b->address[i] = address;
  return XM_DONE;
}

/* Present tensors whose place among an op_executor's inputs or outputs nobody knows. */
static int xm_unplaced(const xm_plan* plan, const xm_bucket* b) {
  for (int i = 0; i < plan->num_tensors; ++i) {
    if ((b->present >> i & 1) && plan->tensor[i].executor_index < 0) return 1;
  }
  return 0;
}

static int32_t xm_move_executor(xm_plan* plan, xm_bucket* b, const uintptr_t* address) {
  for (int i = 0; i < plan->num_tensors; ++i) {
    if (!(b->present >> i & 1) || b->address[i] == address[i]) continue;
    const xm_step_tensor* t = &plan->tensor[i];
    void* fn = t->is_output ? plan->fn.set_output_address : plan->fn.set_input_address;
    const aclnnStatus status = ((xm_address_fn)fn)(b->executor, (size_t)t->executor_index,
                                                   b->desc[i], (void*)address[i]);
    if (status != 0) {
      aclOpExecutor* half_moved = b->executor;
      b->executor = NULL;
      b->address[i] = 0;
      xm_drop_executor(plan, half_moved, 1);
      return xm_fail(plan, XM_CALL_ADDRESS, status);
    }
    b->address[i] = address[i];
  }
  return XM_DONE;
}

static int32_t xm_prepare(xm_plan* plan, xm_bucket* b, const uintptr_t* address, int64_t number) {
  for (int i = 0; i < plan->num_follows; ++i) {
    const int which = plan->followed[i];
    plan->slot[plan->follows[i]].i = which == XM_NUMBER ? number : xm_size(b, which);
  }
  for (int i = 0; i < plan->num_tensors; ++i) {
    const int where = plan->where[i];
    if (where < 0) return XM_BAD_SLOT;
    if (!(b->present >> i & 1)) {
      plan->slot[where].p = NULL;
      continue;
    }
    const int32_t status = xm_set_descriptor(plan, b, i, address[i]);
    if (status != XM_DONE) return status;
    plan->slot[where].p = b->desc[i];
  }
  uint64_t size = 0;
  /* The wrapper creates an op_executor only if it finds NULL; anything else it takes for one. */
  aclOpExecutor* executor = NULL;
  plan->counter[XM_COUNT_PHASE_ONE]++;
  const aclnnStatus status = plan->list->call(plan->slot, plan->fn.phase_one, &size, &executor);
  if (status != 0) return xm_fail(plan, XM_CALL_PHASE_ONE, status);
  if (executor == NULL) return XM_NO_EXECUTOR;
  b->workspace_bytes = size;
  plan->pending = executor;
  plan->pending_bucket = b;
  if (plan->reuse && !xm_unplaced(plan, b)) {
    const aclnnStatus refused = ((xm_pointer_fn)plan->fn.set_repeatable)(executor);
    if (refused == 0) {
      b->executor = executor;
    } else {
      plan->reuse = 0; /* the operator cannot; it is asked once */
      plan->reuse_refused = refused;
    }
  }
  return XM_DONE;
}

static int32_t xm_launch(xm_plan* plan, uintptr_t workspace, uint64_t workspace_bytes,
                         uintptr_t stream) {
  if (plan->pending == NULL) return plan->closed ? XM_CLOSED : XM_NOTHING_PENDING;
  xm_bucket* b = plan->pending_bucket;
  plan->need = b->workspace_bytes;
  if (plan->need > 0 && (workspace == 0 || workspace_bytes < plan->need)) return XM_MORE_WORKSPACE;
  aclOpExecutor* executor = plan->pending;
  plan->pending = NULL;
  const aclnnStatus status = ((xm_phase_two_fn)plan->fn.phase_two)(
      plan->need > 0 ? (void*)workspace : NULL, plan->need, executor, (aclrtStream)stream);
  if (status == 0) {
    plan->counter[XM_COUNT_LAUNCHES]++;
    return XM_DONE;
  }
  if (b->executor == executor) {
    b->executor = NULL; /* what state it is in nobody knows */
    xm_drop_executor(plan, executor, 1);
  }
  return xm_fail(plan, XM_CALL_LAUNCH, status);
}

static int32_t xm_step(xm_plan* plan, int64_t tokens, int64_t second, int64_t number,
                       const uintptr_t* address) {
  if (plan->closed) return XM_CLOSED;
  unsigned present = 0;
  for (int i = 0; i < plan->num_tensors; ++i)
    present |= (unsigned)(address[i] != 0 || !plan->tensor[i].optional) << i;
  int32_t status = xm_abandon(plan);
  if (status != XM_DONE) return status;
  xm_bucket* b = plan->latest;
  if (b == NULL || b->tokens != tokens || b->second != second || b->present != present) {
    status = xm_find_bucket(plan, tokens, second, present, &b);
    if (status != XM_DONE) return status;
    plan->latest = b;
  }
  b->last_use = ++plan->clock;
  status = xm_check_addresses(plan, b, address);
  if (status != XM_DONE) return status;
  if (b->executor != NULL) {
    status = xm_move_executor(plan, b, address);
    if (status != XM_DONE) return status;
    plan->counter[XM_COUNT_REUSED]++;
    plan->pending = b->executor;
    plan->pending_bucket = b;
    return XM_DONE;
  }
  return xm_prepare(plan, b, address, number);
}

/* Keeps the mutex when it returns XM_MORE_WORKSPACE. */
static int32_t xm_plan_step(xm_plan* plan, int64_t tokens, int64_t topk, uintptr_t x,
                            uintptr_t ids, uintptr_t weights, uintptr_t mask, uintptr_t y,
                            uintptr_t counts, uintptr_t workspace, uint64_t workspace_bytes,
                            uintptr_t stream) {
  const uintptr_t address[XM_MAX_TENSORS] = {x, ids, weights, mask, y, counts};
  pthread_mutex_lock(&plan->mutex);
  int32_t status = xm_step(plan, tokens, topk, 0, address);
  if (status == XM_DONE) status = xm_launch(plan, workspace, workspace_bytes, stream);
  if (status != XM_MORE_WORKSPACE) return xm_unlocked(plan, status);
  plan->waiting++;
  return status;
}

/* A step of an operator that wants no workspace, with its own number of tensors. */
static int32_t xm_plan_run(xm_plan* plan, int64_t tokens, int64_t second, int64_t number,
                           uintptr_t stream, uintptr_t a0, uintptr_t a1, uintptr_t a2,
                           uintptr_t a3, uintptr_t a4, uintptr_t a5, uintptr_t a6, uintptr_t a7) {
  const uintptr_t address[XM_MAX_TENSORS] = {a0, a1, a2, a3, a4, a5, a6, a7};
  pthread_mutex_lock(&plan->mutex);
  int32_t status = xm_step(plan, tokens, second, number, address);
  if (status == XM_DONE) status = xm_launch(plan, 0, 0, stream);
  if (status == XM_MORE_WORKSPACE) xm_abandon(plan);
  return xm_unlocked(plan, status);
}

/* Whether a step of the calling thread waits for workspace; it does no more. An interrupt may keep
   from the caller what its step returned. */
static int xm_take_waiting(xm_plan* plan) {
  if (pthread_mutex_trylock(&plan->mutex) != 0) return 0; /* another thread's */
  const int waiting = plan->waiting > 0;
  plan->waiting -= waiting;
  return xm_unlocked(plan, waiting);
}

/* For the thread whose step returned XM_MORE_WORKSPACE: gives the mutex back whatever happens. */
static int32_t xm_plan_resume(xm_plan* plan, uintptr_t workspace, uint64_t workspace_bytes,
                              uintptr_t stream) {
  if (!xm_take_waiting(plan)) return XM_NOTHING_PENDING;
  const int32_t status = xm_launch(plan, workspace, workspace_bytes, stream);
  if (status == XM_MORE_WORKSPACE) xm_abandon(plan);
  return xm_unlocked(plan, status);
}

/* The same for a step that will not be resumed. Without one it does nothing. */
static int32_t xm_plan_abandon(xm_plan* plan) {
  return xm_take_waiting(plan) ? xm_unlocked(plan, xm_abandon(plan)) : XM_DONE;
}

static uint64_t xm_plan_need(const xm_plan* plan) { return plan->need; }
static int xm_plan_failed_call(const xm_plan* plan) { return plan->failed_call; }
static int32_t xm_plan_reuse_refused(const xm_plan* plan) { return plan->reuse_refused; }
static int xm_plan_closed(const xm_plan* plan) { return plan->closed; }
static int xm_plan_reuses(const xm_plan* plan) { return plan->reuse; }
static int xm_plan_buckets(const xm_plan* plan) {
  int used = 0;
  for (int i = 0; i < XM_BUCKETS; ++i) used += plan->bucket[i].in_use;
  return used;
}
static void xm_plan_counters(const xm_plan* plan, uint64_t* out) {
  memcpy(out, plan->counter, sizeof plan->counter);
}
