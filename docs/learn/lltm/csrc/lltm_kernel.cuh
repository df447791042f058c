// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "common/launch.cuh"
#include "lltm.h"

namespace lltm {

// A thread owns one element of [N, S] at a time; neighbours own neighbours of a row, so each of the
// gates is read in one run per warp, but for the warps that reach over the end of a row.
// [kernel
template <class T>
__global__ void cell_kernel(CellParams<T> p, T* new_h, T* new_cell) {
  for (int64_t i = opzoo::first_item(); i < p.rows * p.size; i += opzoo::item_step()) {
    cell_element(p, new_h, new_cell, i);
  }
}
// kernel]

template <class T>
__global__ void cell_backward_kernel(
    CellParams<T> p, const T* grad_h, const T* grad_new_cell, T* grad_gates, T* grad_old_cell) {
  for (int64_t i = opzoo::first_item(); i < p.rows * p.size; i += opzoo::item_step()) {
    cell_gradient(p, grad_h, grad_new_cell, grad_gates, grad_old_cell, i);
  }
}

}  // namespace lltm
