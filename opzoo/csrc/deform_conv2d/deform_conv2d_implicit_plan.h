// SPDX-License-Identifier: Apache-2.0
// The implicit matrix product of deform_conv2d on Hopper, as the CUDA device calls it. Defined in
// deform_conv2d_implicit_cuda.cu.
#pragma once

#include "deform_conv2d/deform_conv2d_plan.h"

namespace opzoo {

// Writes out and returns true, or returns false with nothing done where the kernel does not apply:
//   the GPU is no Hopper, or this build has no kernels for sm_90a
//   the dtype is no 16-bit one; there are weight groups; the channels of an offset group are no
//   multiple of 64; the kernel window has too many taps for shared memory; the map is too large
// A contiguous input is copied to channels-last first; beyond that it allocates a copy of the
// weight.
bool run_deform_conv2d_implicit(const DeformConvParams& p,
                                const DeformConvArgs& args,
                                const OptionalTensor& bias,
                                Tensor& out);

}  // namespace opzoo
