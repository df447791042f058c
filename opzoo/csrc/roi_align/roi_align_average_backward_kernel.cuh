// SPDX-License-Identifier: Apache-2.0
// The second half of the average backward, owned by the receiver: a warp owns a patch of
// grad_input, finds the folded rows that give weight to it and adds them in their order. Every
// element is written once, by one thread, rounded once: no atomics, no zero-fill, the same bits on
// every run. No torch here.
#pragma once

#include "roi_align/roi_align_fold_kernel.cuh"

namespace opzoo {

constexpr int kPatchRows = 2;
constexpr int kPatchColumns = 2;
constexpr int kPatchPixels = kPatchRows * kPatchColumns;
constexpr int kTileWarps = 8;  // side by side
constexpr int kTileThreads = 32 * kTileWarps;
constexpr int kTileColumns = kTileWarps * kPatchColumns;
constexpr int kRoundPerThread = 4;
constexpr int kRoundRoIs = kRoundPerThread * kTileThreads;
constexpr int kLoadsAhead = 4;  // entries whose gradients are loaded before the first is used

// A lane owns kLaneVectors vectors of 16 bytes of the folded gradients, 32 vectors apart.
constexpr int kLaneVectors = 2;
template <class acc>
constexpr int kWarpChannels = 32 * kVectorChannels<acc> * kLaneVectors;

struct RowRange {
  int first, count;
};

// The folded rows of one axis that may give weight to kPixels pixels from `pixel` on: all that do,
// and hardly one more. A bin size of 0, and one whose inverse is infinite, leaves all of them.
template <int kPixels, class acc>
__device__ __forceinline__ RowRange rows_near(const PatchAxis<acc>& a, int bins, int pixel) {
  if (a.pixels > 0) {
    const int begin = max(pixel - a.first_pixel, 0);
    return {begin, max(min(pixel + kPixels - a.first_pixel, a.pixels) - begin, 0)};
  }
  const acc one = (static_cast<acc>(pixel - 1) - a.axis.start) * a.inverse;
  const acc other = (static_cast<acc>(pixel + kPixels) - a.axis.start) * a.inverse;
  // Half a sample's distance lies between a bin's border and its first sample.
  const acc inset = acc(0.5) / static_cast<acc>(a.axis.grid) - a.slack;
  const acc low = ceil(min(one, other) - acc(1) + inset);
  const acc high = floor(max(one, other) - inset);
  const acc last = static_cast<acc>(bins - 1);
  if (!(a.slack < last) || !(low - low == acc(0)) || !(high - high == acc(0))) return {0, bins};
  const int first = static_cast<int>(min(max(low, acc(0)), last + acc(1)));
  const int end = static_cast<int>(min(max(high, acc(-1)), last)) + 1;
  return {first, max(end - first, 0)};
}

// The weights one folded row gives to kPixels pixels from `pixel` on. For a bin, of each sample,
// what is left of 1 after its distance, measured from where clamping puts it.
template <int kPixels, class acc>
__device__ __forceinline__ void weights_near(const PatchAxis<acc>& a,
                                             int row,
                                             int pixel,
                                             acc (&weight)[kPixels]) {
#pragma unroll
  for (int i = 0; i < kPixels; ++i) {
    weight[i] = static_cast<acc>(a.pixels > 0 && a.first_pixel + row == pixel + i);
  }
  if (a.pixels > 0) return;
  const RoIAxis<acc>& axis = a.axis;
  const acc last = static_cast<acc>(a.size - 1);
  const SampleRange range =
      axis.samples_between(row, static_cast<acc>(pixel - 1), static_cast<acc>(pixel + kPixels));
  for (int sample = static_cast<int>(range.begin); sample < static_cast<int>(range.end); ++sample) {
    acc at = axis.coordinate(row, sample);
    if (!(at >= acc(-1) && at <= static_cast<acc>(a.size))) continue;
    at = min(max(at, acc(0)), last);
#pragma unroll
    for (int i = 0; i < kPixels; ++i) {
      weight[i] += max(acc(1) - std::abs(at - static_cast<acc>(pixel + i)), acc(0));
    }
  }
}

// Folded rows near a patch and their weights, with 1 / count, for the warp that owns it.
template <class acc>
struct PatchEntries {
  static constexpr int kCapacity = 64;
  alignas(16) acc weight[kCapacity][kPatchPixels];
  int64_t row[kCapacity];
};

template <class acc>
struct PatchShared {
  static constexpr int kStagedChannels = 128 * 8 / sizeof(acc);
  static constexpr int kPitch = kTileColumns + 1;
  union {
    PatchEntries<acc> entries[kTileWarps];
    // One row of the tile, [channel, column]; one more element per vector spreads the lanes' stores
    // over all banks.
    acc staged[kStagedChannels * kPitch + kStagedChannels];
  };
  int list[kRoundRoIs];
  int counts[32];
};

// The numbers, less `first`, of the RoIs in [first, first + kRoundRoIs) that reach the tile, in
// order, into s.list. Returns how many. All threads call it; s.list has to be free.
template <class acc>
__device__ __forceinline__ int select_rois(const PatchPlan& plan,
                                           const PatchReach* __restrict__ reach,
                                           const int64_t* __restrict__ images,
                                           int64_t first,
                                           int64_t image,
                                           int row,
                                           int column,
                                           PatchShared<acc>& s) {
  static_assert(kTileWarps * kRoundPerThread == 32);
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  unsigned hits[kRoundPerThread];
#pragma unroll
  for (int i = 0; i < kRoundPerThread; ++i) {
    const int64_t k = first + i * kTileThreads + threadIdx.x;
    bool hit = false;
    if (k < plan.rois && images[k] == image) {
      const PatchReach r = reach[k];
      hit = r.first_row < row + kPatchRows && r.last_row >= row &&
            r.first_column < column + kTileColumns && r.last_column >= column;
    }
    hits[i] = __ballot_sync(0xffffffffu, hit);
    if (lane == 0) s.counts[i * kTileWarps + warp] = __popc(hits[i]);
  }
  __syncthreads();
  int inclusive = s.counts[lane];
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int left = __shfl_up_sync(0xffffffffu, inclusive, step);
    if (lane >= step) inclusive += left;
  }
#pragma unroll
  for (int i = 0; i < kRoundPerThread; ++i) {
    const int end = __shfl_sync(0xffffffffu, inclusive, i * kTileWarps + warp);
    const int before = end - __popc(hits[i]) + __popc(hits[i] & ((1u << lane) - 1));
    if (hits[i] >> lane & 1) s.list[before] = i * kTileThreads + threadIdx.x;
  }
  __syncthreads();
  return __shfl_sync(0xffffffffu, inclusive, 31);
}

// A warp's sums: its patch, a lane's channels.
template <class acc>
struct PatchSums {
  static constexpr int kVector = kVectorChannels<acc>;
  acc sum[kPatchPixels][kLaneVectors][kVector] = {};

  // The first `count` entries, in order; those up to the next multiple of kLoadsAhead are padding.
  // vector_offset: where the lane's vectors lie in a row, or others that may be read in their
  // place.
  __device__ __forceinline__ void add(const PatchEntries<acc>& entries,
                                      int count,
                                      const acc* __restrict__ folded,
                                      int64_t row_channels,
                                      const int (&vector_offset)[kLaneVectors]) {
    using Vector = ChannelVector<acc, kVector>;
    for (int e = 0; e < count; e += kLoadsAhead) {
      Vector value[kLoadsAhead][kLaneVectors];
#pragma unroll
      for (int i = 0; i < kLoadsAhead; ++i) {
        const acc* from = folded + entries.row[e + i] * row_channels;
#pragma unroll
        for (int v = 0; v < kLaneVectors; ++v) {
          value[i][v] = *reinterpret_cast<const Vector*>(from + vector_offset[v]);
        }
      }
#pragma unroll
      for (int i = 0; i < kLoadsAhead; ++i) {
        // A weight is the same for the whole warp. One of 0 keeps an infinite gradient out.
#pragma unroll
        for (int pixel = 0; pixel < kPatchPixels; ++pixel) {
          const acc weight = entries.weight[e + i][pixel];
          if (weight == acc(0)) continue;
#pragma unroll
          for (int v = 0; v < kLaneVectors; ++v) {
#pragma unroll
            for (int c = 0; c < kVector; ++c) sum[pixel][v][c] += weight * value[i][v].value[c];
          }
        }
      }
    }
  }
};

// The part of a tile that a warp owns.
template <class acc>
struct PatchWarp {
  const PatchPlan& plan;
  const PatchRoI<acc>* __restrict__ rois;
  const acc* __restrict__ folded;
  PatchEntries<acc>& entries;
  int row, column;
  int vector_offset[kLaneVectors];
  PatchSums<acc> sums;
  int buffered = 0;

  // Adds up to 32 RoIs, one offered by each lane (k < 0: none). Lanes first count the rows of their
  // own RoI, then share out all rows of all RoIs, one each, so that no lane waits for another's
  // RoI; rows with weight go to the buffer, and from there into the sums, after the last RoIs to
  // the last one.
  __device__ __forceinline__ void offer(int64_t k, bool last) {
    constexpr unsigned kAll = 0xffffffffu;
    const int lane = threadIdx.x % 32;
    RowRange y{0, 0};
    RowRange x{0, 0};
    if (k >= 0) {
      y = rows_near<kPatchRows>(rois[k].y, plan.pooled_height, row);
      x = rows_near<kPatchColumns>(rois[k].x, plan.pooled_width, column);
    }
    int inclusive = y.count * x.count;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int left = __shfl_up_sync(kAll, inclusive, step);
      if (lane >= step) inclusive += left;
    }
    const int total = __shfl_sync(kAll, inclusive, 31);
    for (int start = 0; start == 0 || start < total; start += 32) {
      const int item = start + lane;
      int owner = 0;  // the RoIs whose rows end before item
#pragma unroll
      for (int step = 16; step > 0; step /= 2) {
        if (__shfl_sync(kAll, inclusive, owner + step - 1) <= item) owner += step;
      }
      const int end = __shfl_sync(kAll, inclusive, owner);
      const int64_t roi = __shfl_sync(kAll, k, owner);
      const int first_y = __shfl_sync(kAll, y.first, owner);
      const int first_x = __shfl_sync(kAll, x.first, owner);
      const int count_y = __shfl_sync(kAll, y.count, owner);
      const int count_x = __shfl_sync(kAll, x.count, owner);
      acc weight_y[kPatchRows];
      acc weight_x[kPatchColumns];
      int64_t at_row = 0;
      bool any = false;
      if (item < total) {
        const auto number = static_cast<unsigned>(item - (end - count_y * count_x));
        const int at_y = first_y + static_cast<int>(number / static_cast<unsigned>(count_x));
        const int at_x = first_x + static_cast<int>(number % static_cast<unsigned>(count_x));
        const PatchRoI<acc>& r = rois[roi];
        weights_near(r.y, at_y, row, weight_y);
        weights_near(r.x, at_x, column, weight_x);
        bool any_y = false;
        bool any_x = false;
#pragma unroll
        for (acc& weight : weight_y) {
          any_y |= weight != acc(0);
          weight *= r.inverse_count;
        }
#pragma unroll
        for (const acc weight : weight_x) any_x |= weight != acc(0);
        any = any_y && any_x;
        at_row = roi * plan.pooled_height * plan.pooled_width + at_y * r.x.rows(plan.pooled_width) +
                 at_x;
      }
      const unsigned taken = __ballot_sync(kAll, any);
      if (any) {
        const int at = buffered + __popc(taken & ((1u << lane) - 1));
        entries.row[at] = at_row;
#pragma unroll
        for (int i = 0; i < kPatchPixels; ++i) {
          entries.weight[at][i] = weight_y[i / kPatchColumns] * weight_x[i % kPatchColumns];
        }
      }
      buffered += __popc(taken);
      if (buffered > PatchEntries<acc>::kCapacity - 32 || (last && start + 32 >= total)) flush();
    }
  }

  // Empties the buffer into the sums.
  __device__ __forceinline__ void flush() {
    const int lane = threadIdx.x % 32;
    const int padding = -buffered & (kLoadsAhead - 1);
    if (lane < padding) {
      entries.row[buffered + lane] = 0;
#pragma unroll
      for (int i = 0; i < kPatchPixels; ++i) entries.weight[buffered + lane][i] = acc(0);
    }
    __syncwarp();
    sums.add(entries, buffered, folded, plan.row_channels, vector_offset);
    buffered = 0;
    __syncwarp();
  }
};

// Whole vectors where every pixel starts on a vector's boundary.
template <class T>
__device__ __forceinline__ void store_channels_last(const PatchMap& map,
                                                    const PatchSums<acc_t<T>>& sums,
                                                    T* image,
                                                    int row,
                                                    int column,
                                                    int64_t channel,
                                                    int64_t channels) {
  constexpr int kVector = kVectorChannels<acc_t<T>>;
  using Vector = ChannelVector<T, kVector>;
  const bool whole =
      channels % kVector == 0 && reinterpret_cast<uintptr_t>(image) % sizeof(Vector) == 0;
#pragma unroll
  for (int pixel = 0; pixel < kPatchPixels; ++pixel) {
    const int y = row + pixel / kPatchColumns;
    const int x = column + pixel % kPatchColumns;
    if (y >= map.height || x >= map.width) continue;
    T* to = image + y * map.stride[kRoIRow] + x * map.stride[kRoIColumn];
#pragma unroll
    for (int v = 0; v < kLaneVectors; ++v) {
      const int64_t first = channel + v * 32 * kVector;
      Vector vector;
#pragma unroll
      for (int c = 0; c < kVector; ++c) vector.value[c] = static_cast<T>(sums.sum[pixel][v][c]);
      if (whole) {
        if (first < channels) *reinterpret_cast<Vector*>(to + first) = vector;
      } else {
#pragma unroll
        for (int c = 0; c < kVector; ++c) {
          if (first + c < channels) to[first + c] = vector.value[c];
        }
      }
    }
  }
}

// Row by row of the tile through shared memory, so that stores run along the map's rows. All
// threads call it.
template <class T>
__device__ __forceinline__ void store_contiguous(const PatchMap& map,
                                                 const PatchSums<acc_t<T>>& sums,
                                                 PatchShared<acc_t<T>>& s,
                                                 T* image,
                                                 int row,
                                                 int tile_column,
                                                 int64_t first_channel,
                                                 int64_t channels,
                                                 bool any) {
  using acc = acc_t<T>;
  constexpr int kVector = kVectorChannels<acc>;
  static_assert(kWarpChannels<acc> <= PatchShared<acc>::kStagedChannels);
  const auto place = [](int channel) {
    return channel * PatchShared<acc>::kPitch + channel / kVector;
  };
  const int own_column = static_cast<int>(threadIdx.x) / 32 * kPatchColumns;
  const int own_channel = static_cast<int>(threadIdx.x) % 32 * kVector;
  const int column = static_cast<int>(threadIdx.x) % kTileColumns;
  const int x = tile_column + column;
#pragma unroll
  for (int y = 0; y < kPatchRows; ++y) {
    if (any) {
      __syncthreads();  // the entries, and the previous row, have been read
#pragma unroll
      for (int v = 0; v < kLaneVectors; ++v) {
#pragma unroll
        for (int c = 0; c < kVector; ++c) {
#pragma unroll
          for (int i = 0; i < kPatchColumns; ++i) {
            s.staged[place(own_channel + v * 32 * kVector + c) + own_column + i] =
                sums.sum[y * kPatchColumns + i][v][c];
          }
        }
      }
      __syncthreads();
    }
    if (row + y >= map.height || x >= map.width) continue;
    const int end =
        static_cast<int>(min(channels - first_channel, static_cast<int64_t>(kWarpChannels<acc>)));
    int channel = static_cast<int>(threadIdx.x) / kTileColumns;
    T* to = image + (first_channel + channel) * map.stride[kRoIChannel] +
            (row + y) * map.stride[kRoIRow] + x * map.stride[kRoIColumn];
#pragma unroll 4
    for (; channel < end; channel += kTileThreads / kTileColumns) {
      *to = any ? static_cast<T>(s.staged[place(channel) + column]) : static_cast<T>(acc(0));
      to += kTileThreads / kTileColumns * map.stride[kRoIChannel];
    }
  }
}

// A block owns one tile of an image of a level, and one block of channels of it. Its 8 warps own
// patches side by side; a warp's lanes own channels. The block lists the RoIs that reach its
// tile, a thousand numbers at a time; after that no warp waits for another.
template <class T>
__global__ void __launch_bounds__(kTileThreads, 2)
    roi_align_patch_backward_kernel(const __grid_constant__ PatchPlan plan,
                                    const PatchRoI<acc_t<T>>* __restrict__ rois,
                                    const PatchReach* __restrict__ reach,
                                    const int64_t* __restrict__ images,
                                    const acc_t<T>* __restrict__ folded) {
  using acc = acc_t<T>;
  __shared__ PatchShared<acc> s;
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int64_t channel_blocks = div_up<int64_t>(plan.channels, kWarpChannels<acc>);
  for (int64_t block = blockIdx.x; block < plan.tiles * channel_blocks; block += gridDim.x) {
    const int64_t tile = block % plan.tiles;
    const int64_t first_channel = block / plan.tiles * kWarpChannels<acc>;
    const int lane_channel = lane * kVectorChannels<acc>;
    int level = 0;
    while (level + 1 < plan.levels && tile >= plan.map[level + 1].first_tile) ++level;
    const PatchMap& map = plan.map[level];
    const int64_t number = tile - map.first_tile;
    const int tile_column = static_cast<int>(number % map.tile_columns) * kTileColumns;
    const int row = static_cast<int>(number / map.tile_columns % map.tile_rows) * kPatchRows;
    const int64_t image = number / map.tile_columns / map.tile_rows;

    PatchWarp<acc> own{plan,
                       rois,
                       folded + first_channel,
                       s.entries[warp],
                       row,
                       tile_column + warp * kPatchColumns};
#pragma unroll
    for (int v = 0; v < kLaneVectors; ++v) {
      const int offset = lane_channel + v * 32 * kVectorChannels<acc>;
      own.vector_offset[v] = first_channel + offset < plan.row_channels ? offset : 0;
    }
    bool any = false;
    for (int64_t first = 0; first < plan.rois; first += kRoundRoIs) {
      __syncthreads();  // the previous list has been read
      const int found =
          select_rois(plan, reach, images, first, map.first_image + image, row, tile_column, s);
      any |= found > 0;
      const bool last_round = first + kRoundRoIs >= plan.rois;
      for (int i = 0; i < found || (i == 0 && any && last_round); i += 32) {
        own.offer(i + lane < found ? first + s.list[i + lane] : int64_t{-1},
                  last_round && i + 32 >= found);
      }
    }
    T* to = static_cast<T*>(map.grad_input) + image * map.stride[kRoIBatch];
    if (map.stride[kRoIChannel] == 1) {
      store_channels_last(
          map, own.sums, to, row, own.column, first_channel + lane_channel, plan.channels);
    } else {
      store_contiguous(map, own.sums, s, to, row, tile_column, first_channel, plan.channels, any);
    }
  }
}

}  // namespace opzoo
