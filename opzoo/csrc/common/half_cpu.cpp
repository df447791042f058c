// SPDX-License-Identifier: Apache-2.0
#include "common/half_cpu.h"

#ifdef OPZOO_HAS_F16C_INTRINSICS
#include <immintrin.h>
#endif

namespace opzoo {

bool has_f16c() {
#ifdef OPZOO_HAS_F16C_INTRINSICS
  static const bool supported = __builtin_cpu_supports("avx") && __builtin_cpu_supports("f16c");
  return supported;
#else
  return false;
#endif
}

namespace {

// Every function returns how many elements, from the first on, it has converted.
#ifdef OPZOO_HAS_F16C_INTRINSICS

__attribute__((target("avx,f16c"))) int64_t widen_f16c(const Half* from, int64_t count, float* to) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i));
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(half));
  }
  return i;
}

__attribute__((target("avx,f16c"))) int64_t narrow_f16c(const float* from,
                                                        int64_t count,
                                                        Half* to) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m128i half = _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), half);
  }
  return i;
}

#else

int64_t widen_f16c(const Half*, int64_t, float*) {
  return 0;
}
int64_t narrow_f16c(const float*, int64_t, Half*) {
  return 0;
}

#endif

}  // namespace

void widen(const Half* from, int64_t count, float* to) {
  for (int64_t i = has_f16c() ? widen_f16c(from, count, to) : 0; i < count; ++i) {
    to[i] = static_cast<float>(from[i]);
  }
}

void narrow(const float* from, int64_t count, Half* to) {
  for (int64_t i = has_f16c() ? narrow_f16c(from, count, to) : 0; i < count; ++i) {
    to[i] = Half(from[i]);
  }
}

}  // namespace opzoo
