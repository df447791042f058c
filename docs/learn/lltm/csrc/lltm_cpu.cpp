// SPDX-License-Identifier: Apache-2.0
#include "lltm_plan.h"

namespace lltm {
namespace {

constexpr int64_t kGrain = 4096;  // elements a thread is worth waking for

// [cpu
std::tuple<Tensor, Tensor> cell_cpu(const Tensor& gates, const Tensor& old_cell) {
  const Plan plan = plan_cell(gates, old_cell);
  opzoo::dispatch_floating(old_cell.scalar_type(), "lltm", [&]<class T>() {
    const auto p = params_of<T>(plan.gates, plan.cell);
    T* const new_h = opzoo::mutable_data<T>(plan.new_h);
    T* const new_cell = opzoo::mutable_data<T>(plan.new_cell);
    opzoo::parallel_for(0, p.rows * p.size, kGrain, [&](int64_t begin, int64_t end) {
      for (int64_t item = begin; item < end; ++item) cell_element(p, new_h, new_cell, item);
    });
  });
  return {plan.new_h, plan.new_cell};
}
// cpu]

std::tuple<Tensor, Tensor> backward_cpu(const Tensor& grad_h,
                                        const Tensor& grad_new_cell,
                                        const Tensor& gates,
                                        const Tensor& new_cell) {
  const BackwardPlan plan = plan_backward(grad_h, grad_new_cell, gates, new_cell);
  opzoo::dispatch_floating(new_cell.scalar_type(), "lltm_backward", [&]<class T>() {
    const auto p = params_of<T>(plan.gates, plan.cell);
    const T* const dh = opzoo::data<T>(plan.grad_h);
    const T* const dcell = opzoo::data<T>(plan.grad_new_cell);
    T* const grad_gates = opzoo::mutable_data<T>(plan.grad_gates);
    T* const grad_old_cell = opzoo::mutable_data<T>(plan.grad_old_cell);
    opzoo::parallel_for(0, p.rows * p.size, kGrain, [&](int64_t begin, int64_t end) {
      for (int64_t item = begin; item < end; ++item) {
        cell_gradient(p, dh, dcell, grad_gates, grad_old_cell, item);
      }
    });
  });
  return {plan.grad_gates, plan.grad_old_cell};
}

}  // namespace
}  // namespace lltm

STABLE_TORCH_LIBRARY_IMPL(lltm, CPU, m) {
  m.impl("cell", OPZOO_BOX(lltm::cell_cpu));
  m.impl("cell_backward", OPZOO_BOX(lltm::backward_cpu));
}
