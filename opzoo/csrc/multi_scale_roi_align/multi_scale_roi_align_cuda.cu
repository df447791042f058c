// SPDX-License-Identifier: Apache-2.0
#include "multi_scale_roi_align/multi_scale_roi_align_kernel.cuh"
#include "multi_scale_roi_align/multi_scale_roi_align_plan.h"
#include "roi_align/roi_align_cuda_plan.h"

namespace opzoo {
namespace {

Tensor multi_scale_roi_align_cuda(const std::vector<Tensor>& inputs,
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
  const DeviceGuard guard(boxes.get_device_index());
  const MultiScaleRoIAlignPlan plan = plan_multi_scale_roi_align(
      kOp, inputs, boxes, batch_index, pooled_height, pooled_width, options);
  const Tensor& output = plan.first.out;
  const cudaStream_t stream = current_stream(output);
  check_image_indices(kOp, plan.first, stream);
  if (pooled_items_of(plan.first.params) == 0) return output;
  dispatch_floating(output.scalar_type(), kOp, [&]<class T>() {
    const bool channels_last = is_channels_last(output);
    const int64_t bytes = average_workspace<T>(plan.pyramid, channels_last);
    const Tensor workspace = empty({bytes}, ScalarType::Byte, output);
    launch_average(plan.pyramid,
                   mutable_data<T>(output),
                   channels_last,
                   mutable_data<char>(workspace),
                   stream);
  });
  check_launch(kOp);
  return output;
}

std::vector<Tensor> multi_scale_roi_align_backward_cuda(const Tensor& grad,
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
  const DeviceGuard guard(grad.get_device_index());
  const MultiScaleRoIAlignPlan plan = plan_multi_scale_roi_align_backward(
      kOp, grad, boxes, batch_index, batch, channels, heights, widths, options, channels_last);
  const cudaStream_t stream = current_stream(grad);
  check_image_indices(kOp, plan.first, stream);
  for (int level = 0; level < plan.pyramid.levels; ++level) {
    check_average_backward(kOp, plan.pyramid.level[level]);
  }
  dispatch_floating(grad.scalar_type(), kOp, [&]<class T>() {
    const int64_t bytes = average_backward_workspace(plan.pyramid, data<T>(grad));
    const Tensor workspace = empty({bytes}, ScalarType::Byte, grad);
    launch_average_backward(plan.pyramid, data<T>(grad), mutable_data<char>(workspace), stream);
  });
  check_launch(kOp);
  return plan.grad_inputs;
}

}  // namespace
}  // namespace opzoo

OPZOO_KERNELS(CUDA, m) {
  m.impl("multi_scale_roi_align", OPZOO_BOX(opzoo::multi_scale_roi_align_cuda));
  m.impl("_multi_scale_roi_align_backward", OPZOO_BOX(opzoo::multi_scale_roi_align_backward_cuda));
}
