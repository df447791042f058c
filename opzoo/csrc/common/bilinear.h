// SPDX-License-Identifier: Apache-2.0
// Bilinear sampling, one axis at a time. A 2-D sample is the product of two axis taps:
//   value = sum over (y in {lo, hi}) (x in {lo, hi}) of weight_y * weight_x * map[y][x]
// and its derivative along y replaces weight_y by slope_y.
//
// Two border rules, as types. They differ on purpose; an operator names the one it follows.
//   ClampBorder  (RoIAlign)     samples in [-1, size] count, read from the nearest edge pixel
//   ZeroBorder   (deform_conv)  pixels outside the map are zero, so samples fade out over one pixel
//
// lo and hi are always valid indices of a non-empty axis, also where the weights are zero: a caller
// may load first and multiply afterwards. At a border both name the border pixel, so that an inf on
// the far side of the map cannot enter a sample as 0 * inf.
#pragma once

#include <cmath>

#include "common/types.h"

namespace opzoo {

template <class acc>
struct AxisTap {
  int64_t lo = 0, hi = 0;
  acc weight_lo = 0, weight_hi = 0;
  acc slope_lo = 0, slope_hi = 0;  // d weight / d coordinate
  bool inside = false;             // false: the sample contributes nothing
};

struct ClampBorder {
  // NaN and infinite coordinates are outside: the comparison is written so that NaN fails it.
  template <class acc>
  static OPZOO_HOST_DEVICE AxisTap<acc> tap(acc coordinate, int64_t size) {
    AxisTap<acc> t;
    if (!(coordinate >= acc(-1) && coordinate <= static_cast<acc>(size))) return t;
    t.inside = true;
    const acc clamped = coordinate > acc(0) ? coordinate : acc(0);
    t.lo = static_cast<int64_t>(clamped);
    if (t.lo >= size - 1) {
      t.lo = t.hi = size - 1;
      t.weight_lo = 1;  // beyond the last pixel's centre the value is constant: slopes stay 0
      return t;
    }
    t.hi = t.lo + 1;
    t.weight_hi = clamped - static_cast<acc>(t.lo);
    t.weight_lo = acc(1) - t.weight_hi;
    if (coordinate >= acc(0)) {
      t.slope_lo = -1;
      t.slope_hi = 1;
    }
    return t;
  }
};

struct ZeroBorder {
  // A sample at or beyond -1 or size is outside with slope 0, as in the original implementation. A
  // NaN coordinate is inside with NaN weights: it makes the result NaN and still reads valid
  // memory.
  template <class acc>
  static OPZOO_HOST_DEVICE AxisTap<acc> tap(acc coordinate, int64_t size) {
    AxisTap<acc> t;
    if (coordinate <= acc(-1) || coordinate >= static_cast<acc>(size)) return t;
    t.inside = true;
    if (coordinate != coordinate) {
      t.weight_lo = t.slope_lo = coordinate;
      return t;
    }
    const acc floor = std::floor(coordinate);
    const acc fraction = coordinate - floor;
    const int64_t below = static_cast<int64_t>(floor);
    t.lo = below >= 0 ? below : 0;
    t.hi = below + 1 < size ? below + 1 : below;
    if (below >= 0) {
      t.weight_lo = acc(1) - fraction;
      t.slope_lo = -1;
    }
    if (below + 1 < size) {
      t.weight_hi = fraction;
      t.slope_hi = 1;
    }
    return t;
  }
};

}  // namespace opzoo
