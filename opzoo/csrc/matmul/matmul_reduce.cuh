// SPDX-License-Identifier: Apache-2.0
// Adds what the ranges of a split sum came to. No torch.
#pragma once

#include "common/launch.cuh"
#include "common/types.h"

namespace opzoo {

// out[i, m, n] = the sum over split, in this order, of partial[i, split, m, n]: the same bits
// whichever range was done first. Rows of partial are `pitch` elements apart. One thread per
// element of out, neighbouring threads along n. Does nothing where `skip` points to a value other
// than 0.
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
  for (int64_t i = first_item(); i < items * M * N; i += item_step()) {
    const int64_t line = i / N;
    const int64_t item = line / M;
    const acc_t<Out>* source = partial + (item * (splits - 1) * M + line) * pitch + (i - line * N);
    acc_t<Out> sum = *source;
    for (int split = 1; split < splits; ++split) sum += source[split * M * pitch];
    out[i] = static_cast<Out>(sum);
  }
}

}  // namespace opzoo
