// SPDX-License-Identifier: Apache-2.0
// The device-independent half of roi_pool: checks, results, parameters. Defined in roi_pool.cpp.
#pragma once

#include "common/dispatch.h"
#include "roi_pool/roi_pool.h"

namespace opzoo {

struct RoIPoolPlan {
  RoIPoolParams params;
  Tensor output, argmax;  // allocated, not yet written
};

RoIPoolPlan plan_roi_pool(const Tensor& input,
                          const Tensor& boxes,
                          int64_t pooled_height,
                          int64_t pooled_width,
                          double spatial_scale,
                          bool rounded);

// Where gradients go: [N, C, H, W] zeros in the type of the sums.
Tensor plan_roi_pool_backward(const Tensor& grad,
                              const Tensor& argmax,
                              const Tensor& boxes,
                              int64_t batch,
                              int64_t channels,
                              int64_t height,
                              int64_t width,
                              RoIPoolParams& params);

}  // namespace opzoo
