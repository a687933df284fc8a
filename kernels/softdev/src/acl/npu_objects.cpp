// SPDX-License-Identifier: Apache-2.0
// Descriptions of the old operator interface. They are built by front ends; nothing here runs them.
#include <map>
#include <string>
#include <vector>

#include "acl_npu.h"
#include "internal.h"

struct aclTensorDesc {
  aclDataType dtype;
  aclFormat format;
  std::vector<int64_t> dims;
  std::string name;
  int placement = 0;
};

struct aclDataBuffer {
  void* data;
  size_t size;
};

struct aclopAttr {
  std::map<std::string, std::string> values;
};

using namespace xsd;

namespace {

int set(aclopAttr* attr, const char* name, std::string value) {
  if (attr == nullptr || name == nullptr) return fail(kParamInvalid, "EE1003: aclopSetAttr: null argument");
  attr->values[name] = std::move(value);
  return kOk;
}

template <typename T>
int set_list(aclopAttr* attr, const char* name, int count, const T* values) {
  if (count < 0 || (count > 0 && values == nullptr)) {
    return fail(kParamInvalid, "EE1003: aclopSetAttrList: %d values", count);
  }
  std::string text;
  for (int i = 0; i < count; ++i) text += (i == 0 ? "" : ",") + std::to_string(values[i]);
  return set(attr, name, "[" + text + "]");
}

}  // namespace

aclTensorDesc* aclCreateTensorDesc(aclDataType dtype, int count, const int64_t* dims, aclFormat format) {
  if (count < 0 || (count > 0 && dims == nullptr)) {
    xsdSetError("EE1003: aclCreateTensorDesc: %d dimensions", count);
    return nullptr;
  }
  auto* desc = new aclTensorDesc;
  desc->dtype = dtype;
  desc->format = format;
  desc->dims.assign(dims, dims + count);
  return desc;
}

void aclDestroyTensorDesc(const aclTensorDesc* desc) { delete desc; }
aclDataType aclGetTensorDescType(const aclTensorDesc* desc) { return desc == nullptr ? ACL_DT_UNDEFINED : desc->dtype; }
aclFormat aclGetTensorDescFormat(const aclTensorDesc* desc) {
  return desc == nullptr ? ACL_FORMAT_UNDEFINED : desc->format;
}
size_t aclGetTensorDescNumDims(const aclTensorDesc* desc) { return desc == nullptr ? 0 : desc->dims.size(); }

aclError aclGetTensorDescDimV2(const aclTensorDesc* desc, size_t index, int64_t* size) {
  if (desc == nullptr || size == nullptr || index >= desc->dims.size()) {
    return fail(kParamInvalid, "EE1003: aclGetTensorDescDimV2: dimension %zu", index);
  }
  *size = desc->dims[index];
  return kOk;
}

void aclSetTensorDescName(aclTensorDesc* desc, const char* name) {
  if (desc != nullptr) desc->name = name == nullptr ? "" : name;
}

aclError aclSetTensorFormat(aclTensorDesc* desc, aclFormat format) {
  if (desc == nullptr) return fail(kParamInvalid, "EE1003: aclSetTensorFormat: desc is null");
  desc->format = format;
  return kOk;
}

aclError aclSetTensorShape(aclTensorDesc* desc, int count, const int64_t* dims) {
  if (desc == nullptr || count < 0 || (count > 0 && dims == nullptr)) {
    return fail(kParamInvalid, "EE1003: aclSetTensorShape: %d dimensions", count);
  }
  desc->dims.assign(dims, dims + count);
  return kOk;
}

aclError aclSetTensorPlaceMent(aclTensorDesc* desc, int type) {
  if (desc == nullptr || type < 0 || type > 2) {
    return fail(kParamInvalid, "EE1003: aclSetTensorPlaceMent: memType %d (0 to 2)", type);
  }
  desc->placement = type;
  return kOk;
}

aclDataBuffer* aclCreateDataBuffer(void* data, size_t size) { return new aclDataBuffer{data, size}; }
aclError aclDestroyDataBuffer(const aclDataBuffer* buffer) {
  delete buffer;
  return kOk;
}

aclopAttr* aclopCreateAttr() { return new aclopAttr; }
void aclopDestroyAttr(const aclopAttr* attr) { delete attr; }
aclError aclopSetAttrBool(aclopAttr* attr, const char* name, uint8_t value) {
  return set(attr, name, value != 0 ? "true" : "false");
}
aclError aclopSetAttrInt(aclopAttr* attr, const char* name, int64_t value) {
  return set(attr, name, std::to_string(value));
}
aclError aclopSetAttrFloat(aclopAttr* attr, const char* name, float value) {
  return set(attr, name, std::to_string(value));
}
aclError aclopSetAttrString(aclopAttr* attr, const char* name, const char* value) {
  return set(attr, name, value == nullptr ? "" : value);
}
aclError aclopSetAttrDataType(aclopAttr* attr, const char* name, aclDataType value) {
  return set(attr, name, std::to_string(static_cast<int>(value)));
}
aclError aclopSetAttrListBool(aclopAttr* attr, const char* name, int count, const uint8_t* values) {
  return set_list(attr, name, count, values);
}
aclError aclopSetAttrListInt(aclopAttr* attr, const char* name, int count, const int64_t* values) {
  return set_list(attr, name, count, values);
}
aclError aclopSetAttrListFloat(aclopAttr* attr, const char* name, int count, const float* values) {
  return set_list(attr, name, count, values);
}
aclError aclopSetAttrListListInt(aclopAttr* attr, const char* name, int lists, const int* counts,
                                 const int64_t* const values[]) {
  if (lists < 0 || (lists > 0 && (counts == nullptr || values == nullptr))) {
    return fail(kParamInvalid, "EE1003: aclopSetAttrListListInt: %d lists", lists);
  }
  for (int i = 0; i < lists; ++i) {
    const std::string key = std::string(name == nullptr ? "" : name) + "." + std::to_string(i);
    if (int code = set_list(attr, key.c_str(), counts[i], values[i])) return code;
  }
  return kOk;
}
