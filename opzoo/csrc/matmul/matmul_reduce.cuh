// SPDX-License-Identifier: Apache-2.0
// Adds what the ranges of a split sum came to. No torch.
#pragma once

#include "common/launch.cuh"
#include "common/types.h"

namespace opzoo {

// One block per line of out and kBlockSize columns of it; loops take what a grid does not.
inline dim3 matmul_reduce_grid(int64_t lines, int64_t N) {
  constexpr int64_t kMaxColumnBlocks = 65535;
  const int64_t column_blocks = std::min(div_up<int64_t>(N, kBlockSize), kMaxColumnBlocks);
  return {grid_for(lines, 1), static_cast<unsigned>(column_blocks), 1};
}

// out[i, m, n] = the sum over split, in this order, of partial[i, split, m, n]: the same bits
// whichever range was done first. Rows of partial are `pitch` elements apart. One thread per
// element of out, neighbouring threads along n; the divisions are done once per line. Does nothing
// where `skip` points to a value other than 0.
template <class Out>
__global__ void __launch_bounds__(kBlockSize) matmul_reduce_kernel(Out* out,
                                                                   const acc_t<Out>* partial,
                                                                   int64_t items,
                                                                   int64_t M,
                                                                   int64_t N,
                                                                   int64_t pitch,
                                                                   int splits,
                                                                   const int* skip) {
  if (skip != nullptr && *skip != 0) return;
  for (int64_t line = blockIdx.x; line < items * M; line += gridDim.x) {
    const int64_t item = line / M;
    const acc_t<Out>* source = partial + (item * (splits - 1) * M + line) * pitch;
    for (int64_t n = static_cast<int64_t>(blockIdx.y) * kBlockSize + threadIdx.x; n < N;
         n += static_cast<int64_t>(gridDim.y) * kBlockSize) {
      acc_t<Out> sum = source[n];
#pragma unroll 4
      for (int split = 1; split < splits; ++split) sum += source[split * M * pitch + n];
      out[line * N + n] = static_cast<Out>(sum);
    }
  }
}

}  // namespace opzoo
