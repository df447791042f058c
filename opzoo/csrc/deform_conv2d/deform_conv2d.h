// SPDX-License-Identifier: Apache-2.0
// deform_conv2d(input, offset, weight, bias, mask): convolution whose taps are moved by offset.
//
//   input   [N, C, H, W]              any strides
//   offset  [N, 2*D*kh*kw, OH, OW]    channel ((d*kh + i)*kw + j)*2 holds dy of tap (i, j) in
//   offset
//                                     group d, the channel after it dx; in input pixels
//   mask    [N, D*kh*kw, OH, OW]      or none, which is a mask of ones
//   weight  [K, C/G, kh, kw]          G weight groups
//   bias    [K]                       or none
//   out     [N, K, OH, OW]            OH = (H + 2*pad_h - dilation_h*(kh - 1) - 1) / stride_h + 1
//
//   y = oy*stride_h - pad_h + i*dilation_h + dy      (x alike)
//   column[c, i, j] = mask * bilinear(input[n, c], y, x)
//   out[n, k, oy, ox] = bias[k] + sum over c in k's group, i, j of weight[k, c, i, j] * column[c,
//   i, j]
//
// D offset groups split C evenly, G weight groups split C and K evenly; both follow from the
// shapes. input, weight, bias and out share a dtype; offset and mask have one each. Coordinates,
// bilinear weights and sums are fp32, or fp64 when input is.
//
// Border: ZeroBorder of common/bilinear.h. A sample at or beyond -1 or the size is 0 with
// derivative 0; infinite coordinates are. A NaN coordinate makes its sample NaN unless the other
// coordinate is outside, and reads nothing beyond the map. No axis of input or weight but N and K
// may be empty.
//
// Memory beyond the result is bounded: columns exist for a chunk of pixels at a time. Everything is
// written once, in an order that does not depend on the threads, except the gradient of input on
// CUDA, which is summed by atomics, and the matrix products on the CPU: torch's, whose sums depend
// on the number of threads, not on the run. No torch in this file.
#pragma once

#include "common/bilinear.h"
#include "common/types.h"

namespace opzoo {

enum class FloatKind { kFloat64, kFloat32, kFloat16, kBFloat16 };

// One element of an array whose dtype is only known at run time. The switch is uniform over a
// kernel; as a template parameter the three dtypes would multiply to 64 instances.
template <class acc>
OPZOO_HOST_DEVICE acc load_float(const void* data, FloatKind kind, int64_t at) {
  switch (kind) {
    case FloatKind::kFloat64:
      return static_cast<acc>(static_cast<const double*>(data)[at]);
    case FloatKind::kFloat32:
      return static_cast<acc>(static_cast<const float*>(data)[at]);
    case FloatKind::kFloat16:
      return static_cast<acc>(static_cast<float>(static_cast<const Half*>(data)[at]));
    default:
      return static_cast<acc>(static_cast<float>(static_cast<const BFloat16*>(data)[at]));
  }
}

template <class acc>
OPZOO_HOST_DEVICE void store_float(void* data, FloatKind kind, int64_t at, acc value) {
  switch (kind) {
    case FloatKind::kFloat64:
      static_cast<double*>(data)[at] = static_cast<double>(value);
      break;
    case FloatKind::kFloat32:
      static_cast<float*>(data)[at] = static_cast<float>(value);
      break;
    case FloatKind::kFloat16:
      static_cast<Half*>(data)[at] = Half(static_cast<float>(value));
      break;
    default:
      static_cast<BFloat16*>(data)[at] = BFloat16(static_cast<float>(value));
  }
}

// Strides of a [N, channels, Y, X] tensor.
struct ImageStrides {
  int64_t n = 0, c = 0, y = 0, x = 0;
};

// A [N, channels, OH, OW] tensor of any float dtype.
struct FloatImage {
  void* data = nullptr;
  FloatKind kind = FloatKind::kFloat32;
  ImageStrides strides;
};

struct DeformConvParams {
  int64_t N, C, H, W, K, OH, OW;
  int64_t kernel_h, kernel_w, stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;
  int64_t weight_groups, offset_groups;
  const void* input = nullptr;
  ImageStrides input_strides;
  FloatImage offset;
  FloatImage mask;  // no data: all ones

  OPZOO_HOST_DEVICE int64_t taps() const { return kernel_h * kernel_w; }
  OPZOO_HOST_DEVICE int64_t rows() const { return C * taps(); }  // of the column matrix
  OPZOO_HOST_DEVICE int64_t pixels() const { return N * OH * OW; }
  OPZOO_HOST_DEVICE int64_t group_channels() const { return C / offset_groups; }
};

// Output pixels [first, first + count) in the order of [N, OH, OW]; they may span images. A matrix
// of the chunk is contiguous, [rows, count]: row c*taps + tap of columns, row k of products.
struct PixelChunk {
  int64_t first, count;
};

struct OutputPixel {
  int64_t n, y, x;
};

OPZOO_HOST_DEVICE OutputPixel output_pixel(const DeformConvParams& p, int64_t index) {
  const int64_t line = index / p.OW;
  const int64_t n = line / p.OH;
  return {n, line - n * p.OH, index - line * p.OW};
}

OPZOO_HOST_DEVICE OutputPixel next_pixel(const DeformConvParams& p, OutputPixel pixel) {
  if (++pixel.x < p.OW) return pixel;
  pixel.x = 0;
  if (++pixel.y < p.OH) return pixel;
  pixel.y = 0;
  ++pixel.n;
  return pixel;
}

OPZOO_HOST_DEVICE int64_t index_of(const ImageStrides& s, const OutputPixel& pixel, int64_t c) {
  return pixel.n * s.n + c * s.c + pixel.y * s.y + pixel.x * s.x;
}

// Where one tap of one output pixel reads, and what it is multiplied with.
template <class acc>
struct DeformSample {
  AxisTap<acc> y, x;
  acc mask = 1;
  bool inside = false;  // false: value and derivatives are 0, nothing may be read or written
};

// The whole geometry of the operator, forward and backward: tap (i, j) of a pixel, moved by (dy,
// dx).
template <class acc>
OPZOO_HOST_DEVICE DeformSample<acc> deform_sample_at(const DeformConvParams& p,
                                                     const OutputPixel& pixel,
                                                     int64_t i,
                                                     int64_t j,
                                                     acc dy,
                                                     acc dx,
                                                     acc mask) {
  const int64_t grid_y = pixel.y * p.stride_h - p.pad_h + i * p.dilation_h;
  const int64_t grid_x = pixel.x * p.stride_w - p.pad_w + j * p.dilation_w;
  DeformSample<acc> sample;
  sample.y = ZeroBorder::tap(static_cast<acc>(grid_y) + dy, p.H);
  sample.x = ZeroBorder::tap(static_cast<acc>(grid_x) + dx, p.W);
  sample.inside = sample.y.inside && sample.x.inside;
  sample.mask = mask;
  return sample;
}

template <class acc>
OPZOO_HOST_DEVICE DeformSample<acc> deform_sample(const DeformConvParams& p,
                                                  const OutputPixel& pixel,
                                                  int64_t offset_group,
                                                  int64_t tap) {
  const int64_t i = tap / p.kernel_w;
  const int64_t channel = offset_group * p.taps() + tap;
  const int64_t at = index_of(p.offset.strides, pixel, 2 * channel);
  const acc dy = load_float<acc>(p.offset.data, p.offset.kind, at);
  const acc dx = load_float<acc>(p.offset.data, p.offset.kind, at + p.offset.strides.c);
  const acc mask =
      p.mask.data
          ? load_float<acc>(p.mask.data, p.mask.kind, index_of(p.mask.strides, pixel, channel))
          : acc(1);
  return deform_sample_at<acc>(p, pixel, i, tap - i * p.kernel_w, dy, dx, mask);
}

// The four pixels around a sample, (y, x) in {lo, hi} x {lo, hi}, as element offsets from channel 0
// of image 0.
struct Corners {
  int64_t at[4];
};

template <class acc>
OPZOO_HOST_DEVICE Corners corners_of(const DeformSample<acc>& sample,
                                     int64_t n,
                                     const ImageStrides& s) {
  const int64_t lo = n * s.n + sample.y.lo * s.y;
  const int64_t hi = n * s.n + sample.y.hi * s.y;
  const int64_t left = sample.x.lo * s.x;
  const int64_t right = sample.x.hi * s.x;
  return {{lo + left, lo + right, hi + left, hi + right}};
}

// A bilinear sample of one channel with its derivatives by the coordinates. All zero outside.
template <class acc>
struct SampledValue {
  acc value = 0, slope_y = 0, slope_x = 0;
};

template <class acc, class T>
OPZOO_HOST_DEVICE acc sample_value(const DeformSample<acc>& sample,
                                   const Corners& corners,
                                   const T* channel) {
  if (!sample.inside) return acc(0);
  const acc top = sample.x.weight_lo * static_cast<acc>(channel[corners.at[0]]) +
                  sample.x.weight_hi * static_cast<acc>(channel[corners.at[1]]);
  const acc bottom = sample.x.weight_lo * static_cast<acc>(channel[corners.at[2]]) +
                     sample.x.weight_hi * static_cast<acc>(channel[corners.at[3]]);
  return sample.y.weight_lo * top + sample.y.weight_hi * bottom;
}

template <class acc, class T>
OPZOO_HOST_DEVICE SampledValue<acc> sample_with_slopes(const DeformSample<acc>& sample,
                                                       const Corners& corners,
                                                       const T* channel) {
  SampledValue<acc> result;
  if (!sample.inside) return result;
  const AxisTap<acc>& y = sample.y;
  const AxisTap<acc>& x = sample.x;
  const acc v0 = static_cast<acc>(channel[corners.at[0]]);
  const acc v1 = static_cast<acc>(channel[corners.at[1]]);
  const acc v2 = static_cast<acc>(channel[corners.at[2]]);
  const acc v3 = static_cast<acc>(channel[corners.at[3]]);
  const acc top = x.weight_lo * v0 + x.weight_hi * v1;
  const acc bottom = x.weight_lo * v2 + x.weight_hi * v3;
  result.value = y.weight_lo * top + y.weight_hi * bottom;
  result.slope_y = y.slope_lo * top + y.slope_hi * bottom;
  result.slope_x = y.weight_lo * (x.slope_lo * v0 + x.slope_hi * v1) +
                   y.weight_hi * (x.slope_lo * v2 + x.slope_hi * v3);
  return result;
}

// The gradients of one tap of one pixel, from sums over its channels of grad_column times value and
// slopes. A gradient image without data is not wanted.
template <class acc>
OPZOO_HOST_DEVICE void write_offset_sums(const DeformConvParams& p,
                                         const OutputPixel& pixel,
                                         int64_t offset_group,
                                         int64_t tap,
                                         const DeformSample<acc>& sample,
                                         const SampledValue<acc>& sum,
                                         const FloatImage& grad_offset,
                                         const FloatImage& grad_mask) {
  const int64_t channel = offset_group * p.taps() + tap;
  if (grad_offset.data) {
    const int64_t at = index_of(grad_offset.strides, pixel, 2 * channel);
    const bool inside = sample.inside;
    store_float(
        grad_offset.data, grad_offset.kind, at, inside ? sample.mask * sum.slope_y : acc(0));
    store_float(grad_offset.data,
                grad_offset.kind,
                at + grad_offset.strides.c,
                inside ? sample.mask * sum.slope_x : acc(0));
  }
  if (grad_mask.data) {
    store_float(
        grad_mask.data, grad_mask.kind, index_of(grad_mask.strides, pixel, channel), sum.value);
  }
}

// add(corner offset, share) for every corner that the sample's gradient reaches.
template <class acc, class Add>
OPZOO_HOST_DEVICE void spread_gradient(const DeformSample<acc>& sample,
                                       const Corners& corners,
                                       acc grad,
                                       const Add& add) {
  if (!sample.inside) return;
  const acc wy[2] = {sample.y.weight_lo, sample.y.weight_hi};
  const acc wx[2] = {sample.x.weight_lo, sample.x.weight_hi};
  for (int corner = 0; corner < 4; ++corner) {
    const acc weight = wy[corner >> 1] * wx[corner & 1];
    if (weight != acc(0)) add(corners.at[corner], weight * grad);
  }
}

}  // namespace opzoo
