// SPDX-License-Identifier: Apache-2.0
#include "roi_align/roi_align_cuda_plan.h"
#include "roi_align/roi_align_forward_launch.cuh"
#include "roi_align/roi_align_kernel.cuh"
#include "roi_align/roi_align_plan.h"

namespace opzoo {
namespace {

Tensor roi_align_cuda(const Tensor& input,
                      const Tensor& boxes,
                      const OptionalTensor& batch_index,
                      int64_t pooled_height,
                      int64_t pooled_width,
                      double spatial_scale,
                      int64_t sampling_ratio,
                      bool aligned) {
  constexpr const char* kOp = "roi_align";
  const DeviceGuard guard(input.get_device_index());
  const RoIAlignOptions options{spatial_scale, sampling_ratio, aligned};
  const RoIAlignPlan plan =
      plan_roi_align(kOp, input, boxes, batch_index, pooled_height, pooled_width, options, false);
  const RoIAlignParams& p = plan.params;
  const cudaStream_t stream = current_stream(input);
  check_image_indices(kOp, plan, stream);
  if (pooled_items_of(p) == 0) return plan.out;
  dispatch_floating(input.scalar_type(), kOp, [&]<class T>() {
    RoIAlignPyramid pyramid;
    pyramid.level[0] = p;
    pyramid.map[0] = const_cast<T*>(data<T>(input));
    const bool channels_last = is_channels_last(plan.out);
    const int64_t bytes = average_workspace<T>(pyramid, channels_last);
    const Tensor workspace = empty({bytes}, ScalarType::Byte, input);
    launch_average(
        pyramid, mutable_data<T>(plan.out), channels_last, mutable_data<void>(workspace), stream);
  });
  check_launch(kOp);
  return plan.out;
}

std::tuple<Tensor, Tensor> roi_align_max_cuda(const Tensor& input,
                                              const Tensor& boxes,
                                              const OptionalTensor& batch_index,
                                              int64_t pooled_height,
                                              int64_t pooled_width,
                                              double spatial_scale,
                                              int64_t sampling_ratio,
                                              bool aligned) {
  constexpr const char* kOp = "_roi_align_max";
  const DeviceGuard guard(input.get_device_index());
  const RoIAlignOptions options{spatial_scale, sampling_ratio, aligned};
  const RoIAlignPlan plan =
      plan_roi_align(kOp, input, boxes, batch_index, pooled_height, pooled_width, options, true);
  const RoIAlignParams& p = plan.params;
  const cudaStream_t stream = current_stream(input);
  check_image_indices(kOp, plan, stream);
  if (pooled_items_of(p) > 0) {
    const unsigned grid = grid_for(pooled_items_of(p));
    dispatch_floating(input.scalar_type(), kOp, [&]<class T>() {
      dispatch_layout(plan.out, [&]<bool kChannelsLast>() {
        roi_align_maximum_kernel<T, kChannelsLast><<<grid, kBlockSize, 0, stream>>>(
            p, data<T>(input), mutable_data<T>(plan.out), mutable_data<int64_t>(plan.argmax));
      });
    });
    check_launch(kOp);
  }
  return {plan.out, plan.argmax};
}

Tensor roi_align_max_sample_cuda(const Tensor& input,
                                 const Tensor& argmax,
                                 const Tensor& boxes,
                                 const OptionalTensor& batch_index,
                                 double spatial_scale,
                                 int64_t sampling_ratio,
                                 bool aligned) {
  constexpr const char* kOp = "_roi_align_max_sample";
  const DeviceGuard guard(input.get_device_index());
  const RoIAlignOptions options{spatial_scale, sampling_ratio, aligned};
  const RoIAlignPlan plan = plan_roi_align_sample(kOp, input, argmax, boxes, batch_index, options);
  const RoIAlignParams& p = plan.params;
  const cudaStream_t stream = current_stream(input);
  check_image_indices(kOp, plan, stream);
  if (pooled_items_of(p) == 0) return plan.out;
  const unsigned grid = grid_for(pooled_items_of(p));
  dispatch_floating(input.scalar_type(), kOp, [&]<class T>() {
    dispatch_layout(plan.out, [&]<bool kChannelsLast>() {
      roi_align_sample_kernel<T, kChannelsLast><<<grid, kBlockSize, 0, stream>>>(
          p, data<T>(input), data<int64_t>(argmax), mutable_data<T>(plan.out));
    });
  });
  check_launch(kOp);
  return plan.out;
}

}  // namespace
}  // namespace opzoo

OPZOO_KERNELS(CUDA, m) {
  m.impl("roi_align", OPZOO_BOX(opzoo::roi_align_cuda));
  m.impl("_roi_align_max", OPZOO_BOX(opzoo::roi_align_max_cuda));
  m.impl("_roi_align_max_sample", OPZOO_BOX(opzoo::roi_align_max_sample_cuda));
}
