// SPDX-License-Identifier: Apache-2.0
// What every path of NMS on CUDA shares: boxes in score order, their states, the list of kept
// boxes.
//
// A box is decided as soon as every box that suppresses it is: kept if all of those are removed,
// removed once one of them is kept. So each warp takes a box, finds its suppressors and waits for
// their states alone; no step of the grid separates them. Blocks take boxes in score order by
// ticket, and a box waits for earlier ones only: whatever is waited for is running or decided, so
// the first undecided box always makes progress. A chain of n boxes, each suppressing the next,
// costs n hand-overs through L2. A state changes once, hence the result does not depend on timing.
#pragma once

#include "common/launch.cuh"
#include "nms/nms.h"

namespace opzoo {

enum class NmsType : int { kF64, kF32, kF16, kBF16, kI64, kI32, kI16, kI8, kU8 };

template <class T>
constexpr NmsType nms_type() {
  if (std::is_same_v<T, double>) return NmsType::kF64;
  if (std::is_same_v<T, float>) return NmsType::kF32;
  if (std::is_same_v<T, Half>) return NmsType::kF16;
  if (std::is_same_v<T, BFloat16>) return NmsType::kBF16;
  if (std::is_same_v<T, int64_t>) return NmsType::kI64;
  if (std::is_same_v<T, int32_t>) return NmsType::kI32;
  if (std::is_same_v<T, int16_t>) return NmsType::kI16;
  if (std::is_same_v<T, int8_t>) return NmsType::kI8;
  return NmsType::kU8;
}

// The type of a load is chosen at run time, the same way for every thread: one kernel serves all
// pairs of dtypes.
template <class Body>
__device__ __forceinline__ void nms_visit(NmsType type, const Body& body) {
  switch (type) {
    case NmsType::kF64:
      return body(double{});
    case NmsType::kF32:
      return body(float{});
    case NmsType::kF16:
      return body(Half{});
    case NmsType::kBF16:
      return body(BFloat16{});
    case NmsType::kI64:
      return body(int64_t{});
    case NmsType::kI32:
      return body(int32_t{});
    case NmsType::kI16:
      return body(int16_t{});
    case NmsType::kI8:
      return body(int8_t{});
    case NmsType::kU8:
      return body(uint8_t{});
  }
}

struct NmsInput {
  BoxesView boxes;
  NumbersView scores, classes;
  NmsType box_type, score_type;
  ScoreLimit limit;
  int n;  // boxes of an image
};

using NmsState = uint8_t;
constexpr NmsState kNmsUndecided = 0, kNmsKept = 1, kNmsRemoved = 2;

// Boxes in score order. Arrays of an image are `pitch` elements apart.
template <class acc>
struct NmsSorted {
  Box<acc>* boxes;
  int64_t* classes;  // null: one class
  int* order;        // rank -> index in the image
  NmsState* states;
  int64_t pitch;
};

// How far the blocks are. A block without work left to do for max_output removes its boxes unseen.
struct NmsProgress {
  unsigned* ticket;  // the next block
  unsigned long long*
      frontier;     // per image: finished blocks from the first on << 32 | kept in them
  int* block_kept;  // per block: kept boxes, -1 until it has finished
};

// Smaller for a score that ranks before: NaN last, zeros equal. Orders as score_key does.
template <class Key, class T>
__device__ __forceinline__ Key nms_sort_key(T score) {
  if constexpr (sizeof(Key) == 8) {
    return ~(static_cast<uint64_t>(score_key(score)) ^ (uint64_t(1) << 63));
  } else if constexpr (std::is_integral_v<T>) {
    return ~(static_cast<uint32_t>(static_cast<int32_t>(score)) ^ 0x80000000u);
  } else {
    const auto value = static_cast<float>(score);
    if (value != value) return 0xffffffffu;
    const int32_t bits = value == 0 ? 0 : bit_cast<int32_t>(value);
    const int32_t ordered = bits >= 0 ? bits : bits ^ INT32_MAX;
    return ~(static_cast<uint32_t>(ordered) ^ 0x80000000u);
  }
}

template <class Key>
__device__ __forceinline__ Key nms_load_key(const NmsInput& in, int64_t image, int64_t i) {
  Key key = 0;
  nms_visit(in.score_type,
            [&]<class T>(T) { key = nms_sort_key<Key>(load_number<T>(in.scores, image, i)); });
  return key;
}

// Box i of an image becomes the one of this rank.
template <class acc>
__device__ __forceinline__ Box<acc> nms_place(
    const NmsInput& in, const NmsSorted<acc>& out, int64_t image, int i, int rank, acc threshold) {
  Box<acc> box{};
  nms_visit(in.box_type, [&]<class T>(T) {
    if constexpr (std::is_same_v<box_acc_t<T>, acc>) box = load_box<T>(in.boxes, image, i);
  });
  bool admitted = true;
  if (in.limit.exists) {
    nms_visit(in.score_type, [&]<class T>(T) {
      admitted = in.limit.admits(score_key(load_number<T>(in.scores, image, i)));
    });
  }
  const int64_t at = image * out.pitch + rank;
  out.boxes[at] = box;
  out.order[at] = i;
  if (out.classes) out.classes[at] = load_number<int64_t>(in.classes, image, i);
  const bool contends = threshold < 1 && can_overlap(box, box_area(box));
  out.states[at] = !admitted ? kNmsRemoved : contends ? kNmsUndecided : kNmsKept;
  return box;
}

constexpr int kNmsRankTargets = 32;
constexpr int kNmsRankThreads = 1024;

// How many of 32 keys in shared memory pass, read 16 bytes at a time.
template <class Key, class Test>
__device__ __forceinline__ int nms_count_keys(const Key* keys, const Test& passes) {
  constexpr int kWidth = 16 / sizeof(Key);
  struct alignas(16) Vector {
    Key key[kWidth];
  };
  const auto* vectors = reinterpret_cast<const Vector*>(keys);
  int count = 0;
#pragma unroll
  for (int v = 0; v < 32 / kWidth; ++v) {
    const Vector vector = vectors[v];
#pragma unroll
    for (int k = 0; k < kWidth; ++k) count += passes(vector.key[k]);
  }
  return count;
}

// Sorts a few thousand boxes by counting, for each, those that rank before it: one launch, where a
// radix sort takes six. A block owns 32 boxes, one per lane; keys pass through shared memory, 1024
// at a time, and each warp compares its 32 of them, all lanes reading the same one.
template <class acc, class Key>
__global__ void __launch_bounds__(kNmsRankThreads) nms_rank_kernel(
    NmsInput in, NmsSorted<acc> out, NmsProgress progress, int resolve_blocks, acc threshold) {
  __shared__ alignas(16) Key keys[kNmsRankThreads];
  __shared__ int before[kNmsRankTargets];
  const int blocks = div_up(in.n, kNmsRankTargets);
  const int64_t image = blockIdx.x / blocks;
  const int block = blockIdx.x % blocks;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int j = block * kNmsRankTargets + lane;
  const Key mine = j < in.n ? nms_load_key<Key>(in, image, j) : 0;
  if (warp == 0) before[lane] = 0;

  const auto load = [&](int i) { return i < in.n ? nms_load_key<Key>(in, image, i) : Key(0); };
  int count = 0;
  Key key = load(threadIdx.x);
  for (int base = 0; base < in.n; base += kNmsRankThreads) {
    __syncthreads();  // the previous keys have been read
    keys[threadIdx.x] = key;
    __syncthreads();
    key = load(base + kNmsRankThreads + threadIdx.x);  // arrives during the comparisons
    const int first = base + warp * 32;
    const int others = min(32, in.n - first);
    // Earlier indices win ties: whole warps of keys lie before or behind the block's boxes.
    if (others == 32 && first + 32 <= block * kNmsRankTargets) {
      count += nms_count_keys(keys + warp * 32, [&](Key other) { return other <= mine; });
    } else if (others == 32 && first >= (block + 1) * kNmsRankTargets) {
      count += nms_count_keys(keys + warp * 32, [&](Key other) { return other < mine; });
    } else {
      for (int k = 0; k < others; ++k) {
        const Key other = keys[warp * 32 + k];
        count += other < mine || (other == mine && first + k < j);
      }
    }
  }
  atomicAdd(&before[lane], count);
  __syncthreads();
  if (warp == 0 && j < in.n) nms_place(in, out, image, j, before[lane], threshold);

  // The next kernel's counters, spread over all threads.
  if (blockIdx.x == 0 && threadIdx.x == 0) *progress.ticket = 0;
  if (block == 0 && threadIdx.x == 0) progress.frontier[image] = 0;
  for (int b = block * kNmsRankThreads + threadIdx.x; b < resolve_blocks;
       b += blocks * kNmsRankThreads) {
    progress.block_kept[image * resolve_blocks + b] = -1;
  }
}

__device__ __forceinline__ NmsState nms_load_state(const NmsState* state) {
  return *static_cast<const volatile NmsState*>(state);
}

// False only where a does not suppress b: rounding is monotone, so a quotient above the threshold
// has inter >= threshold * union. Spares the division, and branches.
template <class acc>
__device__ __forceinline__ bool nms_may_overlap(
    const Box<acc>& a, acc area_a, const Box<acc>& b, acc area_b, acc threshold) {
  const acc width = min(a.x2, b.x2) - max(a.x1, b.x1);
  const acc height = min(a.y2, b.y2) - max(a.y1, b.y1);
  const acc inter = multiply_rounded(max(width, acc(0)), max(height, acc(0)));
  return (inter > 0) & (inter >= multiply_rounded(threshold, area_a + area_b - inter));
}

// a suppresses b, if kept.
template <class acc>
__device__ __forceinline__ bool nms_overlaps(
    const Box<acc>& a, acc area_a, const Box<acc>& b, acc area_b, acc threshold) {
  return nms_may_overlap(a, area_a, b, area_b, threshold) &&
         box_iou(a, area_a, b, area_b) > threshold;
}

// The suppressors of a box whose states are not known yet, a short list per lane in shared memory.
// A full list is waited on until a place is free; the box's own warp must not be in it.
struct NmsPending {
  static constexpr int kCapacity = 8;

  int* slots;  // of this lane, 32 apart
  const NmsState* states;
  int count = 0;
  bool removed = false;

  __device__ __forceinline__ void look() {
    for (int k = 0; k < count;) {
      const NmsState state = nms_load_state(states + slots[k * 32]);
      if (state == kNmsKept) {
        removed = true;
        count = 0;
      } else if (state == kNmsRemoved) {
        slots[k * 32] = slots[--count * 32];
      } else {
        ++k;
      }
    }
  }

  __device__ __forceinline__ void add(int rank) {
    while (count == kCapacity) look();
    if (!removed) slots[count++ * 32] = rank;
  }

  // Whole warps call this. True if the box is kept.
  __device__ __forceinline__ bool wait() {
    while (true) {
      look();
      if (__any_sync(0xffffffffu, removed)) return false;
      if (!__any_sync(0xffffffffu, count > 0)) return true;
    }
  }
};

// A block that has finished adds itself to the frontier, and every finished block after it. Of two
// blocks that finish at once, the later to write sees the other's count: the fence orders each
// one's write before its read.
__device__ inline void nms_advance(
    unsigned long long* frontier, volatile int* block_kept, int block, int kept, int blocks) {
  block_kept[block] = kept;
  __threadfence();
  while (true) {
    const unsigned long long seen = *static_cast<volatile unsigned long long*>(frontier);
    const auto next = static_cast<int>(seen >> 32);
    if (next >= blocks) return;
    const int added = block_kept[next];
    if (added < 0) return;
    atomicCAS(frontier, seen, seen + (1ull << 32) + static_cast<unsigned>(added));
  }
}

constexpr int kNmsCompactThreads = 1024;
constexpr int kNmsCompactItems = 4;
constexpr int kNmsCompactBoxes = kNmsCompactThreads * kNmsCompactItems;

struct NmsOutput {
  int64_t* indices;     // [images][pitch]
  int64_t* count;       // [images]
  int64_t* host_count;  // where the host reads count[0]; may be null
  int64_t pitch;
  int64_t limit;  // indices per image at most
  bool pad;       // with -1 up to pitch
};

// Inclusive sum over the block's threads; sums is shared, and free again after the next barrier.
__device__ __forceinline__ int2 nms_block_sum(int own, int* sums) {
  constexpr unsigned kWarp = 0xffffffffu;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const auto scan = [lane](int value) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int left = __shfl_up_sync(kWarp, value, step);
      if (lane >= step) value += left;
    }
    return value;
  };
  const int sum = scan(own);
  if (lane == 31) sums[warp] = sum;
  __syncthreads();
  const int warps = scan(sums[lane]);
  const int total = __shfl_sync(kWarp, warps, 31);
  const int before = __shfl_sync(kWarp, warps, warp > 0 ? warp - 1 : 0);
  return {(warp > 0 ? before : 0) + sum, total};
}

// Lists the kept boxes in score order. A block owns 4096 ranks, four to a thread, and counts what
// was kept before them by itself: a byte per box, cheaper than another launch or a wait.
static __global__ void __launch_bounds__(kNmsCompactThreads) nms_compact_kernel(
    const NmsState* states, const int* order, int n, int64_t sorted_pitch, NmsOutput out) {
  static_assert(kNmsCompactItems == 4 && kNmsCompactThreads == 32 * 32);
  static_assert(kNmsKept == 1 && kNmsRemoved == 2);  // bit 0 says kept
  __shared__ int sums[2][32];
  const int blocks = div_up(n, kNmsCompactBoxes);
  const int64_t image = blockIdx.x / blocks;
  const int block = blockIdx.x % blocks;
  states += image * sorted_pitch;
  order += image * sorted_pitch;
  int64_t* indices = out.indices + image * out.pitch;

  const int64_t begin = static_cast<int64_t>(block) * kNmsCompactBoxes;
  int earlier = 0;
  const auto* words = reinterpret_cast<const uint4*>(states);
  for (int64_t w = threadIdx.x; w < begin / 16; w += kNmsCompactThreads) {
    const uint4 word = words[w];
    constexpr unsigned kBits = 0x01010101;
    earlier += __popc(word.x & kBits) + __popc(word.y & kBits) + __popc(word.z & kBits) +
               __popc(word.w & kBits);
  }
  const int64_t before = nms_block_sum(earlier, sums[0]).y;

  const int64_t first = begin + threadIdx.x * kNmsCompactItems;
  bool kept[kNmsCompactItems];
  int own = 0;
#pragma unroll
  for (int k = 0; k < kNmsCompactItems; ++k) {
    kept[k] = first + k < n && states[first + k] == kNmsKept;
    own += kept[k];
  }
  const int2 sum = nms_block_sum(own, sums[1]);
  int64_t at = before + sum.x - own;
#pragma unroll
  for (int k = 0; k < kNmsCompactItems; ++k) {
    if (!kept[k]) continue;
    if (at < out.limit) indices[at] = order[first + k];
    ++at;
  }
  if (block != blocks - 1) return;
  const int64_t all = before + sum.y;
  const int64_t count = all < out.limit ? all : out.limit;
  if (out.pad) {
    for (int64_t i = count + threadIdx.x; i < out.pitch; i += kNmsCompactThreads) indices[i] = -1;
  }
  if (threadIdx.x == 0) {
    out.count[image] = count;
    if (out.host_count) *out.host_count = count;
  }
}

// Leaders: one warp per rank looks through the kept boxes in score order, 32 at a time, for the
// first that suppresses its box; a kept box is its own.
template <class acc>
__global__ void nms_leaders_kernel(NmsSorted<acc> sorted,
                                   NmsInput in,
                                   const int64_t* kept,
                                   const int64_t* count,
                                   acc threshold,
                                   int64_t* leaders) {
  const int lane = threadIdx.x % 32;
  const int64_t warps = item_step() / 32;
  for (int64_t rank = first_item() / 32; rank < in.n; rank += warps) {
    const int index = sorted.order[rank];
    int64_t leader = index;
    if (sorted.states[rank] != kNmsKept) {
      const Box<acc> box = sorted.boxes[rank];
      const acc area = box_area(box);
      for (int64_t base = 0; base < *count; base += 32) {
        bool hit = false;
        if (base + lane < *count) {
          Box<acc> other{};
          nms_visit(in.box_type, [&]<class T>(T) {
            if constexpr (std::is_same_v<box_acc_t<T>, acc>) {
              other = load_box<T>(in.boxes, 0, kept[base + lane]);
            }
          });
          hit = nms_overlaps(other, box_area(other), box, area, threshold);
        }
        const unsigned hits = __ballot_sync(0xffffffffu, hit);
        if (hits) {
          leader = kept[base + __ffs(static_cast<int>(hits)) - 1];
          break;
        }
      }
    }
    if (lane == 0) leaders[index] = leader;
  }
}

}  // namespace opzoo
