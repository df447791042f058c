// SPDX-License-Identifier: Apache-2.0
// The device-independent half: checks and results. Defined in lltm.cpp.
#pragma once

#include "common/dispatch.h"
#include "lltm.h"

namespace lltm {

using opzoo::Tensor;

struct Plan {
  Tensor gates, cell;      // contiguous
  Tensor new_h, new_cell;  // allocated, not yet written
};

struct BackwardPlan {
  Tensor grad_h, grad_new_cell, gates, cell;  // contiguous
  Tensor grad_gates, grad_old_cell;           // allocated, not yet written
};

Plan plan_cell(const Tensor& gates, const Tensor& old_cell);
BackwardPlan plan_backward(const Tensor& grad_h,
                           const Tensor& grad_new_cell,
                           const Tensor& gates,
                           const Tensor& new_cell);

template <class T>
CellParams<T> params_of(const Tensor& gates, const Tensor& cell) {
  return {cell.size(0), cell.size(1), opzoo::data<T>(gates), opzoo::data<T>(cell)};
}

}  // namespace lltm
