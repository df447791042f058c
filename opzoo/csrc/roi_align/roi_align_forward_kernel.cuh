// SPDX-License-Identifier: Apache-2.0
// Average pooling through merged weights (roi_align_bands.h): every map pixel a bin needs is read
// once, whatever the number of samples, and weights are computed once per RoI instead of per
// channel.
#pragma once

#include "common/launch.cuh"
#include "roi_align/roi_align_bands.h"
#include "roi_align/roi_align_kernel.cuh"

namespace opzoo {

constexpr int kMaxBands = 32;  // bins per axis the kernels below handle
constexpr int kRowBatch = 2;   // map rows whose loads are issued together

template <class acc>
struct BandEntry {
  int offset;  // of the row or column, in elements; 32-bit because one image fits (checked)
  acc weight;
};

// The rows of Wy or Wx of one RoI, each with room for `capacity` entries.
template <class acc>
struct Bands {
  BandEntry<acc>* entry;  // [bins, capacity]
  int* count;             // [bins]; -1: more entries than fit
  int capacity;

  __device__ BandEntry<acc>* row(int bin) const { return entry + bin * capacity; }
};

// Called by one thread per bin. Entries are padded to a multiple of `batch` by splitting the last
// one in halves: a second entry of weight 0 would turn an infinite pixel into NaN.
template <class acc>
__device__ void fill_band(const Bands<acc>& bands,
                          const RoIAxis<acc>& axis,
                          int bin,
                          int64_t size,
                          int64_t stride,
                          int batch) {
  const acc scale = acc(1) / static_cast<acc>(axis.grid > 0 ? axis.grid : 1);
  BandEntry<acc>* row = bands.row(bin);
  int count = 0;
  merge_samples(axis, bin, size, [&](int64_t pixel, acc weight) {
    if (count >= 0 && count < bands.capacity) {
      row[count++] = {static_cast<int>(pixel * stride), weight * scale};
    } else {
      count = -1;
    }
  });
  for (; count > 0 && count % batch != 0; ++count) {
    row[count - 1].weight *= acc(0.5);
    row[count] = row[count - 1];
  }
  bands.count[bin] = count;
}

// The bands of one RoI in shared memory, in front of what else a kernel keeps there.
template <class acc>
struct RoIBands {
  Bands<acc> rows, columns;
  int64_t image;  // -1: zeros
  bool fits;      // false: take the sample loop
  const RoIAlignParams* params;
  const void* map;  // of the image
};

struct BandCapacity {
  int rows, columns;  // entries per bin

  template <class acc>
  OPZOO_HOST_DEVICE int64_t bytes(const RoIAlignParams& p) const {
    return (p.pooled_height * rows + p.pooled_width * columns) * sizeof(BandEntry<acc>);
  }
};

// All threads of the block call this and may read the bands afterwards. counts: [2 * kMaxBands].
// row_batch: the bands of rows have a multiple of it as entries.
template <class T>
__device__ RoIBands<acc_t<T>> make_bands(const RoIAlignPyramid& pyramid,
                                         int64_t k,
                                         const BandCapacity& capacity,
                                         void* shared,
                                         int* counts,
                                         int row_batch) {
  using acc = acc_t<T>;
  auto* entries = static_cast<BandEntry<acc>*>(shared);
  const auto [level, roi] = read_roi<acc>(pyramid, k);
  const RoIAlignParams& p = pyramid.level[level];
  const int bins_h = static_cast<int>(p.pooled_height);
  const int bins_w = static_cast<int>(p.pooled_width);
  RoIBands<acc> bands;
  bands.params = &p;
  bands.image = roi.image;
  bands.map = static_cast<const T*>(pyramid.map[level]) +
              (roi.image < 0 ? 0 : roi.image * p.map_stride[kRoIBatch]);
  bands.rows = {entries, counts, capacity.rows};
  bands.columns = {entries + bins_h * capacity.rows, counts + kMaxBands, capacity.columns};
  bool fits = true;
  for (int i = threadIdx.x; i < bins_h + bins_w; i += blockDim.x) {
    const bool vertical = i < bins_h;
    const Bands<acc> own = vertical ? bands.rows : bands.columns;
    const RoIAxis<acc> axis = vertical ? roi.y : roi.x;
    const int bin = vertical ? i : i - bins_h;
    fill_band(own,
              axis,
              bin,
              vertical ? p.height : p.width,
              p.map_stride[vertical ? kRoIRow : kRoIColumn],
              vertical ? row_batch : 1);
    fits = fits && own.count[bin] >= 0;
  }
  bands.fits = __syncthreads_and(fits);
  return bands;
}

// Channels [first, last) of RoI k by the sample loop, for a RoI whose bands do not fit. Called by
// all threads of a block. Not inlined: rare, and hungry for registers.
template <class T>
__device__ __noinline__ void pool_samples(const RoIAlignPyramid& pyramid,
                                          int64_t k,
                                          int64_t first,
                                          int64_t last,
                                          bool channels_last,
                                          T* result) {
  using acc = acc_t<T>;
  const auto [level, roi] = read_roi<acc>(pyramid, k);
  const RoIAlignParams& p = pyramid.level[level];
  const int64_t bins = p.pooled_height * p.pooled_width;
  for (int64_t i = threadIdx.x; i < (last - first) * bins; i += blockDim.x) {
    const int64_t channel = first + (channels_last ? i % (last - first) : i / bins);
    const int64_t bin = channels_last ? i / (last - first) : i % bins;
    const T* plane = static_cast<const T*>(pyramid.map[level]) + plane_at(p, roi.image, channel);
    acc sum = 0;
    const auto inside = [&](const PlaneTap<acc>& tap, int64_t) { sum += value_at(plane, tap); };
    visit_bin(p, roi, bin / p.pooled_width, bin % p.pooled_width, inside, [] {});
    result[channels_last ? bin * p.channels + channel : channel * bins + bin] =
        static_cast<T>(sum / roi.count());
  }
}

template <class T, int kCount>
struct alignas(sizeof(T) * kCount) Vector {
  T value[kCount];
};

template <class T>
constexpr int kVectorOf = 16 / sizeof(T);  // elements of a 16-byte access

// How the threads of a block share a RoI in the kernel below.
struct RowsShape {
  BandCapacity capacity;
  int lanes;     // threads on neighbouring vectors of channels: a slab; 2^n
  int groups;    // shares of a row of bins
  int slabs;     // per pass over the bins; their results are staged together
  int passes;    // per block
  bool vectors;  // output takes 16-byte stores
};

// Leading entries of this bin that are the last columns of the bin before, whose sums down the rows
// are still in registers: 0, 1 or 2.
template <class acc>
__device__ __forceinline__ int columns_kept(const BandEntry<acc>* before,
                                            int count_before,
                                            const BandEntry<acc>* column,
                                            int count) {
  if (count_before < 1 || count < 1) return 0;
  const int last = before[count_before - 1].offset;
  if (column[0].offset == last) return 1;
  const bool both = count_before > 1 && count > 1 && column[1].offset == last &&
                    column[0].offset == before[count_before - 2].offset;
  return both ? 2 : 0;
}

// The sum over the rows of a band at one column, for one vector of channels.
template <class T>
__device__ __forceinline__ void sum_rows(const T* column,
                                         const BandEntry<acc_t<T>>* row,
                                         int rows,
                                         acc_t<T> (&sum)[kVectorOf<T>]) {
  using acc = acc_t<T>;
  constexpr int kVector = kVectorOf<T>;
#pragma unroll
  for (int c = 0; c < kVector; ++c) sum[c] = 0;
#pragma unroll 2
  for (int iy = 0; iy < rows; iy += kRowBatch) {
    Vector<T, kVector> pixel[kRowBatch];
    acc weight[kRowBatch];
#pragma unroll
    for (int batch = 0; batch < kRowBatch; ++batch) {
      const BandEntry<acc> entry = row[iy + batch];
      pixel[batch] = *reinterpret_cast<const Vector<T, kVector>*>(column + entry.offset);
      weight[batch] = entry.weight;
    }
#pragma unroll
    for (int batch = 0; batch < kRowBatch; ++batch) {
#pragma unroll
      for (int c = 0; c < kVector; ++c) {
        sum[c] += weight[batch] * static_cast<acc>(pixel[batch].value[c]);
      }
    }
  }
}

// Maps with 16-byte vectors of neighbouring channels. A block owns one RoI (x) and a share of its
// slabs of channels (y). A thread owns one vector of channels and (a group of) one row of bins: it
// walks the columns from left to right, sums each down the rows of the band, and adds it to the bin
// it is in; a column that two bins share is summed once. `lanes` threads on neighbouring vectors
// make loads of 128 bytes. kStaged: the output is contiguous; results go through shared memory and
// leave as one run per pass.
template <class T, bool kStaged>
__global__ void __launch_bounds__(256, sizeof(acc_t<T>) == 8 ? 2 : 4)
    roi_align_rows_kernel(const __grid_constant__ RoIAlignPyramid pyramid,
                          T* __restrict__ output,
                          const __grid_constant__ RowsShape shape) {
  using acc = acc_t<T>;
  constexpr int kVector = kVectorOf<T>;
  extern __shared__ __align__(16) char shared[];
  __shared__ int counts[2 * kMaxBands];
  const int64_t k = blockIdx.x;
  const RoIBands<acc> bands = make_bands<T>(pyramid, k, shape.capacity, shared, counts, kRowBatch);
  const RoIAlignParams& p = *bands.params;
  const int bins_h = static_cast<int>(p.pooled_height);
  const int bins_w = static_cast<int>(p.pooled_width);
  const int bins = bins_h * bins_w;
  const int channels = static_cast<int>(p.channels);
  T* staged = reinterpret_cast<T*>(shared + shape.capacity.template bytes<acc>(p));
  T* result = output + k * channels * bins;

  const int group_bins = div_up(bins_w, shape.groups);
  const int slab_items = bins_h * shape.groups * shape.lanes;
  const int slab_channels = shape.lanes * kVector;
  const int block_channels = shape.passes * shape.slabs * slab_channels;
  if (bands.image >= 0 && !bands.fits) {
    const int first = blockIdx.y * block_channels;
    pool_samples(pyramid, k, first, min(first + block_channels, channels), !kStaged, result);
    return;
  }
  for (int pass = 0; pass < shape.passes; ++pass) {
    const int first = (blockIdx.y * shape.passes + pass) * shape.slabs * slab_channels;
    if (first >= channels) return;
    for (int i = threadIdx.x; i < shape.slabs * slab_items; i += blockDim.x) {
      const int lane = i & (shape.lanes - 1);
      int rest = i / shape.lanes;
      const int ph = rest % bins_h;
      rest /= bins_h;
      const int begin = rest % shape.groups * group_bins;
      const int own = (rest / shape.groups * shape.lanes + lane) * kVector;  // channel of the pass
      const int channel = first + own;
      if (channel >= channels) continue;
      const int end = min(begin + group_bins, bins_w);
      const auto store = [&](int pw, const acc(&sum)[kVector]) {
        const int bin = ph * bins_w + pw;
        if constexpr (kStaged) {
#pragma unroll
          for (int c = 0; c < kVector; ++c) {
            staged[(own + c) * bins + bin] = static_cast<T>(sum[c]);
          }
        } else if (shape.vectors) {
          Vector<T, kVector> pooled;
#pragma unroll
          for (int c = 0; c < kVector; ++c) pooled.value[c] = static_cast<T>(sum[c]);
          *reinterpret_cast<Vector<T, kVector>*>(result + static_cast<int64_t>(bin) * channels +
                                                 channel) = pooled;
        } else {
          for (int c = 0; c < kVector && channel + c < channels; ++c) {
            result[static_cast<int64_t>(bin) * channels + channel + c] = static_cast<T>(sum[c]);
          }
        }
      };
      const T* map = static_cast<const T*>(bands.map) + channel;
      const BandEntry<acc>* row = bands.rows.row(ph);
      const int rows = bands.image < 0 ? 0 : bands.rows.count[ph];
      acc previous[kVector] = {};
      acc current[kVector] = {};
      for (int pw = begin; pw < end; ++pw) {
        const BandEntry<acc>* column = bands.columns.row(pw);
        const int count = bands.columns.count[pw];
        const int kept =
            pw == begin
                ? 0
                : columns_kept(
                      bands.columns.row(pw - 1), bands.columns.count[pw - 1], column, count);
        acc sum[kVector] = {};
        if (kept == 2) {
#pragma unroll
          for (int c = 0; c < kVector; ++c) sum[c] = column[0].weight * previous[c];
        }
        if (kept > 0) {
          const acc weight = column[kept - 1].weight;
#pragma unroll
          for (int c = 0; c < kVector; ++c) sum[c] += weight * current[c];
        }
        for (int ix = kept; ix < count; ++ix) {
          const BandEntry<acc> entry = column[ix];
#pragma unroll
          for (int c = 0; c < kVector; ++c) previous[c] = current[c];
          sum_rows(map + entry.offset, row, rows, current);
#pragma unroll
          for (int c = 0; c < kVector; ++c) sum[c] += entry.weight * current[c];
        }
        store(pw, sum);
      }
    }
    if constexpr (kStaged) {
      __syncthreads();
      const int size = min(shape.slabs * slab_channels, channels - first) * bins;
      T* run = result + static_cast<int64_t>(first) * bins;
      if (shape.vectors) {
        using Wide = Vector<T, kVector>;
        for (int i = threadIdx.x; i < size / kVector; i += blockDim.x) {
          reinterpret_cast<Wide*>(run)[i] = reinterpret_cast<const Wide*>(staged)[i];
        }
        for (int i = size / kVector * kVector + threadIdx.x; i < size; i += blockDim.x) {
          run[i] = staged[i];
        }
      } else {
        for (int i = threadIdx.x; i < size; i += blockDim.x) run[i] = staged[i];
      }
      __syncthreads();
    }
  }
}

// The same maps, channels_last output. A block owns one RoI (x), a slice of its channels (y) and a
// share of its bins (z); a thread owns one bin and one vector of channels, neighbours on
// neighbouring vectors. Neighbouring bins share pixels, which the L1 cache serves.
template <class T>
__global__ void __launch_bounds__(256)
    roi_align_bins_kernel(const __grid_constant__ RoIAlignPyramid pyramid,
                          T* __restrict__ output,
                          BandCapacity capacity,
                          int slice) {
  using acc = acc_t<T>;
  constexpr int kVector = kVectorOf<T>;
  extern __shared__ __align__(16) char shared[];
  __shared__ int counts[2 * kMaxBands];
  const int64_t k = blockIdx.x;
  const RoIBands<acc> bands = make_bands<T>(pyramid, k, capacity, shared, counts, 1);
  const RoIAlignParams& p = *bands.params;
  const int bins_w = static_cast<int>(p.pooled_width);
  const int bins = static_cast<int>(p.pooled_height) * bins_w;
  const int first = blockIdx.y * slice;  // in vectors
  const int vectors = min(slice, static_cast<int>(p.channels) / kVector - first);
  T* result = output + k * bins * p.channels;
  if (bands.image >= 0 && !bands.fits) {
    if (blockIdx.z == 0) {
      pool_samples(pyramid, k, first * kVector, (first + vectors) * kVector, true, result);
    }
    return;
  }
  const int items = bins * vectors;
  for (int i = blockIdx.z * blockDim.x + threadIdx.x; i < items; i += gridDim.z * blockDim.x) {
    const int bin = i / vectors;
    const int channel = (first + i - bin * vectors) * kVector;
    const int ph = bin / bins_w;
    const int pw = bin - ph * bins_w;
    acc sum[kVector] = {};
    if (bands.image >= 0) {
      const BandEntry<acc>* row = bands.rows.row(ph);
      const BandEntry<acc>* column = bands.columns.row(pw);
      const int columns = bands.columns.count[pw];
      for (int iy = 0; iy < bands.rows.count[ph]; ++iy) {
        const T* line = static_cast<const T*>(bands.map) + row[iy].offset + channel;
        const acc weight_y = row[iy].weight;
#pragma unroll 4
        for (int ix = 0; ix < columns; ++ix) {
          const auto pixel = *reinterpret_cast<const Vector<T, kVector>*>(line + column[ix].offset);
          const acc weight = weight_y * column[ix].weight;
#pragma unroll
          for (int c = 0; c < kVector; ++c) {
            sum[c] += weight * static_cast<acc>(pixel.value[c]);
          }
        }
      }
    }
    Vector<T, kVector> pooled;
#pragma unroll
    for (int c = 0; c < kVector; ++c) pooled.value[c] = static_cast<T>(sum[c]);
    *reinterpret_cast<Vector<T, kVector>*>(result + static_cast<int64_t>(bin) * p.channels +
                                           channel) = pooled;
  }
}

// Maps of any strides, few RoIs. A block owns one RoI (x) and a share of its outputs (y), a thread
// one output at a time, neighbours along pw or, channels_last, along the channels.
template <class T, bool kChannelsLast>
__global__ void __launch_bounds__(256)
    roi_align_bands_kernel(const __grid_constant__ RoIAlignPyramid pyramid,
                           T* __restrict__ output,
                           BandCapacity capacity) {
  using acc = acc_t<T>;
  extern __shared__ __align__(16) char shared[];
  __shared__ int counts[2 * kMaxBands];
  const int64_t k = blockIdx.x;
  const RoIBands<acc> bands = make_bands<T>(pyramid, k, capacity, shared, counts, 1);
  const RoIAlignParams& p = *bands.params;
  const int bins_w = static_cast<int>(p.pooled_width);
  const int bins = static_cast<int>(p.pooled_height) * bins_w;
  const int channels = static_cast<int>(p.channels);
  const int items = channels * bins;
  T* result = output + k * items;
  if (bands.image >= 0 && !bands.fits) {
    const int64_t first = int64_t{channels} * blockIdx.y / gridDim.y;
    const int64_t last = int64_t{channels} * (blockIdx.y + 1) / gridDim.y;
    pool_samples(pyramid, k, first, last, kChannelsLast, result);
    return;
  }
  for (int64_t i = blockIdx.y * blockDim.x + threadIdx.x; i < items; i += gridDim.y * blockDim.x) {
    const int item = static_cast<int>(i);
    const int slow = item / (kChannelsLast ? channels : bins);
    const int fast = item - slow * (kChannelsLast ? channels : bins);
    const int channel = kChannelsLast ? fast : slow;
    const int bin = kChannelsLast ? slow : fast;
    const int ph = bin / bins_w;
    const int pw = bin - ph * bins_w;
    acc sum = 0;
    const T* plane = static_cast<const T*>(bands.map) + channel * p.map_stride[kRoIChannel];
    if (bands.image >= 0) {
      const BandEntry<acc>* row = bands.rows.row(ph);
      const BandEntry<acc>* column = bands.columns.row(pw);
      const int rows = bands.rows.count[ph];
      const int columns = bands.columns.count[pw];
      for (int iy = 0; iy < rows; ++iy) {
        const T* line = plane + row[iy].offset;
        acc line_sum = 0;
#pragma unroll 4
        for (int ix = 0; ix < columns; ++ix) {
          line_sum += column[ix].weight * static_cast<acc>(line[column[ix].offset]);
        }
        sum += row[iy].weight * line_sum;
      }
    }
    result[i] = static_cast<T>(sum);
  }
}

}  // namespace opzoo
