// SPDX-License-Identifier: Apache-2.0
// Operands of the implicit matrix products laid out as these read them. Any GPU. No torch.
#pragma once

#include "deform_conv2d/deform_conv2d_implicit_sample.cuh"

namespace opzoo {

constexpr int kPrepareThreads = 256;

struct DeformConvPrepareParams {
  // The weight, as output channels k and chunks of 128 bytes of input channels.
  const void* weight;
  ImageStrides weight_strides;
  int64_t K, C;
  int kernel_w, taps;
  int columns;    // output channels of a block of the product
  int64_t units;  // (output channels, rounded up to whole blocks) x chunks
  void* tiles;
  int* too_large;  // where there are two parts: becomes 1 where a weight has none
  int64_t weight_blocks;
  // The images: [.., C, pixels] to [.., pixels, C].
  const void* from;
  void* to;
  int64_t pixels, pixel_tiles, channel_tiles;
};

// Units (k, chunk) of a block of threads.
__host__ __device__ inline int prepare_units(int taps) {
  return kPrepareThreads / (8 * taps) > 1 ? kPrepareThreads / (8 * taps) : 1;
}
__host__ __device__ inline int prepare_shared_bytes(int taps) {
  constexpr int kTileBytes = 64 * 33 * 4;
  const int weight_bytes = prepare_units(taps) * taps * kImplicitRowBytes;
  return weight_bytes > kTileBytes ? weight_bytes : kTileBytes;
}

// Lays the weight out as the product reads it, so that a step's operand is one linear copy:
// tiles [block of `columns` output channels][chunk][tap][part][output channel][channels of the
// chunk], rows of 128 bytes swizzled as in common/tma.cuh, output channels beyond K zero. kParts is
// 2 for fp32 as a sum of two tf32 numbers; with one part fp32 is rounded to tf32. In a contiguous
// weight the chunk of one output channel lies together: it is read in order and turned in shared
// memory. A channels-last one is read as it is written.
template <class T, int kParts>
__device__ void lay_out_weight(const DeformConvPrepareParams& p, unsigned char* shared) {
  constexpr int kVector = 16 / sizeof(T);
  constexpr int kChunk = 8 * kVector;
  const int units = prepare_units(p.taps);
  const int unit_vectors = 8 * p.taps;
  const int64_t chunks = p.C / kChunk;
  const int64_t first_unit = static_cast<int64_t>(blockIdx.x) * units;
  const ImageStrides& strides = p.weight_strides;
  const bool aligned = reinterpret_cast<uintptr_t>(p.weight) % 16 == 0;
  const bool whole = strides.x == 1 && strides.y == p.kernel_w && strides.c == p.taps &&
                     strides.n % kVector == 0 && aligned;
  const bool by_channel =
      strides.c == 1 && aligned && (strides.n | strides.y | strides.x) % kVector == 0;
  T* staged = reinterpret_cast<T*>(shared);  // [unit][channel][tap]
  for (int i = threadIdx.x; !by_channel && i < units * unit_vectors; i += kPrepareThreads) {
    const int64_t unit = first_unit + i / unit_vectors;
    const int64_t k = unit / chunks;
    const int first = i % unit_vectors * kVector;  // element of the chunk
    const T* line =
        static_cast<const T*>(p.weight) + k * strides.n + unit % chunks * kChunk * strides.c;
    alignas(16) T value[kVector];
    for (int j = 0; j < kVector; ++j) value[j] = T(0.0f);
    if (k < p.K && whole) {
      *reinterpret_cast<uint4*>(value) = *reinterpret_cast<const uint4*>(line + first);
    } else if (k < p.K) {
      for (int j = 0; j < kVector; ++j) {
        const int channel = (first + j) / p.taps;
        const int tap = first + j - channel * p.taps;
        value[j] =
            line[channel * strides.c + tap / p.kernel_w * strides.y + tap % p.kernel_w * strides.x];
      }
    }
    reinterpret_cast<uint4*>(shared)[i] = *reinterpret_cast<const uint4*>(value);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < units * unit_vectors; i += kPrepareThreads) {
    const int64_t unit = first_unit + i / unit_vectors;
    if (unit >= p.units) break;
    const int64_t k = unit / chunks;
    const int tap = i % unit_vectors / 8;
    const int vector = i % 8;
    const T* chunk = staged + i / unit_vectors * unit_vectors * kVector;
    alignas(16) T direct[kVector];
    if (by_channel) {
      const int64_t at = k * strides.n + (unit % chunks * kChunk + vector * kVector) +
                         tap / p.kernel_w * strides.y + tap % p.kernel_w * strides.x;
      const uint4 zero{0, 0, 0, 0};
      *reinterpret_cast<uint4*>(direct) =
          k < p.K ? *reinterpret_cast<const uint4*>(static_cast<const T*>(p.weight) + at) : zero;
    }
    alignas(16) T value[kParts][kVector];
    for (int j = 0; j < kVector; ++j) {
      const T element = by_channel ? direct[j] : chunk[(vector * kVector + j) * p.taps + tap];
      if constexpr (sizeof(T) == 4) {
        value[0][j] = nearest_tf32(element);
        if constexpr (kParts == 2) {
          value[1][j] = nearest_tf32(element - value[0][j]);
          if (too_large_for_parts(element)) *p.too_large = 1;
        }
      } else {
        value[0][j] = element;
      }
    }
    const int column = static_cast<int>(k % p.columns);
    const int64_t tile = (k / p.columns * chunks + unit % chunks) * p.taps + tap;
    for (int part = 0; part < kParts; ++part) {
      const int64_t row = (tile * kParts + part) * p.columns + column;
      static_cast<uint4*>(p.tiles)[row * 8 + (vector ^ (column & 7))] =
          *reinterpret_cast<const uint4*>(value[part]);
    }
  }
}

// A tile of 128 bytes of pixels by 128 bytes of channels to channels-last, C even for 16-bit words,
// through shared memory so that both sides are coalesced: a warp reads 128 bytes of a channel and
// writes 128 bytes of a pixel. A thread has all its loads in flight at once.
template <class T>
__device__ void copy_channels_last(const DeformConvPrepareParams& p,
                                   int64_t block,
                                   unsigned char* shared) {
  constexpr int kTile = kImplicitRowBytes / sizeof(T);
  constexpr int kWords = 4 / sizeof(T);  // elements of a lane
  constexpr int kWarps = kPrepareThreads / 32;
  constexpr int kRows = kTile / kWarps;
  // An odd number of words to a row: a column meets no bank twice.
  auto* tile = reinterpret_cast<uint32_t (*)[33]>(shared);
  const int64_t row_of_tiles = block / p.pixel_tiles;
  const int64_t image = row_of_tiles / p.channel_tiles * p.C * p.pixels;
  const int64_t first_pixel = (block - row_of_tiles * p.pixel_tiles) * kTile;
  const int64_t first_channel = row_of_tiles % p.channel_tiles * kTile;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int64_t pixel = first_pixel + lane * kWords;
  const T* from = static_cast<const T*>(p.from) + image + pixel;
  const bool whole = p.pixels % kWords == 0 && reinterpret_cast<uintptr_t>(p.from) % 4 == 0;
  uint32_t loaded[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int64_t channel = first_channel + warp + i * kWarps;
    const T* at = from + channel * p.pixels;
    loaded[i] = 0;
    if (channel >= p.C || pixel >= p.pixels) continue;
    if (whole) {
      loaded[i] = *reinterpret_cast<const uint32_t*>(at);
    } else if constexpr (kWords == 2) {
      loaded[i] = at[0].bits;
      if (pixel + 1 < p.pixels) loaded[i] |= static_cast<uint32_t>(at[1].bits) << 16;
    }
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) tile[warp + i * kWarps][lane] = loaded[i];
  __syncthreads();
  const int64_t channel = first_channel + lane * kWords;
  if (channel >= p.C) return;
  T* to = static_cast<T*>(p.to) + image + channel;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int row = warp + i * kWarps;
    if (first_pixel + row >= p.pixels) break;
    uint32_t word;
    if constexpr (kWords == 1) {
      word = tile[lane][row];
    } else {
      const uint32_t low = tile[2 * lane][row / 2];
      const uint32_t high = tile[2 * lane + 1][row / 2];
      word = __byte_perm(low, high, row % 2 == 0 ? 0x5410 : 0x7632);
    }
    *reinterpret_cast<uint32_t*>(to + (first_pixel + row) * p.C) = word;
  }
}

// Both in one launch: the first blocks lay out the weight, the others copy a tile of the input
// each.
template <class T, int kParts>
__global__ void __launch_bounds__(kPrepareThreads)
    deform_conv2d_prepare_kernel(const __grid_constant__ DeformConvPrepareParams p) {
  extern __shared__ __align__(16) unsigned char prepared[];
#if __CUDA_ARCH__ >= 900
  // The product may be launched and compute its plan, which needs nothing from here.
  asm volatile("griddepcontrol.launch_dependents;");
#endif
  if (blockIdx.x < p.weight_blocks) {
    lay_out_weight<T, kParts>(p, prepared);
  } else {
    copy_channels_last<T>(p, blockIdx.x - p.weight_blocks, prepared);
  }
}

}  // namespace opzoo
