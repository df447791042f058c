// SPDX-License-Identifier: Apache-2.0
// The forward as one implicit matrix product on Hopper's tensor cores: columns are sampled straight
// into the shared-memory operand of the product and never exist in device memory. 16-bit types, and
// fp32 as one or two tf32 parts; one weight group, channels of an offset group in whole chunks,
// input channels-last. sm_90a. No torch.
#pragma once

#include "common/tma.cuh"
#include "common/wgmma.cuh"
#include "deform_conv2d/deform_conv2d_implicit_exact.cuh"

namespace opzoo {

// Asks the copy engine for the weights of one step after the other, as stages become free: the same
// ones for every tile. One thread.
template <class Tile>
struct WeightLoader {
  static constexpr int kBytes = Tile::kParts * Tile::kWeightBytes;
  const ImplicitBlock<Tile>& block;
  const unsigned char* tiles;
  int steps;  // of a tile
  int left;   // steps still to ask for
  int step = 0, within = 0;

  __device__ WeightLoader(const DeformConvImplicitParams& p, const ImplicitBlock<Tile>& block)
      : block(block), steps(block.steps()) {
    const int64_t first = (blockIdx.y * (p.conv.C / Tile::kChunk) + block.first_chunk) * block.taps;
    tiles = static_cast<const unsigned char*>(p.weight_tiles) + first * kBytes;
    left = threadIdx.x == 0 ? steps * div_up(p.tiles - block.tile, block.tile_step) : 0;
  }
  __device__ void ask() {
    if (left == 0) return;
    --left;
    const int stage = step % Tile::kStages;
    mbarrier_wait(&block.empty[stage], step / Tile::kStages & 1 ^ 1);
    mbarrier_arrive_expect(&block.full[stage], kBytes);
    bulk_load(block.weight_tile(step),
              tiles + static_cast<int64_t>(within) * kBytes,
              kBytes,
              &block.full[stage]);
    ++step;
    if (++within == steps) within = 0;
  }
};

// 128 bytes of k.
template <class T>
__device__ __forceinline__ void multiply_rows(float (&sums)[64],
                                              const unsigned char* samples,
                                              const unsigned char* weights,
                                              bool accumulate) {
  const uint64_t a = wgmma_operand(samples, 16);
  const uint64_t b = wgmma_operand(weights, 16);
#pragma unroll
  for (int k = 0; k < kImplicitRowBytes / 32; ++k) {  // descriptors count 16 bytes
    const bool add = accumulate || k > 0;
    if constexpr (std::is_same_v<T, Half>) {
      wgmma_f16<false, false>(sums, a + 2 * k, b + 2 * k, add);
    } else if constexpr (std::is_same_v<T, BFloat16>) {
      wgmma_bf16<false, false>(sums, a + 2 * k, b + 2 * k, add);
    } else {
      wgmma_tf32(sums, a + 2 * k, b + 2 * k, add);
    }
  }
}

// sums[64 pixels x 128 output channels] of this warpgroup, tile after tile; finish(tile, sums).
// With two parts the tensor core, which truncates when it adds, starts each step from zero, and the
// step is added in fp32, rounded. Thread 0 also asks for weights while its products run: for the
// stage that this warpgroup has just left and the other one is about to leave.
template <class Tile, class Finish>
__device__ __forceinline__ void consume_samples(const DeformConvImplicitParams& p,
                                                const ImplicitBlock<Tile>& block,
                                                int first_row,
                                                int first_column,
                                                const Finish& finish) {
  using T = typename Tile::T;
  WeightLoader<Tile> loader(p, block);
  for (int stage = 0; stage < Tile::kStages; ++stage) loader.ask();
  const auto release = [&](int step) {
    if (threadIdx.x % 128 == 0) mbarrier_arrive(&block.empty[step % Tile::kStages]);
  };
  int step = 0;
  uint32_t tile = block.tile;
  do {
    float sums[64];
#pragma unroll
    for (float& sum : sums) sum = 0;
    const int end = step + loader.steps;
    for (const int first = step; step < end; ++step) {
      mbarrier_wait(&block.full[step % Tile::kStages], step / Tile::kStages & 1);
      // The samples were written by ordinary stores and are read by the tensor cores. On this side,
      // because there the fence would also wait for the producers' loads.
      fence_async_proxy();
      const unsigned char* a = block.samples(step) + first_row * kImplicitRowBytes;
      const unsigned char* b = block.weight_tile(step) + first_column * kImplicitRowBytes;
      wgmma_fence();
      if constexpr (Tile::kParts == 1) {
        multiply_rows<T>(sums, a, b, true);
        wgmma_commit();
        wgmma_wait<1>();
        if (step == first) continue;
        release(step - 1);
        loader.ask();
      } else {
        float part[64];
        multiply_rows<T>(part, a + Tile::kSampleBytes, b, false);
        multiply_rows<T>(part, a, b + Tile::kWeightBytes, true);
        multiply_rows<T>(part, a, b, true);
        wgmma_commit();
        if (step > 0) loader.ask();
        wgmma_wait<0>();
        release(step);
#pragma unroll
        for (int i = 0; i < 64; ++i) sums[i] += part[i];
      }
    }
    if constexpr (Tile::kParts == 1) {
      wgmma_wait<0>();
      release(step - 1);
      loader.ask();
    }
    finish(tile, sums);
    tile += block.tile_step;
  } while (Tile::kManyTiles && tile < p.tiles);
}

template <class Tile>
__device__ __forceinline__ void stage_sums(const typename Tile::Sums& to,
                                           int first_row,
                                           int first_column,
                                           const float (&sums)[64]) {
  const int thread = static_cast<int>(threadIdx.x) % 128;
  const int row = first_row + thread / 32 * 16 + thread % 32 / 4;
#pragma unroll
  for (int j = 0; j < 16; ++j) {
    const int column = first_column + j * 8 + thread % 4 * 2;
    to.put_pair(row, column, sums[4 * j], sums[4 * j + 1]);
    to.put_pair(row + 8, column, sums[4 * j + 2], sums[4 * j + 3]);
  }
}

// What lies at the same place in all blocks that share a tile, in the order of their channels.
struct ClusterSums {
  int splits;

  __device__ float operator()(const float* at) const {
    if (splits == 1) return *at;
    float sum = cluster_load(at, 0);
    for (int split = 1; split < splits; ++split) sum += cluster_load(at, split);
    return sum;
  }
  __device__ float4 operator()(const float4* at) const {
    if (splits == 1) return *at;
    float4 sum = cluster_load(at, 0);
    for (int split = 1; split < splits; ++split) {
      const float4 part = cluster_load(at, split);
      sum = {sum.x + part.x, sum.y + part.y, sum.z + part.z, sum.w + part.w};
    }
    return sum;
  }
};

// One block per tile of pixels and part of its channels (x), and block of output channels (y).
// Producers sample operand A of a step, a chunk of channels of one tap for all pixels of the tile;
// the copy engine brings operand B, the weights of that tap and chunk; consumers multiply. A ring
// of kStages stages lets them run apart. The blocks of a cluster share one tile, whose channels
// they have split. The plan is computed by all, while the kernel that prepares the operands may
// still run.
template <class Tile>
__global__ void __launch_bounds__(kImplicitThreads, 1)
    deform_conv2d_implicit_kernel(const __grid_constant__ DeformConvImplicitParams p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) unsigned char shared[];
  using T = typename Tile::T;
  const ImplicitBlock<Tile> block(p, shared);
  const int thread = static_cast<int>(threadIdx.x);
  if (thread == 0) {
    for (int stage = 0; stage < Tile::kStages; ++stage) {
      mbarrier_init(&block.full[stage], kImplicitProducers / 32 + 1);
      mbarrier_init(&block.empty[stage], kImplicitConsumers / 128);
    }
    mbarrier_fence_init();
    *block.too_large = 0;
  }
  stage_bias<T, Tile::kColumns, kImplicitThreads>(p, block.bias);
  const int group_chunks = static_cast<int>(p.conv.group_channels() / Tile::kChunk);
  plan_samples<T, Tile::kPixels, kImplicitThreads>(
      p, block.tile, block.first_chunk / group_chunks, thread, block.sources, block.weights);
  wait_for_last_kernel();
  __syncthreads();
  const typename Tile::Sums staged{
      reinterpret_cast<float*>(shared), block.bias, stores_by_pixel<T>(p)};
  // Else the sums of the one tile there is go through the place of the stages.
  const bool whole_tiles = Tile::kParts == 1 && p.splits == 1;
  const int warpgroup = thread / 128;
  const int first_row = Tile::kSideBySideInChannels ? 0 : warpgroup * 64;
  const int first_column = Tile::kSideBySideInChannels ? warpgroup * 128 : 0;
  if (warpgroup < 2) {
    if constexpr (Tile::kParts == 1) {
      shrink_registers<Tile::kConsumerRegisters>();
    } else {
      grow_registers<Tile::kConsumerRegisters>();
    }
    consume_samples(p, block, first_row, first_column, [&](uint32_t tile, const float (&sums)[64]) {
      if (whole_tiles) {
        const int64_t k = static_cast<int64_t>(blockIdx.y) * Tile::kColumns + first_column;
        const int row = first_row + thread % 128 / 32 * 16;
        float* scratch = block.bias + Tile::kColumns + thread / 32 * kWarpScratch;
        store_warp<T, Tile::kPixels>(p, tile, row, k, block.bias + first_column, sums, scratch);
      } else {
        named_barrier(2, kImplicitConsumers);  // the other warpgroup reads the stages no more
        stage_sums<Tile>(staged, first_row, first_column, sums);
      }
    });
    if constexpr (Tile::kParts == 1) {
      grow_registers<128>();
    } else {
      shrink_registers<128>();
    }
  } else {
    if constexpr (Tile::kParts == 1) {
      grow_registers<Tile::kProducerRegisters>();
    } else {
      shrink_registers<Tile::kProducerRegisters>();
    }
    if (produce_samples(p, block) && Tile::kParts == 2) *block.too_large = 1;
    __syncwarp();
    if constexpr (Tile::kParts == 1) {
      shrink_registers<128>();
    } else {
      grow_registers<128>();
    }
  }
  __syncwarp();
  if constexpr (Tile::kParts == 2) {
    __syncthreads();
    if (*block.too_large || *p.weight_too_large) sum_tile_exactly(p, block, staged);
  }
  if (whole_tiles) return;
  __syncthreads();
  if (p.splits > 1) cluster_barrier();  // the sums of all blocks are there
  const int share = p.splits == 1 ? 0 : static_cast<int>(cluster_rank());
  store_tile<T, Tile::kPixels, Tile::kColumns, kImplicitThreads>(
      p, staged, block.tile, share, ClusterSums{p.splits});
  if (p.splits > 1) cluster_barrier();  // a block outlives its neighbours' reads of it
#endif
}

}  // namespace opzoo
