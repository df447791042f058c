// SPDX-License-Identifier: Apache-2.0
// Greedy non-maximum suppression. Boxes are visited in score order; a box is kept unless a box kept
// before it, of the same class, has IoU > iou_threshold with it.
//
//   nms(boxes, scores, iou_threshold, *, score_threshold, max_output)
//   batched_nms(boxes, scores, idxs, iou_threshold, *, score_threshold, max_output)
//     boxes            [N, 4] (x1, y1, x2, y2), any float or integer dtype, any strides
//     scores           [N], any float or integer dtype, not necessarily that of boxes
//     idxs             [N], the class, any integer dtype, compared as int64; any values
//     iou_threshold    in [0, 1]
//     score_threshold  only boxes with score > score_threshold take part; none: all do
//     max_output       stop after this many kept boxes (of all classes together); none: never
//     result           int64 [K], indices of the kept boxes in score order
//   nms_padded(boxes, scores, iou_threshold, max_output, *, idxs, score_threshold)
//     boxes [..., N, 4], scores and idxs [..., N]: each image by itself
//     result           indices int64 [..., max_output], the kept boxes in score order, then -1;
//                      count int64 [...]. Its shape is known beforehand: no device is waited for.
//   _nms_leaders(boxes, scores, iou_threshold)
//     result           int64 [N]: of a kept box its own index, of any other the index of the first
//                      kept box, in score order, that suppresses it
//
// Order: score descending, then index ascending. -0 equals +0. A NaN score ranks below -inf, and is
// above no score_threshold.
//
// score_threshold is rounded to the scores' dtype first, so that a float16 score of 0.3 does not
// exceed 0.3; against integers it is compared exactly.
//
// IoU: inter / (area_a + area_b - inter), inter = max(0, width) * max(0, height) of the overlap,
// area = (x2 - x1) * (y2 - y1), by true division and without FMA. fp32 for boxes of at most 32-bit
// floats or 16-bit integers, fp64 for fp64, int32 and int64 boxes. The threshold is rounded to that
// type first, so that 0.3 compares equal to an fp32 IoU of 0.3.
//
// A box takes no part in suppression, on either side, unless can_overlap() holds for it: both sides
// and the area positive, the area finite. That follows from the formula: a NaN IoU is above
// nothing, an inverted or empty box overlaps nothing, and an infinite area makes the IoU 0 or NaN.
// The same holds for two boxes whose areas add up to infinity. So no such box changes another's
// fate.
//
// Deterministic, and equal bit for bit on every device and for any number of threads. No torch in
// this file.
#pragma once

#include <cstdint>

#include "common/boxes.h"
#include "common/types.h"

namespace opzoo {

// Where box i of an image lies in the caller's tensor. Strides count elements.
struct BoxesView {
  const void* data = nullptr;
  int64_t image_stride = 0, row_stride = 0, column_stride = 0;
};

// One number per box: a score or a class.
struct NumbersView {
  const void* data = nullptr;  // null: all equal
  int64_t image_stride = 0, stride = 0;
};

template <class T>
OPZOO_HOST_DEVICE Box<box_acc_t<T>> load_box(const BoxesView& view, int64_t image, int64_t i) {
  using acc = box_acc_t<T>;
  const T* row = static_cast<const T*>(view.data) + image * view.image_stride + i * view.row_stride;
  return {static_cast<acc>(row[0]),
          static_cast<acc>(row[view.column_stride]),
          static_cast<acc>(row[2 * view.column_stride]),
          static_cast<acc>(row[3 * view.column_stride])};
}

template <class T>
OPZOO_HOST_DEVICE T load_number(const NumbersView& view, int64_t image, int64_t i) {
  return static_cast<const T*>(view.data)[image * view.image_stride + i * view.stride];
}

// An integer that orders as the score does: key(a) > key(b) exactly where a ranks before b.
template <class T>
OPZOO_HOST_DEVICE int64_t score_key(T score) {
  if constexpr (std::is_integral_v<T>) {
    return static_cast<int64_t>(score);
  } else {
    constexpr int64_t kSmallest = INT64_MIN;  // below the key of -inf
    const double value = static_cast<double>(static_cast<acc_t<T>>(score));
    if (value != value) return kSmallest;
    if (value == 0) return 0;
    // Read as an integer, positive doubles ascend; negative ones descend until their magnitude bits
    // are flipped.
    const int64_t bits = bit_cast<int64_t>(value);
    return bits >= 0 ? bits : bits ^ INT64_MAX;
  }
}

// score > score_threshold, on keys. Where every score passes there is no limit.
struct ScoreLimit {
  bool exists = false;
  int64_t key = 0;

  OPZOO_HOST_DEVICE bool admits(int64_t score_key) const { return !exists || score_key > key; }
};

// Where this is false the box's IoU with any box, itself included, is above no threshold.
template <class acc>
OPZOO_HOST_DEVICE bool can_overlap(const Box<acc>& box, acc area) {
  return box.x1 < box.x2 && box.y1 < box.y2 && area > 0 && area - area == 0;  // finite
}

}  // namespace opzoo
