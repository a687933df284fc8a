// SPDX-License-Identifier: Apache-2.0
// From aclnn objects to CPU tensors, and the two phases every operator shares.
#include <ATen/Parallel.h>
#include <c10/core/GradMode.h>

#include <cstdlib>
#include <cstring>

#include "acl_rt.h"
#include "opapi.h"

namespace xsd::op {
namespace {

constexpr int kOk = 0, kParamNull = 161001, kParamInvalid = 161002, kRuntimeError = 361001;
constexpr int kKernelException = 507015, kMemoryFreed = 507053;

template <typename V>
at::Scalar read(const aclScalar& scalar) {
  V value;
  std::memcpy(&value, scalar.bytes, sizeof value);
  return at::Scalar(value);
}

// One thread an operator: results must not depend on how many cores the machine has. Each worker of
// the device sets it for itself.
void one_thread() {
  static thread_local bool done = false;
  if (done) return;
  const char* text = std::getenv("XSD_OP_THREADS");
  const int threads = text == nullptr ? 1 : std::atoi(text);
  at::set_num_threads(threads > 0 ? threads : 1);
  done = true;
}

int run_prepared(void* ctx, void*, uint64_t) {
  auto& prepared = *static_cast<Prepared*>(ctx);
  one_thread();
  try {
    c10::NoGradGuard no_grad;
    prepared.run();
  } catch (const std::exception& error) {
    xsdTaskError("%.900s", error.what());
    return kKernelException;
  }
  if (prepared.holds.let_go()) return 0;
  xsdTaskError("memory of a queued operator was freed before it ran");
  return kMemoryFreed;
}

void release_prepared(void* ctx) { delete static_cast<Prepared*>(ctx); }

}  // namespace

Holds::~Holds() { let_go(); }

bool Holds::let_go() {
  int bits = 0;
  for (void* handle : handles) bits |= xsdMemoryRelease(handle);
  handles.clear();
  return (bits & XSD_FREED_WHILE_HELD) == 0;
}

Holds*& collecting() {
  static thread_local Holds* current = nullptr;
  return current;
}

at::ScalarType type_of(aclDataType dtype) {
  switch (dtype) {
    case ACL_FLOAT: return at::kFloat;
    case ACL_FLOAT16: return at::kHalf;
    case ACL_BF16: return at::kBFloat16;
    case ACL_DOUBLE: return at::kDouble;
    case ACL_INT8: return at::kChar;
    case ACL_UINT8: return at::kByte;
    case ACL_INT16: return at::kShort;
    case ACL_INT32: return at::kInt;
    case ACL_INT64: return at::kLong;
    case ACL_UINT16: return at::kUInt16;
    case ACL_UINT32: return at::kUInt32;
    case ACL_UINT64: return at::kUInt64;
    case ACL_BOOL: return at::kBool;
    case ACL_COMPLEX64: return at::kComplexFloat;
    case ACL_COMPLEX128: return at::kComplexDouble;
    case ACL_FLOAT8_E4M3FN: return at::kFloat8_e4m3fn;
    case ACL_FLOAT8_E5M2: return at::kFloat8_e5m2;
    default: TORCH_CHECK(false, "aclDataType ", static_cast<int>(dtype), " is not known to this library");
  }
}

at::Scalar value_of(const aclScalar* scalar) {
  TORCH_CHECK(scalar != nullptr && scalar->magic == XSD_MAGIC_SCALAR, "a scalar is null or not alive");
  switch (scalar->dtype) {
    case ACL_FLOAT: return read<float>(*scalar);
    case ACL_DOUBLE: return read<double>(*scalar);
    case ACL_FLOAT16: return at::Scalar(static_cast<float>(*reinterpret_cast<const at::Half*>(scalar->bytes)));
    case ACL_BF16: return at::Scalar(static_cast<float>(*reinterpret_cast<const at::BFloat16*>(scalar->bytes)));
    case ACL_INT8: return read<int8_t>(*scalar);
    case ACL_UINT8: return read<uint8_t>(*scalar);
    case ACL_INT16: return read<int16_t>(*scalar);
    case ACL_INT32: return read<int32_t>(*scalar);
    case ACL_INT64: return read<int64_t>(*scalar);
    case ACL_BOOL: return at::Scalar(scalar->bytes[0] != 0);
    default: TORCH_CHECK(false, "a scalar of aclDataType ", static_cast<int>(scalar->dtype));
  }
}

namespace {

constexpr int64_t kBlockRows = 16, kBlockBytes = 32;

std::vector<int64_t> blocks_of(const aclTensor& tensor, const at::TensorOptions& options) {
  auto dims = tensor.view_dims;
  const int64_t width = kBlockBytes / static_cast<int64_t>(options.dtype().itemsize());
  TORCH_CHECK(dims.size() >= 2 && tensor.offset == 0 && dims[dims.size() - 2] % kBlockRows == 0 &&
              dims.back() % width == 0, "FRACTAL_NZ of [", dims, "]: rows in 16s, columns in ", width, "s, no offset");
  const int64_t rows = dims[dims.size() - 2], columns = dims.back();
  dims.resize(dims.size() - 2);
  dims.insert(dims.end(), {columns / width, rows / kBlockRows, kBlockRows, width});
  return dims;
}

}  // namespace

at::Tensor view_of(const aclTensor* tensor) {
  if (tensor == nullptr) return {};
  TORCH_CHECK(xsdTensorAlive(tensor) == 1, "tensor ", static_cast<const void*>(tensor), " is not alive");
  const auto options = at::TensorOptions(type_of(tensor->dtype));
  for (const int64_t size : tensor->view_dims) {
    if (size == 0) return at::empty(tensor->view_dims, options);
  }
  auto* start = static_cast<char*>(tensor->data) + tensor->offset * static_cast<int64_t>(options.dtype().itemsize());
  if (void* hold = xsdMemoryHold(start)) collecting()->handles.push_back(hold);
  if (tensor->format == ACL_FORMAT_FRACTAL_NZ) return at::from_blob(start, blocks_of(*tensor, options), options);
  return at::from_blob(start, tensor->view_dims, tensor->strides, options);
}

void Resized::set(const at::Tensor& result) const {
  TORCH_CHECK(result.numel() <= memory.numel(), "a result of ", result.numel(), " elements, room for ",
              memory.numel());
  memory.flatten().narrow(0, 0, result.numel()).copy_(result.flatten());
  raw->view_dims.assign(result.sizes().begin(), result.sizes().end());
  raw->strides.assign(result.dim(), 1);
  for (int64_t i = result.dim() - 2; i >= 0; --i) raw->strides[i] = raw->strides[i + 1] * raw->view_dims[i + 1];
}

int refuse(const char* op, const char* why) {
  xsdSetError("EZ1001: %s: %.900s", op, why);
  return kParamInvalid;
}

int first_phase(const char* op, std::unique_ptr<Prepared> prepared, uint64_t* workspace_bytes,
                aclOpExecutor** executor) {
  if (workspace_bytes == nullptr || executor == nullptr) {
    xsdSetError("EZ1001: %s: workspaceSize or executor is null", op);
    return kParamNull;
  }
  *workspace_bytes = 0;
  *executor = xsdExecutorCreate(op, 0, run_prepared, prepared.get(), release_prepared);
  prepared.release();  // xsdExecutorCreate took it over, also when it failed
  return *executor == nullptr ? kRuntimeError : kOk;
}

int second_phase(const char* op, void* workspace, uint64_t bytes, aclOpExecutor* executor, aclrtStream stream,
                 bool wait) {
  const int status = xsdExecutorLaunch(op, workspace, bytes, executor, stream);
  if (status != kOk || !wait) return status;
  return aclrtSynchronizeStream(stream) == 0 ? kOk : kRuntimeError;
}

}  // namespace xsd::op
