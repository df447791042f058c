// SPDX-License-Identifier: Apache-2.0
// Boxes against those nearby: any number of boxes, in memory linear in it.
//
// Every box lies in one cell of one grid: the grid of its class and of its level, the octave of its
// longer side, with cells in proportion to the octave; the cell is that of its centre. Two boxes a
// and b with IoU > t have
//   min(w_a, w_b) > t max(w_a, w_b), and the same for heights: their levels are close;
//   |dx| < (w_a + w_b) / 2 - t max(w_a, w_b) between centres: so are their cells.
// A box visits the levels and the cells these bounds allow. Cells are buckets of a hash table; what
// a bucket holds besides is tested by the exact rule like everything else, so that the grid decides
// how much is tested and never the result.
//
// The bounds hold for real numbers. Centres and cells are in fp64 and the bounds widened by far
// more than what fp32 boxes are rounded by; areas near underflow, which round coarsely, share one
// bucket.
#pragma once

#include "nms/nms_kernel.cuh"

namespace opzoo {

// Below this threshold a box would visit too many levels and cells.
constexpr double kNmsSparseThreshold = 0.25;
constexpr int kNmsSparseWarps = 8;

struct NmsGeometry {
  double threshold;  // a little lower than the true one
  double cell;       // side of a cell over the upper end of its octave

  // One class fills its cells: smaller ones then save more tests than they cost visits.
  NmsGeometry(double true_threshold, bool one_class)
      : threshold(true_threshold * (1 - 0x1p-18)),
        cell(std::max(1 - true_threshold, 0.0625) * (one_class ? 0.5 : 1)) {}
};

struct NmsCells {
  unsigned* keys;  // per rank: bucket
  int2* ranges;    // per bucket: [begin, end) among the boxes sorted by bucket
  unsigned mask;   // buckets - 1, buckets a power of two
};

// Areas that bound what takes part where: boxes smaller than kTiny share a bucket and are looked
// for from areas below kTiny * 16; all others are looked for from areas above kTiny / 16. At
// thresholds from 0.25 on, areas 16 apart never suppress each other.
template <class acc>
constexpr double kNmsTinyArea = sizeof(acc) == 8 ? 0x1p-900 : 0x1p-100;

__device__ __forceinline__ unsigned nms_bucket(
    int64_t class_id, int level, double x, double y, unsigned mask) {
  uint64_t hash = static_cast<uint64_t>(class_id) * 0x9e3779b97f4a7c15ull;
  hash = (hash ^ hash >> 29 ^ static_cast<uint64_t>(static_cast<int64_t>(level))) *
         0xbf58476d1ce4e5b9ull;
  hash = (hash ^ hash >> 32 ^ bit_cast<uint64_t>(x)) * 0x94d049bb133111ebull;
  hash = (hash ^ hash >> 31 ^ bit_cast<uint64_t>(y)) * 0x9e3779b97f4a7c15ull;
  return static_cast<unsigned>(hash >> 32 ^ hash >> 7) & mask;
}

constexpr int kNmsTinyLevel = 1 << 20;

__device__ __forceinline__ double nms_centre(double low, double high) {
  return 0.5 * low + 0.5 * high;
}
// Never -0, which has other bits than the 0 of its cell.
__device__ __forceinline__ double nms_cell_of(double x, double inverse) {
  return floor(x * inverse) + 0.0;
}
__device__ __forceinline__ double nms_inverse_cell(const NmsGeometry& geometry, int level) {
  return scalbn(1 / geometry.cell, -level - 1);
}

// One thread per rank: the box, its state, its bucket. Boxes that no one looks for are spread
// evenly. Clears the buckets' ranges and the counters of the next kernels.
template <class acc>
__global__ void nms_place_kernel(NmsInput in,
                                 NmsSorted<acc> out,
                                 int64_t image,
                                 const int* order,
                                 NmsGeometry geometry,
                                 NmsCells cells,
                                 NmsProgress progress,
                                 int* ranks,
                                 acc threshold) {
  for (int64_t b = first_item(); b <= cells.mask; b += item_step()) cells.ranges[b] = {0, 0};
  for (int64_t b = first_item(); b < div_up(in.n, kNmsSparseWarps); b += item_step()) {
    progress.block_kept[b] = -1;
  }
  if (first_item() == 0) {
    *progress.ticket = 0;
    *progress.frontier = 0;
  }
  for (int64_t at = first_item(); at < in.n; at += item_step()) {
    const int rank = static_cast<int>(at);
    const Box<acc> box = nms_place(in, out, image, order[rank], rank, threshold);
    const acc area = box_area(box);
    unsigned bucket = static_cast<unsigned>(rank) & cells.mask;
    if (out.states[rank] == kNmsUndecided) {
      const int64_t class_id = out.classes ? out.classes[rank] : 0;
      if (area < kNmsTinyArea<acc>) {
        bucket = nms_bucket(class_id, kNmsTinyLevel, 0, 0, cells.mask);
      } else {
        const int level = ilogb(static_cast<double>(max(box.x2 - box.x1, box.y2 - box.y1)));
        const double inverse = nms_inverse_cell(geometry, level);
        bucket = nms_bucket(class_id,
                            level,
                            nms_cell_of(nms_centre(box.x1, box.x2), inverse),
                            nms_cell_of(nms_centre(box.y1, box.y2), inverse),
                            cells.mask);
      }
    }
    cells.keys[rank] = bucket;
    ranks[rank] = rank;
  }
}

// One thread per place in bucket order. Within a bucket, ranks ascend.
template <class acc>
__global__ void nms_bucket_kernel(const unsigned* sorted_keys,
                                  const int* ranks,
                                  const Box<acc>* boxes,
                                  int n,
                                  int2* ranges,
                                  Box<acc>* bucket_boxes) {
  for (int64_t at = first_item(); at < n; at += item_step()) {
    const unsigned key = sorted_keys[at];
    if (at == 0 || sorted_keys[at - 1] != key) ranges[key].x = static_cast<int>(at);
    if (at == n - 1 || sorted_keys[at + 1] != key) ranges[key].y = static_cast<int>(at) + 1;
    bucket_boxes[at] = boxes[ranks[at]];
  }
}

// Half the side of the window, in one axis, that holds the centres of all boxes of side at most
// `upper` which may suppress a box of side `side`; negative if there is none.
__device__ __forceinline__ double nms_reach(double side, double upper, double threshold) {
  const double other = fmin(threshold >= 0.5 ? side : side / threshold, upper);
  return 0.5 * (side + other) - threshold * fmax(side, other);
}

template <class acc>
struct NmsSearch {
  const Box<acc>* bucket_boxes;
  const int* ranks;
  const int64_t* classes;
  int rank;
  Box<acc> box;
  acc area, threshold;
  int64_t class_id;

  // Each lane brings one bucket's range; the warp tests the boxes of all of them, 32 at a time,
  // whatever their lengths. True once a kept suppressor was seen.
  __device__ bool scan(int2 range, NmsPending& pending) const {
    const int lane = threadIdx.x % 32;
    // Ranks ascend and later boxes do not matter: bring the end to within four of the first of
    // them.
    if (range.x < range.y && ranks[range.y - 1] >= rank) {
      int low = range.x;
      while (range.y - low > 4) {
        const int middle = (low + range.y) / 2;
        (ranks[middle] < rank ? low : range.y) = middle;
      }
    }
    const int length = range.y - range.x;
    int end = length;  // inclusive sums
    for (int step = 1; step < 32; step *= 2) {
      const int left = __shfl_up_sync(0xffffffffu, end, step);
      if (lane >= step) end += left;
    }
    const int total = __shfl_sync(0xffffffffu, end, 31);
    const int shift = range.x - (end - length);
    for (int base = 0; base < total; base += 32) {
      const int item = base + lane;
      int owner = 0;  // lanes whose ranges end at or before item
#pragma unroll
      for (int step = 16; step > 0; step /= 2) {
        const int sum = __shfl_sync(0xffffffffu, end, owner + step - 1);
        if (sum <= item) owner += step;
      }
      const int at = item + __shfl_sync(0xffffffffu, shift, owner);
      bool dead = false;
      if (item < total) {
        const Box<acc> other = bucket_boxes[at];
        if (nms_overlaps(other, box_area(other), box, area, threshold)) {
          const int other_rank = ranks[at];
          if (other_rank < rank && (!classes || classes[other_rank] == class_id)) {
            const NmsState state = nms_load_state(pending.states + other_rank);
            if (state == kNmsUndecided) pending.add(other_rank);
            dead = state == kNmsKept || pending.removed;
          }
        }
      }
      if (__any_sync(0xffffffffu, dead)) return true;
    }
    return false;
  }
};

// A warp per box. Within a level the lanes take the cells, then share out what these hold.
template <class acc>
__device__ bool nms_find_suppressor(const NmsSearch<acc>& search,
                                    const NmsGeometry& geometry,
                                    const NmsCells& cells,
                                    NmsPending& pending) {
  const int lane = threadIdx.x % 32;
  const Box<acc>& box = search.box;
  if (search.area < kNmsTinyArea<acc> * 16) {
    const unsigned tiny = nms_bucket(search.class_id, kNmsTinyLevel, 0, 0, cells.mask);
    if (search.scan(lane == 0 ? cells.ranges[tiny] : int2{0, 0}, pending)) return true;
  }
  if (search.area < kNmsTinyArea<acc> / 16) return false;
  const double t = geometry.threshold;
  const double width = box.x2 - box.x1, height = box.y2 - box.y1;
  const double longer = fmax(width, height);
  const double x = nms_centre(box.x1, box.x2), y = nms_centre(box.y1, box.y2);
  const double slack_x = 0x1p-50 * (fabs(double(box.x1)) + fabs(double(box.x2)));
  const double slack_y = 0x1p-50 * (fabs(double(box.y1)) + fabs(double(box.y2)));
  // The own level first: there a suppressor is likeliest, and a kept one ends the search.
  const int own = ilogb(longer), lowest = ilogb(longer * t), highest = ilogb(longer / t);
  for (int step = lowest - 1; step <= highest; ++step) {
    if (step == own) continue;
    const int level = step < lowest ? own : step;
    const double upper = scalbn(1 + 0x1p-18, level + 1);
    const double reach_x = nms_reach(width, upper, t), reach_y = nms_reach(height, upper, t);
    if (reach_x < 0 || reach_y < 0) continue;
    const double inverse = nms_inverse_cell(geometry, level);
    const double side_x = reach_x * (1 + 0x1p-18) + slack_x;
    const double side_y = reach_y * (1 + 0x1p-18) + slack_y;
    const double x0 = nms_cell_of(x - side_x, inverse), y0 = nms_cell_of(y - side_y, inverse);
    const auto columns = static_cast<int64_t>(nms_cell_of(x + side_x, inverse) - x0) + 1;
    const auto rows = static_cast<int64_t>(nms_cell_of(y + side_y, inverse) - y0) + 1;
    for (int64_t first = 0; first < rows * columns; first += 32) {
      const int64_t cell = first + lane;
      int2 range{0, 0};
      if (cell < rows * columns) {
        const double cell_x = x0 + static_cast<double>(cell % columns);
        const double cell_y = y0 + static_cast<double>(cell / columns);
        range = cells.ranges[nms_bucket(search.class_id, level, cell_x, cell_y, cells.mask)];
      }
      if (search.scan(range, pending)) return true;
    }
  }
  return false;
}

template <class acc>
__global__ void __launch_bounds__(kNmsSparseWarps * 32)
    nms_sparse_kernel(NmsSorted<acc> sorted,
                      const Box<acc>* bucket_boxes,
                      const int* ranks,
                      NmsGeometry geometry,
                      NmsCells cells,
                      NmsProgress progress,
                      int n,
                      int64_t max_output,
                      acc threshold) {
  __shared__ int slots[kNmsSparseWarps][NmsPending::kCapacity][32];
  __shared__ int block;
  __shared__ bool enough;
  const bool limited = max_output < n;
  if (threadIdx.x == 0) {
    block = static_cast<int>(atomicAdd(progress.ticket, 1u));
    enough = limited &&
             static_cast<int64_t>(*static_cast<volatile unsigned long long*>(progress.frontier) &
                                  0xffffffffull) >= max_output;
  }
  __syncthreads();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int rank = block * kNmsSparseWarps + warp;
  NmsState state = rank < n ? sorted.states[rank] : kNmsRemoved;
  if (state == kNmsUndecided) {
    bool removed = enough;
    if (!enough) {
      const Box<acc> box = sorted.boxes[rank];
      NmsPending pending{&slots[warp][0][lane], sorted.states};
      const NmsSearch<acc> search{bucket_boxes,
                                  ranks,
                                  sorted.classes,
                                  rank,
                                  box,
                                  box_area(box),
                                  threshold,
                                  sorted.classes ? sorted.classes[rank] : 0};
      removed = nms_find_suppressor(search, geometry, cells, pending) || !pending.wait();
    }
    state = removed ? kNmsRemoved : kNmsKept;
    if (lane == 0) *static_cast<volatile NmsState*>(sorted.states + rank) = state;
  }
  if (!limited) return;
  const int kept = __syncthreads_count(lane == 0 && state == kNmsKept);
  if (threadIdx.x == 0) {
    nms_advance(progress.frontier, progress.block_kept, block, kept, div_up(n, kNmsSparseWarps));
  }
}

}  // namespace opzoo
