// SPDX-License-Identifier: Apache-2.0
// The forward as one implicit matrix product on Hopper's tensor cores: columns are sampled straight
// into the shared-memory operand of the product and never exist in device memory. 16-bit types, one
// weight group, channels of an offset group in whole chunks, input channels-last. sm_90a. No torch.
#pragma once

#include "common/launch.cuh"
#include "common/mbarrier.cuh"
#include "common/tma.cuh"
#include "common/wgmma.cuh"
#include "deform_conv2d/deform_conv2d.h"

namespace opzoo {

// Channels of one step of the product: 128 bytes, one row of a swizzled operand.
constexpr int kImplicitChunk = 64;
constexpr int kImplicitChunkBytes = 128;
// Two warpgroups multiply while two sample.
constexpr int kImplicitConsumers = 256;
constexpr int kImplicitProducers = 256;
constexpr int kImplicitThreads = kImplicitConsumers + kImplicitProducers;
constexpr int kImplicitStages = 4;

// A block's tile of the result. Both shapes give a consumer 64 x 128 sums, 64 registers a thread:
// more would leave the producers too few for the loads they have in flight.
//   narrow  128 pixels x 128 output channels, the warpgroups side by side in pixels
//   wide     64 pixels x 256 output channels, side by side in channels: nothing is sampled twice
template <bool kWide>
struct ImplicitTile {
  static constexpr int kPixels = kWide ? 64 : 128;
  static constexpr int kColumns = kWide ? 256 : 128;
  static constexpr int kSampleBytes = kPixels * kImplicitChunkBytes;
  static constexpr int kWeightBytes = kColumns * kImplicitChunkBytes;
  static constexpr int kStageBytes = kSampleBytes + kWeightBytes;
  static constexpr int kPlanOffset = kImplicitStages * kStageBytes;
};

// Where a tap of a pixel reads.
struct alignas(8) ImplicitSource {
  uint32_t base;   // of the upper left corner, in vectors of 8 channels from the first of the map
  uint32_t flags;  // ImplicitSourceFlag
};
enum ImplicitSourceFlag : uint32_t {
  kSourceInside = 1,  // otherwise nothing is read
  kSourceBelow = 2,   // the lower corners are other pixels than the upper ones
  kSourceRight = 4,
};
// What the corners (upper left, upper right, lower left, lower right) are multiplied with.
struct alignas(16) ImplicitWeights {
  float corner[4];
};
constexpr int kImplicitPlanBytes = sizeof(ImplicitSource) + sizeof(ImplicitWeights) + sizeof(float);

template <bool kWide>
size_t implicit_shared_bytes(int64_t taps) {
  using Tile = ImplicitTile<kWide>;
  return Tile::kPlanOffset + static_cast<size_t>(taps) * Tile::kPixels * kImplicitPlanBytes +
         2 * kImplicitStages * sizeof(uint64_t);
}

struct DeformConvImplicitParams {
  DeformConvParams conv;     // input_strides.c is 1, the others are multiples of 8
  const void* weight_tiles;  // of deform_conv2d_weight_tiles_kernel
  const void* bias;          // or null
  int64_t bias_stride;
  void* out;
  ImageStrides out_strides;
  int tile_width_log2;  // a tile's pixels form a rectangle of this width in one image
  int64_t tiles_x, tiles_y;
};

// [N, C, pixels] to [N, pixels, C], C even, through tiles of shared memory so that both sides are
// coalesced: a warp reads 64 pixels of a channel and writes 64 channels of a pixel, 128 bytes each.
// T is any 16-bit word.
constexpr int kTransposeTile = 64;
template <class T>
__global__ void __launch_bounds__(256)
    deform_conv2d_channels_last_kernel(const T* from, int64_t C, int64_t pixels, T* to) {
  // An odd number of words to a row: a column of pairs meets no bank twice.
  __shared__ T tile[kTransposeTile][kTransposeTile + 2];
  const int64_t image = static_cast<int64_t>(blockIdx.z) * C * pixels;
  const int64_t first_pixel = static_cast<int64_t>(blockIdx.x) * kTransposeTile;
  const int64_t first_channel = static_cast<int64_t>(blockIdx.y) * kTransposeTile;
  const int pair = static_cast<int>(threadIdx.x) % 32 * 2;
  const bool whole_pairs = pixels % 2 == 0 && reinterpret_cast<uintptr_t>(from) % 4 == 0;
  for (int row = static_cast<int>(threadIdx.x) / 32; row < kTransposeTile; row += 8) {
    if (first_channel + row >= C) break;
    const T* line = from + image + (first_channel + row) * pixels + first_pixel;
    if (whole_pairs && first_pixel + pair < pixels) {
      *reinterpret_cast<uint32_t*>(&tile[row][pair]) =
          *reinterpret_cast<const uint32_t*>(line + pair);
    } else {
      for (int i = pair; i < pair + 2; ++i) {
        if (first_pixel + i < pixels) tile[row][i] = line[i];
      }
    }
  }
  __syncthreads();
  for (int row = static_cast<int>(threadIdx.x) / 32; row < kTransposeTile; row += 8) {
    if (first_pixel + row >= pixels) break;
    if (first_channel + pair >= C) continue;
    const uint32_t low = tile[pair][row].bits;
    const uint32_t high = tile[pair + 1][row].bits;
    *reinterpret_cast<uint32_t*>(to + image + (first_pixel + row) * C + first_channel + pair) =
        low | high << 16;
  }
}

// Lays the weight out as the product reads it, so that a step's operand is one linear copy:
// tiles [block of kColumns output channels][chunk][tap][output channel][channels of the chunk],
// rows swizzled as in common/tma.cuh, output channels beyond K zero. A block owns the chunk of one
// output channel, whose weights lie together in memory.
template <class T>
__global__ void deform_conv2d_weight_tiles_kernel(const T* weight,
                                                  ImageStrides strides,
                                                  int64_t K,
                                                  int kernel_w,
                                                  int taps,
                                                  int columns,
                                                  T* tiles) {
  extern __shared__ unsigned char chunk_bytes[];
  T* chunk = reinterpret_cast<T*>(chunk_bytes);  // [channel][tap]
  const int64_t k = blockIdx.x;
  const int64_t first_channel = static_cast<int64_t>(blockIdx.y) * kImplicitChunk;
  for (int i = threadIdx.x; i < kImplicitChunk * taps; i += blockDim.x) {
    const int channel = i / taps;
    const int tap = i - channel * taps;
    chunk[i] = k < K ? weight[k * strides.n + (first_channel + channel) * strides.c +
                              tap / kernel_w * strides.y + tap % kernel_w * strides.x]
                     : T(0.0f);
  }
  __syncthreads();
  const int column = static_cast<int>(k % columns);
  const int64_t first_tile = (k / columns * gridDim.y + blockIdx.y) * taps;
  for (int i = threadIdx.x; i < taps * 8; i += blockDim.x) {
    const int tap = i / 8;
    const int vector = i % 8;
    alignas(16) T value[8];
    for (int j = 0; j < 8; ++j) value[j] = chunk[(vector * 8 + j) * taps + tap];
    const int64_t row = (first_tile + tap) * columns + column;
    reinterpret_cast<uint4*>(tiles)[row * 8 + (vector ^ (column & 7))] =
        *reinterpret_cast<const uint4*>(value);
  }
}

__device__ __forceinline__ float2 unpack_pair(uint32_t pair, Half) {
  return __half22float2(bit_cast<__half2>(pair));
}
__device__ __forceinline__ float2 unpack_pair(uint32_t pair, BFloat16) {
  return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
}
__device__ __forceinline__ uint32_t pack_pair(float low, float high, Half) {
  return bit_cast<uint32_t>(__floats2half2_rn(low, high));
}
__device__ __forceinline__ uint32_t pack_pair(float low, float high, BFloat16) {
  return bit_cast<uint32_t>(__floats2bfloat162_rn(low, high));
}

// 8 channels of a column, rounded once.
template <class T>
__device__ __forceinline__ uint4 sample_vector(const uint4 (&corner)[4],
                                               const ImplicitWeights& weights,
                                               float mask) {
  uint32_t pairs[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float2 sum;
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const uint32_t words[4] = {corner[c].x, corner[c].y, corner[c].z, corner[c].w};
      const float2 value = unpack_pair(words[i], T{});
      const float weight = weights.corner[c];
      sum.x = c == 0 ? weight * value.x : sum.x + weight * value.x;
      sum.y = c == 0 ? weight * value.y : sum.y + weight * value.y;
    }
    pairs[i] = pack_pair(mask * sum.x, mask * sum.y, T{});
  }
  return {pairs[0], pairs[1], pairs[2], pairs[3]};
}

// The block's tile and what its warps share. Rows of an operand are the tile's pixels.
template <bool kWide>
struct ImplicitBlock {
  using Tile = ImplicitTile<kWide>;

  unsigned char* shared;
  ImplicitSource* sources;  // [tap][pixel], of the offset group at hand
  ImplicitWeights* weights;
  float* masks;
  uint64_t* full;   // both operands of a stage are there
  uint64_t* empty;  // both consumers have multiplied it
  int taps, chunks;
  int64_t n, y0, x0;
  int width_log2;

  __device__ ImplicitBlock(const DeformConvImplicitParams& p, unsigned char* memory)
      : shared(memory),
        taps(static_cast<int>(p.conv.taps())),
        chunks(static_cast<int>(p.conv.C / kImplicitChunk)),
        width_log2(p.tile_width_log2) {
    weights = reinterpret_cast<ImplicitWeights*>(memory + Tile::kPlanOffset);
    sources = reinterpret_cast<ImplicitSource*>(weights + taps * Tile::kPixels);
    masks = reinterpret_cast<float*>(sources + taps * Tile::kPixels);
    full = reinterpret_cast<uint64_t*>(masks + taps * Tile::kPixels);
    empty = full + kImplicitStages;
    const int64_t row = blockIdx.x / p.tiles_x;
    x0 = (blockIdx.x - row * p.tiles_x) << width_log2;
    n = row / p.tiles_y;
    y0 = (row - n * p.tiles_y) * (Tile::kPixels >> width_log2);
  }

  __device__ int steps() const { return chunks * taps; }
  __device__ OutputPixel pixel(int row) const {
    return {n, y0 + (row >> width_log2), x0 + (row & ((1 << width_log2) - 1))};
  }
  __device__ unsigned char* samples(int step) const {
    return shared + step % kImplicitStages * Tile::kStageBytes;
  }
  __device__ unsigned char* weight_tile(int step) const {
    return samples(step) + Tile::kSampleBytes;
  }
};

// The geometry of an offset group, once for all its channels.
template <bool kWide>
__device__ void plan_samples(const DeformConvImplicitParams& p,
                             const ImplicitBlock<kWide>& block,
                             int64_t offset_group,
                             int thread) {
  constexpr int kPixels = ImplicitTile<kWide>::kPixels;
  const ImageStrides& strides = p.conv.input_strides;
  for (int i = thread; i < block.taps * kPixels; i += kImplicitProducers) {
    const OutputPixel pixel = block.pixel(i % kPixels);
    ImplicitSource source{0, 0};
    ImplicitWeights weights{};
    float mask = 0;
    if (pixel.y < p.conv.OH && pixel.x < p.conv.OW) {
      const auto sample = deform_sample<float>(p.conv, pixel, offset_group, i / kPixels);
      mask = sample.mask;
      if (sample.inside) {
        const AxisTap<float>& y = sample.y;
        const AxisTap<float>& x = sample.x;
        const int64_t corner = pixel.n * strides.n + y.lo * strides.y + x.lo * strides.x;
        source.base = static_cast<uint32_t>(corner / 8);
        source.flags =
            kSourceInside | (y.hi > y.lo ? kSourceBelow : 0u) | (x.hi > x.lo ? kSourceRight : 0u);
        weights = {{y.weight_lo * x.weight_lo,
                    y.weight_lo * x.weight_hi,
                    y.weight_hi * x.weight_lo,
                    y.weight_hi * x.weight_hi}};
      }
    }
    block.sources[i] = source;
    block.weights[i] = weights;
    block.masks[i] = mask;
  }
}

// The warps that sample. 8 lanes share a pixel and own 8 channels of the chunk each, so that a load
// of a corner is 128 consecutive bytes; a thread owns kRows pixels a pass. Loads run one pass ahead
// of the arithmetic: a tap's pixels lie anywhere, and a miss in L1 takes longer than a pass.
// Chunks are the outer loop and taps the inner one: the pixels that neighbouring taps share are
// still in L1.
template <class T, bool kWide>
__device__ void produce_samples(const DeformConvImplicitParams& p,
                                const ImplicitBlock<kWide>& block) {
  constexpr int kRows = 2;
  constexpr int kRowStep = kImplicitProducers / 8;
  constexpr int kPasses = ImplicitTile<kWide>::kPixels / (kRowStep * kRows);  // of a step
  constexpr int kPixels = ImplicitTile<kWide>::kPixels;
  constexpr int kBarrier = 1;
  const int thread = static_cast<int>(threadIdx.x) - kImplicitConsumers;
  const int vector = thread % 8;
  const int first_row = thread / 8;
  const auto below = static_cast<uint32_t>(p.conv.input_strides.y / 8);
  const auto right = static_cast<uint32_t>(p.conv.input_strides.x / 8);
  const int group_chunks = static_cast<int>(p.conv.group_channels() / kImplicitChunk);

  int step = 0;
  for (int64_t group = 0; group < p.conv.offset_groups; ++group) {
    named_barrier(kBarrier, kImplicitProducers);  // nobody needs the last group's plan any more
    plan_samples(p, block, group, thread);
    named_barrier(kBarrier, kImplicitProducers);

    const uint4* channels = static_cast<const uint4*>(p.conv.input) +
                            group * group_chunks * (kImplicitChunk / 8) + vector;
    int load_tap = 0, load_pass = 0, store_tap = 0, store_pass = 0;
    const auto load = [&](uint4(&corners)[kRows][4]) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const int row = first_row + kRowStep * (load_pass * kRows + i);
        const ImplicitSource source = block.sources[load_tap * kPixels + row];
        const bool inside = source.flags & kSourceInside;
        const uint4* at = channels + source.base;
        const uint32_t down = source.flags & kSourceBelow ? below : 0;
        const uint32_t across = source.flags & kSourceRight ? right : 0;
        const uint4 zero{0, 0, 0, 0};
        corners[i][0] = inside ? __ldg(at) : zero;
        corners[i][1] = inside ? __ldg(at + across) : zero;
        corners[i][2] = inside ? __ldg(at + down) : zero;
        corners[i][3] = inside ? __ldg(at + down + across) : zero;
      }
      if (++load_pass < kPasses) return;
      load_pass = 0;
      if (++load_tap < block.taps) return;
      load_tap = 0;
      channels += kImplicitChunk / 8;
    };
    const auto store = [&](const uint4(&corners)[kRows][4]) {
      const int stage = step % kImplicitStages;
      if (store_pass == 0) mbarrier_wait(&block.empty[stage], step / kImplicitStages & 1 ^ 1);
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const int row = first_row + kRowStep * (store_pass * kRows + i);
        const int at = store_tap * kPixels + row;
        const uint4 column = sample_vector<T>(corners[i], block.weights[at], block.masks[at]);
        unsigned char* line = block.samples(step) + row * kImplicitChunkBytes;
        *reinterpret_cast<uint4*>(line + (vector ^ row & 7) * 16) = column;
      }
      if (++store_pass < kPasses) return;
      store_pass = 0;
      __syncwarp();
      if (thread % 32 == 0) mbarrier_arrive(&block.full[stage]);
      ++step;
      if (++store_tap == block.taps) store_tap = 0;
    };
    const int passes = group_chunks * block.taps * kPasses;
    uint4 even[kRows][4], odd[kRows][4];
    load(even);
    for (int pass = 0; pass < passes; pass += 2) {
      if (pass + 1 < passes) load(odd);
      store(even);
      if (pass + 2 < passes) load(even);
      if (pass + 1 < passes) store(odd);
    }
  }
}

__device__ __forceinline__ void multiply_step(float (&sums)[64], uint64_t a, uint64_t b, Half) {
  wgmma_f16<false, false>(sums, a, b, true);
}
__device__ __forceinline__ void multiply_step(float (&sums)[64], uint64_t a, uint64_t b, BFloat16) {
  wgmma_bf16<false, false>(sums, a, b, true);
}

// sums[64 pixels x 128 output channels] of this warpgroup. Thread 0 also feeds the weights: as soon
// as both warpgroups are done with a stage, kImplicitStages steps ahead of their use.
template <class T, bool kWide>
__device__ void consume_samples(const DeformConvImplicitParams& p,
                                const ImplicitBlock<kWide>& block,
                                int first_row,
                                int first_column,
                                float (&sums)[64]) {
  using Tile = ImplicitTile<kWide>;
  const int steps = block.steps();
  const auto* tiles = static_cast<const unsigned char*>(p.weight_tiles) +
                      static_cast<int64_t>(blockIdx.y) * steps * Tile::kWeightBytes;
  const auto load_weights = [&](int step) {
    uint64_t* barrier = &block.full[step % kImplicitStages];
    mbarrier_arrive_expect(barrier, Tile::kWeightBytes);
    bulk_load(block.weight_tile(step),
              tiles + static_cast<int64_t>(step) * Tile::kWeightBytes,
              Tile::kWeightBytes,
              barrier);
  };
  if (threadIdx.x == 0) {
    for (int step = 0; step < min(kImplicitStages, steps); ++step) load_weights(step);
  }
#pragma unroll
  for (float& sum : sums) sum = 0;
  for (int step = 0; step < steps; ++step) {
    mbarrier_wait(&block.full[step % kImplicitStages], step / kImplicitStages & 1);
    // The samples were written by ordinary stores and are read by the tensor cores. On this side,
    // because there the fence would also wait for the producers' loads.
    fence_async_proxy();
    const uint64_t a = wgmma_operand(block.samples(step) + first_row * kImplicitChunkBytes, 16);
    const uint64_t b =
        wgmma_operand(block.weight_tile(step) + first_column * kImplicitChunkBytes, 16);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kImplicitChunkBytes / 32; ++k) {
      multiply_step(sums, a + 2 * k, b + 2 * k, T{});  // descriptors count 16 bytes
    }
    wgmma_commit();
    wgmma_wait<1>();
    if (step == 0) continue;
    const int done = step - 1;
    uint64_t* barrier = &block.empty[done % kImplicitStages];
    if (threadIdx.x % 128 == 0) mbarrier_arrive(barrier);
    if (threadIdx.x == 0 && done + kImplicitStages < steps) {
      mbarrier_wait(barrier, done / kImplicitStages & 1);
      load_weights(done + kImplicitStages);
    }
  }
  wgmma_wait<0>();
}

// out = sums + bias, rounded once; through shared memory, so that neighbouring threads store
// neighbouring elements in either layout.
template <class T, bool kWide>
__device__ void store_sums(const DeformConvImplicitParams& p,
                           const ImplicitBlock<kWide>& block,
                           int first_row,
                           int first_column,
                           const float (&sums)[64]) {
  using Tile = ImplicitTile<kWide>;
  constexpr int kBarrier = 2;
  const bool channels_last = p.out_strides.c == 1 && p.conv.K % 8 == 0;
  // Padded: rows 16 bytes apart where they are read as vectors, one bank apart where by columns.
  const int pitch = Tile::kColumns + (channels_last ? 8 : 2);
  T* tile = reinterpret_cast<T*>(block.shared);
  const int thread = static_cast<int>(threadIdx.x);
  const int64_t k0 = static_cast<int64_t>(blockIdx.y) * Tile::kColumns;
  const T* bias = static_cast<const T*>(p.bias);

  named_barrier(kBarrier, kImplicitConsumers);  // the other warpgroup reads the stages no more
  const int row = first_row + thread % 128 / 32 * 16 + thread % 32 / 4;
#pragma unroll
  for (int j = 0; j < 16; ++j) {
    const int column = first_column + j * 8 + thread % 4 * 2;
    float shift[2] = {0, 0};
    for (int i = 0; i < 2; ++i) {
      const int64_t k = k0 + column + i;
      if (bias && k < p.conv.K) shift[i] = static_cast<float>(bias[k * p.bias_stride]);
    }
    const auto put = [&](int at_row, float low, float high) {
      *reinterpret_cast<uint32_t*>(tile + at_row * pitch + column) =
          pack_pair(low + shift[0], high + shift[1], T{});
    };
    put(row, sums[4 * j], sums[4 * j + 1]);
    put(row + 8, sums[4 * j + 2], sums[4 * j + 3]);
  }
  named_barrier(kBarrier, kImplicitConsumers);

  T* out = static_cast<T*>(p.out);
  const auto is_in_map = [&](const OutputPixel& pixel) {
    return pixel.y < p.conv.OH && pixel.x < p.conv.OW;
  };
  if (channels_last) {
    constexpr int kVectors = Tile::kColumns / 8;
    for (int i = thread; i < Tile::kPixels * kVectors; i += kImplicitConsumers) {
      const OutputPixel pixel = block.pixel(i / kVectors);
      const int column = i % kVectors * 8;
      if (!is_in_map(pixel) || k0 + column >= p.conv.K) continue;
      *reinterpret_cast<uint4*>(out + index_of(p.out_strides, pixel, k0 + column)) =
          *reinterpret_cast<const uint4*>(tile + i / kVectors * pitch + column);
    }
  } else {
    for (int i = thread; i < Tile::kPixels * Tile::kColumns; i += kImplicitConsumers) {
      const OutputPixel pixel = block.pixel(i % Tile::kPixels);
      const int column = i / Tile::kPixels;
      if (!is_in_map(pixel) || k0 + column >= p.conv.K) continue;
      out[index_of(p.out_strides, pixel, k0 + column)] = tile[i % Tile::kPixels * pitch + column];
    }
  }
}

// One block per tile of pixels (x) and block of output channels (y). Producers sample operand A of
// a step, 64 channels of one tap for all pixels of the tile; the copy engine brings operand B, the
// weights of that tap and chunk; consumers multiply. A ring of kImplicitStages stages lets them
// run apart: `full` counts the producers' warps and the bytes of B, `empty` the consumers.
template <class T, bool kWide>
__global__ void __launch_bounds__(kImplicitThreads, 1)
    deform_conv2d_implicit_kernel(const __grid_constant__ DeformConvImplicitParams p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) unsigned char shared[];
  const ImplicitBlock<kWide> block(p, shared);
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kImplicitStages; ++stage) {
      mbarrier_init(&block.full[stage], kImplicitProducers / 32 + 1);
      mbarrier_init(&block.empty[stage], kImplicitConsumers / 128);
    }
    mbarrier_fence_init();
  }
  __syncthreads();
  if (threadIdx.x >= kImplicitConsumers) {
    produce_samples<T>(p, block);
  } else {
    const int warpgroup = threadIdx.x / 128;
    const int first_row = kWide ? 0 : warpgroup * 64;
    const int first_column = kWide ? warpgroup * 128 : 0;
    float sums[64];
    consume_samples<T>(p, block, first_row, first_column, sums);
    store_sums<T>(p, block, first_row, first_column, sums);
  }
#endif
}

}  // namespace opzoo
