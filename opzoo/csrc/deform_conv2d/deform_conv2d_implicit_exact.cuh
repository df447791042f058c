// SPDX-License-Identifier: Apache-2.0
// The tiles of a product of tf32 parts that parts cannot compute. No torch.
#pragma once

#include "deform_conv2d/deform_conv2d_implicit_produce.cuh"

namespace opzoo {

// The tile again with ordinary fp32 arithmetic, for the numbers that two tf32 parts cannot hold:
// sums in shared memory, as stage_sums leaves them, of this block's channels. All threads.
template <class Tile>
__device__ void sum_tile_exactly(const DeformConvImplicitParams& p,
                                 const ImplicitBlock<Tile>& block,
                                 const typename Tile::Sums& sums) {
  constexpr int kThreads = kImplicitThreads;
  const int thread = static_cast<int>(threadIdx.x);
  float* samples = sums.sums + Tile::Sums::kFloats;  // [row][channel]
  const int64_t k = static_cast<int64_t>(blockIdx.y) * Tile::kColumns + thread % Tile::kColumns;
  const int group_chunks = static_cast<int>(p.conv.group_channels() / Tile::kChunk);
  for (int chunk = block.first_chunk; chunk < block.end_chunk; ++chunk) {
    __syncthreads();  // the last chunk's plan is not needed any more
    plan_samples<float, Tile::kPixels, kThreads>(
        p, block.tile, chunk / group_chunks, thread, block.sources, block.weights);
    for (int tap = 0; tap < block.taps; ++tap) {
      __syncthreads();  // the plan is complete, the last tap's samples have been read
      for (int i = thread; i < Tile::kPixels * 8; i += kThreads) {
        const int entry = tap * Tile::kPixels + i / 8;
        const uint4* channels = static_cast<const uint4*>(p.conv.input) + chunk * 8 + i % 8;
        uint4 corners[4];
        load_corners(channels, block.sources[entry], corners);
        reinterpret_cast<uint4*>(samples)[i] = blend_corners<float>(corners, block.weights[entry]);
      }
      __syncthreads();
      for (int row = thread / Tile::kColumns; row < Tile::kPixels;
           row += kThreads / Tile::kColumns) {
        float& total = *sums.at(row, thread % Tile::kColumns);
        float sum = chunk == block.first_chunk && tap == 0 ? 0 : total;
        for (int c = 0; k < p.conv.K && c < Tile::kChunk; ++c) {
          const float weight = static_cast<const float*>(
              p.weight)[k * p.weight_strides.n + (chunk * Tile::kChunk + c) * p.weight_strides.c +
                        tap / p.conv.kernel_w * p.weight_strides.y +
                        tap % p.conv.kernel_w * p.weight_strides.x];
          sum += weight * samples[row * Tile::kChunk + c];
        }
        total = sum;
      }
    }
  }
}

}  // namespace opzoo
