// SPDX-License-Identifier: Apache-2.0
// The gradient to the boxes on CUDA. A block sums what its share of the channels gives to one RoI:
// with one block per RoI that is the result; with several, their sums wait in a [K, blocks, 4]
// buffer for roi_align_boxes_sum_kernel.
#pragma once

#include "common/launch.cuh"
#include "roi_align/roi_align_boxes.h"

namespace opzoo {

constexpr int kEdges = 4;  // x1, y1, x2, y2

template <class acc>
struct alignas(16) TableEntry {
  int offset;  // of the map row, in rows; of the map column, in elements
  acc weight, low, high;
};

// The entries of all bins along one axis of a RoI, in shared memory.
template <class acc>
struct EdgeTable {
  TableEntry<acc>* entry;  // [capacity]
  EntryRange* range;       // [bins]
  int* first;              // [bins + 1] where a bin's entries begin
  int* bin;                // [capacity] of each entry
  int bins, capacity;

  __device__ int size() const { return first[bins]; }
};

template <class acc>
__host__ __device__ int64_t edge_table_bytes(int64_t bins, int64_t capacity) {
  const int64_t bytes = capacity * static_cast<int64_t>(sizeof(TableEntry<acc>) + sizeof(int)) +
                        bins * static_cast<int64_t>(sizeof(EntryRange)) +
                        (bins + 1) * static_cast<int64_t>(sizeof(int));
  return div_up<int64_t>(bytes, 16) * 16;
}

template <class acc>
__device__ EdgeTable<acc> edge_table_in(char* memory, int64_t bins, int capacity) {
  EdgeTable<acc> table;
  table.bins = static_cast<int>(bins);
  table.capacity = capacity;
  table.entry = reinterpret_cast<TableEntry<acc>*>(memory);
  table.range = reinterpret_cast<EntryRange*>(table.entry + capacity);
  table.first = reinterpret_cast<int*>(table.range + bins);
  table.bin = table.first + bins + 1;
  return table;
}

// Half of a block, of which `thread` is one, fills the table of one axis: one thread per bin, then
// one per entry. An entry costs a bisection and a few samples, and no entry waits for another. All
// threads of the block call it and may read the tables after the next __syncthreads.
template <class acc>
__device__ void fill_edge_table(const EdgeAxis<acc>& edges,
                                int64_t stride,
                                const EdgeTable<acc>& table,
                                int thread) {
  constexpr int kThreads = kBlockSize / 2;
  for (int bin = thread; bin < table.bins; bin += kThreads) {
    table.range[bin] = entries_of(edges, bin);
  }
  __syncthreads();
  if (thread == 0) {
    int64_t total = 0;
    table.first[0] = 0;
    for (int bin = 0; bin < table.bins; ++bin) {
      total = min(total + table.range[bin].count, static_cast<int64_t>(table.capacity));
      table.first[bin + 1] = static_cast<int>(total);
    }
  }
  __syncthreads();
  for (int at = thread; at < table.size(); at += kThreads) {
    int bin = 0;
    while (table.first[bin + 1] <= at) ++bin;
    const auto entry = entry_at(edges, bin, table.range[bin], at - table.first[bin]);
    const auto& w = entry.weights;
    table.entry[at] = {static_cast<int>(entry.pixel * stride), w.weight, w.low, w.high};
    table.bin[at] = bin;
  }
}

template <class acc>
__device__ void fill_edge_tables(const EdgeRoI<acc>& roi,
                                 int64_t column_stride,
                                 const EdgeTable<acc>& rows,
                                 const EdgeTable<acc>& columns) {
  constexpr int kHalf = kBlockSize / 2;
  if (threadIdx.x < kHalf) {
    fill_edge_table(roi.y, 1, rows, threadIdx.x);
  } else {
    fill_edge_table(roi.x, column_stride, columns, threadIdx.x - kHalf);
  }
  __syncthreads();
}

// The sum over the block, a tree of fixed shape, into to[0 .. columns): the four edges last, an
// image index, where there is a column for it, 0. All threads call it, once.
template <class acc>
__device__ void write_block_sum(const acc (&own)[kEdges], acc* to, int columns) {
  __shared__ acc warp_sum[kBlockSize / 32][kEdges];
#pragma unroll
  for (int edge = 0; edge < kEdges; ++edge) {
    acc sum = own[edge];
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    if (threadIdx.x % 32 == 0) warp_sum[threadIdx.x / 32][edge] = sum;
  }
  __syncthreads();
  if (threadIdx.x < kEdges) {
    acc sum = 0;
#pragma unroll
    for (int warp = 0; warp < kBlockSize / 32; ++warp) sum += warp_sum[warp][threadIdx.x];
    to[columns - kEdges + threadIdx.x] = sum;
  } else if (threadIdx.x == kEdges && columns > kEdges) {
    to[0] = 0;
  }
}

template <class T>
struct BoxesProblem {
  RoIAlignParams p;
  const T* grad;
  const T* input;
  acc_t<T>* to;  // [K * blocks per RoI, columns]
  int columns;
  int row_capacity, column_capacity;
  int chunk;  // vectors or groups of channels that a block takes together
};

template <class T>
constexpr int kBoxesVector = 16 / sizeof(T);

template <class T>
struct alignas(16) PixelVector {
  T value[kBoxesVector<T>];
};

// channels_last. A block owns one RoI (x) and a share of its channels (y); a thread owns one bin
// and the channels of one 16-byte vector, neighbours on neighbouring channels: the loads are those
// of the forward. A pixel and the bin's gradient meet in one product over the channels; its four
// weights cost as much as one more channel would.
template <class T>
__global__ void __launch_bounds__(kBlockSize)
    roi_align_boxes_channels_last_kernel(BoxesProblem<T> problem) {
  using acc = acc_t<T>;
  constexpr int kVector = kBoxesVector<T>;
  extern __shared__ __align__(16) char shared[];
  const RoIAlignParams& p = problem.p;
  const auto rows = edge_table_in<acc>(shared, p.pooled_height, problem.row_capacity);
  const auto columns =
      edge_table_in<acc>(shared + edge_table_bytes<acc>(p.pooled_height, problem.row_capacity),
                         p.pooled_width,
                         problem.column_capacity);
  const int64_t k = blockIdx.x;
  const auto roi = read_edge_roi<acc>(p, k);
  fill_edge_tables(roi, p.map_stride[kRoIColumn], rows, columns);

  const bool grad_vectors =
      p.pooled_stride[kRoIChannel] == 1 && p.pooled_stride[kRoIBatch] % kVector == 0 &&
      p.pooled_stride[kRoIRow] % kVector == 0 && p.pooled_stride[kRoIColumn] % kVector == 0 &&
      reinterpret_cast<uintptr_t>(problem.grad) % 16 == 0;
  const T* map = problem.input + (roi.image < 0 ? 0 : roi.image * p.map_stride[kRoIBatch]);
  const T* grad = problem.grad + k * p.pooled_stride[kRoIBatch];
  const int bins = roi.image < 0 ? 0 : rows.bins * columns.bins;
  const int64_t all_vectors = p.channels / kVector;
  const int64_t chunk = problem.chunk;
  acc sums[kEdges] = {};
  for (int64_t first = blockIdx.y * chunk; first < all_vectors; first += gridDim.y * chunk) {
    const int vectors = static_cast<int>(min(chunk, all_vectors - first));
    for (int i = threadIdx.x; i < bins * vectors; i += kBlockSize) {
      const int bin = i / vectors;
      const int64_t channel = (first + i - bin * vectors) * kVector;
      const int ph = bin / columns.bins;
      const int pw = bin - ph * columns.bins;
      const T* own = grad + channel * p.pooled_stride[kRoIChannel] + ph * p.pooled_stride[kRoIRow] +
                     pw * p.pooled_stride[kRoIColumn];
      acc g[kVector];
      if (grad_vectors) {
        const auto vector = *reinterpret_cast<const PixelVector<T>*>(own);
#pragma unroll
        for (int c = 0; c < kVector; ++c) g[c] = static_cast<acc>(vector.value[c]);
      } else {
#pragma unroll
        for (int c = 0; c < kVector; ++c) {
          g[c] = static_cast<acc>(own[c * p.pooled_stride[kRoIChannel]]);
        }
      }
      for (int iy = rows.first[ph]; iy < rows.first[ph + 1]; ++iy) {
        const TableEntry<acc> row = rows.entry[iy];
        const T* line = map + row.offset * p.map_stride[kRoIRow] + channel;
        acc weight = 0, low = 0, high = 0;
#pragma unroll 4
        for (int ix = columns.first[pw]; ix < columns.first[pw + 1]; ++ix) {
          const TableEntry<acc> column = columns.entry[ix];
          const auto pixel = *reinterpret_cast<const PixelVector<T>*>(line + column.offset);
          acc product = 0;
#pragma unroll
          for (int c = 0; c < kVector; ++c) product += g[c] * static_cast<acc>(pixel.value[c]);
          weight += column.weight * product;
          low += column.low * product;
          high += column.high * product;
        }
        sums[0] += row.weight * low;
        sums[1] += row.low * weight;
        sums[2] += row.weight * high;
        sums[3] += row.high * weight;
      }
    }
  }
  write_block_sum(
      sums, problem.to + (k * gridDim.y + blockIdx.y) * problem.columns, problem.columns);
}

// Any other layout, contiguous above all. The same blocks; a thread owns one row of bins, one entry
// of the columns' table and kGroup channels, neighbours on neighbouring columns, and walks down the
// map rows of its bins.
template <class T, int kGroup>
__global__ void __launch_bounds__(kBlockSize)
    roi_align_boxes_planes_kernel(BoxesProblem<T> problem) {
  using acc = acc_t<T>;
  extern __shared__ __align__(16) char shared[];
  const RoIAlignParams& p = problem.p;
  const auto rows = edge_table_in<acc>(shared, p.pooled_height, problem.row_capacity);
  const auto columns =
      edge_table_in<acc>(shared + edge_table_bytes<acc>(p.pooled_height, problem.row_capacity),
                         p.pooled_width,
                         problem.column_capacity);
  const int64_t k = blockIdx.x;
  const auto roi = read_edge_roi<acc>(p, k);
  fill_edge_tables(roi, p.map_stride[kRoIColumn], rows, columns);

  const T* map = problem.input + (roi.image < 0 ? 0 : roi.image * p.map_stride[kRoIBatch]);
  const T* grad = problem.grad + k * p.pooled_stride[kRoIBatch];
  const int entries = columns.size();
  const int per_group = roi.image < 0 ? 0 : rows.bins * entries;
  const int64_t all_groups = div_up<int64_t>(p.channels, kGroup);
  const int64_t chunk = problem.chunk;
  acc sums[kEdges] = {};
  for (int64_t first = blockIdx.y * chunk; first < all_groups; first += gridDim.y * chunk) {
    const int groups = static_cast<int>(min(chunk, all_groups - first));
    for (int i = threadIdx.x; i < per_group * groups; i += kBlockSize) {
      const int line = i / entries;
      const int at = i - line * entries;
      const int group = line / rows.bins;
      const int ph = line - group * rows.bins;
      const TableEntry<acc> column = columns.entry[at];
      const T* own =
          grad + ph * p.pooled_stride[kRoIRow] + columns.bin[at] * p.pooled_stride[kRoIColumn];
      acc g[kGroup];
      const T* plane[kGroup];
#pragma unroll
      for (int n = 0; n < kGroup; ++n) {
        const int64_t channel = (first + group) * kGroup + n;
        const int64_t valid = min(channel, p.channels - 1);
        g[n] = static_cast<acc>(own[valid * p.pooled_stride[kRoIChannel]]);
        plane[n] = map + valid * p.map_stride[kRoIChannel] + column.offset;
        if (channel != valid) g[n] = 0;
      }
      acc weight = 0, low = 0, high = 0;
      for (int iy = rows.first[ph]; iy < rows.first[ph + 1]; ++iy) {
        const TableEntry<acc> row = rows.entry[iy];
        const int64_t offset = row.offset * p.map_stride[kRoIRow];
        acc product = 0;
#pragma unroll
        for (int n = 0; n < kGroup; ++n) product += g[n] * static_cast<acc>(plane[n][offset]);
        weight += row.weight * product;
        low += row.low * product;
        high += row.high * product;
      }
      sums[0] += column.low * weight;
      sums[1] += column.weight * low;
      sums[2] += column.high * weight;
      sums[3] += column.weight * high;
    }
  }
  write_block_sum(
      sums, problem.to + (k * gridDim.y + blockIdx.y) * problem.columns, problem.columns);
}

// Maps, grids or numbers of bins whose tables do not fit shared memory: a thread owns one (channel,
// bin) at a time and works out the entries on the way.
template <class T>
__global__ void __launch_bounds__(kBlockSize)
    roi_align_boxes_tableless_kernel(BoxesProblem<T> problem) {
  using acc = acc_t<T>;
  const RoIAlignParams& p = problem.p;
  const int64_t k = blockIdx.x;
  const auto roi = read_edge_roi<acc>(p, k);
  const int64_t items = roi.image < 0 ? 0 : p.channels * p.pooled_height * p.pooled_width;
  const int64_t step = static_cast<int64_t>(gridDim.y) * kBlockSize;
  acc sums[kEdges] = {};
  for (int64_t i = blockIdx.y * kBlockSize + threadIdx.x; i < items; i += step) {
    const int64_t pw = i % p.pooled_width;
    const int64_t ph = i / p.pooled_width % p.pooled_height;
    const int64_t c = i / p.pooled_width / p.pooled_height;
    const T* plane =
        problem.input + roi.image * p.map_stride[kRoIBatch] + c * p.map_stride[kRoIChannel];
    const acc g = static_cast<acc>(
        problem.grad[k * p.pooled_stride[kRoIBatch] + c * p.pooled_stride[kRoIChannel] +
                     ph * p.pooled_stride[kRoIRow] + pw * p.pooled_stride[kRoIColumn]]);
    const EntryRange row_range = entries_of(roi.y, ph);
    const EntryRange column_range = entries_of(roi.x, pw);
    for (int64_t ix = 0; ix < column_range.count; ++ix) {
      const auto column = entry_at(roi.x, pw, column_range, ix);
      acc weight = 0, low = 0, high = 0;
      for (int64_t iy = 0; iy < row_range.count; ++iy) {
        const auto row = entry_at(roi.y, ph, row_range, iy);
        const acc product =
            g *
            static_cast<acc>(
                plane[row.pixel * p.map_stride[kRoIRow] + column.pixel * p.map_stride[kRoIColumn]]);
        weight += row.weights.weight * product;
        low += row.weights.low * product;
        high += row.weights.high * product;
      }
      sums[0] += column.weights.low * weight;
      sums[1] += column.weights.weight * low;
      sums[2] += column.weights.high * weight;
      sums[3] += column.weights.weight * high;
    }
  }
  write_block_sum(
      sums, problem.to + (k * gridDim.y + blockIdx.y) * problem.columns, problem.columns);
}

// grad_boxes from the sums of `blocks` blocks per RoI, in their order. One thread per element.
template <class acc>
__global__ void roi_align_boxes_sum_kernel(
    int64_t rois, int blocks, const acc* partial, acc* grad_boxes, int columns) {
  for (int64_t i = first_item(); i < rois * columns; i += item_step()) {
    const int64_t k = i / columns;
    const int64_t edge = i % columns - (columns - kEdges);
    acc sum = 0;
    if (edge >= 0) {
      for (int block = 0; block < blocks; ++block) {
        sum += partial[(k * blocks + block) * kEdges + edge];
      }
    }
    grad_boxes[i] = sum;
  }
}

}  // namespace opzoo
