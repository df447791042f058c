// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "common/atomics.cuh"
#include "common/launch.cuh"
#include "ms_deform_attn/ms_deform_attn.h"

namespace opzoo {

constexpr int kAttnBlock = 256;
constexpr int kAttnPlanBytes = 32768;  // of shared memory for the plans of a block
constexpr int kAttnMaxLevels = 64;     // beside them

template <class T, int kVector>
struct alignas(sizeof(T) * kVector) AttnVector {
  T value[kVector];
};

// What all lanes of a head need of one sample, worked out once: where its four pixels lie, in
// vectors from the first pixel's on, and what it takes of each.
template <class acc, class index_t>
struct alignas(16) AttnForwardPlan {
  index_t offset[4];
  acc weight[4];  // times the attention

  __device__ __forceinline__ void set(const AttnSample<acc>& s,
                                      const AttnLevel&,
                                      acc attention,
                                      int64_t pitch) {
#pragma unroll
    for (int corner = 0; corner < 4; ++corner) {
      offset[corner] = static_cast<index_t>(s.pixel[corner] * pitch);
      weight[corner] = s.inside ? attention * s.weight[corner] : acc(0);
    }
  }
};

template <class acc, class index_t>
struct alignas(16) AttnBackwardPlan {
  index_t offset[4];
  acc weight[4];
  acc slope_x[4], slope_y[4];  // per unit of the location
  acc attention;

  __device__ __forceinline__ void set(const AttnSample<acc>& s,
                                      const AttnLevel& level,
                                      acc attended,
                                      int64_t pitch) {
    attention = attended;
#pragma unroll
    for (int corner = 0; corner < 4; ++corner) {
      offset[corner] = static_cast<index_t>(s.pixel[corner] * pitch);
      weight[corner] = s.inside ? s.weight[corner] : acc(0);
      slope_x[corner] = s.inside ? s.slope_x[corner] * static_cast<acc>(level.width) : acc(0);
      slope_y[corner] = s.inside ? s.slope_y[corner] * static_cast<acc>(level.height) : acc(0);
    }
  }
};

// How a block lies: `lanes` threads side by side for the channels of a head of one query, then
// `rows` queries one after the other. So a block holds neighbouring queries of one head, whose
// samples meet in the same pixels, in L1. A query's samples are planned `chunk` at a time.
struct AttnBlock {
  int lanes, rows, chunk;
  int64_t query_blocks;  // of one head
};

// The queries that a block works on at a time.
struct AttnQueries {
  int64_t first_row;     // of [B, Q, M]; the next query's is M rows on
  int64_t first_vector;  // of value, for lane 0: the first pixel of the item, in this head
  int count;

  __device__ __forceinline__ AttnQueries(const MsDeformAttnParams& p,
                                         const AttnBlock& block,
                                         int64_t unit) {
    const int64_t head = unit / block.query_blocks;  // of all items
    const int64_t b = head / p.M, m = head - b * p.M;
    const int64_t first = (unit - head * block.query_blocks) * block.rows;
    first_row = (b * p.Q + first) * p.M + m;
    first_vector = (b * p.S * p.M + m) * block.lanes;
    count = static_cast<int>(min(p.Q - first, static_cast<int64_t>(block.rows)));
  }
};

// A block's plans, [query][sample of the chunk], and the levels, checked once.
template <class Plan>
struct AttnShared {
  Plan* plans;
  AttnLevel* levels;

  __device__ __forceinline__ AttnShared(char* shared, const MsDeformAttnParams& p)
      : plans(reinterpret_cast<Plan*>(shared)),
        levels(reinterpret_cast<AttnLevel*>(shared + kAttnPlanBytes)) {
    for (int l = threadIdx.x; l < p.L; l += kAttnBlock) levels[l] = attn_level(p, l);
  }

  // Samples [first, first + count) of every query. All threads call it, and meet before and after.
  template <class acc, class C>
  __device__ __forceinline__ void fill(const MsDeformAttnParams& p,
                                       const AttnBlock& block,
                                       const AttnQueries& queries,
                                       int first,
                                       int count) {
    const int64_t pitch = p.M * block.lanes;  // vectors from pixel to pixel
    const int points = static_cast<int>(p.P);
    __syncthreads();  // the plans before have been read; the first time, the levels are there
    for (int i = threadIdx.x; i < queries.count * count; i += kAttnBlock) {
      const int query = i / count, sample = i - query * count;
      const int64_t k = (queries.first_row + query * p.M) * p.samples() + first + sample;
      const C* location = static_cast<const C*>(p.locations) + 2 * k;
      const AttnLevel level = levels[(first + sample) / points];
      plans[query * block.chunk + sample].set(
          attn_sample<acc>(level, static_cast<acc>(location[0]), static_cast<acc>(location[1])),
          level,
          static_cast<acc>(static_cast<const C*>(p.weights)[k]),
          pitch);
    }
    __syncthreads();
  }
};

// D is lanes * kVector, value on a boundary of kVector elements; see AttnBlock.
template <class T, class C, class index_t, int kVector>
__global__ void __launch_bounds__(kAttnBlock)
    attn_forward_kernel(const __grid_constant__ MsDeformAttnParams p, const AttnBlock block) {
  using acc = acc_t<T>;
  using Vector = AttnVector<T, kVector>;
  using Plan = AttnForwardPlan<acc, index_t>;
  extern __shared__ __align__(16) char memory[];
  AttnShared<Plan> shared(memory, p);
  const int query = static_cast<int>(threadIdx.x) / block.lanes;
  const int lane = static_cast<int>(threadIdx.x) - query * block.lanes;
  const int samples = static_cast<int>(p.samples());
  for (int64_t unit = blockIdx.x; unit < p.B * p.M * block.query_blocks; unit += gridDim.x) {
    const AttnQueries queries(p, block, unit);
    const Vector* channels = static_cast<const Vector*>(p.value) + queries.first_vector + lane;
    acc sum[kVector] = {};
    for (int first = 0; first < samples; first += block.chunk) {
      const int count = min(samples - first, block.chunk);
      shared.template fill<acc, C>(p, block, queries, first, count);
      if (query >= queries.count) continue;
#pragma unroll 2
      for (int i = 0; i < count; ++i) {
        const Plan plan = shared.plans[query * block.chunk + i];
        Vector pixel[4];
#pragma unroll
        for (int corner = 0; corner < 4; ++corner) pixel[corner] = channels[plan.offset[corner]];
#pragma unroll
        for (int corner = 0; corner < 4; ++corner) {
          // The same for all lanes of the head. A weight of 0 keeps an infinite pixel out.
          if (plan.weight[corner] == acc(0)) continue;
#pragma unroll
          for (int v = 0; v < kVector; ++v) {
            sum[v] += plan.weight[corner] * static_cast<acc>(pixel[corner].value[v]);
          }
        }
      }
    }
    if (query >= queries.count) continue;
    Vector result;
#pragma unroll
    for (int v = 0; v < kVector; ++v) result.value[v] = static_cast<T>(sum[v]);
    static_cast<Vector*>(p.out)[(queries.first_row + query * p.M) * block.lanes + lane] = result;
  }
}

// Heads of any D, any number of levels: a thread owns a channel of a head of a query.
template <class T, class C>
__global__ void attn_forward_any_kernel(MsDeformAttnParams p, int64_t items) {
  using acc = acc_t<T>;
  for (int64_t item = first_item(); item < items; item += item_step()) {
    const int64_t row = item / p.D, d = item - row * p.D;
    const int64_t m = row % p.M, b = row / (p.M * p.Q);
    const T* channel = static_cast<const T*>(p.value) + (b * p.S * p.M + m) * p.D + d;
    acc sum = 0;
    for (int64_t k = row * p.samples(); k < (row + 1) * p.samples(); ++k) {
      const C* location = static_cast<const C*>(p.locations) + 2 * k;
      const AttnLevel level = attn_level(p, (k - row * p.samples()) / p.P);
      const auto sample =
          attn_sample<acc>(level, static_cast<acc>(location[0]), static_cast<acc>(location[1]));
      const acc attention = static_cast<acc>(static_cast<const C*>(p.weights)[k]);
      for (int corner = 0; sample.inside && corner < 4; ++corner) {
        const acc weight = attention * sample.weight[corner];
        if (weight != acc(0))
          sum += weight * static_cast<acc>(channel[sample.pixel[corner] * p.M * p.D]);
      }
    }
    static_cast<T*>(p.out)[item] = static_cast<T>(sum);
  }
}

// The sum of value over the group of `lanes` neighbouring threads; a power of two, at most 32.
template <class acc>
__device__ __forceinline__ acc sum_over_lanes(acc value, int lanes) {
  for (int step = lanes / 2; step > 0; step /= 2) {
    value += __shfl_xor_sync(0xffffffffu, value, step);
  }
  return value;
}

// The same places. A thread reads its channels of the gradient once; of each sample it adds to
// grad_value at the four pixels, and the lanes of a head sum what the location and the weight get,
// which the first of them writes: those two gradients have one owner and one order. Threads without
// a query of their own go along with the last one's and write nothing: whole warps meet in the
// shuffles.
template <class T, class C, class index_t, int kVector>
__global__ void __launch_bounds__(kAttnBlock)
    attn_backward_kernel(const __grid_constant__ MsDeformAttnParams p, const AttnBlock block) {
  using acc = acc_t<T>;
  using Vector = AttnVector<T, kVector>;
  using Plan = AttnBackwardPlan<acc, index_t>;
  extern __shared__ __align__(16) char memory[];
  AttnShared<Plan> shared(memory, p);
  const int own = static_cast<int>(threadIdx.x) / block.lanes;
  const int lane = static_cast<int>(threadIdx.x) - own * block.lanes;
  const int samples = static_cast<int>(p.samples());
  for (int64_t unit = blockIdx.x; unit < p.B * p.M * block.query_blocks; unit += gridDim.x) {
    const AttnQueries queries(p, block, unit);
    const bool active = own < queries.count;
    const int query = min(own, queries.count - 1);
    const int64_t row = queries.first_row + query * p.M;
    const Vector* channels = static_cast<const Vector*>(p.value) + queries.first_vector + lane;
    acc* targets = static_cast<acc*>(p.grad_value) + (queries.first_vector + lane) * kVector;
    const Vector given = static_cast<const Vector*>(p.grad)[row * block.lanes + lane];
    acc grad[kVector];
#pragma unroll
    for (int v = 0; v < kVector; ++v) grad[v] = static_cast<acc>(given.value[v]);
    for (int first = 0; first < samples; first += block.chunk) {
      const int count = min(samples - first, block.chunk);
      shared.template fill<acc, C>(p, block, queries, first, count);
      for (int i = 0; i < count; ++i) {
        const Plan& plan = shared.plans[query * block.chunk + i];
        Vector pixel[4];
#pragma unroll
        for (int corner = 0; corner < 4; ++corner) pixel[corner] = channels[plan.offset[corner]];
        acc to_weight = 0, to_x = 0, to_y = 0;
#pragma unroll
        for (int corner = 0; corner < 4; ++corner) {
          acc dot = 0;
#pragma unroll
          for (int v = 0; v < kVector; ++v)
            dot += grad[v] * static_cast<acc>(pixel[corner].value[v]);
          const acc weight = plan.weight[corner];
          if (weight != acc(0)) to_weight += weight * dot;
          if (plan.slope_x[corner] != acc(0)) to_x += plan.slope_x[corner] * dot;
          if (plan.slope_y[corner] != acc(0)) to_y += plan.slope_y[corner] * dot;
          if (p.grad_value && active && weight != acc(0)) {
            atomic_add_scaled<kVector>(
                targets + static_cast<int64_t>(plan.offset[corner]) * kVector,
                grad,
                plan.attention * weight);
          }
        }
        to_weight = sum_over_lanes(to_weight, block.lanes);
        to_x = sum_over_lanes(to_x, block.lanes);
        to_y = sum_over_lanes(to_y, block.lanes);
        if (active && lane == 0) {
          const int64_t k = row * samples + first + i;
          static_cast<C*>(p.grad_weights)[k] = static_cast<C>(to_weight);
          C* to_location = static_cast<C*>(p.grad_locations) + 2 * k;
          to_location[0] = static_cast<C>(plan.attention * to_x);
          to_location[1] = static_cast<C>(plan.attention * to_y);
        }
      }
    }
  }
}

// Heads of any D, any number of levels: a thread owns a sample and walks the channels.
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
