// SPDX-License-Identifier: Apache-2.0
// Axis-aligned boxes (x1, y1, x2, y2) and their overlap, rounded the same way on every device.
#pragma once

#include "common/rounding.h"
#include "common/types.h"

namespace opzoo {

// Coordinates are compared in fp32; in fp64 where fp32 could not hold what is stored.
template <class T>
using box_acc_t = std::conditional_t<std::is_same_v<T, double> || std::is_same_v<T, int64_t> ||
                                         std::is_same_v<T, int32_t>,
                                     double,
                                     float>;

template <class acc>
struct alignas(4 * sizeof(acc)) Box {
  acc x1, y1, x2, y2;
};

// Negative for a box inverted along one axis, NaN where a coordinate is NaN.
template <class acc>
OPZOO_HOST_DEVICE acc box_area(const Box<acc>& box) {
  return multiply_rounded(box.x2 - box.x1, box.y2 - box.y1);
}

// inter / (area_a + area_b - inter). Which operand the selections below keep for a NaN does not
// matter: a NaN coordinate makes its box's area, and so the result, NaN.
template <class acc>
OPZOO_HOST_DEVICE acc box_iou(const Box<acc>& a, acc area_a, const Box<acc>& b, acc area_b) {
  const acc x1 = a.x1 < b.x1 ? b.x1 : a.x1;
  const acc y1 = a.y1 < b.y1 ? b.y1 : a.y1;
  const acc x2 = b.x2 < a.x2 ? b.x2 : a.x2;
  const acc y2 = b.y2 < a.y2 ? b.y2 : a.y2;
  const acc width = x2 - x1;
  const acc height = y2 - y1;
  const acc inter =
      multiply_rounded(width > acc(0) ? width : acc(0), height > acc(0) ? height : acc(0));
  return divide_rounded(inter, area_a + area_b - inter);
}

}  // namespace opzoo
