// SPDX-License-Identifier: Apache-2.0
// Matrix products without tensor cores: fp64, fp32 "ieee", and whatever the other kernels leave.
#pragma once

#include <type_traits>

#include "common/launch.cuh"
#include "matmul/matmul.h"

namespace opzoo {

// Work mapping of matmul_kernel, for kQuads = 2 (in parentheses 1). A block of 256 threads owns 128
// x 128 (64 x 64) outputs and walks along k in steps of 8 (16). Its 8 warps lie 2 down, 4 across,
// and own 64 x 32 (32 x 16) each; the 32 lanes of a warp lie 8 down, 4 across, two columns of lanes
// to a half-warp, so that a half-warp reads 8 neighbouring pieces of a and 2 of b. A thread owns 8
// x 8 (4 x 4) outputs: quads of 4 x 4, 32 rows and 16 columns apart, which keeps what a warp reads
// at a time contiguous. Per term of the sum a thread reads 4 (2) pieces of 16 bytes and does 64
// (16) multiply-adds.
template <int kQuads>
constexpr int kMatmulTile = 64 * kQuads;
template <int kQuads>
constexpr int kMatmulDepth = 16 / kQuads;
// 4 elements of padding keep rows 16-byte aligned and spread a column over the banks.
template <int kQuads>
constexpr int kMatmulPitch = kMatmulTile<kQuads> + 4;

struct MatmulTiled : MatmulParams {
  // Four neighbours along the axis of stride 1 can be read as one vector, wherever a piece starts.
  bool a_aligned = false, b_aligned = false;
  int splits = 1;           // K is cut into so many ranges,
  int64_t k_per_split = 0;  // each a multiple of 16 long but the last
  void* partial = nullptr;  // with splits > 1: their sums [item, split, M, N], in acc_t
};

// Four neighbouring elements, with the alignment of a vector where hardware has one that wide.
template <class T>
struct alignas(sizeof(T) * 4 < 16 ? sizeof(T) * 4 : 16) MatmulPiece {
  T value[4];
};

// What one thread moves of a [kMatmulDepth terms][kMatmulTile lines] tile: a piece of 4 elements of
// one line or of one term. Lines are rows of a or columns of b. The piece stays in registers
// between the read from device memory and the write to shared memory, while the tile before is
// multiplied. All that is 64-bit is decided before the loop; in it the pointer only advances.
template <class T, int kQuads>
struct MatmulFetch {
  static constexpr int kLines = kMatmulTile<kQuads>;
  static constexpr int kDepth = kMatmulDepth<kQuads>;
  static_assert(kLines * kDepth == 4 * kBlockSize);
  const T* source;
  int64_t step;      // between the elements of a piece
  int64_t advance;   // from one tile to the next
  int line, term;    // where the piece starts
  int lines;         // how many lines exist from there on, up to the end of the tile
  bool along_depth;  // pieces are of one line
  bool aligned;      // a whole piece can be read as one vector
  MatmulPiece<T> piece;

  __device__ __forceinline__ MatmulFetch(
      const T* base, int64_t line_stride, int64_t depth_stride, int64_t line_count, bool vectors)
      : advance(depth_stride * kDepth),
        along_depth(depth_stride == 1 && line_stride != 1),
        aligned(vectors) {
    const int index = static_cast<int>(threadIdx.x);
    line = along_depth ? index / (kDepth / 4) : index % (kLines / 4) * 4;
    term = along_depth ? index % (kDepth / 4) * 4 : index / (kLines / 4);
    step = along_depth ? depth_stride : line_stride;
    source = base + line * line_stride + term * depth_stride;
    lines = static_cast<int>(min(line_count, static_cast<int64_t>(kLines))) - line;
  }

  // The next tile, of which `terms` terms exist; zeros stand for what lies outside.
  __device__ __forceinline__ void read(int terms) {
    const int left = lines > 0 && term < terms ? along_depth ? terms - term : lines : 0;
    if (aligned && left >= 4) {
      piece = *reinterpret_cast<const MatmulPiece<T>*>(source);
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) piece.value[j] = j < left ? source[j * step] : T{};
    }
    source += advance;
  }

  __device__ __forceinline__ void write(acc_t<T> (&tile)[kDepth][kMatmulPitch<kQuads>]) const {
    MatmulPiece<acc_t<T>> wide;
#pragma unroll
    for (int j = 0; j < 4; ++j) wide.value[j] = static_cast<acc_t<T>>(piece.value[j]);
    if (along_depth) {
#pragma unroll
      for (int j = 0; j < 4; ++j) tile[term + j][line] = wide.value[j];
    } else {
      *reinterpret_cast<MatmulPiece<acc_t<T>>*>(&tile[term][line]) = wide;
    }
  }
};

// Four sums to columns col.. of a row of N; as one vector where all rows allow it.
template <class Out, class acc>
__device__ __forceinline__ void matmul_write(Out* target, const acc* sum, int64_t N, int64_t col) {
  if (N % 4 == 0) {
    MatmulPiece<Out> piece;
#pragma unroll
    for (int j = 0; j < 4; ++j) piece.value[j] = static_cast<Out>(sum[j]);
    *reinterpret_cast<MatmulPiece<Out>*>(target) = piece;
  } else {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (col + j < N) target[j] = static_cast<Out>(sum[j]);
    }
  }
}

// Two tiles of each operand in shared memory: while one is multiplied, the next comes from device
// memory through registers and goes to the other, so one barrier per step is enough.
//
// A unit of work is a tile of the output and, with p.splits > 1, one range of k of it; the sums of
// a range go to p.partial and are added by matmul_reduce_kernel. Tiles of all batch items are
// numbered in one line; a grid-stride loop covers what the grid does not. Where `only_if` is given,
// the kernel does nothing unless it points to a value other than 0.
//
// Small tiles add 16 terms at a time to their totals: the rounding of a sum grows with its length,
// and short sums of short sums lose a third of what one long one does. Two blocks share a
// multiprocessor, so that one multiplies while the other waits at its barrier.
template <class T, int kQuads>
__global__ void __launch_bounds__(kBlockSize, 2)
    matmul_kernel(const __grid_constant__ MatmulTiled p, const int* only_if) {
  using acc = acc_t<T>;
  constexpr int kTile = kMatmulTile<kQuads>;
  constexpr int kDepth = kMatmulDepth<kQuads>;
  constexpr int kEdge = 4 * kQuads;
  constexpr bool kFolds = kQuads == 1;  // the larger tile has no registers for a second set of sums
  __shared__ alignas(16) acc a_tile[2][kDepth][kMatmulPitch<kQuads>];
  __shared__ alignas(16) acc b_tile[2][kDepth][kMatmulPitch<kQuads>];
  if (only_if != nullptr && *only_if == 0) return;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int first_row = warp / 4 * (kTile / 2) + lane / 2 % 8 * 4;
  const int first_col = warp % 4 * (kTile / 4) + (lane % 2 + lane / 16 * 2) * 4;
  const int64_t tiles = matmul_tile_count(p, kTile, kTile);

  for (int64_t unit = blockIdx.x; unit < tiles * p.splits; unit += gridDim.x) {
    const MatmulTile tile = matmul_tile(p, unit % tiles, kTile, kTile);
    const int64_t split = unit / tiles;
    const int64_t begin = split * p.k_per_split;
    const int64_t terms = min(p.k_per_split, p.K - begin);
    MatmulFetch<T, kQuads> a(
        static_cast<const T*>(p.a) + tile.offset[kMatmulA] + tile.row * p.a_row + begin * p.a_col,
        p.a_row,
        p.a_col,
        p.M - tile.row,
        p.a_aligned);
    MatmulFetch<T, kQuads> b(
        static_cast<const T*>(p.b) + tile.offset[kMatmulB] + tile.col * p.b_col + begin * p.b_row,
        p.b_col,
        p.b_row,
        p.N - tile.col,
        p.b_aligned);
    acc sum[kEdge][kEdge] = {};
    [[maybe_unused]] acc total[kEdge][kEdge] = {};
    a.read(static_cast<int>(min(terms, int64_t{kDepth})));
    b.read(static_cast<int>(min(terms, int64_t{kDepth})));
    a.write(a_tile[0]);
    b.write(b_tile[0]);
    __syncthreads();  // the first tiles are complete

    int current = 0;
    for (int64_t k = kDepth; k < terms + kDepth; k += kDepth) {
      const bool more = k < terms;
      if (more) {
        const int next_terms = static_cast<int>(min(terms - k, int64_t{kDepth}));
        a.read(next_terms);
        b.read(next_terms);
      }
#pragma unroll
      for (int term = 0; term < kDepth; ++term) {
        MatmulPiece<acc> left[kQuads], right[kQuads];
#pragma unroll
        for (int q = 0; q < kQuads; ++q) {
          left[q] = *reinterpret_cast<const MatmulPiece<acc>*>(
              &a_tile[current][term][first_row + q * 32]);
          right[q] = *reinterpret_cast<const MatmulPiece<acc>*>(
              &b_tile[current][term][first_col + q * 16]);
        }
#pragma unroll
        for (int i = 0; i < kEdge; ++i) {
#pragma unroll
          for (int j = 0; j < kEdge; ++j) {
            sum[i][j] += left[i / 4].value[i % 4] * right[j / 4].value[j % 4];
          }
        }
      }
      if constexpr (kFolds) {
#pragma unroll
        for (int i = 0; i < kEdge; ++i) {
#pragma unroll
          for (int j = 0; j < kEdge; ++j) {
            total[i][j] += sum[i][j];
            sum[i][j] = more ? acc(0) : total[i][j];
          }
        }
      }
      if (more) {
        a.write(a_tile[current ^ 1]);
        b.write(b_tile[current ^ 1]);
      }
      __syncthreads();  // the next tiles are complete, and everyone has read these
      current ^= 1;
    }

    // Items of out lie one after the other, so where an item starts in out says its number.
    T* out = static_cast<T*>(p.out) + tile.offset[kMatmulOut];
    acc* partial =
        static_cast<acc*>(p.partial) + tile.offset[kMatmulOut] * p.splits + split * p.M * p.N;
#pragma unroll
    for (int i = 0; i < kEdge; ++i) {
      const int64_t row = tile.row + first_row + i / 4 * 32 + i % 4;
#pragma unroll
      for (int q = 0; q < kQuads; ++q) {
        const int64_t col = tile.col + first_col + q * 16;
        if (row >= p.M || col >= p.N) continue;
        if (p.splits > 1) {
          matmul_write(partial + row * p.N + col, &sum[i][4 * q], p.N, col);
        } else {
          matmul_write(out + row * p.N + col, &sum[i][4 * q], p.N, col);
        }
      }
    }
  }
}

}  // namespace opzoo
