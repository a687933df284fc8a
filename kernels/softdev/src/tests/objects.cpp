// SPDX-License-Identifier: Apache-2.0
// Scalars, arrays, readers, sizes that do not fit, tensors and repeatable executors that move, host
// callbacks; from several threads, to be run under sanitizers.
#include <pthread.h>

#include <array>
#include <climits>
#include <memory>
#include <thread>

#include "common.h"
#include "xsd.h"

namespace {

constexpr int kThreads = 4;
constexpr int kInvalid = 161002;
constexpr int kReportTimeout = 507012, kNotSubscribed = 100035;

// Every array of `size` elements, made of a block that ends where the array ends.
void use_arrays(uint64_t size) {
  std::vector<int64_t> ints(size);
  std::vector<float> floats(size);
  auto* bools = new bool[size];
  for (uint64_t i = 0; i < size; ++i) {
    ints[i] = INT64_MIN + static_cast<int64_t>(i);
    floats[i] = 0.5f * static_cast<float>(i);
    bools[i] = i % 3 == 0;
  }
  aclIntArray* a = aclCreateIntArray(size == 0 ? nullptr : ints.data(), size);
  aclFloatArray* b = aclCreateFloatArray(size == 0 ? nullptr : floats.data(), size);
  aclBoolArray* c = aclCreateBoolArray(size == 0 ? nullptr : bools, size);
  CHECK(a != nullptr && b != nullptr && c != nullptr);
  CHECK(a->values == ints && b->values == floats && xsdFloatArrayAlive(b) == 1);
  CHECK(c->values.size() == size);
  for (uint64_t i = 0; i < size; ++i) CHECK(c->values[i] == (i % 3 == 0 ? 1 : 0));
  delete[] bools;
  uint64_t n = 99;
  CHECK(aclGetIntArraySize(a, &n) == 0 && n == size);
  CHECK(aclGetFloatArraySize(b, &n) == 0 && n == size);
  CHECK(aclGetBoolArraySize(c, &n) == 0 && n == size);
  CHECK(aclGetIntArraySize(a, nullptr) == 161001);
  CHECK(aclDestroyIntArray(a) == 0 && aclDestroyIntArray(a) == kInvalid);
  CHECK(aclDestroyFloatArray(b) == 0 && aclDestroyFloatArray(b) == kInvalid);
  CHECK(aclDestroyBoolArray(c) == 0 && aclDestroyBoolArray(c) == kInvalid);
  CHECK(xsdFloatArrayAlive(b) == 0 && aclGetIntArraySize(a, &n) == kInvalid);
  CHECK(aclCreateIntArray(nullptr, 1) == nullptr);
  CHECK(aclCreateFloatArray(floats.data(), UINT64_MAX) == nullptr);
}

template <class T>
void use_scalar(T value, aclDataType dtype) {
  auto held = std::make_unique<T>(value);
  aclScalar* made = aclCreateScalar(held.get(), dtype);
  CHECK(made != nullptr && made->dtype == dtype);
  CHECK(std::memcmp(made->bytes, &value, sizeof value) == 0);
  for (size_t i = sizeof value; i < sizeof made->bytes; ++i) CHECK(made->bytes[i] == 0);
  CHECK(aclDestroyScalar(made) == 0 && aclDestroyScalar(made) == kInvalid);
}

void use_scalars() {
  use_scalar<uint8_t>(1, ACL_BOOL);
  use_scalar<int8_t>(-3, ACL_INT8);
  use_scalar<uint16_t>(0x3f80, ACL_BF16);
  use_scalar<int32_t>(-70000, ACL_INT32);
  use_scalar<float>(0.1f, ACL_FLOAT);
  use_scalar<int64_t>(INT64_MIN, ACL_INT64);
  use_scalar<double>(0.1, ACL_DOUBLE);
  use_scalar<std::array<double, 2>>({0.1, -2}, ACL_COMPLEX128);
  float value = 1;
  CHECK(aclCreateScalar(nullptr, ACL_FLOAT) == nullptr);
  CHECK(aclCreateScalar(&value, ACL_INT4) == nullptr);
  CHECK(aclCreateScalar(&value, static_cast<aclDataType>(-5)) == nullptr);
}

aclTensor* create(const std::vector<int64_t>& dims, const std::vector<int64_t>& strides,
                  int64_t offset, const std::vector<int64_t>& storage, void* data) {
  return aclCreateTensor(dims.data(), dims.size(), ACL_FLOAT, strides.data(), offset,
                         ACL_FORMAT_ND, storage.data(), storage.size(), data);
}

void use_readers() {
  const Memory memory(4096);
  aclTensor* tensor = create({3, 4}, {8, 1}, 5, {40}, memory.data);
  CHECK(tensor != nullptr);
  int64_t *shape = nullptr, *strides = nullptr;
  uint64_t n = 0, m = 0;
  aclDataType dtype = ACL_DT_UNDEFINED;
  aclFormat format = ACL_FORMAT_NCHW;
  CHECK(aclGetViewShape(tensor, &shape, &n) == 0 && aclGetViewStrides(tensor, &strides, &m) == 0);
  CHECK(n == 2 && shape[0] == 3 && shape[1] == 4 && m == 2 && strides[0] == 8 && strides[1] == 1);
  CHECK(aclGetDataType(tensor, &dtype) == 0 && dtype == ACL_FLOAT);
  CHECK(aclGetFormat(tensor, &format) == 0 && format == ACL_FORMAT_ND);
  delete[] shape;
  delete[] strides;
  CHECK(aclDestroyTensor(tensor) == 0 && aclGetFormat(tensor, &format) == kInvalid);
  aclTensor* scalar = create({}, {}, 0, {}, memory.data);  // no dimensions: one element
  CHECK(scalar != nullptr && aclGetViewShape(scalar, &shape, &n) == 0 && n == 0);
  delete[] shape;
  CHECK(aclDestroyTensor(scalar) == 0);
}

// Sizes whose arithmetic does not fit are refused, also where a 0 hides them.
void use_absurd_sizes() {
  const Memory memory(4096);
  const int64_t big = int64_t{1} << 62;
  for (const int64_t first : {int64_t{1}, int64_t{0}, int64_t{-1}, big}) {
    CHECK(create({first, big, 8}, {1, 1, 1}, 0, {8}, memory.data) == nullptr);
    CHECK(create({8}, {1}, 0, {first, big, 8}, memory.data) == nullptr);
  }
  for (const int64_t first : {1, 0})
    CHECK(create({first, int64_t{1} << 57}, {1, 1}, 0, {8}, memory.data) == nullptr);
  CHECK(create({0}, {1}, INT64_MAX, {0}, memory.data) == nullptr);
  CHECK(create({8}, {1}, INT64_MAX, {8}, memory.data) == nullptr);
  CHECK(create({8}, {INT64_MAX}, 0, {8}, memory.data) == nullptr);
  CHECK(create({8}, {INT64_MIN}, 0, {8}, memory.data) == nullptr);
  CHECK(create({8}, {1}, -1, {8}, memory.data) == nullptr);
  CHECK(create({1000}, {1}, 25, {1024}, memory.data) == nullptr);
  aclTensor* most = create({1000}, {1}, 24, {1024}, memory.data);
  CHECK(most != nullptr && aclDestroyTensor(most) == 0);
}

void move_raw() {
  const Memory first(4096), second(4096);
  aclTensor* tensor = create({32, 16}, {16, 1}, 0, {512}, first.data);
  CHECK(tensor != nullptr);
  void* got = nullptr;
  auto* shifted = static_cast<char*>(second.data) + 2048;  // the last place that is large enough
  CHECK(aclSetRawTensorAddr(tensor, shifted) == 0);
  CHECK(aclGetRawTensorAddr(tensor, &got) == 0 && got == shifted);
  CHECK(aclSetRawTensorAddr(tensor, shifted + 32) == kInvalid);
  CHECK(aclSetRawTensorAddr(tensor, nullptr) == kInvalid);
  CHECK(aclSetRawTensorAddr(static_cast<aclTensor*>(first.data), second.data) == kInvalid);
  CHECK(aclGetRawTensorAddr(tensor, &got) == 0 && got == shifted);
  CHECK(aclDestroyTensor(tensor) == 0 && aclSetRawTensorAddr(tensor, first.data) == kInvalid);
}

// y = x + 1 over four floats; both may move.
struct AddOne {
  float *x, *y;
};
int run_add_one(void* ctx, void*, uint64_t) {
  const auto* op = static_cast<const AddOne*>(ctx);
  for (int i = 0; i < 4; ++i) op->y[i] = op->x[i] + 1;
  return 0;
}
void* clone_add_one(const void* ctx) { return new AddOne(*static_cast<const AddOne*>(ctx)); }
int move_add_one(void* ctx, int is_output, uint64_t index, void* address) {
  auto* op = static_cast<AddOne*>(ctx);
  if (index != 0) return 0;
  (is_output != 0 ? op->y : op->x) = static_cast<float*>(address);
  return 1;
}
void release_add_one(void* ctx) { delete static_cast<AddOne*>(ctx); }
constexpr XsdRebind kFollow = {clone_add_one, move_add_one};

// Each launch works on the addresses it was queued with, however often they move afterwards.
void move_executors(aclrtStream stream) {
  constexpr int kPlaces = 8;
  std::vector<Memory> x, y;
  for (int i = 0; i < kPlaces; ++i) {
    x.emplace_back(std::vector<float>(12, static_cast<float>(10 * i)));
    y.emplace_back(std::vector<float>(12, -1.0f));
  }
  auto at = [](const Memory& memory) { return static_cast<float*>(memory.data); };
  aclTensor* tensor_x = create({4}, {1}, 8, {12}, x[0].data);
  aclTensor* tensor_y = create({4}, {1}, 8, {12}, y[0].data);
  aclOpExecutor* kept = xsdExecutorCreate("add", 0, run_add_one, new AddOne{at(x[0]) + 8, at(y[0]) + 8},
                                          release_add_one);
  CHECK(aclSetInputTensorAddr(kept, 0, tensor_x, x[0].data) == kInvalid);  // not repeatable
  CHECK(aclSetAclOpExecutorRepeatable(kept) == 0);
  CHECK(aclSetInputTensorAddr(kept, 0, tensor_x, x[0].data) == kInvalid);  // cannot follow
  xsdExecutorSetRebind(kept, &kFollow);
  for (int i = 0; i < kPlaces; ++i) {
    const auto n = static_cast<size_t>(i);
    CHECK(aclSetInputTensorAddr(kept, 0, tensor_x, x[n].data) == 0);
    CHECK(aclSetOutputTensorAddr(kept, 0, tensor_y, y[n].data) == 0);
    CHECK(xsdExecutorLaunch("add", nullptr, 0, kept, stream) == 0);
    CHECK(aclSetInputTensorAddr(kept, 1, tensor_x, x[0].data) == kInvalid);
    CHECK(aclSetOutputTensorAddr(kept, 0, tensor_y, at(y[n]) + 8) == kInvalid);  // over the end
  }
  CHECK(aclDestroyAclOpExecutor(kept) == 0);  // queued launches keep what they need
  CHECK(aclSetInputTensorAddr(kept, 0, tensor_x, x[0].data) != 0);
  CHECK(aclrtSynchronizeStream(stream) == 0);
  for (int i = 0; i < kPlaces; ++i) {
    const float* out = at(y[static_cast<size_t>(i)]);
    for (int j = 0; j < 12; ++j) CHECK(out[j] == (j < 8 ? -1.0f : static_cast<float>(10 * i + 1)));
  }
  CHECK(aclDestroyTensor(tensor_x) == 0 && aclDestroyTensor(tensor_y) == 0);
}

int run_count(void* ctx, void*, uint64_t) {
  __atomic_fetch_add(reinterpret_cast<int*>(static_cast<const AddOne*>(ctx)->y), 1, __ATOMIC_RELAXED);
  return 0;
}

// Two threads launch and move one executor on streams of their own: every launch counts at one of
// the two addresses, at whichever was set last.
void share_an_executor() {
  constexpr int kRounds = 100, kApart = 32;
  const Memory counters(std::vector<int>(2 * kApart, 0));
  auto* first = static_cast<float*>(counters.data);
  aclOpExecutor* kept =
      xsdExecutorCreate("count", 0, run_count, new AddOne{nullptr, first}, release_add_one);
  xsdExecutorSetRebind(kept, &kFollow);
  CHECK(aclSetAclOpExecutorRepeatable(kept) == 0);
  std::vector<std::thread> threads;
  for (int i = 0; i < 2; ++i) {
    threads.emplace_back([=] {
      CHECK(aclrtSetDevice(0) == 0);
      aclrtStream stream = nullptr;
      CHECK(aclrtCreateStream(&stream) == 0);
      aclTensor* tensor = create({4}, {1}, 0, {4}, first);
      for (int round = 0; round < kRounds; ++round) {
        CHECK(aclSetOutputTensorAddr(kept, 0, tensor, first + kApart * i) == 0);
        CHECK(xsdExecutorLaunch("count", nullptr, 0, kept, stream) == 0);
      }
      CHECK(aclrtSynchronizeStream(stream) == 0);
      CHECK(aclDestroyTensor(tensor) == 0 && aclrtDestroyStream(stream) == 0);
    });
  }
  for (auto& thread : threads) thread.join();
  CHECK(aclDestroyAclOpExecutor(kept) == 0);
  const int* counted = static_cast<const int*>(counters.data);
  CHECK(counted[0] + counted[kApart] == 2 * kRounds);
  for (int i = 0; i < 2 * kApart; ++i) CHECK(counted[i] == 0 || i % kApart == 0);
}

struct Notes {
  std::vector<int> seen;  // by the subscribed thread alone
  std::atomic<int> handled{0}, looked{0}, late{0};
  std::atomic<bool> stop{false};
};
struct Note {
  Notes* notes;
  int number;
};
void write_note(void* data) {
  const auto* note = static_cast<const Note*>(data);
  note->notes->seen.push_back(note->number);
  note->notes->handled.store(note->number + 1);
}
// Queued behind the note: a blocking one has been handled by now.
void look_at_note(void* data) {
  const auto* note = static_cast<const Note*>(data);
  if (note->number % 2 == 0 && note->notes->handled.load() <= note->number)
    note->notes->late.fetch_add(1);
  note->notes->looked.fetch_add(1);
}

// Blocking and other callbacks of one stream, handled in order by a thread of the caller's; host
// functions on the stream's worker.
void use_callbacks() {
  CHECK(aclrtSetDevice(0) == 0);
  aclrtStream stream = nullptr;
  CHECK(aclrtCreateStream(&stream) == 0);
  Notes notes;
  std::atomic<uint64_t> number{0};
  std::atomic<bool> subscribed{false};
  std::thread handler([&] {
    number.store(static_cast<uint64_t>(pthread_self()));
    while (!subscribed.load()) std::this_thread::yield();
    while (!notes.stop.load()) {
      const int code = aclrtProcessReport(50);
      CHECK(code == 0 || code == kReportTimeout || code == kNotSubscribed);
    }
  });
  while (number.load() == 0) std::this_thread::yield();
  CHECK(aclrtLaunchCallback(write_note, &notes, ACL_CALLBACK_BLOCK, stream) != 0);  // nobody
  CHECK(aclrtSubscribeReport(number.load(), stream) == 0);
  CHECK(aclrtSubscribeReport(number.load(), stream) != 0);
  subscribed.store(true);
  std::vector<Note> queued;
  for (int i = 0; i < 20; ++i) queued.push_back({&notes, i});
  for (Note& note : queued) {
    const auto kind = note.number % 2 == 0 ? ACL_CALLBACK_BLOCK : ACL_CALLBACK_NO_BLOCK;
    CHECK(aclrtLaunchCallback(write_note, &note, kind, stream) == 0);
    CHECK(aclrtLaunchHostFunc(stream, look_at_note, &note) == 0);
  }
  Note last{&notes, 20};
  CHECK(aclrtLaunchCallback(write_note, &last, ACL_CALLBACK_BLOCK, stream) == 0);
  CHECK(aclrtSynchronizeStream(stream) == 0);
  CHECK(aclrtUnSubscribeReport(number.load(), stream) == 0);
  CHECK(aclrtUnSubscribeReport(number.load(), stream) != 0);
  notes.stop.store(true);
  handler.join();
  CHECK(notes.looked.load() == 20 && notes.late.load() == 0 && notes.seen.size() == 21);
  for (int i = 0; i < 21; ++i) CHECK(notes.seen[static_cast<size_t>(i)] == i);
  CHECK(aclrtProcessReport(0) != 0);  // this thread is not subscribed
  CHECK(aclrtDestroyStream(stream) == 0);
}

void work() {
  CHECK(aclrtSetDevice(0) == 0);
  aclrtStream stream = nullptr;
  CHECK(aclrtCreateStream(&stream) == 0);
  for (int round = 0; round < 8; ++round) {
    for (uint64_t size : {0, 1, 7, 64}) use_arrays(size);
    use_scalars();
    use_readers();
    use_absurd_sizes();
    move_raw();
    move_executors(stream);
  }
  CHECK(aclrtDestroyStream(stream) == 0);
}

}  // namespace

int main() {
  CHECK(aclInit(nullptr) == 0 && aclrtSetDevice(0) == 0);
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) threads.emplace_back(work);
  for (auto& thread : threads) thread.join();
  share_an_executor();
  threads.clear();
  for (int i = 0; i < 2; ++i) threads.emplace_back(use_callbacks);
  for (auto& thread : threads) thread.join();
  CHECK(aclFinalize() == 0);
  std::puts("done");
  return 0;
}
