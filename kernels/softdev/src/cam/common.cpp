// SPDX-License-Identifier: Apache-2.0
// Groups, argument checks and number formats of the CAM operator library.
#include <cstdlib>
#include <cstring>

#include "acl_rt.h"
#include "cam.h"
#include "hccl.h"

namespace cam {

int find_group(const char* op, const char* name, Group* group) {
  if (name == nullptr || *name == '\0') {
    xsdSetError("%s: the group name is empty; pass the name of an HCCL communicator", op);
    return kErrParam;
  }
  HcclComm comm = nullptr;
  if (HcclCommGetHandleWithName(name, &comm) != 0 || comm == nullptr) {
    xsdSetError(
        "%s: no communicator named \"%s\" in this process; create it before the operator is "
        "prepared",
        op, name);
    return kErrTiling;
  }
  void* buffer = nullptr;
  uint64_t bytes = 0;
  if (HcclGetRankId(comm, &group->rank) != 0 || HcclGetRankSize(comm, &group->size) != 0 ||
      HcclGetHcclBuffer(comm, &buffer, &bytes) != 0 || bytes / 2 <= kControlBytes) {
    xsdSetError("%s: the communicator \"%s\" has no usable window", op, name);
    return kErrTiling;
  }
  group->name = name;
  group->comm = comm;
  group->window_bytes = bytes / 2 - kControlBytes;  // the operators use the first half (winIn) only
  group->window.resize(group->size);
  for (uint32_t r = 0; r < group->size; ++r) {
    void* peer = buffer;
    uint64_t peer_bytes = bytes;
    if (r != group->rank && HcclGetRemoteIpcHcclBuf(comm, r, &peer, &peer_bytes) != 0) {
      xsdSetError("%s: the window of rank %u of \"%s\" is not mapped", op, r, name);
      return kErrTiling;
    }
    group->window[r] = static_cast<char*>(peer);
  }
  return 0;
}

namespace {
struct SpinState {
  const Group* group;
  int (*ready)(void*);
  void* arg;
};
int spin_ready(void* p) {
  auto* s = static_cast<SpinState*>(p);
  return load32(&s->group->own()->abort_word) != 0 || s->ready(s->arg);
}
}  // namespace

int spin(const Run& run, uint32_t peer, const char* what, int (*ready)(void*), void* arg) {
  const Group& group = run.group();
  SpinState state{&group, ready, arg};
  const std::string text = std::string(run.op()) + " on group " + group.name + ", rank " +
                           std::to_string(group.rank) + ", waiting for " + what;
  const int code = xsdWindowWait(run.hold(), peer, text.c_str(), spin_ready, &state);
  const uint32_t word = load32(&group.own()->abort_word);
  if (word == 0) return code;
  xsdTaskError("%s: aborted by rank %u, reason %u", text.c_str(), (word & 0xffff) - 1, word >> 16);
  return kTaskRemote;
}

int64_t View::numel() const {
  int64_t n = 1;
  for (int64_t d : dims) n *= d;
  return n;
}

View Args::tensor(const aclTensor* t, const char* name, std::vector<aclDataType> dtypes,
                  std::vector<int64_t> dims) {
  View view;
  if (status_ != 0) return view;
  if (t == nullptr) {
    xsdSetError("%s: %s must not be NULL", op_, name);
    status_ = kErrParamNull;
    return view;
  }
  if (xsdTensorAlive(t) == 0) {
    xsdSetError("%s: %s is not a live aclTensor", op_, name);
    status_ = kErrParam;
    return view;
  }
  bool dtype_ok = dtypes.empty();
  for (aclDataType d : dtypes) dtype_ok |= d == t->dtype;
  bool shape_ok = dims.empty() || dims.size() == t->view_dims.size();
  for (size_t i = 0; shape_ok && i < dims.size(); ++i)
    shape_ok = dims[i] < 0 || dims[i] == t->view_dims[i];
  int64_t step = 1;
  bool contiguous = true;
  for (size_t i = t->view_dims.size(); i-- > 0;) {
    contiguous &= t->view_dims[i] <= 1 || t->strides[i] == step;
    step *= t->view_dims[i];
  }
  if (!dtype_ok || !shape_ok || !contiguous) {
    std::string got = "[", want = "[";
    for (int64_t d : t->view_dims) got += std::to_string(d) + " ";
    for (int64_t d : dims) want += (d < 0 ? std::string("any") : std::to_string(d)) + " ";
    xsdSetError(
        "%s: %s has dtype %d, shape %s], contiguous %d; allowed: dtype %d.., shape %s], contiguous",
        op_, name, t->dtype, got.c_str(), contiguous, dtypes.empty() ? -1 : dtypes[0],
        want.c_str());
    status_ = kErrParam;
    return view;
  }
  view.dims = t->view_dims;
  view.dtype = t->dtype;
  view.data =
      static_cast<char*>(t->data) + t->offset * static_cast<int64_t>(xsdDtypeBits(t->dtype) / 8);
  if (t->data == nullptr && view.numel() != 0) {
    xsdSetError("%s: %s has no storage", op_, name);
    status_ = kErrParamNull;
  } else if (xsdSettings()->strict &&
             xsdCheckRange(view.data,
                           static_cast<uint64_t>(view.numel()) * xsdDtypeBits(t->dtype) / 8) < 0) {
    xsdSetError("%s: %s runs over the end of its allocation", op_, name);
    status_ = kErrParam;
  }
  return view;
}

void Args::range(const char* name, int64_t value, int64_t low, int64_t high) {
  if (status_ != 0 || (value >= low && value <= high)) return;
  xsdSetError("%s: %s is %lld; allowed: %lld..%lld", op_, name, static_cast<long long>(value),
              static_cast<long long>(low), static_cast<long long>(high));
  status_ = kErrParam;
}

void Args::require(bool ok, const char* sentence) {
  if (status_ != 0 || ok) return;
  xsdSetError("%s: %s", op_, sentence);
  status_ = kErrParam;
}

void Args::group(const char* name, Group* group) {
  if (status_ == 0) status_ = find_group(op_, name, group);
}

void Args::window(uint64_t need, const Group& group, const char* part) {
  if (status_ != 0 || need <= group.window_bytes) return;
  xsdSetError(
      "%s: the %s needs %llu window bytes, group %s has %llu; raise the communicator's buffer size",
      op_, part, static_cast<unsigned long long>(need), group.name.c_str(),
      static_cast<unsigned long long>(group.window_bytes));
  status_ = kErrTiling;
}

int32_t calling_device(const char* op, int* status) {
  int32_t device = -1;
  if (*status == 0 && aclrtGetDevice(&device) != 0) {
    xsdSetError("%s: no device is set on the calling thread; call aclrtSetDevice first", op);
    *status = kErrParam;
  }
  return device;
}

namespace {
float half_to_float(uint16_t h) {
  uint32_t sign = (h & 0x8000u) << 16, exponent = (h >> 10) & 31, mantissa = h & 0x3ff, bits;
  if (exponent == 0) {
    float v = static_cast<float>(mantissa) * 5.9604644775390625e-8f;
    return sign ? -v : v;
  }
  bits = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | (mantissa << 13);
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}
uint16_t float_to_half(float v) {
  _Float16 h = static_cast<_Float16>(v);
  uint16_t bits;
  std::memcpy(&bits, &h, 2);
  return bits;
}
}  // namespace

float to_float(const char* p, aclDataType t, int64_t i) {
  uint16_t half;
  uint32_t bits;
  float v;
  switch (t) {
    case ACL_BF16:
      std::memcpy(&half, p + 2 * i, 2);
      bits = static_cast<uint32_t>(half) << 16;
      std::memcpy(&v, &bits, 4);
      return v;
    case ACL_FLOAT16:
      std::memcpy(&half, p + 2 * i, 2);
      return half_to_float(half);
    case ACL_INT8:
      return static_cast<float>(reinterpret_cast<const int8_t*>(p)[i]);
    default:
      std::memcpy(&v, p + 4 * i, 4);
      return v;
  }
}

void from_float(char* p, aclDataType t, int64_t i, float v) {
  uint32_t bits;
  uint16_t half;
  switch (t) {
    case ACL_BF16:
      std::memcpy(&bits, &v, 4);
      if ((bits & 0x7fffffffu) <= 0x7f800000u) bits += 0x7fff + ((bits >> 16) & 1);  // nearest even
      half = static_cast<uint16_t>(bits >> 16);
      std::memcpy(p + 2 * i, &half, 2);
      return;
    case ACL_FLOAT16:
      half = float_to_half(v);
      std::memcpy(p + 2 * i, &half, 2);
      return;
    default:
      std::memcpy(p + 4 * i, &v, 4);
  }
}

}  // namespace cam
