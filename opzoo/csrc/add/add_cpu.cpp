// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "add/add_plan.h"
#include "common/half_cpu.h"
#include "common/lanes_cpu.h"

#ifdef OPZOO_HAS_F16C_INTRINSICS
#include <immintrin.h>
#endif

namespace opzoo {

// An operand along a row of the result: neighbouring elements, or, without data, one value.
template <class T>
struct AddRow {
  const T* data;
  acc_t<T> value;
};

namespace {

constexpr int64_t kGrain = 32768;

// The rows by value: an int8 result may alias anything that lies in memory.
template <bool kDataA, bool kDataB, class T>
OPZOO_LANES_INLINE void add_loaded_rows(
    AddRow<T> a, AddRow<T> b, T* out, acc_t<T> alpha, int64_t length) {
  using acc = acc_t<T>;
  int64_t i = 0;
  if constexpr (!std::is_integral_v<T>) {
    Lanes<acc> left, right;
    for (int lane = 0; lane < kLaneStep; ++lane) {
      left[lane] = a.value;
      right[lane] = b.value;
    }
    if constexpr (std::is_same_v<T, BFloat16>) {
      Lanes<acc> odd_left = left, odd_right = right;
      for (; i + 2 * kLaneStep <= length; i += 2 * kLaneStep) {
        if constexpr (kDataA) load_pairs(a.data + i, left, odd_left);
        if constexpr (kDataB) load_pairs(b.data + i, right, odd_right);
        store_pairs(left + alpha * right, odd_left + alpha * odd_right, out + i);
      }
    }
    for (; i + kLaneStep <= length; i += kLaneStep) {
      if constexpr (kDataA) load(a.data + i, left);
      if constexpr (kDataB) load(b.data + i, right);
      store(left + alpha * right, out + i);
    }
  }
  for (; i < length; ++i) {
    const acc left = kDataA ? static_cast<acc>(a.data[i]) : a.value;
    const acc right = kDataB ? static_cast<acc>(b.data[i]) : b.value;
    out[i] = add_value<T>(left, right, alpha);
  }
}

}  // namespace

// out[i] = a[i] + alpha * b[i] for i < length; exists for the widest vectors of the machine.
template <class T>
void add_rows(const AddRow<T>& a, const AddRow<T>& b, T* out, acc_t<T> alpha, int64_t length);

#define OPZOO_DEFINE(T)                                                                 \
  template <>                                                                           \
  OPZOO_LANES_KERNEL void add_rows<T>(                                                  \
      const AddRow<T>& a, const AddRow<T>& b, T* out, acc_t<T> alpha, int64_t length) { \
    if (a.data && b.data) {                                                             \
      add_loaded_rows<true, true>(a, b, out, alpha, length);                            \
    } else if (a.data) {                                                                \
      add_loaded_rows<true, false>(a, b, out, alpha, length);                           \
    } else if (b.data) {                                                                \
      add_loaded_rows<false, true>(a, b, out, alpha, length);                           \
    } else {                                                                            \
      add_loaded_rows<false, false>(a, b, out, alpha, length);                          \
    }                                                                                   \
  }
OPZOO_DEFINE(double)
OPZOO_DEFINE(float)
OPZOO_DEFINE(BFloat16)
OPZOO_DEFINE(int64_t)
OPZOO_DEFINE(int32_t)
OPZOO_DEFINE(int16_t)
OPZOO_DEFINE(int8_t)
OPZOO_DEFINE(uint8_t)
OPZOO_DEFINE(bool)

namespace {

// How many elements, from the first on, the machine's own conversions have added.
#ifdef OPZOO_HAS_F16C_INTRINSICS
__attribute__((target("avx,f16c"))) int64_t
add_halves(const AddRow<Half>& a, const AddRow<Half>& b, Half* out, float alpha, int64_t length) {
  const __m256 factor = _mm256_set1_ps(alpha);
  __m256 left = _mm256_set1_ps(a.value), right = _mm256_set1_ps(b.value);
  int64_t i = 0;
  for (; i + 8 <= length; i += 8) {
    if (a.data) {
      left = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(a.data + i)));
    }
    if (b.data) {
      right = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(b.data + i)));
    }
    const __m256 sum = _mm256_add_ps(left, _mm256_mul_ps(factor, right));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i),
                     _mm256_cvtps_ph(sum, _MM_FROUND_TO_NEAREST_INT));
  }
  return i;
}
#else
int64_t add_halves(const AddRow<Half>&, const AddRow<Half>&, Half*, float, int64_t) {
  return 0;
}
#endif

}  // namespace

// Without such conversions in pieces that stay in the first-level cache, fp32 in between.
template <>
void add_rows<Half>(
    const AddRow<Half>& a, const AddRow<Half>& b, Half* out, float alpha, int64_t length) {
  constexpr int64_t kPiece = 1024;
  float left[kPiece], right[kPiece];
  for (int64_t i = has_f16c() ? add_halves(a, b, out, alpha, length) : 0; i < length; i += kPiece) {
    const int64_t count = std::min(kPiece, length - i);
    if (a.data) widen(a.data + i, count, left);
    if (b.data) widen(b.data + i, count, right);
    add_rows<float>({a.data ? left : nullptr, a.value},
                    {b.data ? right : nullptr, b.value},
                    left,
                    alpha,
                    count);
    narrow(left, count, out + i);
  }
}

namespace {

// Items [begin, end), row by row along the innermost axis.
template <class T>
void add_range(const AddParams& p, int64_t begin, int64_t end) {
  using acc = acc_t<T>;
  const auto& loop = p.loop;
  const auto* a = static_cast<const T*>(p.a.data);
  const auto* b = static_cast<const T*>(p.b.data);
  auto* out = static_cast<T*>(p.out);
  const auto alpha = static_cast<acc>(p.alpha);
  const int64_t step_a = loop.stride[kAddA][0];
  const int64_t step_b = loop.stride[kAddB][0];
  const bool rows = step_a <= 1 && step_b <= 1 && loop.stride[kAddOut][0] == 1;

  const auto row_of = [](const T* data, int64_t step, acc number) -> AddRow<T> {
    if (!data) return {nullptr, number};
    return step == 0 ? AddRow<T>{nullptr, static_cast<acc>(*data)} : AddRow<T>{data, acc(0)};
  };
  for (int64_t item = begin; item < end;) {
    int64_t offset[3];
    offsets_of(loop, item, offset);
    const int64_t length = std::min(end - item, loop.size[0] - item % loop.size[0]);
    T* target = out + offset[kAddOut];
    const T* from_a = a ? a + offset[kAddA] : nullptr;
    const T* from_b = b ? b + offset[kAddB] : nullptr;
    if (rows) {
      add_rows<T>(row_of(from_a, step_a, add_number<T>(p.a)),
                  row_of(from_b, step_b, add_number<T>(p.b)),
                  target,
                  alpha,
                  length);
    } else {
      for (int64_t i = 0; i < length; ++i) {
        const acc left = a ? static_cast<acc>(from_a[i * step_a]) : add_number<T>(p.a);
        const acc right = b ? static_cast<acc>(from_b[i * step_b]) : add_number<T>(p.b);
        target[i * loop.stride[kAddOut][0]] = add_value<T>(left, right, alpha);
      }
    }
    item += length;
  }
}

Tensor add_cpu(const Tensor& a, const Tensor& b, double alpha) {
  AddPlan plan = plan_add(a, b, alpha);
  if (plan.params.loop.numel == 0) return plan.out;
  dispatch_all(plan.dtype, "add", [&]<class T>() {
    parallel_for(0, plan.params.loop.numel, kGrain, [&](int64_t begin, int64_t end) {
      add_range<T>(plan.params, begin, end);
    });
  });
  return plan.out;
}

}  // namespace
}  // namespace opzoo

OPZOO_KERNELS(CPU, m) {
  m.impl("add", OPZOO_BOX(opzoo::add_cpu));
}
