// SPDX-License-Identifier: Apache-2.0
#include "roi_align/roi_align_backward_launch.cuh"
#include "roi_align/roi_align_cuda_plan.h"
#include "roi_align/roi_align_maximum_backward_kernel.cuh"

namespace opzoo {
namespace {

Tensor roi_align_backward_cuda(const Tensor& grad,
                               const Tensor& boxes,
                               const OptionalTensor& batch_index,
                               int64_t batch,
                               int64_t channels,
                               int64_t height,
                               int64_t width,
                               double spatial_scale,
                               int64_t sampling_ratio,
                               bool aligned,
                               bool channels_last) {
  constexpr const char* kOp = "_roi_align_backward";
  const DeviceGuard guard(grad.get_device_index());
  const RoIAlignOptions options{spatial_scale, sampling_ratio, aligned};
  const Sizes sizes{batch, channels, height, width};
  const RoIAlignPlan plan = plan_roi_align_backward(
      kOp, grad, nullptr, boxes, batch_index, sizes, options, channels_last);
  const RoIAlignParams& p = plan.params;
  const cudaStream_t stream = current_stream(grad);
  check_image_indices(kOp, plan, stream);
  if (plan.out.numel() == 0) return plan.out;
  check_average_backward(kOp, p);
  RoIAlignPyramid pyramid;
  pyramid.level[0] = p;
  dispatch_floating(grad.scalar_type(), kOp, [&]<class T>() {
    pyramid.map[0] = mutable_data<T>(plan.out);
    const int64_t bytes = average_backward_workspace(pyramid, data<T>(grad));
    const Tensor workspace = empty({bytes}, ScalarType::Byte, grad);
    launch_average_backward(pyramid, data<T>(grad), mutable_data<char>(workspace), stream);
  });
  check_launch(kOp);
  return plan.out;
}

Tensor roi_align_max_backward_cuda(const Tensor& grad,
                                   const Tensor& argmax,
                                   const Tensor& boxes,
                                   const OptionalTensor& batch_index,
                                   int64_t batch,
                                   int64_t channels,
                                   int64_t height,
                                   int64_t width,
                                   double spatial_scale,
                                   int64_t sampling_ratio,
                                   bool aligned,
                                   bool channels_last) {
  constexpr const char* kOp = "_roi_align_max_backward";
  const DeviceGuard guard(grad.get_device_index());
  const RoIAlignOptions options{spatial_scale, sampling_ratio, aligned};
  const Sizes sizes{batch, channels, height, width};
  const RoIAlignPlan plan = plan_roi_align_backward(
      kOp, grad, &argmax, boxes, batch_index, sizes, options, channels_last);
  const RoIAlignParams& p = plan.params;
  const cudaStream_t stream = current_stream(grad);
  check_image_indices(kOp, plan, stream);
  if (plan.out.numel() == 0) return plan.out;
  dispatch_floating(grad.scalar_type(), kOp, [&]<class T>() {
    using acc = acc_t<T>;
    const int64_t bytes = p.rois * static_cast<int64_t>(sizeof(RoIReach<acc>));
    const Tensor workspace = empty({bytes}, ScalarType::Byte, grad);
    auto* reach = reinterpret_cast<RoIReach<acc>*>(mutable_data<char>(workspace));
    roi_align_reach_kernel<acc><<<grid_for(p.rois), kBlockSize, 0, stream>>>(p, reach);
    const int64_t tiles =
        p.batch * div_up<int64_t>(p.height, kMaximumTile) * div_up<int64_t>(p.width, kMaximumTile);
    const int64_t channels = div_up<int64_t>(p.channels, kMaximumChannels<acc>);
    OPZOO_CHECK(
        channels <= 65535, kOp, "grad must have at most 4194240 channels, got ", p.channels);
    const dim3 grid(static_cast<unsigned>(std::min<int64_t>(tiles, 0x7fffffff)),
                    static_cast<unsigned>(channels));
    roi_align_maximum_backward_kernel<T><<<grid, kMaximumChannels<acc>, 0, stream>>>(
        p, reach, data<T>(grad), data<int64_t>(argmax), mutable_data<T>(plan.out));
  });
  check_launch(kOp);
  return plan.out;
}

}  // namespace
}  // namespace opzoo

OPZOO_KERNELS(CUDA, m) {
  m.impl("_roi_align_backward", OPZOO_BOX(opzoo::roi_align_backward_cuda));
  m.impl("_roi_align_max_backward", OPZOO_BOX(opzoo::roi_align_max_backward_cuda));
}
