// SPDX-License-Identifier: Apache-2.0
// libacl_op_compiler: compile options are kept and can be read back; operators are refused by name, for
// there is no compiler and no binary here. Front ends then use the aclnn operators.
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

#include "acl_npu.h"
#include "xsd.h"

namespace {

constexpr int kParamInvalid = 107000, kNotSupported = 207000;

std::mutex& mutex() {
  static auto& instance = *new std::mutex;
  return instance;
}

std::map<int, std::string>& options() {
  static auto& map = *new std::map<int, std::string>;
  return map;
}

int refuse(const char* call, const char* op) {
  xsdSetError("EE1006: %s: operator %s has no implementation on this device (only aclnn operators run here)",
              call, op == nullptr ? "(null)" : op);
  return kNotSupported;
}

}  // namespace

struct aclGraphDumpOption {};

aclError aclSetCompileopt(int option, const char* value) {
  if (option < 0 || value == nullptr) {
    xsdSetError("EE1003: aclSetCompileopt: option %d, value %p", option, static_cast<const void*>(value));
    return kParamInvalid;
  }
  std::lock_guard<std::mutex> lock(mutex());
  options()[option] = value;
  return 0;
}

aclError aclGetCompileopt(int option, char* value, size_t length) {
  std::lock_guard<std::mutex> lock(mutex());
  const std::string& text = options()[option];
  if (value == nullptr || length < text.size() + 1) {
    xsdSetError("EE1003: aclGetCompileopt: %zu bytes for a value of %zu", length, text.size() + 1);
    return kParamInvalid;
  }
  std::memcpy(value, text.c_str(), text.size() + 1);
  return 0;
}

size_t aclGetCompileoptSize(int option) {
  std::lock_guard<std::mutex> lock(mutex());
  return options()[option].size() + 1;
}

aclError aclopSetCompileFlag(int) { return 0; }

aclGraphDumpOption* aclCreateGraphDumpOpt() { return new aclGraphDumpOption; }

aclError aclDestroyGraphDumpOpt(const aclGraphDumpOption* option) {
  delete option;
  return 0;
}

aclError aclopCompileAndExecute(const char* op, int, const aclTensorDesc* const*, const aclDataBuffer* const*, int,
                                const aclTensorDesc* const*, aclDataBuffer* const*, const aclopAttr*, int, int,
                                const char*, aclrtStream) {
  return refuse("aclopCompileAndExecute", op);
}

aclError aclopCompileAndExecuteV2(const char* op, int, aclTensorDesc**, aclDataBuffer**, int, aclTensorDesc**,
                                  aclDataBuffer**, aclopAttr*, int, int, const char*, aclrtStream) {
  return refuse("aclopCompileAndExecuteV2", op);
}

aclError aclGenGraphAndDumpForOp(const char* op, int, const aclTensorDesc* const*, const aclDataBuffer* const*, int,
                                 const aclTensorDesc* const*, aclDataBuffer* const*, const aclopAttr*, int,
                                 const char*, const aclGraphDumpOption*) {
  return refuse("aclGenGraphAndDumpForOp", op);
}
