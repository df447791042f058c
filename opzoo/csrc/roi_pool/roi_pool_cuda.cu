// SPDX-License-Identifier: Apache-2.0
#include "roi_pool/roi_pool_kernel.cuh"
#include "roi_pool/roi_pool_plan.h"

namespace opzoo {
namespace {

std::tuple<Tensor, Tensor> forward_cuda(const Tensor& input,
                                        const Tensor& boxes,
                                        int64_t pooled_height,
                                        int64_t pooled_width,
                                        double spatial_scale,
                                        bool rounded) {
  const DeviceGuard guard(input.get_device_index());
  const RoIPoolPlan plan =
      plan_roi_pool(input, boxes, pooled_height, pooled_width, spatial_scale, rounded);
  const int64_t items = plan.params.K * plan.params.C * pooled_height * pooled_width;
  if (items == 0) return {plan.output, plan.argmax};
  const cudaStream_t stream = current_stream(plan.output);
  dispatch_floating(input.scalar_type(), "roi_pool", [&]<class T>() {
    roi_pool_kernel<T><<<grid_for(items), kBlockSize, 0, stream>>>(
        plan.params, mutable_data<T>(plan.output), mutable_data<int64_t>(plan.argmax), items);
  });
  check_launch("roi_pool");
  return {plan.output, plan.argmax};
}

Tensor backward_cuda(const Tensor& grad,
                     const Tensor& argmax,
                     const Tensor& boxes,
                     int64_t batch,
                     int64_t channels,
                     int64_t height,
                     int64_t width) {
  const DeviceGuard guard(grad.get_device_index());
  RoIPoolParams p;
  const Tensor sums =
      plan_roi_pool_backward(grad, argmax, boxes, batch, channels, height, width, p);
  const Tensor given = opzoo::contiguous(grad), where = opzoo::contiguous(argmax);
  const int64_t bins = grad.size(2) * grad.size(3), items = p.K * channels * bins;
  if (items > 0) {
    const cudaStream_t stream = current_stream(sums);
    dispatch_floating(grad.scalar_type(), "_roi_pool_backward", [&]<class T>() {
      roi_pool_backward_kernel<T><<<grid_for(items), kBlockSize, 0, stream>>>(
          p, data<T>(given), data<int64_t>(where), mutable_data<acc_t<T>>(sums), bins, items);
    });
    check_launch("_roi_pool_backward");
  }
  return to_dtype(sums, grad.scalar_type());
}

}  // namespace
}  // namespace opzoo

OPZOO_KERNELS(CUDA, m) {
  m.impl("roi_pool", OPZOO_BOX(opzoo::forward_cuda));
  m.impl("_roi_pool_backward", OPZOO_BOX(opzoo::backward_cuda));
}
