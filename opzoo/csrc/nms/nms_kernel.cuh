// SPDX-License-Identifier: Apache-2.0
// Four steps: keys of the scores (sorted by the caller), boxes gathered in score order, a bitmask
// of who overlaps whom, and one block that walks the mask.
//
// The mask is row-major [n][words], words = ceil(n / 64): bit c of word w in row i says that box i,
// if kept, suppresses box 64 * w + c. Only words on and above the diagonal (w >= i / 64) are
// written or read, and in them only bits of later boxes are ever set. At n = 370,728 the mask
// passes 2^31 words, hence 64-bit offsets throughout.
#pragma once

#include "common/launch.cuh"
#include "nms/nms.h"

namespace opzoo {

constexpr int kNmsTile = 64;
constexpr int kNmsReduceThreads = 1024;
constexpr int64_t kNmsSharedWords = 6144;  // 48 KB, what every GPU grants without asking

using NmsWord = unsigned long long;

// One thread per score.
template <class T>
__global__ void nms_key_kernel(NumbersView scores, int64_t n, int64_t* keys) {
  for (int64_t i = first_item(); i < n; i += item_step())
    keys[i] = score_key(load_number<T>(scores, 0, i));
}

// One thread per box in score order. Reads are scattered, writes coalesced. classes may be null.
template <class T>
__global__ void nms_gather_kernel(BoxesView view,
                                  const int64_t* classes,
                                  int64_t class_stride,
                                  const int64_t* order,
                                  int64_t n,
                                  Box<box_acc_t<T>>* sorted_boxes,
                                  int64_t* sorted_classes) {
  for (int64_t rank = first_item(); rank < n; rank += item_step()) {
    const int64_t i = order[rank];
    sorted_boxes[rank] = load_box<T>(view, 0, i);
    if (classes) sorted_classes[rank] = classes[i * class_stride];
  }
}

struct NmsTileIndex {
  int64_t row, column;
};

// Tiles of the upper triangle counted column by column: 0 -> (0, 0), 1 -> (0, 1), 2 -> (1, 1), ...
// The root is off by at most one, which the two loops put right.
__device__ __forceinline__ NmsTileIndex nms_tile(int64_t index) {
  auto column = static_cast<int64_t>((sqrt(8.0 * static_cast<double>(index) + 1.0) - 1.0) * 0.5);
  while (column * (column + 1) / 2 > index) --column;
  while ((column + 1) * (column + 2) / 2 <= index) ++column;
  return {index - column * (column + 1) / 2, column};
}

// One block of 64 threads per 64 x 64 tile of pairs: thread r holds row box r in registers and
// builds its word from the tile's column boxes, which all threads read from shared memory at the
// same address. classes may be null.
template <class acc>
__global__ void nms_mask_kernel(
    const Box<acc>* boxes, const int64_t* classes, int64_t n, acc threshold, NmsWord* mask) {
  __shared__ Box<acc> column_boxes[kNmsTile];
  __shared__ acc column_areas[kNmsTile];
  __shared__ int64_t column_classes[kNmsTile];
  const int64_t words = div_up<int64_t>(n, kNmsTile);
  const int64_t tiles = words * (words + 1) / 2;
  const int r = threadIdx.x;

  for (int64_t index = blockIdx.x; index < tiles; index += gridDim.x) {
    const NmsTileIndex tile = nms_tile(index);
    const int64_t first_column = tile.column * kNmsTile;
    const int64_t left = n - first_column;
    const int columns = left < kNmsTile ? static_cast<int>(left) : kNmsTile;
    __syncthreads();  // the previous tile's columns are still being read until here
    if (r < columns) {
      const Box<acc> box = boxes[first_column + r];
      column_boxes[r] = box;
      column_areas[r] = box_area(box);
      column_classes[r] = classes ? classes[first_column + r] : 0;
    }
    __syncthreads();

    const int64_t row = tile.row * kNmsTile + r;
    if (row >= n) continue;  // whole-block barriers above are reached by every thread again
    const Box<acc> box = boxes[row];
    const acc area = box_area(box);
    const int64_t row_class = classes ? classes[row] : 0;
    NmsWord word = 0;
    for (int c = tile.row == tile.column ? r + 1 : 0; c < columns; ++c) {
      const bool suppresses = row_class == column_classes[c] &&
                              box_iou(box, area, column_boxes[c], column_areas[c]) > threshold;
      word |= static_cast<NmsWord>(suppresses) << c;
    }
    mask[row * words + tile.column] = word;
  }
}

// One block walks the mask from the top, 64 rows at a time. removed[w] holds the bits suppressed so
// far; it must be zero at the start and lives in shared memory when it fits (scratch is null then).
// For each 64 rows:
//   1. one thread decides them in order from their diagonal words, which the first 64 fetched;
//   2. the first 64 write the kept indices, everyone ORs the kept rows into removed, a thread per
//      word, neighbours on neighbouring words.
__global__ void __launch_bounds__(kNmsReduceThreads) nms_reduce_kernel(const NmsWord* mask,
                                                                       const int64_t* order,
                                                                       int64_t n,
                                                                       NmsWord* scratch,
                                                                       int64_t* kept_indices,
                                                                       int64_t* kept_count) {
  extern __shared__ NmsWord shared_removed[];
  __shared__ NmsWord diagonal[kNmsTile];
  __shared__ NmsWord kept_word;
  NmsWord* removed = scratch ? scratch : shared_removed;
  const int64_t words = div_up<int64_t>(n, kNmsTile);
  for (int64_t w = threadIdx.x; w < words; w += blockDim.x) removed[w] = 0;
  int64_t count = 0;

  for (int64_t b = 0; b < words; ++b) {
    const int64_t first_row = b * kNmsTile;
    const int64_t left = n - first_row;
    const int rows = left < kNmsTile ? static_cast<int>(left) : kNmsTile;
    const NmsWord* block_mask = mask + first_row * words;
    if (threadIdx.x < kNmsTile) {
      diagonal[threadIdx.x] = threadIdx.x < rows ? block_mask[threadIdx.x * words + b] : 0;
    }
    __syncthreads();  // diagonal and removed[b] are complete
    if (threadIdx.x == 0) {
      NmsWord gone = removed[b];
      NmsWord kept = 0;
#pragma unroll 8  // all 64 words at once would spill
      for (int r = 0; r < kNmsTile; ++r) {
        if (r < rows && !(gone >> r & 1)) {
          kept |= NmsWord(1) << r;
          gone |= diagonal[r];
        }
      }
      kept_word = kept;
    }
    __syncthreads();  // kept_word is decided; diagonal may be overwritten

    const NmsWord kept = kept_word;
    if (threadIdx.x < kNmsTile && kept >> threadIdx.x & 1) {
      const NmsWord before = kept & ((NmsWord(1) << threadIdx.x) - 1);
      kept_indices[count + __popcll(before)] = order[first_row + threadIdx.x];
    }
    count += __popcll(kept);
    for (int64_t w = b + 1 + threadIdx.x; w < words; w += blockDim.x) {
      NmsWord gone = removed[w];
#pragma unroll 16  // 16 loads in flight: a loop over the set bits alone would wait for each in turn
      for (int r = 0; r < kNmsTile; ++r) {
        if (kept >> r & 1) gone |= block_mask[r * words + w];
      }
      removed[w] = gone;
    }
    // No barrier here: kept_word is written again only after the next one, which also covers
    // removed.
  }
  if (threadIdx.x == 0) *kept_count = count;
}

}  // namespace opzoo
