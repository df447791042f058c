// SPDX-License-Identifier: Apache-2.0
// Additions many threads make to one place. The order they land in is not fixed, so a sum made this
// way may differ in its last bits from run to run. There is no half version on purpose: half
// targets are accumulated in fp32 and rounded once.
#pragma once

#include <cuda_runtime.h>

namespace opzoo {

__device__ __forceinline__ void atomic_add(float* target, float value) {
  atomicAdd(target, value);
}
__device__ __forceinline__ void atomic_add(double* target, double value) {
  atomicAdd(target, value);
}

}  // namespace opzoo
