// SPDX-License-Identifier: Apache-2.0
// Boxes against all boxes before them: for a few thousand boxes, where any index costs more than it
// saves, and for thresholds below what the cells of nms_sparse_kernel.cuh serve.
#pragma once

#include "nms/nms_kernel.cuh"

namespace opzoo {

constexpr int kNmsDenseWarps = 8;
// Boxes of a warp. Two would halve the loads, yet one is about 5% faster at 1000 to 5000 boxes,
// where warps are few.
constexpr int kNmsDenseRows = 1;
constexpr int kNmsDenseBatch = 4;  // loads in flight per lane
constexpr int kNmsDenseBlockBoxes = kNmsDenseWarps * kNmsDenseRows;

// A warp owns kNmsDenseRows boxes of successive rank; its lanes read 32 earlier boxes at a time,
// coalesced. Pairs inside the warp are settled in registers: no lane may wait for a state that its
// own warp has yet to write.
template <class acc>
__global__ void __launch_bounds__(kNmsDenseWarps * 32) nms_dense_kernel(
    NmsSorted<acc> sorted, NmsProgress progress, int n, int64_t max_output, acc threshold) {
  __shared__ int slots[kNmsDenseWarps][kNmsDenseRows][NmsPending::kCapacity][32];
  __shared__ unsigned ticket;
  __shared__ bool enough;
  const int blocks = div_up(n, kNmsDenseBlockBoxes);
  const bool limited = max_output < n;
  if (threadIdx.x == 0) {
    ticket = atomicAdd(progress.ticket, 1u);
    const int64_t image = ticket / blocks;
    enough = limited && static_cast<int64_t>(
                            *static_cast<volatile unsigned long long*>(progress.frontier + image) &
                            0xffffffffull) >= max_output;
  }
  __syncthreads();
  const int64_t image = ticket / blocks;
  const int block = static_cast<int>(ticket % blocks);
  const Box<acc>* boxes = sorted.boxes + image * sorted.pitch;
  const int64_t* classes = sorted.classes ? sorted.classes + image * sorted.pitch : nullptr;
  NmsState* states = sorted.states + image * sorted.pitch;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int first = block * kNmsDenseBlockBoxes + warp * kNmsDenseRows;

  Box<acc> box[kNmsDenseRows];
  acc area[kNmsDenseRows];
  NmsState state[kNmsDenseRows];
  NmsPending pending[kNmsDenseRows];
  bool open = false;
#pragma unroll
  for (int r = 0; r < kNmsDenseRows; ++r) {
    const bool exists = first + r < n;
    box[r] = exists ? boxes[first + r] : Box<acc>{};
    area[r] = box_area(box[r]);
    state[r] = exists ? states[first + r] : kNmsRemoved;
    if (enough && state[r] == kNmsUndecided) {
      state[r] = kNmsRemoved;
      if (lane == 0) states[first + r] = kNmsRemoved;
    }
    open |= state[r] == kNmsUndecided;
    pending[r].slots = &slots[warp][r][0][lane];
    pending[r].states = states;
  }
  if (open) {
    for (int base = lane; base < first; base += 32 * kNmsDenseBatch) {
      Box<acc> other[kNmsDenseBatch];
#pragma unroll
      for (int k = 0; k < kNmsDenseBatch; ++k) {
        const int i = base + 32 * k;
        other[k] = i < first ? boxes[i] : Box<acc>{};  // an empty box overlaps nothing
      }
      unsigned hits[kNmsDenseRows] = {};
#pragma unroll
      for (int k = 0; k < kNmsDenseBatch; ++k) {
        const acc other_area = box_area(other[k]);
#pragma unroll
        for (int r = 0; r < kNmsDenseRows; ++r) {
          const bool hit = nms_may_overlap(other[k], other_area, box[r], area[r], threshold);
          hits[r] |= static_cast<unsigned>(hit) << k;
        }
      }
#pragma unroll
      for (int r = 0; r < kNmsDenseRows; ++r) {
        for (; hits[r]; hits[r] &= hits[r] - 1) {
          const int i = base + 32 * (__ffs(static_cast<int>(hits[r])) - 1);
          const Box<acc> found = boxes[i];
          if ((!classes || classes[i] == classes[first + r]) &&
              box_iou(found, box_area(found), box[r], area[r]) > threshold) {
            pending[r].add(i);
          }
        }
      }
    }
    __syncwarp();
#pragma unroll
    for (int r = 0; r < kNmsDenseRows; ++r) {
      if (state[r] != kNmsUndecided) continue;
      bool inside = false;
#pragma unroll
      for (int q = 0; q < r; ++q) {
        inside |= state[q] == kNmsKept &&
                  nms_overlaps(box[q], area[q], box[r], area[r], threshold) &&
                  (!classes || classes[first + q] == classes[first + r]);
      }
      state[r] = !inside && pending[r].wait() ? kNmsKept : kNmsRemoved;
      if (lane == 0) *static_cast<volatile NmsState*>(states + first + r) = state[r];
    }
  }
  if (!limited) return;
  int kept = 0;
#pragma unroll
  for (int r = 0; r < kNmsDenseRows; ++r) {
    kept += __syncthreads_count(lane == 0 && state[r] == kNmsKept);
  }
  if (threadIdx.x == 0) {
    nms_advance(
        progress.frontier + image, progress.block_kept + image * blocks, block, kept, blocks);
  }
}

}  // namespace opzoo
