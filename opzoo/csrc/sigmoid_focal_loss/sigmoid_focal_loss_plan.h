// SPDX-License-Identifier: Apache-2.0
// The device-independent half of sigmoid_focal_loss: checks, result, parameters. Defined in
// sigmoid_focal_loss.cpp.
#pragma once

#include "common/dispatch.h"
#include "sigmoid_focal_loss/sigmoid_focal_loss.h"

namespace opzoo {

struct SigmoidFocalLossPlan {
  Tensor out;  // allocated, not yet written
  SigmoidFocalLossParams params;
};

SigmoidFocalLossPlan plan_sigmoid_focal_loss(const Tensor& inputs,
                                             const Tensor& targets,
                                             double alpha,
                                             double gamma);
SigmoidFocalLossPlan plan_sigmoid_focal_loss_backward(
    const Tensor& grad, const Tensor& inputs, const Tensor& targets, double alpha, double gamma);

}  // namespace opzoo
