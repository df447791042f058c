// SPDX-License-Identifier: Apache-2.0
// nms(boxes, scores, iou_threshold) and batched_nms(boxes, scores, idxs, iou_threshold): greedy
// non-maximum suppression. Boxes are visited in score order; a box is kept unless a box kept before
// it, of the same class in batched_nms, has IoU > iou_threshold with it.
//
//   boxes          [N, 4] (x1, y1, x2, y2), any float or integer dtype, any strides
//   scores         [N], any float or integer dtype, not necessarily that of boxes
//   idxs           [N], any integer dtype, compared as int64; any values
//   iou_threshold  in [0, 1]
//   result         int64 [K], indices of the kept boxes in score order
//
// Order: score descending, then index ascending. -0 equals +0. A NaN score ranks below -inf.
//
// IoU: inter / (area_a + area_b - inter), inter = max(0, width) * max(0, height) of the overlap,
// area = (x2 - x1) * (y2 - y1), by true division and without FMA. fp32 for boxes of at most 32-bit
// floats or 16-bit integers, fp64 for fp64, int32 and int64 boxes. The threshold is rounded to that
// type first, so that 0.3 compares equal to an fp32 IoU of 0.3.
//
// A NaN IoU suppresses nothing. Hence a box with a NaN coordinate, with an area of zero, or with a
// negative width or height (it overlaps nothing) neither suppresses nor is suppressed. The same
// holds for a box of infinite area, and for two boxes whose areas add up to infinity: the IoU is 0
// or NaN.
//
// Deterministic, and equal bit for bit on every device and for any number of threads. No torch in
// this file.
#pragma once

#include <cstdint>

#include "common/boxes.h"
#include "common/types.h"

namespace opzoo {

// Where box i lies in the caller's tensor.
struct BoxesView {
  const void* data = nullptr;
  int64_t row_stride = 0, column_stride = 0;
};

template <class T>
OPZOO_HOST_DEVICE Box<box_acc_t<T>> load_box(const BoxesView& view, int64_t i) {
  using acc = box_acc_t<T>;
  const T* row = static_cast<const T*>(view.data) + i * view.row_stride;
  return {static_cast<acc>(row[0]),
          static_cast<acc>(row[view.column_stride]),
          static_cast<acc>(row[2 * view.column_stride]),
          static_cast<acc>(row[3 * view.column_stride])};
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

}  // namespace opzoo
