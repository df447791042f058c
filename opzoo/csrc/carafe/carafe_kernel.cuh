// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "carafe/carafe.h"
#include "common/launch.cuh"

namespace opzoo {

// A thread owns one element of the result, neighbours own neighbours along a row: a warp writes one
// run of memory, and reads masks, features and gradients of one row. What neighbours read twice
// comes from L1. Result is one of the three structs of carafe.h.
template <class Result, class T>
__global__ void carafe_kernel(CarafeParams p) {
  const CarafeShape shape = Result::shape(p);
  for (int64_t item = first_item(); item < shape.numel(); item += item_step()) {
    static_cast<T*>(p.out)[item] =
        static_cast<T>(Result::template value<T>(p, carafe_index(shape, item)));
  }
}

}  // namespace opzoo
