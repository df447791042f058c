// SPDX-License-Identifier: Apache-2.0
// What the implicit matrix products of deform_conv2d share: tiles of output pixels, the plan of
// their samples and the sampling of 16 bytes of channels. Any GPU. No torch.
#pragma once

#include <type_traits>

#include "common/launch.cuh"
#include "deform_conv2d/deform_conv2d.h"

namespace opzoo {

// One row of an operand in shared memory: the channels of one step of the product. 8 pieces.
constexpr int kImplicitRowBytes = 128;

struct DeformConvImplicitParams {
  DeformConvParams conv;     // input_strides.c is 1, the others are multiples of 16 bytes
  const void* weight_tiles;  // of deform_conv2d_weight_tiles_kernel
  const void* weight;        // as given, for deform_conv2d_implicit_exact.cuh
  ImageStrides weight_strides;
  const int* weight_too_large;  // of the same kernel; null where the product has one part
  const void* bias;             // or null
  int64_t bias_stride;
  void* out;
  ImageStrides out_strides;
  int tile_width_log2;  // of a tile's rectangle of pixels; negative: a run of the pixels [N, OH,
                        // OW]
  int64_t tiles_x, tiles_y;
  uint32_t tiles;
  int splits;  // blocks of a cluster that share one tile's channels
};

// Where a tap of a pixel reads: its corners (upper left, upper right, lower left, lower right), in
// pieces of 16 bytes from the first of the map.
struct alignas(16) ImplicitSource {
  uint32_t corner[4];
};
// What the corners are multiplied with, the mask included. Outside the map the last one has the
// bits kOutside, which no product has, and the first one the bits of the sample; nothing else of
// such an entry counts, but what it reads exists.
struct alignas(16) ImplicitWeights {
  float corner[4];
};
constexpr uint32_t kOutside = 0xffffffffu;
constexpr int kImplicitPlanBytes = sizeof(ImplicitSource) + sizeof(ImplicitWeights);

// Pixel `row` of a tile of kPixels; one with y = OH does not exist.
template <int kPixels>
__device__ OutputPixel implicit_pixel(const DeformConvImplicitParams& p, uint32_t tile, int row) {
  if (p.tile_width_log2 < 0) {
    // Below 2^31 pixels: 32-bit divisions, a sixth of the time of 64-bit ones.
    const auto OW = static_cast<uint32_t>(p.conv.OW);
    const auto OH = static_cast<uint32_t>(p.conv.OH);
    const uint32_t index = tile * kPixels + row;
    const uint32_t line = index / OW;
    const uint32_t n = line / OH;
    if (n >= p.conv.N) return {0, p.conv.OH, 0};
    return {n, line - n * OH, index - line * OW};
  }
  const auto tiles_x = static_cast<uint32_t>(p.tiles_x);
  const auto tiles_y = static_cast<uint32_t>(p.tiles_y);
  const uint32_t line = tile / tiles_x;
  const uint32_t n = line / tiles_y;
  const int64_t y = static_cast<int64_t>(line - n * tiles_y) * (kPixels >> p.tile_width_log2) +
                    (row >> p.tile_width_log2);
  const int64_t x = (static_cast<int64_t>(tile - line * tiles_x) << p.tile_width_log2) +
                    (row & ((1 << p.tile_width_log2) - 1));
  if (n >= p.conv.N || y >= p.conv.OH || x >= p.conv.OW) return {0, p.conv.OH, 0};
  return {n, y, x};
}

// The bits of an element of an array whose dtype is only known at run time (of a double: those of
// the float it is rounded to), and what they say. Apart, so that the loads of many elements are in
// flight before one is looked at.
__device__ __forceinline__ uint32_t load_bits(const void* data, FloatKind kind, int64_t at) {
  switch (kind) {
    case FloatKind::kFloat64:
      return __float_as_uint(static_cast<float>(static_cast<const double*>(data)[at]));
    case FloatKind::kFloat32:
      return static_cast<const uint32_t*>(data)[at];
    default:
      return static_cast<const uint16_t*>(data)[at];
  }
}
__device__ __forceinline__ float float_of(uint32_t bits, FloatKind kind) {
  if (kind == FloatKind::kFloat16)
    return __half2float(__ushort_as_half(static_cast<uint16_t>(bits)));
  return __uint_as_float(kind == FloatKind::kBFloat16 ? bits << 16 : bits);
}

// One entry of the plan. kNan: NaN in either half of a word, or in all of it.
template <class T>
__device__ __forceinline__ void plan_sample(const DeformConvImplicitParams& p,
                                            const OutputPixel& pixel,
                                            const DeformSample<float>& sample,
                                            ImplicitSource& source,
                                            ImplicitWeights& weights) {
  constexpr int kVector = 16 / sizeof(T);
  constexpr uint32_t kNan = sizeof(T) == 2 ? 0x7fff7fffu : 0x7fffffffu;
  const ImageStrides& strides = p.conv.input_strides;
  const AxisTap<float>& y = sample.y;
  const AxisTap<float>& x = sample.x;
  if (!sample.inside) {
    source = {};
    const float fill = isfinite(sample.mask) ? 0 : __uint_as_float(kNan);
    weights = {{fill, 0, 0, __uint_as_float(kOutside)}};
    return;
  }
  const auto at = [&](int64_t row, int64_t column) {
    const int64_t element = pixel.n * strides.n + row * strides.y + column * strides.x;
    return static_cast<uint32_t>(element / kVector);
  };
  source = {{at(y.lo, x.lo), at(y.lo, x.hi), at(y.hi, x.lo), at(y.hi, x.hi)}};
  // Not 0 * mask, which is NaN for an infinite mask: such a corner adds nothing.
  const auto product = [&](float weight) { return weight == 0 ? 0 : weight * sample.mask; };
  weights = {{product(y.weight_lo * x.weight_lo),
              product(y.weight_lo * x.weight_hi),
              product(y.weight_hi * x.weight_lo),
              product(y.weight_hi * x.weight_hi)}};
}

// The geometry of an offset group, [tap][pixel], once for all its channels. A thread has the loads
// of three entries in flight: offsets come from device memory.
template <class T, int kPixels, int kThreads>
__device__ void plan_samples(const DeformConvImplicitParams& p,
                             uint32_t tile,
                             int64_t offset_group,
                             int thread,
                             ImplicitSource* sources,
                             ImplicitWeights* weights) {
  constexpr int kBatch = 3;
  static_assert(kThreads % kPixels == 0);
  const DeformConvParams& c = p.conv;
  const int taps = static_cast<int>(c.taps());
  const OutputPixel pixel = implicit_pixel<kPixels>(p, tile, thread % kPixels);
  const bool exists = pixel.y < c.OH;
  const int64_t offset_at = index_of(c.offset.strides, pixel, 2 * offset_group * taps);
  const int64_t mask_at = index_of(c.mask.strides, pixel, offset_group * taps);
  constexpr int kTapStep = kThreads / kPixels;
  for (int first = thread / kPixels; first < taps; first += kBatch * kTapStep) {
    uint32_t bits[kBatch][3];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int tap = first + b * kTapStep;
      if (!exists || tap >= taps) continue;
      const int64_t at = offset_at + 2 * tap * c.offset.strides.c;
      bits[b][0] = load_bits(c.offset.data, c.offset.kind, at);
      bits[b][1] = load_bits(c.offset.data, c.offset.kind, at + c.offset.strides.c);
      if (c.mask.data == nullptr) continue;
      bits[b][2] = load_bits(c.mask.data, c.mask.kind, mask_at + tap * c.mask.strides.c);
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int tap = first + b * kTapStep;
      if (tap >= taps) break;
      DeformSample<float> sample;
      if (exists) {
        const int i = tap / static_cast<int>(c.kernel_w);
        sample = deform_sample_at<float>(c,
                                         pixel,
                                         i,
                                         tap - i * static_cast<int>(c.kernel_w),
                                         float_of(bits[b][0], c.offset.kind),
                                         float_of(bits[b][1], c.offset.kind),
                                         c.mask.data ? float_of(bits[b][2], c.mask.kind) : 1.0f);
      }
      const int entry = tap * kPixels + thread % kPixels;
      plan_sample<T>(p, pixel, sample, sources[entry], weights[entry]);
    }
  }
}

// The corners of a sample; channels points to this thread's piece of pixel 0.
__device__ __forceinline__ void load_corners(const uint4* channels,
                                             const ImplicitSource& source,
                                             uint4 (&corners)[4]) {
#pragma unroll
  for (int c = 0; c < 4; ++c) corners[c] = __ldg(channels + source.corner[c]);
}

__device__ __forceinline__ float2 unpack_pair(uint32_t pair, Half) {
  return __half22float2(bit_cast<__half2>(pair));
}
__device__ __forceinline__ float2 unpack_pair(uint32_t pair, BFloat16) {
  return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
}
__device__ __forceinline__ uint32_t pack_pair(float low, float high, Half) {
  return bit_cast<uint32_t>(__floats2half2_rn(low, high));
}
__device__ __forceinline__ uint32_t pack_pair(float low, float high, BFloat16) {
  return bit_cast<uint32_t>(__floats2bfloat162_rn(low, high));
}

// A piece of samples, each rounded once.
template <class T>
__device__ __forceinline__ uint4 blend_corners(const uint4 (&corners)[4],
                                               const ImplicitWeights& weights) {
  const bool outside = __float_as_uint(weights.corner[3]) == kOutside;
  const uint32_t fill = __float_as_uint(weights.corner[0]);
  uint32_t result[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float low = 0, high = 0;
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const uint32_t words[4] = {corners[c].x, corners[c].y, corners[c].z, corners[c].w};
      const float weight = weights.corner[c];
      if constexpr (sizeof(T) == 4) {
        const float value = __uint_as_float(words[i]);
        low = c == 0 ? weight * value : low + weight * value;
      } else {
        const float2 value = unpack_pair(words[i], T{});
        low = c == 0 ? weight * value.x : low + weight * value.x;
        high = c == 0 ? weight * value.y : high + weight * value.y;
      }
    }
    if constexpr (sizeof(T) == 4) {
      result[i] = __float_as_uint(low);
    } else {
      result[i] = pack_pair(low, high, T{});
    }
    if (outside) result[i] = fill;
  }
  return {result[0], result[1], result[2], result[3]};
}

// 8 numbers, each rounded once.
template <class T>
__device__ __forceinline__ uint4 pack_vector(const float (&values)[8]) {
  return {pack_pair(values[0], values[1], T{}),
          pack_pair(values[2], values[3], T{}),
          pack_pair(values[4], values[5], T{}),
          pack_pair(values[6], values[7], T{})};
}

// The tf32 number nearest to value, ties away from zero, as fp32; the largest finite ones round
// down, so that only inf is inf.
__device__ __forceinline__ float nearest_tf32(float value) {
  const uint32_t bits = bit_cast<uint32_t>(value);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return bit_cast<float>(0x7fffe000u);  // NaN in the upper bits too
  const uint32_t rounded = magnitude < 0x7f7ff000u ? bits + 0x1000u : bits;
  return bit_cast<float>(rounded & ~0x1fffu);
}

// The same for numbers well below the largest, in two instructions.
__device__ __forceinline__ float split_tf32(float value) {
  return __uint_as_float((__float_as_uint(value) + 0x1000u) & ~0x1fffu);
}

// What a product of two tf32 parts cannot hold: NaN, inf (inf - inf), and beyond 2^63 partial
// products that may overflow with the other sign.
__device__ __forceinline__ bool too_large_for_parts(float value) {
  return !(fabsf(value) <= 0x1p63f);
}

}  // namespace opzoo
