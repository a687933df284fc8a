// SPDX-License-Identifier: Apache-2.0
// The way torch_npu's operators call an aclnn function, written anew: every at::Tensor becomes an
// aclTensor, phase one, phase two, everything is destroyed, at each call. Functions are looked up
// once. Left out, to its advantage: the dispatcher, its executor cache's hashing and its task queue.
#include <dlfcn.h>
#include <torch/extension.h>

#include <cfloat>
#include <tuple>

struct aclTensor;
struct aclTensorList;
struct aclOpExecutor;

namespace {

void* g_base = nullptr;
void* g_vendor = nullptr;

template <class F>
F find(void* library, const char* name) {
  void* address = dlsym(library, name);
  TORCH_CHECK(address != nullptr, name, " was not found");
  return reinterpret_cast<F>(address);
}

using CreateTensor = aclTensor* (*)(const int64_t*, uint64_t, int, const int64_t*, int64_t, int,
                                    const int64_t*, uint64_t, void*);
using CreateList = aclTensorList* (*)(const aclTensor* const*, uint64_t);
using DestroyTensor = int (*)(const aclTensor*);
using DestroyList = int (*)(const aclTensorList*);

int acl_type(at::ScalarType type) {
  switch (type) {
    case at::kBFloat16: return 27;
    case at::kInt: return 3;
    case at::kFloat: return 0;
    case at::kChar: return 2;
    default: TORCH_CHECK(false, "no acl type for ", type);
  }
}

aclTensor* convert(const at::Tensor& tensor) {
  static const auto create = find<CreateTensor>(g_base, "aclCreateTensor");
  if (!tensor.defined()) return nullptr;
  TORCH_CHECK(tensor.dim() <= 8, "too many dimensions");
  c10::SmallVector<int64_t, 8> storage;
  storage.push_back(static_cast<int64_t>(tensor.storage().nbytes() / tensor.itemsize()));
  return create(tensor.sizes().data(), tensor.dim(), acl_type(tensor.scalar_type()),
                tensor.strides().data(), tensor.storage_offset(), 2, storage.data(),
                storage.size(), const_cast<void*>(tensor.storage().data()));
}

aclTensorList* convert(at::TensorList list) {
  static const auto create = find<CreateList>(g_base, "aclCreateTensorList");
  std::vector<const aclTensor*> items(list.size());
  for (size_t i = 0; i < list.size(); ++i) items[i] = convert(list[i]);
  return create(items.data(), items.size());
}

void release(aclTensor* tensor) {
  static const auto destroy = find<DestroyTensor>(g_base, "aclDestroyTensor");
  if (tensor != nullptr) destroy(tensor);
}
void release(aclTensorList* list) {
  static const auto destroy = find<DestroyList>(g_base, "aclDestroyTensorList");
  if (list != nullptr) destroy(list);
}
template <class T>
void release(T) {}

template <class T>
T convert(T value) { return value; }

using PhaseOne = int (*)(aclTensor*, aclTensor*, aclTensor*, aclTensor*, aclTensorList*,
                         aclTensorList*, aclTensorList*, aclTensorList*, aclTensorList*,
                         aclTensorList*, aclTensor*, int64_t, int64_t, int64_t, int64_t, int64_t,
                         int64_t, int64_t, const char*, int64_t, const char*, float, aclTensor*,
                         aclTensor*, uint64_t*, aclOpExecutor**);
using PhaseTwo = int (*)(void*, uint64_t, aclOpExecutor*, void*);

template <class... Args>
void run(int64_t workspace, int64_t stream, const Args&... args) {
  static const auto phase_one = find<PhaseOne>(g_vendor, "aclnnMegaMoeGetWorkspaceSize");
  static const auto phase_two = find<PhaseTwo>(g_vendor, "aclnnMegaMoe");
  uint64_t bytes = 0;
  aclOpExecutor* executor = nullptr;
  auto converted = std::make_tuple(convert(args)...);
  const int prepared = std::apply(
      [&](auto... values) { return phase_one(values..., &bytes, &executor); }, converted);
  TORCH_CHECK(prepared == 0, "aclnnMegaMoeGetWorkspaceSize ", prepared);
  const int launched = phase_two(reinterpret_cast<void*>(workspace), bytes, executor,
                                 reinterpret_cast<void*>(stream));
  TORCH_CHECK(launched == 0, "aclnnMegaMoe ", launched);
  std::apply([](auto... values) { (release(values), ...); }, converted);
}

void launch(const at::Tensor& context, const at::Tensor& x, const at::Tensor& ids,
            const at::Tensor& weights, const std::vector<at::Tensor>& w1,
            const std::vector<at::Tensor>& w2, int64_t experts, int64_t ep, int64_t ccl,
            const at::Tensor& y, const at::Tensor& counts, int64_t workspace, int64_t stream) {
  aclTensorList* none = nullptr;
  aclTensor* no_mask = nullptr;
  const char* text = "";
  const char* activation = "swiglu";
  run(workspace, stream, context, x, ids, weights, at::TensorList(w1), at::TensorList(w2), none,
      none, none, none, no_mask, experts, ep, ccl, int64_t{0}, int64_t{0}, int64_t{28}, int64_t{0},
      text, int64_t{0}, activation, FLT_MAX, y, counts);
}

// The vendor calls that a cached plan cannot avoid, without any language around them: the floor.
double floor_ns(int64_t rounds, int64_t base, bool move) {
  using Create = CreateTensor;
  using Move = int (*)(aclTensor*, void*);
  static const auto create = find<Create>(g_base, "aclCreateTensor");
  static const auto move_raw = find<Move>(g_base, "aclSetRawTensorAddr");
  static const auto phase_one = find<PhaseOne>(g_vendor, "aclnnMegaMoeGetWorkspaceSize");
  static const auto phase_two = find<PhaseTwo>(g_vendor, "aclnnMegaMoe");
  const int64_t dims[2] = {8, 8}, strides[2] = {8, 1};
  auto* memory = reinterpret_cast<void*>(base);
  aclTensor* t = create(dims, 2, 3, strides, 0, 2, dims, 2, memory);
  auto* list = reinterpret_cast<aclTensorList*>(t);
  const auto start = std::chrono::steady_clock::now();
  for (int64_t i = 0; i < rounds; ++i) {
    for (int j = 0; move && j < 5; ++j) move_raw(t, memory);
    uint64_t bytes = 0;
    aclOpExecutor* executor = nullptr;
    phase_one(t, t, t, t, list, list, nullptr, nullptr, nullptr, nullptr, nullptr, 256, 8, 1, 0, 0,
              28, 0, "", 0, "swiglu", FLT_MAX, t, t, &bytes, &executor);
    phase_two(memory, bytes, executor, nullptr);
  }
  const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - start;
  release(t);
  return took.count() / static_cast<double>(rounds);
}

void open(const std::string& base, const std::string& vendor) {
  g_base = dlopen(base.c_str(), RTLD_NOW | RTLD_LOCAL);
  g_vendor = dlopen(vendor.c_str(), RTLD_NOW | RTLD_LOCAL);
  TORCH_CHECK(g_base != nullptr && g_vendor != nullptr, "cannot open ", base, " or ", vendor);
}

}  // namespace

PYBIND11_MODULE(macro_path, m) {
  m.def("open", &open);
  m.def("launch", &launch);
  m.def("floor_ns", &floor_ns);
}
