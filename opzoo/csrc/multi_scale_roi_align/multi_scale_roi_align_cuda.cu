// SPDX-License-Identifier: Apache-2.0
#include "multi_scale_roi_align/multi_scale_roi_align_kernel.cuh"
#include "multi_scale_roi_align/multi_scale_roi_align_plan.h"
#include "roi_align/roi_align_cuda_plan.h"
#include "roi_align/roi_align_forward_launch.cuh"

namespace opzoo {
namespace {

template <class T>
void launch_level_backward(const RoIAlignPyramid& pyramid,
                           int level,
                           RoIReach<acc_t<T>>* reach,
                           const T* grad,
                           bool channels_last,
                           cudaStream_t stream) {
  using acc = acc_t<T>;
  const RoIAlignParams& p = pyramid.level[level];
  T* grad_input = static_cast<T*>(pyramid.map[level]);
  multi_scale_roi_align_reach_kernel<acc>
      <<<grid_for(p.rois), kBlockSize, 0, stream>>>(pyramid, level, reach);
  const int64_t blocks_of_channels = div_up<int64_t>(p.channels, kTileChannels<acc>);
  const bool tiled = p.pooled_height <= kMaxBackwardBins && p.pooled_width <= kMaxBackwardBins &&
                     blocks_of_channels <= 65535;
  if (!tiled) {
    const int64_t items = p.batch * p.channels * p.height * p.width;
    roi_align_gather_backward_kernel<T>
        <<<grid_for(items), kBlockSize, 0, stream>>>(p, reach, grad, grad_input);
    return;
  }
  const int64_t tiles =
      p.batch * div_up<int64_t>(p.height, kTileRows) * div_up<int64_t>(p.width, kTileColumns);
  const dim3 grid(static_cast<unsigned>(std::min<int64_t>(tiles, 0x7fffffff)),
                  static_cast<unsigned>(blocks_of_channels));
  constexpr auto kBytes = sizeof(TileShared<acc>);
  if (channels_last) {
    roi_align_tile_backward_kernel<T, true>
        <<<grid, 32 * kTileRows, kBytes, stream>>>(p, reach, grad, grad_input);
  } else {
    roi_align_tile_backward_kernel<T, false>
        <<<grid, 32 * kTileRows, kBytes, stream>>>(p, reach, grad, grad_input);
  }
}

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
                   mutable_data<void>(workspace),
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
  const RoIAlignParams& p = plan.first.params;
  dispatch_floating(grad.scalar_type(), kOp, [&]<class T>() {
    using Reach = RoIReach<acc_t<T>>;
    const Tensor memory =
        empty({p.rois * static_cast<int64_t>(sizeof(Reach))}, ScalarType::Byte, grad);
    auto* reach = reinterpret_cast<Reach*>(mutable_data<char>(memory));
    for (int level = 0; level < plan.pyramid.levels; ++level) {
      const Tensor& grad_input = plan.grad_inputs[level];
      if (grad_input.numel() == 0) continue;
      const bool last = is_channels_last(grad_input);
      launch_level_backward(plan.pyramid, level, reach, data<T>(grad), last, stream);
      check_launch(kOp);
    }
  });
  return plan.grad_inputs;
}

}  // namespace
}  // namespace opzoo

OPZOO_KERNELS(CUDA, m) {
  m.impl("multi_scale_roi_align", OPZOO_BOX(opzoo::multi_scale_roi_align_cuda));
  m.impl("_multi_scale_roi_align_backward", OPZOO_BOX(opzoo::multi_scale_roi_align_backward_cuda));
}
