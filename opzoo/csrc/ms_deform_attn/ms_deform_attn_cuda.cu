// SPDX-License-Identifier: Apache-2.0
#include "ms_deform_attn/ms_deform_attn_kernel.cuh"
#include "ms_deform_attn/ms_deform_attn_plan.h"

namespace opzoo {
namespace {

// A block for heads of `lanes` vectors; rows is 0 where its kernels do not fit, and the kernels for
// any head take over.
template <class Plan>
AttnBlock make_block(const MsDeformAttnParams& p,
                     int64_t vector,
                     int64_t alignment,
                     const void* grad) {
  AttnBlock block{};
  const int64_t lanes = p.D / vector;
  const bool on_boundary = reinterpret_cast<uintptr_t>(p.value) % alignment == 0 &&
                           reinterpret_cast<uintptr_t>(grad) % alignment == 0;
  if (p.D % vector != 0 || lanes > kAttnBlock || !on_boundary || p.L > kAttnMaxLevels ||
      p.samples() > (1 << 20)) {
    return block;
  }
  block.lanes = static_cast<int>(lanes);
  block.rows = static_cast<int>(std::min<int64_t>(kAttnBlock / lanes, p.Q));
  constexpr int64_t kPlans = kAttnPlanBytes / sizeof(Plan);
  block.chunk = static_cast<int>(std::clamp<int64_t>(kPlans / block.rows, 1, p.samples() + 1));
  block.query_blocks = div_up<int64_t>(p.Q, block.rows);
  return block;
}

template <class Kernel>
void launch_blocks(Kernel* kernel,
                   const MsDeformAttnParams& p,
                   const AttnBlock& block,
                   cudaStream_t stream) {
  const int64_t units = p.B * p.M * block.query_blocks;
  const size_t bytes = kAttnPlanBytes + kAttnMaxLevels * sizeof(AttnLevel);
  kernel<<<grid_for(units, 1), kAttnBlock, bytes, stream>>>(p, block);
}

// Whether offsets within an item, counted in vectors, fit 32 bits.
bool fits_32_bits(const MsDeformAttnParams& p, const AttnBlock& block) {
  return static_cast<double>(p.S) * static_cast<double>(p.M) * block.lanes < 2147483647.0;
}

template <class T, class C>
void launch_forward(const MsDeformAttnParams& p, cudaStream_t stream) {
  using acc = acc_t<T>;
  constexpr int kVector = 16 / sizeof(T);
  const AttnBlock block = make_block<AttnForwardPlan<acc, int64_t>>(p, kVector, 16, nullptr);
  if (block.rows == 0) {
    const int64_t items = p.B * p.Q * p.M * p.D;
    attn_forward_any_kernel<T, C><<<grid_for(items), kBlockSize, 0, stream>>>(p, items);
  } else if (fits_32_bits(p, block)) {
    launch_blocks(attn_forward_kernel<T, C, int32_t, kVector>, p, block, stream);
  } else {
    launch_blocks(attn_forward_kernel<T, C, int64_t, kVector>, p, block, stream);
  }
}

template <class T, class C>
void launch_backward(const MsDeformAttnParams& p, cudaStream_t stream) {
  using acc = acc_t<T>;
  // Vectors of four sums, also of halves: what a warp adds at a time is then one run of memory.
  constexpr int kVector = 16 / sizeof(acc);
  const AttnBlock block =
      make_block<AttnBackwardPlan<acc, int64_t>>(p, kVector, kVector * sizeof(T), p.grad);
  if (block.rows == 0 || block.lanes > 32 || (block.lanes & (block.lanes - 1)) != 0) {
    const int64_t samples = p.B * p.Q * p.M * p.samples();
    attn_backward_any_kernel<T, C>
        <<<grid_for(samples, kAttnBlock), kAttnBlock, 0, stream>>>(p, samples);
  } else if (fits_32_bits(p, block)) {
    launch_blocks(attn_backward_kernel<T, C, int32_t, kVector>, p, block, stream);
  } else {
    launch_blocks(attn_backward_kernel<T, C, int64_t, kVector>, p, block, stream);
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
