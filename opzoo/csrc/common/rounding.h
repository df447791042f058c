// SPDX-License-Identifier: Apache-2.0
// Arithmetic with one result on every device, for expressions where a last bit decides something:
// which boxes overlap enough, how many samples a bin has. No torch.
#pragma once

#include "common/types.h"

namespace opzoo {

// nvcc would contract a product and a following sum into one FMA, which rounds once where the CPU
// rounds twice; these intrinsics are never contracted. The host is compiled without contraction.
OPZOO_HOST_DEVICE float multiply_rounded(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}
OPZOO_HOST_DEVICE double multiply_rounded(double a, double b) {
#ifdef __CUDA_ARCH__
  return __dmul_rn(a, b);
#else
  return a * b;
#endif
}
OPZOO_HOST_DEVICE float divide_rounded(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fdiv_rn(a, b);
#else
  return a / b;
#endif
}
OPZOO_HOST_DEVICE double divide_rounded(double a, double b) {
#ifdef __CUDA_ARCH__
  return __ddiv_rn(a, b);
#else
  return a / b;
#endif
}

}  // namespace opzoo
