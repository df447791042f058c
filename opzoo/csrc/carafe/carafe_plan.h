// SPDX-License-Identifier: Apache-2.0
// The device-independent half of carafe: checks, results, parameters. Defined in carafe.cpp.
#pragma once

#include "carafe/carafe.h"
#include "common/dispatch.h"

namespace opzoo {

struct CarafePlan {
  CarafeParams params;
  Tensor out;                        // forward: allocated, not yet written
  Tensor grad_features, grad_masks;  // backward: likewise
};

CarafePlan plan_carafe(const Tensor& features,
                       const Tensor& masks,
                       int64_t kernel_size,
                       int64_t group_size,
                       int64_t scale_factor);
CarafePlan plan_carafe_backward(const Tensor& grad,
                                const Tensor& features,
                                const Tensor& masks,
                                int64_t kernel_size,
                                int64_t group_size,
                                int64_t scale_factor);

}  // namespace opzoo
