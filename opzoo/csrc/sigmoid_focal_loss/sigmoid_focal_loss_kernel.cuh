// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "common/launch.cuh"
#include "sigmoid_focal_loss/sigmoid_focal_loss.h"

namespace opzoo {

template <class T>
constexpr int kFocalVector = 16 / sizeof(T);

template <class T>
struct alignas(16) FocalVector {
  T value[kFocalVector<T>];
};

// Dense operands on 16-byte boundaries. A thread owns one 16-byte vector of the result and
// neighbours own neighbours: a warp moves 512 bytes of each operand in one instruction. Of class
// ids (kClasses) it reads one per row that its vector touches. The last numel % vector elements go
// to the first threads, one each.
template <class T, bool kBackward, bool kClasses>
__global__ void focal_dense_kernel(SigmoidFocalLossParams p) {
  using acc = acc_t<T>;
  constexpr int kVector = kFocalVector<T>;
  const auto* inputs = static_cast<const T*>(p.inputs);
  const auto* grads = static_cast<const T*>(p.grad);
  const auto* labels = static_cast<const T*>(p.targets);
  const auto* ids = static_cast<const int64_t*>(p.targets);
  auto* out = static_cast<T*>(p.out);
  const auto alpha = static_cast<acc>(p.alpha), gamma = static_cast<acc>(p.gamma);
  const int64_t vectors = p.loop.numel / kVector;
  for (int64_t i = first_item(); i < vectors; i += item_step()) {
    const auto x = reinterpret_cast<const FocalVector<T>*>(inputs)[i];
    FocalVector<T> grad{}, label{}, result;
    if constexpr (kBackward) grad = reinterpret_cast<const FocalVector<T>*>(grads)[i];
    int64_t row = 0, column = 0, id = 0;
    if constexpr (kClasses) {
      const int64_t item = i * kVector;  // the wide division costs more than the loss
      row = p.loop.numel <= 0xffffffff
                ? static_cast<uint32_t>(item) / static_cast<uint32_t>(p.classes)
                : item / p.classes;
      column = i * kVector - row * p.classes;
      id = ids[row];
    } else {
      label = reinterpret_cast<const FocalVector<T>*>(labels)[i];
    }
#pragma unroll
    for (int v = 0; v < kVector; ++v) {
      acc t;
      if constexpr (kClasses) {
        t = id == column ? 1 : 0;
        if (++column == p.classes && v + 1 < kVector) {
          column = 0;
          id = ids[++row];
        }
      } else {
        t = static_cast<acc>(label.value[v]);
      }
      result.value[v] = static_cast<T>(focal_value<kBackward>(
          static_cast<acc>(x.value[v]), t, static_cast<acc>(grad.value[v]), alpha, gamma));
    }
    reinterpret_cast<FocalVector<T>*>(out)[i] = result;
  }
  for (int64_t i = vectors * kVector + first_item(); i < p.loop.numel; i += item_step()) {
    const acc t = focal_target<T>(p, i, kClasses ? i / p.classes : i);
    const acc grad = kBackward ? static_cast<acc>(grads[i]) : acc(0);
    out[i] =
        static_cast<T>(focal_value<kBackward>(static_cast<acc>(inputs[i]), t, grad, alpha, gamma));
  }
}

// Operands of any strides, one element a thread. index_t is 32-bit where all offsets fit: 64-bit
// divisions would cost more than the memory traffic.
template <class T, class index_t>
__global__ void focal_strided_kernel(SigmoidFocalLossParams p) {
  using acc = acc_t<T>;
  const auto alpha = static_cast<acc>(p.alpha), gamma = static_cast<acc>(p.gamma);
  for (int64_t i = first_item(); i < p.loop.numel; i += item_step()) {
    index_t offset[4];
    offsets_of(p.loop, static_cast<index_t>(i), offset);
    const auto x = static_cast<acc>(static_cast<const T*>(p.inputs)[offset[kFocalInputs]]);
    const acc t = focal_target<T>(p, i, offset[kFocalTargets]);
    T& out = static_cast<T*>(p.out)[i];
    if (p.grad) {
      const auto grad = static_cast<acc>(static_cast<const T*>(p.grad)[offset[kFocalGrad]]);
      out = static_cast<T>(focal_value<true>(x, t, grad, alpha, gamma));
    } else {
      out = static_cast<T>(focal_value<false>(x, t, acc(0), alpha, gamma));
    }
  }
}

}  // namespace opzoo
