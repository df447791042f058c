// SPDX-License-Identifier: Apache-2.0
// The methods matmul_cuda.cu chooses among. Each runs on the current device and on torch's stream.
#pragma once

#include "matmul/matmul_plan.h"

namespace opzoo {

// Register tiles (matmul_kernel.cuh): any type, size and strides. Where only_if is given, the
// product is computed only if *only_if, in device memory, is not 0 by then; fp32 alone.
void matmul_by_tiles(const MatmulPlan& plan, const int* only_if = nullptr);

// Hopper's tensor cores (matmul_wgmma_kernel.cuh): fp16, bf16, and fp32 with precision tf32 or
// tf32x3. False, with nothing written to the result, where device or build have no such kernel, an
// extent does not fit 31 bits, or an operand would have to be copied that is too large to.
bool matmul_by_wgmma(const MatmulPlan& plan);

}  // namespace opzoo
