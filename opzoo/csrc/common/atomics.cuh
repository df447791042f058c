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

// target[i] += scale * value[i]: where the hardware has it four neighbours in one instruction.
// Target is on a 16-byte boundary if kCount is 4 or more.
template <int kCount>
__device__ __forceinline__ void atomic_add_scaled(float* target,
                                                  const float (&value)[kCount],
                                                  float scale) {
#if __CUDA_ARCH__ >= 900
  if constexpr (kCount % 4 == 0) {
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      atomicAdd(
          reinterpret_cast<float4*>(target + i),
          make_float4(
              scale * value[i], scale * value[i + 1], scale * value[i + 2], scale * value[i + 3]));
    }
    return;
  }
#endif
#pragma unroll
  for (int i = 0; i < kCount; ++i) atomicAdd(target + i, scale * value[i]);
}
template <int kCount>
__device__ __forceinline__ void atomic_add_scaled(double* target,
                                                  const double (&value)[kCount],
                                                  double scale) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) atomicAdd(target + i, scale * value[i]);
}

}  // namespace opzoo
