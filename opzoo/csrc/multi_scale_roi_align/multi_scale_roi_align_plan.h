// SPDX-License-Identifier: Apache-2.0
// The device-independent half of multi_scale_roi_align: checks, results, parameters. Defined in
// multi_scale_roi_align.cpp.
#pragma once

#include "multi_scale_roi_align/multi_scale_roi_align.h"
#include "roi_align/roi_align_plan.h"

namespace opzoo {

struct MultiScaleRoIAlignOptions {
  const std::vector<double>& spatial_scales;
  int64_t sampling_ratio;
  bool aligned;
  double canonical_scale, canonical_level;
  int64_t min_level, max_level;
};

struct MultiScaleRoIAlignPlan {
  RoIAlignPlan first;               // with the first map: boxes, and output in `out`
  std::vector<Tensor> grad_inputs;  // of the backward, allocated, not yet written
  RoIAlignPyramid pyramid;
};

// output from inputs.
MultiScaleRoIAlignPlan plan_multi_scale_roi_align(const char* op,
                                                  const std::vector<Tensor>& inputs,
                                                  const Tensor& boxes,
                                                  const OptionalTensor& batch_index,
                                                  int64_t pooled_height,
                                                  int64_t pooled_width,
                                                  const MultiScaleRoIAlignOptions& options);

// grad_inputs from grad. heights and widths are the maps'.
MultiScaleRoIAlignPlan plan_multi_scale_roi_align_backward(const char* op,
                                                           const Tensor& grad,
                                                           const Tensor& boxes,
                                                           const OptionalTensor& batch_index,
                                                           int64_t batch,
                                                           int64_t channels,
                                                           const std::vector<int64_t>& heights,
                                                           const std::vector<int64_t>& widths,
                                                           const MultiScaleRoIAlignOptions& options,
                                                           bool channels_last);

}  // namespace opzoo
