// SPDX-License-Identifier: Apache-2.0
// Environment settings, seeded delays, the bounded wait and fork safety.
#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstdlib>
#include <cstring>

#include "internal.h"

namespace xsd {
namespace {

std::atomic<const Settings*> g_settings{nullptr};
std::atomic<bool> g_used{false}, g_forked{false};
std::atomic<uint32_t> g_salt{0};
std::atomic<void (*)()> g_wait_hook{nullptr};

uint64_t number(const char* name, uint64_t fallback, uint64_t maximum) {
  const char* text = std::getenv(name);
  if (text == nullptr || *text == '\0') return fallback;
  char* end = nullptr;
  errno = 0;
  const unsigned long long value = std::strtoull(text, &end, 10);
  if (errno != 0 || *end != '\0' || *text == '-' || value > maximum) {
    // A setting that is silently ignored would make a test prove nothing.
    std::fprintf(
        stderr, "software device: %s=%s is not a whole number from 0 to %llu; using %llu\n", name,
        text, static_cast<unsigned long long>(maximum), static_cast<unsigned long long>(fallback));
    return fallback;
  }
  return value;
}

uint64_t mix(uint64_t value) {  // splitmix64
  value += 0x9e3779b97f4a7c15ULL;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9ULL;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebULL;
  return value ^ (value >> 31);
}

void after_fork_in_child() {
  // Worker threads and the locks they may have held did not come along.
  if (g_used.load()) g_forked.store(true);
  g_settings.store(nullptr);  // ranks started by fork may get their own settings
}

__attribute__((constructor)) void watch_forks() {
  pthread_atfork(nullptr, nullptr, after_fork_in_child);
}

}  // namespace

const Settings* settings() {
  const Settings* found = g_settings.load(std::memory_order_acquire);
  if (found != nullptr) return found;
  auto* fresh = new Settings;
  fresh->strict = number("XSD_STRICT", 1, 1) != 0;
  fresh->delay_seed = number("XSD_DELAY_SEED", 0, UINT64_MAX);
  fresh->delay_max_us = static_cast<uint32_t>(number("XSD_DELAY_MAX_US", 2000, 10000000));
  fresh->wait_timeout_ms = static_cast<uint32_t>(number("XSD_WAIT_TIMEOUT_MS", 20000, INT_MAX));
  fresh->device_count = static_cast<int32_t>(number("XSD_DEVICE_COUNT", 16, 1024));
  fresh->memory_bytes = number("XSD_MEMORY_BYTES", 64ull << 30, UINT64_MAX / 2);
  const Settings* expected = nullptr;
  if (g_settings.compare_exchange_strong(expected, fresh)) return fresh;
  delete fresh;
  return expected;
}

int enter() {
  if (xsdForked()) return kInternal;
  xsdMarkUsed();
  return kOk;
}

}  // namespace xsd

using namespace xsd;

const XsdSettings* xsdSettings() { return settings(); }

void xsdMarkUsed() {
  if (!g_used.load(std::memory_order_relaxed)) g_used.store(true);
}

int xsdForked() {
  if (!g_forked.load(std::memory_order_relaxed)) return 0;
  xsdSetError(
      "EE1001: this process was forked after its parent had used the device; its streams do not "
      "exist "
      "here. Fork before the first device call, or start a new program");
  return 1;
}

void xsdDelaySalt(uint32_t salt) { g_salt.store(salt); }

void xsdDelay(uint32_t site) {
  const XsdSettings* settings = xsdSettings();
  if (settings->delay_seed == 0 || settings->delay_max_us == 0) return;
  // Counted per thread: what one stream sees does not depend on how the others are scheduled.
  static thread_local uint64_t turn = 0;
  const uint64_t where = (static_cast<uint64_t>(g_salt.load()) << 32) | site;
  const uint64_t draw = mix(settings->delay_seed ^ mix(where ^ mix(++turn)));
  if (draw & 1) return;  // half of the tasks start at once, so that orders really differ
  const uint64_t pause_us = (draw >> 8) % (settings->delay_max_us + 1ULL);
  std::this_thread::sleep_for(std::chrono::microseconds(pause_us));
}

void xsdSetWaitHook(void (*hook)()) { g_wait_hook.store(hook); }

int xsdWait(int (*ready)(void*), void* arg) {
  if (ready == nullptr) return 1;
  const auto limit = std::chrono::milliseconds(xsdSettings()->wait_timeout_ms);
  const auto start = Clock::now();
  auto next_hook = start + std::chrono::milliseconds(2);
  for (uint64_t spin = 0;; ++spin) {
    if (ready(arg)) return 0;
    // More ranks than cores: give the processor away at once, and sleep when it takes long.
    if (spin < 256) {
      sched_yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(spin < 2048 ? 20 : 200));
    }
    const auto now = Clock::now();
    if (now >= next_hook) {
      next_hook = now + std::chrono::milliseconds(5);
      if (auto hook = g_wait_hook.load()) hook();
    }
    if (now - start >= limit) return ready(arg) ? 0 : 1;
  }
}
