// SPDX-License-Identifier: Apache-2.0
#include "roi_align/roi_align_kernel.cuh"
#include "roi_align/roi_align_plan.h"

namespace opzoo {
namespace {

int64_t pooled_items_of(const RoIAlignParams& p) {
  return p.rois * p.channels * p.pooled_height * p.pooled_width;
}

// body<kChannelsLast>() for the layout of a dense tensor. Where both layouts hold, either serves.
template <class Body>
void dispatch_layout(const Tensor& t, Body&& body) {
  if (is_channels_last(t)) {
    body.template operator()<true>();
  } else {
    body.template operator()<false>();
  }
}

// In debug mode only: waits for the device and raises where a RoI would be skipped.
template <class acc>
void check_image_indices_typed(const char* op, const RoIAlignPlan& plan, cudaStream_t stream) {
  const RoIAlignParams& p = plan.params;
  const Tensor flag = empty({1}, ScalarType::Long, plan.boxes);
  auto* first_bad = mutable_data<unsigned long long>(flag);
  auto k = static_cast<unsigned long long>(p.rois);
  check_cuda(cudaMemcpyAsync(first_bad, &k, sizeof(k), cudaMemcpyHostToDevice, stream), op);
  roi_align_check_kernel<acc><<<grid_for(p.rois), kBlockSize, 0, stream>>>(p, first_bad);
  check_launch(op);
  check_cuda(cudaMemcpyAsync(&k, first_bad, sizeof(k), cudaMemcpyDeviceToHost, stream), op);
  check_cuda(cudaStreamSynchronize(stream), op);
  if (k == static_cast<unsigned long long>(p.rois)) return;

  const auto bad = static_cast<int64_t>(k);
  std::ostringstream text;
  const auto fetch = [&](auto value, const void* source) {
    check_cuda(cudaMemcpyAsync(&value, source, sizeof(value), cudaMemcpyDeviceToHost, stream), op);
    check_cuda(cudaStreamSynchronize(stream), op);
    text << value;
  };
  if (p.batch_index) {
    fetch(int64_t{0}, p.batch_index + bad * p.batch_index_stride);
  } else {
    fetch(acc(0), static_cast<const acc*>(p.boxes) + bad * p.boxes_stride[0]);
  }
  refuse_image_index(op, p, bad, text.str());
}

void check_image_indices(const char* op, const RoIAlignPlan& plan, cudaStream_t stream) {
  if (!debug_mode() || plan.params.rois == 0) return;
  dispatch_floating(plan.boxes.scalar_type(), op, [&]<class T>() {
    check_image_indices_typed<acc_t<T>>(op, plan, stream);
  });
}

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
  const unsigned grid = grid_for(pooled_items_of(p));
  dispatch_floating(input.scalar_type(), kOp, [&]<class T>() {
    dispatch_layout(plan.out, [&]<bool kChannelsLast>() {
      roi_align_average_kernel<T, kChannelsLast>
          <<<grid, kBlockSize, 0, stream>>>(p, data<T>(input), mutable_data<T>(plan.out));
    });
  });
  check_launch(kOp);
  return plan.out;
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
  if (pooled_items_of(p) > 0) {
    const unsigned grid = grid_for(pooled_items_of(p));
    dispatch_floating(grad.scalar_type(), kOp, [&]<class T>() {
      dispatch_layout(plan.out, [&]<bool kChannelsLast>() {
        roi_align_average_backward_kernel<T, kChannelsLast>
            <<<grid, kBlockSize, 0, stream>>>(p, data<T>(grad), mutable_data<acc_t<T>>(plan.out));
      });
    });
    check_launch(kOp);
  }
  return finish_roi_align_backward(plan, grad);
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
  if (pooled_items_of(p) > 0) {
    const unsigned grid = grid_for(pooled_items_of(p));
    dispatch_floating(grad.scalar_type(), kOp, [&]<class T>() {
      dispatch_layout(plan.out, [&]<bool kChannelsLast>() {
        roi_align_maximum_backward_kernel<T, kChannelsLast><<<grid, kBlockSize, 0, stream>>>(
            p, data<T>(grad), data<int64_t>(argmax), mutable_data<acc_t<T>>(plan.out));
      });
    });
    check_launch(kOp);
  }
  return finish_roi_align_backward(plan, grad);
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
  m.impl("_roi_align_backward", OPZOO_BOX(opzoo::roi_align_backward_cuda));
  m.impl("_roi_align_max", OPZOO_BOX(opzoo::roi_align_max_cuda));
  m.impl("_roi_align_max_backward", OPZOO_BOX(opzoo::roi_align_max_backward_cuda));
  m.impl("_roi_align_max_sample", OPZOO_BOX(opzoo::roi_align_max_sample_cuda));
}
