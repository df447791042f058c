// SPDX-License-Identifier: Apache-2.0
// The device-independent half of roi_align: checks, results, parameters. Defined in roi_align.cpp.
#pragma once

#include "common/dispatch.h"
#include "roi_align/roi_align.h"

namespace opzoo {

struct RoIAlignOptions {
  double spatial_scale;
  int64_t sampling_ratio;
  bool aligned;
};

struct RoIAlignPlan {
  Tensor boxes;   // keeps converted boxes alive
  Tensor out;     // output, grad_input or grad_boxes, allocated, not yet written
  Tensor argmax;  // of the maximum forward, allocated, not yet written
  RoIAlignParams params;
};

// output (and argmax, where the maximum is asked for) from input.
RoIAlignPlan plan_roi_align(const char* op,
                            const Tensor& input,
                            const Tensor& boxes,
                            const OptionalTensor& batch_index,
                            int64_t pooled_height,
                            int64_t pooled_width,
                            const RoIAlignOptions& options,
                            bool want_argmax);

// output from input, with the sample of each bin given by argmax.
RoIAlignPlan plan_roi_align_sample(const char* op,
                                   const Tensor& input,
                                   const Tensor& argmax,
                                   const Tensor& boxes,
                                   const OptionalTensor& batch_index,
                                   const RoIAlignOptions& options);

// grad_input from grad. sizes is (N, C, H, W).
RoIAlignPlan plan_roi_align_backward(const char* op,
                                     const Tensor& grad,
                                     const Tensor* argmax,
                                     const Tensor& boxes,
                                     const OptionalTensor& batch_index,
                                     const Sizes& sizes,
                                     const RoIAlignOptions& options,
                                     bool channels_last);

// grad_boxes from grad and input, in the dtype that coordinates are computed in.
RoIAlignPlan plan_roi_align_boxes(const char* op,
                                  const Tensor& grad,
                                  const Tensor& input,
                                  const Tensor& boxes,
                                  const OptionalTensor& batch_index,
                                  const RoIAlignOptions& options);

// ValueError unless no axis is negative and the bytes of a fp64 or int64 tensor of these sizes fit
// int64.
void check_sizes(const char* op, const char* name, const Sizes& sizes);

Sizes strides_for(const Sizes& sizes, bool channels_last);

// ValueError for RoI k, whose image index is none of the batch. value is the index as text.
[[noreturn]] void refuse_image_index(const char* op,
                                     const RoIAlignParams& p,
                                     int64_t k,
                                     const std::string& value);

}  // namespace opzoo
