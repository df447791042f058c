// SPDX-License-Identifier: Apache-2.0
// The device-independent half of nms, batched_nms, nms_padded and _nms_leaders: checks and views.
// Defined in nms.cpp.
#pragma once

#include "common/dispatch.h"
#include "nms/nms.h"

namespace opzoo {

struct NmsPlan {
  const char* op;
  int64_t images;          // the leading axes of nms_padded, flattened; else 1
  int64_t n;               // boxes of an image
  int64_t max_output;      // kept boxes of an image at most; INT64_MAX: no limit
  double iou_threshold;    // to be rounded to box_acc_t
  ScoreLimit score_limit;  // on score_key
  Tensor boxes, scores;    // of the caller, or contiguous copies
  OptionalTensor classes;  // int64; none: all boxes are of one class
  BoxesView boxes_view;
  NumbersView scores_view, classes_view;
  Sizes batch_sizes;  // the leading axes of nms_padded
};

// nms, batched_nms and _nms_leaders: boxes [N, 4].
NmsPlan plan_nms(const char* op,
                 const Tensor& boxes,
                 const Tensor& scores,
                 const OptionalTensor& idxs,
                 double iou_threshold,
                 std::optional<double> score_threshold,
                 std::optional<int64_t> max_output);

// nms_padded: boxes [..., N, 4].
NmsPlan plan_nms_padded(const Tensor& boxes,
                        const Tensor& scores,
                        double iou_threshold,
                        int64_t max_output,
                        const OptionalTensor& idxs,
                        std::optional<double> score_threshold);

}  // namespace opzoo
