// SPDX-License-Identifier: Apache-2.0
// Schemas and checks: what carafe does before a device is involved.
#include "carafe/carafe_plan.h"

namespace opzoo {
namespace {

CarafeImage image_of(const Tensor& t) {
  CarafeImage image;
  image.data = t.const_data_ptr();
  for (int axis = 0; axis < 4; ++axis) image.stride[axis] = t.stride(axis);
  return image;
}

CarafePlan make_plan(const char* op,
                     const Tensor& features,
                     const Tensor& masks,
                     int64_t kernel_size,
                     int64_t group_size,
                     int64_t scale_factor) {
  check_floating(op, "features", features);
  check_rank(op, "features", features, 4);
  check_same_device(op, "masks", masks, "features", features);
  check_same_dtype(op, "masks", masks, "features", features);
  constexpr int64_t kMost = 1024;  // of kernel size and scale: products of sizes stay far from 2^63
  OPZOO_CHECK_VALUE(kernel_size > 0 && kernel_size % 2 == 1 && kernel_size <= kMost,
                    op,
                    "kernel_size must be odd, from 1 to 1023, got ",
                    kernel_size);
  OPZOO_CHECK_VALUE(scale_factor > 0 && scale_factor <= kMost,
                    op,
                    "scale_factor must be from 1 to 1024, got ",
                    scale_factor);
  const int64_t channels = features.size(1);
  OPZOO_CHECK_VALUE(group_size > 0 && channels % group_size == 0,
                    op,
                    "group_size must divide the ",
                    channels,
                    " channels of features, got ",
                    group_size);
  CarafePlan plan;
  CarafeParams& p = plan.params;
  p.N = features.size(0);
  p.C = channels;
  p.H = features.size(2);
  p.W = features.size(3);
  p.k = kernel_size;
  p.groups = group_size;
  p.s = scale_factor;
  check_shape(
      op,
      "masks",
      masks,
      {p.N, group_size * kernel_size * kernel_size, p.H * scale_factor, p.W * scale_factor});
  p.features = image_of(features);
  p.masks = image_of(masks);
  return plan;
}

}  // namespace

CarafePlan plan_carafe(const Tensor& features,
                       const Tensor& masks,
                       int64_t kernel_size,
                       int64_t group_size,
                       int64_t scale_factor) {
  CarafePlan plan = make_plan("carafe", features, masks, kernel_size, group_size, scale_factor);
  const CarafeShape shape = CarafeForward::shape(plan.params);
  plan.out = empty({shape.n, shape.c, shape.y, shape.x}, features.scalar_type(), features);
  return plan;
}

CarafePlan plan_carafe_backward(const Tensor& grad,
                                const Tensor& features,
                                const Tensor& masks,
                                int64_t kernel_size,
                                int64_t group_size,
                                int64_t scale_factor) {
  constexpr const char* kOp = "_carafe_backward";
  CarafePlan plan = make_plan(kOp, features, masks, kernel_size, group_size, scale_factor);
  const CarafeShape shape = CarafeForward::shape(plan.params);
  check_same_device(kOp, "grad", grad, "features", features);
  check_same_dtype(kOp, "grad", grad, "features", features);
  check_shape(kOp, "grad", grad, {shape.n, shape.c, shape.y, shape.x});
  plan.params.grad = image_of(grad);
  plan.grad_features = empty(sizes_of(features), features.scalar_type(), features);
  plan.grad_masks = empty(sizes_of(masks), masks.scalar_type(), masks);
  return plan;
}

}  // namespace opzoo

OPZOO_SCHEMAS(m) {
  m.def(
      "carafe(Tensor features, Tensor masks, int kernel_size, int group_size, int scale_factor) -> "
      "Tensor");
  m.def(
      "_carafe_backward(Tensor grad, Tensor features, Tensor masks, int kernel_size, int "
      "group_size, "
      "int scale_factor) -> (Tensor, Tensor)");
}
