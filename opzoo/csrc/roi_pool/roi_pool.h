// SPDX-License-Identifier: Apache-2.0
// roi_pool: the maximum of whole pixels in each bin of each RoI.
//
//   input   [N, C, H, W], any strides
//   boxes   [K, 5] of (image index, x1, y1, x2, y2), in the type of the sums
//   output  [K, C, ph, pw], contiguous; argmax, likewise, int64: y * W + x of the pixel, -1 for
//   none
//
// Two rules for the pixels of a bin, along each axis with scale s and P bins:
//   rounded    the RoI is pixels round(x1 s) to round(x2 s), both included and at least one; bin p
//   is
//              [floor(p size / P), ceil((p + 1) size / P)) from there. Fast R-CNN, torchvision.
//   unrounded  the RoI is [x1 s, (x2 + 1) s); bin p is [floor(start + p size / P),
//              ceil(start + (p + 1) size / P)), and a RoI without area has no pixel. mmcv.
//
// Bins are cut to the map; a bin without pixels is 0. A NaN pixel wins. A box with a NaN or
// infinite coordinate has no pixel, and neither has one whose image index is none of the batch. The
// first of equal pixels wins, in row order. No torch here.
//
// Source: Girshick, "Fast R-CNN", ICCV 2015.
#pragma once

#include <cmath>

#include "common/types.h"

namespace opzoo {

struct RoIPoolParams {
  const void* input = nullptr;
  int64_t input_stride[4] = {};
  const void* boxes = nullptr;
  int64_t boxes_stride[2] = {};
  int64_t N = 0, C = 0, H = 0, W = 0, K = 0, pooled_height = 0, pooled_width = 0;
  double spatial_scale = 1;
  bool rounded = true;
};

struct PixelRange {
  int64_t begin = 0, end = 0;
};

// The pixels of bin p of P along one axis, cut to [0, size).
template <class acc>
OPZOO_HOST_DEVICE PixelRange
pool_range(const RoIPoolParams& params, acc low, acc high, int64_t p, int64_t P, int64_t size) {
  const acc scale = static_cast<acc>(params.spatial_scale);
  const acc start = params.rounded ? round(low * scale) : low * scale;
  acc extent = params.rounded ? round(high * scale) - start + 1 : (high + 1) * scale - start;
  if (!(extent - extent == 0) || !(start - start == 0)) return {};  // NaN or infinite
  if (params.rounded && extent < 1) extent = 1;
  if (extent <= 0) return {};
  const acc bin = extent / static_cast<acc>(P);
  acc begin = static_cast<acc>(p) * bin, end = static_cast<acc>(p + 1) * bin;
  if (params.rounded) {
    begin = floor(begin) + start;
    end = ceil(end) + start;
  } else {
    begin = floor(begin + start);
    end = ceil(end + start);
  }
  const acc last = static_cast<acc>(size);
  begin = begin < 0 ? acc(0) : begin > last ? last : begin;
  end = end < 0 ? acc(0) : end > last ? last : end;
  return {static_cast<int64_t>(begin), static_cast<int64_t>(end)};
}

template <class acc>
struct PooledPixel {
  acc value = 0;
  int64_t argmax = -1;
};

// The image of a RoI, -1 for none of the batch.
template <class acc>
OPZOO_HOST_DEVICE int64_t pool_image(const RoIPoolParams& p, int64_t k) {
  const acc image = static_cast<const acc*>(p.boxes)[k * p.boxes_stride[0]];
  const bool valid = image >= 0 && image < static_cast<acc>(p.N) && image == floor(image);
  return valid ? static_cast<int64_t>(image) : -1;
}

// Element (k, c, y, x) of the result.
template <class T>
OPZOO_HOST_DEVICE PooledPixel<acc_t<T>> pool_pixel(
    const RoIPoolParams& p, int64_t k, int64_t c, int64_t y, int64_t x) {
  using acc = acc_t<T>;
  PooledPixel<acc> best;
  const acc* box = static_cast<const acc*>(p.boxes) + k * p.boxes_stride[0];
  const auto at = [&](int64_t column) { return box[column * p.boxes_stride[1]]; };
  const int64_t image = pool_image<acc>(p, k);
  const PixelRange rows = pool_range<acc>(p, at(2), at(4), y, p.pooled_height, p.H);
  const PixelRange columns = pool_range<acc>(p, at(1), at(3), x, p.pooled_width, p.W);
  if (image < 0) return best;
  const T* plane =
      static_cast<const T*>(p.input) + image * p.input_stride[0] + c * p.input_stride[1];
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    for (int64_t column = columns.begin; column < columns.end; ++column) {
      const acc value =
          static_cast<acc>(plane[row * p.input_stride[2] + column * p.input_stride[3]]);
      if (best.argmax >= 0 && !(value > best.value || value != value)) continue;
      if (best.argmax >= 0 && best.value != best.value) return best;
      best.value = value;
      best.argmax = row * p.W + column;
    }
  }
  return best;
}

}  // namespace opzoo
