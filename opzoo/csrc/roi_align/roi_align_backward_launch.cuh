// SPDX-License-Identifier: Apache-2.0
// The average backward on CUDA, for one map (roi_align) and for a pyramid of them: all levels in
// one launch, each RoI's level chosen on the device. No torch here; defined for double, float, Half
// and BFloat16 in roi_align_average_backward_cuda.cu.
#pragma once

#include <cuda_runtime_api.h>

#include "roi_align/roi_align_pyramid.h"

namespace opzoo {

// Bytes of scratch launch_average_backward wants: a table of the RoIs, and grad folded in fp32
// (fp64), which takes at most its number of elements with whole 16-byte vectors of channels. A
// function of the sizes alone, no device is asked.
template <class T>
int64_t average_backward_workspace(const RoIAlignPyramid& pyramid, const T* grad);

// Writes every element of the maps pyramid.map, each dense, contiguous or channels_last. grad has
// the strides pyramid.level[0].pooled_stride. Nothing is kept after the launch, which is ordered on
// stream and waits for nothing. workspace: average_backward_workspace() bytes on a 16-byte
// boundary, contents arbitrary before and after. A RoI whose level is -1 or whose image is none of
// the batch gives nothing; without RoIs, channels or bins the maps are zeros.
template <class T>
void launch_average_backward(const RoIAlignPyramid& pyramid,
                             const T* grad,
                             void* workspace,
                             cudaStream_t stream);

}  // namespace opzoo
