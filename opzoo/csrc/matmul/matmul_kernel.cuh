// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "common/launch.cuh"
#include "matmul/matmul.h"

namespace opzoo {

constexpr int kMatmulTile = 64;   // rows and columns of the output a block owns
constexpr int kMatmulDepth = 16;  // terms of the sum in shared memory at a time
constexpr int kMatmulEdge = 4;    // each thread owns kMatmulEdge x kMatmulEdge outputs
// Four words of padding: rows stay 16-byte aligned for vector loads, and the 16 rows a half-warp
// writes in the transposing case fall on 8 groups of banks instead of one.
constexpr int kMatmulPitch = kMatmulTile + 4;
static_assert(kMatmulTile / kMatmulEdge * (kMatmulTile / kMatmulEdge) == kBlockSize);

// Copies kMatmulTile lines (rows of a or columns of b) of kMatmulDepth terms to target[depth][line]
// and fills what lies outside with zeros. Neighbouring threads take neighbouring elements along
// the axis whose stride is 1, so loads are coalesced for either layout.
template <class T>
__device__ __forceinline__ void matmul_load(acc_t<T> (&target)[kMatmulDepth][kMatmulPitch],
                                            const T* source,
                                            int64_t line_stride,
                                            int64_t depth_stride,
                                            int64_t lines,
                                            int64_t depth) {
  const bool along_depth = depth_stride == 1 && line_stride != 1;
  const int thread = static_cast<int>(threadIdx.x);
#pragma unroll
  for (int item = 0; item < kMatmulTile * kMatmulDepth; item += kBlockSize) {
    const int i = item + thread;
    const int line = along_depth ? i / kMatmulDepth : i % kMatmulTile;
    const int k = along_depth ? i % kMatmulDepth : i / kMatmulTile;
    target[k][line] = line < lines && k < depth
                          ? static_cast<acc_t<T>>(source[line * line_stride + k * depth_stride])
                          : acc_t<T>(0);
  }
}

// One block of 256 threads per 64 x 64 tile of the output, one thread per 4 x 4 outputs of it. Per
// step 64 x 16 of a and 16 x 64 of b pass through shared memory, where every element is read by 16
// threads. Zero-filled edges only reach outputs that are not stored. Tiles of all batch items are
// numbered in one line; a grid-stride loop covers what the grid does not.
template <class T>
__global__ void __launch_bounds__(kBlockSize) matmul_tiled_kernel(MatmulParams p) {
  using acc = acc_t<T>;
  __shared__ alignas(16) acc a_tile[kMatmulDepth][kMatmulPitch];
  __shared__ alignas(16) acc b_tile[kMatmulDepth][kMatmulPitch];
  constexpr int kAcross = kMatmulTile / kMatmulEdge;
  const int first_row = static_cast<int>(threadIdx.x) / kAcross * kMatmulEdge;
  const int first_col = static_cast<int>(threadIdx.x) % kAcross * kMatmulEdge;
  const int64_t tiles = matmul_tile_count(p, kMatmulTile, kMatmulTile);

  for (int64_t index = blockIdx.x; index < tiles; index += gridDim.x) {
    const MatmulTile tile = matmul_tile(p, index, kMatmulTile, kMatmulTile);
    const T* a = static_cast<const T*>(p.a) + tile.offset[kMatmulA] + tile.row * p.a_row;
    const T* b = static_cast<const T*>(p.b) + tile.offset[kMatmulB] + tile.col * p.b_col;
    // One chain of additions over all of K loses digits with its length. Three short ones do not:
    // 16 products, 16 of those sums, and the rest.
    constexpr int kBlockDepth = 16 * kMatmulDepth;
    acc sum[kMatmulEdge][kMatmulEdge] = {};
    acc block[kMatmulEdge][kMatmulEdge] = {};
    for (int64_t k = 0; k < p.K; k += kMatmulDepth) {
      matmul_load(a_tile, a + k * p.a_col, p.a_row, p.a_col, p.M - tile.row, p.K - k);
      matmul_load(b_tile, b + k * p.b_row, p.b_col, p.b_row, p.N - tile.col, p.K - k);
      __syncthreads();  // the tiles are complete before anyone reads them
      acc part[kMatmulEdge][kMatmulEdge] = {};
#pragma unroll
      for (int step = 0; step < kMatmulDepth; ++step) {
        acc left[kMatmulEdge], right[kMatmulEdge];
#pragma unroll
        for (int i = 0; i < kMatmulEdge; ++i) {
          left[i] = a_tile[step][first_row + i];
          right[i] = b_tile[step][first_col + i];
        }
#pragma unroll
        for (int i = 0; i < kMatmulEdge; ++i) {
#pragma unroll
          for (int j = 0; j < kMatmulEdge; ++j) part[i][j] += left[i] * right[j];
        }
      }
      const bool block_ends = (k + kMatmulDepth) % kBlockDepth == 0 || k + kMatmulDepth >= p.K;
#pragma unroll
      for (int i = 0; i < kMatmulEdge; ++i) {
#pragma unroll
        for (int j = 0; j < kMatmulEdge; ++j) {
          block[i][j] += part[i][j];
          if (block_ends) {
            sum[i][j] += block[i][j];
            block[i][j] = acc(0);
          }
        }
      }
      __syncthreads();  // everyone has read the tiles before the next step overwrites them
    }

    T* out = static_cast<T*>(p.out) + tile.offset[kMatmulOut];
#pragma unroll
    for (int i = 0; i < kMatmulEdge; ++i) {
      const int64_t row = tile.row + first_row + i;
#pragma unroll
      for (int j = 0; j < kMatmulEdge; ++j) {
        const int64_t col = tile.col + first_col + j;
        if (row < p.M && col < p.N) out[row * p.N + col] = static_cast<T>(sum[i][j]);
      }
    }
  }
}

}  // namespace opzoo
