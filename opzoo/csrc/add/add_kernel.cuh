// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "add/add.h"
#include "common/launch.cuh"

namespace opzoo {

// One thread per element, neighbours in a warp on neighbours along the output's fastest axis:
// stores are coalesced, and so are loads from operands laid out the same way. The grid-stride loop
// covers whatever the grid does not.
template <class T>
__global__ void add_contiguous_kernel(
    const T* a, const T* b, T* out, acc_t<T> alpha, int64_t numel) {
  for (int64_t i = first_item(); i < numel; i += item_step()) {
    out[i] = add_value<T>(static_cast<acc_t<T>>(a[i]), static_cast<acc_t<T>>(b[i]), alpha);
  }
}

// The same for any strides (0 along a broadcast axis): each thread finds its element by dividing
// the linear index through the merged axes. An operand without data is a number.
template <class T>
__global__ void add_strided_kernel(AddParams p) {
  const auto* a = static_cast<const T*>(p.a.data);
  const auto* b = static_cast<const T*>(p.b.data);
  auto* out = static_cast<T*>(p.out);
  const auto alpha = static_cast<acc_t<T>>(p.alpha);
  for (int64_t i = first_item(); i < p.loop.numel; i += item_step()) {
    int64_t offset[3];
    offsets_of(p.loop, i, offset);
    const acc_t<T> left = a ? static_cast<acc_t<T>>(a[offset[kAddA]]) : add_number<T>(p.a);
    const acc_t<T> right = b ? static_cast<acc_t<T>>(b[offset[kAddB]]) : add_number<T>(p.b);
    out[offset[kAddOut]] = add_value<T>(left, right, alpha);
  }
}

}  // namespace opzoo
