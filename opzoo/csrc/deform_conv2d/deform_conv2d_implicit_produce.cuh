// SPDX-License-Identifier: Apache-2.0
// The block of the implicit matrix product on Hopper and its half that samples. sm_90a. No torch.
#pragma once

#include "common/mbarrier.cuh"
#include "deform_conv2d/deform_conv2d_implicit_store.cuh"

namespace opzoo {

// Two warpgroups multiply while two sample.
constexpr int kImplicitConsumers = 256;
constexpr int kImplicitProducers = 256;
constexpr int kImplicitThreads = kImplicitConsumers + kImplicitProducers;

// A block's tile of the result. Both shapes give a consumer 64 x 128 sums, 64 registers a thread:
// more would leave the producers too few for the loads they have in flight.
//   narrow  128 pixels x 128 output channels, the warpgroups side by side in pixels
//   wide     64 pixels x 256 output channels, side by side in channels: nothing is sampled twice
// kParts = 2: fp32 operands are hi + lo, two tf32 numbers, and lo*hi + hi*lo + hi*hi is summed.
template <class Element, int kPartCount, bool kWide>
struct ImplicitTile {
  using T = Element;
  static constexpr int kParts = kPartCount;
  static constexpr bool kSideBySideInChannels = kWide;
  static constexpr int kMostSplits = 8;
  // Whether a block takes tile after tile, sampling one while it stores the last.
  static constexpr bool kManyTiles = kParts == 1;
  static constexpr int kThreads = kImplicitThreads;
  static constexpr int kPixels = kWide ? 64 : 128;
  static constexpr int kColumns = kWide ? 256 : 128;
  static constexpr int kVector = 16 / sizeof(T);
  static constexpr int kChunk = kImplicitRowBytes / sizeof(T);  // channels of one step
  static constexpr int kSampleBytes = kPixels * kImplicitRowBytes;
  static constexpr int kWeightBytes = kColumns * kImplicitRowBytes;
  static constexpr int kStageBytes = kParts * (kSampleBytes + kWeightBytes);
  static constexpr int kStages = kParts == 1 ? 4 : 2;
  static constexpr int kPlanOffset = kStages * kStageBytes;
  // What a producer has in flight: kLoadDepth - 1 passes of kLoadRows pixels, 16 registers each;
  // and the registers that leaves to producers and consumers.
  static constexpr int kLoadRows = kParts == 1 || !kWide ? 2 : 1;
  static constexpr int kLoadDepth = kParts == 1 || kWide ? 3 : 2;
  static constexpr int kConsumerRegisters = kParts == 1 ? 112 : 152;
  static constexpr int kProducerRegisters = 256 - kConsumerRegisters;
  using Sums =
      ImplicitSums<kPixels, kColumns>;  // when they are finished, in the place of the stages
  static_assert(Sums::kFloats * sizeof(float) <= kPlanOffset);

  static size_t shared_bytes(int64_t taps) {
    return kPlanOffset + static_cast<size_t>(taps) * kPixels * kImplicitPlanBytes +
           (2 * kStages + 2) * sizeof(uint64_t) +
           (kColumns + kImplicitConsumers / 32 * kWarpScratch) * sizeof(float);
  }
};

// The block's tile and what its warps share. Rows of an operand are the tile's pixels.
template <class Tile>
struct ImplicitBlock {
  unsigned char* shared;
  ImplicitWeights* weights;  // [tap][pixel], of the offset group at hand
  ImplicitSource* sources;
  uint64_t* full;   // both operands of a stage are there
  uint64_t* empty;  // both consumers have multiplied it
  int* too_large;   // some sample has no two tf32 parts
  float* bias;
  uint32_t tile, tile_step;
  int taps, first_chunk, end_chunk;

  __device__ ImplicitBlock(const DeformConvImplicitParams& p, unsigned char* memory)
      : shared(memory), taps(static_cast<int>(p.conv.taps())) {
    weights = reinterpret_cast<ImplicitWeights*>(memory + Tile::kPlanOffset);
    sources = reinterpret_cast<ImplicitSource*>(weights + taps * Tile::kPixels);
    full = reinterpret_cast<uint64_t*>(sources + taps * Tile::kPixels);
    empty = full + Tile::kStages;
    too_large = reinterpret_cast<int*>(empty + Tile::kStages);
    bias = reinterpret_cast<float*>(empty + Tile::kStages + 2);
    tile = blockIdx.x / p.splits;
    tile_step = gridDim.x / p.splits;
    const int split = static_cast<int>(blockIdx.x - tile * p.splits);
    const int chunks = static_cast<int>(p.conv.C / Tile::kChunk);
    first_chunk = chunks * split / p.splits;
    end_chunk = chunks * (split + 1) / p.splits;
  }

  __device__ int steps() const { return (end_chunk - first_chunk) * taps; }
  __device__ unsigned char* samples(int step) const {
    return shared + step % Tile::kStages * Tile::kStageBytes;
  }
  __device__ unsigned char* weight_tile(int step) const {
    return samples(step) + Tile::kParts * Tile::kSampleBytes;
  }
};

// Samples of a piece into the operand; true where they have no two tf32 parts.
template <class Tile>
__device__ __forceinline__ bool store_samples(uint4 samples, unsigned char* at) {
  bool too_large = false;
  if constexpr (sizeof(typename Tile::T) == 2) {
    *reinterpret_cast<uint4*>(at) = samples;
  } else {
    const float values[4] = {__uint_as_float(samples.x),
                             __uint_as_float(samples.y),
                             __uint_as_float(samples.z),
                             __uint_as_float(samples.w)};
    float high[4], low[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      high[i] = Tile::kParts == 1 ? nearest_tf32(values[i]) : split_tf32(values[i]);
      low[i] = split_tf32(values[i] - high[i]);
      too_large |= too_large_for_parts(values[i]);
    }
    *reinterpret_cast<float4*>(at) = {high[0], high[1], high[2], high[3]};
    if constexpr (Tile::kParts == 2) {
      *reinterpret_cast<float4*>(at + Tile::kSampleBytes) = {low[0], low[1], low[2], low[3]};
    }
  }
  return too_large;
}

// The warps that sample. 8 lanes share a pixel and own a piece of the chunk each, so that a load of
// a corner is 128 consecutive bytes; a thread owns kRows pixels a pass. Loads run kDepth - 1 passes
// ahead of the arithmetic: a tap's pixels lie anywhere, nearly every pass of a warp has a miss in
// L1, and that takes longer than a pass. Chunks are the outer loop and taps the inner one: the
// pixels that neighbouring taps share are still in L1.
template <class Tile>
struct SampleProducer {
  using T = typename Tile::T;
  static constexpr int kRows = Tile::kLoadRows;
  static constexpr int kDepth = Tile::kLoadDepth;
  static constexpr int kRowStep = kImplicitProducers / 8;
  static constexpr int kPasses = Tile::kPixels / (kRowStep * kRows);  // of a step
  static constexpr int kPixels = Tile::kPixels;

  const ImplicitBlock<Tile>& block;
  int vector, first_row, entries;
  const uint4* channels = nullptr;      // of the next load
  int load_entry = 0, store_entry = 0;  // of the plan
  int step = 0;
  bool too_large = false;  // some sample has no two tf32 parts

  __device__ SampleProducer(const ImplicitBlock<Tile>& block, int thread)
      : block(block), vector(thread % 8), first_row(thread / 8), entries(block.taps * kPixels) {}

  __device__ __forceinline__ void load(uint4 (&corners)[kRows][4]) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      load_corners(channels, block.sources[load_entry + kRowStep * i], corners[i]);
    }
    load_entry += kRowStep * kRows;
    if (load_entry < entries) return;
    load_entry = first_row;
    channels += 8;
  }

  __device__ __forceinline__ void store(const uint4 (&corners)[kRows][4]) {
    const int stage = step % Tile::kStages;
    const int pass_row = kPasses == 1 ? first_row : store_entry % kPixels;
    if (pass_row == first_row) {
      mbarrier_wait(&block.empty[stage], step / Tile::kStages & 1 ^ 1);
    }
    // Rows of a thread differ by multiples of 8: the same swizzle.
    unsigned char* line =
        block.samples(step) + pass_row * kImplicitRowBytes + (vector ^ first_row & 7) * 16;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const uint4 samples = blend_corners<T>(corners[i], block.weights[store_entry + kRowStep * i]);
      too_large |= store_samples<Tile>(samples, line + kRowStep * kImplicitRowBytes * i);
    }
    store_entry += kRowStep * kRows;
    if (kPasses > 1 && pass_row != first_row + kRowStep * kRows * (kPasses - 1)) return;
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(&block.full[stage]);
    ++step;
    if (store_entry >= entries) store_entry = first_row;
  }

  // All taps of `chunks` chunks, the first of which begins at `first`; the plan is there.
  __device__ __forceinline__ void produce(const uint4* first, int chunks) {
    channels = first + vector;
    load_entry = store_entry = first_row;
    const int passes = chunks * block.taps * kPasses;
    uint4 corners[kDepth][kRows][4];
#pragma unroll
    for (int i = 0; i < kDepth - 1; ++i) {
      if (i < passes) load(corners[i]);
    }
    for (int pass = 0; pass < passes; pass += kDepth) {
#pragma unroll
      for (int i = 0; i < kDepth; ++i) {
        if (pass + i + kDepth - 1 < passes) load(corners[(i + kDepth - 1) % kDepth]);
        if (pass + i < passes) store(corners[i]);
      }
    }
  }
};

// Tile after tile. The plan of the first one's first offset group is there already. True where some
// sample has no two tf32 parts.
template <class Tile>
__device__ __forceinline__ bool produce_samples(const DeformConvImplicitParams& p,
                                                const ImplicitBlock<Tile>& block) {
  constexpr int kBarrier = 1;
  const int thread = static_cast<int>(threadIdx.x) - kImplicitConsumers;
  const int group_chunks = static_cast<int>(p.conv.group_channels() / Tile::kChunk);
  SampleProducer<Tile> producer(block, thread);
  uint32_t tile = block.tile;
  do {
    for (int chunk = block.first_chunk; chunk < block.end_chunk;) {
      const int group = chunk / group_chunks;
      const int end = min(block.end_chunk, (group + 1) * group_chunks);
      if (producer.step > 0) {
        named_barrier(kBarrier, kImplicitProducers);  // nobody needs the last plan any more
        plan_samples<typename Tile::T, Tile::kPixels, kImplicitProducers>(
            p, tile, group, thread, block.sources, block.weights);
        named_barrier(kBarrier, kImplicitProducers);
      }
      producer.produce(static_cast<const uint4*>(p.conv.input) + chunk * 8, end - chunk);
      chunk = end;
    }
    tile += block.tile_step;
  } while (Tile::kManyTiles && tile < p.tiles);
  return producer.too_large;
}

}  // namespace opzoo
