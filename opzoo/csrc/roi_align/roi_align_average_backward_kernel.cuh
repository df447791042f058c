// SPDX-License-Identifier: Apache-2.0
// The average backward, owned by the receiver: a warp owns a patch of grad_input, finds the bins
// that give weight to it and adds their gradients in the order (RoI, bin row, bin column). Every
// element is written once, by one thread, rounded once: no atomics, no zero-fill, the same bits on
// every run. No torch here.
#pragma once

#include "common/launch.cuh"
#include "roi_align/roi_align_bands.h"
#include "roi_align/roi_align_pyramid.h"

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

// A lane owns kLaneVectors vectors of 16 bytes, 32 vectors apart: 8 channels, of fp64 4.
template <class T>
constexpr int kVectorChannels = 16 / sizeof(T);
template <class T>
constexpr int kLaneVectors = sizeof(T) == 2 ? 1 : 2;
template <class T>
constexpr int kWarpChannels = 32 * kVectorChannels<T> * kLaneVectors<T>;

template <class T>
struct alignas(16) ChannelVector {
  T value[kVectorChannels<T>];
};

// One axis of a RoI with what bounds the bins near a pixel: bin p's samples lie strictly between
// start + p * bin and start + (p + 1) * bin, so p is (pixel - start) / bin but for rounding, which
// slack covers.
template <class acc>
struct PatchAxis {
  RoIAxis<acc> axis;
  acc inverse, slack;
};

template <class acc>
struct PatchRoI {
  PatchAxis<acc> y, x;
  acc inverse_count;
};

// The pixels a RoI reaches, cut to its map. image counts through the maps of all levels; -1 where
// nothing is reached.
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
  int64_t bin_channels;  // from bin to bin of grad, which is dense channels_last
  int pooled_height, pooled_width;
};

template <class acc>
__device__ PatchAxis<acc> make_patch_axis(const RoIAxis<acc>& axis, int64_t bins, int64_t size) {
  PatchAxis<acc> result{axis, acc(1) / axis.bin, acc(0)};
  const acc epsilon = sizeof(acc) == 8 ? acc(0x1p-50) : acc(0x1p-21);
  const acc extent =
      std::abs(axis.start) + static_cast<acc>(bins) * std::abs(axis.bin) + static_cast<acc>(size);
  result.slack = acc(0x1p-10) + epsilon * extent * std::abs(result.inverse);
  return result;
}

// One thread per RoI.
template <class acc>
__global__ void roi_align_patch_reach_kernel(const __grid_constant__ RoIAlignPyramid pyramid,
                                             const __grid_constant__ PatchPlan plan,
                                             PatchRoI<acc>* __restrict__ rois,
                                             PatchReach* __restrict__ reach,
                                             int64_t* __restrict__ images) {
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
    rois[k] = {make_patch_axis(roi.y, p.pooled_height, p.height),
               make_patch_axis(roi.x, p.pooled_width, p.width),
               acc(1) / roi.count()};
  }
}

// grad of any strides to dense [RoI, bin, channel] with whole vectors of channels. A block turns
// the channels of 128 bytes and up to kPackBins bins of one RoI in shared memory, [bin, channel]
// with a pitch that spreads a column over the banks; it reads along whichever of channels and bins
// is dense and writes along channels.
constexpr int kPackBins = 256;
template <class T>
constexpr int kPackChannels = 128 / sizeof(T);
template <class T>
constexpr int kPackPitch = (128 + (sizeof(T) == 8 ? 8 : 4)) / sizeof(T);

template <class T, bool kAlongChannels>
__global__ void __launch_bounds__(kBlockSize)
    roi_align_pack_kernel(const __grid_constant__ RoIAlignParams p,
                          int64_t packed_channels,
                          const T* __restrict__ grad,
                          T* __restrict__ packed) {
  extern __shared__ __align__(16) char shared[];
  T* turned = reinterpret_cast<T*>(shared);
  __shared__ int64_t bin_offset[kPackBins];
  constexpr int kChannels = kPackChannels<T>;
  const int64_t all_bins = p.pooled_height * p.pooled_width;
  const int64_t bin_blocks = div_up<int64_t>(all_bins, kPackBins);
  const int64_t channel_blocks = div_up<int64_t>(packed_channels, kChannels);
  for (int64_t block = blockIdx.x; block < p.rois * bin_blocks * channel_blocks;
       block += gridDim.x) {
    const int64_t first_channel = block % channel_blocks * kChannels;
    const int64_t first_bin = block / channel_blocks % bin_blocks * kPackBins;
    const int64_t k = block / channel_blocks / bin_blocks;
    const int bins = static_cast<int>(min(all_bins - first_bin, static_cast<int64_t>(kPackBins)));
    const int channels =
        static_cast<int>(min(packed_channels - first_channel, static_cast<int64_t>(kChannels)));
    const int64_t real_channels = p.channels - first_channel;
    for (int bin = threadIdx.x; bin < bins; bin += kBlockSize) {
      const int64_t ph = (first_bin + bin) / p.pooled_width;
      const int64_t pw = (first_bin + bin) - ph * p.pooled_width;
      bin_offset[bin] = ph * p.pooled_stride[kRoIRow] + pw * p.pooled_stride[kRoIColumn];
    }
    __syncthreads();
    const T* from =
        grad + k * p.pooled_stride[kRoIBatch] + first_channel * p.pooled_stride[kRoIChannel];
    const int inner = kAlongChannels ? channels : bins;
    int i = threadIdx.x % inner;
    int j = threadIdx.x / inner;
#pragma unroll 4
    for (int item = threadIdx.x; item < bins * channels; item += kBlockSize) {
      const int channel = kAlongChannels ? i : j;
      const int bin = kAlongChannels ? j : i;
      turned[bin * kPackPitch<T> + channel] =
          channel < real_channels ? from[channel * p.pooled_stride[kRoIChannel] + bin_offset[bin]]
                                  : T(0.f);
      i += kBlockSize % inner;
      j += kBlockSize / inner;
      if (i >= inner) {
        i -= inner;
        ++j;
      }
    }
    __syncthreads();
    constexpr int kVector = kVectorChannels<T>;
    T* to = packed + (k * all_bins + first_bin) * packed_channels + first_channel;
    for (int item = threadIdx.x; item < bins * (kChannels / kVector); item += kBlockSize) {
      const int bin = item / (kChannels / kVector);
      const int channel = item % (kChannels / kVector) * kVector;
      if (channel >= channels) continue;
      ChannelVector<T> vector;
#pragma unroll
      for (int c = 0; c < kVector; ++c) {
        vector.value[c] = turned[bin * kPackPitch<T> + channel + c];
      }
      *reinterpret_cast<ChannelVector<T>*>(to + bin * packed_channels + channel) = vector;
    }
    __syncthreads();
  }
}

struct PatchBins {
  int first, count;
};

// The bins that may give weight to kPixels pixels from `pixel` on: all that do, and hardly one
// more. A bin size of 0, and one whose inverse is infinite, leaves all of them.
template <int kPixels, class acc>
__device__ __forceinline__ PatchBins bins_near(const PatchAxis<acc>& a, int bins, int pixel) {
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

// The weights one bin gives to kPixels pixels from `pixel` on: of each sample, what is left of 1
// after its distance, measured from where clamping puts it.
template <int kPixels, class acc>
__device__ __forceinline__ void weights_near(
    const RoIAxis<acc>& axis, int bin, int pixel, int size, acc (&weight)[kPixels]) {
#pragma unroll
  for (int i = 0; i < kPixels; ++i) weight[i] = acc(0);
  const acc last = static_cast<acc>(size - 1);
  const SampleRange range =
      axis.samples_between(bin, static_cast<acc>(pixel - 1), static_cast<acc>(pixel + kPixels));
  for (int sample = static_cast<int>(range.begin); sample < static_cast<int>(range.end); ++sample) {
    acc at = axis.coordinate(bin, sample);
    if (!(at >= acc(-1) && at <= static_cast<acc>(size))) continue;
    at = min(max(at, acc(0)), last);
#pragma unroll
    for (int i = 0; i < kPixels; ++i) {
      weight[i] += max(acc(1) - std::abs(at - static_cast<acc>(pixel + i)), acc(0));
    }
  }
}

// Bins of a patch and their weights, 1 / count folded in, for the warp that owns it.
template <class acc>
struct PatchEntries {
  static constexpr int kCapacity = 64;
  alignas(16) acc weight[kCapacity][kPatchPixels];
  int64_t bin[kCapacity];  // RoI * bins of a RoI + bin
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
template <class T>
struct PatchSums {
  using acc = acc_t<T>;
  static constexpr int kVector = kVectorChannels<T>;
  acc sum[kPatchPixels][kLaneVectors<T>][kVector] = {};

  // The first `count` entries, in order; those up to the next multiple of kLoadsAhead are padding.
  // channel is the lane's first, or one that may be read in its place.
  __device__ __forceinline__ void add(const PatchEntries<acc>& entries,
                                      int count,
                                      const T* __restrict__ grad,
                                      int64_t bin_channels,
                                      const int (&vector_offset)[kLaneVectors<T>]) {
    for (int e = 0; e < count; e += kLoadsAhead) {
      ChannelVector<T> loaded[kLoadsAhead][kLaneVectors<T>];
#pragma unroll
      for (int i = 0; i < kLoadsAhead; ++i) {
        const T* from = grad + entries.bin[e + i] * bin_channels;
#pragma unroll
        for (int v = 0; v < kLaneVectors<T>; ++v) {
          loaded[i][v] = *reinterpret_cast<const ChannelVector<T>*>(from + vector_offset[v]);
        }
      }
#pragma unroll
      for (int i = 0; i < kLoadsAhead; ++i) {
        acc value[kLaneVectors<T>][kVector];
#pragma unroll
        for (int v = 0; v < kLaneVectors<T>; ++v) {
#pragma unroll
          for (int c = 0; c < kVector; ++c) value[v][c] = static_cast<acc>(loaded[i][v].value[c]);
        }
        // A weight is the same for the whole warp. One of 0 keeps an infinite gradient out.
#pragma unroll
        for (int pixel = 0; pixel < kPatchPixels; ++pixel) {
          const acc weight = entries.weight[e + i][pixel];
          if (weight == acc(0)) continue;
#pragma unroll
          for (int v = 0; v < kLaneVectors<T>; ++v) {
#pragma unroll
            for (int c = 0; c < kVector; ++c) sum[pixel][v][c] += weight * value[v][c];
          }
        }
      }
    }
  }
};

// The part of a tile that a warp owns.
template <class T>
struct PatchWarp {
  using acc = acc_t<T>;
  const PatchPlan& plan;
  const PatchRoI<acc>* __restrict__ rois;
  const T* __restrict__ grad;
  PatchEntries<acc>& entries;
  int row, column, height, width;
  int vector_offset[kLaneVectors<T>];
  PatchSums<T> sums;
  int buffered = 0;

  // Adds up to 32 RoIs, one offered by each lane (k < 0: none). Lanes first count the bins of their
  // own RoI, then share out all bins of all RoIs, one each, so that no lane waits for another's
  // RoI; bins with weight go to the buffer, and from there into the sums, after the last RoIs to
  // the last one.
  __device__ __forceinline__ void offer(int64_t k, bool last) {
    constexpr unsigned kAll = 0xffffffffu;
    const int lane = threadIdx.x % 32;
    PatchBins y{0, 0};
    PatchBins x{0, 0};
    if (k >= 0) {
      y = bins_near<kPatchRows>(rois[k].y, plan.pooled_height, row);
      x = bins_near<kPatchColumns>(rois[k].x, plan.pooled_width, column);
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
      int owner = 0;  // the RoIs whose bins end before item
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
      int64_t bin = 0;
      bool any = false;
      if (item < total) {
        const auto number = static_cast<unsigned>(item - (end - count_y * count_x));
        const int ph = first_y + static_cast<int>(number / static_cast<unsigned>(count_x));
        const int pw = first_x + static_cast<int>(number % static_cast<unsigned>(count_x));
        const PatchRoI<acc>& r = rois[roi];
        weights_near(r.y.axis, ph, row, height, weight_y);
        weights_near(r.x.axis, pw, column, width, weight_x);
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
        bin = (roi * plan.pooled_height + ph) * plan.pooled_width + pw;
      }
      const unsigned taken = __ballot_sync(kAll, any);
      if (any) {
        const int at = buffered + __popc(taken & ((1u << lane) - 1));
        entries.bin[at] = bin;
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
      entries.bin[buffered + lane] = 0;
#pragma unroll
      for (int i = 0; i < kPatchPixels; ++i) entries.weight[buffered + lane][i] = acc(0);
    }
    __syncwarp();
    sums.add(entries, buffered, grad, plan.bin_channels, vector_offset);
    buffered = 0;
    __syncwarp();
  }
};

// Whole vectors where every pixel starts on a vector's boundary.
template <class T>
__device__ __forceinline__ void store_channels_last(const PatchMap& map,
                                                    const PatchSums<T>& sums,
                                                    T* image,
                                                    int row,
                                                    int column,
                                                    int64_t channel,
                                                    int64_t channels) {
  constexpr int kVector = kVectorChannels<T>;
  const bool whole = channels % kVector == 0 && reinterpret_cast<uintptr_t>(image) % 16 == 0;
#pragma unroll
  for (int pixel = 0; pixel < kPatchPixels; ++pixel) {
    const int y = row + pixel / kPatchColumns;
    const int x = column + pixel % kPatchColumns;
    if (y >= map.height || x >= map.width) continue;
    T* to = image + y * map.stride[kRoIRow] + x * map.stride[kRoIColumn];
#pragma unroll
    for (int v = 0; v < kLaneVectors<T>; ++v) {
      const int64_t first = channel + v * 32 * kVector;
      ChannelVector<T> vector;
#pragma unroll
      for (int c = 0; c < kVector; ++c) vector.value[c] = static_cast<T>(sums.sum[pixel][v][c]);
      if (whole) {
        if (first < channels) *reinterpret_cast<ChannelVector<T>*>(to + first) = vector;
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
                                                 const PatchSums<T>& sums,
                                                 PatchShared<acc_t<T>>& s,
                                                 T* image,
                                                 int row,
                                                 int tile_column,
                                                 int64_t first_channel,
                                                 int64_t channels,
                                                 bool any) {
  using acc = acc_t<T>;
  constexpr int kVector = kVectorChannels<T>;
  static_assert(kWarpChannels<T> <= PatchShared<acc>::kStagedChannels);
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
      for (int v = 0; v < kLaneVectors<T>; ++v) {
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
        static_cast<int>(min(channels - first_channel, static_cast<int64_t>(kWarpChannels<T>)));
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
                                    const T* __restrict__ grad) {
  using acc = acc_t<T>;
  __shared__ PatchShared<acc> s;
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int64_t channel_blocks = div_up<int64_t>(plan.channels, kWarpChannels<T>);
  for (int64_t block = blockIdx.x; block < plan.tiles * channel_blocks; block += gridDim.x) {
    const int64_t tile = block % plan.tiles;
    const int64_t first_channel = block / plan.tiles * kWarpChannels<T>;
    const int lane_channel = lane * kVectorChannels<T>;
    int level = 0;
    while (level + 1 < plan.levels && tile >= plan.map[level + 1].first_tile) ++level;
    const PatchMap& map = plan.map[level];
    const int64_t number = tile - map.first_tile;
    const int tile_column = static_cast<int>(number % map.tile_columns) * kTileColumns;
    const int row = static_cast<int>(number / map.tile_columns % map.tile_rows) * kPatchRows;
    const int64_t image = number / map.tile_columns / map.tile_rows;

    PatchWarp<T> own{plan,
                     rois,
                     grad + first_channel,
                     s.entries[warp],
                     row,
                     tile_column + warp * kPatchColumns,
                     map.height,
                     map.width};
#pragma unroll
    for (int v = 0; v < kLaneVectors<T>; ++v) {
      const int offset = lane_channel + v * 32 * kVectorChannels<T>;
      own.vector_offset[v] = first_channel + offset < plan.bin_channels ? offset : 0;
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
