// SPDX-License-Identifier: Apache-2.0
#include "carafe/carafe_plan.h"

namespace opzoo {
namespace {

constexpr int64_t kGrain = 1024;

// Result is one of the three structs of carafe.h; threads share out its elements.
template <class Result>
void compute(CarafeParams p, const Tensor& out) {
  p.out = out.mutable_data_ptr();
  const CarafeShape shape = Result::shape(p);
  dispatch_floating(out.scalar_type(), "carafe", [&]<class T>() {
    parallel_for(0, shape.numel(), kGrain, [&](int64_t begin, int64_t end) {
      for (int64_t item = begin; item < end; ++item) {
        static_cast<T*>(p.out)[item] =
            static_cast<T>(Result::template value<T>(p, carafe_index(shape, item)));
      }
    });
  });
}

Tensor forward_cpu(const Tensor& features,
                   const Tensor& masks,
                   int64_t kernel_size,
                   int64_t group_size,
                   int64_t scale_factor) {
  const CarafePlan plan = plan_carafe(features, masks, kernel_size, group_size, scale_factor);
  compute<CarafeForward>(plan.params, plan.out);
  return plan.out;
}

std::tuple<Tensor, Tensor> backward_cpu(const Tensor& grad,
                                        const Tensor& features,
                                        const Tensor& masks,
                                        int64_t kernel_size,
                                        int64_t group_size,
                                        int64_t scale_factor) {
  const CarafePlan plan =
      plan_carafe_backward(grad, features, masks, kernel_size, group_size, scale_factor);
  compute<CarafeGradFeatures>(plan.params, plan.grad_features);
  compute<CarafeGradMasks>(plan.params, plan.grad_masks);
  return {plan.grad_features, plan.grad_masks};
}

}  // namespace
}  // namespace opzoo

OPZOO_KERNELS(CPU, m) {
  m.impl("carafe", OPZOO_BOX(opzoo::forward_cpu));
  m.impl("_carafe_backward", OPZOO_BOX(opzoo::backward_cpu));
}
