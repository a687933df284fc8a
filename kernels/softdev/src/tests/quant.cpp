// SPDX-License-Identifier: Apache-2.0
// The integer arithmetic of MegaMoe against plain loops; run under sanitizers, which see a read or
// write past the end of any of these exactly sized buffers.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "../vendor/quant.h"

using namespace megamoe;

namespace {

std::mt19937 random_bits(7);

int pick(int low, int high) { return std::uniform_int_distribution<int>(low, high)(random_bits); }

void expect(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "%s\n", what);
  std::exit(1);
}

void products(int64_t rows, int64_t cols, int64_t depth) {
  std::vector<int8_t> in(static_cast<size_t>(rows * depth)), weight(static_cast<size_t>(depth * cols));
  for (int8_t& v : in) v = static_cast<int8_t>(pick(-128, 127));
  for (const bool int4 : {false, true}) {
    for (int8_t& v : weight) v = static_cast<int8_t>(int4 ? pick(-8, 7) : pick(-128, 127));
    std::vector<int32_t> out(static_cast<size_t>(rows * cols)), want(out.size());
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t n = 0; n < cols; ++n)
        for (int64_t k = 0; k < depth; ++k)
          want[static_cast<size_t>(r * cols + n)] +=
              in[static_cast<size_t>(r * depth + k)] * weight[static_cast<size_t>(k * cols + n)];
    const int64_t width = int4 ? 64 : 32;  // columns of a block
    std::vector<uint8_t> stored(static_cast<size_t>(int4 ? depth * cols / 2 : depth * cols));
    for (const bool offset : {false, true}) {
      if (offset && !int4) continue;
      for (uint8_t& v : stored) v = 0;
      for (int64_t k = 0; k < depth; ++k) {
        for (int64_t n = 0; n < cols; ++n) {
          const int value = weight[static_cast<size_t>(k * cols + n)];
          const int64_t place = (n / width * depth + k) * width + n % width;
          if (int4)
            stored[static_cast<size_t>(place / 2)] |= static_cast<uint8_t>(
                ((value + (offset ? 8 : 0)) & 15) << (place % 2 != 0 ? 4 : 0));
          else
            stored[static_cast<size_t>(place)] = static_cast<uint8_t>(value);
        }
      }
      if (int4) {
        std::vector<int8_t> scratch(static_cast<size_t>(64 * depth));
        multiply_int4(in.data(), stored.data(), out.data(), rows, cols, depth, offset,
                      scratch.data());
      } else {
        multiply_int8(in.data(), reinterpret_cast<int8_t*>(stored.data()), out.data(), rows, cols,
                      depth);
      }
      expect(out == want, "a product differs from the plain loop");
    }
  }
}

void parts() {
  std::vector<int8_t> q(256), high(256), low(256), back(256);
  std::vector<uint8_t> packed(128);
  for (int i = 0; i < 256; ++i) q[static_cast<size_t>(i)] = static_cast<int8_t>(i - 128);
  split(q.data(), 256, high.data(), low.data());
  for (size_t i = 0; i < 256; ++i) {
    expect(16 * high[i] + low[i] + 8 == q[i], "16 * high + low + 8 is not the value");
    expect(high[i] >= -8 && high[i] <= 7 && low[i] >= -8 && low[i] <= 7, "a part is no int4");
  }
  for (const std::vector<int8_t>* part : {&high, &low}) {
    pack_int4(part->data(), 256, packed.data());
    unpack_int4(packed.data(), 256, back.data());
    expect(back == *part, "packing changed a value");
  }
}

void halves() {
  expect(round_half(2049.0f) == 2048.0f && round_half(2051.0f) == 2052.0f, "ties go to even");
  expect(round_half(65519.0f) == 65504.0f && std::isinf(round_half(65520.0f)), "overflow");
  expect(round_half(std::ldexp(1.0f, -25)) == 0.0f, "half of the smallest value goes to 0");
  expect(round_half(std::ldexp(3.0f, -25)) == std::ldexp(1.0f, -23), "tie among the smallest");
  expect(std::isnan(round_half(NAN)) && round_half(-INFINITY) == -INFINITY, "NaN and infinity");
}

void rows() {
  for (const float fill : {0.0f, 1.0f, NAN, INFINITY, -1e-38f, 3e38f}) {
    std::vector<uint16_t> x(192);
    std::vector<float> a(64);
    std::vector<int8_t> q(64, 99);
    for (size_t i = 0; i < 64; ++i) x[3 * i] = narrow(i % 3 == 0 ? fill : fill / 3);
    for (size_t i = 0; i < 64; ++i) a[i] = widen(x[3 * i]);
    const float scale = quantise_token(x.data(), 3, 64, q.data());
    expect(std::isnan(fill) == std::isnan(scale), "a NaN, and only a NaN, makes the scale NaN");
    if (fill == 0.0f || std::isnan(fill)) expect(scale != scale || scale == 0, "scale of zeros");
    if (fill == 1.0f) expect(q[0] == 127 && q[1] == 42, "values");
    quantise_activation(a.data(), 64, q.data());
    if (fill == 1.0f) expect(q[0] == 127 && q[1] == 42, "activation values");
    if (fill == 0.0f) expect(q[0] == 0, "zeros stay zero");
  }
}

}  // namespace

int main() {
  for (int64_t count : {1, 2, 3, 5}) products(count, 128, 64);
  products(2, 64, 1040);
  parts();
  halves();
  rows();
  std::puts("done");
  return 0;
}
