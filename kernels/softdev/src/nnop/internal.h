// SPDX-License-Identifier: Apache-2.0
// Shared between the source files of libnnopbase only.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "aclnn_base.h"
#include "xsd.h"

namespace xsd {

// aclnn status codes, CANN 9.1.
enum : int {
  kOk = 0,
  kParamNull = 161001,
  kParamInvalid = 161002,
  kRuntimeError = 361001,
  kInnerNull = 561103,
};

// Objects the vendor library reads through their pointers. What was destroyed stays readable (with
// a poisoned magic) for a while, so that a late reader sees a dead object instead of other data.
template <typename T>
class Objects {
 public:
  T* add(std::unique_ptr<T> object) {
    std::lock_guard<std::mutex> lock(mutex_);
    T* raw = object.get();
    live_.emplace(raw, std::move(object));
    return raw;
  }

  bool alive(const T* object) {
    std::lock_guard<std::mutex> lock(mutex_);
    return live_.count(object) != 0;
  }

  bool destroy(const T* object) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto it = live_.find(object);
    if (it == live_.end()) return false;
    it->second->magic = kDead;
    graves_.push_back(std::move(it->second));
    live_.erase(it);
    if (graves_.size() > kGraves) graves_.pop_front();
    return true;
  }

  std::mutex& mutex() { return mutex_; }

 private:
  static constexpr uint64_t kDead = 0xdeaddeaddeaddeadULL;
  static constexpr size_t kGraves = 1024;
  std::mutex mutex_;
  std::unordered_map<const T*, std::unique_ptr<T>> live_;
  std::deque<std::unique_ptr<T>> graves_;
};

Objects<aclTensor>& tensors();
Objects<aclTensorList>& lists();

// What is wrong with `addr` as the new storage of a live tensor, nullptr for nothing.
const char* address_problem(const aclTensor* tensor, const void* addr);

// Member of a list: only the list may destroy it.
bool tensor_is_owned(const aclTensor* tensor);

int fail(int code, const char* format, ...) __attribute__((format(printf, 2, 3)));

}  // namespace xsd
