// SPDX-License-Identifier: Apache-2.0
// Schemas, checks, results: what roi_align does before a device is involved.
#include "roi_align/roi_align_plan.h"

namespace opzoo {
namespace {

ScalarType accumulator_dtype(ScalarType dtype) {
  return dtype == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

// The largest n for which dtype holds all of 0, 1, ..., n. Boxes that are not floating are read as
// fp32; fp64 boxes are too, unless the features are fp64.
int64_t largest_exact_index(ScalarType boxes, ScalarType features) {
  if (boxes == ScalarType::Half) return int64_t{1} << 11;
  if (boxes == ScalarType::BFloat16) return int64_t{1} << 8;
  const bool fp64 = boxes == ScalarType::Double && features == ScalarType::Double;
  return int64_t{1} << (fp64 ? 53 : 24);
}

void check_options(const char* op, const RoIAlignOptions& options) {
  OPZOO_CHECK_VALUE(std::isfinite(options.spatial_scale) && options.spatial_scale > 0,
                    op,
                    "spatial_scale must be finite and positive, got ",
                    options.spatial_scale);
  OPZOO_CHECK_VALUE(options.sampling_ratio <= kMaxSamplingRatio,
                    op,
                    "sampling_ratio must be at most ",
                    kMaxSamplingRatio,
                    ", got ",
                    options.sampling_ratio);
}

void check_boxes(const char* op,
                 const Tensor& features,
                 const char* features_name,
                 const Tensor& boxes,
                 const OptionalTensor& batch_index) {
  check_rank(op, "boxes", boxes, 2);
  const ScalarType dtype = boxes.scalar_type();
  OPZOO_CHECK(is_floating(dtype) || is_integer(dtype),
              op,
              "boxes must have a floating or integer dtype, got ",
              dtype_name(dtype));
  check_same_device(op, "boxes", boxes, features_name, features);
  if (!batch_index) {
    OPZOO_CHECK(
        boxes.size(1) == 5,
        op,
        "boxes must have shape [K, 5] (image index, x1, y1, x2, y2) without batch_index, got ",
        shape(boxes));
    return;
  }
  OPZOO_CHECK(boxes.size(1) == 4,
              op,
              "boxes must have shape [K, 4] (x1, y1, x2, y2) with batch_index, got ",
              shape(boxes));
  check_shape(op, "batch_index", *batch_index, {boxes.size(0)});
  OPZOO_CHECK(batch_index->scalar_type() == ScalarType::Long,
              op,
              "batch_index must have dtype int64, got ",
              dtype_name(batch_index->scalar_type()));
  check_same_device(op, "batch_index", *batch_index, features_name, features);
}

void check_map(const char* op, const RoIAlignParams& p) {
  OPZOO_CHECK(p.rois == 0 || (p.batch > 0 && p.height > 0 && p.width > 0),
              op,
              "boxes must be empty for a map of shape ",
              to_string({p.batch, p.channels, p.height, p.width}),
              ", got ",
              p.rois,
              " boxes");
}

void check_index_precision(const char* op,
                           const RoIAlignParams& p,
                           ScalarType boxes,
                           ScalarType features) {
  const int64_t largest = largest_exact_index(boxes, features);
  OPZOO_CHECK(p.batch - 1 <= largest,
              op,
              "boxes of dtype ",
              dtype_name(boxes),
              " hold image indices exactly up to ",
              largest,
              ", got a batch of ",
              p.batch,
              " images; pass boxes as float32 or as a list with one tensor per image");
}

template <class acc>
void check_image_indices(const char* op, const RoIAlignParams& p) {
  for (int64_t k = 0; k < p.rois; ++k) {
    if (image_index<acc>(p, k) >= 0) continue;
    std::ostringstream value;
    if (p.batch_index) {
      value << p.batch_index[k * p.batch_index_stride];
    } else {
      value << static_cast<const acc*>(p.boxes)[k * p.boxes_stride[0]];
    }
    refuse_image_index(op, p, k, value.str());
  }
}

void copy_strides(const Tensor& t, int64_t (&strides)[4]) {
  for (int axis = 0; axis < 4; ++axis) strides[axis] = t.stride(axis);
}

// What all plans share, once params holds the sizes. features is input or grad.
void bind_boxes(const char* op,
                const Tensor& features,
                const char* features_name,
                const Tensor& boxes,
                const OptionalTensor& batch_index,
                const RoIAlignOptions& options,
                RoIAlignPlan& plan) {
  RoIAlignParams& p = plan.params;
  check_options(op, options);
  check_boxes(op, features, features_name, boxes, batch_index);
  p.rois = boxes.size(0);
  p.spatial_scale = options.spatial_scale;
  p.sampling_ratio = options.sampling_ratio;
  p.aligned = options.aligned;
  if (batch_index) {
    p.batch_index = data<int64_t>(*batch_index);
    p.batch_index_stride = batch_index->stride(0);
  }
  check_map(op, p);
  if (!batch_index) check_index_precision(op, p, boxes.scalar_type(), features.scalar_type());
  plan.boxes = to_dtype(boxes, accumulator_dtype(features.scalar_type()));
  p.boxes = plan.boxes.const_data_ptr();
  for (int axis = 0; axis < 2; ++axis) p.boxes_stride[axis] = plan.boxes.stride(axis);
  if (!features.is_cpu()) return;
  dispatch_floating(
      plan.boxes.scalar_type(), op, [&]<class T>() { check_image_indices<acc_t<T>>(op, p); });
}

void bind_input(const char* op, const Tensor& input, RoIAlignParams& p) {
  check_rank(op, "input", input, 4);
  check_floating(op, "input", input);
  p.batch = input.size(0);
  p.channels = input.size(1);
  p.height = input.size(2);
  p.width = input.size(3);
  copy_strides(input, p.map_stride);
}

void bind_pooled(const char* op, int64_t height, int64_t width, RoIAlignParams& p) {
  OPZOO_CHECK_VALUE(
      height > 0 && width > 0, op, "output_size must be positive, got (", height, ", ", width, ")");
  p.pooled_height = height;
  p.pooled_width = width;
}

void bind_argmax(const char* op,
                 const Tensor& argmax,
                 const Tensor& features,
                 const char* features_name,
                 RoIAlignParams& p) {
  check_defined(op, "argmax", argmax);
  OPZOO_CHECK(argmax.scalar_type() == ScalarType::Long,
              op,
              "argmax must have dtype int64, got ",
              dtype_name(argmax.scalar_type()));
  check_same_device(op, "argmax", argmax, features_name, features);
  check_shape(op, "argmax", argmax, {p.rois, p.channels, p.pooled_height, p.pooled_width});
  copy_strides(argmax, p.argmax_stride);
}

// 2^47 bytes of float64, what a process can address.
constexpr double kMaxOutputElements = 0x1p44;

// A tensor of the result's sizes, or an error that says where they come from.
Tensor empty_output(const char* op,
                    const RoIAlignParams& p,
                    const Sizes& strides,
                    ScalarType dtype,
                    const Tensor& input) {
  const Sizes sizes{p.rois, p.channels, p.pooled_height, p.pooled_width};
  const std::string size = "output_size (" + std::to_string(p.pooled_height) + ", " +
                           std::to_string(p.pooled_width) + ")";
  try {
    return empty_strided(sizes, strides, dtype, input);
  } catch (const std::exception& error) {
    fail<std::runtime_error>(
        op, size, " makes an output of shape ", to_string(sizes), ": ", error.what());
  }
}

void allocate_output(const char* op, const Tensor& input, RoIAlignPlan& plan) {
  RoIAlignParams& p = plan.params;
  const Sizes sizes{p.rois, p.channels, p.pooled_height, p.pooled_width};
  double elements = 1;
  for (const int64_t size : sizes) elements *= static_cast<double>(std::max<int64_t>(size, 1));
  OPZOO_CHECK_VALUE(elements <= kMaxOutputElements,
                    op,
                    "output is too large: output_size (",
                    p.pooled_height,
                    ", ",
                    p.pooled_width,
                    ") must give at most 2^44 elements, got ",
                    to_string(sizes));
  const Sizes strides = strides_for(sizes, is_channels_last(input));
  plan.out = empty_output(op, p, strides, input.scalar_type(), input);
  copy_strides(plan.out, p.pooled_stride);
}

}  // namespace

void check_sizes(const char* op, const char* name, const Sizes& sizes) {
  int64_t bytes = 8;
  for (const int64_t size : sizes) {
    OPZOO_CHECK_VALUE(size >= 0, op, name, " sizes must not be negative, got ", to_string(sizes));
    OPZOO_CHECK_VALUE(!__builtin_mul_overflow(bytes, size > 0 ? size : 1, &bytes),
                      op,
                      name,
                      " is too large: ",
                      to_string(sizes));
  }
}

Sizes strides_for(const Sizes& sizes, bool channels_last) {
  return channels_last ? channels_last_strides(sizes) : contiguous_strides(sizes);
}

void refuse_image_index(const char* op,
                        const RoIAlignParams& p,
                        int64_t k,
                        const std::string& value) {
  const std::string position = std::to_string(k);
  fail<std::invalid_argument>(op,
                              p.batch_index ? "batch_index[" + position + "]"
                                            : "boxes[" + position + ", 0] (the image index)",
                              " must be an integer in [0, ",
                              p.batch,
                              "), got ",
                              value);
}

RoIAlignPlan plan_roi_align(const char* op,
                            const Tensor& input,
                            const Tensor& boxes,
                            const OptionalTensor& batch_index,
                            int64_t pooled_height,
                            int64_t pooled_width,
                            const RoIAlignOptions& options,
                            bool want_argmax) {
  RoIAlignPlan plan;
  RoIAlignParams& p = plan.params;
  bind_input(op, input, p);
  bind_pooled(op, pooled_height, pooled_width, p);
  bind_boxes(op, input, "input", boxes, batch_index, options, plan);
  allocate_output(op, input, plan);
  if (want_argmax) {
    plan.argmax = empty_output(op, p, strides_of(plan.out), ScalarType::Long, input);
    copy_strides(plan.argmax, p.argmax_stride);
  }
  return plan;
}

RoIAlignPlan plan_roi_align_sample(const char* op,
                                   const Tensor& input,
                                   const Tensor& argmax,
                                   const Tensor& boxes,
                                   const OptionalTensor& batch_index,
                                   const RoIAlignOptions& options) {
  RoIAlignPlan plan;
  RoIAlignParams& p = plan.params;
  bind_input(op, input, p);
  check_rank(op, "argmax", argmax, 4);
  bind_pooled(op, argmax.size(2), argmax.size(3), p);
  bind_boxes(op, input, "input", boxes, batch_index, options, plan);
  bind_argmax(op, argmax, input, "input", p);
  allocate_output(op, input, plan);
  return plan;
}

RoIAlignPlan plan_roi_align_backward(const char* op,
                                     const Tensor& grad,
                                     const Tensor* argmax,
                                     const Tensor& boxes,
                                     const OptionalTensor& batch_index,
                                     const Sizes& sizes,
                                     const RoIAlignOptions& options,
                                     bool channels_last) {
  RoIAlignPlan plan;
  RoIAlignParams& p = plan.params;
  check_rank(op, "grad", grad, 4);
  check_floating(op, "grad", grad);
  check_sizes(op, "grad_input", sizes);
  p.batch = sizes[kRoIBatch];
  p.channels = sizes[kRoIChannel];
  p.height = sizes[kRoIRow];
  p.width = sizes[kRoIColumn];
  bind_pooled(op, grad.size(2), grad.size(3), p);
  bind_boxes(op, grad, "grad", boxes, batch_index, options, plan);
  check_shape(op, "grad", grad, {p.rois, p.channels, p.pooled_height, p.pooled_width});
  if (argmax) bind_argmax(op, *argmax, grad, "grad", p);
  plan.out = empty_strided(sizes, strides_for(sizes, channels_last), grad.scalar_type(), grad);
  copy_strides(plan.out, p.map_stride);
  copy_strides(grad, p.pooled_stride);
  return plan;
}

RoIAlignPlan plan_roi_align_boxes(const char* op,
                                  const Tensor& grad,
                                  const Tensor& input,
                                  const Tensor& boxes,
                                  const OptionalTensor& batch_index,
                                  const RoIAlignOptions& options) {
  RoIAlignPlan plan;
  RoIAlignParams& p = plan.params;
  bind_input(op, input, p);
  check_rank(op, "grad", grad, 4);
  check_same_dtype(op, "grad", grad, "input", input);
  check_same_device(op, "grad", grad, "input", input);
  bind_pooled(op, grad.size(2), grad.size(3), p);
  bind_boxes(op, input, "input", boxes, batch_index, options, plan);
  check_shape(op, "grad", grad, {p.rois, p.channels, p.pooled_height, p.pooled_width});
  copy_strides(grad, p.pooled_stride);
  plan.out = empty(sizes_of(boxes), plan.boxes.scalar_type(), input);
  return plan;
}

}  // namespace opzoo

OPZOO_SCHEMAS(m) {
  m.def(
      "roi_align(Tensor input, Tensor boxes, Tensor? batch_index, SymInt pooled_height, "
      "SymInt pooled_width, float spatial_scale, int sampling_ratio, bool aligned) -> Tensor");
  m.def(
      "_roi_align_backward(Tensor grad, Tensor boxes, Tensor? batch_index, SymInt batch, "
      "SymInt channels, SymInt height, SymInt width, float spatial_scale, int sampling_ratio, "
      "bool aligned, bool channels_last) -> Tensor");
  m.def(
      "_roi_align_boxes_backward(Tensor grad, Tensor input, Tensor boxes, Tensor? batch_index, "
      "float spatial_scale, int sampling_ratio, bool aligned) -> Tensor");
  m.def(
      "_roi_align_max(Tensor input, Tensor boxes, Tensor? batch_index, SymInt pooled_height, "
      "SymInt pooled_width, float spatial_scale, int sampling_ratio, bool aligned) "
      "-> (Tensor output, Tensor argmax)");
  m.def(
      "_roi_align_max_backward(Tensor grad, Tensor argmax, Tensor boxes, Tensor? batch_index, "
      "SymInt batch, SymInt channels, SymInt height, SymInt width, float spatial_scale, "
      "int sampling_ratio, bool aligned, bool channels_last) -> Tensor");
  m.def(
      "_roi_align_max_sample(Tensor input, Tensor argmax, Tensor boxes, Tensor? batch_index, "
      "float spatial_scale, int sampling_ratio, bool aligned) -> Tensor");
}
