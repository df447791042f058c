// SPDX-License-Identifier: Apache-2.0
// The average forward on CUDA, for one map (roi_align) and for a pyramid of them: all levels in one
// launch, each RoI's level chosen on the device. No torch here; defined for double, float, Half and
// BFloat16 in roi_align_forward_cuda.cu.
#pragma once

#include <cuda_runtime_api.h>

#include "roi_align/roi_align_pyramid.h"

namespace opzoo {

// Bytes of scratch launch_average wants: 0, or at most a copy of the maps with whole 16-byte
// vectors of channels. A function of the arguments alone, no device is asked.
template <class T>
int64_t average_workspace(const RoIAlignPyramid& pyramid, bool channels_last);

// Writes every element of output, dense [K, C, pooled_height, pooled_width], channels_last or
// contiguous. pyramid.map are the inputs, of any strides; nothing is kept after the launch, which
// is ordered on stream and waits for nothing. workspace: average_workspace() bytes on a 16-byte
// boundary, contents arbitrary before and after; null where that is 0. A RoI whose level is -1 or
// whose image is none of the batch gives zeros.
template <class T>
void launch_average(const RoIAlignPyramid& pyramid,
                    T* output,
                    bool channels_last,
                    void* workspace,
                    cudaStream_t stream);

}  // namespace opzoo
