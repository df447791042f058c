// SPDX-License-Identifier: Apache-2.0
// carafe(features, masks, kernel_size, group_size, scale_factor): upsampling whose k x k kernel at
// every pixel of the result is data.
//
//   out[n, c, i, j] = sum over ky, kx < k of masks[n, (g k + ky) k + kx, i, j]
//                                            * features[n, c, i / s + ky - r, j / s + kx - r]
//
//   with r = k / 2 (k is odd), s the scale factor, g the group of channel c; features outside the
//   map are 0.
//
//   features  [N, C, H, W], masks [N, G k k, s H, s W], out [N, C, s H, s W]; any strides for the
//             operands, out is contiguous
//
// Both gradients are gathers: each has one owner and one order of its sum, so all is deterministic.
// fp32 arithmetic for 16- and 32-bit floats, fp64 for fp64. No torch here.
//
// Source: Wang et al., "CARAFE: Content-Aware ReAssembly of FEatures", ICCV 2019.
#pragma once

#include "common/types.h"

namespace opzoo {

// A [N, C, H, W] operand, read or written.
struct CarafeImage {
  const void* data = nullptr;
  int64_t stride[4] = {};

  template <class T>
  OPZOO_HOST_DEVICE acc_t<T> read(int64_t n, int64_t c, int64_t y, int64_t x) const {
    const int64_t offset = n * stride[0] + c * stride[1] + y * stride[2] + x * stride[3];
    return static_cast<acc_t<T>>(static_cast<const T*>(data)[offset]);
  }
};

struct CarafeParams {
  CarafeImage features, masks, grad;  // grad of out; unused in the forward
  void* out = nullptr;                // out, or the gradient that is computed; contiguous
  int64_t N = 0, C = 0, H = 0, W = 0;
  int64_t k = 1, groups = 1, s = 1;

  OPZOO_HOST_DEVICE int64_t group_channels() const { return C / groups; }
};

// Sizes of what a function below computes, in the order of its memory.
struct CarafeShape {
  int64_t n, c, y, x;

  OPZOO_HOST_DEVICE int64_t numel() const { return n * c * y * x; }
};

struct CarafeIndex {
  int64_t n, c, y, x;
};

OPZOO_HOST_DEVICE CarafeIndex carafe_index(const CarafeShape& shape, int64_t item) {
  const int64_t row = item / shape.x;
  const int64_t plane = row / shape.y;
  const int64_t image = plane / shape.c;
  return {image, plane - image * shape.c, row - plane * shape.y, item - row * shape.x};
}

// The three results. Each has a shape and the value of one element.
struct CarafeForward {
  static OPZOO_HOST_DEVICE CarafeShape shape(const CarafeParams& p) {
    return {p.N, p.C, p.H * p.s, p.W * p.s};
  }

  template <class T>
  static OPZOO_HOST_DEVICE acc_t<T> value(const CarafeParams& p, const CarafeIndex& i) {
    const int64_t first_mask = i.c / p.group_channels() * p.k * p.k;
    const int64_t top = i.y / p.s - p.k / 2, left = i.x / p.s - p.k / 2;
    acc_t<T> sum = 0;
    for (int64_t ky = 0; ky < p.k; ++ky) {
      if (top + ky < 0 || top + ky >= p.H) continue;
      for (int64_t kx = 0; kx < p.k; ++kx) {
        if (left + kx < 0 || left + kx >= p.W) continue;
        sum += p.masks.read<T>(i.n, first_mask + ky * p.k + kx, i.y, i.x) *
               p.features.read<T>(i.n, i.c, top + ky, left + kx);
      }
    }
    return sum;
  }
};

// Of a feature: every pixel of the result whose kernel reaches it.
struct CarafeGradFeatures {
  static OPZOO_HOST_DEVICE CarafeShape shape(const CarafeParams& p) { return {p.N, p.C, p.H, p.W}; }

  template <class T>
  static OPZOO_HOST_DEVICE acc_t<T> value(const CarafeParams& p, const CarafeIndex& i) {
    const int64_t first_mask = i.c / p.group_channels() * p.k * p.k;
    acc_t<T> sum = 0;
    for (int64_t ky = 0; ky < p.k; ++ky) {
      const int64_t row = i.y - ky + p.k / 2;  // of the coarse pixel with this feature in row ky
      if (row < 0 || row >= p.H) continue;
      for (int64_t kx = 0; kx < p.k; ++kx) {
        const int64_t column = i.x - kx + p.k / 2;
        if (column < 0 || column >= p.W) continue;
        for (int64_t y = row * p.s; y < (row + 1) * p.s; ++y) {
          for (int64_t x = column * p.s; x < (column + 1) * p.s; ++x) {
            sum += p.masks.read<T>(i.n, first_mask + ky * p.k + kx, y, x) *
                   p.grad.read<T>(i.n, i.c, y, x);
          }
        }
      }
    }
    return sum;
  }
};

// Of a mask: the channels of its group.
struct CarafeGradMasks {
  static OPZOO_HOST_DEVICE CarafeShape shape(const CarafeParams& p) {
    return {p.N, p.groups * p.k * p.k, p.H * p.s, p.W * p.s};
  }

  template <class T>
  static OPZOO_HOST_DEVICE acc_t<T> value(const CarafeParams& p, const CarafeIndex& i) {
    const int64_t group = i.c / (p.k * p.k), tap = i.c - group * p.k * p.k;
    const int64_t y = i.y / p.s + tap / p.k - p.k / 2, x = i.x / p.s + tap % p.k - p.k / 2;
    acc_t<T> sum = 0;
    if (y < 0 || y >= p.H || x < 0 || x >= p.W) return sum;
    for (int64_t c = group * p.group_channels(); c < (group + 1) * p.group_channels(); ++c) {
      sum += p.features.read<T>(i.n, c, y, x) * p.grad.read<T>(i.n, c, i.y, i.x);
    }
    return sum;
  }
};

}  // namespace opzoo
