// SPDX-License-Identifier: Apache-2.0
#include "ms_deform_attn/ms_deform_attn_kernel.cuh"
#include "ms_deform_attn/ms_deform_attn_plan.h"

namespace opzoo {
namespace {

bool on_vector_boundary(const void* data) {
  return reinterpret_cast<uintptr_t>(data) % 16 == 0;
}

template <class T>
constexpr int kLoadVector = 16 / sizeof(T);

template <class T>
bool takes_vectors(const MsDeformAttnParams& p) {
  return p.D % kLoadVector<T> == 0 && on_vector_boundary(p.value) && on_vector_boundary(p.grad);
}

template <class T, class C>
void launch_forward(const MsDeformAttnParams& p, cudaStream_t stream) {
  const bool vectors = takes_vectors<T>(p);
  const int64_t lanes = vectors ? p.D / kLoadVector<T> : p.D;
  const int64_t items = p.B * p.Q * p.M * lanes;
  const auto kernel =
      vectors ? attn_forward_kernel<T, C, kLoadVector<T>> : attn_forward_kernel<T, C, 1>;
  kernel<<<grid_for(items, kAttnBlock), kAttnBlock, 0, stream>>>(p, lanes, items);
}

template <class T, class C>
void launch_backward(const MsDeformAttnParams& p, cudaStream_t stream) {
  const int64_t lanes = p.D / kLoadVector<T>;
  if (takes_vectors<T>(p) && lanes <= 32 && (lanes & (lanes - 1)) == 0) {
    const int64_t items = p.B * p.Q * p.M * lanes;
    attn_backward_kernel<T, C, kLoadVector<T>>
        <<<grid_for(items, kAttnBlock), kAttnBlock, 0, stream>>>(p, lanes, items);
  } else {
    const int64_t samples = p.B * p.Q * p.M * p.samples();
    attn_backward_any_kernel<T, C>
        <<<grid_for(samples, kAttnBlock), kAttnBlock, 0, stream>>>(p, samples);
  }
}

void check_levels_on_demand(const char* op,
                            const Tensor& shapes,
                            const Tensor& starts,
                            int64_t pixels) {
  if (!debug_mode()) return;
  const torch::stable::Device cpu(torch::headeronly::DeviceType::CPU);
  check_levels(op, torch::stable::to(shapes, cpu), torch::stable::to(starts, cpu), pixels);
}

Tensor forward_cuda(const Tensor& value,
                    const Tensor& shapes,
                    const Tensor& starts,
                    const Tensor& locations,
                    const Tensor& weights) {
  const DeviceGuard guard(value.get_device_index());
  const MsDeformAttnPlan plan = plan_ms_deform_attn(value, shapes, starts, locations, weights);
  const MsDeformAttnParams& p = plan.params;
  check_levels_on_demand("ms_deform_attn", shapes, starts, p.S);
  if (p.B * p.Q * p.M * p.D == 0) return plan.out;
  const cudaStream_t stream = current_stream(plan.out);
  dispatch_attn(
      "ms_deform_attn", value.scalar_type(), locations.scalar_type(), [&]<class T, class C>() {
        launch_forward<T, C>(p, stream);
      });
  check_launch("ms_deform_attn");
  return plan.out;
}

std::tuple<Tensor, Tensor, Tensor> backward_cuda(const Tensor& grad,
                                                 const Tensor& value,
                                                 const Tensor& shapes,
                                                 const Tensor& starts,
                                                 const Tensor& locations,
                                                 const Tensor& weights,
                                                 bool need_value) {
  const DeviceGuard guard(value.get_device_index());
  const MsDeformAttnPlan plan =
      plan_ms_deform_attn_backward(grad, value, shapes, starts, locations, weights, need_value);
  const MsDeformAttnParams& p = plan.params;
  check_levels_on_demand("_ms_deform_attn_backward", shapes, starts, p.S);
  if (p.B * p.Q * p.M * p.samples() > 0) {
    const cudaStream_t stream = current_stream(plan.grad_value);
    dispatch_attn(
        "ms_deform_attn", value.scalar_type(), locations.scalar_type(), [&]<class T, class C>() {
          launch_backward<T, C>(p, stream);
        });
    check_launch("_ms_deform_attn_backward");
  }
  return {to_dtype(plan.grad_value, value.scalar_type()), plan.grad_locations, plan.grad_weights};
}

}  // namespace
}  // namespace opzoo

OPZOO_KERNELS(CUDA, m) {
  m.impl("ms_deform_attn", OPZOO_BOX(opzoo::forward_cuda));
  m.impl("_ms_deform_attn_backward", OPZOO_BOX(opzoo::backward_cuda));
}
