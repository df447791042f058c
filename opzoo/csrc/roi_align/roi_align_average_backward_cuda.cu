// SPDX-License-Identifier: Apache-2.0
#include "roi_align/roi_align_average_backward_kernel.cuh"
#include "roi_align/roi_align_backward_launch.cuh"

namespace opzoo {
namespace {

// What lies where in the workspace, each part on a 16-byte boundary.
template <class T>
struct PatchWorkspace {
  using acc = acc_t<T>;
  int64_t bin_channels;  // of grad, or of its copy
  bool packed;
  int64_t reach, images, rois, grad, bytes;

  PatchWorkspace(const RoIAlignParams& p, const T* grad_data) {
    constexpr int64_t kVector = kVectorChannels<T>;
    const int64_t (&stride)[4] = p.pooled_stride;
    bin_channels = div_up(p.channels, kVector) * kVector;
    packed = bin_channels != p.channels || reinterpret_cast<uintptr_t>(grad_data) % 16 != 0 ||
             stride[kRoIChannel] != 1 || stride[kRoIColumn] != p.channels ||
             stride[kRoIRow] != p.channels * p.pooled_width ||
             stride[kRoIBatch] != p.channels * p.pooled_width * p.pooled_height;
    bytes = 0;
    reach = take(p.rois, sizeof(PatchReach));
    images = take(p.rois, sizeof(int64_t));
    rois = take(p.rois, sizeof(PatchRoI<acc>));
    const int64_t bins = p.rois * p.pooled_height * p.pooled_width;
    grad = take(packed ? bins * bin_channels : 0, sizeof(T));
  }

 private:
  int64_t take(int64_t count, size_t size) {
    const int64_t at = bytes;
    bytes += div_up<int64_t>(count * static_cast<int64_t>(size), 16) * 16;
    return at;
  }
};

template <class T>
PatchPlan make_patch_plan(const RoIAlignPyramid& pyramid, int64_t bin_channels) {
  PatchPlan plan{};
  plan.levels = pyramid.levels;
  plan.rois = pyramid.level[0].rois;
  plan.channels = pyramid.level[0].channels;
  plan.pooled_height = static_cast<int>(pyramid.level[0].pooled_height);
  plan.pooled_width = static_cast<int>(pyramid.level[0].pooled_width);
  plan.bin_channels = bin_channels;
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
void pack(const RoIAlignParams& p,
          int64_t packed_channels,
          const T* grad,
          T* packed,
          cudaStream_t stream) {
  const int64_t bins = p.pooled_height * p.pooled_width;
  const int64_t blocks = p.rois * div_up<int64_t>(bins, kPackBins) *
                         div_up<int64_t>(packed_channels, kPackChannels<T>);
  const auto grid = static_cast<unsigned>(std::min<int64_t>(blocks, 0x7fffffff));
  const auto bytes =
      static_cast<size_t>(std::min<int64_t>(bins, kPackBins)) * kPackPitch<T> * sizeof(T);
  if (p.pooled_stride[kRoIChannel] == 1) {
    roi_align_pack_kernel<T, true>
        <<<grid, kBlockSize, bytes, stream>>>(p, packed_channels, grad, packed);
  } else {
    roi_align_pack_kernel<T, false>
        <<<grid, kBlockSize, bytes, stream>>>(p, packed_channels, grad, packed);
  }
}

}  // namespace

template <class T>
int64_t average_backward_workspace(const RoIAlignPyramid& pyramid, const T* grad) {
  return PatchWorkspace<T>(pyramid.level[0], grad).bytes;
}

template <class T>
void launch_average_backward(const RoIAlignPyramid& pyramid,
                             const T* grad,
                             void* workspace,
                             cudaStream_t stream) {
  using acc = acc_t<T>;
  const RoIAlignParams& p = pyramid.level[0];
  const PatchWorkspace<T> parts(p, grad);
  const PatchPlan plan = make_patch_plan<T>(pyramid, parts.bin_channels);
  if (plan.tiles == 0 || p.channels == 0) return;
  char* base = static_cast<char*>(workspace);
  auto* reach = reinterpret_cast<PatchReach*>(base + parts.reach);
  auto* images = reinterpret_cast<int64_t*>(base + parts.images);
  auto* rois = reinterpret_cast<PatchRoI<acc>*>(base + parts.rois);
  if (p.rois > 0) {
    roi_align_patch_reach_kernel<acc>
        <<<grid_for(p.rois, 64), 64, 0, stream>>>(pyramid, plan, rois, reach, images);
    if (parts.packed) {
      T* packed = reinterpret_cast<T*>(base + parts.grad);
      pack(p, parts.bin_channels, grad, packed, stream);
      grad = packed;
    }
  }
  const int64_t blocks = plan.tiles * div_up<int64_t>(p.channels, kWarpChannels<T>);
  const auto grid = static_cast<unsigned>(std::min<int64_t>(blocks, 0x7fffffff));
  roi_align_patch_backward_kernel<T>
      <<<grid, kTileThreads, 0, stream>>>(plan, rois, reach, images, grad);
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
