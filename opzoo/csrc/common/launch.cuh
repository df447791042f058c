// SPDX-License-Identifier: Apache-2.0
// Shapes of grids. No torch.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "common/types.h"

namespace opzoo {

constexpr int kBlockSize = 256;

// Blocks for one thread per item. Capped: a grid-stride loop takes the rest, and the cap is far
// above what fills a GPU.
inline unsigned grid_for(int64_t items, int block_size = kBlockSize) {
  constexpr int64_t kMaxBlocks = 1 << 20;
  return static_cast<unsigned>(
      std::clamp<int64_t>(div_up<int64_t>(items, block_size), 1, kMaxBlocks));
}

// for (int64_t i : all items of this thread): indices are 64-bit from the first multiplication on.
__device__ __forceinline__ int64_t first_item() {
  return static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}
__device__ __forceinline__ int64_t item_step() {
  return static_cast<int64_t>(gridDim.x) * blockDim.x;
}

}  // namespace opzoo
