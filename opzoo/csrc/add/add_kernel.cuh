// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "add/add.h"
#include "common/launch.cuh"

namespace opzoo {

template <class T>
constexpr int kAddVector = 16 / sizeof(T);

template <class T>
struct alignas(16) AddVector {
  T value[kAddVector<T>];
};

// Contiguous operands, all three on a 16-byte boundary. A thread owns one 16-byte vector of each
// operand and neighbours own neighbours, so a warp moves 512 bytes in one instruction. The last
// numel % vector elements go to the first threads, one each.
template <class T>
__global__ void add_contiguous_kernel(const T* __restrict__ a,
                                      const T* __restrict__ b,
                                      T* __restrict__ out,
                                      acc_t<T> alpha,
                                      int64_t numel) {
  using acc = acc_t<T>;
  constexpr int kVector = kAddVector<T>;
  const int64_t vectors = numel / kVector;
  for (int64_t i = first_item(); i < vectors; i += item_step()) {
    const auto left = reinterpret_cast<const AddVector<T>*>(a)[i];
    const auto right = reinterpret_cast<const AddVector<T>*>(b)[i];
    AddVector<T> sum;
#pragma unroll
    for (int v = 0; v < kVector; ++v) {
      sum.value[v] =
          add_value<T>(static_cast<acc>(left.value[v]), static_cast<acc>(right.value[v]), alpha);
    }
    reinterpret_cast<AddVector<T>*>(out)[i] = sum;
  }
  for (int64_t i = vectors * kVector + first_item(); i < numel; i += item_step()) {
    out[i] = add_value<T>(static_cast<acc>(a[i]), static_cast<acc>(b[i]), alpha);
  }
}

// How an operand is read along the innermost axis of the loop.
enum class AddAccess {
  kVectors,   // neighbours, every row a whole number of 16-byte vectors on their boundaries
  kRepeated,  // one value for the whole row
  kElements,  // any stride, any alignment
};

struct AddAccesses {
  AddAccess a, b;
};

// Elements of one operand for one vector of the result, all in the row that starts at row.
template <class T, class index_t>
__device__ __forceinline__ void load_add_row(AddAccess access,
                                             const T* row,
                                             index_t column,
                                             index_t stride,
                                             acc_t<T> number,
                                             acc_t<T> (&value)[kAddVector<T>]) {
  using acc = acc_t<T>;
  constexpr int kVector = kAddVector<T>;
  if (access == AddAccess::kVectors) {
    const auto vector = *reinterpret_cast<const AddVector<T>*>(row + column);
#pragma unroll
    for (int v = 0; v < kVector; ++v) value[v] = static_cast<acc>(vector.value[v]);
  } else if (access == AddAccess::kRepeated) {
    const acc repeated = row ? static_cast<acc>(*row) : number;
#pragma unroll
    for (int v = 0; v < kVector; ++v) value[v] = repeated;
  } else {
#pragma unroll
    for (int v = 0; v < kVector; ++v) value[v] = static_cast<acc>(row[(column + v) * stride]);
  }
}

// The sum of one element, found by dividing its number through the axes.
template <class T, class index_t>
__device__ __forceinline__ T add_element(const AddParams& p, index_t item) {
  const auto* a = static_cast<const T*>(p.a.data);
  const auto* b = static_cast<const T*>(p.b.data);
  index_t offset[3];
  offsets_of(p.loop, item, offset);
  const acc_t<T> left = a ? static_cast<acc_t<T>>(a[offset[kAddA]]) : add_number<T>(p.a);
  const acc_t<T> right = b ? static_cast<acc_t<T>>(b[offset[kAddB]]) : add_number<T>(p.b);
  return add_value<T>(left, right, static_cast<acc_t<T>>(p.alpha));
}

// Operands of any strides (0 along a broadcast axis). The result is dense and the loop runs in its
// memory order, so an element's number is its offset: a thread owns one 16-byte vector of the
// result, neighbours own neighbours. A vector within one row of the innermost axis finds its place
// with one division per axis, and reads a repeated value once; only a vector that crosses into the
// next row divides for each element. The branches on the access are the same for the whole grid.
// index_t is 32-bit where all offsets fit: 64-bit divisions would cost more than the memory
// traffic.
template <class T, class index_t>
__global__ void add_strided_kernel(AddParams p, AddAccesses access) {
  using acc = acc_t<T>;
  constexpr int kVector = kAddVector<T>;
  const auto* a = static_cast<const T*>(p.a.data);
  const auto* b = static_cast<const T*>(p.b.data);
  auto* out = static_cast<T*>(p.out);
  const auto alpha = static_cast<acc>(p.alpha);
  const auto row_length = static_cast<index_t>(p.loop.size[0]);
  const int64_t vectors = p.loop.numel / kVector;
  for (int64_t i = first_item(); i < vectors; i += item_step()) {
    const auto item = static_cast<index_t>(i * kVector);
    const index_t column = item % row_length;
    AddVector<T> sum;
    if (column + kVector <= row_length) {
      index_t row[3];
      offsets_of(p.loop, static_cast<index_t>(item - column), row);
      acc left[kVector], right[kVector];
      load_add_row<T>(access.a,
                      a ? a + row[kAddA] : nullptr,
                      column,
                      static_cast<index_t>(p.loop.stride[kAddA][0]),
                      add_number<T>(p.a),
                      left);
      load_add_row<T>(access.b,
                      b ? b + row[kAddB] : nullptr,
                      column,
                      static_cast<index_t>(p.loop.stride[kAddB][0]),
                      add_number<T>(p.b),
                      right);
#pragma unroll
      for (int v = 0; v < kVector; ++v) sum.value[v] = add_value<T>(left[v], right[v], alpha);
    } else {
      for (int v = 0; v < kVector; ++v) {
        sum.value[v] = add_element<T>(p, static_cast<index_t>(item + v));
      }
    }
    reinterpret_cast<AddVector<T>*>(out)[i] = sum;
  }
  for (int64_t i = vectors * kVector + first_item(); i < p.loop.numel; i += item_step()) {
    out[i] = add_element<T>(p, static_cast<index_t>(i));
  }
}

}  // namespace opzoo
