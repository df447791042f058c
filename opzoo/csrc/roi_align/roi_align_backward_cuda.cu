// SPDX-License-Identifier: Apache-2.0
#include "roi_align/roi_align_backward_kernel.cuh"
#include "roi_align/roi_align_cuda_plan.h"

namespace opzoo {
namespace {

// What each RoI reaches, computed on the device into memory that lives as long as this object.
template <class acc>
class Reach {
 public:
  Reach(const char* op, const RoIAlignParams& p, const Tensor& like, cudaStream_t stream)
      : memory_(
            empty({p.rois * static_cast<int64_t>(sizeof(RoIReach<acc>))}, ScalarType::Byte, like)) {
    if (p.rois == 0) return;
    roi_align_reach_kernel<acc><<<grid_for(p.rois), kBlockSize, 0, stream>>>(p, get());
    check_launch(op);
  }
  RoIReach<acc>* get() const {
    return reinterpret_cast<RoIReach<acc>*>(mutable_data<char>(memory_));
  }

 private:
  Tensor memory_;
};

template <class T>
void launch_backward(const RoIAlignParams& p,
                     const RoIReach<acc_t<T>>* reach,
                     const T* grad,
                     T* grad_input,
                     bool channels_last,
                     cudaStream_t stream) {
  using acc = acc_t<T>;
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
  dispatch_floating(grad.scalar_type(), kOp, [&]<class T>() {
    const Reach<acc_t<T>> reach(kOp, p, grad, stream);
    const bool last = is_channels_last(plan.out);
    launch_backward(p, reach.get(), data<T>(grad), mutable_data<T>(plan.out), last, stream);
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
    const Reach<acc> reach(kOp, p, grad, stream);
    const int64_t tiles =
        p.batch * div_up<int64_t>(p.height, kMaximumTile) * div_up<int64_t>(p.width, kMaximumTile);
    const int64_t channels = div_up<int64_t>(p.channels, kMaximumChannels<acc>);
    OPZOO_CHECK(
        channels <= 65535, kOp, "grad must have at most 4194240 channels, got ", p.channels);
    const dim3 grid(static_cast<unsigned>(std::min<int64_t>(tiles, 0x7fffffff)),
                    static_cast<unsigned>(channels));
    roi_align_maximum_backward_kernel<T><<<grid, kMaximumChannels<acc>, 0, stream>>>(
        p, reach.get(), data<T>(grad), data<int64_t>(argmax), mutable_data<T>(plan.out));
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
