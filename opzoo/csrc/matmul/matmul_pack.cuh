// SPDX-License-Identifier: Apache-2.0
// Operands laid out for the copy engine. No torch.
#pragma once

#include <type_traits>

#include "common/launch.cuh"
#include "matmul/matmul.h"

namespace opzoo {

constexpr int kPackTile = 64;

struct MatmulPackParams {
  const void* source = nullptr;
  void* target = nullptr;
  int64_t lines = 0, terms = 0;  // rows of a or columns of b; K
  int64_t line = 0, depth = 0;   // strides of source
  int64_t pitch = 0;             // stride of a line in target, at least terms
  StridedLoop<3> batches;
  int operand = kMatmulA;
  int64_t items = 1;  // batch items to write: 1 where all share one matrix
};

// The tf32 number nearest to value, ties away from zero, as fp32; the largest finite ones round
// down, so that only inf is inf.
__device__ __forceinline__ float round_to_tf32(float value) {
  const uint32_t bits = bit_cast<uint32_t>(value);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return bit_cast<float>(0x7fffe000u);  // NaN in the upper bits too
  const uint32_t rounded = magnitude < 0x7f7ff000u ? bits + 0x1000u : bits;
  return bit_cast<float>(rounded & ~0x1fffu);
}

// target[item, part, line, term] = source[item, line, term]: along k without gaps, whatever source
// looks like. For fp32 part 0 is the tf32 number hi nearest to the element; with kParts = 2 part 1
// is the one nearest to what is left, and hi + lo has 22 bits of fraction (fewer below 2^-103,
// where lo is subnormal). That fails for NaN and inf (inf - inf), and beyond 2^63, where hi * lo
// may overflow to an inf of the other sign than hi * hi; then *too_large becomes 1.
//
// One block per tile of 64 lines x 64 terms. It is read along the axis on which source is
// contiguous and written along k, both coalesced, through shared memory with an odd pitch.
template <class T, int kParts>
__global__ void __launch_bounds__(kBlockSize)
    matmul_pack_kernel(const __grid_constant__ MatmulPackParams p, int* too_large) {
  __shared__ T tile[kPackTile][kPackTile + (sizeof(T) == 2 ? 2 : 1)];
  const T* source = static_cast<const T*>(p.source);
  T* target = static_cast<T*>(p.target);
  const int fast = static_cast<int>(threadIdx.x) % kPackTile;
  const int slow = static_cast<int>(threadIdx.x) / kPackTile;
  constexpr int kSlowStep = kBlockSize / kPackTile;
  const bool along_lines = p.line == 1 && p.depth != 1;
  const int64_t across = div_up<int64_t>(p.terms, kPackTile);
  const int64_t down = div_up<int64_t>(p.lines, kPackTile);

  for (int64_t index = blockIdx.x; index < across * down * p.items; index += gridDim.x) {
    const int64_t term = index % across * kPackTile;
    const int64_t line = index / across % down * kPackTile;
    const int64_t item = index / (across * down);
    int64_t offset[3];
    offsets_of(p.batches, item, offset);
    const T* from = source + offset[p.operand] + line * p.line + term * p.depth;
#pragma unroll
    for (int i = slow; i < kPackTile; i += kSlowStep) {
      const int l = along_lines ? fast : i;
      const int t = along_lines ? i : fast;
      if (line + l < p.lines && term + t < p.terms) tile[l][t] = from[l * p.line + t * p.depth];
    }
    __syncthreads();  // the tile is complete
    T* to = target + (item * kParts * p.lines + line) * p.pitch + term;
#pragma unroll
    for (int l = slow; l < kPackTile; l += kSlowStep) {
      if (line + l >= p.lines || term + fast >= p.terms) continue;
      const T value = tile[l][fast];
      if constexpr (std::is_same_v<T, float>) {
        const float high = round_to_tf32(value);
        to[l * p.pitch + fast] = high;
        if constexpr (kParts == 2) {
          to[(p.lines + l) * p.pitch + fast] = round_to_tf32(value - high);
          if (!(fabsf(value) <= 0x1p63f)) *too_large = 1;  // NaN too
        }
      } else {
        to[l * p.pitch + fast] = value;
      }
    }
    __syncthreads();  // everyone has read the tile before the next one overwrites it
  }
}

}  // namespace opzoo
