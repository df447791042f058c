// SPDX-License-Identifier: Apache-2.0
// The first half of the average backward: what each RoI reaches, and its gradients folded into rows
// of channels that the patches of grad_input then add up. No torch here.
#pragma once

#include "common/launch.cuh"
#include "roi_align/roi_align_bands.h"
#include "roi_align/roi_align_pyramid.h"

namespace opzoo {

// Channels of a vector of 16 bytes.
template <class acc>
constexpr int kVectorChannels = 16 / sizeof(acc);
template <class T, int kCount>
struct alignas(sizeof(T) * kCount) ChannelVector {
  T value[kCount];
};

// One axis of a RoI. Its folded gradients are those of `pixels` pixels from first_pixel on, or,
// where pixels is 0, of the bins. Bin p's samples lie strictly between start + p * bin and start +
// (p + 1) * bin, so the bins near a pixel follow from (pixel - start) / bin but for rounding, which
// slack covers.
template <class acc>
struct PatchAxis {
  RoIAxis<acc> axis;
  acc inverse, slack;
  int size;  // of the map
  int first_pixel, pixels;

  OPZOO_HOST_DEVICE int rows(int bins) const { return pixels > 0 ? pixels : bins; }
};

template <class acc>
struct PatchRoI {
  PatchAxis<acc> y, x;
  acc inverse_count;
};

// The pixels a RoI reaches, cut to its map.
struct alignas(16) PatchReach {
  int first_row, last_row, first_column, last_column;
};

struct PatchMap {
  void* grad_input;
  int64_t stride[4];
  int height, width;
  int tile_rows, tile_columns;
  int64_t first_tile;   // tiles of all levels in one row, level by level, image by image
  int64_t first_image;  // of this level
};

struct PatchPlan {
  int levels;
  PatchMap map[kMaxLevels];
  int64_t tiles;
  int64_t rois, channels;
  int64_t row_channels;  // from row to row of the folded gradients: whole vectors
  int pooled_height, pooled_width;
};

constexpr int kFoldBins = 16;  // per axis

template <class acc>
__device__ PatchAxis<acc> make_patch_axis(
    const RoIAxis<acc>& axis, const PixelRange& reach, int64_t bins, int64_t size, bool fold) {
  const acc epsilon = sizeof(acc) == 8 ? acc(0x1p-50) : acc(0x1p-21);
  const acc extent =
      std::abs(axis.start) + static_cast<acc>(bins) * std::abs(axis.bin) + static_cast<acc>(size);
  PatchAxis<acc> result;
  result.axis = axis;
  result.inverse = acc(1) / axis.bin;
  result.slack = acc(0x1p-10) + epsilon * extent * std::abs(result.inverse);
  result.size = static_cast<int>(size);
  result.first_pixel = static_cast<int>(reach.first);
  const int64_t pixels = reach.last - reach.first + 1;
  result.pixels = fold && pixels <= bins ? static_cast<int>(pixels) : 0;
  return result;
}

// One thread per RoI. images counts through the maps of all levels; -1 where nothing is reached.
template <class acc>
__global__ void roi_align_patch_reach_kernel(const __grid_constant__ RoIAlignPyramid pyramid,
                                             const __grid_constant__ PatchPlan plan,
                                             PatchRoI<acc>* __restrict__ rois,
                                             PatchReach* __restrict__ reach,
                                             int64_t* __restrict__ images) {
  const bool fold = plan.pooled_height <= kFoldBins && plan.pooled_width <= kFoldBins;
  for (int64_t k = first_item(); k < plan.rois; k += item_step()) {
    const int level = level_of<acc>(pyramid, k);
    images[k] = -1;
    if (level < 0) continue;
    const RoIAlignParams& p = pyramid.level[level];
    const RoI<acc> roi = read_roi<acc>(p, k);
    const PixelRange rows = footprint(roi.y, p.pooled_height, p.height);
    const PixelRange columns = footprint(roi.x, p.pooled_width, p.width);
    if (roi.image < 0 || rows.first > rows.last || columns.first > columns.last) continue;
    images[k] = plan.map[level].first_image + roi.image;
    reach[k] = {static_cast<int>(rows.first),
                static_cast<int>(rows.last),
                static_cast<int>(columns.first),
                static_cast<int>(columns.last)};
    rois[k] = {make_patch_axis(roi.y, rows, p.pooled_height, p.height, fold),
               make_patch_axis(roi.x, columns, p.pooled_width, p.width, fold),
               acc(1) / roi.count()};
  }
}

// The weights of one axis of a RoI on its folded rows: row r takes bins [first, first + count).
template <class acc>
struct FoldAxis {
  acc weight[kFoldBins][kFoldBins];  // [row, bin]
  int first[kFoldBins], count[kFoldBins];

  // One thread per weight; half a warp holds a row. The bins with weight on a pixel are neighbours.
  __device__ void fill(const PatchAxis<acc>& a, int bins) {
    static_assert(kFoldBins == 16);
    const int row = threadIdx.x / kFoldBins;
    const int bin = threadIdx.x % kFoldBins;
    acc value = acc(0);
    if (row < a.rows(bins) && bin < bins) {
      value = a.pixels > 0 ? weight_of(a.axis, bin, a.first_pixel + row, a.size)
                           : static_cast<acc>(row == bin);
    }
    weight[row][bin] = value;
    const unsigned votes = __ballot_sync(0xffffffffu, value != acc(0));
    const unsigned own = votes >> (threadIdx.x % 32 / kFoldBins * kFoldBins) & 0xffffu;
    if (bin == 0) {
      first[row] = own != 0 ? __ffs(own) - 1 : 0;
      count[row] = __popc(own);
    }
  }
};

// grad of any strides to the folded gradients, dense [RoI, row, channel] in fp32 (fp64). Along an
// axis on which a RoI has no more pixels than bins, its bins are summed into pixels: a small RoI,
// and a detector heaps those on one spot, then costs its patches a few rows in place of all bins. A
// block takes one RoI's channels of 128 bytes at a time through shared memory, [bin, channel]; it
// reads along whichever of channels and bins is dense and writes vectors along channels. Where an
// axis has more than kFoldBins bins they are only copied, kFoldBins^2 at a time. Grid: x over (RoI,
// block of bins), y over shares of the channels.
template <class acc>
constexpr int kFoldChannels = 128 / sizeof(acc);

template <class T, bool kAlongChannels>
__global__ void __launch_bounds__(kBlockSize)
    roi_align_fold_kernel(const __grid_constant__ RoIAlignParams p,
                          int64_t row_channels,
                          const PatchRoI<acc_t<T>>* __restrict__ rois,
                          const int64_t* __restrict__ images,
                          const T* __restrict__ grad,
                          acc_t<T>* __restrict__ folded) {
  using acc = acc_t<T>;
  constexpr int kChannels = kFoldChannels<acc>;
  constexpr int kVector = kVectorChannels<acc>;
  constexpr int kVectors = kChannels / kVector;  // of a row
  constexpr int kPitch = kChannels + kVector;
  constexpr int kMaxBins = kFoldBins * kFoldBins;
  using Vector = ChannelVector<acc, kVector>;
  static_assert(kBlockSize == kMaxBins);
  extern __shared__ __align__(16) char shared[];
  acc* turned = reinterpret_cast<acc*>(shared);
  __shared__ int64_t bin_offset[kMaxBins];
  __shared__ FoldAxis<acc> fold_y, fold_x;
  const int height = static_cast<int>(p.pooled_height);
  const int width = static_cast<int>(p.pooled_width);
  const int64_t all_bins = p.pooled_height * p.pooled_width;
  const int64_t bin_blocks = div_up<int64_t>(all_bins, kMaxBins);
  const int64_t channel_stride = p.pooled_stride[kRoIChannel];
  for (int64_t block = blockIdx.x; block < p.rois * bin_blocks; block += gridDim.x) {
    const int64_t k = block / bin_blocks;
    const int64_t first_bin = (block - k * bin_blocks) * kMaxBins;
    if (images[k] < 0) continue;
    const int bins = static_cast<int>(min(all_bins - first_bin, static_cast<int64_t>(kMaxBins)));
    const PatchAxis<acc> y = rois[k].y;
    const PatchAxis<acc> x = rois[k].x;
    const bool fold = y.pixels > 0 || x.pixels > 0;
    __syncthreads();  // the tables of the previous RoI have been read
    if (threadIdx.x < bins) {
      const int64_t ph = (first_bin + threadIdx.x) / p.pooled_width;
      const int64_t pw = (first_bin + threadIdx.x) - ph * p.pooled_width;
      bin_offset[threadIdx.x] = ph * p.pooled_stride[kRoIRow] + pw * p.pooled_stride[kRoIColumn];
    }
    if (fold) {
      fold_y.fill(y, height);
      fold_x.fill(x, width);
    }
    const int columns = fold ? x.rows(width) : 1;
    const int rows = fold ? y.rows(height) * columns : bins;
    for (int64_t first_channel = static_cast<int64_t>(blockIdx.y) * kChannels;
         first_channel < row_channels;
         first_channel += static_cast<int64_t>(gridDim.y) * kChannels) {
      const int64_t real_channels = p.channels - first_channel;
      __syncthreads();  // the tables are there, the previous channels have been read
      const T* from = grad + k * p.pooled_stride[kRoIBatch] + first_channel * channel_stride;
      const int inner = kAlongChannels ? kChannels : bins;
      int i = threadIdx.x % inner;
      int j = threadIdx.x / inner;
#pragma unroll 8
      for (int item = threadIdx.x; item < bins * kChannels; item += kBlockSize) {
        const int channel = kAlongChannels ? i : j;
        const int bin = kAlongChannels ? j : i;
        turned[bin * kPitch + channel] =
            channel < real_channels
                ? static_cast<acc>(from[channel * channel_stride + bin_offset[bin]])
                : acc(0);
        i += kBlockSize % inner;
        j += kBlockSize / inner;
        if (i >= inner) {
          i -= inner;
          ++j;
        }
      }
      __syncthreads();
      const int channel = threadIdx.x % kVectors * kVector;
      if (first_channel + channel >= row_channels) continue;
      acc* to = folded + (k * all_bins + first_bin) * row_channels + first_channel + channel;
      const acc* own = turned + channel;
      for (int row = threadIdx.x / kVectors; row < rows; row += kBlockSize / kVectors) {
        Vector sum{};
        if (fold) {
          const int at_y = row / columns;
          const int at_x = row - at_y * columns;
          const int first_x = fold_x.first[at_x];
          const int count_x = fold_x.count[at_x];
          const int end_y = fold_y.first[at_y] + fold_y.count[at_y];
          for (int ph = fold_y.first[at_y]; ph < end_y; ++ph) {
            Vector line{};
            for (int pw = first_x; pw < first_x + count_x; ++pw) {
              const acc weight = fold_x.weight[at_x][pw];
              const auto value = *reinterpret_cast<const Vector*>(own + (ph * width + pw) * kPitch);
#pragma unroll
              for (int c = 0; c < kVector; ++c) line.value[c] += weight * value.value[c];
            }
            const acc weight = fold_y.weight[at_y][ph];
#pragma unroll
            for (int c = 0; c < kVector; ++c) sum.value[c] += weight * line.value[c];
          }
        } else {
          sum = *reinterpret_cast<const Vector*>(own + row * kPitch);
        }
        *reinterpret_cast<Vector*>(to + row * row_channels) = sum;
      }
    }
  }
}

}  // namespace opzoo
