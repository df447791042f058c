// SPDX-License-Identifier: Apache-2.0
// The implicit matrix products of deform_conv2d, as the CUDA device calls them. Defined in
// deform_conv2d_implicit_cuda.cu.
#pragma once

#include "deform_conv2d/deform_conv2d_plan.h"

namespace opzoo {

// Writes out and returns true, or returns false with nothing done where no kernel applies:
//   the dtype is fp64; there are weight groups; the channels of an offset group are no multiple of
//   128 bytes; the kernel window has too many taps for shared memory; the map is too large
//   fp32, and the GPU is no Hopper or this build has no kernels for sm_90a
//   a 16-bit dtype, and the GPU or the code built for it is older than sm_80
// A contiguous input is copied to channels-last, a few images at a time; beyond that it allocates a
// copy of the weight, two for fp32.
bool run_deform_conv2d_implicit(const DeformConvParams& p,
                                const DeformConvArgs& args,
                                const OptionalTensor& bias,
                                Tensor& out);

}  // namespace opzoo
