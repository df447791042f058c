// SPDX-License-Identifier: Apache-2.0
#include "lltm_kernel.cuh"
#include "lltm_plan.h"

namespace lltm {
namespace {

// [cuda
std::tuple<Tensor, Tensor> cell_cuda(const Tensor& gates, const Tensor& old_cell) {
  const opzoo::DeviceGuard guard(gates.get_device_index());
  const Plan plan = plan_cell(gates, old_cell);
  opzoo::dispatch_floating(old_cell.scalar_type(), "lltm", [&]<class T>() {
    const auto p = params_of<T>(plan.gates, plan.cell);
    if (p.rows * p.size == 0) return;
    const unsigned grid = opzoo::grid_for(p.rows * p.size);
    cell_kernel<<<grid, opzoo::kBlockSize, 0, opzoo::current_stream(gates)>>>(
        p, opzoo::mutable_data<T>(plan.new_h), opzoo::mutable_data<T>(plan.new_cell));
  });
  opzoo::check_launch("lltm");
  return {plan.new_h, plan.new_cell};
}
// cuda]

std::tuple<Tensor, Tensor> backward_cuda(const Tensor& grad_h,
                                         const Tensor& grad_new_cell,
                                         const Tensor& gates,
                                         const Tensor& new_cell) {
  const opzoo::DeviceGuard guard(gates.get_device_index());
  const BackwardPlan plan = plan_backward(grad_h, grad_new_cell, gates, new_cell);
  opzoo::dispatch_floating(new_cell.scalar_type(), "lltm_backward", [&]<class T>() {
    const auto p = params_of<T>(plan.gates, plan.cell);
    if (p.rows * p.size == 0) return;
    const unsigned grid = opzoo::grid_for(p.rows * p.size);
    cell_backward_kernel<<<grid, opzoo::kBlockSize, 0, opzoo::current_stream(gates)>>>(
        p,
        opzoo::data<T>(plan.grad_h),
        opzoo::data<T>(plan.grad_new_cell),
        opzoo::mutable_data<T>(plan.grad_gates),
        opzoo::mutable_data<T>(plan.grad_old_cell));
  });
  opzoo::check_launch("lltm_backward");
  return {plan.grad_gates, plan.grad_old_cell};
}

}  // namespace
}  // namespace lltm

STABLE_TORCH_LIBRARY_IMPL(lltm, CUDA, m) {
  m.impl("cell", OPZOO_BOX(lltm::cell_cuda));
  m.impl("cell_backward", OPZOO_BOX(lltm::backward_cuda));
}
