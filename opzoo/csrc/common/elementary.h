// SPDX-License-Identifier: Apache-2.0
// exp and log in fp32 where losses need them, from additions, products and one division: the same
// source for a GPU thread, a CPU element and a vector of CPU lanes. No torch.
#pragma once

#include "common/types.h"

#ifdef __CUDACC__
#define OPZOO_ALWAYS_INLINE OPZOO_HOST_DEVICE
#else
// A vector passed to a call would change the ABI with the instruction set.
#define OPZOO_ALWAYS_INLINE __attribute__((always_inline)) inline
#endif

namespace opzoo {

// a / b, on a GPU in fp32 by a reciprocal that is off by at most 2 units of the last place, for |b|
// below 2^126: a rounded division costs as much as the rest of a short formula.
template <class F>
OPZOO_ALWAYS_INLINE F divide(const F& a, const F& b) {
#ifdef __CUDA_ARCH__
  if constexpr (std::is_same_v<F, float>) return __fdividef(a, b);
#endif
  return a / b;
}

// exp(a) for a <= 0, within 1.1 units of the last place; 0 below -87.3, where fp32 turns subnormal.
// I is the integer type, or vector of them, that overlays F.
template <class I, class F>
OPZOO_ALWAYS_INLINE void exp_of_negative(const F& a, F& result) {
  // 2^k * exp(r), |r| <= ln(2)/2. Adding 1.5 * 2^23 rounds to an integer, which then stands in the
  // low bits; ln(2) is taken off in two parts, so that k times the first is exact.
  const F shifted = a * 1.44269504f + 12582912.0f;
  const F k = shifted - 12582912.0f;
  const F r = (a - k * 0.693359375f) + k * 2.12194440e-4f;
  F series = r * 1.98412698e-4f + 1.38888889e-3f;
  series = series * r + 8.33333333e-3f;
  series = series * r + 4.16666667e-2f;
  series = series * r + 1.66666667e-1f;
  series = series * r + 0.5f;
  series = series * r * r + r + 1.0f;
  const I exponent = (bit_cast<I>(shifted) - (0x4b400000 - 127)) << 23;
  const F power = bit_cast<F>(exponent);
  const F value = series * power;
  result = a < -87.3f ? F{} : value;
}

// log(1 + e) for 0 <= e <= 1, within 2 units of the last place (on a GPU 4).
template <class F>
OPZOO_ALWAYS_INLINE void log_of_one_plus(const F& e, F& result) {
  // log((1 + s) / (1 - s)) = 2 (s + s^3 / 3 + s^5 / 5 ...), s at most 1/3.
  const F s = divide(e, F(e + 2.0f));
  const F square = s * s;
  F series = square * 0.0666666667f + 0.0769230769f;
  series = series * square + 0.0909090909f;
  series = series * square + 0.111111111f;
  series = series * square + 0.142857143f;
  series = series * square + 0.2f;
  series = series * square + 0.333333333f;
  const F twice = s + s;
  result = twice + twice * square * series;
}

}  // namespace opzoo
