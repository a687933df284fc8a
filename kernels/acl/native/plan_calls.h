/* SPDX-License-Identifier: Apache-2.0 */
/* Calls of plan.c that Python makes. Addresses are plain integers: cffi passes those without making
   an object for each. */
const char* xm_plan_signature(const char* list);
xm_plan* xm_plan_new(const char* list, const xm_functions* functions, int reuse, int tensors,
                     const xm_step_tensor* tensor);
int32_t xm_plan_close(xm_plan* plan);
void xm_plan_free(xm_plan* plan);
int xm_plan_closed(const xm_plan* plan);
int32_t xm_plan_set_int(xm_plan* plan, int slot, int64_t value);
int32_t xm_plan_set_float(xm_plan* plan, int slot, float value);
int32_t xm_plan_set_double(xm_plan* plan, int slot, double value);
int32_t xm_plan_set_pointer(xm_plan* plan, int slot, const void* value);
int32_t xm_plan_set_step(xm_plan* plan, int slot, int tensor);
int32_t xm_plan_set_follow(xm_plan* plan, int slot, int which);
int32_t xm_plan_set_packed(xm_plan* plan, int slot, int is_list, uintptr_t base, int64_t count,
                           uint64_t step_bytes, int ndim, const int64_t* dims, int32_t dtype,
                           int32_t format, int storage_ndim, const int64_t* storage);
int32_t xm_plan_rebind(xm_plan* plan, int slot, uintptr_t base);
int32_t xm_plan_rebuild(xm_plan* plan);
int32_t xm_plan_step(xm_plan* plan, int64_t tokens, int64_t topk, uintptr_t x, uintptr_t ids,
                     uintptr_t weights, uintptr_t mask, uintptr_t y, uintptr_t counts,
                     uintptr_t workspace, uint64_t workspace_bytes, uintptr_t stream);
int32_t xm_plan_run(xm_plan* plan, int64_t tokens, int64_t second, int64_t number,
                    uintptr_t stream, uintptr_t a0, uintptr_t a1, uintptr_t a2, uintptr_t a3,
                    uintptr_t a4, uintptr_t a5, uintptr_t a6, uintptr_t a7);
int32_t xm_plan_resume(xm_plan* plan, uintptr_t workspace, uint64_t workspace_bytes,
                       uintptr_t stream);
int32_t xm_plan_abandon(xm_plan* plan);
uint64_t xm_plan_need(const xm_plan* plan);
int xm_plan_failed_call(const xm_plan* plan);
int32_t xm_plan_reuse_refused(const xm_plan* plan);
int xm_plan_reuses(const xm_plan* plan);
int xm_plan_buckets(const xm_plan* plan);
void xm_plan_counters(const xm_plan* plan, uint64_t* out);
