// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "common/atomics.cuh"
#include "common/launch.cuh"
#include "deform_conv2d/deform_conv2d.h"

namespace opzoo {

// Channels that share one thread's geometry. A layer of 256 channels on a small map of 25 x 38
// still makes a quarter of a million threads.
constexpr int64_t kChannelSlice = 8;

// One item is (offset group, slice of its channels, tap, pixel of the chunk), pixel fastest.
struct SliceItem {
  int64_t offset_group, first_channel, end_channel, tap, pixel;
};

__host__ __device__ inline int64_t slices_per_group(const DeformConvParams& p) {
  return div_up(p.group_channels(), kChannelSlice);
}

__device__ inline SliceItem slice_item(const DeformConvParams& p, PixelChunk chunk, int64_t item) {
  SliceItem s;
  int64_t rest = item / chunk.count;
  s.pixel = item - rest * chunk.count;
  const int64_t slice_and_group = rest / p.taps();
  s.tap = rest - slice_and_group * p.taps();
  s.offset_group = slice_and_group / slices_per_group(p);
  const int64_t slice = slice_and_group - s.offset_group * slices_per_group(p);
  const int64_t end_of_group = (s.offset_group + 1) * p.group_channels();
  s.first_channel = s.offset_group * p.group_channels() + slice * kChannelSlice;
  s.end_channel = s.first_channel + kChannelSlice;
  if (s.end_channel > end_of_group) s.end_channel = end_of_group;
  return s;
}

// One thread per SliceItem: geometry once, then up to kChannelSlice columns. Lanes of a warp are
// neighbouring pixels of one output row, so stores to columns are coalesced and, with small
// offsets, loads from a channel plane nearly are.
template <class T>
__global__ void deform_conv2d_columns_kernel(DeformConvParams p,
                                             PixelChunk chunk,
                                             T* columns,
                                             int64_t items) {
  using acc = acc_t<T>;
  const T* input = static_cast<const T*>(p.input);
  for (int64_t item = first_item(); item < items; item += item_step()) {
    const SliceItem s = slice_item(p, chunk, item);
    const OutputPixel pixel = output_pixel(p, chunk.first + s.pixel);
    const DeformSample<acc> sample = deform_sample<acc>(p, pixel, s.offset_group, s.tap);
    const Corners corners = corners_of(sample, pixel.n, p.input_strides);
    for (int64_t c = s.first_channel; c < s.end_channel; ++c) {
      const acc value = sample_value(sample, corners, input + c * p.input_strides.c);
      columns[(c * p.taps() + s.tap) * chunk.count + s.pixel] = static_cast<T>(sample.mask * value);
    }
  }
}

// One thread per (output channel, pixel of the chunk), pixel fastest: loads are coalesced, stores
// to a contiguous output too.
template <class T>
__global__ void deform_conv2d_output_kernel(DeformConvParams p,
                                            PixelChunk chunk,
                                            const acc_t<T>* products,
                                            const T* bias,
                                            int64_t bias_stride,
                                            ImageStrides strides,
                                            T* out) {
  const int64_t items = p.K * chunk.count;
  for (int64_t item = first_item(); item < items; item += item_step()) {
    const int64_t k = item / chunk.count;
    const OutputPixel pixel = output_pixel(p, chunk.first + item - k * chunk.count);
    const acc_t<T> shift = bias ? static_cast<acc_t<T>>(bias[k * bias_stride]) : acc_t<T>(0);
    out[index_of(strides, pixel, k)] = static_cast<T>(products[item] + shift);
  }
}

// The same items, from grad of any strides to a contiguous matrix [K, chunk.count].
template <class T>
__global__ void deform_conv2d_read_grad_kernel(
    DeformConvParams p, PixelChunk chunk, const T* grad, ImageStrides strides, T* matrix) {
  const int64_t items = p.K * chunk.count;
  for (int64_t item = first_item(); item < items; item += item_step()) {
    const int64_t k = item / chunk.count;
    const OutputPixel pixel = output_pixel(p, chunk.first + item - k * chunk.count);
    matrix[item] = grad[index_of(strides, pixel, k)];
  }
}

// One thread per (offset group, tap, pixel of the chunk), pixel fastest, looping over the channels
// of the group: the sums have one owner and one order. Loads from grad_columns are coalesced.
template <class T>
__global__ void deform_conv2d_offset_grad_kernel(DeformConvParams p,
                                                 PixelChunk chunk,
                                                 const acc_t<T>* grad_columns,
                                                 FloatImage grad_offset,
                                                 FloatImage grad_mask) {
  using acc = acc_t<T>;
  const T* input = static_cast<const T*>(p.input);
  const int64_t items = p.offset_groups * p.taps() * chunk.count;
  for (int64_t item = first_item(); item < items; item += item_step()) {
    const int64_t row = item / chunk.count;
    const int64_t column = item - row * chunk.count;
    const int64_t group = row / p.taps();
    const int64_t tap = row - group * p.taps();
    const OutputPixel pixel = output_pixel(p, chunk.first + column);
    const DeformSample<acc> sample = deform_sample<acc>(p, pixel, group, tap);
    const Corners corners = corners_of(sample, pixel.n, p.input_strides);
    SampledValue<acc> sum;
    const int64_t first_channel = group * p.group_channels();
    for (int64_t within = 0; sample.inside && within < p.group_channels(); ++within) {
      const int64_t c = first_channel + within;
      const acc grad = grad_columns[(c * p.taps() + tap) * chunk.count + column];
      const SampledValue<acc> v =
          sample_with_slopes(sample, corners, input + c * p.input_strides.c);
      sum.value += grad * v.value;
      sum.slope_y += grad * v.slope_y;
      sum.slope_x += grad * v.slope_x;
    }
    write_offset_sums(p, pixel, group, tap, sample, sum, grad_offset, grad_mask);
  }
}

// One thread per SliceItem, as for columns. Samples of different pixels meet in one input pixel:
// sums are atomic, in the accumulator's dtype.
template <class T>
__global__ void deform_conv2d_input_grad_kernel(DeformConvParams p,
                                                PixelChunk chunk,
                                                const acc_t<T>* grad_columns,
                                                ImageStrides strides,
                                                acc_t<T>* grad_input,
                                                int64_t items) {
  using acc = acc_t<T>;
  for (int64_t item = first_item(); item < items; item += item_step()) {
    const SliceItem s = slice_item(p, chunk, item);
    const OutputPixel pixel = output_pixel(p, chunk.first + s.pixel);
    const DeformSample<acc> sample = deform_sample<acc>(p, pixel, s.offset_group, s.tap);
    const Corners corners = corners_of(sample, pixel.n, strides);
    for (int64_t c = s.first_channel; c < s.end_channel; ++c) {
      acc* channel = grad_input + c * strides.c;
      const acc grad = grad_columns[(c * p.taps() + s.tap) * chunk.count + s.pixel];
      spread_gradient(sample, corners, grad * sample.mask, [&](int64_t at, acc share) {
        atomic_add(channel + at, share);
      });
    }
  }
}

// One thread per element.
template <class T>
__global__ void deform_conv2d_add_kernel(T* sum, const T* part, int64_t numel) {
  for (int64_t i = first_item(); i < numel; i += item_step()) sum[i] += part[i];
}

}  // namespace opzoo
