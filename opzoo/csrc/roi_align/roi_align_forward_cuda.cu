// SPDX-License-Identifier: Apache-2.0
#include "roi_align/roi_align_cuda_plan.h"
#include "roi_align/roi_align_forward_kernel.cuh"
#include "roi_align/roi_align_forward_launch.cuh"

namespace opzoo {
namespace {

constexpr int kMaxShared =
    46 * 1024;  // what a block gets without asking, less the kernels' own arrays
constexpr int kBandBytes = 8 * 1024;  // per axis, for a grid that only the device knows

// The bands kernels address one image with 32-bit offsets.
bool takes_bands(const RoIAlignParams& p) {
  constexpr int64_t kLimit = int64_t{1} << 31;
  if (p.pooled_height > kMaxBands || p.pooled_width > kMaxBands) return false;
  if (p.rois >= kLimit || p.channels >= kLimit / (p.pooled_height * p.pooled_width)) return false;
  const double extent =
      1.0 + static_cast<double>(p.height - 1) * static_cast<double>(p.map_stride[kRoIRow]) +
      static_cast<double>(p.width - 1) * static_cast<double>(p.map_stride[kRoIColumn]);
  return extent < static_cast<double>(kLimit) && p.height < kLimit && p.width < kLimit;
}

// channels_last with 16-byte vectors: every pixel starts on a 16-byte boundary.
template <class T>
bool takes_vectors(const RoIAlignParams& p, const void* input) {
  constexpr int64_t kVector = kVectorOf<T>;
  return takes_bands(p) && p.map_stride[kRoIChannel] == 1 && p.channels % kVector == 0 &&
         p.map_stride[kRoIBatch] % kVector == 0 && p.map_stride[kRoIRow] % kVector == 0 &&
         p.map_stride[kRoIColumn] % kVector == 0 && reinterpret_cast<uintptr_t>(input) % 16 == 0;
}

// Entries per bin. A bin of more gets the sample loop.
template <class acc>
int band_capacity(const RoIAlignParams& p, int64_t bins, int64_t size) {
  const int64_t room = kBandBytes / static_cast<int64_t>(bins * sizeof(BandEntry<acc>));
  const int64_t wanted = p.sampling_ratio > 0 ? std::min(2 * p.sampling_ratio, size) : size;
  const int64_t batches =
      std::max<int64_t>(std::min(room, wanted + kBandBatch - 1) / kBandBatch, 1);
  return static_cast<int>(batches * kBandBatch);
}

template <class T>
void launch_channels_last(const RoIAlignPyramid& pyramid, T* output, cudaStream_t stream) {
  using acc = acc_t<T>;
  const RoIAlignParams& p = pyramid.level[0];
  const int rows = band_capacity<acc>(p, p.pooled_height, p.height);
  const int columns = band_capacity<acc>(p, p.pooled_width, p.width);
  const auto bytes = (p.pooled_height * rows + p.pooled_width * columns) * sizeof(BandEntry<acc>);
  // 256 bytes of channels per block (see the kernel). Few RoIs are split over their bins as well.
  constexpr int64_t kSlice = 16;
  constexpr int64_t kBlocksWanted = 1024;
  const int64_t vectors = p.channels / kVectorOf<T>;
  const int64_t slice = std::max(kSlice, div_up<int64_t>(vectors, 65535));
  const int64_t slices = div_up(vectors, slice);
  const int64_t items = p.pooled_height * p.pooled_width * slice;
  const int64_t split =
      std::clamp<int64_t>(kBlocksWanted / (p.rois * slices), 1, div_up<int64_t>(items, kBlockSize));
  const dim3 grid(
      static_cast<unsigned>(p.rois), static_cast<unsigned>(slices), static_cast<unsigned>(split));
  roi_align_bands_channels_last_kernel<T><<<grid, kBlockSize, bytes, stream>>>(
      pyramid, output, rows, columns, static_cast<int>(slice));
}

template <class T, int kGroup>
void launch_contiguous_group(const RoIAlignPyramid& pyramid, T* output, cudaStream_t stream) {
  using acc = acc_t<T>;
  const RoIAlignParams& p = pyramid.level[0];
  const int rows = band_capacity<acc>(p, p.pooled_height, p.height);
  const int columns = band_capacity<acc>(p, p.pooled_width, p.width);
  const int64_t bins = p.pooled_height * p.pooled_width;
  const int64_t bands =
      (p.pooled_height * rows + p.pooled_width * columns) * sizeof(BandEntry<acc>);
  const int64_t per_warp = kGroup * (kColumnPitch * sizeof(acc) + bins * sizeof(T));
  int64_t warps = kBlockSize / 32;
  while (warps > 1 && bands + warps * per_warp > kMaxShared) warps /= 2;
  // Four groups of channels per warp: the weights are worth computing for those.
  const int64_t groups = div_up<int64_t>(p.channels, kGroup);
  const int64_t split = std::min<int64_t>(div_up(groups, 4 * warps), 65535);
  const dim3 grid(static_cast<unsigned>(p.rois), static_cast<unsigned>(split));
  roi_align_bands_contiguous_kernel<T, kGroup>
      <<<grid, static_cast<unsigned>(32 * warps), bands + warps * per_warp, stream>>>(
          pyramid, output, rows, columns);
}

template <class T>
void launch_contiguous(const RoIAlignPyramid& pyramid, T* output, cudaStream_t stream) {
  const int64_t bins_w = pyramid.level[0].pooled_width;
  if (bins_w <= 8) {
    launch_contiguous_group<T, 4>(pyramid, output, stream);
  } else if (bins_w <= 16) {
    launch_contiguous_group<T, 2>(pyramid, output, stream);
  } else {
    launch_contiguous_group<T, 1>(pyramid, output, stream);
  }
}

template <class T>
void launch_average_of_samples(const RoIAlignPyramid& pyramid,
                               T* output,
                               bool channels_last,
                               cudaStream_t stream) {
  const unsigned grid = grid_for(pooled_items_of(pyramid.level[0]));
  if (channels_last) {
    roi_align_average_kernel<T, true><<<grid, kBlockSize, 0, stream>>>(pyramid, output);
  } else {
    roi_align_average_kernel<T, false><<<grid, kBlockSize, 0, stream>>>(pyramid, output);
  }
}

template <class Takes>
bool every_level(const RoIAlignPyramid& pyramid, const Takes& takes) {
  for (int level = 0; level < pyramid.levels; ++level) {
    if (!takes(pyramid.level[level], pyramid.map[level])) return false;
  }
  return true;
}

}  // namespace

template <class T>
int64_t average_workspace(const RoIAlignPyramid&, bool) {
  return 0;
}

template <class T>
void launch_average(
    const RoIAlignPyramid& pyramid, T* output, bool channels_last, void*, cudaStream_t stream) {
  const auto bands = [](const RoIAlignParams& p, const void*) { return takes_bands(p); };
  if (channels_last && every_level(pyramid, takes_vectors<T>)) {
    launch_channels_last(pyramid, output, stream);
  } else if (!channels_last && every_level(pyramid, bands)) {
    launch_contiguous(pyramid, output, stream);
  } else {
    launch_average_of_samples(pyramid, output, channels_last, stream);
  }
}

#define OPZOO_ROI_ALIGN_AVERAGE(T)                                     \
  template int64_t average_workspace<T>(const RoIAlignPyramid&, bool); \
  template void launch_average<T>(const RoIAlignPyramid&, T*, bool, void*, cudaStream_t);
OPZOO_ROI_ALIGN_AVERAGE(double)
OPZOO_ROI_ALIGN_AVERAGE(float)
OPZOO_ROI_ALIGN_AVERAGE(Half)
OPZOO_ROI_ALIGN_AVERAGE(BFloat16)
#undef OPZOO_ROI_ALIGN_AVERAGE

}  // namespace opzoo
