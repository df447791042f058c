// SPDX-License-Identifier: Apache-2.0
#include "carafe/carafe_kernel.cuh"
#include "carafe/carafe_plan.h"

namespace opzoo {
namespace {

template <class Result>
void compute(CarafeParams p, const Tensor& out) {
  p.out = out.mutable_data_ptr();
  const int64_t items = Result::shape(p).numel();
  if (items == 0) return;
  const cudaStream_t stream = current_stream(out);
  dispatch_floating(out.scalar_type(), "carafe", [&]<class T>() {
    carafe_kernel<Result, T><<<grid_for(items), kBlockSize, 0, stream>>>(p);
  });
  check_launch("carafe");
}

Tensor forward_cuda(const Tensor& features,
                    const Tensor& masks,
                    int64_t kernel_size,
                    int64_t group_size,
                    int64_t scale_factor) {
  const DeviceGuard guard(features.get_device_index());
  const CarafePlan plan = plan_carafe(features, masks, kernel_size, group_size, scale_factor);
  compute<CarafeForward>(plan.params, plan.out);
  return plan.out;
}

std::tuple<Tensor, Tensor> backward_cuda(const Tensor& grad,
                                         const Tensor& features,
                                         const Tensor& masks,
                                         int64_t kernel_size,
                                         int64_t group_size,
                                         int64_t scale_factor) {
  const DeviceGuard guard(features.get_device_index());
  const CarafePlan plan =
      plan_carafe_backward(grad, features, masks, kernel_size, group_size, scale_factor);
  compute<CarafeGradFeatures>(plan.params, plan.grad_features);
  compute<CarafeGradMasks>(plan.params, plan.grad_masks);
  return {plan.grad_features, plan.grad_masks};
}

}  // namespace
}  // namespace opzoo

OPZOO_KERNELS(CUDA, m) {
  m.impl("carafe", OPZOO_BOX(opzoo::forward_cuda));
  m.impl("_carafe_backward", OPZOO_BOX(opzoo::backward_cuda));
}
