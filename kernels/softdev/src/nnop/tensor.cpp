// SPDX-License-Identifier: Apache-2.0
// aclTensor and aclTensorList.
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <unordered_set>

#include "internal.h"

namespace xsd {
namespace {

constexpr uint64_t kMaxDims = 8;
constexpr uintptr_t kAlignment = 32;
constexpr uint64_t kMaxListSize = 1u << 20;

std::mutex& owned_mutex() {
  static auto& mutex = *new std::mutex;
  return mutex;
}

std::unordered_set<const aclTensor*>& owned() {
  static auto& set = *new std::unordered_set<const aclTensor*>;
  return set;
}

bool known_format(aclFormat format) {
  switch (format) {
    case ACL_FORMAT_NCHW:
    case ACL_FORMAT_NHWC:
    case ACL_FORMAT_ND:
    case ACL_FORMAT_FRACTAL_NZ:
    case ACL_FORMAT_NCDHW:
    case ACL_FORMAT_NCL:
      return true;
    default:
      return false;
  }
}

constexpr uint64_t kMaxElements = uint64_t{1} << 56;

// Product of the dimensions, false when one is negative or the product does not fit. A 0 hides
// nothing: whoever multiplies the others meets no overflow.
bool count_elements(const int64_t* dims, uint64_t n, uint64_t* out) {
  uint64_t product = 1;
  bool empty = false;
  for (uint64_t i = 0; i < n; ++i) {
    if (dims[i] < 0) return false;
    empty |= dims[i] == 0;
    const uint64_t factor = dims[i] == 0 ? 1 : static_cast<uint64_t>(dims[i]);
    if (__builtin_mul_overflow(product, factor, &product) || product > kMaxElements) return false;
  }
  *out = empty ? 0 : product;
  return true;
}

// One past the highest element the view reaches.
bool view_extent(const aclTensor& tensor, uint64_t* out) {
  uint64_t last = static_cast<uint64_t>(tensor.offset);
  for (size_t i = 0; i < tensor.view_dims.size(); ++i) {
    if (tensor.strides[i] < 0) return false;
    uint64_t step;
    if (__builtin_mul_overflow(static_cast<uint64_t>(tensor.view_dims[i] - 1),
                               static_cast<uint64_t>(tensor.strides[i]), &step) ||
        __builtin_add_overflow(last, step, &last)) {
      return false;
    }
  }
  return !__builtin_add_overflow(last, uint64_t{1}, out);
}

const char* check_arguments(const int64_t* dims, uint64_t n, aclDataType dtype,
                            const int64_t* strides, int64_t offset, aclFormat format,
                            const int64_t* storage, uint64_t m) {
  if (n > kMaxDims || m > kMaxDims) return "more than 8 dimensions";
  if (n > 0 && dims == nullptr) return "viewDims is null";
  if (n > 0 && strides == nullptr) return "stride is null";
  if (m > 0 && storage == nullptr) return "storageDims is null";
  if (xsdDtypeBits(dtype) == 0) return "unknown dataType";
  if (!known_format(format)) return "unknown format";
  if (offset < 0) return "negative offset";
  return nullptr;
}

// The storage against the view and against the memory behind it.
const char* check_bounds(const aclTensor& tensor) {
  uint64_t view = 0, storage = 0, extent = 0;
  if (!count_elements(tensor.view_dims.data(), tensor.view_dims.size(), &view)) {
    return "viewDims are negative or too large";
  }
  if (!count_elements(tensor.storage_dims.data(), tensor.storage_dims.size(), &storage)) {
    return "storageDims are negative or too large";
  }
  if (static_cast<uint64_t>(tensor.offset) > kMaxElements) return "offset is too large";
  if (view == 0) return nullptr;
  if (tensor.data == nullptr) return "tensorData is null for a tensor with elements";
  if (!view_extent(tensor, &extent)) return "stride is negative or too large";
  if (extent > storage) return "the view reaches outside its storage";
  if (xsdSettings()->strict && reinterpret_cast<uintptr_t>(tensor.data) % kAlignment != 0) {
    return "tensorData is not 32-byte aligned";
  }
  const uint64_t bits = xsdDtypeBits(tensor.dtype);
  const uint64_t bytes = (storage * bits + 7) / 8;
  if (xsdCheckRange(tensor.data, bytes) < 0) {
    return "the storage is not inside one live device allocation";
  }
  return nullptr;
}

}  // namespace

Objects<aclTensor>& tensors() {
  static auto& objects = *new Objects<aclTensor>;
  return objects;
}

Objects<aclTensorList>& lists() {
  static auto& objects = *new Objects<aclTensorList>;
  return objects;
}

const char* address_problem(const aclTensor* tensor, const void* addr) {
  if (!tensors().alive(tensor)) return "tensor is not a live tensor";
  aclTensor moved = *tensor;
  moved.data = const_cast<void*>(addr);
  return check_bounds(moved);
}

bool tensor_is_owned(const aclTensor* tensor) {
  std::lock_guard<std::mutex> lock(owned_mutex());
  return owned().count(tensor) != 0;
}

int fail(int code, const char* format, ...) {
  char text[512];
  va_list args;
  va_start(args, format);
  std::vsnprintf(text, sizeof text, format, args);
  va_end(args);
  xsdSetError("%s", text);
  return code;
}

}  // namespace xsd

using namespace xsd;

uint64_t xsdDtypeBits(aclDataType dtype) {
  switch (dtype) {
    case ACL_UINT1:
      return 1;
    case ACL_INT4:
    case ACL_FLOAT4_E2M1:
    case ACL_FLOAT4_E1M2:
      return 4;
    case ACL_FLOAT6_E3M2:
    case ACL_FLOAT6_E2M3:
      return 6;
    case ACL_INT8:
    case ACL_UINT8:
    case ACL_BOOL:
    case ACL_HIFLOAT8:
    case ACL_FLOAT8_E5M2:
    case ACL_FLOAT8_E4M3FN:
    case ACL_FLOAT8_E8M0:
      return 8;
    case ACL_FLOAT16:
    case ACL_BF16:
    case ACL_INT16:
    case ACL_UINT16:
      return 16;
    case ACL_FLOAT:
    case ACL_INT32:
    case ACL_UINT32:
    case ACL_COMPLEX32:
      return 32;
    case ACL_DOUBLE:
    case ACL_INT64:
    case ACL_UINT64:
    case ACL_COMPLEX64:
      return 64;
    case ACL_COMPLEX128:
      return 128;
    default:
      return 0;
  }
}

int xsdTensorAlive(const aclTensor* tensor) { return tensors().alive(tensor) ? 1 : 0; }
int xsdTensorListAlive(const aclTensorList* list) { return lists().alive(list) ? 1 : 0; }

aclTensor* aclCreateTensor(const int64_t* dims, uint64_t n, aclDataType dtype,
                           const int64_t* strides, int64_t offset, aclFormat format,
                           const int64_t* storage, uint64_t m, void* data) {
  if (xsdForked()) return nullptr;
  const char* problem = check_arguments(dims, n, dtype, strides, offset, format, storage, m);
  std::unique_ptr<aclTensor> tensor;
  if (problem == nullptr) {
    tensor = std::make_unique<aclTensor>();
    tensor->view_dims.assign(dims, dims + n);
    tensor->strides.assign(strides, strides + n);
    tensor->storage_dims.assign(storage, storage + m);
    tensor->offset = offset;
    tensor->dtype = dtype;
    tensor->format = format;
    tensor->data = data;
    tensor->magic = XSD_MAGIC_TENSOR;
    problem = check_bounds(*tensor);
  }
  if (problem != nullptr) {
    xsdSetError(
        "EZ1001: aclCreateTensor: %s (dataType %d, format %d, %llu view dimensions, offset %lld, "
        "tensorData %p)",
        problem, static_cast<int>(dtype), static_cast<int>(format),
        static_cast<unsigned long long>(n), static_cast<long long>(offset), data);
    return nullptr;
  }
  return tensors().add(std::move(tensor));
}

aclnnStatus aclDestroyTensor(const aclTensor* tensor) {
  if (xsdForked()) return kRuntimeError;
  if (tensor == nullptr) return fail(kParamNull, "EZ1001: aclDestroyTensor: tensor is null");
  if (tensor_is_owned(tensor)) {
    return fail(kParamInvalid,
                "EZ1001: aclDestroyTensor: %p belongs to a tensor list, which destroys it",
                static_cast<const void*>(tensor));
  }
  if (!tensors().destroy(tensor)) {
    return fail(kParamInvalid, "EZ1001: aclDestroyTensor: %p is not a live tensor",
                static_cast<const void*>(tensor));
  }
  return kOk;
}

aclnnStatus aclSetRawTensorAddr(aclTensor* tensor, void* addr) {
  if (xsdForked()) return kRuntimeError;
  if (tensor == nullptr) return fail(kParamNull, "EZ1001: aclSetRawTensorAddr: tensor is null");
  if (const char* problem = address_problem(tensor, addr)) {
    return fail(kParamInvalid, "EZ1001: aclSetRawTensorAddr: %s (tensor %p, addr %p)", problem,
                static_cast<const void*>(tensor), addr);
  }
  tensor->data = addr;
  return kOk;
}

aclnnStatus aclGetRawTensorAddr(const aclTensor* tensor, void** addr) {
  if (xsdForked()) return kRuntimeError;
  if (tensor == nullptr || addr == nullptr) {
    return fail(kParamNull, "EZ1001: aclGetRawTensorAddr: %s is null",
                tensor == nullptr ? "tensor" : "addr");
  }
  if (!tensors().alive(tensor)) {
    return fail(kParamInvalid, "EZ1001: aclGetRawTensorAddr: %p is not a live tensor",
                static_cast<const void*>(tensor));
  }
  *addr = tensor->data;
  return kOk;
}

aclTensorList* aclCreateTensorList(const aclTensor* const* value, uint64_t size) {
  if (xsdForked()) return nullptr;
  if ((value == nullptr && size > 0) || size > kMaxListSize) {
    xsdSetError("EZ1001: aclCreateTensorList: value %p with %llu members",
                static_cast<const void*>(value), static_cast<unsigned long long>(size));
    return nullptr;
  }
  auto list = std::make_unique<aclTensorList>();
  list->magic = XSD_MAGIC_LIST;
  std::lock_guard<std::mutex> lock(owned_mutex());
  std::unordered_set<const aclTensor*> seen;
  for (uint64_t i = 0; i < size; ++i) {
    const bool usable = tensors().alive(value[i]) && owned().count(value[i]) == 0;
    if (!usable || !seen.insert(value[i]).second) {
      xsdSetError("EZ1001: aclCreateTensorList: member %llu (%p) is not a live tensor of its own",
                  static_cast<unsigned long long>(i), static_cast<const void*>(value[i]));
      return nullptr;
    }
    list->items.push_back(const_cast<aclTensor*>(value[i]));
  }
  owned().insert(seen.begin(), seen.end());
  return lists().add(std::move(list));
}

aclnnStatus aclDestroyTensorList(const aclTensorList* list) {
  if (xsdForked()) return kRuntimeError;
  if (list == nullptr) return fail(kParamNull, "EZ1001: aclDestroyTensorList: array is null");
  std::vector<aclTensor*> members;
  {
    std::lock_guard<std::mutex> lock(owned_mutex());
    if (!lists().alive(list)) {
      return fail(kParamInvalid, "EZ1001: aclDestroyTensorList: %p is not a live list",
                  static_cast<const void*>(list));
    }
    members = list->items;
    lists().destroy(list);
    for (aclTensor* member : members) owned().erase(member);
  }
  for (aclTensor* member : members) tensors().destroy(member);
  return kOk;
}
