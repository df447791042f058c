// SPDX-License-Identifier: Apache-2.0
// Gradients, owned by the receiver: a block owns a tile of grad_input, looks for the RoIs that
// reach it and adds their contributions in RoI order. Every element is written once, by one thread:
// no atomics, no zero-fill, the same bits on every run.
#pragma once

#include "common/launch.cuh"
#include "roi_align/roi_align_bands.h"
#include "roi_align/roi_align_kernel.cuh"
#include "roi_align/roi_align_pyramid.h"

namespace opzoo {

constexpr int kTileRows = 8;  // one per warp
constexpr int kTileColumns = 16;
constexpr int kMaxBackwardBins = 32;  // per axis
constexpr int kStagedBins = 48;

// What a tile needs to know of a RoI.
template <class acc>
struct RoIReach {
  RoIAxis<acc> y, x;
  int64_t image;
  PixelRange rows, columns;  // empty where the RoI reaches nothing
};

// One thread per RoI. Those of other levels of the pyramid have no image here.
template <class acc>
__global__ void roi_align_reach_kernel(const __grid_constant__ RoIAlignPyramid pyramid,
                                       int level,
                                       RoIReach<acc>* reach) {
  const RoIAlignParams& p = pyramid.level[level];
  for (int64_t k = first_item(); k < p.rois; k += item_step()) {
    const RoI<acc> roi = read_roi<acc>(p, k);
    RoIReach<acc> r;
    r.y = roi.y;
    r.x = roi.x;
    r.image = level_of<acc>(pyramid, k) == level ? roi.image : -1;
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

template <class acc>
constexpr int kLaneChannels = 16 / sizeof(acc);
template <class acc>
constexpr int kTileChannels = 32 * kLaneChannels<acc>;

template <class acc>
struct TileShared {
  static constexpr int kPitch = kTileChannels<acc> + kLaneChannels<acc>;
  alignas(16) acc grad[kStagedBins * kPitch];  // [bin, channel]
  alignas(16) acc weight_x[kMaxBackwardBins][kTileColumns];
  acc weight_y[kMaxBackwardBins][kTileRows];  // 1 / count folded in
  int list[256];
  int list_count[9];  // per warp, then the sum
};

struct Tile {
  int64_t image, row, column;  // of its first pixel
  int64_t channel;             // its first channel
};

// The numbers of the RoIs in [first, first + 256) that reach the tile, in order, into s.list.
// Returns how many. All threads call it.
template <class acc>
__device__ int select_rois(const RoIAlignParams& p,
                           const RoIReach<acc>* reach,
                           int64_t first,
                           const Tile& tile,
                           TileShared<acc>& s) {
  const int warp = threadIdx.x / 32;
  const int64_t k = first + threadIdx.x;
  const bool hit =
      k < p.rois && reaches(reach[k], tile.image, tile.row, tile.column, kTileRows, kTileColumns);
  const unsigned hits = __ballot_sync(0xffffffffu, hit);
  __syncthreads();  // the previous list has been read
  if (threadIdx.x % 32 == 0) s.list_count[warp] = __popc(hits);
  __syncthreads();
  int before = 0;
  int total = 0;
  for (int w = 0; w < kTileRows; ++w) {
    before += w < warp ? s.list_count[w] : 0;
    total += s.list_count[w];
  }
  const unsigned below = hits & ((1u << (threadIdx.x % 32)) - 1);
  if (hit) s.list[before + __popc(below)] = static_cast<int>(threadIdx.x);
  __syncthreads();
  return total;
}

struct BinRange {
  int first, count;
};

// The bins of one axis that can give weight to pixels [first, last]. A warp votes, one lane per
// bin.
template <class acc>
__device__ BinRange bins_reaching(const RoIAxis<acc>& axis, int bins, int64_t first, int64_t last) {
  const int lane = threadIdx.x % 32;
  const unsigned votes =
      __ballot_sync(0xffffffffu, lane < bins && touches(axis, lane, first, last));
  if (votes == 0) return {0, 0};
  const int low = __ffs(votes) - 1;
  return {low, 32 - __clz(votes) - low};
}

// Wy and Wx of the RoI, cut to the tile: one thread per element.
template <class acc>
__device__ void fill_weights(const RoIAlignParams& p,
                             const RoIReach<acc>& r,
                             const Tile& tile,
                             const BinRange& rows,
                             const BinRange& columns,
                             TileShared<acc>& s) {
  const acc count = static_cast<acc>(r.y.grid * r.x.grid);
  const int items_x = columns.count * kTileColumns;
  const int items_y = rows.count * kTileRows;
  for (int i = threadIdx.x; i < items_x + items_y; i += blockDim.x) {
    if (i < items_x) {
      const int bin = i / kTileColumns;
      const int64_t pixel = tile.column + i % kTileColumns;
      s.weight_x[bin][i % kTileColumns] =
          pixel < p.width ? weight_of(r.x, columns.first + bin, pixel, p.width) : acc(0);
    } else {
      const int bin = (i - items_x) / kTileRows;
      const int64_t pixel = tile.row + (i - items_x) % kTileRows;
      s.weight_y[bin][(i - items_x) % kTileRows] =
          pixel < p.height ? weight_of(r.y, rows.first + bin, pixel, p.height) / count : acc(0);
    }
  }
}

// grad of `rows` x `columns` bins and the tile's channels into shared memory, transposed to
// [bin, channel]. Global loads are coalesced along whichever axis is dense.
template <class T>
__device__ void stage_grad(const RoIAlignParams& p,
                           const T* grad,
                           const Tile& tile,
                           const BinRange& rows,
                           const BinRange& columns,
                           TileShared<acc_t<T>>& s) {
  using acc = acc_t<T>;
  constexpr int kChannels = kTileChannels<acc>;
  constexpr int kPitch = TileShared<acc>::kPitch;
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int bins = rows.count * columns.count;
  const auto bin_offset = [&](int bin) {
    const int ph = bin / columns.count;
    const int pw = bin - ph * columns.count;
    return (rows.first + ph) * p.pooled_stride[kRoIRow] +
           (columns.first + pw) * p.pooled_stride[kRoIColumn];
  };
  const int64_t left = p.channels - tile.channel;
  const int64_t channel_stride = p.pooled_stride[kRoIChannel];
  if (channel_stride == 1) {
    for (int bin = warp; bin < bins; bin += kTileRows) {
      const T* from = grad + bin_offset(bin);
#pragma unroll
      for (int c = lane; c < kChannels; c += 32) {
        s.grad[bin * kPitch + c] = c < left ? static_cast<acc>(from[c]) : acc(0);
      }
    }
    return;
  }
  for (int bin = lane; bin < bins; bin += 32) {
    const T* from = grad + bin_offset(bin);
#pragma unroll 8
    for (int c = warp; c < kChannels; c += kTileRows) {
      s.grad[bin * kPitch + c] = c < left ? static_cast<acc>(from[c * channel_stride]) : acc(0);
    }
  }
}

// A warp's row of the tile: 16 pixels, each lane the channels of one 16-byte vector.
template <class acc>
struct TileRow {
  acc sum[kTileColumns][kLaneChannels<acc>] = {};

  // One RoI's staged bins. Down the bin rows first (few of them reach this map row), then across.
  __device__ void add(const TileShared<acc>& s, int first_bin_row, int bin_rows, int bin_columns) {
    constexpr int kLane = kLaneChannels<acc>;
    constexpr int kPitch = TileShared<acc>::kPitch;
    const int row = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    for (int pw = 0; pw < bin_columns; ++pw) {
      acc column[kLane] = {};
      for (int ph = 0; ph < bin_rows; ++ph) {
        const acc weight = s.weight_y[first_bin_row + ph][row];
        if (weight == acc(0)) continue;  // the same for the whole warp
        const acc* grad = s.grad + (ph * bin_columns + pw) * kPitch + lane * kLane;
#pragma unroll
        for (int c = 0; c < kLane; ++c) column[c] += weight * grad[c];
      }
#pragma unroll
      for (int x = 0; x < kTileColumns; x += 4) {
        const acc* w = s.weight_x[pw] + x;
        if (w[0] == acc(0) && w[1] == acc(0) && w[2] == acc(0) && w[3] == acc(0)) continue;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
          for (int c = 0; c < kLane; ++c) sum[x + i][c] += w[i] * column[c];
        }
      }
    }
  }
};

template <class T, int kCount>
struct alignas(sizeof(T) * kCount) StoredVector {
  T value[kCount];
};

template <class T>
__device__ void store_channels_last(const RoIAlignParams& p,
                                    const Tile& tile,
                                    const TileRow<acc_t<T>>& row,
                                    T* grad_input) {
  constexpr int kLane = kLaneChannels<acc_t<T>>;
  const int64_t channel = tile.channel + threadIdx.x % 32 * kLane;
  T* line = grad_input + (tile.row + threadIdx.x / 32) * p.map_stride[kRoIRow];
#pragma unroll
  for (int x = 0; x < kTileColumns; ++x) {
    if (tile.column + x >= p.width) break;
    T* pixel = line + (tile.column + x) * p.map_stride[kRoIColumn] + channel;
    if (p.channels % kLane == 0) {  // then every pixel starts on a vector's boundary
      if (channel >= p.channels) break;
      StoredVector<T, kLane> vector;
#pragma unroll
      for (int c = 0; c < kLane; ++c) vector.value[c] = static_cast<T>(row.sum[x][c]);
      *reinterpret_cast<StoredVector<T, kLane>*>(pixel) = vector;
    } else {
#pragma unroll
      for (int c = 0; c < kLane; ++c) {
        if (channel + c < p.channels) pixel[c] = static_cast<T>(row.sum[x][c]);
      }
    }
  }
}

// Turns [column, channel] into [channel, column] through the warp's own part of shared memory, so
// that stores run along the map's rows. fp64 goes in two parts, which fit the space.
template <class T>
__device__ void store_contiguous(const RoIAlignParams& p,
                                 const Tile& tile,
                                 const TileRow<acc_t<T>>& row,
                                 TileShared<acc_t<T>>& s,
                                 T* grad_input) {
  using acc = acc_t<T>;
  constexpr int kLane = kLaneChannels<acc>;
  constexpr int kPart = sizeof(acc) == 8 ? kTileColumns / 2 : kTileColumns;
  constexpr int kPitch = kPart + 1;
  static_assert(kTileRows * 32 * kPitch <= kStagedBins * TileShared<acc>::kPitch);
  const int lane = threadIdx.x % 32;
  const int64_t y = tile.row + threadIdx.x / 32;
  acc* own = s.grad + threadIdx.x / 32 * 32 * kPitch;
#pragma unroll
  for (int part = 0; part < kTileColumns; part += kPart) {
    const int64_t x = tile.column + part + lane % kPart;
#pragma unroll
    for (int c = 0; c < kLane; ++c) {
#pragma unroll
      for (int column = 0; column < kPart; ++column) {
        own[lane * kPitch + column] = row.sum[part + column][c];
      }
      __syncwarp();
#pragma unroll 4
      for (int i = lane / kPart; i < 32; i += 32 / kPart) {
        const int64_t channel = tile.channel + i * kLane + c;
        if (y < p.height && x < p.width && channel < p.channels) {
          grad_input[channel * p.map_stride[kRoIChannel] + y * p.map_stride[kRoIRow] + x] =
              static_cast<T>(own[i * kPitch + lane % kPart]);
        }
      }
      __syncwarp();
    }
  }
}

// Grid: x over (image, tile row, tile column), y over blocks of channels. 8 warps; a warp owns one
// row of 16 pixels, a lane 4 (fp64: 2) channels of it, in registers. Per RoI: weights and the
// gradients of the bins that reach the tile go to shared memory, 48 bins at a time, then each warp
// adds its share.
template <class T, bool kChannelsLast>
__global__ void __launch_bounds__(256, 2)
    roi_align_tile_backward_kernel(RoIAlignParams p,
                                   const RoIReach<acc_t<T>>* __restrict__ reach,
                                   const T* __restrict__ grad,
                                   T* __restrict__ grad_input) {
  using acc = acc_t<T>;
  extern __shared__ __align__(16) char shared[];
  auto& s = *reinterpret_cast<TileShared<acc>*>(shared);
  const int64_t tiles_x = div_up<int64_t>(p.width, kTileColumns);
  const int64_t tiles_y = div_up<int64_t>(p.height, kTileRows);
  const int64_t tiles = p.batch * tiles_y * tiles_x;
  for (int64_t number = blockIdx.x; number < tiles; number += gridDim.x) {
    const Tile tile{number / (tiles_x * tiles_y),
                    number / tiles_x % tiles_y * kTileRows,
                    number % tiles_x * kTileColumns,
                    static_cast<int64_t>(blockIdx.y) * kTileChannels<acc>};
    TileRow<acc> row;
    for (int64_t first = 0; first < p.rois; first += blockDim.x) {
      const int found = select_rois(p, reach, first, tile, s);
      for (int i = 0; i < found; ++i) {
        const int64_t k = first + s.list[i];
        const RoIReach<acc> r = reach[k];
        const BinRange columns = bins_reaching(
            r.x, static_cast<int>(p.pooled_width), tile.column, tile.column + kTileColumns - 1);
        const BinRange rows = bins_reaching(
            r.y, static_cast<int>(p.pooled_height), tile.row, tile.row + kTileRows - 1);
        if (columns.count == 0 || rows.count == 0) continue;  // the same in every warp
        const T* from =
            grad + k * p.pooled_stride[kRoIBatch] + tile.channel * p.pooled_stride[kRoIChannel];
        const int step = kStagedBins / columns.count;
        fill_weights(p, r, tile, rows, columns, s);
        for (int done = 0; done < rows.count; done += step) {
          const int count = min(step, rows.count - done);
          stage_grad(p, from, tile, {rows.first + done, count}, columns, s);
          __syncthreads();
          row.add(s, done, count, columns.count);
          __syncthreads();
        }
      }
    }
    T* image = grad_input + tile.image * p.map_stride[kRoIBatch];
    if constexpr (kChannelsLast) {
      if (tile.row + threadIdx.x / 32 < p.height) store_channels_last(p, tile, row, image);
    } else {
      store_contiguous(p, tile, row, s, image);
    }
    __syncthreads();
  }
}

// For shapes the tiles do not take (more than 32 bins along an axis): one thread per element of
// grad_input, which visits every RoI and bin that reaches its pixel. Deterministic as well.
template <class T>
__global__ void roi_align_gather_backward_kernel(RoIAlignParams p,
                                                 const RoIReach<acc_t<T>>* reach,
                                                 const T* grad,
                                                 T* grad_input) {
  using acc = acc_t<T>;
  const int64_t items = p.batch * p.channels * p.height * p.width;
  for (int64_t i = first_item(); i < items; i += item_step()) {
    const int64_t x = i % p.width;
    const int64_t y = i / p.width % p.height;
    const int64_t c = i / (p.width * p.height) % p.channels;
    const int64_t image = i / (p.width * p.height * p.channels);
    acc sum = 0;
    for (int64_t k = 0; k < p.rois; ++k) {
      const RoIReach<acc>& r = reach[k];
      const bool hit = r.image == image && r.rows.first <= y && y <= r.rows.last &&
                       r.columns.first <= x && x <= r.columns.last;
      if (!hit) continue;
      const acc count = static_cast<acc>(r.y.grid * r.x.grid);
      const T* from = grad + k * p.pooled_stride[kRoIBatch] + c * p.pooled_stride[kRoIChannel];
      for (int64_t ph = 0; ph < p.pooled_height; ++ph) {
        if (!touches(r.y, ph, y, y)) continue;
        const acc weight_y = weight_of(r.y, ph, y, p.height) / count;
        if (weight_y == acc(0)) continue;
        for (int64_t pw = 0; pw < p.pooled_width; ++pw) {
          if (!touches(r.x, pw, x, x)) continue;
          sum += weight_y * weight_of(r.x, pw, x, p.width) *
                 static_cast<acc>(
                     from[ph * p.pooled_stride[kRoIRow] + pw * p.pooled_stride[kRoIColumn]]);
        }
      }
    }
    grad_input[image * p.map_stride[kRoIBatch] + c * p.map_stride[kRoIChannel] +
               y * p.map_stride[kRoIRow] + x * p.map_stride[kRoIColumn]] = static_cast<T>(sum);
  }
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
