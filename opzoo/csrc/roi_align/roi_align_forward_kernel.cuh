// SPDX-License-Identifier: Apache-2.0
// Average pooling through merged weights (roi_align_bands.h): every map pixel a bin needs is read
// once, whatever the number of samples, and weights are computed once per RoI instead of per
// channel.
#pragma once

#include "common/launch.cuh"
#include "roi_align/roi_align_bands.h"
#include "roi_align/roi_align_kernel.cuh"

namespace opzoo {

constexpr int kBandBatch = 2;        // entries loaded together; capacities are multiples of it
constexpr int kMaxBands = 32;        // bins per axis the kernels below handle
constexpr int kMaxColumns = 128;     // distinct map columns of a RoI, contiguous layout
constexpr int kMaxColumnWords = 32;  // their span, in words of 32 columns

template <class acc>
struct BandEntry {
  int offset;  // of the row or column, in elements; 32-bit because one image fits (checked)
  acc weight;
};

// The rows of Wy and Wx of one RoI, each with room for `capacity` entries. count is -1 for a row
// that does not fit: the RoI then takes the sample loop of the plain kernel.
template <class acc>
struct Bands {
  BandEntry<acc>* entry;  // [bins, capacity]
  int* count;             // [bins]
  int capacity;

  __device__ const BandEntry<acc>* row(int bin) const { return entry + bin * capacity; }
};

// Called by one thread per bin.
template <class acc>
__device__ void fill_band(const Bands<acc>& bands,
                          const RoIAxis<acc>& axis,
                          int bin,
                          int64_t size,
                          int64_t stride,
                          acc scale,
                          int pad) {
  int count = 0;
  merge_samples(axis, bin, size, [&](int64_t pixel, acc weight) {
    if (count >= 0 && count < bands.capacity) {
      bands.entry[bin * bands.capacity + count] = {static_cast<int>(pixel * stride),
                                                   weight * scale};
      ++count;
    } else {
      count = -1;
    }
  });
  // Whole batches of kBandBatch: their loads are under way together. The padding repeats the last
  // entry with weight 0.
  for (; count > 0 && count % pad != 0; ++count) {
    const BandEntry<acc> last = bands.entry[bin * bands.capacity + count - 1];
    bands.entry[bin * bands.capacity + count] = {last.offset, acc(0)};
  }
  bands.count[bin] = count;
}

// All threads of the block call this and may read the bands afterwards. Returns false when the RoI
// must take the sample loop.
template <class acc>
__device__ bool fill_bands(const RoIAlignParams& p,
                           const RoI<acc>& roi,
                           const Bands<acc>& rows,
                           const Bands<acc>& columns,
                           int64_t row_stride,
                           int64_t column_stride,
                           int row_pad) {
  const int ph = static_cast<int>(p.pooled_height);
  const int pw = static_cast<int>(p.pooled_width);
  bool fits = true;
  for (int i = threadIdx.x; i < ph + pw; i += blockDim.x) {
    if (i < ph) {
      fill_band(rows, roi.y, i, p.height, row_stride, acc(1) / roi.count(), row_pad);
      fits = fits && rows.count[i] >= 0;
    } else {
      fill_band(columns, roi.x, i - ph, p.width, column_stride, acc(1), 1);
      fits = fits && columns.count[i - ph] >= 0;
    }
  }
  return __syncthreads_and(fits);
}

template <class T>
__device__ acc_t<T> average_of_samples(
    const RoIAlignParams& p, const RoI<acc_t<T>>& roi, int64_t ph, int64_t pw, const T* plane) {
  using acc = acc_t<T>;
  acc sum = 0;
  const auto inside = [&](const PlaneTap<acc>& tap, int64_t) { sum += value_at(plane, tap); };
  visit_bin(p, roi, ph, pw, inside, [] {});
  return sum / roi.count();
}

template <class T, int kCount>
struct alignas(sizeof(T) * kCount) Vector {
  T value[kCount];
};

template <class T>
constexpr int kVectorOf = 16 / sizeof(T);  // elements of a 16-byte access

// channels_last. A block owns one RoI (x) and a share of its bins (y); a thread owns one bin and
// the channels of one 16-byte vector, with neighbours on neighbouring channels: every load and
// store of a warp is one run of 512 bytes. Neighbouring bins share pixels, which the L1 cache
// serves.
template <class T>
__global__ void __launch_bounds__(256)
    roi_align_bands_channels_last_kernel(const __grid_constant__ RoIAlignPyramid pyramid,
                                         T* __restrict__ output,
                                         int row_capacity,
                                         int column_capacity,
                                         int slice) {
  using acc = acc_t<T>;
  constexpr int kVector = kVectorOf<T>;
  extern __shared__ __align__(16) char shared[];
  __shared__ int counts[2 * kMaxBands];
  auto* entries = reinterpret_cast<BandEntry<acc>*>(shared);
  const int64_t k = blockIdx.x;
  const auto [level, roi] = read_roi<acc>(pyramid, k);
  const RoIAlignParams& p = pyramid.level[level];
  const T* map = static_cast<const T*>(pyramid.map[level]) +
                 (roi.image < 0 ? 0 : roi.image * p.map_stride[kRoIBatch]);
  const int bins_h = static_cast<int>(p.pooled_height);
  const int bins_w = static_cast<int>(p.pooled_width);
  const Bands<acc> rows{entries, counts, row_capacity};
  const Bands<acc> columns{entries + bins_h * row_capacity, counts + kMaxBands, column_capacity};

  const bool fits =
      fill_bands(p, roi, rows, columns, p.map_stride[kRoIRow], p.map_stride[kRoIColumn], 1);

  const int first = blockIdx.y * slice;  // in vectors
  const int vectors = min(slice, static_cast<int>(p.channels) / kVector - first);
  const int items = bins_h * bins_w * vectors;
  T* result = output + k * bins_h * bins_w * p.channels;
  for (int i = blockIdx.z * blockDim.x + threadIdx.x; i < items; i += gridDim.z * blockDim.x) {
    const int bin = i / vectors;
    const int channel = (first + i - bin * vectors) * kVector;
    const int ph = bin / bins_w;
    const int pw = bin - ph * bins_w;
    acc sum[kVector] = {};
    if (roi.image >= 0 && fits) {
      const BandEntry<acc>* row = rows.row(ph);
      const BandEntry<acc>* column = columns.row(pw);
      const int count_x = columns.count[pw];
      for (int iy = 0; iy < rows.count[ph]; ++iy) {
        const T* line = map + row[iy].offset + channel;
        const acc weight_y = row[iy].weight;
#pragma unroll 4
        for (int ix = 0; ix < count_x; ++ix) {
          const auto pixel = *reinterpret_cast<const Vector<T, kVector>*>(line + column[ix].offset);
          const acc weight = weight_y * column[ix].weight;
#pragma unroll
          for (int c = 0; c < kVector; ++c) {
            sum[c] += weight * static_cast<acc>(pixel.value[c]);
          }
        }
      }
    } else if (roi.image >= 0) {
      for (int c = 0; c < kVector; ++c) {
        sum[c] = average_of_samples(p, roi, ph, pw, map + channel + c);
      }
    }
    Vector<T, kVector> pooled;
#pragma unroll
    for (int c = 0; c < kVector; ++c) pooled.value[c] = static_cast<T>(sum[c]);
    *reinterpret_cast<Vector<T, kVector>*>(result + static_cast<int64_t>(bin) * p.channels +
                                           channel) = pooled;
  }
}

// The distinct columns of a RoI, numbered from the left, so that lanes can own one each.
struct ColumnSet {
  unsigned* word;  // [kMaxColumnWords] bit i: column first + i is used
  int* before;     // [kMaxColumnWords] columns in earlier words
  int* offset;     // [kMaxColumns] of column number i, in elements
  int* first;
  int* size;
};

// Replaces the pixels in `columns` by column numbers. All threads call it; false when the RoI is
// too wide. Reads after it are safe.
template <class acc>
__device__ bool number_columns(const Bands<acc>& columns,
                               int bins,
                               int column_stride,
                               const ColumnSet& set) {
  for (int i = threadIdx.x; i < kMaxColumnWords; i += blockDim.x) set.word[i] = 0;
  if (threadIdx.x == 0) *set.first = 0x7fffffff;
  __syncthreads();
  const int bin = threadIdx.x;
  const int count = bin < bins ? columns.count[bin] : 0;
  BandEntry<acc>* row = columns.entry + bin * columns.capacity;
  if (count > 0) atomicMin(set.first, row[0].offset);
  __syncthreads();
  const int first = *set.first;
  bool fits = true;
  for (int i = 0; i < count; ++i) {
    const int at = row[i].offset - first;
    if (at < 32 * kMaxColumnWords) {
      atomicOr(set.word + at / 32, 1u << (at % 32));
    } else {
      fits = false;
    }
  }
  fits = __syncthreads_and(fits);
  if (threadIdx.x < kMaxColumnWords) {  // one warp: a prefix sum over the words
    const int own = __popc(set.word[threadIdx.x]);
    int sum = own;
    for (int step = 1; step < kMaxColumnWords; step *= 2) {
      const int other = __shfl_up_sync(0xffffffffu, sum, step);
      if (static_cast<int>(threadIdx.x) >= step) sum += other;
    }
    set.before[threadIdx.x] = sum - own;
    if (threadIdx.x == kMaxColumnWords - 1) *set.size = sum;
  }
  __syncthreads();
  if (!fits || *set.size > kMaxColumns) return false;
  for (int i = 0; i < count; ++i) {
    const int at = row[i].offset - first;
    const int number = set.before[at / 32] + __popc(set.word[at / 32] & ((1u << (at % 32)) - 1));
    set.offset[number] =
        row[i].offset * column_stride;  // the same value from every bin that shares it
    row[i].offset = number;
  }
  __syncthreads();
  return true;
}

constexpr int kColumnPitch = kMaxColumns + 8;

// Any other layout, contiguous above all. A block owns one RoI (x) and a share of its channels (y);
// RoIs vary first, so that all of them pass over a few channel planes while those are in L2. A warp
// owns kGroup channels at a time. Per row of bins: lanes own distinct map columns and sum down the
// rows (coalesced along x), then, through shared memory, lanes own one (channel, bin) each and sum
// along its columns. Results are staged so that they leave as one run.
template <class T, int kGroup>
__global__ void __launch_bounds__(256, sizeof(acc_t<T>) == 8 ? 2 : 3)
    roi_align_bands_contiguous_kernel(const __grid_constant__ RoIAlignPyramid pyramid,
                                      T* __restrict__ output,
                                      int row_capacity,
                                      int column_capacity) {
  using acc = acc_t<T>;
  extern __shared__ __align__(16) char shared[];
  __shared__ int counts[2 * kMaxBands];
  __shared__ unsigned words[kMaxColumnWords];
  __shared__ int before[kMaxColumnWords];
  __shared__ int column_offset[kMaxColumns];
  __shared__ int column_first, column_count;

  const int warps = blockDim.x / 32;
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int64_t k = blockIdx.x;
  const auto [level, roi] = read_roi<acc>(pyramid, k);
  const RoIAlignParams& p = pyramid.level[level];
  const T* map = static_cast<const T*>(pyramid.map[level]) +
                 (roi.image < 0 ? 0 : roi.image * p.map_stride[kRoIBatch]);
  const int bins_h = static_cast<int>(p.pooled_height);
  const int bins_w = static_cast<int>(p.pooled_width);
  const int bins = bins_h * bins_w;
  auto* entries = reinterpret_cast<BandEntry<acc>*>(shared);
  const Bands<acc> rows{entries, counts, row_capacity};
  const Bands<acc> columns{entries + bins_h * row_capacity, counts + kMaxBands, column_capacity};
  acc* sums = reinterpret_cast<acc*>(entries + bins_h * row_capacity + bins_w * column_capacity) +
              warp * kGroup * kColumnPitch;
  T* staged =
      reinterpret_cast<T*>(sums + (warps - warp) * kGroup * kColumnPitch) + warp * kGroup * bins;

  const ColumnSet set{words, before, column_offset, &column_first, &column_count};
  bool fits = fill_bands(p, roi, rows, columns, p.map_stride[kRoIRow], 1, kBandBatch);
  fits = fits && number_columns(columns, bins_w, static_cast<int>(p.map_stride[kRoIColumn]), set);

  const int own_channel = lane / bins_w;  // of the group, in the second step
  const int own_bin = lane - own_channel * bins_w;
  const int64_t channel_stride = p.map_stride[kRoIChannel];
  const int channels = static_cast<int>(p.channels);
  T* result = output + k * p.channels * bins;
  for (int c = (blockIdx.y * warps + warp) * kGroup; c < channels;
       c += gridDim.y * warps * kGroup) {
    const int count = min(kGroup, channels - c);
    if (roi.image < 0) {
      for (int i = lane; i < count * bins; i += 32)
        result[c * static_cast<int64_t>(bins) + i] = T(0);
      continue;
    }
    const T* plane[kGroup];
#pragma unroll
    for (int g = 0; g < kGroup; ++g) plane[g] = map + min(c + g, channels - 1) * channel_stride;
    for (int ph = 0; ph < bins_h && fits; ++ph) {
      const BandEntry<acc>* row = rows.row(ph);
      for (int column = lane; column < column_count; column += 32) {
        acc sum[kGroup] = {};
        const int offset = column_offset[column];
        for (int iy = 0; iy < rows.count[ph]; iy += kBandBatch) {
          acc value[kBandBatch][kGroup];
#pragma unroll
          for (int batch = 0; batch < kBandBatch; ++batch) {
            const int at = row[iy + batch].offset + offset;
#pragma unroll
            for (int g = 0; g < kGroup; ++g) value[batch][g] = static_cast<acc>(plane[g][at]);
          }
#pragma unroll
          for (int batch = 0; batch < kBandBatch; ++batch) {
            const acc weight = row[iy + batch].weight;
#pragma unroll
            for (int g = 0; g < kGroup; ++g) sum[g] += weight * value[batch][g];
          }
        }
#pragma unroll
        for (int g = 0; g < kGroup; ++g) sums[g * kColumnPitch + column] = sum[g];
      }
      __syncwarp();
      if (own_channel < kGroup) {
        const BandEntry<acc>* column = columns.row(own_bin);
        const acc* from = sums + own_channel * kColumnPitch;
        acc sum = 0;
        for (int ix = 0; ix < columns.count[own_bin]; ++ix) {
          sum += column[ix].weight * from[column[ix].offset];
        }
        staged[own_channel * bins + ph * bins_w + own_bin] = static_cast<T>(sum);
      }
      __syncwarp();
    }
    if (!fits) {
      for (int i = lane; i < count * bins; i += 32) {
        const int g = i / bins;
        const int bin = i - g * bins;
        const T* own_plane = map + (c + g) * channel_stride;
        staged[i] =
            static_cast<T>(average_of_samples(p, roi, bin / bins_w, bin % bins_w, own_plane));
      }
      __syncwarp();
    }
    for (int i = lane; i < count * bins; i += 32) {
      result[c * static_cast<int64_t>(bins) + i] = staged[i];
    }
    __syncwarp();
  }
}

}  // namespace opzoo
