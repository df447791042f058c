// SPDX-License-Identifier: Apache-2.0
// The module, the schemas, and what a call does before a device is involved.
#include <Python.h>

#include "lltm_plan.h"

// common/tensor.h asks for it: opzoo fills fresh memory with NaN while it is being tested.
bool opzoo::poison_allocations() {
  return false;
}

namespace lltm {
namespace {

void check_pair(const char* op, const Tensor& gates, const Tensor& cell) {
  opzoo::check_rank(op, "cell", cell, 2);
  opzoo::check_floating(op, "cell", cell);
  opzoo::check_shape(op, "gates", gates, {cell.size(0), 3 * cell.size(1)});
  opzoo::check_same_dtype(op, "gates", gates, "cell", cell);
  opzoo::check_same_device(op, "gates", gates, "cell", cell);
}

Tensor empty_as(const Tensor& t) {
  return opzoo::empty(opzoo::sizes_of(t), t.scalar_type(), t);
}

}  // namespace

Plan plan_cell(const Tensor& gates, const Tensor& old_cell) {
  check_pair("lltm", gates, old_cell);
  return {opzoo::contiguous(gates),
          opzoo::contiguous(old_cell),
          empty_as(old_cell),
          empty_as(old_cell)};
}

BackwardPlan plan_backward(const Tensor& grad_h,
                           const Tensor& grad_new_cell,
                           const Tensor& gates,
                           const Tensor& new_cell) {
  check_pair("lltm_backward", gates, new_cell);
  for (const Tensor* grad : {&grad_h, &grad_new_cell}) {
    opzoo::check_shape("lltm_backward", "grad", *grad, opzoo::sizes_of(new_cell));
    opzoo::check_same_dtype("lltm_backward", "grad", *grad, "cell", new_cell);
    opzoo::check_same_device("lltm_backward", "grad", *grad, "cell", new_cell);
  }
  // The gradient of a sum is one number with strides of 0: a kernel must not walk through it.
  return {opzoo::contiguous(grad_h),
          opzoo::contiguous(grad_new_cell),
          opzoo::contiguous(gates),
          opzoo::contiguous(new_cell),
          empty_as(gates),
          empty_as(new_cell)};
}

}  // namespace lltm

// [schema
STABLE_TORCH_LIBRARY(lltm, m) {
  m.def("cell(Tensor gates, Tensor old_cell) -> (Tensor, Tensor)");
  m.def(
      "cell_backward(Tensor grad_h, Tensor grad_new_cell, Tensor gates, Tensor new_cell)"
      " -> (Tensor, Tensor)");
}
// schema]

extern "C" __attribute__((visibility("default"))) PyObject* PyInit__C() {
  static PyModuleDef module = {
      PyModuleDef_HEAD_INIT, "lltm._C", nullptr, 0, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModuleDef_Init(&module);
}
