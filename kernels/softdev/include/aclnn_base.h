/* SPDX-License-Identifier: Apache-2.0 */
/* Functions of libnnopbase that the software device exports, with CANN's C ABI.
   Source of the prototypes: op-plugin's aclnn call layer and the CANN operator documentation (9.1).
 */
#pragma once
#include <stdbool.h>

#include "acl_types.h"

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

/* A null return means an argument was refused; aclGetRecentErrMsg says which. `offset` counts
 * elements. */
aclTensor* aclCreateTensor(const int64_t* viewDims, uint64_t viewDimsNum, aclDataType dataType,
                           const int64_t* stride, int64_t offset, aclFormat format,
                           const int64_t* storageDims, uint64_t storageDimsNum, void* tensorData);
aclTensorList* aclCreateTensorList(const aclTensor* const* value,
                                   uint64_t size); /* owns its members */
aclScalar* aclCreateScalar(void* value, aclDataType dataType);
aclIntArray* aclCreateIntArray(const int64_t* value, uint64_t size);
aclFloatArray* aclCreateFloatArray(const float* value, uint64_t size);
aclBoolArray* aclCreateBoolArray(const bool* value, uint64_t size);

aclnnStatus aclDestroyTensor(const aclTensor* tensor);
aclnnStatus aclDestroyTensorList(const aclTensorList* array); /* destroys the members as well */
aclnnStatus aclDestroyScalar(const aclScalar* scalar);
aclnnStatus aclDestroyIntArray(const aclIntArray* array);
aclnnStatus aclDestroyFloatArray(const aclFloatArray* array);
aclnnStatus aclDestroyBoolArray(const aclBoolArray* array);

/* *viewDims / *stridesValue are copies made with new int64_t[]; as in CANN the caller deletes them.
 */
aclnnStatus aclGetViewShape(const aclTensor* tensor, int64_t** viewDims, uint64_t* viewDimsNum);
aclnnStatus aclGetViewStrides(const aclTensor* tensor, int64_t** stridesValue,
                              uint64_t* stridesNum);
aclnnStatus aclGetDataType(const aclTensor* tensor, aclDataType* dataType);
aclnnStatus aclGetFormat(const aclTensor* tensor, aclFormat* format);
aclnnStatus aclGetTensorListSize(const aclTensorList* tensorList, uint64_t* size);
aclnnStatus aclGetIntArraySize(const aclIntArray* array, uint64_t* size);
aclnnStatus aclGetFloatArraySize(const aclFloatArray* array, uint64_t* size);
aclnnStatus aclGetBoolArraySize(const aclBoolArray* array, uint64_t* size);

/* Not between the two phases of a call that the tensor belongs to. 161001 when tensor is null. */
aclnnStatus aclSetRawTensorAddr(aclTensor* tensor, void* addr);
aclnnStatus aclGetRawTensorAddr(const aclTensor* tensor, void** addr);
/* Repeatable executors only. `index` counts the tensors of one direction, members of lists one by
 * one. 561103 when executor or tensor is null, 161002 when the index names no tensor. */
aclnnStatus aclSetInputTensorAddr(aclOpExecutor* executor, const size_t index, aclTensor* tensor,
                                  void* addr);
aclnnStatus aclSetOutputTensorAddr(aclOpExecutor* executor, const size_t index, aclTensor* tensor,
                                   void* addr);

aclnnStatus aclSetAclOpExecutorRepeatable(aclOpExecutor* executor); /* 561103 when null */
aclnnStatus aclDestroyAclOpExecutor(aclOpExecutor* executor);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
