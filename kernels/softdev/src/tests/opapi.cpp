// SPDX-License-Identifier: Apache-2.0
// The general operators called as torch_npu calls them, without it: results against loops in double,
// and what the documents do not allow refused, each refusal failing its own stream only. To be run
// under address and undefined-behaviour sanitizers.
#include <dlfcn.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "acl_rt.h"
#include "aclnn_base.h"

namespace {

using Shape = std::vector<int64_t>;
using Values = std::vector<double>;

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

#define CHECK(condition)                                                       \
  do {                                                                         \
    if (!(condition)) {                                                        \
      const char* text = aclGetRecentErrMsg();                                 \
      std::fprintf(stderr, "%s:%d: %s (%s)\n", __FILE__, __LINE__, #condition, \
                   text == nullptr ? "no text" : text);                        \
      std::abort();                                                            \
    }                                                                          \
  } while (false)

int64_t count_of(const Shape& shape) {
  int64_t count = 1;
  for (const int64_t size : shape) count *= size;
  return count;
}

size_t width_of(aclDataType type) {
  switch (type) {
    case ACL_INT64: case ACL_UINT64: return 8;
    case ACL_FLOAT: case ACL_INT32: return 4;
    case ACL_FLOAT16: case ACL_BF16: return 2;
    default: return 1;
  }
}

// A device tensor with its own memory. Fractions are kept to what bf16 holds, so that no rounding of
// ours enters a comparison.
class Tensor {
 public:
  Tensor(aclDataType type, Shape shape, const Values& values = {}, aclFormat format = ACL_FORMAT_ND)
      : type_(type), shape_(std::move(shape)), count_(count_of(shape_)) {
    const size_t bytes = std::max<size_t>(32, static_cast<size_t>(count_) * width_of(type));
    CHECK(aclrtMalloc(&data_, bytes, 0) == 0);
    for (size_t i = 0; i < values.size(); ++i) write(static_cast<int64_t>(i), values[i]);
    Shape strides(shape_.size(), 1);
    for (size_t i = shape_.size(); i-- > 1;) strides[i - 1] = strides[i] * shape_[i];
    raw = aclCreateTensor(shape_.data(), shape_.size(), type, strides.data(), 0, format, shape_.data(), shape_.size(), data_);
    CHECK(raw != nullptr);
  }
  Tensor(const Tensor&) = delete;
  ~Tensor() {
    if (!listed_) CHECK(aclDestroyTensor(raw) == 0);
    CHECK(aclrtFree(data_) == 0);
  }

  double at(int64_t i) const {
    switch (type_) {
      case ACL_FLOAT: return static_cast<float*>(data_)[i];
      case ACL_BF16: {
        const uint32_t bits = static_cast<uint32_t>(static_cast<uint16_t*>(data_)[i]) << 16;
        float value;
        std::memcpy(&value, &bits, 4);
        return value;
      }
      case ACL_INT64: return static_cast<double>(static_cast<int64_t*>(data_)[i]);
      case ACL_INT32: return static_cast<int32_t*>(data_)[i];
      case ACL_INT8: return static_cast<int8_t*>(data_)[i];
      default: return static_cast<uint8_t*>(data_)[i];
    }
  }
  void write(int64_t i, double value) {
    switch (type_) {
      case ACL_FLOAT: static_cast<float*>(data_)[i] = static_cast<float>(value); break;
      case ACL_BF16: {
        const float narrow = static_cast<float>(value);
        uint32_t bits;
        std::memcpy(&bits, &narrow, 4);
        static_cast<uint16_t*>(data_)[i] = static_cast<uint16_t>(bits >> 16);
        break;
      }
      case ACL_INT64: case ACL_UINT64: static_cast<int64_t*>(data_)[i] = static_cast<int64_t>(value); break;
      case ACL_INT32: static_cast<int32_t*>(data_)[i] = static_cast<int32_t>(value); break;
      case ACL_INT8: static_cast<int8_t*>(data_)[i] = static_cast<int8_t>(value); break;
      default: static_cast<uint8_t*>(data_)[i] = static_cast<uint8_t>(value);
    }
  }
  int64_t size() const { return count_; }

  aclTensor* raw;

 private:
  friend class List;
  aclDataType type_;
  Shape shape_;
  int64_t count_;
  void* data_ = nullptr;
  bool listed_ = false;
};

// A list owns its members' descriptors.
class List {
 public:
  explicit List(const std::vector<Tensor*>& members) {
    std::vector<const aclTensor*> raws;
    for (Tensor* member : members) {
      raws.push_back(member->raw);
      member->listed_ = true;
    }
    raw = aclCreateTensorList(raws.data(), raws.size());
    CHECK(raw != nullptr);
  }
  List(const List&) = delete;
  ~List() { CHECK(aclDestroyTensorList(raw) == 0); }
  aclTensorList* raw;
};

// Both phases on a stream of its own; the code of whichever said no, 0 when the work was done.
template <typename... A>
int call(const char* op, A... args) {
  using First = int (*)(A..., uint64_t*, aclOpExecutor**);
  using Second = int (*)(void*, uint64_t, aclOpExecutor*, aclrtStream);
  const auto first = reinterpret_cast<First>(dlsym(RTLD_DEFAULT, (std::string("aclnn") + op + "GetWorkspaceSize").c_str()));
  const auto second = reinterpret_cast<Second>(dlsym(RTLD_DEFAULT, (std::string("aclnn") + op).c_str()));
  CHECK(first != nullptr && second != nullptr);
  uint64_t bytes = 0;
  aclOpExecutor* executor = nullptr;
  int status = first(args..., &bytes, &executor);
  if (status != 0) return status;
  aclrtStream stream = nullptr;
  CHECK(aclrtCreateStream(&stream) == 0);
  status = second(nullptr, bytes, executor, stream);
  if (status == 0) status = aclrtSynchronizeStream(stream);
  CHECK(aclrtDestroyStream(stream) == 0);
  return status;
}

aclTensor* const kNone = nullptr;
aclTensorList* const kNoList = nullptr;
aclIntArray* const kNoArray = nullptr;

Values ramp(int64_t count, double step, double start) {
  Values values;
  for (int64_t i = 0; i < count; ++i) values.push_back(start + step * static_cast<double>(i % 13));
  return values;
}

bool near(double got, double want, double allowed) { return std::fabs(got - want) <= allowed * (1 + std::fabs(want)); }

double silu(double x) { return x / (1 + std::exp(-x)); }

// ---- elementary operators -------------------------------------------------------------------

void elementary() {
  Tensor a(ACL_FLOAT, {3, 5}, ramp(15, 0.5, -2)), b(ACL_FLOAT, {3, 5}, ramp(15, 0.25, 1)), out(ACL_FLOAT, {3, 5});
  float two = 2;
  aclScalar* alpha = aclCreateScalar(&two, ACL_FLOAT);
  CHECK(call("Add", a.raw, b.raw, alpha, out.raw) == 0);
  for (int64_t i = 0; i < 15; ++i) CHECK(out.at(i) == a.at(i) + 2 * b.at(i));
  CHECK(call("Mul", a.raw, b.raw, out.raw) == 0 && out.at(4) == a.at(4) * b.at(4));
  CHECK(call("NanToNum", a.raw, 0.0F, 1.0F, -1.0F, out.raw) == 0 && out.at(7) == a.at(7));
  CHECK(call("Softmax", a.raw, int64_t{1}, out.raw) == 0);
  double total = 0;
  for (int64_t i = 5; i < 10; ++i) total += out.at(i);
  CHECK(near(total, 1, 1e-6));
  CHECK(aclDestroyScalar(alpha) == 0);

  Tensor joined(ACL_FLOAT, {6, 5});
  {
    Tensor left(ACL_FLOAT, {3, 5}, ramp(15, 0.5, -2)), right(ACL_FLOAT, {3, 5}, ramp(15, 0.25, 1));
    const List parts({&left, &right});
    CHECK(call("Cat", parts.raw, int64_t{0}, joined.raw) == 0);
  }
  for (int64_t i = 0; i < 15; ++i) CHECK(joined.at(i) == a.at(i) && joined.at(15 + i) == b.at(i));

  Tensor keys(ACL_INT64, {7}, {3, 1, 2, 1, 0, 3, 1}), values(ACL_INT64, {7}), order(ACL_INT64, {7});
  CHECK(call("Sort", keys.raw, true, int64_t{0}, false, values.raw, order.raw) == 0);
  const Values sorted{0, 1, 1, 1, 2, 3, 3}, from{4, 1, 3, 6, 2, 0, 5};
  for (int64_t i = 0; i < 7; ++i) CHECK(values.at(i) == sorted[static_cast<size_t>(i)] && order.at(i) == from[static_cast<size_t>(i)]);

  Tensor index(ACL_INT32, {2}, {2, 0}), picked(ACL_FLOAT, {2, 5});
  CHECK(call("IndexSelect", a.raw, int64_t{0}, index.raw, picked.raw) == 0 && picked.at(0) == a.at(10) && picked.at(9) == a.at(4));
  Tensor outside(ACL_INT32, {2}, {2, 3});
  CHECK(call("IndexSelect", a.raw, int64_t{0}, outside.raw, picked.raw) != 0);

  Tensor mask(ACL_BOOL, {3, 5}, {1, 0, 1}), chosen(ACL_FLOAT, {15});
  for (int64_t i = 3; i < 15; ++i) mask.write(i, 0);
  CHECK(call("MaskedSelect", a.raw, mask.raw, chosen.raw) == 0 && chosen.at(0) == a.at(0) && chosen.at(1) == a.at(2));
  int64_t* dims = nullptr;
  uint64_t rank = 0;
  CHECK(aclGetViewShape(chosen.raw, &dims, &rank) == 0 && rank == 1 && dims[0] == 2);
  delete[] dims;

  CHECK(call("Add", a.raw, b.raw, static_cast<aclScalar*>(nullptr), out.raw) != 0);
  Tensor other(ACL_FLOAT, {4});
  CHECK(call("Mul", a.raw, other.raw, out.raw) != 0);
}

// ---- routing ---------------------------------------------------------------------------------

void routing() {
  const int64_t tokens = 4, k = 2, hidden = 8, experts = 5;
  Tensor x(ACL_BF16, {tokens, hidden}, ramp(tokens * hidden, 0.5, -3)), ids(ACL_INT32, {tokens, k}, {3, 0, 4, 3, 0, 1, 3, 4});
  Tensor rows(ACL_BF16, {tokens * k, hidden}), places(ACL_INT32, {tokens * k}), counts(ACL_INT64, {experts}), scale(ACL_FLOAT, {tokens * k});
  const int64_t whole[] = {0, experts}, part[] = {3, 5};
  aclIntArray *all = aclCreateIntArray(whole, 2), *some = aclCreateIntArray(part, 2);
  const auto route = [&](int64_t active, int64_t drop, int64_t type, bool flag, int64_t quant, aclIntArray* range, int64_t kind,
                         Tensor& given, Tensor& count) {
    return call("MoeInitRoutingV3", x.raw, given.raw, kNone, kNone, active, int64_t{-1}, experts, drop, type, flag, quant, range,
                kind, rows.raw, places.raw, count.raw, scale.raw);
  };
  CHECK(route(8, 0, 1, true, -1, all, 0, ids, counts) == 0);
  const Values want_places{3, 0, 6, 4, 1, 2, 5, 7}, want_counts{2, 1, 0, 3, 2};
  for (int64_t i = 0; i < 8; ++i) {
    const auto place = static_cast<int64_t>(want_places[static_cast<size_t>(i)]);
    CHECK(places.at(i) == static_cast<double>(place));
    for (int64_t h = 0; h < hidden; ++h) CHECK(rows.at(place * hidden + h) == x.at(i / k * hidden + h));
  }
  for (int64_t e = 0; e < experts; ++e) CHECK(counts.at(e) == want_counts[static_cast<size_t>(e)]);

  // Experts 3 and 4 only: the other slots have no place, and their rows are not written.
  Tensor two(ACL_INT64, {2});
  CHECK(route(8, 0, 1, true, -1, some, 0, ids, two) == 0 && two.at(0) == 3 && two.at(1) == 2);
  const Values gathered{0, -1, 3, 1, -1, -1, 2, 4};
  for (int64_t i = 0; i < 8; ++i) CHECK(places.at(i) == gathered[static_cast<size_t>(i)]);
  CHECK(route(8, 0, 1, true, -1, some, 1, ids, two) == 0 && places.at(0) == 0 && places.at(1) == 3 && places.at(4) == 7);
  // Pairs of expert and count, those without a token left out.
  Tensor pairs(ACL_INT64, {experts, 2});
  CHECK(route(8, 0, 2, true, -1, all, 0, ids, pairs) == 0 && pairs.at(4) == 3 && pairs.at(5) == 3 && pairs.at(8) == 0);

  // What releases do not all allow, or what is not here, is refused.
  CHECK(route(0, 0, 1, true, -1, all, 0, ids, counts) != 0);
  CHECK(route(8, 1, 1, true, -1, all, 0, ids, counts) != 0);
  CHECK(route(8, 0, 0, true, -1, all, 0, ids, counts) != 0);
  CHECK(route(8, 0, 1, false, -1, all, 0, ids, counts) != 0);
  CHECK(route(8, 0, 1, true, 1, all, 0, ids, counts) != 0);
  CHECK(route(8, 0, 1, true, -1, kNoArray, 0, ids, counts) != 0);
  CHECK(route(8, 0, 1, true, -1, all, 2, ids, counts) != 0);
  Tensor beyond(ACL_INT32, {tokens, k}, {3, 0, 4, 3, 0, 1, 3, 5}), wide(ACL_INT64, {tokens, k}, {3, 0, 4, 3, 0, 1, 3, 4});
  CHECK(route(8, 0, 1, true, -1, all, 0, beyond, counts) != 0);
  CHECK(route(8, 0, 1, true, -1, all, 0, wide, counts) != 0);
  CHECK(aclDestroyIntArray(all) == 0 && aclDestroyIntArray(some) == 0);

  // Back again: the weighted sum over a token's slots.
  Tensor indices(ACL_INT32, {8}, want_places), probs(ACL_FLOAT, {tokens, k}, ramp(8, 0.25, 0.5)), sums(ACL_BF16, {tokens, hidden});
  CHECK(call("MoeTokenUnpermute", rows.raw, indices.raw, probs.raw, true, kNoArray, sums.raw) != 0);
  Tensor moved(ACL_FLOAT, {8, hidden}, ramp(8 * hidden, 0.5, -3)), exact(ACL_FLOAT, {tokens, hidden});
  CHECK(call("MoeTokenUnpermute", moved.raw, indices.raw, probs.raw, false, kNoArray, exact.raw) == 0);
  for (int64_t i = 0; i < tokens * hidden; ++i) {
    double want = 0;
    for (int64_t j = 0; j < k; ++j) {
      const auto place = static_cast<int64_t>(want_places[static_cast<size_t>(i / hidden * k + j)]);
      want += probs.at(i / hidden * k + j) * moved.at(place * hidden + i % hidden);
    }
    CHECK(near(exact.at(i), want, 1e-6));
  }
  Tensor repeated(ACL_INT32, {8}, {0, 1, 2, 3, 4, 5, 6, 6}), negative(ACL_INT32, {8}, {0, 1, 2, 3, 4, 5, 6, -1});
  CHECK(call("MoeTokenUnpermute", moved.raw, repeated.raw, probs.raw, false, kNoArray, exact.raw) != 0);
  CHECK(call("MoeTokenUnpermute", moved.raw, negative.raw, probs.raw, false, kNoArray, exact.raw) != 0);

  Tensor logits(ACL_FLOAT, {3, 4}, {0, 3, 1, 2, 2, 0, 3, 1, 1, 2, 0, 3}), best(ACL_FLOAT, {3, 2}), which(ACL_INT32, {3, 2}), row(ACL_INT32, {3, 2});
  Tensor finished(ACL_BOOL, {3}, {0, 1, 0});
  CHECK(call("MoeGatingTopKSoftmax", logits.raw, finished.raw, int64_t{2}, best.raw, which.raw, row.raw) == 0);
  const Values chosen{1, 3, 4, 4, 3, 1}, rowed{0, 3, 1, 4, 2, 5};
  double total = 0;
  for (int64_t e = 0; e < 4; ++e) total += std::exp(static_cast<double>(e));
  for (int64_t i = 0; i < 6; ++i) {
    CHECK(which.at(i) == chosen[static_cast<size_t>(i)] && row.at(i) == rowed[static_cast<size_t>(i)]);
    CHECK(near(best.at(i), std::exp(i % 2 == 0 ? 3.0 : 2.0) / total, 1e-6));
  }
  CHECK(call("MoeGatingTopKSoftmax", logits.raw, kNone, int64_t{5}, best.raw, which.raw, row.raw) != 0);
}

// ---- grouped products ------------------------------------------------------------------------

struct Product {
  Tensor *x, *weight, *groups, *out, *scale = nullptr, *per_token = nullptr, *bias = nullptr;
  int64_t split = 3, type = 0, list = 1, act = 0;
};

int grouped(const Product& p, bool nz = false, int64_t group_size = 0) {
  const List x({p.x}), weight({p.weight}), out({p.out});
  std::vector<List*> made;
  const auto optional = [&](Tensor* tensor) -> aclTensorList* {
    if (tensor == nullptr) return nullptr;
    made.push_back(new List({tensor}));
    return made.back()->raw;
  };
  aclTensorList *bias = optional(p.bias), *scale = optional(p.scale), *per_token = optional(p.per_token);
  const int status =
      nz ? call("GroupedMatmulWeightNz", x.raw, weight.raw, bias, scale, kNoList, kNoList, kNoList, per_token, p.groups->raw,
                kNoList, kNoList, kNoList, p.split, p.type, p.list, p.act, kNoArray, group_size, out.raw, kNoList, kNoList)
         : call("GroupedMatmulV5", x.raw, weight.raw, bias, scale, kNoList, kNoList, kNoList, per_token, p.groups->raw, kNoList,
                kNoList, kNoList, p.split, p.type, p.list, p.act, kNoArray, out.raw, kNoList, kNoList);
  for (List* list : made) delete list;
  return status;
}

// A list destroys its members' descriptors, so each call gets tensors of its own.
using Change = std::function<void(Product&)>;

int plain(const Change& change, Values* result = nullptr) {
  const int64_t m = 5, k = 6, n = 3;
  Tensor x(ACL_FLOAT, {m, k}, ramp(m * k, 0.5, -2)), weight(ACL_FLOAT, {2, k, n}, ramp(2 * k * n, 0.25, -1)), out(ACL_FLOAT, {m, n});
  Tensor sizes(ACL_INT64, {2}, {3, 2});
  Product p{&x, &weight, &sizes, &out};
  change(p);
  const int status = grouped(p);
  if (status == 0 && result != nullptr) {
    for (int64_t i = 0; i < m * n; ++i) {
      const int64_t row = i / n, expert = row < 3 ? 0 : 1;
      double want = 0;
      for (int64_t j = 0; j < k; ++j) want += x.at(row * k + j) * weight.at((expert * k + j) * n + i % n);
      CHECK(near(out.at(i), want, 1e-6));
      result->push_back(out.at(i));
    }
  }
  return status;
}

void plain_products() {
  Values by_size, by_end;
  Tensor ends(ACL_INT64, {2}, {3, 5}), one(ACL_INT64, {1}, {5}), long_sizes(ACL_INT64, {2}, {3, 3}), negative(ACL_INT64, {2}, {-1, 3});
  Tensor narrow(ACL_INT32, {2}, {3, 2});
  CHECK(plain([](Product&) {}, &by_size) == 0);
  CHECK(plain([&](Product& p) { p.groups = &ends; p.list = 0; }, &by_end) == 0 && by_end == by_size);
  for (const int64_t list : {0, 1}) {
    Tensor single(ACL_FLOAT, {1, 6, 3}, ramp(18, 0.25, -1));
    CHECK((plain([&](Product& p) { p.weight = &single; p.groups = &one; p.list = list; }) == 0) == (list == 0));
  }
  CHECK(plain([](Product& p) { p.split = 0; }) != 0);
  CHECK(plain([](Product& p) { p.type = 2; }) != 0);
  CHECK(plain([](Product& p) { p.list = 2; }) != 0);
  CHECK(plain([](Product& p) { p.act = 5; }) != 0);
  CHECK(plain([&](Product& p) { p.groups = &one; }) != 0);
  CHECK(plain([&](Product& p) { p.groups = &long_sizes; }) != 0);
  CHECK(plain([&](Product& p) { p.groups = &negative; }) != 0);
  CHECK(plain([&](Product& p) { p.groups = &narrow; }) != 0);
  Tensor bf16(ACL_BF16, {5, 3});
  CHECK(plain([&](Product& p) { p.out = &bf16; }) != 0);
}

// x [m, k] int8 through int8 weights in blocks, or through int4 packed in int32.
int integers(bool int4, const Change& change, double* worst = nullptr) {
  const int64_t m = 4, k = int4 ? 512 : 32, n = 64, experts = 2, blocks = int4 ? 64 : 32;
  Tensor x(ACL_INT8, {m, k}, ramp(m * k, 7, -50)), out(ACL_BF16, {m, n}), sizes(ACL_INT64, {2}, {1, 3});
  Tensor per_token(ACL_FLOAT, {m}, {0.5, 0.25, 1, 0.125}), bias(ACL_FLOAT, {experts, n});
  Tensor weight(int4 ? ACL_INT32 : ACL_INT8, {experts, k, int4 ? n / 8 : n}, {}, ACL_FORMAT_FRACTAL_NZ);
  Tensor scale(int4 ? ACL_UINT64 : ACL_FLOAT, int4 ? Shape{experts, k / 256, n} : Shape{experts, n});
  const auto value = [int4](int64_t e, int64_t row, int64_t column) { return (e + 3 * row + 5 * column) % (int4 ? 15 : 99) - 7; };
  const auto factor = [](int64_t e, int64_t column) { return e == 0 ? 0.5 : 0.25 * static_cast<double>(1 + column % 2); };
  const auto bits_of = [](float number) {
    uint32_t bits;
    std::memcpy(&bits, &number, 4);
    return bits;
  };
  std::vector<uint8_t> bytes(static_cast<size_t>(experts * k * n / (int4 ? 2 : 1)));
  for (int64_t e = 0; e < experts; ++e) {
    for (int64_t c = 0; c < n; ++c) {
      double sum = 0;
      for (int64_t r = 0; r < k; ++r) {
        const int64_t q = value(e, r, c);
        sum += static_cast<double>(q) * factor(e, c) * 8;
        const int64_t place = ((e * (n / blocks) + c / blocks) * (k / 16) + r / 16) * 16 * blocks + r % 16 * blocks + c % blocks;
        auto& byte = bytes[static_cast<size_t>(int4 ? place / 2 : place)];
        if (!int4) byte = static_cast<uint8_t>(q);
        else byte = static_cast<uint8_t>(byte | (q & 15) << (place % 2 * 4));
      }
      bias.write(e * n + c, sum);
      for (int64_t g = 0; g < (int4 ? k / 256 : 1); ++g) {
        const auto one = static_cast<float>(factor(e, c));
        if (int4) scale.write((e * (k / 256) + g) * n + c, static_cast<double>(bits_of(one)));
        else scale.write(e * n + c, one);
      }
    }
  }
  void* stored = nullptr;
  CHECK(aclGetRawTensorAddr(weight.raw, &stored) == 0);
  std::memcpy(stored, bytes.data(), bytes.size());
  Product p{&x, &weight, &sizes, &out, &scale, &per_token, int4 ? &bias : nullptr};
  change(p);
  const int status = grouped(p, true, int4 ? 256 : 0);
  if (status != 0 || worst == nullptr) return status;
  for (int64_t i = 0; i < m * n; ++i) {
    const int64_t row = i / n, column = i % n, e = row < 1 ? 0 : 1;
    double want = 0;
    for (int64_t j = 0; j < k; ++j) want += x.at(row * k + j) * static_cast<double>(value(e, j, column));
    want *= factor(e, column) * per_token.at(row);
    CHECK(std::isfinite(out.at(i)));  // max would pass over a NaN
    *worst = std::max(*worst, std::fabs(out.at(i) - want) / (1 + std::fabs(want)));
  }
  return status;
}

void integer_products() {
  for (const bool int4 : {false, true}) {
    double worst = 0;
    CHECK(integers(int4, [](Product&) {}, &worst) == 0 && worst <= 1.0 / 256);
    Tensor wide(ACL_FLOAT, {4, 64}), short_scale(ACL_FLOAT, {4}), long_rows(ACL_INT8, {4, 16});
    CHECK(integers(int4, [&](Product& p) { p.out = &wide; }) != 0);
    CHECK(integers(int4, [&](Product& p) { p.scale = &short_scale; }) != 0);
    CHECK(integers(int4, [&](Product& p) { p.x = &long_rows; }) != 0);
  }
  CHECK(integers(false, [](Product& p) { p.scale = nullptr; }) != 0);
  Tensor whole(ACL_INT32, {4, 64});
  CHECK(integers(false, [&](Product& p) { p.scale = p.per_token = nullptr; p.out = &whole; }) == 0 && whole.at(0) == std::rint(whole.at(0)));
  CHECK(integers(true, [](Product& p) { p.bias = nullptr; }) != 0);
  CHECK(integers(true, [](Product& p) { p.per_token = nullptr; }) != 0);
}

// ---- quantisation, activation, attention -----------------------------------------------------

void quantisation() {
  Tensor x(ACL_BF16, {3, 4}, {1, -2, 4, 0.5, 0, 0, 0, 0, kNaN, 1, 2, 3}), y(ACL_INT8, {3, 4}), scale(ACL_FLOAT, {3});
  const int64_t int8 = ACL_INT8;
  CHECK(call("DynamicQuantV2", x.raw, kNone, kNone, int8, y.raw, scale.raw, kNone) == 0);
  const Values want{32, -64, 127, 16};
  for (int64_t i = 0; i < 4; ++i) CHECK(y.at(i) == want[static_cast<size_t>(i)]);
  CHECK(near(scale.at(0), 4.0 / 127, 1e-6) && scale.at(1) == 0 && std::isnan(scale.at(2)));
  Tensor wide(ACL_FLOAT, {3, 4}, ramp(12, 0.5, -1)), smooth(ACL_BF16, {4}, {1, 1, 1, 1});
  CHECK(call("DynamicQuantV2", wide.raw, kNone, kNone, int8, y.raw, scale.raw, kNone) != 0);
  CHECK(call("DynamicQuantV2", x.raw, smooth.raw, kNone, int8, y.raw, scale.raw, kNone) != 0);

  const int64_t tokens = 3, width = 64;
  Tensor gate_up(ACL_INT32, {tokens, 2 * width}, ramp(tokens * 2 * width, 9, -60)), counts(ACL_INT64, {2}, {1, 2}), many(ACL_INT64, {2}, {3, 1});
  Tensor columns(ACL_FLOAT, {2, 2 * width}, ramp(4 * width, 0.0078125, 0.0625)), rows(ACL_FLOAT, {tokens, 1}, {0.5, 1, 0.25});
  Tensor q(ACL_INT8, {tokens, width}), qscale(ACL_FLOAT, {tokens});
  const auto fused = [&](Tensor& groups, const char* mode, bool left) {
    return call("DequantSwigluQuant", gate_up.raw, columns.raw, rows.raw, kNone, kNone, kNone, groups.raw, left, mode, q.raw, qscale.raw);
  };
  CHECK(fused(counts, "dynamic", true) == 0);
  for (int64_t t = 0; t < tokens; ++t) {
    Values act;
    double most = 0;
    for (int64_t c = 0; c < width; ++c) {
      const auto half = [&](int64_t at) { return gate_up.at(t * 2 * width + at) * columns.at((t < 1 ? 0 : 1) * 2 * width + at) * rows.at(t); };
      act.push_back(silu(half(c)) * half(width + c));
      most = std::max(most, std::fabs(act.back()));
    }
    CHECK(near(qscale.at(t), most / 127, 1e-5));
    for (int64_t c = 0; c < width; ++c) CHECK(std::fabs(q.at(t * width + c) - act[static_cast<size_t>(c)] * 127 / most) <= 0.51);
  }
  CHECK(fused(many, "dynamic", true) != 0 && fused(counts, "static", true) != 0 && fused(counts, nullptr, true) != 0);

  Tensor pair(ACL_FLOAT, {2, 6}, ramp(12, 0.5, -2)), gated(ACL_FLOAT, {2, 3}), odd(ACL_FLOAT, {2, 5}, ramp(10, 0.5, -2));
  CHECK(call("SwiGlu", pair.raw, int64_t{-1}, gated.raw) == 0 && near(gated.at(4), silu(pair.at(7)) * pair.at(10), 1e-6));
  CHECK(call("SwiGlu", odd.raw, int64_t{-1}, gated.raw) != 0);
}

void attention() {
  const int64_t heads = 2, rows = 3, columns = 4, width = 8;
  Tensor query(ACL_FLOAT, {1, heads, rows, width}, ramp(heads * rows * width, 0.25, -1)), key(ACL_FLOAT, {1, 1, columns, width}, ramp(columns * width, 0.5, -2));
  Tensor value(ACL_FLOAT, {1, 1, columns, width}, ramp(columns * width, 0.125, 0)), mask(ACL_BOOL, {rows, columns}, {0, 1, 1, 1, 0, 0, 1, 1, 0, 0, 0, 1});
  Tensor most(ACL_FLOAT, {1, heads, rows, 8}), sum(ACL_FLOAT, {1, heads, rows, 8}), out(ACL_FLOAT, {1, heads, rows, width});
  const auto attend = [&](const char* layout, double keep, int64_t sparse, aclTensor* given) {
    return call("FlashAttentionScore", query.raw, key.raw, value.raw, kNone, kNone, kNone, given, kNoArray, 0.5, keep, int64_t{2147483647},
                sparse == 2 ? int64_t{0} : int64_t{2147483647}, heads, layout, int64_t{0}, sparse, most.raw, sum.raw, kNone, out.raw);
  };
  CHECK(attend("BNSD", 1.0, 0, mask.raw) == 0);
  for (int64_t h = 0; h < heads; ++h) {
    for (int64_t r = 0; r < rows; ++r) {
      Values weights;
      double total = 0, high = -1e30;
      for (int64_t c = 0; c < columns; ++c) {
        double score = 0;
        for (int64_t d = 0; d < width; ++d) score += 0.5 * query.at((h * rows + r) * width + d) * key.at(c * width + d);
        const bool used = mask.at(r * columns + c) == 0;
        if (used) high = std::max(high, score);
        weights.push_back(used ? std::exp(score) : 0);
        total += weights.back();
      }
      CHECK(near(most.at((h * rows + r) * 8 + 3), high, 1e-5) && near(sum.at((h * rows + r) * 8), total / std::exp(high), 1e-5));
      for (int64_t d = 0; d < width; ++d) {
        double want = 0;
        for (int64_t c = 0; c < columns; ++c) want += weights[static_cast<size_t>(c)] / total * value.at(c * width + d);
        CHECK(near(out.at((h * rows + r) * width + d), want, 1e-5));
      }
    }
  }
  CHECK(attend("BNSD", 1.0, 2, mask.raw) == 0 && attend("BNSD", 1.0, 0, kNone) == 0);
  CHECK(attend("BSH", 1.0, 0, kNone) != 0 && attend("BNSD", 0.5, 0, kNone) != 0 && attend("BNSD", 1.0, 4, kNone) != 0);
}

}  // namespace

int main() {
  CHECK(aclInit(nullptr) == 0 && aclrtSetDevice(0) == 0);
  elementary();
  routing();
  plain_products();
  integer_products();
  quantisation();
  attention();
  CHECK(aclrtResetDevice(0) == 0);
  std::printf("done\n");
  return 0;
}
