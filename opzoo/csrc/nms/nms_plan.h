// SPDX-License-Identifier: Apache-2.0
// The device-independent half of nms and batched_nms: checks and views. Defined in nms.cpp.
#pragma once

#include "common/dispatch.h"
#include "nms/nms.h"

namespace opzoo {

struct NmsPlan {
  const char* op;
  int64_t n;
  double iou_threshold;
  Tensor boxes, scores;
  OptionalTensor classes;  // int64; none for nms
  BoxesView view;
};

NmsPlan plan_nms(const char* op,
                 const Tensor& boxes,
                 const Tensor& scores,
                 const OptionalTensor& idxs,
                 double iou_threshold);

}  // namespace opzoo
