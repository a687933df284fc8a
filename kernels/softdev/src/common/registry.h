// SPDX-License-Identifier: Apache-2.0
// Live handles. A handle is a number that is never used twice, so a stale or invented one is found
// out instead of being dereferenced.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace xsd {

template <typename T>
class Registry {
 public:
  // `kind` lands in the top bits, so that a stream passed as an event is refused too.
  explicit Registry(uint64_t kind) : next_((kind << 48) + 16) {}

  void* add(std::shared_ptr<T> object) {
    std::lock_guard<std::mutex> lock(mutex_);
    const uint64_t handle = next_;
    next_ += 16;
    object->id = handle;
    live_.emplace(handle, std::move(object));
    return reinterpret_cast<void*>(handle);
  }

  std::shared_ptr<T> find(const void* handle) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto it = live_.find(reinterpret_cast<uint64_t>(handle));
    return it == live_.end() ? nullptr : it->second;
  }

  // Removes the handle; of several callers only one gets the object.
  std::shared_ptr<T> take(const void* handle) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto it = live_.find(reinterpret_cast<uint64_t>(handle));
    if (it == live_.end()) return nullptr;
    auto object = std::move(it->second);
    live_.erase(it);
    return object;
  }

  std::vector<std::shared_ptr<T>> all() {
    std::lock_guard<std::mutex> lock(mutex_);
    std::vector<std::shared_ptr<T>> found;
    found.reserve(live_.size());
    for (auto& item : live_) found.push_back(item.second);
    return found;
  }

 private:
  std::mutex mutex_;
  uint64_t next_;
  std::unordered_map<uint64_t, std::shared_ptr<T>> live_;
};

}  // namespace xsd
