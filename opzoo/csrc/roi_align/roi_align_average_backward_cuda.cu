// SPDX-License-Identifier: Apache-2.0
#include "roi_align/roi_align_backward_kernel.cuh"
#include "roi_align/roi_align_backward_launch.cuh"

namespace opzoo {
namespace {

template <class T>
void launch_backward(const RoIAlignParams& p,
                     const RoIReach<acc_t<T>>* reach,
                     const T* grad,
                     T* grad_input,
                     bool channels_last,
                     cudaStream_t stream) {
  using acc = acc_t<T>;
  const int64_t blocks_of_channels = div_up<int64_t>(p.channels, kTileChannels<acc>);
  const bool tiled = p.pooled_height <= kMaxBackwardBins && p.pooled_width <= kMaxBackwardBins &&
                     blocks_of_channels <= 65535;
  if (!tiled) {
    const int64_t items = p.batch * p.channels * p.height * p.width;
    roi_align_gather_backward_kernel<T>
        <<<grid_for(items), kBlockSize, 0, stream>>>(p, reach, grad, grad_input);
    return;
  }
  const int64_t tiles =
      p.batch * div_up<int64_t>(p.height, kTileRows) * div_up<int64_t>(p.width, kTileColumns);
  const dim3 grid(static_cast<unsigned>(std::min<int64_t>(tiles, 0x7fffffff)),
                  static_cast<unsigned>(blocks_of_channels));
  constexpr auto kBytes = sizeof(TileShared<acc>);
  if (channels_last) {
    roi_align_tile_backward_kernel<T, true>
        <<<grid, 32 * kTileRows, kBytes, stream>>>(p, reach, grad, grad_input);
  } else {
    roi_align_tile_backward_kernel<T, false>
        <<<grid, 32 * kTileRows, kBytes, stream>>>(p, reach, grad, grad_input);
  }
}

}  // namespace

template <class T>
int64_t average_backward_workspace(const RoIAlignPyramid& pyramid, const T*) {
  return pyramid.level[0].rois * static_cast<int64_t>(sizeof(RoIReach<acc_t<T>>));
}

template <class T>
void launch_average_backward(const RoIAlignPyramid& pyramid,
                             const T* grad,
                             void* workspace,
                             cudaStream_t stream) {
  using acc = acc_t<T>;
  auto* reach = static_cast<RoIReach<acc>*>(workspace);
  for (int level = 0; level < pyramid.levels; ++level) {
    const RoIAlignParams& p = pyramid.level[level];
    if (p.batch * p.channels * p.height * p.width == 0) continue;
    roi_align_reach_kernel<acc><<<grid_for(p.rois), kBlockSize, 0, stream>>>(pyramid, level, reach);
    const bool channels_last = p.map_stride[kRoIChannel] == 1;
    launch_backward(p, reach, grad, static_cast<T*>(pyramid.map[level]), channels_last, stream);
  }
}

#define OPZOO_ROI_ALIGN_AVERAGE_BACKWARD(T)                                         \
  template int64_t average_backward_workspace<T>(const RoIAlignPyramid&, const T*); \
  template void launch_average_backward<T>(const RoIAlignPyramid&, const T*, void*, cudaStream_t);
OPZOO_ROI_ALIGN_AVERAGE_BACKWARD(double)
OPZOO_ROI_ALIGN_AVERAGE_BACKWARD(float)
OPZOO_ROI_ALIGN_AVERAGE_BACKWARD(Half)
OPZOO_ROI_ALIGN_AVERAGE_BACKWARD(BFloat16)
#undef OPZOO_ROI_ALIGN_AVERAGE_BACKWARD

}  // namespace opzoo
