// SPDX-License-Identifier: Apache-2.0
// General aclnn operators over the ATen library of the process (libtorch_cpu).
//
//   ACLNN(Add, (T self, T other, S alpha, T out), out.copy_(at::add(self, other, alpha)))
//
// exports aclnnAddGetWorkspaceSize and aclnnAdd. Parameter types decide the C types; phase one turns the
// arguments into CPU tensors that alias device memory, phase two queues the body on the stream's worker.
// Outputs are written in place, never allocated. A body that throws fails its stream.
#pragma once

#include <ATen/ATen.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "aclnn_base.h"
#include "xsd.h"

namespace xsd::op {

using T = const at::Tensor&;                        // aclTensor*, undefined when null
using S = const at::Scalar&;                        // aclScalar*
using OS = const std::optional<at::Scalar>&;        // aclScalar* that may be null
using IA = const std::vector<int64_t>&;             // aclIntArray*, empty when null
using TL = const std::vector<at::Tensor>&;          // aclTensorList*, empty when null
using D = const at::ScalarType&;                    // aclDataType
using Text = const std::string&;                    // char*, empty when null, copied in phase one
struct Resized {                                    // aclTensor* whose final shape the operator finds out
  aclTensor* raw;
  at::Tensor memory;  // as large as the largest result
  void set(const at::Tensor& result) const;
};
using R = const Resized&;

// FRACTAL_NZ: the blocks as they lie in memory, [..., N/C, K/16, 16, C] with C elements in 32 bytes.
at::Tensor view_of(const aclTensor* tensor);
at::Scalar value_of(const aclScalar* scalar);
at::ScalarType type_of(aclDataType dtype);

// How a parameter is passed (Abi), kept until the launch (Held) and made (take).
template <typename P>
struct Kind {
  using Abi = P;
  using Held = P;
  static P take(P value) { return value; }
};
template <>
struct Kind<T> {
  using Abi = const aclTensor*;
  using Held = at::Tensor;
  static at::Tensor take(Abi value) { return view_of(value); }
};
template <>
struct Kind<R> {
  using Abi = aclTensor*;
  using Held = Resized;
  static Resized take(Abi value) { return {value, view_of(value)}; }
};
template <>
struct Kind<S> {
  using Abi = const aclScalar*;
  using Held = at::Scalar;
  static at::Scalar take(Abi value) { return value_of(value); }
};
template <>
struct Kind<OS> {
  using Abi = const aclScalar*;
  using Held = std::optional<at::Scalar>;
  static Held take(Abi value) { return value == nullptr ? Held() : Held(value_of(value)); }
};
template <>
struct Kind<D> {
  using Abi = aclDataType;
  using Held = at::ScalarType;
  static Held take(Abi value) { return type_of(value); }
};
template <>
struct Kind<Text> {
  using Abi = const char*;
  using Held = std::string;
  static Held take(Abi value) { return value == nullptr ? Held() : Held(value); }
};
template <>
struct Kind<IA> {
  using Abi = const aclIntArray*;
  using Held = std::vector<int64_t>;
  static Held take(Abi value) { return value == nullptr ? Held() : value->values; }
};
template <>
struct Kind<TL> {
  using Abi = const aclTensorList*;
  using Held = std::vector<at::Tensor>;
  static Held take(Abi value) {
    Held views;
    if (value == nullptr) return views;
    for (const aclTensor* item : value->items) views.push_back(view_of(item));
    return views;
  }
};

// Memory that views of the launch being prepared point to; kept in place until the kernel ran.
struct Holds {
  std::vector<void*> handles;
  ~Holds();
  bool let_go();  // false: some of it was freed meanwhile
};
Holds*& collecting();

struct Prepared {
  Holds holds;
  virtual ~Prepared() = default;
  virtual void run() = 0;
};

int first_phase(const char* op, std::unique_ptr<Prepared> prepared, uint64_t* workspace_bytes,
                aclOpExecutor** executor);
int refuse(const char* op, const char* why);
int second_phase(const char* op, void* workspace, uint64_t bytes, aclOpExecutor* executor, aclrtStream stream,
                 bool wait);

template <typename Op, typename... P>
struct Call : Prepared {
  std::tuple<typename Kind<P>::Held...> held;
  explicit Call(typename Kind<P>::Abi... raw) : held(collect(raw...)) {}
  std::tuple<typename Kind<P>::Held...> collect(typename Kind<P>::Abi... raw) {
    collecting() = &holds;
    return std::tuple<typename Kind<P>::Held...>{Kind<P>::take(raw)...};
  }
  void run() override {
    std::apply([](const auto&... values) { Op::run(values...); }, held);
  }
};

using Function = void (*)();

template <typename Op>
struct Entry {
  template <typename... P>
  static int first(typename Kind<P>::Abi... raw, uint64_t* workspace_bytes, aclOpExecutor** executor) {
    try {
      return first_phase(Op::name(), std::make_unique<Call<Op, P...>>(raw...), workspace_bytes, executor);
    } catch (const std::exception& error) {
      return refuse(Op::name(), error.what());
    }
  }
  template <typename... P>
  static Function first_of(void (*)(P...)) {
    return reinterpret_cast<Function>(&first<P...>);
  }
  static int second(void* workspace, uint64_t bytes, aclOpExecutor* executor, aclrtStream stream) {
    return second_phase(Op::name(), workspace, bytes, executor, stream, Op::kWait);
  }
};

}  // namespace xsd::op

// The C names are given to template instances by the loader (ifunc), so that no prototype is written twice.
#define XSD_ACLNN(op, wait, parameters, ...)                                                             \
  namespace {                                                                                            \
  struct op##Op {                                                                                        \
    static constexpr bool kWait = wait;                                                                  \
    static const char* name() { return "aclnn" #op; }                                                    \
    static void run parameters { __VA_ARGS__; }                                                          \
  };                                                                                                     \
  }                                                                                                      \
  extern "C" {                                                                                           \
  __attribute__((used)) static Function xsd_first_##op() {                                               \
    return Entry<op##Op>::first_of(&op##Op::run);                                                        \
  }                                                                                                      \
  __attribute__((used)) static Function xsd_second_##op() {                                              \
    return reinterpret_cast<Function>(&Entry<op##Op>::second);                                           \
  }                                                                                                      \
  __attribute__((visibility("default"), ifunc("xsd_first_" #op))) void aclnn##op##GetWorkspaceSize();    \
  __attribute__((visibility("default"), ifunc("xsd_second_" #op))) void aclnn##op();                     \
  }
#define ACLNN(op, parameters, ...) XSD_ACLNN(op, false, parameters, __VA_ARGS__)
// For results whose shape depends on the data: phase two returns when the operator is done.
#define ACLNN_WAIT(op, parameters, ...) XSD_ACLNN(op, true, parameters, __VA_ARGS__)
