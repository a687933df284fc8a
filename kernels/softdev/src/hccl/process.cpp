// SPDX-License-Identifier: Apache-2.0
// Other processes: are they still there, and what did dead ones leave behind?
#include <dirent.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <random>

#include "group.h"

namespace xsd {
namespace {

constexpr time_t kStaleSeconds = 60;

// State letter and start time from /proc/<pid>/stat. False when there is no such process.
bool read_stat(int32_t pid, char* state, uint64_t* started) {
  char path[64];
  std::snprintf(path, sizeof path, "/proc/%d/stat", pid);
  const int file = ::open(path, O_RDONLY | O_CLOEXEC);
  if (file < 0) return false;
  char text[1024];
  const ssize_t n = ::read(file, text, sizeof text - 1);
  ::close(file);
  if (n <= 0) return false;
  text[n] = '\0';
  const char* at = std::strrchr(text, ')');  // the name before it may hold anything
  if (at == nullptr) return false;
  *started = 0;
  unsigned long long start = 0;
  const int found = std::sscanf(
      at + 1, " %c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu",
      state, &start);
  *started = start;
  return found == 2;
}

const char* setting(const char* name, const char* fallback) {
  const char* text = std::getenv(name);
  return text != nullptr && *text != '\0' ? text : fallback;
}

// Does a process that joined this group still live?
bool in_use(int file, uint64_t bytes) {
  if (bytes < sizeof(Header)) return false;
  void* mapped = ::mmap(nullptr, sizeof(Header), PROT_READ, MAP_SHARED, file, 0);
  if (mapped == MAP_FAILED) return true;
  const auto* head = static_cast<const Header*>(mapped);
  bool found = false;
  for (uint32_t r = 0; r < kMaxRanks && !found; ++r) {
    const RankSlot& slot = head->ranks[r];
    found = slot.state.load() == static_cast<uint32_t>(RankState::kAttached) &&
            !process_gone(slot.pid.load(), slot.started.load());
  }
  ::munmap(mapped, sizeof(Header));
  return found;
}

// A group whose ranks were all killed before it was complete leaves its file. When its maker and
// all who joined are dead and it is not brand new, it goes.
void sweep(const std::string& directory, const std::string& prefix) {
  DIR* listing = ::opendir(directory.c_str());
  if (listing == nullptr) return;
  while (const dirent* entry = ::readdir(listing)) {
    int maker = 0;
    unsigned long long started = 0;
    if (std::strncmp(entry->d_name, prefix.c_str(), prefix.size()) != 0) continue;
    if (std::sscanf(entry->d_name + prefix.size(), "%d-%llx-", &maker, &started) != 2) continue;
    if (!process_gone(maker, started)) continue;
    const std::string path = directory + "/" + entry->d_name;
    const int file = ::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW);
    if (file < 0) continue;
    struct stat facts{};
    if (::fstat(file, &facts) == 0 && ::time(nullptr) - facts.st_mtime > kStaleSeconds &&
        !in_use(file, static_cast<uint64_t>(facts.st_size))) {
      ::unlink(path.c_str());
    }
    ::close(file);
  }
  ::closedir(listing);
}

}  // namespace

uint64_t process_start(int32_t pid) {
  char state = 0;
  uint64_t started = 0;
  return read_stat(pid, &state, &started) ? started : 0;
}

bool process_gone(int32_t pid, uint64_t started) {
  char state = 0;
  uint64_t now = 0;
  if (!read_stat(pid, &state, &now)) return true;
  return state == 'Z' || state == 'X' || (started != 0 && now != started);
}

std::string new_group_path() {
  static std::atomic<uint32_t> counter{0};
  const std::string directory = setting("XSD_SHM_DIR", "/dev/shm");
  std::string prefix = setting("XSD_SHM_PREFIX", "xsd-");
  for (char& letter : prefix) {
    if (letter == '/') letter = '_';
  }
  sweep(directory, prefix);
  const int32_t pid = ::getpid();
  char name[96];
  std::snprintf(name, sizeof name, "%d-%llx-%x-%08x", pid,
                static_cast<unsigned long long>(process_start(pid)), counter.fetch_add(1),
                std::random_device{}());
  return directory + "/" + prefix + name;
}

HcclResult hccl_fail(HcclResult code, const char* format, ...) {
  char text[768];
  va_list args;
  va_start(args, format);
  std::vsnprintf(text, sizeof text, format, args);
  va_end(args);
  xsdSetError("EI9999: %s", text);
  return code;
}

}  // namespace xsd
