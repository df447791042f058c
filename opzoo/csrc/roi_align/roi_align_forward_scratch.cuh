// SPDX-License-Identifier: Apache-2.0
// What RoIs touch of maps of any layout, copied to channels-last scratch for
// roi_align_bins_kernel. Parts no RoI touches are neither read nor written: a thousand proposals of
// a detector touch about half of the map and read each pixel of it several times.
#pragma once

#include "roi_align/roi_align_forward_kernel.cuh"

namespace opzoo {

// The unit of copying: the pixels of one map row that fill 32 bytes, a sector of each channel.
template <class T>
constexpr int kStrip = 32 / sizeof(T);
constexpr int kPixels = 2;  // of a strip, per thread

constexpr int kMarkRows = 8;        // map rows of a block of the marking kernel
constexpr int kMarkWords = 128;     // strips of a map row, in words of 32
constexpr int kMarkThreads = 1024;  // reading a RoI is latency: one each for a thousand
constexpr int kCopyThreads = 256;

struct ScratchLevel {
  int64_t first_strip;  // strips are numbered over all levels, images and rows
  int64_t first_block;  // of the marking kernel
  int strips;           // of a map row
  bool vectors;         // the map takes loads of kPixels pixels
};

struct Scratch {
  RoIAlignPyramid from;  // the maps as they come
  RoIAlignPyramid to;    // the same maps in channels-last scratch
  ScratchLevel level[kMaxLevels];
  uint8_t* marks;  // [strips] whether a RoI touches it
};

// The level of strip or block number i of all.
__device__ __forceinline__ int scratch_level(const Scratch& s,
                                             int64_t ScratchLevel::* first,
                                             int64_t i) {
  int level = 0;
  while (level + 1 < s.from.levels && i >= s.level[level + 1].*first) ++level;
  return level;
}

// A block owns kMarkRows rows of one image and goes through all RoIs, with a bit per strip in
// shared memory: every mark is written once and needs no zeroing before.
template <class T>
__global__ void __launch_bounds__(kMarkThreads)
    roi_align_mark_kernel(const __grid_constant__ Scratch s) {
  using acc = acc_t<T>;
  __shared__ unsigned bits[kMarkRows][kMarkWords];
  const int own = scratch_level(s, &ScratchLevel::first_block, blockIdx.x);
  const RoIAlignParams& p = s.from.level[own];
  const int64_t blocks = div_up<int64_t>(p.height, kMarkRows);
  const int64_t block = blockIdx.x - s.level[own].first_block;
  const int64_t image = block / blocks;
  const int64_t first = (block - image * blocks) * kMarkRows;
  const int rows = static_cast<int>(min(int64_t{kMarkRows}, p.height - first));
  const int strips = s.level[own].strips;

  for (int i = threadIdx.x; i < kMarkRows * kMarkWords; i += blockDim.x) {
    bits[i / kMarkWords][i % kMarkWords] = 0;
  }
  __syncthreads();
  for (int64_t k = threadIdx.x; k < p.rois; k += blockDim.x) {
    if (image_index<acc>(p, k) != image) continue;
    const auto [level, roi] = read_roi<acc>(s.from, k);
    if (level != own || roi.image < 0) continue;
    const PixelRange y = footprint(roi.y, p.pooled_height, p.height);
    const PixelRange x = footprint(roi.x, p.pooled_width, p.width);
    const int begin = static_cast<int>(max(y.first - first, int64_t{0}));
    const int end = static_cast<int>(min(y.last - first + 1, int64_t{rows}));
    if (begin >= end || x.first > x.last) continue;
    const int left = static_cast<int>(x.first / kStrip<T>);
    const int right = static_cast<int>(x.last / kStrip<T>);
    for (int word = left / 32; word <= right / 32; ++word) {
      const unsigned from_left = word == left / 32 ? ~0u << left % 32 : ~0u;
      const unsigned to_right = word == right / 32 ? ~0u >> (31 - right % 32) : ~0u;
      for (int row = begin; row < end; ++row) atomicOr(&bits[row][word], from_left & to_right);
    }
  }
  __syncthreads();
  uint8_t* marks = s.marks + s.level[own].first_strip + (image * p.height + first) * strips;
  for (int i = threadIdx.x; i < rows * strips; i += blockDim.x) {
    const int row = i / strips;
    const int strip = i - row * strips;
    marks[i] = bits[row][strip / 32] >> strip % 32 & 1;
  }
}

// A block owns one strip (x) and a share of its channels (y), a thread kPixels pixels of one
// vector of channels: neighbours on neighbouring pixels up to the strip, then on the next vector,
// so that loads are runs of 32 bytes and stores of more. The turn happens in registers.
template <class T>
__global__ void __launch_bounds__(kCopyThreads)
    roi_align_copy_kernel(const __grid_constant__ Scratch s) {
  constexpr int kVector = kVectorOf<T>;
  constexpr int kLanes = kStrip<T> / kPixels;
  const int64_t number = blockIdx.x;
  if (!s.marks[number]) return;
  const int level = scratch_level(s, &ScratchLevel::first_strip, number);
  const RoIAlignParams& from = s.from.level[level];
  const RoIAlignParams& to = s.to.level[level];
  const int64_t place = number - s.level[level].first_strip;
  const int64_t row = place / s.level[level].strips;
  const int64_t image = row / from.height;
  const int64_t y = row - image * from.height;
  const int64_t x = (place - row * s.level[level].strips) * kStrip<T> +
                    static_cast<int>(threadIdx.x) % kLanes * kPixels;
  const int64_t channel =
      (blockIdx.y * (kCopyThreads / kLanes) + static_cast<int>(threadIdx.x) / kLanes) * kVector;
  if (channel >= from.channels || x >= from.width) return;

  const T* source = static_cast<const T*>(s.from.map[level]) + image * from.map_stride[kRoIBatch] +
                    y * from.map_stride[kRoIRow] + x * from.map_stride[kRoIColumn] +
                    channel * from.map_stride[kRoIChannel];
  Vector<T, kPixels> value[kVector];
  if (s.level[level].vectors && x + kPixels <= from.width && channel + kVector <= from.channels) {
#pragma unroll
    for (int c = 0; c < kVector; ++c) {
      value[c] =
          *reinterpret_cast<const Vector<T, kPixels>*>(source + c * from.map_stride[kRoIChannel]);
    }
  } else {
#pragma unroll
    for (int c = 0; c < kVector; ++c) {
#pragma unroll
      for (int i = 0; i < kPixels; ++i) {
        const bool inside = x + i < from.width && channel + c < from.channels;
        value[c].value[i] =
            inside ? source[c * from.map_stride[kRoIChannel] + i * from.map_stride[kRoIColumn]]
                   : T(0);
      }
    }
  }
  T* target = static_cast<T*>(s.to.map[level]) + image * to.map_stride[kRoIBatch] +
              y * to.map_stride[kRoIRow] + x * to.map_stride[kRoIColumn] + channel;
#pragma unroll
  for (int i = 0; i < kPixels; ++i) {
    if (x + i >= from.width) break;
    Vector<T, kVector> pixel;
#pragma unroll
    for (int c = 0; c < kVector; ++c) pixel.value[c] = value[c].value[i];
    *reinterpret_cast<Vector<T, kVector>*>(target + i * to.map_stride[kRoIColumn]) = pixel;
  }
}

}  // namespace opzoo
