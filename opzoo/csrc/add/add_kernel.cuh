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

// Any strides (0 along a broadcast axis), any alignment: one thread per element, which finds its
// place by dividing the linear index through the merged axes, with neighbours along the output's
// fastest axis. index_t is 32-bit where all offsets fit: 64-bit divisions cost more than the sum's
// memory traffic. An operand without data is a number.
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
