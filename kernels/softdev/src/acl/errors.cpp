// SPDX-License-Identifier: Apache-2.0
// Error texts: one per thread for the caller, one per worker for the task that is failing.
#include <cstdarg>
#include <cstdio>

#include "internal.h"

namespace xsd {
namespace {

thread_local std::string t_error;     // not yet asked for
thread_local std::string t_returned;  // what the caller's pointer refers to
thread_local std::string t_task;

std::string format_text(const char* format, va_list args) {
  char text[1024];
  std::vsnprintf(text, sizeof text, format, args);
  return text;
}

}  // namespace

int fail(int code, const char* format, ...) {
  va_list args;
  va_start(args, format);
  t_error = format_text(format, args);
  va_end(args);
  return code;
}

std::string take_task_error() {
  std::string text;
  text.swap(t_task);
  return text;
}

}  // namespace xsd

using namespace xsd;

void xsdSetError(const char* format, ...) {
  if (format == nullptr) return;
  va_list args;
  va_start(args, format);
  t_error = format_text(format, args);
  va_end(args);
}

void xsdTaskError(const char* format, ...) {
  if (format == nullptr) return;
  va_list args;
  va_start(args, format);
  t_task = format_text(format, args);
  va_end(args);
}

const char* xsdTaskErrorText() { return t_task.c_str(); }

const char* aclGetRecentErrMsg() {
  if (t_error.empty()) return nullptr;
  t_returned.swap(t_error);
  t_error.clear();
  return t_returned.c_str();
}
