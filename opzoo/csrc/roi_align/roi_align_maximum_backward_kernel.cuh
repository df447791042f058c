// SPDX-License-Identifier: Apache-2.0
// The maximum backward, owned by the receiver: a block owns a tile of grad_input, looks for the
// RoIs that reach it and adds their contributions in RoI order. Every element is written once, by
// one thread: no atomics, no zero-fill, the same bits on every run.
#pragma once

#include "common/launch.cuh"
#include "roi_align/roi_align_bands.h"
#include "roi_align/roi_align_kernel.cuh"

namespace opzoo {

// What a tile needs to know of a RoI.
template <class acc>
struct RoIReach {
  RoIAxis<acc> y, x;
  int64_t image;
  PixelRange rows, columns;  // empty where the RoI reaches nothing
};

// One thread per RoI.
template <class acc>
__global__ void roi_align_reach_kernel(RoIAlignParams p, RoIReach<acc>* reach) {
  for (int64_t k = first_item(); k < p.rois; k += item_step()) {
    const RoI<acc> roi = read_roi<acc>(p, k);
    RoIReach<acc> r;
    r.y = roi.y;
    r.x = roi.x;
    r.image = roi.image;
    r.rows = footprint(roi.y, p.pooled_height, p.height);
    r.columns = footprint(roi.x, p.pooled_width, p.width);
    reach[k] = r;
  }
}

template <class acc>
__device__ __forceinline__ bool reaches(
    const RoIReach<acc>& r, int64_t image, int64_t row, int64_t column, int rows, int columns) {
  return r.image == image && r.rows.first < row + rows && r.rows.last >= row &&
         r.columns.first < column + columns && r.columns.last >= column &&
         r.rows.first <= r.rows.last && r.columns.first <= r.columns.last;
}

constexpr int kMaximumTile = 8;  // rows and columns
template <class acc>
constexpr int kMaximumChannels = 128 * 4 / sizeof(acc);

// Maximum pooling: every channel of a bin has its own sample, so a thread owns one channel of a
// tile of 8 x 8 pixels and keeps its sums in its own column of shared memory: no two threads meet,
// and there is nothing to synchronise. Grid: x over (image, tile row, tile column), y over blocks
// of channels.
template <class T>
__global__ void roi_align_maximum_backward_kernel(RoIAlignParams p,
                                                  const RoIReach<acc_t<T>>* __restrict__ reach,
                                                  const T* __restrict__ grad,
                                                  const int64_t* __restrict__ argmax,
                                                  T* __restrict__ grad_input) {
  using acc = acc_t<T>;
  __shared__ acc sums[kMaximumTile * kMaximumTile][kMaximumChannels<acc>];
  const int64_t c = static_cast<int64_t>(blockIdx.y) * kMaximumChannels<acc> + threadIdx.x;
  if (c >= p.channels) return;
  const int64_t tiles_x = div_up<int64_t>(p.width, kMaximumTile);
  const int64_t tiles_y = div_up<int64_t>(p.height, kMaximumTile);
  for (int64_t number = blockIdx.x; number < p.batch * tiles_y * tiles_x; number += gridDim.x) {
    const int64_t image = number / (tiles_x * tiles_y);
    const int64_t row = number / tiles_x % tiles_y * kMaximumTile;
    const int64_t column = number % tiles_x * kMaximumTile;
    for (auto& pixel : sums) pixel[threadIdx.x] = acc(0);
    const auto add = [&](int64_t y, int64_t x, acc value) {
      y -= row;
      x -= column;
      if (y < 0 || y >= kMaximumTile || x < 0 || x >= kMaximumTile) return;
      sums[y * kMaximumTile + x][threadIdx.x] += value;
    };
    for (int64_t k = 0; k < p.rois; ++k) {
      const RoIReach<acc>& r = reach[k];
      if (!reaches(r, image, row, column, kMaximumTile, kMaximumTile)) continue;
      for (int64_t ph = 0; ph < p.pooled_height; ++ph) {
        if (!touches(r.y, ph, row, row + kMaximumTile - 1)) continue;
        for (int64_t pw = 0; pw < p.pooled_width; ++pw) {
          if (!touches(r.x, pw, column, column + kMaximumTile - 1)) continue;
          const PooledIndex at{k, c, ph, pw};
          const int64_t sample = argmax[offset_at(p.argmax_stride, at)];
          if (sample < 0 || sample >= r.y.grid * r.x.grid) continue;
          const auto y = ClampBorder::tap(r.y.coordinate(ph, sample / r.x.grid), p.height);
          const auto x = ClampBorder::tap(r.x.coordinate(pw, sample % r.x.grid), p.width);
          if (!y.inside || !x.inside) continue;
          const auto value = static_cast<acc>(grad[offset_at(p.pooled_stride, at)]);
          add(y.lo, x.lo, value * y.weight_lo * x.weight_lo);
          add(y.lo, x.hi, value * y.weight_lo * x.weight_hi);
          add(y.hi, x.lo, value * y.weight_hi * x.weight_lo);
          add(y.hi, x.hi, value * y.weight_hi * x.weight_hi);
        }
      }
    }
    T* plane = grad_input + image * p.map_stride[kRoIBatch] + c * p.map_stride[kRoIChannel];
    for (int i = 0; i < kMaximumTile * kMaximumTile; ++i) {
      const int64_t y = row + i / kMaximumTile;
      const int64_t x = column + i % kMaximumTile;
      if (y >= p.height || x >= p.width) continue;
      plane[y * p.map_stride[kRoIRow] + x * p.map_stride[kRoIColumn]] =
          static_cast<T>(sums[i][threadIdx.x]);
    }
  }
}

}  // namespace opzoo
