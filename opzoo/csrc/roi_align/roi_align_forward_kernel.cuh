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

template <class acc>
struct BandEntry {
  int offset;  // of the row or column; 32-bit because one image fits (checked)
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

// The tap of one sample: what merge_taps needs of it.
template <class acc>
struct StoredTap {
  int lo;  // -1: outside the map
  acc weight_hi;
};

constexpr int kTapRoom = 512;  // samples of both axes whose taps a block keeps

// Called by one thread per bin. taps: those of the bin's samples, or null.
template <class acc>
__device__ void fill_band(const Bands<acc>& bands,
                          const RoIAxis<acc>& axis,
                          int bin,
                          int64_t size,
                          int64_t stride,
                          const StoredTap<acc>* taps) {
  const acc scale = acc(1) / static_cast<acc>(axis.grid > 0 ? axis.grid : 1);
  BandEntry<acc>* row = bands.row(bin);
  int count = 0;
  const auto emit = [&](int64_t pixel, acc weight) {
    if (count >= 0 && count < bands.capacity) {
      row[count++] = {static_cast<int>(pixel * stride), weight * scale};
    } else {
      count = -1;
    }
  };
  if (taps) {
    const auto tap_of = [&](int64_t n) {
      const StoredTap<acc> stored = taps[axis.bin >= acc(0) ? n : axis.grid - 1 - n];
      AxisTap<acc> tap;
      tap.lo = stored.lo;
      tap.weight_lo = acc(1) - stored.weight_hi;
      tap.weight_hi = stored.weight_hi;
      tap.inside = stored.lo >= 0;
      return tap;
    };
    merge_taps<acc>(axis.grid, tap_of, emit);
  } else {
    merge_samples(axis, bin, size, emit);
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
    const int64_t entries = p.pooled_height * rows + p.pooled_width * columns;
    return div_up<int64_t>(entries * sizeof(BandEntry<acc>), 16) * 16;
  }
};

// All threads of the block call this and may read the bands afterwards. counts: [2 * kMaxBands].
// unit: elements that an offset counts, a divisor of both strides. A thread per sample, then one
// per bin; where there are too many samples, one per bin alone.
template <class T>
__device__ RoIBands<acc_t<T>> make_bands(const RoIAlignPyramid& pyramid,
                                         int64_t k,
                                         const BandCapacity& capacity,
                                         void* shared,
                                         int* counts,
                                         int unit) {
  using acc = acc_t<T>;
  __shared__ StoredTap<acc> taps[kTapRoom];
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

  const bool few = roi.y.grid <= kTapRoom && roi.x.grid <= kTapRoom &&
                   bins_h * roi.y.grid + bins_w * roi.x.grid <= kTapRoom;
  const int row_taps = few ? bins_h * static_cast<int>(roi.y.grid) : 0;
  if (few) {
    for (int i = threadIdx.x; i < row_taps + bins_w * static_cast<int>(roi.x.grid);
         i += blockDim.x) {
      const bool vertical = i < row_taps;
      const RoIAxis<acc> axis = vertical ? roi.y : roi.x;
      const int number = vertical ? i : i - row_taps;
      const int bin = number / static_cast<int>(axis.grid);
      const int sample = number - bin * static_cast<int>(axis.grid);
      const auto tap =
          ClampBorder::tap(axis.coordinate(bin, sample), vertical ? p.height : p.width);
      taps[i] = {tap.inside ? static_cast<int>(tap.lo) : -1, tap.weight_hi};
    }
    __syncthreads();
  }
  bool fits = true;
  for (int i = threadIdx.x; i < bins_h + bins_w; i += blockDim.x) {
    const bool vertical = i < bins_h;
    const Bands<acc> own = vertical ? bands.rows : bands.columns;
    const RoIAxis<acc> axis = vertical ? roi.y : roi.x;
    const int bin = vertical ? i : i - bins_h;
    const StoredTap<acc>* own_taps =
        taps + (vertical ? 0 : row_taps) + bin * static_cast<int>(axis.grid);
    fill_band(own,
              axis,
              bin,
              vertical ? p.height : p.width,
              p.map_stride[vertical ? kRoIRow : kRoIColumn] / unit,
              few ? own_taps : nullptr);
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

// base + offset, as the one instruction it is: nvcc would add the offsets of a row and a column
// first, and then extend, scale and add the sum in five.
template <class V>
__device__ __forceinline__ const V* at_offset(const V* base, int offset) {
  const V* result;
  asm("mad.wide.s32 %0, %1, %2, %3;"
      : "=l"(result)
      : "r"(offset), "n"(static_cast<int>(sizeof(V))), "l"(base));
  return result;
}

// A load of a map, which nobody writes meanwhile; said in full because a pointer out of at_offset
// has lost its address space.
template <class V>
__device__ __forceinline__ V load_map(const V* at) {
  using Word = std::conditional_t<
      sizeof(V) == 16,
      uint4,
      std::conditional_t<sizeof(V) == 8,
                         uint2,
                         std::conditional_t<sizeof(V) == 4, unsigned, unsigned short>>>;
  static_assert(sizeof(V) == sizeof(Word));
  return bit_cast<V>(__ldg(reinterpret_cast<const Word*>(at)));
}

// Adds kCount neighbouring columns of one map row at one vector of channels: their loads are on
// their way together.
template <int kCount, class T, int kVector>
__device__ __forceinline__ void add_columns(const Vector<T, kVector>* line,
                                            acc_t<T> weight_y,
                                            const BandEntry<acc_t<T>>* column,
                                            acc_t<T> (&sum)[kVector]) {
  using acc = acc_t<T>;
  Vector<T, kVector> pixel[kCount];
  acc weight[kCount];
#pragma unroll
  for (int n = 0; n < kCount; ++n) {
    const BandEntry<acc> x = column[n];
    pixel[n] = load_map(at_offset(line, x.offset));
    weight[n] = weight_y * x.weight;
  }
#pragma unroll
  for (int n = 0; n < kCount; ++n) {
#pragma unroll
    for (int c = 0; c < kVector; ++c) sum[c] += weight[n] * static_cast<acc>(pixel[n].value[c]);
  }
}

// Adds the pixels of a bin at one vector of channels. map: of the image, at that vector; offsets
// are in vectors. Bins of up to four columns are the rule with two samples.
template <class T, int kVector>
__device__ __forceinline__ void pool_bin(const Vector<T, kVector>* map,
                                         const BandEntry<acc_t<T>>* row,
                                         int rows,
                                         const BandEntry<acc_t<T>>* column,
                                         int columns,
                                         acc_t<T> (&sum)[kVector]) {
  for (int iy = 0; iy < rows; ++iy) {
    const BandEntry<acc_t<T>> y = row[iy];
    const Vector<T, kVector>* line = at_offset(map, y.offset);
    int ix = 0;
    for (; ix + 4 <= columns; ix += 4) add_columns<4>(line, y.weight, column + ix, sum);
    const int rest = columns - ix;
    if (rest == 3) {
      add_columns<3>(line, y.weight, column + ix, sum);
    } else if (rest == 2) {
      add_columns<2>(line, y.weight, column + ix, sum);
    } else if (rest == 1) {
      add_columns<1>(line, y.weight, column + ix, sum);
    }
  }
}

// The same for one channel, two rows of four columns at a time: where few threads wait for memory,
// the loads of each must be many.
template <class T>
__device__ __forceinline__ acc_t<T> pool_bin(const T* plane,
                                             const BandEntry<acc_t<T>>* row,
                                             int rows,
                                             const BandEntry<acc_t<T>>* column,
                                             int columns) {
  using acc = acc_t<T>;
  constexpr int kRows = 2;
  constexpr int kColumns = 4;
  acc sum = 0;
  for (int iy = 0; iy < rows; iy += kRows) {
    for (int ix = 0; ix < columns; ix += kColumns) {
      acc pixel[kRows][kColumns];
      acc weight[kRows][kColumns];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          const bool in = iy + r < rows && ix + c < columns;
          const BandEntry<acc> y = row[in ? iy + r : iy];
          const BandEntry<acc> x = column[in ? ix + c : ix];
          weight[r][c] = in ? y.weight * x.weight : acc(0);
          pixel[r][c] = in ? static_cast<acc>(plane[y.offset + x.offset]) : acc(0);
        }
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int c = 0; c < kColumns; ++c) sum += weight[r][c] * pixel[r][c];
      }
    }
  }
  return sum;
}

// The channels of one bin, as many of kVector as there are. vectors: on a 16-byte boundary, and
// all.
template <class T, int kVector>
__device__ __forceinline__ void store_channels(T* pooled,
                                               const acc_t<T> (&sum)[kVector],
                                               int count,
                                               bool vectors) {
  if (vectors) {
    Vector<T, kVector> vector;
#pragma unroll
    for (int c = 0; c < kVector; ++c) vector.value[c] = static_cast<T>(sum[c]);
    *reinterpret_cast<Vector<T, kVector>*>(pooled) = vector;
  } else {
#pragma unroll
    for (int c = 0; c < kVector; ++c) {
      if (c < count) pooled[c] = static_cast<T>(sum[c]);
    }
  }
}

// Where results wait for their way out: the channels of a vector one after the other, [kVector,
// bins], which is `bins` times 16 bytes, and 16 bytes of nothing where that number is even: threads
// on neighbouring vectors then write to different banks.
OPZOO_HOST_DEVICE int staged_vectors(int bins) {
  return bins | 1;
}

// size elements from shared memory, by all threads of the block. vectors: run starts on a 16-byte
// boundary.
template <class T>
__device__ __forceinline__ void store_run(
    T* run, const T* staged, int bins, int size, bool vectors) {
  constexpr int kVector = kVectorOf<T>;
  const int gap = staged_vectors(bins) - bins;
  int done = 0;
  if (vectors) {
    done = size / kVector * kVector;
    for (int i = threadIdx.x; i < size / kVector; i += blockDim.x) {
      reinterpret_cast<Vector<T, kVector>*>(run)[i] =
          reinterpret_cast<const Vector<T, kVector>*>(staged)[i + i / bins * gap];
    }
  }
  for (int i = done + threadIdx.x; i < size; i += blockDim.x) {
    run[i] = staged[i + i / (bins * kVector) * gap * kVector];
  }
}

// How the blocks of the kernel below share a RoI.
struct BinsShape {
  BandCapacity capacity;
  int slice_bits;          // a slice is 2^slice_bits vectors of channels
  unsigned inverse_width;  // 65536 / pooled_width, rounded up; exact for the 32 x 32 bins at most
  bool vectors;            // the output takes 16-byte stores
};

// Maps with 16-byte vectors of neighbouring channels. A block owns one RoI (x), a slice of its
// channels (y) and a share of its bins (z); a thread owns one bin and one vector of channels,
// neighbours on neighbouring vectors. Neighbouring bins share pixels, which the L1 cache serves.
// kStaged: the output is contiguous; results go through shared memory and leave as one run, and z
// is 1.
template <class T, bool kStaged, int kThreads>
__global__ void __launch_bounds__(kThreads, (sizeof(T) == 8 ? 512 : 1024) / kThreads)
    roi_align_bins_kernel(const __grid_constant__ RoIAlignPyramid pyramid,
                          T* __restrict__ output,
                          const __grid_constant__ BinsShape shape) {
  using acc = acc_t<T>;
  constexpr int kVector = kVectorOf<T>;
  extern __shared__ __align__(16) char shared[];
  __shared__ int counts[2 * kMaxBands];
  const int64_t k = blockIdx.x;
  const RoIBands<acc> bands = make_bands<T>(pyramid, k, shape.capacity, shared, counts, kVector);
  const RoIAlignParams& p = *bands.params;
  const int bins_w = static_cast<int>(p.pooled_width);
  const int bins = static_cast<int>(p.pooled_height) * bins_w;
  const int channels = static_cast<int>(p.channels);
  const int first = static_cast<int>(blockIdx.y << shape.slice_bits) * kVector;
  const int last = min(first + (kVector << shape.slice_bits), channels);
  T* result = output + k * bins * p.channels;
  T* staged = reinterpret_cast<T*>(shared + shape.capacity.template bytes<acc>(p));
  if (bands.image >= 0 && !bands.fits) {
    if (blockIdx.z == 0) pool_samples(pyramid, k, first, last, !kStaged, result);
    return;
  }
  const auto* map = static_cast<const Vector<T, kVector>*>(bands.map);
  const int items = bins << shape.slice_bits;
  for (int i = blockIdx.z * blockDim.x + threadIdx.x; i < items; i += gridDim.z * blockDim.x) {
    const int bin = i >> shape.slice_bits;
    const int own = (i - (bin << shape.slice_bits)) * kVector;
    const int channel = first + own;
    if (channel >= channels) continue;
    const int ph = static_cast<int>(bin * shape.inverse_width >> 16);
    const int pw = bin - ph * bins_w;
    acc sum[kVector] = {};
    if (bands.image >= 0) {
      pool_bin(map + channel / kVector,
               bands.rows.row(ph),
               bands.rows.count[ph],
               bands.columns.row(pw),
               bands.columns.count[pw],
               sum);
    }
    if constexpr (kStaged) {
#pragma unroll
      for (int c = 0; c < kVector; ++c) {
        staged[own * staged_vectors(bins) + c * bins + bin] = static_cast<T>(sum[c]);
      }
    } else {
      store_channels(result + static_cast<int64_t>(bin) * channels + channel,
                     sum,
                     channels - channel,
                     shape.vectors);
    }
  }
  if constexpr (kStaged) {
    __syncthreads();
    store_run(result + static_cast<int64_t>(first) * bins,
              staged,
              bins,
              (last - first) * bins,
              shape.vectors);
  }
}

// Maps of any strides, few RoIs. A block owns one RoI (x) and a share of its outputs (y), a thread
// one output at a time, neighbours along pw or, channels_last, along the channels.
template <class T, bool kChannelsLast>
__global__ void __launch_bounds__(256, sizeof(T) == 8 ? 2 : 4)
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
      sum = pool_bin(plane,
                     bands.rows.row(ph),
                     bands.rows.count[ph],
                     bands.columns.row(pw),
                     bands.columns.count[pw]);
    }
    result[i] = static_cast<T>(sum);
  }
}

}  // namespace opzoo
