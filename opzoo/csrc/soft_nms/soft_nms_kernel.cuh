// SPDX-License-Identifier: Apache-2.0
// Soft-NMS selects boxes one after another, but most of what follows from a selection can wait.
// A team of warps (one block, or the whole grid) shares the boxes of a segment and works in rounds:
//   1. each warp decays its boxes by the selections of the last round, in their order, and
//      publishes the best few keys among them;
//   2. the batch is every box that ranks before some bound; all boxes outside rank at or behind it,
//      and can only fall. A bound is the best key among those that some warp holds back;
//   3. one warp selects within the batch, one box after another, until the best of the batch no
//      longer ranks before the bound.
// So every selection is the one the sequential definition makes, and every score is multiplied by
// the same factors in the same order. A round selects at least one box. Each block of a grid team
// computes steps 2 and 3 for itself: that is cheaper than a second grid barrier.
#pragma once

#include <cooperative_groups.h>

#include "common/launch.cuh"
#include "soft_nms/soft_nms.h"

namespace opzoo {

constexpr int kSoftNmsThreads = 256;
constexpr int kSoftNmsWarps = kSoftNmsThreads / 32;
constexpr int kSoftNmsBatch = 64;  // two boxes to a lane of the selecting warp
constexpr int kSoftNmsPublished = 4;
constexpr int kSoftNmsKeys = kSoftNmsPublished + 1;  // and the best that is held back
// Segments up to this size belong to one block, larger ones to the grid.
constexpr int kSoftNmsBlockBoxes = 256;
// A grid team of fewer blocks decays too slowly, of more has too many keys to look through: 20000
// boxes take 7.9 ms with 8 blocks on an H200, 3.7 ms with 64, 6.4 ms with 128.
constexpr int kSoftNmsBoxesPerBlock = 192, kSoftNmsMostBlocks = 64;
constexpr unsigned kFullWarp = 0xffffffffu;

template <class acc>
struct SoftNmsKey {
  acc score;
  int position;

  static __device__ __forceinline__ SoftNmsKey none() { return {acc(kSoftNmsGone), INT32_MAX}; }
  __device__ __forceinline__ bool before(const SoftNmsKey& other) const {
    return score > other.score || (score == other.score && position < other.position);
  }
};

// Boxes of a segment, by index; scores are decayed in place.
template <class acc>
struct SoftNmsBoxes {
  const Box<acc>* boxes;
  acc* scores;
  int n;
};

template <class acc>
struct SoftNmsShared {
  acc factor[kSoftNmsBatch][kSoftNmsBatch];  // [selected slot][slot]
  Box<acc> batch_box[kSoftNmsBatch];
  acc batch_score[kSoftNmsBatch];
  int batch_position[kSoftNmsBatch];
  SoftNmsKey<acc> gathered_key[kSoftNmsBatch];
  Box<acc> selected_box[kSoftNmsBatch];
  acc selected_area[kSoftNmsBatch];
  SoftNmsKey<acc> selected_key[kSoftNmsBatch];  // slots for positions
  SoftNmsKey<acc> best[kSoftNmsKeys][kSoftNmsWarps];
  int count[kSoftNmsPublished];
  int gathered, selected;
  SoftNmsKey<acc> keys[2][kSoftNmsWarps * kSoftNmsKeys];  // of a team that is one block
};

// The largest score among the lanes, in all of them.
template <class acc>
__device__ __forceinline__ acc warp_max(acc score) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    const acc other = __shfl_xor_sync(kFullWarp, score, offset);
    score = other > score ? other : score;
  }
  return score;
}

#if __CUDA_ARCH__ >= 800
// Scores that take part are >= +0 and order as their bits do; the bits of -1 are negative.
__device__ __forceinline__ float warp_max(float score) {
  return __int_as_float(__reduce_max_sync(kFullWarp, __float_as_int(score)));
}
__device__ __forceinline__ double warp_max(double score) {
  const int high = __reduce_max_sync(kFullWarp, __double2hiint(score));
  const unsigned low = __double2hiint(score) == high ? __double2loint(score) : 0u;
  return __hiloint2double(high, static_cast<int>(__reduce_max_sync(kFullWarp, low)));
}
#endif

__device__ __forceinline__ int warp_min(int value) {
#if __CUDA_ARCH__ >= 800
  return __reduce_min_sync(kFullWarp, value);
#else
  for (int offset = 16; offset > 0; offset /= 2) {
    value = min(value, __shfl_xor_sync(kFullWarp, value, offset));
  }
  return value;
#endif
}

// The key that ranks first among the lanes, in all of them.
template <class acc>
__device__ __forceinline__ SoftNmsKey<acc> warp_first(const SoftNmsKey<acc>& key) {
  const acc score = warp_max(key.score);
  return {score, warp_min(key.score == score ? key.position : INT32_MAX)};
}

// The first blocks of the grid own the boxes. Those beyond follow what happens: a barrier of the
// grid needs them.
struct SoftNmsGridTeam {
  int blocks;

  __device__ __forceinline__ int warps() const { return blocks * kSoftNmsWarps; }
  __device__ __forceinline__ int first_warp() const { return blockIdx.x * kSoftNmsWarps; }
  __device__ __forceinline__ bool writes() const { return blockIdx.x == 0; }
  __device__ __forceinline__ void sync() const { cooperative_groups::this_grid().sync(); }
};

struct SoftNmsBlockTeam {
  int blocks;  // 1

  __device__ __forceinline__ int warps() const { return kSoftNmsWarps; }
  __device__ __forceinline__ int first_warp() const { return 0; }
  __device__ __forceinline__ bool writes() const { return true; }
  __device__ __forceinline__ void sync() const { __syncthreads(); }
};

OPZOO_HOST_DEVICE int soft_nms_team_blocks(int64_t boxes) {
  const auto wanted = div_up<int64_t>(boxes, kSoftNmsBoxesPerBlock);
  return static_cast<int>(wanted < kSoftNmsMostBlocks ? wanted : kSoftNmsMostBlocks);
}

// Step 1. Position p belongs to warp p mod warps, so that neighbours in the input, often alike in
// score, meet different warps. Lane 0 publishes.
template <SoftNmsMethod kMethod, class acc>
__device__ __forceinline__ void soft_nms_decay(const SoftNmsRule<acc>& rule,
                                               const SoftNmsBoxes<acc>& segment,
                                               const SoftNmsShared<acc>& shared,
                                               int warp,
                                               int warps,
                                               SoftNmsKey<acc>* keys) {
  if (warp >= warps) return;
  SoftNmsKey<acc> best[kSoftNmsKeys];
#pragma unroll
  for (auto& key : best) key = SoftNmsKey<acc>::none();
  const int lane = threadIdx.x % 32;
  const int selected = shared.selected;
  for (int64_t p = warp + static_cast<int64_t>(warps) * lane; p < segment.n; p += warps * 32ll) {
    const acc before = segment.scores[p];
    if (before < acc(0)) continue;
    const Box<acc> box = segment.boxes[p];
    const acc area = box_area(box);
    acc score = before;
    // Each lane marks the selections near its box first: then the lanes of a warp do the costly
    // part side by side, each for its own.
    uint64_t near = 0;
#pragma unroll 4
    for (int s = 0; s < selected; ++s) {
      near |= uint64_t{soft_nms_may_overlap(shared.selected_box[s], box)} << s;
    }
    for (; near != 0 && score >= acc(0); near &= near - 1) {
      const int s = __ffsll(static_cast<long long>(near)) - 1;
      const acc iou = box_iou(shared.selected_box[s], shared.selected_area[s], box, area);
      const acc factor = soft_nms_factor<kMethod>(rule, iou);
      if (factor != acc(1)) score = soft_nms_decayed(rule, score, factor);
    }
    if (score != before) segment.scores[p] = score;
    SoftNmsKey<acc> key{score, static_cast<int>(p)};
    if (score < acc(0)) continue;
#pragma unroll
    for (auto& other : best) {  // insertion into a sorted list
      if (key.before(other)) {
        const SoftNmsKey<acc> moved = other;
        other = key;
        key = moved;
      }
    }
  }
#pragma unroll
  for (int k = 0; k < kSoftNmsKeys; ++k) {
    const SoftNmsKey<acc> first = warp_first(best[0]);
    if (lane == 0) keys[warp * kSoftNmsKeys + k] = first;
    if (best[0].position == first.position) {
#pragma unroll
      for (int i = 0; i + 1 < kSoftNmsKeys; ++i) best[i] = best[i + 1];
      best[kSoftNmsKeys - 1] = SoftNmsKey<acc>::none();
    }
  }
}

// Step 2. Returns the bound and leaves the batch in shared memory; a bound of none() means that the
// batch is the one best box, and an empty batch that no box is left.
template <class acc>
__device__ __forceinline__ SoftNmsKey<acc> soft_nms_gather(const SoftNmsKey<acc>* keys,
                                                           int warps,
                                                           SoftNmsShared<acc>& shared) {
  const int lane = threadIdx.x % 32;
  // bound[k]: the best key that is the (k + 1)-th of its warp.
  SoftNmsKey<acc> bound[kSoftNmsKeys];
#pragma unroll
  for (auto& key : bound) key = SoftNmsKey<acc>::none();
  for (int w = threadIdx.x; w < warps; w += kSoftNmsThreads) {
#pragma unroll
    for (int k = 0; k < kSoftNmsKeys; ++k) {
      const SoftNmsKey<acc> key = keys[w * kSoftNmsKeys + k];
      if (key.before(bound[k])) bound[k] = key;
    }
  }
#pragma unroll
  for (int k = 0; k < kSoftNmsKeys; ++k) {
    bound[k] = warp_first(bound[k]);
    if (lane == 0) shared.best[k][threadIdx.x / 32] = bound[k];
  }
  if (threadIdx.x < kSoftNmsPublished) shared.count[threadIdx.x] = 0;
  if (threadIdx.x == 0) shared.gathered = 0;
  __syncthreads();
#pragma unroll
  for (int k = 0; k < kSoftNmsKeys; ++k) {
    const bool mine = lane < kSoftNmsWarps;
    bound[k] = warp_first(mine ? shared.best[k][lane] : SoftNmsKey<acc>::none());
  }

  // Before bound[k] rank only first to k-th keys of a warp. The widest bound whose batch fits wins.
  int count[kSoftNmsPublished] = {};
  for (int w = threadIdx.x; w < warps; w += kSoftNmsThreads) {
#pragma unroll
    for (int k = 0; k < kSoftNmsPublished; ++k) {
      const SoftNmsKey<acc> key = keys[w * kSoftNmsKeys + k];
#pragma unroll
      for (int b = k; b < kSoftNmsPublished; ++b) count[b] += key.before(bound[b + 1]);
    }
  }
#pragma unroll
  for (int b = 0; b < kSoftNmsPublished; ++b) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
      count[b] += __shfl_xor_sync(kFullWarp, count[b], offset);
    }
    if (lane == 0 && count[b] > 0) atomicAdd(&shared.count[b], count[b]);
  }
  __syncthreads();
  SoftNmsKey<acc> chosen = SoftNmsKey<acc>::none();
  bool fits = false;
#pragma unroll
  for (int b = 0; b < kSoftNmsPublished; ++b) {
    if (shared.count[b] <= kSoftNmsBatch) {
      chosen = bound[b + 1];
      fits = true;
    }
  }
  for (int w = threadIdx.x; w < warps; w += kSoftNmsThreads) {
#pragma unroll
    for (int k = 0; k < kSoftNmsPublished; ++k) {
      const SoftNmsKey<acc> key = keys[w * kSoftNmsKeys + k];
      const bool in_batch = fits ? key.before(chosen) : key.position == bound[0].position;
      if (in_batch && key.score >= acc(0)) {
        shared.gathered_key[atomicAdd(&shared.gathered, 1)] = key;
      }
    }
  }
  __syncthreads();
  return fits ? chosen : SoftNmsKey<acc>::none();
}

// Between the steps: the batch by position, so that of equal scores the smallest slot is first, and
// the factors between its boxes.
template <SoftNmsMethod kMethod, class acc>
__device__ __forceinline__ void soft_nms_lay_out(const SoftNmsRule<acc>& rule,
                                                 const SoftNmsBoxes<acc>& segment,
                                                 SoftNmsShared<acc>& shared) {
  const int gathered = shared.gathered;
  if (threadIdx.x < gathered) {
    const SoftNmsKey<acc> key = shared.gathered_key[threadIdx.x];
    int slot = 0;
    for (int i = 0; i < gathered; ++i) slot += shared.gathered_key[i].position < key.position;
    shared.batch_score[slot] = key.score;
    shared.batch_position[slot] = key.position;
    shared.batch_box[slot] = segment.boxes[key.position];
  }
  __syncthreads();
  const int column = threadIdx.x % kSoftNmsBatch;
  if (column < gathered) {
    const Box<acc> box = shared.batch_box[column];
    const acc area = box_area(box);
    constexpr int kStep = kSoftNmsThreads / kSoftNmsBatch;
    const int first_row = threadIdx.x / kSoftNmsBatch;
    unsigned near = 0;  // rows, as in soft_nms_decay
#pragma unroll
    for (int i = 0; i < kSoftNmsBatch / kStep; ++i) {
      const int row = first_row + i * kStep;
      shared.factor[row][column] = acc(1);
      near |= unsigned{row < gathered && soft_nms_may_overlap(shared.batch_box[row], box)} << i;
    }
    for (; near != 0; near &= near - 1) {
      const int row = first_row + (__ffs(static_cast<int>(near)) - 1) * kStep;
      const Box<acc> other = shared.batch_box[row];
      const acc iou = box_iou(other, box_area(other), box, area);
      shared.factor[row][column] = soft_nms_factor<kMethod>(rule, iou);
    }
  }
  __syncthreads();
}

// Step 3, by one warp: lane l owns slots l and l + 32.
template <class acc>
__device__ __forceinline__ void soft_nms_select(const SoftNmsRule<acc>& rule,
                                                SoftNmsKey<acc> bound,
                                                SoftNmsShared<acc>& shared) {
  const int lane = threadIdx.x % 32, gathered = shared.gathered;
  constexpr acc kGone = acc(kSoftNmsGone);
  acc low = lane < gathered ? shared.batch_score[lane] : kGone;
  acc high = lane + 32 < gathered ? shared.batch_score[lane + 32] : kGone;
  // The bound in slots: how many of the batch lie before its position. Nothing ranks before -1.
  const unsigned low_before =
      __ballot_sync(kFullWarp, lane < gathered && shared.batch_position[lane] < bound.position);
  const unsigned high_before = __ballot_sync(
      kFullWarp, lane + 32 < gathered && shared.batch_position[lane + 32] < bound.position);
  bound.position = bound.score < acc(0) ? -1 : __popc(low_before) + __popc(high_before);

  int selected = 0;
  while (true) {
    const acc best = warp_max(high > low ? high : low);
    const unsigned in_low = __ballot_sync(kFullWarp, low == best);
    const unsigned in_high = __ballot_sync(kFullWarp, high == best);
    const int slot = in_low != 0 ? __ffs(in_low) - 1 : __ffs(in_high) + 31;
    const SoftNmsKey<acc> first{best, slot};
    if (!first.before(bound)) break;
    if (lane == 0) shared.selected_key[selected] = first;
    ++selected;
    const acc low_left = soft_nms_decayed(rule, low, shared.factor[slot][lane]);
    const acc high_left = soft_nms_decayed(rule, high, shared.factor[slot][lane + 32]);
    low = low >= acc(0) && slot != lane ? low_left : kGone;
    high = high >= acc(0) && slot != lane + 32 ? high_left : kGone;
  }
  if (lane == 0) shared.selected = selected;
}

// Decides a whole segment. write(order, position, score) is called once for each selected box, by
// one thread of the team. Returns how many were selected. keys: room for two rounds.
template <SoftNmsMethod kMethod, class acc, class Team, class Write>
__device__ __forceinline__ int soft_nms_segment(const Team& team,
                                                const SoftNmsRule<acc>& rule,
                                                const SoftNmsBoxes<acc>& segment,
                                                SoftNmsKey<acc>* keys,
                                                SoftNmsShared<acc>& shared,
                                                const Write& write) {
  const int warps = team.warps(), first_warp = team.first_warp();
  const int warp = first_warp + threadIdx.x / 32;
  int total = 0;
  if (threadIdx.x == 0) shared.selected = 0;
  __syncthreads();
  for (int round = 0;; round ^= 1) {
    SoftNmsKey<acc>* published = keys + round * warps * kSoftNmsKeys;
    soft_nms_decay<kMethod>(rule, segment, shared, warp, warps, published);
    team.sync();
    const SoftNmsKey<acc> bound = soft_nms_gather(published, warps, shared);
    if (shared.gathered == 0) return total;
    soft_nms_lay_out<kMethod>(rule, segment, shared);
    if (threadIdx.x < 32) soft_nms_select(rule, bound, shared);
    __syncthreads();
    const int selected = shared.selected;
    if (threadIdx.x < selected) {
      const SoftNmsKey<acc> key = shared.selected_key[threadIdx.x];
      const int position = shared.batch_position[key.position];
      const Box<acc> box = shared.batch_box[key.position];
      shared.selected_box[threadIdx.x] = box;
      shared.selected_area[threadIdx.x] = box_area(box);
      if (team.writes()) write(total + static_cast<int>(threadIdx.x), position, key.score);
      const int owner = position % warps - first_warp;
      if (owner >= 0 && owner < kSoftNmsWarps) segment.scores[position] = acc(kSoftNmsGone);
    }
    total += selected;
    __syncthreads();  // the selections are complete, and no longer compete
  }
}

// Conversion of the caller's tensors. One thread per position; order (null: the identity) maps
// positions to indices.
template <class T, class acc>
__global__ void soft_nms_boxes_kernel(SoftNmsInput input,
                                      const int64_t* order,
                                      int64_t n,
                                      Box<acc>* boxes) {
  for (int64_t p = first_item(); p < n; p += item_step()) {
    boxes[p] = soft_nms_box<T, acc>(input, order ? order[p] : p);
  }
}

template <class T, class acc>
__global__ void soft_nms_scores_kernel(
    SoftNmsInput input, const int64_t* order, int64_t n, acc min_score, acc* scores) {
  for (int64_t p = first_item(); p < n; p += item_step()) {
    scores[p] = soft_nms_score<T, acc>(input, order ? order[p] : p, min_score);
  }
}

// One segment, by one block or by a cooperative grid. Selections are written in their order.
template <SoftNmsMethod kMethod, class acc, class Team>
__global__ void __launch_bounds__(kSoftNmsThreads) soft_nms_kernel(SoftNmsRule<acc> rule,
                                                                   SoftNmsBoxes<acc> segment,
                                                                   SoftNmsKey<acc>* keys,
                                                                   acc* out_scores,
                                                                   int64_t* out_indices,
                                                                   int64_t* out_count) {
  extern __shared__ unsigned char soft_nms_memory[];
  auto& shared = *reinterpret_cast<SoftNmsShared<acc>*>(soft_nms_memory);
  const auto write = [=](int order, int position, acc score) {
    out_scores[order] = score;
    out_indices[order] = position;
  };
  const Team team{static_cast<int>(gridDim.x)};
  if (keys == nullptr) keys = shared.keys[0];
  const int total = soft_nms_segment<kMethod>(team, rule, segment, keys, shared, write);
  if (team.writes() && threadIdx.x == 0) *out_count = total;
}

// What the blocks of soft_nms_classes_kernel hand each other; zero at the start.
struct SoftNmsWork {
  int64_t selected;  // of all classes
  int next, large;   // position to look at, classes for the grid
};
struct SoftNmsRange {
  int begin, end;
};

constexpr int kSoftNmsChunk = 32;  // positions a block takes at a time

// Many segments, runs of equal class in [0, n), by a cooperative grid. First each block decides
// small segments, of up to block_boxes, alone: it takes a chunk of positions and with it the
// segments that begin there. Then all decide the large ones together, one after another. large:
// room for those. index maps positions to indices; the score of each selected box is written to
// out_scores[index].
template <SoftNmsMethod kMethod, class acc>
__global__ void __launch_bounds__(kSoftNmsThreads) soft_nms_classes_kernel(SoftNmsRule<acc> rule,
                                                                           SoftNmsBoxes<acc> all,
                                                                           const int64_t* classes,
                                                                           const int64_t* index,
                                                                           SoftNmsKey<acc>* keys,
                                                                           SoftNmsWork* work,
                                                                           SoftNmsRange* large,
                                                                           int block_boxes,
                                                                           acc* out_scores) {
  extern __shared__ unsigned char soft_nms_memory[];
  auto& shared = *reinterpret_cast<SoftNmsShared<acc>*>(soft_nms_memory);
  __shared__ int chunk;
  const auto decide = [&](const auto& team, SoftNmsRange range, SoftNmsKey<acc>* room) {
    const SoftNmsBoxes<acc> segment{
        all.boxes + range.begin, all.scores + range.begin, range.end - range.begin};
    const int64_t* segment_index = index + range.begin;
    const auto write = [=](int, int position, acc score) {
      out_scores[segment_index[position]] = score;
    };
    const int total = soft_nms_segment<kMethod>(team, rule, segment, room, shared, write);
    if (team.writes() && threadIdx.x == 0) {
      atomicAdd(reinterpret_cast<unsigned long long*>(&work->selected), total);
    }
  };

  while (true) {
    __syncthreads();  // chunk has been read by all
    if (threadIdx.x == 0) chunk = atomicAdd(&work->next, kSoftNmsChunk);
    __syncthreads();
    const int first = chunk;
    if (first >= all.n) break;
    for (int begin = first; begin < min(first + kSoftNmsChunk, all.n); ++begin) {
      const int64_t id = classes[begin];
      if (begin > 0 && classes[begin - 1] == id) continue;
      int size = 0, found = kSoftNmsThreads;
      while (found == kSoftNmsThreads && size <= block_boxes) {
        const int p = begin + size + threadIdx.x;
        found = __syncthreads_count(p < all.n && classes[p] == id);
        size += found;
      }
      if (size <= block_boxes) {
        decide(SoftNmsBlockTeam{1}, {begin, begin + size}, shared.keys[0]);
      } else if (threadIdx.x == 0) {
        int low = begin + size, high = all.n;  // the end of the run lies in [low, high]
        while (low < high) {
          const int middle = low + (high - low) / 2;
          (classes[middle] == id ? low : high) = middle + (classes[middle] == id);
        }
        large[atomicAdd(&work->large, 1)] = {begin, low};
      }
    }
  }
  cooperative_groups::this_grid().sync();  // large is complete
  for (int i = 0; i < work->large; ++i) {
    const int wanted = soft_nms_team_blocks(large[i].end - large[i].begin);
    const SoftNmsGridTeam team{min(wanted, static_cast<int>(gridDim.x))};
    decide(team, large[i], keys);
    team.sync();  // keys are no longer read
  }
}

}  // namespace opzoo
