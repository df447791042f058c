// SPDX-License-Identifier: Apache-2.0
// Schemas and checks: what sigmoid_focal_loss does before a device is involved.
#include "sigmoid_focal_loss/sigmoid_focal_loss_plan.h"

namespace opzoo {
namespace {

void check_targets(const char* op, const Tensor& inputs, const Tensor& targets) {
  check_same_device(op, "targets", targets, "inputs", inputs);
  if (targets.scalar_type() != ScalarType::Long) {
    check_same_dtype(op, "targets", targets, "inputs", inputs);
    check_shape(op, "targets", targets, sizes_of(inputs));
    return;
  }
  OPZOO_CHECK(inputs.dim() > 0, op, "inputs must have an axis of classes for class ids, got none");
  Sizes rows = sizes_of(inputs);
  rows.pop_back();
  check_shape(op, "targets", targets, rows);
}

SigmoidFocalLossPlan make_plan(const char* op,
                               const Tensor* grad,
                               const Tensor& inputs,
                               const Tensor& targets,
                               double alpha,
                               double gamma) {
  OPZOO_CHECK_VALUE(
      alpha <= 1 && (alpha >= 0 || alpha == -1), op, "alpha must be in [0, 1] or -1, got ", alpha);
  OPZOO_CHECK_VALUE(
      std::isfinite(gamma) && gamma >= 0, op, "gamma must be finite and not negative, got ", gamma);
  SigmoidFocalLossPlan plan;
  const Sizes sizes = sizes_of(inputs);
  plan.out = empty(sizes, inputs.scalar_type(), inputs);
  SigmoidFocalLossParams& p = plan.params;
  p.inputs = inputs.const_data_ptr();
  p.targets = targets.const_data_ptr();
  p.grad = grad ? grad->const_data_ptr() : nullptr;
  p.out = plan.out.mutable_data_ptr();
  p.alpha = alpha;
  p.gamma = gamma;
  const Sizes out_strides = strides_of(plan.out);
  const Sizes input_strides = strides_of(inputs);
  const Sizes grad_strides = grad ? strides_of(*grad) : Sizes(sizes.size(), 0);
  Sizes target_strides = strides_of(targets);
  if (targets.scalar_type() == ScalarType::Long) {
    p.classes = sizes.back();
    target_strides.push_back(0);
  }
  const std::array<const int64_t*, 4> strides = {
      out_strides.data(), input_strides.data(), target_strides.data(), grad_strides.data()};
  const bool fits =
      make_strided_loop<4>(static_cast<int>(sizes.size()), sizes.data(), strides, p.loop);
  OPZOO_CHECK(
      fits, op, "at most ", kMaxLoopAxes, " axes that do not merge, got shape ", shape(inputs));
  return plan;
}

}  // namespace

SigmoidFocalLossPlan plan_sigmoid_focal_loss(const Tensor& inputs,
                                             const Tensor& targets,
                                             double alpha,
                                             double gamma) {
  constexpr const char* kOp = "sigmoid_focal_loss";
  check_floating(kOp, "inputs", inputs);
  check_targets(kOp, inputs, targets);
  return make_plan(kOp, nullptr, inputs, targets, alpha, gamma);
}

SigmoidFocalLossPlan plan_sigmoid_focal_loss_backward(
    const Tensor& grad, const Tensor& inputs, const Tensor& targets, double alpha, double gamma) {
  constexpr const char* kOp = "_sigmoid_focal_loss_backward";
  check_floating(kOp, "inputs", inputs);
  check_targets(kOp, inputs, targets);
  check_same_device(kOp, "grad", grad, "inputs", inputs);
  check_same_dtype(kOp, "grad", grad, "inputs", inputs);
  check_shape(kOp, "grad", grad, sizes_of(inputs));
  return make_plan(kOp, &grad, inputs, targets, alpha, gamma);
}

}  // namespace opzoo

OPZOO_SCHEMAS(m) {
  m.def("sigmoid_focal_loss(Tensor inputs, Tensor targets, float alpha, float gamma) -> Tensor");
  m.def(
      "_sigmoid_focal_loss_backward(Tensor grad, Tensor inputs, Tensor targets, float alpha, float "
      "gamma) -> Tensor");
}
