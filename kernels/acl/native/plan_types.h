/* SPDX-License-Identifier: Apache-2.0 */
/* What plan.c and Python both know of a launch plan. */
enum { XM_MAX_TENSORS = 8 };
/* Sizes, and values of slots, that come with each step. */
enum { XM_TOKENS = -1, XM_SECOND = -2, XM_NUMBER = -3 };
/* A tensor that changes with each step: at most two dimensions, each a size or XM_TOKENS or
   XM_SECOND. may_share: an input that other such inputs may overlap. executor_index: its place
   among the inputs or outputs of a kept op_executor, -1 when that is not certain. */
typedef struct {
  int32_t dtype;
  int ndim;
  int64_t dims[2];
  int is_output, optional, may_share, executor_index;
} xm_step_tensor;
enum {
  XM_DONE = 0,
  XM_MORE_WORKSPACE = -1,  /* nothing was launched: xm_plan_resume or _abandon comes next */
  XM_CLOSED = -2,
  XM_NO_EXECUTOR = -3,
  XM_NOTHING_PENDING = -4,
  XM_BAD_SLOT = -5,
  XM_MISALIGNED = -100,    /* minus the step tensor's number */
  XM_SHARED = -200,        /* minus 8 * first - second: the two step tensors overlap */
  XM_TOO_LARGE = -300      /* minus the step tensor's number: no memory has that shape there */
};
enum { XM_COUNT_DESCRIPTORS, XM_COUNT_PHASE_ONE, XM_COUNT_LAUNCHES, XM_COUNT_REUSED,
       XM_COUNT_EVICTED, XM_COUNTERS };
/* A vendor status that a step returns came from this call. */
enum { XM_CALL_TENSOR, XM_CALL_LIST, XM_CALL_DESTROY, XM_CALL_ADDRESS, XM_CALL_PHASE_ONE,
       XM_CALL_LAUNCH, XM_CALL_DESTROY_EXECUTOR };
typedef struct {
  void* create_tensor;
  void* destroy_tensor;
  void* create_list;
  void* destroy_list;
  void* set_repeatable;      /* these five may be missing */
  void* destroy_executor;
  void* set_raw_address;
  void* set_input_address;
  void* set_output_address;
  void* phase_one;
  void* phase_two;
} xm_functions;
typedef struct xm_plan xm_plan;
