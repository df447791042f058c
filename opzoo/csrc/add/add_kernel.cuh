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

// How the rows kernel reads an operand along a row.
enum class AddAccess {
  kVectors,   // neighbours, on 16-byte boundaries
  kRepeated,  // one value for the whole row
  kElements,  // any stride, any alignment
};

struct AddRows {
  AddParams params;
  AddAccess a, b;
  int64_t row_vectors;  // 16-byte vectors of the result in a row
};

// The elements [column, column + vector) of one row of an operand.
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

// A result whose rows (runs along the innermost axis) are whole 16-byte vectors, operands of any
// strides: a thread owns one vector of the result and finds its place with one division per axis,
// where a thread per element would need a division for each. Neighbouring threads own neighbours of
// a row. A row-broadcast operand is one load for the vector; the branches on the access are the
// same for the whole grid.
template <class T, class index_t>
__global__ void add_rows_kernel(AddRows rows) {
  using acc = acc_t<T>;
  constexpr int kVector = kAddVector<T>;
  const AddParams& p = rows.params;
  const auto row_vectors = static_cast<index_t>(rows.row_vectors);
  const auto alpha = static_cast<acc>(p.alpha);
  const int64_t vectors = p.loop.numel / kVector;
  for (int64_t i = first_item(); i < vectors; i += item_step()) {
    index_t row = static_cast<index_t>(i) / row_vectors;
    const index_t column = (static_cast<index_t>(i) - row * row_vectors) * kVector;
    index_t offset[3] = {};
    for (int axis = 1; axis < p.loop.axes; ++axis) {
      const auto size = static_cast<index_t>(p.loop.size[axis]);
      const index_t next = row / size;
      const index_t index = row - next * size;
      row = next;
      for (int operand = 0; operand < 3; ++operand) {
        offset[operand] += index * static_cast<index_t>(p.loop.stride[operand][axis]);
      }
    }
    const auto* a = static_cast<const T*>(p.a.data);
    const auto* b = static_cast<const T*>(p.b.data);
    acc left[kVector], right[kVector];
    load_add_row<T>(rows.a,
                    a ? a + offset[kAddA] : nullptr,
                    column,
                    static_cast<index_t>(p.loop.stride[kAddA][0]),
                    add_number<T>(p.a),
                    left);
    load_add_row<T>(rows.b,
                    b ? b + offset[kAddB] : nullptr,
                    column,
                    static_cast<index_t>(p.loop.stride[kAddB][0]),
                    add_number<T>(p.b),
                    right);
    AddVector<T> sum;
#pragma unroll
    for (int v = 0; v < kVector; ++v) sum.value[v] = add_value<T>(left[v], right[v], alpha);
    *reinterpret_cast<AddVector<T>*>(static_cast<T*>(p.out) + offset[kAddOut] + column) = sum;
  }
}

// What is left: rows that are no whole vectors. One thread per element, which finds its place by
// dividing the linear index through the merged axes, with neighbours along the output's fastest
// axis. index_t is 32-bit where all offsets fit: 64-bit divisions cost more than the sum's memory
// traffic. An operand without data is a number.
template <class T, class index_t>
__global__ void add_strided_kernel(AddParams p) {
  const auto* a = static_cast<const T*>(p.a.data);
  const auto* b = static_cast<const T*>(p.b.data);
  auto* out = static_cast<T*>(p.out);
  const auto alpha = static_cast<acc_t<T>>(p.alpha);
  for (int64_t i = first_item(); i < p.loop.numel; i += item_step()) {
    index_t offset[3];
    offsets_of(p.loop, static_cast<index_t>(i), offset);
    const acc_t<T> left = a ? static_cast<acc_t<T>>(a[offset[kAddA]]) : add_number<T>(p.a);
    const acc_t<T> right = b ? static_cast<acc_t<T>>(b[offset[kAddB]]) : add_number<T>(p.b);
    out[offset[kAddOut]] = add_value<T>(left, right, alpha);
  }
}

}  // namespace opzoo
