// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "common/atomics.cuh"
#include "common/launch.cuh"
#include "ms_deform_attn/ms_deform_attn.h"

namespace opzoo {

constexpr int kAttnBlock = 256;

template <class T, int kVector>
struct alignas(sizeof(T) * kVector) AttnVector {
  T value[kVector];
};

// Where a thread works: kVector channels of one head of one query. The `lanes` threads of a head
// stand side by side and share its samples; after them come the queries, then heads and items. So a
// block holds neighbouring queries of one head, whose samples meet in the same pixels, in L1.
struct AttnPlace {
  int64_t b, q, m, lane;
};

__device__ __forceinline__ AttnPlace attn_place(const MsDeformAttnParams& p,
                                                int64_t item,
                                                int64_t lanes) {
  const int64_t row = item / lanes;
  const int64_t head = row / p.Q;
  return {head / p.M, row - head * p.Q, head - head / p.M * p.M, item - row * lanes};
}

// D is lanes * kVector, value on a boundary of kVector elements.
template <class T, class C, int kVector>
__global__ void __launch_bounds__(kAttnBlock)
    attn_forward_kernel(MsDeformAttnParams p, int64_t lanes, int64_t items) {
  using acc = acc_t<T>;
  using Vector = AttnVector<T, kVector>;
  for (int64_t item = first_item(); item < items; item += item_step()) {
    const AttnPlace place = attn_place(p, item, lanes);
    const int64_t row = (place.b * p.Q + place.q) * p.M + place.m;
    const C* locations = static_cast<const C*>(p.locations) + row * p.samples() * 2;
    const C* weights = static_cast<const C*>(p.weights) + row * p.samples();
    const T* channels = static_cast<const T*>(p.value) + (place.b * p.S * p.M + place.m) * p.D +
                        place.lane * kVector;
    const int64_t pitch = p.M * p.D;
    acc sum[kVector] = {};
    for (int64_t l = 0; l < p.L; ++l) {
      const AttnLevel level = attn_level(p, l);
#pragma unroll 4
      for (int64_t k = l * p.P; k < (l + 1) * p.P; ++k) {
        const auto sample = attn_sample<acc>(
            level, static_cast<acc>(locations[2 * k]), static_cast<acc>(locations[2 * k + 1]));
        if (!sample.inside) continue;
        const acc attention = static_cast<acc>(weights[k]);
        Vector pixel[4];
#pragma unroll
        for (int corner = 0; corner < 4; ++corner) {
          pixel[corner] = *reinterpret_cast<const Vector*>(channels + sample.pixel[corner] * pitch);
        }
#pragma unroll
        for (int corner = 0; corner < 4; ++corner) {
          const acc weight = attention * sample.weight[corner];
#pragma unroll
          for (int v = 0; v < kVector; ++v)
            sum[v] += weight * static_cast<acc>(pixel[corner].value[v]);
        }
      }
    }
    Vector result;
#pragma unroll
    for (int v = 0; v < kVector; ++v) result.value[v] = static_cast<T>(sum[v]);
    reinterpret_cast<Vector*>(static_cast<T*>(p.out) + row * p.D)[place.lane] = result;
  }
}

// The sum of value over the group of `lanes` neighbouring threads; lanes is a power of two, at
// most 32.
template <class acc>
__device__ __forceinline__ acc sum_over_lanes(acc value, int64_t lanes) {
  for (int step = static_cast<int>(lanes) / 2; step > 0; step /= 2) {
    value += __shfl_xor_sync(0xffffffffu, value, step);
  }
  return value;
}

// The same places. A thread reads its channels of the gradient once; of each sample it adds to
// grad_value at the four pixels, and the lanes of a head sum what the location and the weight get,
// which the first of them writes: those two gradients have one owner and one order. Every thread of
// the grid makes every turn, so that whole warps meet in the shuffles.
template <class T, class C, int kVector>
__global__ void __launch_bounds__(kAttnBlock)
    attn_backward_kernel(MsDeformAttnParams p, int64_t lanes, int64_t items) {
  using acc = acc_t<T>;
  using Vector = AttnVector<T, kVector>;
  const int64_t turns = div_up<int64_t>(items, item_step());
  for (int64_t turn = 0; turn < turns; ++turn) {
    const int64_t item = first_item() + turn * item_step();
    const bool active = item < items;
    const AttnPlace place = attn_place(p, active ? item : 0, lanes);
    const int64_t row = (place.b * p.Q + place.q) * p.M + place.m;
    const int64_t first = (place.b * p.S * p.M + place.m) * p.D + place.lane * kVector;
    const T* channels = static_cast<const T*>(p.value) + first;
    const int64_t pitch = p.M * p.D;
    acc grad[kVector];
    const Vector given =
        reinterpret_cast<const Vector*>(static_cast<const T*>(p.grad) + row * p.D)[place.lane];
#pragma unroll
    for (int v = 0; v < kVector; ++v) grad[v] = static_cast<acc>(given.value[v]);
    for (int64_t l = 0; l < p.L; ++l) {
      const AttnLevel level = attn_level(p, l);
      for (int64_t k = row * p.samples() + l * p.P; k < row * p.samples() + (l + 1) * p.P; ++k) {
        const C* location = static_cast<const C*>(p.locations) + 2 * k;
        const auto sample =
            attn_sample<acc>(level, static_cast<acc>(location[0]), static_cast<acc>(location[1]));
        const acc attention = static_cast<acc>(static_cast<const C*>(p.weights)[k]);
        acc to_weight = 0, to_x = 0, to_y = 0;
        if (active && sample.inside) {
#pragma unroll
          for (int corner = 0; corner < 4; ++corner) {
            const int64_t offset = sample.pixel[corner] * pitch;
            const Vector pixel = *reinterpret_cast<const Vector*>(channels + offset);
            acc dot = 0;
#pragma unroll
            for (int v = 0; v < kVector; ++v) dot += grad[v] * static_cast<acc>(pixel.value[v]);
            to_weight += sample.weight[corner] * dot;
            to_x += sample.slope_x[corner] * dot;
            to_y += sample.slope_y[corner] * dot;
            if (p.grad_value && sample.weight[corner] != 0) {
              atomic_add_scaled<kVector>(static_cast<acc*>(p.grad_value) + first + offset,
                                         grad,
                                         attention * sample.weight[corner]);
            }
          }
        }
        to_weight = sum_over_lanes(to_weight, lanes);
        to_x = sum_over_lanes(to_x, lanes);
        to_y = sum_over_lanes(to_y, lanes);
        if (active && place.lane == 0) {
          static_cast<C*>(p.grad_weights)[k] = static_cast<C>(to_weight);
          C* to_location = static_cast<C*>(p.grad_locations) + 2 * k;
          to_location[0] = static_cast<C>(attention * to_x * static_cast<acc>(level.width));
          to_location[1] = static_cast<C>(attention * to_y * static_cast<acc>(level.height));
        }
      }
    }
  }
}

// Heads of any D: a thread owns a sample and walks the channels.
template <class T, class C>
__global__ void attn_backward_any_kernel(MsDeformAttnParams p, int64_t samples) {
  using acc = acc_t<T>;
  for (int64_t k = first_item(); k < samples; k += item_step()) {
    const int64_t row = k / p.samples();
    const int64_t m = row % p.M, b = row / (p.M * p.Q);
    const AttnLevel level = attn_level(p, (k - row * p.samples()) / p.P);
    const C* location = static_cast<const C*>(p.locations) + 2 * k;
    const auto sample =
        attn_sample<acc>(level, static_cast<acc>(location[0]), static_cast<acc>(location[1]));
    const acc attention = static_cast<acc>(static_cast<const C*>(p.weights)[k]);
    const T* grad = static_cast<const T*>(p.grad) + row * p.D;
    acc to_weight = 0, to_x = 0, to_y = 0;
    for (int corner = 0; sample.inside && corner < 4; ++corner) {
      const int64_t first = ((b * p.S + sample.pixel[corner]) * p.M + m) * p.D;
      const T* pixel = static_cast<const T*>(p.value) + first;
      const acc weight = attention * sample.weight[corner];
      acc dot = 0;
      for (int64_t d = 0; d < p.D; ++d) {
        const acc along = static_cast<acc>(grad[d]);
        dot += along * static_cast<acc>(pixel[d]);
        if (p.grad_value && sample.weight[corner] != 0) {
          atomic_add(static_cast<acc*>(p.grad_value) + first + d, weight * along);
        }
      }
      to_weight += sample.weight[corner] * dot;
      to_x += sample.slope_x[corner] * dot;
      to_y += sample.slope_y[corner] * dot;
    }
    static_cast<C*>(p.grad_weights)[k] = static_cast<C>(to_weight);
    C* to_location = static_cast<C*>(p.grad_locations) + 2 * k;
    to_location[0] = static_cast<C>(attention * to_x * static_cast<acc>(level.width));
    to_location[1] = static_cast<C>(attention * to_y * static_cast<acc>(level.height));
  }
}

}  // namespace opzoo
