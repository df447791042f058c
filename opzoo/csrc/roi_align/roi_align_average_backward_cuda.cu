// SPDX-License-Identifier: Apache-2.0
#include "roi_align/roi_align_average_backward_kernel.cuh"
#include "roi_align/roi_align_backward_launch.cuh"

namespace opzoo {
namespace {

// What lies where in the workspace, each part on a 16-byte boundary.
template <class acc>
struct PatchWorkspace {
  int64_t row_channels;
  int64_t reach, images, rois, folded, bytes = 0;

  explicit PatchWorkspace(const RoIAlignParams& p) {
    row_channels = div_up<int64_t>(p.channels, kVectorChannels<acc>) * kVectorChannels<acc>;
    reach = take(p.rois, sizeof(PatchReach));
    images = take(p.rois, sizeof(int64_t));
    rois = take(p.rois, sizeof(PatchRoI<acc>));
    folded = take(p.rois * p.pooled_height * p.pooled_width * row_channels, sizeof(acc));
  }

 private:
  int64_t take(int64_t count, size_t size) {
    const int64_t at = bytes;
    bytes += div_up<int64_t>(count * static_cast<int64_t>(size), 16) * 16;
    return at;
  }
};

PatchPlan make_patch_plan(const RoIAlignPyramid& pyramid, int64_t row_channels) {
  PatchPlan plan{};
  plan.levels = pyramid.levels;
  plan.rois = pyramid.level[0].rois;
  plan.channels = pyramid.level[0].channels;
  plan.pooled_height = static_cast<int>(pyramid.level[0].pooled_height);
  plan.pooled_width = static_cast<int>(pyramid.level[0].pooled_width);
  plan.row_channels = row_channels;
  int64_t images = 0;
  for (int level = 0; level < pyramid.levels; ++level) {
    const RoIAlignParams& p = pyramid.level[level];
    PatchMap& map = plan.map[level];
    map.grad_input = pyramid.map[level];
    std::copy_n(p.map_stride, 4, map.stride);
    map.height = static_cast<int>(p.height);
    map.width = static_cast<int>(p.width);
    map.tile_rows = static_cast<int>(div_up<int64_t>(p.height, kPatchRows));
    map.tile_columns = static_cast<int>(div_up<int64_t>(p.width, kTileColumns));
    map.first_tile = plan.tiles;
    map.first_image = images;
    plan.tiles += p.batch * map.tile_rows * map.tile_columns;
    images += p.batch;
  }
  return plan;
}

template <class T>
void fold(const RoIAlignParams& p,
          int64_t row_channels,
          const PatchRoI<acc_t<T>>* rois,
          const int64_t* images,
          const T* grad,
          acc_t<T>* folded,
          cudaStream_t stream) {
  using acc = acc_t<T>;
  constexpr int64_t kMaxBins = kFoldBins * kFoldBins;
  const int64_t bins = p.pooled_height * p.pooled_width;
  // Two shares of the channels, more where the RoIs are few: a share computes the weights anew.
  constexpr int64_t kBlocksWanted = 2048;
  const int64_t blocks = p.rois * div_up<int64_t>(bins, kMaxBins);
  const int64_t shares = std::min({div_up<int64_t>(row_channels, kFoldChannels<acc>),
                                   std::max<int64_t>(div_up<int64_t>(kBlocksWanted, blocks), 2),
                                   int64_t{65535}});
  const dim3 grid(static_cast<unsigned>(std::min<int64_t>(blocks, 0x7fffffff)),
                  static_cast<unsigned>(shares));
  const auto bytes = static_cast<size_t>(std::min<int64_t>(bins, kMaxBins)) *
                     (kFoldChannels<acc> + kVectorChannels<acc>)*sizeof(acc);
  if (p.pooled_stride[kRoIChannel] == 1) {
    roi_align_fold_kernel<T, true>
        <<<grid, kBlockSize, bytes, stream>>>(p, row_channels, rois, images, grad, folded);
  } else {
    roi_align_fold_kernel<T, false>
        <<<grid, kBlockSize, bytes, stream>>>(p, row_channels, rois, images, grad, folded);
  }
}

}  // namespace

template <class T>
int64_t average_backward_workspace(const RoIAlignPyramid& pyramid, const T*) {
  return PatchWorkspace<acc_t<T>>(pyramid.level[0]).bytes;
}

template <class T>
void launch_average_backward(const RoIAlignPyramid& pyramid,
                             const T* grad,
                             void* workspace,
                             cudaStream_t stream) {
  using acc = acc_t<T>;
  const RoIAlignParams& p = pyramid.level[0];
  const PatchWorkspace<acc> parts(p);
  const PatchPlan plan = make_patch_plan(pyramid, parts.row_channels);
  if (plan.tiles == 0 || p.channels == 0) return;
  char* base = static_cast<char*>(workspace);
  auto* reach = reinterpret_cast<PatchReach*>(base + parts.reach);
  auto* images = reinterpret_cast<int64_t*>(base + parts.images);
  auto* rois = reinterpret_cast<PatchRoI<acc>*>(base + parts.rois);
  auto* folded = reinterpret_cast<acc*>(base + parts.folded);
  if (p.rois > 0) {
    roi_align_patch_reach_kernel<acc>
        <<<grid_for(p.rois, 64), 64, 0, stream>>>(pyramid, plan, rois, reach, images);
    fold(p, parts.row_channels, rois, images, grad, folded, stream);
  }
  const int64_t blocks = plan.tiles * div_up<int64_t>(p.channels, kWarpChannels<acc>);
  const auto grid = static_cast<unsigned>(std::min<int64_t>(blocks, 0x7fffffff));
  roi_align_patch_backward_kernel<T>
      <<<grid, kTileThreads, 0, stream>>>(plan, rois, reach, images, folded);
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
