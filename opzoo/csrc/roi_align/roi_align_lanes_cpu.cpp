// SPDX-License-Identifier: Apache-2.0
#include "roi_align/roi_align_lanes_cpu.h"

namespace opzoo {
namespace {

// kSteps * kLaneStep lanes of one line of sum_runs.
template <int kSteps, class T>
OPZOO_LANES_INLINE void sum_run(const T* from,
                                const Term<acc_t<T>>* terms,
                                int64_t term_count,
                                int64_t term_stride,
                                acc_t<T>* to) {
  Lanes<acc_t<T>> sum[kSteps] = {};
  for (int64_t n = 0; n < term_count; ++n) {
    const T* run = from + terms[n].index * term_stride;
#pragma GCC unroll 4
    for (int step = 0; step < kSteps; ++step) {
      Lanes<acc_t<T>> value;
      load(run + step * kLaneStep, value);
      sum[step] += terms[n].weight * value;
    }
  }
#pragma GCC unroll 4
  for (int step = 0; step < kSteps; ++step) store(sum[step], to + step * kLaneStep);
}

template <class T>
OPZOO_LANES_INLINE void sum_runs_of(const T* map,
                                    const Term<acc_t<T>>* terms,
                                    int64_t term_count,
                                    int64_t term_stride,
                                    const int64_t* offsets,
                                    int64_t count,
                                    int64_t lanes,
                                    acc_t<T>* lines,
                                    int64_t line_stride) {
  for (int64_t i = 0; i < count; ++i) {
    const T* from = map + offsets[i];
    acc_t<T>* to = lines + i * line_stride;
    int64_t lane = 0;
    for (; lane + 4 * kLaneStep <= lanes; lane += 4 * kLaneStep) {
      sum_run<4>(from + lane, terms, term_count, term_stride, to + lane);
    }
    for (; lane + kLaneStep <= lanes; lane += kLaneStep) {
      sum_run<1>(from + lane, terms, term_count, term_stride, to + lane);
    }
    for (; lane < lanes; ++lane) {
      acc_t<T> sum = 0;
      for (int64_t n = 0; n < term_count; ++n) {
        sum += terms[n].weight * static_cast<acc_t<T>>(from[terms[n].index * term_stride + lane]);
      }
      to[lane] = sum;
    }
  }
}

template <class acc>
OPZOO_LANES_INLINE void multiply_banded_of(const Term<acc>* terms,
                                           const int64_t* first,
                                           int64_t rows,
                                           const acc* from,
                                           int64_t lanes,
                                           acc* to) {
  for (int64_t row = 0; row < rows; ++row) {
    const Term<acc>* row_terms = terms + first[row];
    const int64_t count = first[row + 1] - first[row];
    int64_t lane = 0;
    for (; lane + 4 * kLaneStep <= lanes; lane += 4 * kLaneStep) {
      sum_run<4>(from + lane, row_terms, count, lanes, to + row * lanes + lane);
    }
    for (; lane + 2 * kLaneStep <= lanes; lane += 2 * kLaneStep) {
      sum_run<2>(from + lane, row_terms, count, lanes, to + row * lanes + lane);
    }
    for (; lane < lanes; lane += kLaneStep) {
      sum_run<1>(from + lane, row_terms, count, lanes, to + row * lanes + lane);
    }
  }
}

template <class acc>
OPZOO_LANES_INLINE void add_weighted_of(
    acc weight, const acc* from, int64_t lanes, const int64_t* offsets, int64_t count, acc* to) {
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t lane = 0; lane < lanes; lane += kLaneStep) {
      Lanes<acc> value, sum;
      load(from + i * lanes + lane, value);
      load(to + offsets[i] + lane, sum);
      sum += weight * value;
      store(sum, to + offsets[i] + lane);
    }
  }
}

// Blocks of 4 x 4: vectors that every machine has, and no more shuffles than 8 x 8 would take.
template <class acc>
OPZOO_LANES_INLINE void transpose_block(const acc* from,
                                        int64_t from_stride,
                                        acc* to,
                                        int64_t to_stride) {
#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define OPZOO_HAS_SHUFFLE
#endif
#endif
#ifdef OPZOO_HAS_SHUFFLE
  using Four = typename VectorOf<acc, 4>::type;
  const Four a = *reinterpret_cast<const Four*>(from);
  const Four b = *reinterpret_cast<const Four*>(from + from_stride);
  const Four c = *reinterpret_cast<const Four*>(from + 2 * from_stride);
  const Four d = *reinterpret_cast<const Four*>(from + 3 * from_stride);
  const Four ac_low = __builtin_shufflevector(a, c, 0, 4, 1, 5);
  const Four ac_high = __builtin_shufflevector(a, c, 2, 6, 3, 7);
  const Four bd_low = __builtin_shufflevector(b, d, 0, 4, 1, 5);
  const Four bd_high = __builtin_shufflevector(b, d, 2, 6, 3, 7);
  *reinterpret_cast<Four*>(to) = __builtin_shufflevector(ac_low, bd_low, 0, 4, 1, 5);
  *reinterpret_cast<Four*>(to + to_stride) = __builtin_shufflevector(ac_low, bd_low, 2, 6, 3, 7);
  *reinterpret_cast<Four*>(to + 2 * to_stride) =
      __builtin_shufflevector(ac_high, bd_high, 0, 4, 1, 5);
  *reinterpret_cast<Four*>(to + 3 * to_stride) =
      __builtin_shufflevector(ac_high, bd_high, 2, 6, 3, 7);
#else
  for (int64_t i = 0; i < 4; ++i) {
    for (int64_t j = 0; j < 4; ++j) to[j * to_stride + i] = from[i * from_stride + j];
  }
#endif
}

template <class acc>
OPZOO_LANES_INLINE void transpose_of(const acc* from,
                                     int64_t from_stride,
                                     int64_t lines,
                                     int64_t length,
                                     acc* to,
                                     int64_t to_stride) {
  int64_t i = 0;
  for (; i + 4 <= lines; i += 4) {
    int64_t j = 0;
    for (; j + 4 <= length; j += 4) {
      transpose_block(from + i * from_stride + j, from_stride, to + j * to_stride + i, to_stride);
    }
    for (; j < length; ++j) {
      for (int64_t k = i; k < i + 4; ++k) to[j * to_stride + k] = from[k * from_stride + j];
    }
  }
  for (; i < lines; ++i) {
    for (int64_t j = 0; j < length; ++j) to[j * to_stride + i] = from[i * from_stride + j];
  }
}

// Two groups of columns of one plane at a time; kTerms is their number, or 0 for any.
template <int kTerms, class T>
OPZOO_LANES_INLINE void sum_plane(const T* plane,
                                  const Term<acc_t<T>>* terms,
                                  int64_t term_count,
                                  int64_t term_stride,
                                  const int64_t* offsets,
                                  int64_t count,
                                  acc_t<T>* to) {
  if constexpr (kTerms > 0) term_count = kTerms;
  int64_t i = 0;
  for (; i + 2 <= count; i += 2) {
    const T* left = plane + offsets[i];
    const T* right = plane + offsets[i + 1];
    Lanes<acc_t<T>> sum_left = {}, sum_right = {};
#pragma GCC unroll 4
    for (int64_t n = 0; n < term_count; ++n) {
      const int64_t offset = terms[n].index * term_stride;
      Lanes<acc_t<T>> value;
      load(left + offset, value);
      sum_left += terms[n].weight * value;
      load(right + offset, value);
      sum_right += terms[n].weight * value;
    }
    store(sum_left, to + i * kLaneStep);
    store(sum_right, to + (i + 1) * kLaneStep);
  }
  if (i < count) sum_run<1>(plane + offsets[i], terms, term_count, term_stride, to + i * kLaneStep);
}

template <int kTerms, class T>
OPZOO_LANES_INLINE void sum_all_planes(const T* map,
                                       const Term<acc_t<T>>* terms,
                                       int64_t term_count,
                                       int64_t term_stride,
                                       const int64_t* offsets,
                                       int64_t count,
                                       int64_t planes,
                                       int64_t plane_stride,
                                       acc_t<T>* rows) {
  for (int64_t c = 0; c < planes; ++c) {
    sum_plane<kTerms>(map + c * plane_stride,
                      terms,
                      term_count,
                      term_stride,
                      offsets,
                      count,
                      rows + c * count * kLaneStep);
  }
}

template <class T>
OPZOO_LANES_INLINE void sum_planes_of(const T* map,
                                      const Term<acc_t<T>>* terms,
                                      int64_t term_count,
                                      int64_t term_stride,
                                      const int64_t* offsets,
                                      int64_t count,
                                      int64_t planes,
                                      int64_t plane_stride,
                                      acc_t<T>* rows,
                                      acc_t<T>* lines,
                                      int64_t line_stride) {
  const auto* t = terms;
  switch (term_count) {
    case 2:
      sum_all_planes<2>(map, t, 2, term_stride, offsets, count, planes, plane_stride, rows);
      break;
    case 3:
      sum_all_planes<3>(map, t, 3, term_stride, offsets, count, planes, plane_stride, rows);
      break;
    case 4:
      sum_all_planes<4>(map, t, 4, term_stride, offsets, count, planes, plane_stride, rows);
      break;
    default:
      sum_all_planes<0>(
          map, t, term_count, term_stride, offsets, count, planes, plane_stride, rows);
  }
  transpose_of(rows, count * kLaneStep, planes, count * kLaneStep, lines, line_stride);
}

template <class From, class To>
OPZOO_LANES_INLINE void convert_lines(const From* from,
                                      int64_t from_stride,
                                      int64_t lines,
                                      int64_t length,
                                      To* to,
                                      int64_t to_stride) {
  for (int64_t i = 0; i < lines; ++i) {
    const From* source = from + i * from_stride;
    To* target = to + i * to_stride;
    int64_t lane = 0;
    for (; lane + kLaneStep <= length; lane += kLaneStep) {
      Lanes<acc_t<From>> value;
      load(source + lane, value);
      store(value, target + lane);
    }
    for (; lane < length; ++lane) target[lane] = static_cast<To>(source[lane]);
  }
}

}  // namespace

// Function multiversioning takes no templates: a specialisation of each for each type.
#define OPZOO_DEFINE_FOR_STORAGE(T)                                                              \
  template <>                                                                                    \
  OPZOO_LANES_KERNEL void sum_runs<T>(const T* map,                                              \
                                      const Term<acc_t<T>>* terms,                               \
                                      int64_t term_count,                                        \
                                      int64_t term_stride,                                       \
                                      const int64_t* offsets,                                    \
                                      int64_t count,                                             \
                                      int64_t lanes,                                             \
                                      acc_t<T>* lines,                                           \
                                      int64_t line_stride) {                                     \
    sum_runs_of(map, terms, term_count, term_stride, offsets, count, lanes, lines, line_stride); \
  }                                                                                              \
  template <>                                                                                    \
  OPZOO_LANES_KERNEL void sum_planes<T>(const T* map,                                            \
                                        const Term<acc_t<T>>* terms,                             \
                                        int64_t term_count,                                      \
                                        int64_t term_stride,                                     \
                                        const int64_t* offsets,                                  \
                                        int64_t count,                                           \
                                        int64_t planes,                                          \
                                        int64_t plane_stride,                                    \
                                        acc_t<T>* rows,                                          \
                                        acc_t<T>* lines,                                         \
                                        int64_t line_stride) {                                   \
    sum_planes_of(map,                                                                           \
                  terms,                                                                         \
                  term_count,                                                                    \
                  term_stride,                                                                   \
                  offsets,                                                                       \
                  count,                                                                         \
                  planes,                                                                        \
                  plane_stride,                                                                  \
                  rows,                                                                          \
                  lines,                                                                         \
                  line_stride);                                                                  \
  }                                                                                              \
  template <>                                                                                    \
  OPZOO_LANES_KERNEL void load_lines<T>(const T* from,                                           \
                                        int64_t from_stride,                                     \
                                        int64_t lines,                                           \
                                        int64_t length,                                          \
                                        acc_t<T>* to,                                            \
                                        int64_t to_stride) {                                     \
    convert_lines(from, from_stride, lines, length, to, to_stride);                              \
  }                                                                                              \
  template <>                                                                                    \
  OPZOO_LANES_KERNEL void store_lines<T>(const acc_t<T>* from,                                   \
                                         int64_t from_stride,                                    \
                                         int64_t lines,                                          \
                                         int64_t length,                                         \
                                         T* to,                                                  \
                                         int64_t to_stride) {                                    \
    convert_lines(from, from_stride, lines, length, to, to_stride);                              \
  }
OPZOO_DEFINE_FOR_STORAGE(double)
OPZOO_DEFINE_FOR_STORAGE(float)
OPZOO_DEFINE_FOR_STORAGE(Half)
OPZOO_DEFINE_FOR_STORAGE(BFloat16)

#define OPZOO_DEFINE_FOR_ACCUMULATOR(acc)                              \
  template <>                                                          \
  OPZOO_LANES_KERNEL void multiply_banded<acc>(const Term<acc>* terms, \
                                               const int64_t* first,   \
                                               int64_t rows,           \
                                               const acc* from,        \
                                               int64_t lanes,          \
                                               acc* to) {              \
    multiply_banded_of(terms, first, rows, from, lanes, to);           \
  }                                                                    \
  template <>                                                          \
  OPZOO_LANES_KERNEL void add_weighted<acc>(acc weight,                \
                                            const acc* from,           \
                                            int64_t lanes,             \
                                            const int64_t* offsets,    \
                                            int64_t count,             \
                                            acc* to) {                 \
    add_weighted_of(weight, from, lanes, offsets, count, to);          \
  }                                                                    \
  template <>                                                          \
  OPZOO_LANES_KERNEL void transpose<acc>(const acc* from,              \
                                         int64_t from_stride,          \
                                         int64_t lines,                \
                                         int64_t length,               \
                                         acc* to,                      \
                                         int64_t to_stride) {          \
    transpose_of(from, from_stride, lines, length, to, to_stride);     \
  }
OPZOO_DEFINE_FOR_ACCUMULATOR(double)
OPZOO_DEFINE_FOR_ACCUMULATOR(float)

}  // namespace opzoo
