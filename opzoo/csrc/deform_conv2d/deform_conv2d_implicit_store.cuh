// SPDX-License-Identifier: Apache-2.0
// From a tile's sums in shared memory to the result. Any GPU. No torch.
#pragma once

#include "deform_conv2d/deform_conv2d_implicit_sample.cuh"

namespace opzoo {

// fp32 sums of kPixels x kColumns in shared memory, by pixels or, where the result has pixels
// fastest, by output channels; rows padded so that neither writing them from the registers of a
// matrix product nor reading them meets a bank twice.
template <int kPixels, int kColumns>
struct ImplicitSums {
  static constexpr int kPixelPitch = kColumns + 8;
  static constexpr int kColumnPitch = kPixels + 4;
  static constexpr int kFloats = kPixels * kPixelPitch > kColumns* kColumnPitch
                                     ? kPixels * kPixelPitch
                                     : kColumns * kColumnPitch;
  float* sums;
  const float* bias;  // [kColumns], in shared memory too
  bool by_pixel;

  __device__ float* at(int row, int column) const {
    return sums + (by_pixel ? row * kPixelPitch + column : column * kColumnPitch + row);
  }
  // Columns column and column + 1, column even.
  __device__ void put_pair(int row, int column, float left, float right) const {
    if (by_pixel) {
      *reinterpret_cast<float2*>(at(row, column)) = {left, right};
    } else {
      *at(row, column) = left;
      *at(row, column + 1) = right;
    }
  }
};

// Whether 16 bytes of output channels are neighbours.
template <class T>
__device__ bool stores_by_pixel(const DeformConvImplicitParams& p) {
  return p.out_strides.c == 1 && p.conv.K % (16 / sizeof(T)) == 0;
}

// Pixels that one store can write side by side: the largest divisor of 4 by which rows and
// addresses are divisible.
template <class T>
__device__ int stored_pixels(const DeformConvImplicitParams& p) {
  const ImageStrides& s = p.out_strides;
  const auto misfit = static_cast<uint64_t>(reinterpret_cast<uintptr_t>(p.out) / sizeof(T)) |
                      static_cast<uint64_t>(s.n | s.c | s.y | p.conv.OW);
  if (s.x != 1 || p.tile_width_log2 == 0 || p.tile_width_log2 == 1) return 1;
  return misfit % 4 == 0 ? 4 : misfit % 2 == 0 ? 2 : 1;
}

template <class T>
__device__ __forceinline__ void store_pixels(T* to, const float (&values)[4], int count) {
  if constexpr (sizeof(T) == 4) {
    if (count == 4) {
      *reinterpret_cast<float4*>(to) = {values[0], values[1], values[2], values[3]};
    } else if (count == 2) {
      *reinterpret_cast<float2*>(to) = {values[0], values[1]};
    } else {
      *to = values[0];
    }
  } else {
    if (count == 4) {
      *reinterpret_cast<uint2*>(to) = {pack_pair(values[0], values[1], T{}),
                                       pack_pair(values[2], values[3], T{})};
    } else if (count == 2) {
      *reinterpret_cast<uint32_t*>(to) = pack_pair(values[0], values[1], T{});
    } else {
      *to = static_cast<T>(values[0]);
    }
  }
}

// Pixels fastest. kCount of stored_pixels.
template <class T, int kCount, int kPixels, int kColumns, int kThreads, class Read>
__device__ void store_by_column(const DeformConvImplicitParams& p,
                                const ImplicitSums<kPixels, kColumns>& sums,
                                uint32_t tile,
                                int share,
                                const Read& read) {
  constexpr int kGroups = kPixels / kCount;
  constexpr int kStep = kThreads / kGroups;
  const int64_t k0 = static_cast<int64_t>(blockIdx.y) * kColumns;
  const int row = static_cast<int>(threadIdx.x) % kGroups * kCount;
  const OutputPixel pixel = implicit_pixel<kPixels>(p, tile, row);
  if (pixel.y >= p.conv.OH) return;
  const int64_t left = p.conv.K - k0;
  const int columns = left < kColumns ? static_cast<int>(left) : kColumns;
  const int end = columns * (share + 1) / p.splits;
  int column = columns * share / p.splits + static_cast<int>(threadIdx.x) / kGroups;
  T* to = static_cast<T*>(p.out) + index_of(p.out_strides, pixel, k0 + column);
  const int64_t distance = kStep * p.out_strides.c;
#pragma unroll 4
  for (; column < end; column += kStep, to += distance) {
    const float shift = sums.bias[column];
    float values[4];
    if constexpr (kCount == 4) {
      const float4 part = read(reinterpret_cast<const float4*>(sums.at(row, column)));
      values[0] = part.x + shift;
      values[1] = part.y + shift;
      values[2] = part.z + shift;
      values[3] = part.w + shift;
    } else {
      for (int i = 0; i < kCount; ++i) {
        values[i] = read(static_cast<const float*>(sums.at(row + i, column))) + shift;
      }
    }
    store_pixels(to, values, kCount);
  }
}

// out = sums + bias, rounded once; neighbouring threads store neighbouring elements in either
// layout. Where p.splits > 1 this is share number `share` of them. read(const float*) and
// read(const float4*) return what all shares have summed there.
template <class T, int kPixels, int kColumns, int kThreads, class Read>
__device__ void store_tile(const DeformConvImplicitParams& p,
                           const ImplicitSums<kPixels, kColumns>& sums,
                           uint32_t tile,
                           int share,
                           const Read& read) {
  if (!sums.by_pixel) {
    const int count = stored_pixels<T>(p);
    if (count == 4) {
      store_by_column<T, 4, kPixels, kColumns, kThreads>(p, sums, tile, share, read);
    } else if (count == 2) {
      store_by_column<T, 2, kPixels, kColumns, kThreads>(p, sums, tile, share, read);
    } else {
      store_by_column<T, 1, kPixels, kColumns, kThreads>(p, sums, tile, share, read);
    }
    return;
  }
  constexpr int kVector = 16 / sizeof(T);
  constexpr int kVectors = kColumns / kVector;
  const int thread = static_cast<int>(threadIdx.x);
  const int64_t k0 = static_cast<int64_t>(blockIdx.y) * kColumns;
  const int column = thread % kVectors * kVector;
  if (k0 + column >= p.conv.K) return;
  const int end = kPixels * (share + 1) / p.splits;
  int row = kPixels * share / p.splits + thread / kVectors;
  for (; row < end; row += kThreads / kVectors) {
    const OutputPixel pixel = implicit_pixel<kPixels>(p, tile, row);
    if (pixel.y >= p.conv.OH) continue;
    alignas(16) float values[kVector];
#pragma unroll
    for (int i = 0; i < kVector; i += 4) {
      const float4 part = read(reinterpret_cast<const float4*>(sums.at(row, column + i)));
      const float4 shift = *reinterpret_cast<const float4*>(sums.bias + column + i);
      values[i] = part.x + shift.x;
      values[i + 1] = part.y + shift.y;
      values[i + 2] = part.z + shift.z;
      values[i + 3] = part.w + shift.w;
    }
    auto* to = reinterpret_cast<uint4*>(static_cast<T*>(p.out) +
                                        index_of(p.out_strides, pixel, k0 + column));
    if constexpr (sizeof(T) == 2) {
      *to = pack_vector<T>(values);
    } else {
      *to = *reinterpret_cast<const uint4*>(values);
    }
  }
}

// The sums of one warp, 16 pixels x 128 output channels in the fragments of a matrix product
// (common/wgmma.cuh), plus bias, rounded once, to the result: 16 channels at a time through
// kWarpScratch floats of shared memory of its own, so that no other warp waits.
constexpr int kWarpScratchPitch = 20;  // 16-byte rows; 8 lanes that read vectors meet no bank twice
constexpr int kWarpScratch = 16 * kWarpScratchPitch;

// This thread's lane, as if it could be another one next time: what follows from it is computed
// where it is used, not kept in registers from tile to tile.
__device__ __forceinline__ int opaque_lane() {
  int lane = static_cast<int>(threadIdx.x) % 32;
  asm volatile("" : "+r"(lane));
  return lane;
}

template <class T, int kPixels, int kCount>
__device__ __forceinline__ void store_warp_by_column(const DeformConvImplicitParams& p,
                                                     uint32_t tile,
                                                     int first_row,
                                                     int64_t first_k,
                                                     const float* bias,
                                                     const float (&sums)[64],
                                                     float* scratch) {
  constexpr int kGroups = 16 / kCount;
  const int lane = opaque_lane();
  const int row = lane % kGroups * kCount;
  const OutputPixel pixel = implicit_pixel<kPixels>(p, tile, first_row + row);
  const bool exists = pixel.y < p.conv.OH;
  constexpr int kStep = 32 / kGroups;  // columns that a warp stores at once
  T* to = static_cast<T*>(p.out) + index_of(p.out_strides, pixel, first_k + lane / kGroups);
  const int64_t distance = kStep * p.out_strides.c;
  const int64_t left = p.conv.K - first_k;
  const int columns = exists ? (left < 128 ? static_cast<int>(left) : 128) : 0;
#pragma unroll
  for (int j = 0; j < 16; j += 2) {
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 8; ++i) {  // fragment j, then fragment j + 1
      const int column = i / 4 * 8 + lane % 4 * 2 + i % 2;
      scratch[column * kWarpScratchPitch + lane / 4 + i / 2 % 2 * 8] = sums[4 * j + i];
    }
    __syncwarp();
#pragma unroll
    for (int first = 0; first < 16; first += kStep) {
      const int column = first + lane / kGroups;
      const float shift = bias[8 * j + column];
      float values[4];
      for (int i = 0; i < kCount; ++i) {
        values[i] = scratch[column * kWarpScratchPitch + row + i] + shift;
      }
      if (8 * j + column < columns) store_pixels(to, values, kCount);
      to += distance;
    }
  }
}

template <class T, int kPixels>
__device__ __forceinline__ void store_warp_by_pixel(const DeformConvImplicitParams& p,
                                                    uint32_t tile,
                                                    int first_row,
                                                    int64_t first_k,
                                                    const float* bias,
                                                    const float (&sums)[64],
                                                    float* scratch) {
  constexpr int kVector = 16 / sizeof(T);
  constexpr int kVectors = 16 / kVector;  // of a row of the scratch
  constexpr int kRows = 32 / kVectors;    // that a warp stores at once
  const int lane = opaque_lane();
  const int column = lane % kVectors * kVector;
  T* out[16 / kRows];
#pragma unroll
  for (int i = 0; i < 16 / kRows; ++i) {
    const int row = first_row + lane / kVectors + i * kRows;
    const OutputPixel pixel = implicit_pixel<kPixels>(p, tile, row);
    out[i] = pixel.y < p.conv.OH
                 ? static_cast<T*>(p.out) + index_of(p.out_strides, pixel, first_k + column)
                 : nullptr;
  }
#pragma unroll
  for (int j = 0; j < 16; j += 2) {
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      float* at =
          scratch + (lane / 4 + i / 2 % 2 * 8) * kWarpScratchPitch + i / 4 * 8 + lane % 4 * 2;
      *reinterpret_cast<float2*>(at) = {sums[4 * j + i], sums[4 * j + i + 1]};
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 16 / kRows; ++i) {
      alignas(16) float values[kVector];
#pragma unroll
      for (int v = 0; v < kVector; v += 4) {
        const float4 part = *reinterpret_cast<const float4*>(
            scratch + (lane / kVectors + i * kRows) * kWarpScratchPitch + column + v);
        const float4 shift = *reinterpret_cast<const float4*>(bias + 8 * j + column + v);
        values[v] = part.x + shift.x;
        values[v + 1] = part.y + shift.y;
        values[v + 2] = part.z + shift.z;
        values[v + 3] = part.w + shift.w;
      }
      if (out[i] == nullptr || first_k + 8 * j + column >= p.conv.K) continue;
      auto* to = reinterpret_cast<uint4*>(out[i] + 8 * j);
      if constexpr (sizeof(T) == 2) {
        *to = pack_vector<T>(values);
      } else {
        *to = *reinterpret_cast<const uint4*>(values);
      }
    }
  }
}

// first_k: of the result; bias: of that channel on, in shared memory.
template <class T, int kPixels>
__device__ __forceinline__ void store_warp(const DeformConvImplicitParams& p,
                                           uint32_t tile,
                                           int first_row,
                                           int64_t first_k,
                                           const float* bias,
                                           const float (&sums)[64],
                                           float* scratch) {
  const int count = stored_pixels<T>(p);
  if (stores_by_pixel<T>(p)) {
    store_warp_by_pixel<T, kPixels>(p, tile, first_row, first_k, bias, sums, scratch);
  } else if (count == 4) {
    store_warp_by_column<T, kPixels, 4>(p, tile, first_row, first_k, bias, sums, scratch);
  } else if (count == 2) {
    store_warp_by_column<T, kPixels, 2>(p, tile, first_row, first_k, bias, sums, scratch);
  } else {
    store_warp_by_column<T, kPixels, 1>(p, tile, first_row, first_k, bias, sums, scratch);
  }
}

// The bias of this block's output channels to shared memory, as fp32; 0 where there is none.
template <class T, int kColumns, int kThreads>
__device__ void stage_bias(const DeformConvImplicitParams& p, float* staged) {
  const T* bias = static_cast<const T*>(p.bias);
  for (int column = static_cast<int>(threadIdx.x); column < kColumns; column += kThreads) {
    const int64_t k = static_cast<int64_t>(blockIdx.y) * kColumns + column;
    staged[column] = bias && k < p.conv.K ? static_cast<float>(bias[k * p.bias_stride]) : 0.0f;
  }
}

}  // namespace opzoo
