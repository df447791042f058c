// SPDX-License-Identifier: Apache-2.0
// One loop over several tensors of the same shape and any strides. No torch.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "common/types.h"

namespace opzoo {

constexpr int kMaxLoopAxes = 16;

// Axes are ordered innermost (smallest stride of operand 0) first; axes that all operands walk
// through as one are merged, so a contiguous problem has exactly one axis of stride 1.
template <int kOperands>
struct StridedLoop {
  int64_t numel = 1;
  int axes = 0;
  int64_t size[kMaxLoopAxes] = {};
  int64_t stride[kOperands][kMaxLoopAxes] = {};

  OPZOO_HOST_DEVICE bool is_contiguous() const {
    if (axes > 1) return false;
    for (int operand = 0; operand < kOperands; ++operand) {
      if (stride[operand][0] != 1) return false;
    }
    return true;
  }

  // Whether every element number and every offset fits a signed 32-bit integer.
  bool fits_32_bits() const {
    constexpr double kLimit = 2147483647.0;
    if (static_cast<double>(numel) > kLimit) return false;
    for (const auto& strides : stride) {
      double extent = 0;
      for (int axis = 0; axis < axes; ++axis) {
        extent += static_cast<double>(size[axis] - 1) * static_cast<double>(strides[axis]);
      }
      if (extent > kLimit) return false;
    }
    return true;
  }
};

// Returns false when more than kMaxLoopAxes axes remain after merging.
template <int kOperands>
bool make_strided_loop(int rank,
                       const int64_t* sizes,
                       const std::array<const int64_t*, kOperands>& strides,
                       StridedLoop<kOperands>& loop) {
  std::array<int, 64> order{};
  int used = 0;
  loop.numel = 1;
  for (int axis = rank - 1; axis >= 0; --axis) {
    loop.numel *= sizes[axis];
    if (sizes[axis] != 1 && used < 64) order[used++] = axis;
  }
  std::stable_sort(order.begin(), order.begin() + used, [&](int left, int right) {
    return strides[0][left] < strides[0][right];
  });

  int last = -1;
  for (int i = 0; i < used; ++i) {
    const int axis = order[i];
    bool continues = last >= 0;
    for (int operand = 0; operand < kOperands && continues; ++operand) {
      continues = strides[operand][axis] == loop.stride[operand][last] * loop.size[last];
    }
    if (continues) {
      loop.size[last] *= sizes[axis];
      continue;
    }
    if (++last == kMaxLoopAxes) return false;
    loop.size[last] = sizes[axis];
    for (int operand = 0; operand < kOperands; ++operand) {
      loop.stride[operand][last] = strides[operand][axis];
    }
  }
  if (last < 0) {  // one element
    last = 0;
    loop.size[0] = 1;
    for (int operand = 0; operand < kOperands; ++operand) loop.stride[operand][0] = 1;
  }
  loop.axes = last + 1;
  return true;
}

// Where element number `item` of the loop lies in each operand. index_t may be 32-bit where
// fits_32_bits() holds.
template <int kOperands, class index_t>
OPZOO_HOST_DEVICE void offsets_of(const StridedLoop<kOperands>& loop,
                                  index_t item,
                                  index_t (&offset)[kOperands]) {
  for (int operand = 0; operand < kOperands; ++operand) offset[operand] = 0;
  for (int axis = 0; axis < loop.axes; ++axis) {
    const auto size = static_cast<index_t>(loop.size[axis]);
    const index_t next = item / size;
    const index_t index = item - next * size;
    item = next;
    for (int operand = 0; operand < kOperands; ++operand) {
      offset[operand] += index * static_cast<index_t>(loop.stride[operand][axis]);
    }
  }
}

}  // namespace opzoo
