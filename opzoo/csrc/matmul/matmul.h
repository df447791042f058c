// SPDX-License-Identifier: Apache-2.0
// matmul(a, b): out[*, m, n] = sum over k of a[*, m, k] * b[*, k, n].
//
//   a     [*, M, K], any strides: a transposed view is read where it lies, a broadcast batch axis
//         has stride 0
//   b     [*, K, N], any strides, same batch axes and dtype as a
//   out   [*, M, N], contiguous, in the dtype of a and b: fp64, fp32, fp16 or bf16
//
// Arithmetic: products and sums in fp32 (fp64 for fp64), fused where the machine has a fused
// multiply-add, rounded to the storage type once; on a GPU fp32 may take a cheaper precision, see
// MatmulPrecision. K = 0 gives zeros; M, N and batch axes may be 0. Every term is added, zeros too,
// so NaN and inf follow IEEE. Deterministic: the order of a sum depends on the CPU on K alone, on a
// GPU on the shape and the device, never on threads, strides or timing. No torch in this file.
#pragma once

#include "common/strided.h"
#include "common/types.h"

namespace opzoo {

enum MatmulOperand { kMatmulOut = 0, kMatmulA = 1, kMatmulB = 2 };

struct MatmulParams {
  int64_t M = 0, N = 0, K = 0;
  StridedLoop<3> batches;  // the batch axes: one item per matrix product
  const void* a = nullptr;
  const void* b = nullptr;
  void* out = nullptr;
  int64_t a_row = 0, a_col = 0;  // strides of the matrix axes, in elements
  int64_t b_row = 0, b_col = 0;
};

// A rectangle of one product: its first row and column, and where its batch item starts in each
// operand.
struct MatmulTile {
  int64_t row = 0, col = 0;
  int64_t offset[3] = {};
};

OPZOO_HOST_DEVICE int64_t matmul_tile_count(const MatmulParams& p, int64_t rows, int64_t cols) {
  return p.batches.numel * div_up(p.M, rows) * div_up(p.N, cols);
}

// Tiles of rows x cols are numbered along a row of tiles first, then down, then over the batch.
OPZOO_HOST_DEVICE MatmulTile matmul_tile(const MatmulParams& p,
                                         int64_t index,
                                         int64_t rows,
                                         int64_t cols) {
  const int64_t across = div_up(p.N, cols);
  const int64_t down = div_up(p.M, rows);
  MatmulTile tile;
  tile.col = index % across * cols;
  tile.row = index / across % down * rows;
  offsets_of(p.batches, index / (across * down), tile.offset);
  return tile;
}

}  // namespace opzoo
