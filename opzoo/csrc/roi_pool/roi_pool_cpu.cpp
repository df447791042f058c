// SPDX-License-Identifier: Apache-2.0
#include "roi_pool/roi_pool_plan.h"

namespace opzoo {
namespace {

constexpr int64_t kGrain = 256;

std::tuple<Tensor, Tensor> forward_cpu(const Tensor& input,
                                       const Tensor& boxes,
                                       int64_t pooled_height,
                                       int64_t pooled_width,
                                       double spatial_scale,
                                       bool rounded) {
  const RoIPoolPlan plan =
      plan_roi_pool(input, boxes, pooled_height, pooled_width, spatial_scale, rounded);
  const RoIPoolParams& p = plan.params;
  const int64_t bins = pooled_height * pooled_width;
  dispatch_floating(input.scalar_type(), "roi_pool", [&]<class T>() {
    T* output = mutable_data<T>(plan.output);
    int64_t* argmax = mutable_data<int64_t>(plan.argmax);
    parallel_for(0, p.K * p.C * bins, kGrain, [&](int64_t begin, int64_t end) {
      for (int64_t item = begin; item < end; ++item) {
        const int64_t plane = item / bins, bin = item - plane * bins;
        const auto best =
            pool_pixel<T>(p, plane / p.C, plane % p.C, bin / pooled_width, bin % pooled_width);
        output[item] = static_cast<T>(best.value);
        argmax[item] = best.argmax;
      }
    });
  });
  return {plan.output, plan.argmax};
}

// Threads share out the channels: each adds to maps of its own, RoI after RoI.
Tensor backward_cpu(const Tensor& grad,
                    const Tensor& argmax,
                    const Tensor& boxes,
                    int64_t batch,
                    int64_t channels,
                    int64_t height,
                    int64_t width) {
  RoIPoolParams p;
  const Tensor sums =
      plan_roi_pool_backward(grad, argmax, boxes, batch, channels, height, width, p);
  const Tensor given = opzoo::contiguous(grad), where = opzoo::contiguous(argmax);
  const int64_t bins = grad.size(2) * grad.size(3), pixels = height * width;
  dispatch_floating(grad.scalar_type(), "_roi_pool_backward", [&]<class T>() {
    using acc = acc_t<T>;
    parallel_for(0, channels, 1, [&](int64_t begin, int64_t end) {
      for (int64_t k = 0; k < p.K; ++k) {
        const int64_t image = pool_image<acc>(p, k);
        for (int64_t c = begin; c < end; ++c) {
          acc* map = mutable_data<acc>(sums) + (image * channels + c) * pixels;
          const int64_t first = (k * channels + c) * bins;
          for (int64_t i = first; i < first + bins; ++i) {
            const int64_t pixel = data<int64_t>(where)[i];
            if (pixel >= 0 && pixel < pixels) map[pixel] += static_cast<acc>(data<T>(given)[i]);
          }
        }
      }
    });
  });
  return to_dtype(sums, grad.scalar_type());
}

}  // namespace
}  // namespace opzoo

OPZOO_KERNELS(CPU, m) {
  m.impl("roi_pool", OPZOO_BOX(opzoo::forward_cpu));
  m.impl("_roi_pool_backward", OPZOO_BOX(opzoo::backward_cpu));
}
