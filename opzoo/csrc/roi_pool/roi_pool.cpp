// SPDX-License-Identifier: Apache-2.0
// Schemas and checks: what roi_pool does before a device is involved.
#include "roi_pool/roi_pool_plan.h"

namespace opzoo {
namespace {

ScalarType sum_dtype(ScalarType dtype) {
  return dtype == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

// Of the boxes, whose dtype is that of the sums; on the CPU their image indices too.
void bind_boxes(const char* op,
                const Tensor& features,
                const char* name,
                const Tensor& boxes,
                RoIPoolParams& p) {
  check_same_device(op, "boxes", boxes, name, features);
  const ScalarType dtype = sum_dtype(features.scalar_type());
  OPZOO_CHECK(boxes.scalar_type() == dtype,
              op,
              "boxes must be ",
              dtype_name(dtype),
              ", got ",
              dtype_name(boxes.scalar_type()));
  OPZOO_CHECK(boxes.dim() == 2 && boxes.size(1) == 5,
              op,
              "boxes must have shape [K, 5] (image index, x1, y1, x2, y2), got ",
              shape(boxes));
  p.boxes = boxes.const_data_ptr();
  p.boxes_stride[0] = boxes.stride(0);
  p.boxes_stride[1] = boxes.stride(1);
  p.K = boxes.size(0);
  OPZOO_CHECK(p.K == 0 || (p.N > 0 && p.H > 0 && p.W > 0),
              op,
              "boxes must be empty for a map of shape ",
              to_string({p.N, p.C, p.H, p.W}),
              ", got ",
              p.K,
              " boxes");
  if (!boxes.is_cpu()) return;
  dispatch_floating(boxes.scalar_type(), op, [&]<class T>() {
    for (int64_t k = 0; k < p.K; ++k) {
      OPZOO_CHECK_VALUE(pool_image<acc_t<T>>(p, k) >= 0,
                        op,
                        "image index of box ",
                        k,
                        " must be an integer in [0, ",
                        p.N,
                        "), got ",
                        static_cast<const acc_t<T>*>(p.boxes)[k * p.boxes_stride[0]]);
    }
  });
}

}  // namespace

RoIPoolPlan plan_roi_pool(const Tensor& input,
                          const Tensor& boxes,
                          int64_t pooled_height,
                          int64_t pooled_width,
                          double spatial_scale,
                          bool rounded) {
  constexpr const char* kOp = "roi_pool";
  check_floating(kOp, "input", input);
  check_rank(kOp, "input", input, 4);
  OPZOO_CHECK_VALUE(pooled_height > 0 && pooled_width > 0,
                    kOp,
                    "output_size must be positive, got (",
                    pooled_height,
                    ", ",
                    pooled_width,
                    ")");
  OPZOO_CHECK_VALUE(std::isfinite(spatial_scale) && spatial_scale > 0,
                    kOp,
                    "spatial_scale must be finite and positive, got ",
                    spatial_scale);
  RoIPoolPlan plan;
  RoIPoolParams& p = plan.params;
  p.input = input.const_data_ptr();
  for (int axis = 0; axis < 4; ++axis) p.input_stride[axis] = input.stride(axis);
  p.N = input.size(0);
  p.C = input.size(1);
  p.H = input.size(2);
  p.W = input.size(3);
  p.pooled_height = pooled_height;
  p.pooled_width = pooled_width;
  p.spatial_scale = spatial_scale;
  p.rounded = rounded;
  bind_boxes(kOp, input, "input", boxes, p);
  const double bytes = 8.0 * static_cast<double>(p.K) * static_cast<double>(p.C) *
                       static_cast<double>(pooled_height) * static_cast<double>(pooled_width);
  OPZOO_CHECK_VALUE(bytes < 0x1p62, kOp, "output_size is too large for ", p.K, " boxes");
  plan.output = empty({p.K, p.C, pooled_height, pooled_width}, input.scalar_type(), input);
  plan.argmax = empty(sizes_of(plan.output), ScalarType::Long, input);
  return plan;
}

Tensor plan_roi_pool_backward(const Tensor& grad,
                              const Tensor& argmax,
                              const Tensor& boxes,
                              int64_t batch,
                              int64_t channels,
                              int64_t height,
                              int64_t width,
                              RoIPoolParams& p) {
  constexpr const char* kOp = "_roi_pool_backward";
  check_floating(kOp, "grad", grad);
  check_rank(kOp, "grad", grad, 4);
  check_same_device(kOp, "argmax", argmax, "grad", grad);
  check_shape(kOp, "argmax", argmax, sizes_of(grad));
  OPZOO_CHECK(argmax.scalar_type() == ScalarType::Long,
              kOp,
              "argmax must be int64, got ",
              dtype_name(argmax.scalar_type()));
  OPZOO_CHECK_VALUE(batch >= 0 && channels >= 0 && height >= 0 && width >= 0,
                    kOp,
                    "batch, channels, height and width must not be negative, got ",
                    to_string({batch, channels, height, width}));
  const double elements = static_cast<double>(batch) * static_cast<double>(channels) *
                          static_cast<double>(height) * static_cast<double>(width);
  OPZOO_CHECK_VALUE(elements < 0x1p59,
                    kOp,
                    "the map of ",
                    to_string({batch, channels, height, width}),
                    " is too large");
  p.N = batch;
  p.C = channels;
  p.H = height;
  p.W = width;
  bind_boxes(kOp, grad, "grad", boxes, p);
  OPZOO_CHECK(grad.size(0) == p.K && grad.size(1) == channels,
              kOp,
              "grad must have shape [",
              p.K,
              ", ",
              channels,
              ", ...], got ",
              shape(grad));
  return zeros({batch, channels, height, width}, sum_dtype(grad.scalar_type()), grad);
}

}  // namespace opzoo

OPZOO_SCHEMAS(m) {
  m.def(
      "roi_pool(Tensor input, Tensor boxes, SymInt pooled_height, SymInt pooled_width, float "
      "spatial_scale, bool rounded) -> (Tensor output, Tensor argmax)");
  m.def(
      "_roi_pool_backward(Tensor grad, Tensor argmax, Tensor boxes, SymInt batch, SymInt channels, "
      "SymInt height, SymInt width) -> Tensor");
}
