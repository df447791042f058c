// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "common/atomics.cuh"
#include "common/launch.cuh"
#include "roi_pool/roi_pool.h"

namespace opzoo {

// A thread owns one element of the result; neighbours own neighbouring bins of one RoI and channel,
// so stores are coalesced and a warp reads one corner of a map.
template <class T>
__global__ void roi_pool_kernel(RoIPoolParams p, T* output, int64_t* argmax, int64_t items) {
  const int64_t bins = p.pooled_height * p.pooled_width;
  for (int64_t item = first_item(); item < items; item += item_step()) {
    const int64_t plane = item / bins, bin = item - plane * bins;
    const auto best =
        pool_pixel<T>(p, plane / p.C, plane % p.C, bin / p.pooled_width, bin % p.pooled_width);
    output[item] = static_cast<T>(best.value);
    argmax[item] = best.argmax;
  }
}

// A thread owns one gradient, and adds it to its pixel: pixels are shared, so sums meet in any
// order. An argmax from outside the map is skipped.
template <class T>
__global__ void roi_pool_backward_kernel(RoIPoolParams p,
                                         const T* grad,
                                         const int64_t* argmax,
                                         acc_t<T>* sums,
                                         int64_t bins,
                                         int64_t items) {
  using acc = acc_t<T>;
  const int64_t pixels = p.H * p.W;
  for (int64_t item = first_item(); item < items; item += item_step()) {
    const int64_t plane = item / bins;
    const int64_t image = pool_image<acc>(p, plane / p.C);
    const int64_t pixel = argmax[item];
    if (image < 0 || pixel < 0 || pixel >= pixels) continue;
    atomic_add(sums + (image * p.C + plane % p.C) * pixels + pixel, static_cast<acc>(grad[item]));
  }
}

}  // namespace opzoo
