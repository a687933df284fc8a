// SPDX-License-Identifier: Apache-2.0
// Scalars, arrays and the readers of tensors and lists.
#include <cstring>

#include "internal.h"

namespace xsd {
namespace {

constexpr uint64_t kMaxArraySize = 1u << 24;

template <typename T>
Objects<T>& objects_of() {
  static auto& objects = *new Objects<T>;
  return objects;
}

template <typename Array, typename Value>
Array* create_array(const Value* value, uint64_t size, const char* call) {
  if (xsdForked()) return nullptr;
  if ((value == nullptr && size > 0) || size > kMaxArraySize) {
    xsdSetError("EZ1001: %s: value %p with %llu elements", call, static_cast<const void*>(value),
                static_cast<unsigned long long>(size));
    return nullptr;
  }
  auto array = std::make_unique<Array>();
  array->values.assign(value, value + size);
  array->magic = XSD_MAGIC_ARRAY;
  return objects_of<Array>().add(std::move(array));
}

template <typename T>
aclnnStatus destroy(const T* object, const char* call) {
  if (xsdForked()) return kRuntimeError;
  if (object == nullptr) return fail(kParamNull, "EZ1001: %s: null argument", call);
  if (!objects_of<T>().destroy(object)) {
    return fail(kParamInvalid, "EZ1001: %s: %p is not a live object of this kind", call,
                static_cast<const void*>(object));
  }
  return kOk;
}

template <typename Array>
aclnnStatus array_size(const Array* array, uint64_t* size, const char* call) {
  if (array == nullptr || size == nullptr)
    return fail(kParamNull, "EZ1001: %s: null argument", call);
  if (!objects_of<Array>().alive(array)) {
    return fail(kParamInvalid, "EZ1001: %s: %p is not a live array", call,
                static_cast<const void*>(array));
  }
  *size = array->values.size();
  return kOk;
}

aclnnStatus check_reader(const aclTensor* tensor, const void* out, const void* out2,
                         const char* call) {
  if (tensor == nullptr || out == nullptr || out2 == nullptr) {
    return fail(kParamNull, "EZ1001: %s: null argument", call);
  }
  if (xsdTensorAlive(tensor) == 0) {
    return fail(kParamInvalid, "EZ1001: %s: %p is not a live tensor", call,
                static_cast<const void*>(tensor));
  }
  return kOk;
}

void copy_out(const std::vector<int64_t>& values, int64_t** out, uint64_t* n) {
  *n = values.size();
  *out = new int64_t[values.empty() ? 1 : values.size()];
  std::copy(values.begin(), values.end(), *out);
}

}  // namespace
}  // namespace xsd

using namespace xsd;

aclScalar* aclCreateScalar(void* value, aclDataType dtype) {
  if (xsdForked()) return nullptr;
  const uint64_t bits = xsdDtypeBits(dtype);
  if (value == nullptr || bits < 8) {
    xsdSetError("EZ1001: aclCreateScalar: value %p, dataType %d", value, static_cast<int>(dtype));
    return nullptr;
  }
  auto scalar = std::make_unique<aclScalar>();
  scalar->dtype = dtype;
  std::memset(scalar->bytes, 0, sizeof scalar->bytes);
  std::memcpy(scalar->bytes, value, bits / 8);
  scalar->magic = XSD_MAGIC_SCALAR;
  return objects_of<aclScalar>().add(std::move(scalar));
}

aclIntArray* aclCreateIntArray(const int64_t* value, uint64_t size) {
  return create_array<aclIntArray>(value, size, "aclCreateIntArray");
}

aclFloatArray* aclCreateFloatArray(const float* value, uint64_t size) {
  return create_array<aclFloatArray>(value, size, "aclCreateFloatArray");
}

aclBoolArray* aclCreateBoolArray(const bool* value, uint64_t size) {
  return create_array<aclBoolArray>(value, size, "aclCreateBoolArray");
}

aclnnStatus aclDestroyScalar(const aclScalar* scalar) {
  return destroy(scalar, "aclDestroyScalar");
}

aclnnStatus aclDestroyIntArray(const aclIntArray* array) {
  return destroy(array, "aclDestroyIntArray");
}

aclnnStatus aclDestroyFloatArray(const aclFloatArray* array) {
  return destroy(array, "aclDestroyFloatArray");
}

aclnnStatus aclDestroyBoolArray(const aclBoolArray* array) {
  return destroy(array, "aclDestroyBoolArray");
}

int xsdFloatArrayAlive(const aclFloatArray* array) {
  return objects_of<aclFloatArray>().alive(array) ? 1 : 0;
}

aclnnStatus aclGetIntArraySize(const aclIntArray* array, uint64_t* size) {
  return array_size(array, size, "aclGetIntArraySize");
}

aclnnStatus aclGetFloatArraySize(const aclFloatArray* array, uint64_t* size) {
  return array_size(array, size, "aclGetFloatArraySize");
}

aclnnStatus aclGetBoolArraySize(const aclBoolArray* array, uint64_t* size) {
  return array_size(array, size, "aclGetBoolArraySize");
}

aclnnStatus aclGetViewShape(const aclTensor* tensor, int64_t** dims, uint64_t* n) {
  if (int code = check_reader(tensor, dims, n, "aclGetViewShape")) return code;
  copy_out(tensor->view_dims, dims, n);
  return kOk;
}

aclnnStatus aclGetViewStrides(const aclTensor* tensor, int64_t** strides, uint64_t* n) {
  if (int code = check_reader(tensor, strides, n, "aclGetViewStrides")) return code;
  copy_out(tensor->strides, strides, n);
  return kOk;
}

aclnnStatus aclGetDataType(const aclTensor* tensor, aclDataType* dtype) {
  if (int code = check_reader(tensor, dtype, dtype, "aclGetDataType")) return code;
  *dtype = tensor->dtype;
  return kOk;
}

aclnnStatus aclGetFormat(const aclTensor* tensor, aclFormat* format) {
  if (int code = check_reader(tensor, format, format, "aclGetFormat")) return code;
  *format = tensor->format;
  return kOk;
}

aclnnStatus aclGetTensorListSize(const aclTensorList* list, uint64_t* size) {
  if (list == nullptr || size == nullptr) {
    return fail(kParamNull, "EZ1001: aclGetTensorListSize: null argument");
  }
  if (xsdTensorListAlive(list) == 0) {
    return fail(kParamInvalid, "EZ1001: aclGetTensorListSize: %p is not a live list",
                static_cast<const void*>(list));
  }
  *size = list->items.size();
  return kOk;
}
