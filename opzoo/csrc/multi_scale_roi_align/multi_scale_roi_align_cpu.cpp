// SPDX-License-Identifier: Apache-2.0
// The RoIs are sorted by level, in their order, and each level is roi_align's loop over its own,
// straight into the rows of the common output or out of those of grad.
#include <algorithm>

#include "multi_scale_roi_align/multi_scale_roi_align_plan.h"
#include "roi_align/roi_align_average_cpu.h"

namespace opzoo {
namespace {

// The RoIs of one level, in compact copies.
template <class acc>
struct LevelRoIs {
  std::vector<acc> boxes;       // [count][4]
  std::vector<int64_t> images;  // [count]
  std::vector<int64_t> rows;    // [count], their numbers among all RoIs

  RoIAlignParams params(const RoIAlignPyramid& pyramid, int level) const {
    RoIAlignParams p = pyramid.level[level];
    p.rois = static_cast<int64_t>(rows.size());
    p.boxes = boxes.data();
    p.boxes_stride[0] = 4;
    p.boxes_stride[1] = 1;
    p.batch_index = images.data();
    p.batch_index_stride = 1;
    return p;
  }
};

// One per level, then the RoIs that have none.
template <class acc>
std::vector<LevelRoIs<acc>> sort_by_level(const RoIAlignPyramid& pyramid) {
  std::vector<LevelRoIs<acc>> sorted(pyramid.levels + 1);
  const RoIAlignParams& p = pyramid.level[0];
  for (int64_t k = 0; k < p.rois; ++k) {
    const int level = level_of<acc>(pyramid, k);
    LevelRoIs<acc>& rois = sorted[level < 0 ? pyramid.levels : level];
    const acc* box = static_cast<const acc*>(p.boxes) + k * p.boxes_stride[0];
    if (!p.batch_index) box += p.boxes_stride[1];
    for (int i = 0; i < 4; ++i) rois.boxes.push_back(box[i * p.boxes_stride[1]]);
    rois.images.push_back(image_index<acc>(p, k));
    rois.rows.push_back(k);
  }
  return sorted;
}

Tensor multi_scale_roi_align_cpu(const std::vector<Tensor>& inputs,
                                 const Tensor& boxes,
                                 const OptionalTensor& batch_index,
                                 int64_t pooled_height,
                                 int64_t pooled_width,
                                 const std::vector<double>& spatial_scales,
                                 int64_t sampling_ratio,
                                 bool aligned,
                                 double canonical_scale,
                                 double canonical_level,
                                 int64_t min_level,
                                 int64_t max_level) {
  constexpr const char* kOp = "multi_scale_roi_align";
  const MultiScaleRoIAlignOptions options{spatial_scales,
                                          sampling_ratio,
                                          aligned,
                                          canonical_scale,
                                          canonical_level,
                                          min_level,
                                          max_level};
  const MultiScaleRoIAlignPlan plan = plan_multi_scale_roi_align(
      kOp, inputs, boxes, batch_index, pooled_height, pooled_width, options);
  const Tensor& output = plan.first.out;
  if (output.numel() == 0) return output;
  dispatch_floating(output.scalar_type(), kOp, [&]<class T>() {
    const auto sorted = sort_by_level<acc_t<T>>(plan.pyramid);
    T* to = mutable_data<T>(output);
    for (int level = 0; level < plan.pyramid.levels; ++level) {
      const auto& rois = sorted[level];
      if (rois.rows.empty()) continue;
      const RoIAlignParams p = rois.params(plan.pyramid, level);
      average_forward<T>(p, static_cast<const T*>(plan.pyramid.map[level]), to, rois.rows.data());
    }
    const int64_t row = output.stride(kRoIBatch);
    for (const int64_t k : sorted.back().rows) std::fill_n(to + k * row, row, T(0));
  });
  return output;
}

std::vector<Tensor> multi_scale_roi_align_backward_cpu(const Tensor& grad,
                                                       const Tensor& boxes,
                                                       const OptionalTensor& batch_index,
                                                       int64_t batch,
                                                       int64_t channels,
                                                       const std::vector<int64_t>& heights,
                                                       const std::vector<int64_t>& widths,
                                                       const std::vector<double>& spatial_scales,
                                                       int64_t sampling_ratio,
                                                       bool aligned,
                                                       double canonical_scale,
                                                       double canonical_level,
                                                       int64_t min_level,
                                                       int64_t max_level,
                                                       bool channels_last) {
  constexpr const char* kOp = "_multi_scale_roi_align_backward";
  const MultiScaleRoIAlignOptions options{spatial_scales,
                                          sampling_ratio,
                                          aligned,
                                          canonical_scale,
                                          canonical_level,
                                          min_level,
                                          max_level};
  const MultiScaleRoIAlignPlan plan = plan_multi_scale_roi_align_backward(
      kOp, grad, boxes, batch_index, batch, channels, heights, widths, options, channels_last);
  dispatch_floating(grad.scalar_type(), kOp, [&]<class T>() {
    const auto sorted = sort_by_level<acc_t<T>>(plan.pyramid);
    for (int level = 0; level < plan.pyramid.levels; ++level) {
      const Tensor& grad_input = plan.grad_inputs[level];
      if (grad_input.numel() == 0) continue;
      const auto& rois = sorted[level];
      const RoIAlignParams p = rois.params(plan.pyramid, level);
      average_backward<T>(p, data<T>(grad), mutable_data<T>(grad_input), rois.rows.data());
    }
  });
  return plan.grad_inputs;
}

}  // namespace
}  // namespace opzoo

OPZOO_KERNELS(CPU, m) {
  m.impl("multi_scale_roi_align", OPZOO_BOX(opzoo::multi_scale_roi_align_cpu));
  m.impl("_multi_scale_roi_align_backward", OPZOO_BOX(opzoo::multi_scale_roi_align_backward_cpu));
}
