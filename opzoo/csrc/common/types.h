// SPDX-License-Identifier: Apache-2.0
// Storage types, accumulator types and the few words every kernel uses. No torch, no CUDA needed.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#define OPZOO_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define OPZOO_HOST_DEVICE inline
#endif

namespace opzoo {

template <class To, class From>
OPZOO_HOST_DEVICE To bit_cast(From value) {
  static_assert(sizeof(To) == sizeof(From));
  To result;
  memcpy(&result, &value, sizeof(To));
  return result;
}

// IEEE binary16 and bfloat16 as storage: two bytes, converted to fp32 before any arithmetic. Both
// round to nearest even on the way back and keep NaN a NaN.
struct Half {
  uint16_t bits;

  Half() = default;
  OPZOO_HOST_DEVICE explicit Half(float value) : bits(from_float(value)) {}
  OPZOO_HOST_DEVICE operator float() const { return to_float(bits); }

 private:
  static OPZOO_HOST_DEVICE float to_float(uint16_t half) {
#ifdef __CUDA_ARCH__
    return __half2float(__ushort_as_half(half));
#else
    const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
    const uint32_t magnitude = half & 0x7fffu;
    if (magnitude >= 0x7c00u) {
      return bit_cast<float>(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
    }
    // Read as a float, the shifted bits have an exponent 112 too small; the product is exact and
    // turns half's subnormals into normal floats.
    const float scaled = bit_cast<float>(magnitude << 13) * 0x1p112f;
    return bit_cast<float>(sign | bit_cast<uint32_t>(scaled));
#endif
  }

  static OPZOO_HOST_DEVICE uint16_t from_float(float value) {
#ifdef __CUDA_ARCH__
    return __half_as_ushort(__float2half_rn(value));
#else
    const uint32_t word = bit_cast<uint32_t>(value);
    const uint16_t sign = static_cast<uint16_t>(word >> 16 & 0x8000u);
    uint32_t magnitude = word & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return sign | 0x7e00u;   // NaN
    if (magnitude >= 0x477ff000u) return sign | 0x7c00u;  // 65520 and above round to inf
    if (magnitude < 0x38800000u) {
      // Below 2^-14 the result is subnormal: its unit 2^-24 is the unit of a float near 0.5, so
      // this addition does the rounding.
      const float shifted = bit_cast<float>(magnitude) + 0.5f;
      return sign | static_cast<uint16_t>(bit_cast<uint32_t>(shifted) - 0x3f000000u);
    }
    magnitude += 0xfffu + (magnitude >> 13 & 1u);  // nearest, ties to even
    return sign | static_cast<uint16_t>((magnitude - 0x38000000u) >> 13);
#endif
  }
};

struct BFloat16 {
  uint16_t bits;

  BFloat16() = default;
  OPZOO_HOST_DEVICE explicit BFloat16(float value) : bits(from_float(value)) {}
  OPZOO_HOST_DEVICE operator float() const {
    return bit_cast<float>(static_cast<uint32_t>(bits) << 16);
  }

 private:
  static OPZOO_HOST_DEVICE uint16_t from_float(float value) {
#ifdef __CUDA_ARCH__
    return __bfloat16_as_ushort(__float2bfloat16_rn(value));
#else
    uint32_t word = bit_cast<uint32_t>(value);
    if ((word & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>(word >> 16 | 0x40u);
    word += 0x7fffu + (word >> 16 & 1u);  // nearest, ties to even
    return static_cast<uint16_t>(word >> 16);
#endif
  }
};

// The type arithmetic is done in: fp32 for everything stored in 16 or 32 bits, fp64 for fp64,
// int64 for integers and bool (which wrap the same way as their own width when stored).
template <class T>
struct Accumulator {
  using type = std::conditional_t<std::is_integral_v<T>, int64_t, float>;
};
template <>
struct Accumulator<double> {
  using type = double;
};
template <class T>
using acc_t = typename Accumulator<T>::type;

template <class T>
OPZOO_HOST_DEVICE T div_up(T numerator, T denominator) {
  return (numerator + denominator - 1) / denominator;
}

}  // namespace opzoo
