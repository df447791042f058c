// SPDX-License-Identifier: Apache-2.0
// The forward as one implicit matrix product for every GPU with 16-bit tensor cores: the same
// operands as in deform_conv2d_implicit_kernel.cuh, multiplied by mma.sync. 16-bit types. sm_80 and
// newer. No torch.
#pragma once

#include "common/mma.cuh"
#include "deform_conv2d/deform_conv2d_implicit_store.cuh"

namespace opzoo {

// A block's tile of the result: 64 pixels x 128 output channels, its 8 warps 2 x 4 parts of 32 x
// 32. Two stages: while one is multiplied, the samples of the next are in registers and its weights
// on their way. With a 3x3 window 66 KB, so that two blocks share a multiprocessor where there is
// more.
template <class Element>
struct PortableTile {
  using T = Element;
  static constexpr int kParts = 1;
  static constexpr int kMostSplits = 1;
  static constexpr bool kManyTiles = false;
  static constexpr int kPixels = 64;
  static constexpr int kColumns = 128;
  static constexpr int kThreads = 256;
  static constexpr int kChunk = kImplicitRowBytes / 2;
  static constexpr int kSampleBytes = kPixels * kImplicitRowBytes;
  static constexpr int kWeightBytes = kColumns * kImplicitRowBytes;
  static constexpr int kStageBytes = kSampleBytes + kWeightBytes;
  static constexpr int kPlanOffset = 2 * kStageBytes;
  using Sums =
      ImplicitSums<kPixels, kColumns>;  // when they are finished, in the place of the stages
  static_assert(Sums::kFloats * sizeof(float) <= kPlanOffset);

  static size_t shared_bytes(int64_t taps) {
    return kPlanOffset + static_cast<size_t>(taps) * kPixels * kImplicitPlanBytes +
           kColumns * sizeof(float);
  }
};

// This thread's samples of a step: 8 lanes share a pixel, a thread owns a piece of two.
template <class Tile>
struct PortableSamples {
  static constexpr int kRowStep = Tile::kThreads / 8;
  static constexpr int kRows = Tile::kPixels / kRowStep;
  uint4 corners[kRows][4];

  __device__ void load(const uint4* channels, const ImplicitSource* sources) {
    const int row = static_cast<int>(threadIdx.x) / 8;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      load_corners(channels + threadIdx.x % 8, sources[row + i * kRowStep], corners[i]);
    }
  }
  __device__ void store(const ImplicitWeights* weights, unsigned char* samples) const {
    const int vector = static_cast<int>(threadIdx.x) % 8;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int row = static_cast<int>(threadIdx.x) / 8 + i * kRowStep;
      *reinterpret_cast<uint4*>(samples + row * kImplicitRowBytes + (vector ^ row & 7) * 16) =
          blend_corners<typename Tile::T>(corners[i], weights[row]);
    }
  }
};

// sums[32 pixels][32 output channels] of this warp, as 2 x 4 fragments, += one step.
template <class T>
__device__ __forceinline__ void multiply_step(float (&sums)[2][4][4],
                                              const unsigned char* samples,
                                              const unsigned char* weights) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  // Lanes name rows of 8 x 8 matrices. Samples: rows 0..7 and 8..15, then the same a piece on.
  // Weights: both pieces of channels 0..7, then those of 8..15.
  const int sample_row = warp / 4 * 32 + lane % 16;
  const int weight_row = warp % 4 * 32 + lane / 16 * 8 + lane % 8;
#pragma unroll
  for (int piece = 0; piece < 8; piece += 2) {  // 16 terms
    uint32_t a[2][4], b[2][4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = sample_row + i * 16;
      ldmatrix(a[i], samples + row * kImplicitRowBytes + ((piece + lane / 16) ^ (row & 7)) * 16);
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int row = weight_row + j * 16;
      ldmatrix(b[j], weights + row * kImplicitRowBytes + ((piece + lane / 8 % 2) ^ (row & 7)) * 16);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        mma_16x8x16<T>(sums[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
      }
    }
  }
}

// One block per tile of pixels (x) and block of output channels (y). Chunks of channels are the
// outer loop, taps the inner one. A step's samples are loaded before the step ahead of it is
// multiplied and blended after it.
template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 2)
    deform_conv2d_implicit_mma_kernel(const __grid_constant__ DeformConvImplicitParams p) {
#if __CUDA_ARCH__ >= 800
  using T = typename Tile::T;
  extern __shared__ __align__(1024) unsigned char shared[];
  auto* weights = reinterpret_cast<ImplicitWeights*>(shared + Tile::kPlanOffset);
  const int taps = static_cast<int>(p.conv.taps());
  auto* sources = reinterpret_cast<ImplicitSource*>(weights + taps * Tile::kPixels);
  auto* bias = reinterpret_cast<float*>(sources + taps * Tile::kPixels);
  const int thread = static_cast<int>(threadIdx.x);
  const int chunks = static_cast<int>(p.conv.C / Tile::kChunk);
  const int group_chunks = static_cast<int>(p.conv.group_channels() / Tile::kChunk);
  const int steps = chunks * taps;
  const auto* tiles = static_cast<const unsigned char*>(p.weight_tiles) +
                      static_cast<int64_t>(blockIdx.y) * steps * Tile::kWeightBytes;
  const auto plan = [&](int group) {
    plan_samples<T, Tile::kPixels, Tile::kThreads>(p, blockIdx.x, group, thread, sources, weights);
    __syncthreads();
  };
  const auto stage = [&](int step) { return shared + step % 2 * Tile::kStageBytes; };
  PortableSamples<Tile> samples;
  const auto load = [&](int step, int chunk, int tap) {
    samples.load(static_cast<const uint4*>(p.conv.input) + chunk * 8,
                 sources + tap * Tile::kPixels);
    unsigned char* to = stage(step) + Tile::kSampleBytes;
    const unsigned char* from = tiles + static_cast<int64_t>(step) * Tile::kWeightBytes;
    for (int i = thread * 16; i < Tile::kWeightBytes; i += Tile::kThreads * 16) {
      cp_async(to + i, from + i);
    }
  };
  const auto store = [&](int step, int tap) {
    samples.store(weights + tap * Tile::kPixels, stage(step));
    cp_async_wait();
    __syncthreads();  // the stage is complete, and nobody reads the other one any more
  };

  float sums[2][4][4] = {};
  stage_bias<T, Tile::kColumns, Tile::kThreads>(p, bias);
  plan(0);
  load(0, 0, 0);
  store(0, 0);
  for (int step = 0, chunk = 0, tap = 0; step < steps; ++step) {
    if (++tap == taps) {
      tap = 0;
      ++chunk;
      if (chunk < chunks && chunk % group_chunks == 0) plan(chunk / group_chunks);
    }
    const bool more = step + 1 < steps;
    if (more) load(step + 1, chunk, tap);
    multiply_step<T>(sums, stage(step), stage(step) + Tile::kSampleBytes);
    if (more) store(step + 1, tap);
  }
  __syncthreads();  // nobody reads the stages any more

  const typename Tile::Sums staged{reinterpret_cast<float*>(shared), bias, stores_by_pixel<T>(p)};
  const int row = thread / 128 * 32 + thread % 32 / 4;
  const int column = thread / 32 % 4 * 32 + thread % 4 * 2;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      staged.put_pair(row + i * 16, column + j * 8, sums[i][j][0], sums[i][j][1]);
      staged.put_pair(row + i * 16 + 8, column + j * 8, sums[i][j][2], sums[i][j][3]);
    }
  }
  __syncthreads();
  store_tile<T, Tile::kPixels, Tile::kColumns, Tile::kThreads>(
      p, staged, blockIdx.x, 0, [](const auto* at) { return *at; });
#endif
}

}  // namespace opzoo
