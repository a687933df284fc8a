// SPDX-License-Identifier: Apache-2.0
// Element types and reductions. Sources are read in rank order: the same bits on every run.
#include "reduce.h"

#include <cmath>
#include <cstring>

namespace xsd {
namespace {

template <typename To, typename From>
To bits_of(const From& value) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  To out;
  std::memcpy(&out, &value, sizeof out);
  return out;
}

struct Bf16 {
  static float load(const unsigned char* at) {
    uint16_t raw;
    std::memcpy(&raw, at, 2);
    return bits_of<float>(static_cast<uint32_t>(raw) << 16);
  }
  static void store(unsigned char* at, float value) {
    uint32_t raw = bits_of<uint32_t>(value);
    if (std::isnan(value)) {
      raw |= 0x00400000u;  // stays a NaN when cut
    } else {
      raw += 0x7fffu + ((raw >> 16) & 1u);  // to nearest, ties to even
    }
    const auto cut = static_cast<uint16_t>(raw >> 16);
    std::memcpy(at, &cut, 2);
  }
};

struct Fp16 {
  static float load(const unsigned char* at) {
    uint16_t raw;
    std::memcpy(&raw, at, 2);
    const uint32_t exponent = (raw >> 10) & 31u, fraction = raw & 1023u;
    float value;
    if (exponent == 31) {
      value = fraction != 0 ? NAN : INFINITY;
    } else if (exponent == 0) {
      value = std::ldexp(static_cast<float>(fraction), -24);
    } else {
      value = std::ldexp(static_cast<float>(fraction + 1024u), static_cast<int>(exponent) - 25);
    }
    return (raw & 0x8000u) != 0 ? -value : value;
  }
  static void store(unsigned char* at, float value) {
    const uint16_t sign = std::signbit(value) ? 0x8000u : 0u;
    const float size = std::fabs(value);
    uint16_t raw;
    if (std::isnan(value)) {
      raw = 0x7e00u;
    } else if (size >= 65520.0f) {  // half way between the largest half and the next step
      raw = 0x7c00u;
    } else if (size < 6.103515625e-05f) {  // below the smallest normal half: multiples of 2^-24
      raw = static_cast<uint16_t>(std::nearbyint(std::ldexp(size, 24)));
    } else {
      int exponent;
      const float fraction = std::frexp(size, &exponent);  // 0.5 <= fraction < 1
      // A fraction that rounds up to 2048 carries into the exponent by plain addition.
      const auto mantissa = static_cast<uint32_t>(std::nearbyint(std::ldexp(fraction, 11)));
      raw =
          static_cast<uint16_t>((static_cast<uint32_t>(exponent + 14) << 10) + (mantissa - 1024u));
    }
    raw = static_cast<uint16_t>(raw | sign);
    std::memcpy(at, &raw, 2);
  }
};

template <typename T>
struct Plain {
  static T load(const unsigned char* at) {
    T value;
    std::memcpy(&value, at, sizeof value);
    return value;
  }
  static void store(unsigned char* at, T value) { std::memcpy(at, &value, sizeof value); }
};

// Integer sums wrap; done unsigned so that this is defined.
template <typename T>
T add(T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    using U = std::make_unsigned_t<T>;
    return static_cast<T>(static_cast<U>(static_cast<U>(a) + static_cast<U>(b)));
  } else {
    return a + b;
  }
}

template <typename T>
T multiply(T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    return static_cast<T>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
  } else {
    return a * b;
  }
}

template <typename Value>
Value combine(HcclReduceOp op, Value a, Value b) {
  switch (op) {
    case HCCL_REDUCE_SUM:
      return add(a, b);
    case HCCL_REDUCE_PROD:
      return multiply(a, b);
    case HCCL_REDUCE_MAX:
      return b > a ? b : a;
    default:
      return b < a ? b : a;
  }
}

template <typename Access>
void loop(uint32_t bytes, HcclReduceOp op, const unsigned char* const* sources, uint32_t n,
          uint64_t count, unsigned char* out) {
  for (uint64_t i = 0; i < count; ++i) {
    auto value = Access::load(sources[0] + i * bytes);
    for (uint32_t r = 1; r < n; ++r)
      value = combine(op, value, Access::load(sources[r] + i * bytes));
    Access::store(out + i * bytes, value);
  }
}

}  // namespace

uint32_t hccl_type_bytes(HcclDataType type) {
  switch (type) {
    case HCCL_DATA_TYPE_INT8:
    case HCCL_DATA_TYPE_UINT8:
      return 1;
    case HCCL_DATA_TYPE_INT16:
    case HCCL_DATA_TYPE_UINT16:
    case HCCL_DATA_TYPE_FP16:
    case HCCL_DATA_TYPE_BFP16:
      return 2;
    case HCCL_DATA_TYPE_INT32:
    case HCCL_DATA_TYPE_UINT32:
    case HCCL_DATA_TYPE_FP32:
      return 4;
    case HCCL_DATA_TYPE_INT64:
    case HCCL_DATA_TYPE_UINT64:
    case HCCL_DATA_TYPE_FP64:
      return 8;
    default:
      return 0;
  }
}

// What the vendor documents for reductions: signed integers and floats up to 32 bits.
bool reducible(HcclDataType type) {
  switch (type) {
    case HCCL_DATA_TYPE_INT8:
    case HCCL_DATA_TYPE_INT16:
    case HCCL_DATA_TYPE_INT32:
    case HCCL_DATA_TYPE_INT64:
    case HCCL_DATA_TYPE_FP16:
    case HCCL_DATA_TYPE_FP32:
    case HCCL_DATA_TYPE_BFP16:
      return true;
    default:
      return false;
  }
}

void reduce(HcclDataType type, HcclReduceOp op, const unsigned char* const* sources, uint32_t n,
            uint64_t count, unsigned char* out) {
  const uint32_t bytes = hccl_type_bytes(type);
  switch (type) {
    case HCCL_DATA_TYPE_INT8:
      return loop<Plain<int8_t>>(bytes, op, sources, n, count, out);
    case HCCL_DATA_TYPE_INT16:
      return loop<Plain<int16_t>>(bytes, op, sources, n, count, out);
    case HCCL_DATA_TYPE_INT32:
      return loop<Plain<int32_t>>(bytes, op, sources, n, count, out);
    case HCCL_DATA_TYPE_INT64:
      return loop<Plain<int64_t>>(bytes, op, sources, n, count, out);
    case HCCL_DATA_TYPE_FP32:
      return loop<Plain<float>>(bytes, op, sources, n, count, out);
    case HCCL_DATA_TYPE_FP16:
      return loop<Fp16>(bytes, op, sources, n, count, out);
    case HCCL_DATA_TYPE_BFP16:
      return loop<Bf16>(bytes, op, sources, n, count, out);
    default:
      return;
  }
}

}  // namespace xsd
