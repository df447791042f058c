// SPDX-License-Identifier: Apache-2.0
// Matrix products on Hopper's tensor cores: fp16 and bf16 as they are, fp32 as one or three
// products of tf32 numbers. The body exists in code for sm_90a only. No torch.
#pragma once

#include <type_traits>

#include "common/tma.cuh"
#include "common/types.h"
#include "common/wgmma.cuh"

namespace opzoo {

// fp32 words of which the tensor core reads sign, exponent and the upper 10 bits of the fraction.
struct Tf32 {
  float value;
};

constexpr int kWgmmaRows = 128;      // rows of an output tile, 64 for each of two warpgroups
constexpr int kWgmmaRowBytes = 128;  // terms of the sum per stage: 64 of 16 bits, 32 of tf32
constexpr int kWgmmaChunk = 64 * kWgmmaRowBytes;  // 64 rows: what one warpgroup reads or stages
constexpr int kWgmmaThreads = 3 * 128;
constexpr int kWgmmaRingBytes = 192 * 1024;
constexpr int kWgmmaStageOut = 2 * 2 * kWgmmaChunk;  // two chunks of output for each warpgroup
constexpr int kWgmmaSharedBytes = kWgmmaRingBytes + kWgmmaStageOut + 1024;  // and room to align

// kCols: columns of an output tile, 256 or 128. kParts: 2 where each operand is a sum hi + lo.
template <class T, int kCols, int kParts>
struct WgmmaStages {
  static constexpr int kA = kWgmmaRows * kWgmmaRowBytes;
  static constexpr int kB = kCols * kWgmmaRowBytes;
  static constexpr int kBytes = kParts * (kA + kB);
  static constexpr int kCount = kWgmmaRingBytes / kBytes;  // 4, 6 or 3
  static constexpr int kDepth = kWgmmaRowBytes / static_cast<int>(sizeof(T));
};

struct WgmmaParams {
  int M = 0, N = 0;
  int k_blocks = 0;            // stages that cover K
  int splits = 1;              // K is cut into so many ranges of k_blocks_per_split stages
  int k_blocks_per_split = 0;  // each range is a unit of work of its own
  int row_units = 0;           // a unit is one tile of rows per block of the cluster
  int col_tiles = 0;
  int units = 0;  // row_units * col_tiles * splits * batch items
  bool a_batched = false, b_batched = false;
  bool store_by_tma = false;  // rows of out are a multiple of 16 bytes apart
  void* out = nullptr;
  float* partial = nullptr;  // with splits > 1: [batch, split, M, partial_pitch] instead of out
  int64_t partial_pitch = 0;
};

struct WgmmaTile {
  int row, col, batch, split, k_begin, k_end;
};

// Units run down a band of kBand row units, then to the next column of the band: the 66 pairs of
// blocks at work at a time read about 16 x 8 tiles' worth of a and b, which L2 holds.
__device__ __forceinline__ WgmmaTile
wgmma_tile(const WgmmaParams& p, int unit, int cols, int cluster, int rank) {
  const int kBand = 16 / cluster;
  const int tiles = p.row_units * p.col_tiles;
  const int matrix = unit / tiles;
  const int within = unit - matrix * tiles;
  const int band = within / (kBand * p.col_tiles);
  const int in_band = within - band * kBand * p.col_tiles;
  const int height = min(p.row_units - band * kBand, kBand);
  WgmmaTile tile;
  tile.row = ((band * kBand + in_band % height) * cluster + rank) * kWgmmaRows;
  tile.col = in_band / height * cols;
  tile.split = matrix % p.splits;
  tile.batch = matrix / p.splits;
  tile.k_begin = tile.split * p.k_blocks_per_split;
  tile.k_end = min(tile.k_begin + p.k_blocks_per_split, p.k_blocks);
  return tile;
}

template <class T, bool kAlongM, bool kAlongN, int kRegisters>
__device__ __forceinline__ void wgmma_multiply(float (&sum)[kRegisters],
                                               uint64_t a,
                                               uint64_t b,
                                               bool accumulate) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    wgmma_bf16<kAlongM, kAlongN>(sum, a, b, accumulate);
  } else if constexpr (std::is_same_v<T, Half>) {
    wgmma_f16<kAlongM, kAlongN>(sum, a, b, accumulate);
  } else {
    static_assert(!kAlongM && !kAlongN, "tf32 operands are read along k only");
    wgmma_tf32(sum, a, b, accumulate);
  }
}

// One stage of the ring into sum: 4 steps of 32 bytes along k.
template <class T, bool kAlongM, bool kAlongN, int kRegisters>
__device__ __forceinline__ void wgmma_stage(float (&sum)[kRegisters],
                                            const char* a,
                                            const char* b,
                                            bool accumulate) {
  const uint64_t left = wgmma_operand(a, kWgmmaChunk);
  const uint64_t right = wgmma_operand(b, kWgmmaChunk);
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    wgmma_multiply<T, kAlongM, kAlongN>(sum,
                                        left + step * (kAlongM ? 2048 : 32) / 16,
                                        right + step * (kAlongN ? 2048 : 32) / 16,
                                        accumulate || step > 0);
  }
}

// Writes 64 x kCols sums of one warpgroup to p.partial: 32-byte pieces of rows.
template <int kCols>
__device__ __forceinline__ void wgmma_write_partial(const WgmmaParams& p,
                                                    const WgmmaTile& tile,
                                                    int first_row,
                                                    const float (&sum)[kCols / 2]) {
  const int thread = static_cast<int>(threadIdx.x) % 128;
  const int64_t item = static_cast<int64_t>(tile.batch) * p.splits + tile.split;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = first_row + thread / 32 * 16 + thread % 32 / 4 + half * 8;
    if (row >= p.M) continue;
    float* out = p.partial + (item * p.M + row) * p.partial_pitch;
#pragma unroll
    for (int j = 0; j < kCols / 8; ++j) {
      const int col = tile.col + j * 8 + thread % 4 * 2;
      if (col >= p.partial_pitch) continue;
      *reinterpret_cast<float2*>(out + col) =
          make_float2(sum[4 * j + half * 2], sum[4 * j + half * 2 + 1]);
    }
  }
}

__device__ __forceinline__ uint32_t pack_pair(float low, float high, Half) {
  const __half2 pair = __floats2half2_rn(low, high);
  return bit_cast<uint32_t>(pair);
}
__device__ __forceinline__ uint32_t pack_pair(float low, float high, BFloat16) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return bit_cast<uint32_t>(pair);
}

// Stages 64 rows x 128 bytes of the output of one warpgroup in shared memory, swizzled. `sum` are
// the registers of these columns: 32 for 64 columns of 16 bits, 16 for 32 columns of fp32.
template <class Out>
__device__ __forceinline__ void wgmma_stage_out(char* shared, const float* sum) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp_row = static_cast<int>(threadIdx.x) % 128 / 32 * 16;
  if constexpr (sizeof(Out) == 2) {
    // Lane l names row l % 16 of the warp's 16 and, by l / 16, the left or right 8 of 16 columns.
    const int row = warp_row + lane % 16;
    const uint32_t base = shared_address(shared) + row * 128;
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      const uint32_t piece = (j + lane / 16) ^ (row % 8);
      const float* d = sum + 4 * j;
      stmatrix(base + piece * 16,
               pack_pair(d[0], d[1], Out()),
               pack_pair(d[2], d[3], Out()),
               pack_pair(d[4], d[5], Out()),
               pack_pair(d[6], d[7], Out()));
    }
  } else {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = warp_row + lane / 4 + half * 8;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int piece = (j * 2 + lane % 4 / 2) ^ (row % 8);
        *reinterpret_cast<float2*>(shared + row * 128 + piece * 16 + lane % 2 * 8) =
            make_float2(sum[4 * j + half * 2], sum[4 * j + half * 2 + 1]);
      }
    }
  }
}

// The staged chunk to rows of out that the copy engine cannot address: a warp writes a row, or two
// of fp32, at a time.
template <class Out>
__device__ __forceinline__ void wgmma_copy_out(
    const WgmmaParams& p, const char* shared, int batch, int first_row, int first_col) {
  constexpr int kCols = kWgmmaRowBytes / static_cast<int>(sizeof(Out));
  const int thread = static_cast<int>(threadIdx.x) % 128;
  Out* out = static_cast<Out*>(p.out) + static_cast<int64_t>(batch) * p.M * p.N;
#pragma unroll 4
  for (int i = thread; i < 64 * kCols; i += 128) {
    const int row = i / kCols;
    const int byte = i % kCols * static_cast<int>(sizeof(Out));
    const Out value = *reinterpret_cast<const Out*>(shared + row * 128 + (byte ^ (row % 8 * 16)));
    const int col = first_col + i % kCols;
    if (first_row + row < p.M && col < p.N) {
      out[static_cast<int64_t>(first_row + row) * p.N + col] = value;
    }
  }
}

// 64 x kCols sums of one warpgroup to out, in chunks of 128 bytes of columns through two buffers:
// while the copy engine reads one, the next chunk is written to the other.
template <class Out, int kCols>
__device__ __forceinline__ void wgmma_write_out(const WgmmaParams& p,
                                                const CUtensorMap& out_map,
                                                const WgmmaTile& tile,
                                                int first_row,
                                                char* buffers,
                                                int group,
                                                const float (&sum)[kCols / 2]) {
  constexpr int kChunkCols = kWgmmaRowBytes / static_cast<int>(sizeof(Out));
  const bool leader = threadIdx.x % 128 == 0;
#pragma unroll
  for (int chunk = 0; chunk < kCols / kChunkCols; ++chunk) {
    const int col = tile.col + chunk * kChunkCols;
    char* buffer = buffers + chunk % 2 * kWgmmaChunk;
    if (leader) tma_store_wait_read<1>();
    named_barrier(1 + group, 128);  // the buffer's last reader is done
    wgmma_stage_out<Out>(buffer, sum + chunk * kChunkCols / 2);
    fence_async_proxy();
    named_barrier(1 + group, 128);  // the chunk is complete
    if (!p.store_by_tma) {
      wgmma_copy_out<Out>(p, buffer, tile.batch, first_row, col);
    } else if (leader && first_row < p.M && col < p.N) {
      tma_store(out_map, buffer, col, first_row, tile.batch);
    }
  }
}

// Work mapping. A block has three warpgroups and stays on its multiprocessor for the whole product
// (one block fills the shared memory). It takes output tiles of 128 x kCols in turn:
//   - thread 0 of warpgroup 0, the producer, asks the copy engine for the operands' 128-byte wide
//     slices along k, stage after stage of a ring, as far ahead as the ring has room. It runs on
//     into the next tile while the others still write the last one.
//   - warpgroups 1 and 2, the consumers, own 64 rows of the tile each, as kCols / 2 sums per
//     thread. With 256 columns that is 128 of the 232 registers which the producer's warpgroup
//     leaves to them, and the tensor core reads 80 bytes of shared memory a clock, of the 128 there
//     are; with 128 columns it reads 96, but half as large tiles fill the GPU with smaller
//     products.
// Per stage, barrier full counts the bytes that have landed, barrier empty the consumers that are
// done reading. In a cluster of two blocks, which own tiles one below the other, each block loads
// half of B for both: L2 serves 32 KB instead of 48 per stage, worth 2% at 8192 cubed. So a stage
// is refilled only when the consumers of both blocks have left it.
//
// kAlongM: a is contiguous along m (else along k); kAlongN: b is contiguous along n (else along k).
// kParts = 2: a and b are given as hi + lo, two items per batch item, and lo*hi + hi*lo + hi*hi is
// summed. The tensor core truncates when it adds, so each stage starts from zero there and is added
// in fp32, rounded, to a second set of sums.
//
// `skip` (may be null): where *skip is not 0, someone else computes the product.
template <class T, int kCols, bool kAlongM, bool kAlongN, int kParts>
__global__ void __launch_bounds__(kWgmmaThreads, 1)
    matmul_wgmma_kernel(const __grid_constant__ CUtensorMap a_map,
                        const __grid_constant__ CUtensorMap b_map,
                        const __grid_constant__ CUtensorMap out_map,
                        const __grid_constant__ WgmmaParams p,
                        const int* skip) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Stages = WgmmaStages<T, kCols, kParts>;
  using Out = std::conditional_t<std::is_same_v<T, Tf32>, float, T>;
  constexpr int kDepth = Stages::kDepth;
  constexpr int kPartA = Stages::kA, kPartB = Stages::kB;
  extern __shared__ char dynamic[];
  __shared__ uint64_t full[Stages::kCount];
  __shared__ uint64_t empty[Stages::kCount];
  char* ring = dynamic + (1024 - shared_address(dynamic) % 1024) % 1024;

  const int thread = static_cast<int>(threadIdx.x);
  const int cluster = static_cast<int>(cluster_size());
  const int rank = static_cast<int>(cluster_rank());
  const int first_unit = static_cast<int>(blockIdx.x) / cluster;
  const int unit_step = static_cast<int>(gridDim.x) / cluster;
  const int units = skip != nullptr && *skip != 0 ? 0 : p.units;
  if (thread == 0) {
    for (int stage = 0; stage < Stages::kCount; ++stage) {
      mbarrier_init(&full[stage], 1);
      mbarrier_init(&empty[stage], 2 * cluster);
    }
    mbarrier_fence_init();
    tma_prefetch_map(a_map);
    tma_prefetch_map(b_map);
  }
  cluster_barrier();  // nobody touches a neighbour's barriers before they are initialised

  if (thread < 128) {
    shrink_registers<40>();
    if (thread == 0) {
      const int share = kCols / cluster;  // the columns of B this block loads for the cluster
      const auto blocks = static_cast<uint16_t>((1 << cluster) - 1);
      int stage = 0;
      uint32_t phase = 0;
      for (int unit = first_unit; unit < units; unit += unit_step) {
        const WgmmaTile tile = wgmma_tile(p, unit, kCols, cluster, rank);
        const int first_col = tile.col + rank * share;
        for (int k = tile.k_begin; k < tile.k_end; ++k) {
          mbarrier_wait(&empty[stage], phase ^ 1);
          mbarrier_arrive_expect(&full[stage], Stages::kBytes);
          for (int part = 0; part < kParts; ++part) {
            char* a = ring + stage * Stages::kBytes + part * kPartA;
            char* b = ring + stage * Stages::kBytes + kParts * kPartA + part * kPartB +
                      rank * share * kWgmmaRowBytes;
            const int a_item = (p.a_batched ? tile.batch : 0) * kParts + part;
            const int b_item = (p.b_batched ? tile.batch : 0) * kParts + part;
            if constexpr (kAlongM) {
              tma_load(a, a_map, &full[stage], tile.row, k * kDepth, a_item);
              tma_load(a + kWgmmaChunk, a_map, &full[stage], tile.row + 64, k * kDepth, a_item);
            } else {
              tma_load(a, a_map, &full[stage], k * kDepth, tile.row, a_item);
            }
            for (int col = 0; col < share; col += kAlongN ? 64 : share) {
              const int x = kAlongN ? first_col + col : k * kDepth;
              const int y = kAlongN ? k * kDepth : first_col;
              char* target = b + col * kWgmmaRowBytes;
              if (cluster == 1) {
                tma_load(target, b_map, &full[stage], x, y, b_item);
              } else {
                tma_load_multicast(target, b_map, &full[stage], blocks, x, y, b_item);
              }
            }
          }
          if (++stage == Stages::kCount) {
            stage = 0;
            phase ^= 1;
          }
        }
      }
    }
    __syncwarp();
  } else {
    grow_registers<232>();
    const int group = thread / 128 - 1;
    char* buffers = ring + kWgmmaRingBytes + group * 2 * kWgmmaChunk;
    int stage = 0;
    uint32_t phase = 0;
    // One thread speaks for the warpgroup, to the barrier of each block of the cluster.
    const auto release = [&](int which) {
      if (thread % 128 < cluster) mbarrier_arrive_remote(&empty[which], thread % 128);
    };
    for (int unit = first_unit; unit < units; unit += unit_step) {
      const WgmmaTile tile = wgmma_tile(p, unit, kCols, cluster, rank);
      float sum[kCols / 2];
      if constexpr (kParts == 2) {
#pragma unroll
        for (float& value : sum) value = 0;
      }
      int previous = 0;
      for (int k = tile.k_begin; k < tile.k_end; ++k) {
        const char* a = ring + stage * Stages::kBytes + group * kWgmmaChunk;
        const char* b = ring + stage * Stages::kBytes + kParts * kPartA;
        mbarrier_wait(&full[stage], phase);
        wgmma_fence();
        if constexpr (kParts == 1) {
          wgmma_stage<T, kAlongM, kAlongN>(sum, a, b, k > tile.k_begin);
          wgmma_commit();
          // One group stays in flight: this stage multiplies while the one before is released.
          if (k > tile.k_begin) {
            wgmma_wait<1>();
            release(previous);
          }
        } else {
          float part[kCols / 2];
          wgmma_stage<T, kAlongM, kAlongN>(part, a + kPartA, b, false);  // lo * hi
          wgmma_stage<T, kAlongM, kAlongN>(part, a, b + kPartB, true);   // hi * lo
          wgmma_stage<T, kAlongM, kAlongN>(part, a, b, true);            // hi * hi
          wgmma_commit();
          wgmma_wait<0>();
          release(stage);
#pragma unroll
          for (int i = 0; i < kCols / 2; ++i) sum[i] += part[i];
        }
        previous = stage;
        if (++stage == Stages::kCount) {
          stage = 0;
          phase ^= 1;
        }
      }
      if constexpr (kParts == 1) {
        wgmma_wait<0>();
        release(previous);
      }
      const int first_row = tile.row + group * 64;
      if (p.partial != nullptr) {
        wgmma_write_partial<kCols>(p, tile, first_row, sum);
      } else {
        wgmma_write_out<Out, kCols>(p, out_map, tile, first_row, buffers, group, sum);
      }
    }
    if (thread % 128 == 0) tma_store_wait_read<0>();  // shared memory outlives its last reader
  }
  cluster_barrier();  // and a block outlives its neighbour's copies into it
#endif
}

}  // namespace opzoo
