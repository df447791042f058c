// SPDX-License-Identifier: Apache-2.0
// Schemas, checks, results: what multi_scale_roi_align does before a device is involved.
#include "multi_scale_roi_align/multi_scale_roi_align_plan.h"

namespace opzoo {
namespace {

void check_options(const char* op, size_t levels, const MultiScaleRoIAlignOptions& options) {
  OPZOO_CHECK(levels >= 1 && levels <= kMaxLevels,
              op,
              "inputs must hold 1 to ",
              kMaxLevels,
              " maps, got ",
              levels);
  OPZOO_CHECK_VALUE(options.spatial_scales.size() == levels,
                    op,
                    "spatial_scales must hold one number per map, ",
                    levels,
                    ", got ",
                    options.spatial_scales.size());
  for (size_t level = 0; level < levels; ++level) {
    const double scale = options.spatial_scales[level];
    OPZOO_CHECK_VALUE(std::isfinite(scale) && scale > 0,
                      op,
                      "spatial_scales[",
                      level,
                      "] must be finite and positive, got ",
                      scale);
  }
  OPZOO_CHECK_VALUE(std::isfinite(options.canonical_scale) && options.canonical_scale > 0,
                    op,
                    "canonical_scale must be finite and positive, got ",
                    options.canonical_scale);
  OPZOO_CHECK_VALUE(std::isfinite(options.canonical_level),
                    op,
                    "canonical_level must be finite, got ",
                    options.canonical_level);
}

void check_inputs(const char* op, const std::vector<Tensor>& inputs) {
  const Tensor& first = inputs[0];
  for (size_t level = 0; level < inputs.size(); ++level) {
    const Tensor& input = inputs[level];
    const char* name = kInputNames[level];
    check_rank(op, name, input, 4);
    check_floating(op, name, input);
    check_same_device(op, name, input, kInputNames[0], first);
    check_same_dtype(op, name, input, kInputNames[0], first);
    OPZOO_CHECK(input.size(0) == first.size(0) && input.size(1) == first.size(1),
                op,
                name,
                " must have the batch and the channels of inputs[0], ",
                shape(first),
                ", got ",
                shape(input));
  }
}

RoIAlignOptions options_of(const MultiScaleRoIAlignOptions& options) {
  return {options.spatial_scales[0], options.sampling_ratio, options.aligned};
}

// The pyramid with its first level, others to be filled in from it.
RoIAlignPyramid pyramid_of(const RoIAlignParams& first, const MultiScaleRoIAlignOptions& options) {
  RoIAlignPyramid pyramid;
  pyramid.levels = static_cast<int>(options.spatial_scales.size());
  pyramid.canonical_size = options.canonical_scale;
  pyramid.canonical_level = options.canonical_level;
  pyramid.min_level = options.min_level;
  pyramid.max_level = options.max_level;
  for (int level = 0; level < pyramid.levels; ++level) {
    pyramid.level[level] = first;
    pyramid.level[level].spatial_scale = options.spatial_scales[level];
  }
  return pyramid;
}

// `map` is the input or grad_input of a level.
void bind_map(
    const char* op, const Tensor& map, void* memory, int level, RoIAlignPyramid& pyramid) {
  RoIAlignParams& p = pyramid.level[level];
  p.height = map.size(kRoIRow);
  p.width = map.size(kRoIColumn);
  OPZOO_CHECK(p.rois == 0 || (p.height > 0 && p.width > 0),
              op,
              "boxes must be empty for a map of shape ",
              shape(map),
              ", got ",
              p.rois,
              " boxes");
  for (int axis = 0; axis < 4; ++axis) p.map_stride[axis] = map.stride(axis);
  pyramid.map[level] = memory;
}

}  // namespace

MultiScaleRoIAlignPlan plan_multi_scale_roi_align(const char* op,
                                                  const std::vector<Tensor>& inputs,
                                                  const Tensor& boxes,
                                                  const OptionalTensor& batch_index,
                                                  int64_t pooled_height,
                                                  int64_t pooled_width,
                                                  const MultiScaleRoIAlignOptions& options) {
  MultiScaleRoIAlignPlan plan;
  check_options(op, inputs.size(), options);
  check_inputs(op, inputs);
  plan.first = plan_roi_align(
      op, inputs[0], boxes, batch_index, pooled_height, pooled_width, options_of(options), false);
  plan.pyramid = pyramid_of(plan.first.params, options);
  for (int level = 0; level < plan.pyramid.levels; ++level) {
    const Tensor& input = inputs[level];
    // Read only: the pyramid's pointer serves grad_inputs as well.
    bind_map(op, input, const_cast<void*>(input.const_data_ptr()), level, plan.pyramid);
  }
  return plan;
}

MultiScaleRoIAlignPlan plan_multi_scale_roi_align_backward(const char* op,
                                                           const Tensor& grad,
                                                           const Tensor& boxes,
                                                           const OptionalTensor& batch_index,
                                                           int64_t batch,
                                                           int64_t channels,
                                                           const std::vector<int64_t>& heights,
                                                           const std::vector<int64_t>& widths,
                                                           const MultiScaleRoIAlignOptions& options,
                                                           bool channels_last) {
  MultiScaleRoIAlignPlan plan;
  check_options(op, heights.size(), options);
  OPZOO_CHECK_VALUE(widths.size() == heights.size(),
                    op,
                    "widths must hold one number per map, ",
                    heights.size(),
                    ", got ",
                    widths.size());
  plan.first = plan_roi_align_backward(op,
                                       grad,
                                       nullptr,
                                       boxes,
                                       batch_index,
                                       {batch, channels, heights[0], widths[0]},
                                       options_of(options),
                                       channels_last);
  plan.pyramid = pyramid_of(plan.first.params, options);
  for (int level = 0; level < plan.pyramid.levels; ++level) {
    const Sizes sizes{batch, channels, heights[level], widths[level]};
    check_sizes(op, "grad_input", sizes);
    plan.grad_inputs.push_back(
        level == 0
            ? plan.first.out
            : empty_strided(sizes, strides_for(sizes, channels_last), grad.scalar_type(), grad));
    const Tensor& grad_input = plan.grad_inputs.back();
    bind_map(op, grad_input, grad_input.mutable_data_ptr(), level, plan.pyramid);
  }
  return plan;
}

}  // namespace opzoo

OPZOO_SCHEMAS(m) {
  m.def(
      "multi_scale_roi_align(Tensor[] inputs, Tensor boxes, Tensor? batch_index, "
      "SymInt pooled_height, SymInt pooled_width, float[] spatial_scales, int sampling_ratio, "
      "bool aligned, float canonical_scale, float canonical_level, int min_level, int max_level) "
      "-> Tensor");
  m.def(
      "_multi_scale_roi_align_backward(Tensor grad, Tensor boxes, Tensor? batch_index, "
      "SymInt batch, SymInt channels, SymInt[] heights, SymInt[] widths, float[] spatial_scales, "
      "int sampling_ratio, bool aligned, float canonical_scale, float canonical_level, "
      "int min_level, int max_level, bool channels_last) -> Tensor[]");
}
