// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "common/launch.cuh"
#include "roi_align/roi_align_pyramid.h"

namespace opzoo {

struct PooledIndex {
  int64_t k, c, ph, pw;
};

// Element number i of a dense pooled tensor, in the order of its memory.
template <bool kChannelsLast>
__device__ __forceinline__ PooledIndex pooled_index(const RoIAlignParams& p, int64_t i) {
  PooledIndex at;
  if constexpr (kChannelsLast) {
    at.c = i % p.channels;
    i /= p.channels;
  }
  at.pw = i % p.pooled_width;
  i /= p.pooled_width;
  at.ph = i % p.pooled_height;
  i /= p.pooled_height;
  if constexpr (kChannelsLast) {
    at.k = i;
  } else {
    at.c = i % p.channels;
    at.k = i / p.channels;
  }
  return at;
}

__device__ __forceinline__ int64_t pooled_items(const RoIAlignParams& p) {
  return p.rois * p.channels * p.pooled_height * p.pooled_width;
}

__device__ __forceinline__ int64_t offset_at(const int64_t (&stride)[4], const PooledIndex& at) {
  return at.k * stride[kRoIBatch] + at.c * stride[kRoIChannel] + at.ph * stride[kRoIRow] +
         at.pw * stride[kRoIColumn];
}

__device__ __forceinline__ int64_t plane_at(const RoIAlignParams& p, int64_t image, int64_t c) {
  return image * p.map_stride[kRoIBatch] + c * p.map_stride[kRoIChannel];
}

// A RoI and the level of the pyramid it is pooled from. Without one its image is -1 and the level
// 0.
template <class acc>
struct LevelRoI {
  int level;
  RoI<acc> roi;
};

template <class acc>
__device__ __forceinline__ LevelRoI<acc> read_roi(const RoIAlignPyramid& pyramid, int64_t k) {
  const int level = level_of<acc>(pyramid, k);
  LevelRoI<acc> result{level < 0 ? 0 : level, {}};
  result.roi = read_roi<acc>(pyramid.level[result.level], k);
  if (level < 0) result.roi.image = -1;
  return result;
}

// One thread per output element, neighbours in a warp on neighbours in memory: along pw, or along
// the channels of a channels_last output, whose loads are then coalesced as well. The output is
// written once and never read; a RoI without an image writes zeros and reads nothing.
template <class T, bool kChannelsLast>
__global__ void roi_align_average_kernel(const __grid_constant__ RoIAlignPyramid pyramid,
                                         T* output) {
  using acc = acc_t<T>;
  const int64_t items = pooled_items(pyramid.level[0]);
  for (int64_t i = first_item(); i < items; i += item_step()) {
    const PooledIndex at = pooled_index<kChannelsLast>(pyramid.level[0], i);
    const auto [level, roi] = read_roi<acc>(pyramid, at.k);
    acc sum = 0;
    if (roi.image >= 0) {
      const RoIAlignParams& p = pyramid.level[level];
      const T* plane = static_cast<const T*>(pyramid.map[level]) + plane_at(p, roi.image, at.c);
      const auto inside = [&](const PlaneTap<acc>& tap, int64_t) { sum += value_at(plane, tap); };
      visit_bin(p, roi, at.ph, at.pw, inside, [] {});
    }
    output[i] = static_cast<T>(sum / roi.count());
  }
}

// The same mapping; argmax is laid out like output.
template <class T, bool kChannelsLast>
__global__ void roi_align_maximum_kernel(RoIAlignParams p,
                                         const T* input,
                                         T* output,
                                         int64_t* argmax) {
  using acc = acc_t<T>;
  const int64_t items = pooled_items(p);
  for (int64_t i = first_item(); i < items; i += item_step()) {
    const PooledIndex at = pooled_index<kChannelsLast>(p, i);
    const RoI<acc> roi = read_roi<acc>(p, at.k);
    BinMaximum<acc> best;
    if (roi.image >= 0) {
      const T* plane = input + plane_at(p, roi.image, at.c);
      const auto inside = [&](const PlaneTap<acc>& tap, int64_t sample) {
        best.offer(value_at(plane, tap), sample);
      };
      const auto outside = [&] { best.offer(acc(0), -1); };
      visit_bin(p, roi, at.ph, at.pw, inside, outside);
    }
    output[i] = static_cast<T>(best.value);
    argmax[i] = best.argmax;
  }
}

// The same mapping; argmax comes from outside, with any strides and any contents.
template <class T, bool kChannelsLast>
__global__ void roi_align_sample_kernel(RoIAlignParams p,
                                        const T* input,
                                        const int64_t* argmax,
                                        T* output) {
  using acc = acc_t<T>;
  const int64_t items = pooled_items(p);
  for (int64_t i = first_item(); i < items; i += item_step()) {
    const PooledIndex at = pooled_index<kChannelsLast>(p, i);
    const RoI<acc> roi = read_roi<acc>(p, at.k);
    const int64_t sample = argmax[offset_at(p.argmax_stride, at)];
    PlaneTap<acc> tap;
    const bool any = roi.image >= 0 && tap_of_sample(p, roi, at.ph, at.pw, sample, tap);
    const acc value = any ? value_at(input + plane_at(p, roi.image, at.c), tap) : acc(0);
    output[i] = static_cast<T>(value);
  }
}

// Debug mode: the number of the first RoI whose image index is none of the batch, into first_bad
// (which starts at p.rois). One thread per RoI.
template <class acc>
__global__ void roi_align_check_kernel(RoIAlignParams p, unsigned long long* first_bad) {
  for (int64_t k = first_item(); k < p.rois; k += item_step()) {
    if (image_index<acc>(p, k) < 0) atomicMin(first_bad, static_cast<unsigned long long>(k));
  }
}

}  // namespace opzoo
