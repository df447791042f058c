// SPDX-License-Identifier: Apache-2.0
// soft_nms(boxes, scores, iou_threshold, sigma, min_score, method) and batched_soft_nms, the same
// within each class: the box of the highest score is selected, the scores of the boxes that overlap
// it are decayed, and so on until no box is left.
//
//   boxes          [N, 4] (x1, y1, x2, y2), any float or integer dtype, any strides; N <= 2^30
//   scores         [N], any float or integer dtype, not necessarily that of boxes
//   idxs           [N], any integer dtype, compared as int64; any values
//   iou_threshold  in [0, 1];  sigma > 0;  min_score >= 0
//   result         scores [K] as decayed, int64 indices [K], by that score descending, then index
//                  ascending
//
// Selecting a box multiplies the score of each box left that overlaps it (IoU > 0) by
//   naive      0 where IoU >= iou_threshold
//   linear     1 - IoU where IoU >= iou_threshold
//   gaussian   exp(-IoU^2 / sigma)
// one selection after the other, each product rounded. Of equal scores the smallest index is first.
// A box is dropped as soon as its score is not >= min_score, and drops or decays no other after
// that. A factor of 0 makes any score 0, infinity too.
//
// Scores never rise. So the order of selection is the order of the result, also across classes.
//
// Arithmetic is fp64 where boxes or scores are fp64, int32 or int64, and else fp32; without FMA,
// IoU as in common/boxes.h. The gaussian factor is computed in fp64 and rounded once. iou_threshold
// and min_score are rounded to the type of the arithmetic.
//
// A box that overlaps nothing (empty, inverted, of infinite area) and a NaN IoU decay nothing; a
// box whose score is NaN or negative is dropped. Hence no box changes another's fate but by
// overlapping it.
//
// Deterministic, and equal bit for bit on every device and for any number of threads. No torch in
// this file.
#pragma once

#include <cstdint>

#include "common/boxes.h"
#include "common/rounding.h"
#include "common/types.h"

namespace opzoo {

// So that positions, and what a grid steps beyond them, are 32-bit.
constexpr int64_t kSoftNmsMostBoxes = int64_t{1} << 30;

enum class SoftNmsMethod : int64_t { kNaive, kLinear, kGaussian };

// Boxes that have left the competition, selected or dropped. Below every score that takes part.
constexpr int kSoftNmsGone = -1;

template <class acc>
struct SoftNmsRule {
  acc iou_threshold;
  acc min_score;
  double sigma;
};

// Box rows and scores as they lie in the caller's tensors.
struct SoftNmsInput {
  const void* boxes = nullptr;
  int64_t row_stride = 0, column_stride = 0;
  const void* scores = nullptr;
  int64_t score_stride = 0;
};

template <class T, class acc>
OPZOO_HOST_DEVICE Box<acc> soft_nms_box(const SoftNmsInput& input, int64_t i) {
  const T* row = static_cast<const T*>(input.boxes) + i * input.row_stride;
  return {static_cast<acc>(row[0]),
          static_cast<acc>(row[input.column_stride]),
          static_cast<acc>(row[2 * input.column_stride]),
          static_cast<acc>(row[3 * input.column_stride])};
}

// -0 becomes +0: from here on equal scores have equal bits.
template <class T, class acc>
OPZOO_HOST_DEVICE acc soft_nms_score(const SoftNmsInput& input, int64_t i, acc min_score) {
  const auto score =
      static_cast<acc>(static_cast<const T*>(input.scores)[i * input.score_stride]) + acc(0);
  return score >= min_score ? score : acc(kSoftNmsGone);  // false for NaN
}

// exp(x) for x <= 0, within one unit of the last place and the same on every device; 0 below
// exp(-700), where fp64 is still normal. exp(x) = 2^k exp(r), r = x - k ln 2, |r| <= ln(2) / 2, and
// the Taylor series of exp(r) to the 13th power, whose remainder is 4e-18.
OPZOO_HOST_DEVICE double exp_of_negative(double x) {
  constexpr double kShift =
      0x1.8p52;  // added to a small number, leaves its integer in the low bits
  constexpr double kLn2High = 0x1.62e42fee00000p-1, kLn2Low = 0x1.a39ef35793c76p-33;
  const double bounded = x > -700.0 ? x : -700.0;
  const double shifted = multiply_rounded(bounded, 0x1.71547652b82fep+0) + kShift;
  const double k = shifted - kShift;
  const double r = bounded - multiply_rounded(k, kLn2High) - multiply_rounded(k, kLn2Low);
  double sum = 1.0 / 6227020800.0;
  sum = multiply_rounded(sum, r) + 1.0 / 479001600.0;
  sum = multiply_rounded(sum, r) + 1.0 / 39916800.0;
  sum = multiply_rounded(sum, r) + 1.0 / 3628800.0;
  sum = multiply_rounded(sum, r) + 1.0 / 362880.0;
  sum = multiply_rounded(sum, r) + 1.0 / 40320.0;
  sum = multiply_rounded(sum, r) + 1.0 / 5040.0;
  sum = multiply_rounded(sum, r) + 1.0 / 720.0;
  sum = multiply_rounded(sum, r) + 1.0 / 120.0;
  sum = multiply_rounded(sum, r) + 1.0 / 24.0;
  sum = multiply_rounded(sum, r) + 1.0 / 6.0;
  sum = multiply_rounded(sum, r) + 0.5;
  sum = multiply_rounded(sum, r) + 1.0;
  sum = multiply_rounded(sum, r) + 1.0;
  const int64_t exponent = bit_cast<int64_t>(shifted) << 52;  // k modulo 2^12, where exponents lie
  const double result = bit_cast<double>(bit_cast<int64_t>(sum) + exponent);
  return x > -700.0 ? result : 0.0;
}

// False only for boxes that change nothing in each other: a test without arithmetic.
template <class acc>
OPZOO_HOST_DEVICE bool soft_nms_may_overlap(const Box<acc>& a, const Box<acc>& b) {
  return a.x1 < b.x2 && b.x1 < a.x2 && a.y1 < b.y2 && b.y1 < a.y2;
}

// What the score of a box is multiplied by when a box of this IoU with it is selected. Here and
// below nothing is computed under a condition, so that loops over lanes vectorise.
template <SoftNmsMethod kMethod, class acc>
OPZOO_HOST_DEVICE acc soft_nms_factor(const SoftNmsRule<acc>& rule, acc iou) {
  const bool overlaps = iou > acc(0);  // false for NaN
  if constexpr (kMethod == SoftNmsMethod::kGaussian) {
    const double wide = static_cast<double>(iou);
    const double exponent = divide_rounded(multiply_rounded(wide, wide), rule.sigma);
    const acc factor = static_cast<acc>(exp_of_negative(-exponent));
    return overlaps ? factor : acc(1);
  } else {
    const acc factor = kMethod == SoftNmsMethod::kNaive ? acc(0) : acc(1) - iou;
    return overlaps & (iou >= rule.iou_threshold) ? factor : acc(1);
  }
}

template <class acc>
OPZOO_HOST_DEVICE acc soft_nms_decayed(const SoftNmsRule<acc>& rule, acc score, acc factor) {
  const acc product = multiply_rounded(score, factor);
  const acc decayed = factor > acc(0) ? product : acc(0);
  return decayed >= rule.min_score ? decayed : acc(kSoftNmsGone);
}

}  // namespace opzoo
