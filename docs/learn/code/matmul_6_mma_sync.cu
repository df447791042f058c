// SPDX-License-Identifier: Apache-2.0
// matmul, step 6: tensor cores.
//
// mma.sync multiplies a 16 x 16 tile of A by a 16 x 8 tile of B in one instruction of a whole warp:
// 2048 multiply-adds, where 32 ordinary cores would do 32. The operands are bf16, the sums fp32.
// Each thread holds a few elements of every tile in registers, by a fixed pattern (PTX ISA,
// "mma.m16n8k16"); ldmatrix fetches them from shared memory in that pattern. A warp owns 64 x 32 of
// C: 4 x 4 instructions per 16 k. cp.async copies the tiles to shared memory without passing
// registers, two steps ahead, through a ring of three.
//
// M and N must be multiples of the tile, K of 32. Needs compute capability 8.0.
#include <cuda_bf16.h>

#include "matmul.cuh"

using bf16 = __nv_bfloat16;

// [instructions
__device__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Starts a copy of 16 bytes to shared memory.
__device__ void copy_16(bf16* to, const bf16* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from)
               : "memory");
}
__device__ void copy_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
// Returns when all but this thread's last kPending groups have landed.
template <int kPending>
__device__ void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Four 8 x 8 tiles; lane l names the address of row l % 8 of tile l / 8. Thread l receives elements
// 2 (l % 4) and 2 (l % 4) + 1 of row l / 4 of each tile; transposed, of column l / 4.
__device__ void load_tiles(uint32_t (&r)[4], const bf16* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}
__device__ void load_tiles_transposed(uint32_t (&r)[4], const bf16* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}

// d[16 x 8] += a[16 x 16] b[16 x 8]. Thread l holds d[l / 4][2 (l % 4) + {0, 1}] and the same 8
// rows further down.
__device__ void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// instructions]

// [kernel
constexpr int kStepK = 32, kStages = 3;

// 8 unused elements behind each row shift the next one by 16 bytes: the 8 rows that ldmatrix reads
// at a time then lie in 8 different groups of banks.
template <int kTileM, int kTileN>
struct Stage {
  bf16 a[kTileM][kStepK + 8];
  bf16 b[kStepK][kTileN + 8];
};

template <int kTileM, int kTileN>
__global__ void matmul_kernel(const bf16* A, const bf16* B, bf16* C, int N, int K) {
  constexpr int kThreads = kTileM / 64 * (kTileN / 32) * 32;
  extern __shared__ __align__(16) char dynamic[];
  auto* stages = reinterpret_cast<Stage<kTileM, kTileN>*>(dynamic);
  const int t = threadIdx.x, lane = t % 32, warp = t / 32;
  const int row = warp / (kTileN / 32) * 64,
            col = warp % (kTileN / 32) * 32;  // of this warp's part
  A += int64_t{blockIdx.y} * kTileM * K;
  B += blockIdx.x * kTileN;

  auto load = [&](int step) {  // 4 threads copy a row of a, kTileN / 8 threads a row of b
    if (step * kStepK < K) {
      Stage<kTileM, kTileN>& s = stages[step % kStages];
      for (int i = t; i < kTileM * kStepK / 8; i += kThreads) {
        copy_16(&s.a[i / 4][i % 4 * 8], &A[int64_t{i / 4} * K + step * kStepK + i % 4 * 8]);
      }
      for (int i = t; i < kStepK * kTileN / 8; i += kThreads) {
        const int k = i / (kTileN / 8), n = i % (kTileN / 8) * 8;
        copy_16(&s.b[k][n], &B[int64_t{step * kStepK + k} * N + n]);
      }
    }
    copy_commit();  // an empty group behind the end keeps the count right
  };

  float sum[4][4][4] = {};
  load(0);
  load(1);
  for (int step = 0; step * kStepK < K; ++step) {
    copy_wait<1>();   // this thread's copies of this step have landed
    __syncthreads();  // everyone's have, and everyone has left the stage that is refilled next
    load(step + 2);
    const Stage<kTileM, kTileN>& s = stages[step % kStages];
#pragma unroll
    for (int k = 0; k < kStepK; k += 16) {
      uint32_t a[4][4], b[2][4];
      for (int i = 0; i < 4; ++i)
        load_tiles(a[i], &s.a[row + i * 16 + lane % 16][k + lane / 16 * 8]);
      for (int j = 0; j < 2; ++j) {
        load_tiles_transposed(b[j], &s.b[k + lane % 16][col + j * 16 + lane / 16 * 8]);
      }
      for (int i = 0; i < 4; ++i) {
        for (int j = 0; j < 4; ++j) {
          multiply(sum[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
        }
      }
    }
  }

  C += (int64_t{blockIdx.y} * kTileM + row + lane / 4) * N;
  C += blockIdx.x * kTileN + col + lane % 4 * 2;
  for (int i = 0; i < 4; ++i) {
    for (int j = 0; j < 4; ++j) {
      bf16* out = C + int64_t{i} * 16 * N + j * 8;
      const float (&d)[4] = sum[i][j];
      *reinterpret_cast<__nv_bfloat162*>(out) = __floats2bfloat162_rn(d[0], d[1]);
      *reinterpret_cast<__nv_bfloat162*>(out + int64_t{8} * N) = __floats2bfloat162_rn(d[2], d[3]);
    }
  }
}
// kernel]

template <int kTileM, int kTileN>
auto launch(const learn::MatmulProblem<bf16>& p) {
  constexpr int kThreads = kTileM / 64 * (kTileN / 32) * 32;
  constexpr int kBytes = kStages * sizeof(Stage<kTileM, kTileN>);
  const auto kernel = matmul_kernel<kTileM, kTileN>;
  // More than 48 KB of shared memory must be asked for.
  CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  return [&p, kernel] {
    const dim3 grid(p.N / kTileN, p.M / kTileM);
    kernel<<<grid, kThreads, kBytes>>>(p.a(), p.b(), p.c(), p.N, p.K);
  };
}

template <int kTileM, int kTileN>
void run(learn::MatmulProblem<bf16>& small, learn::MatmulProblem<bf16>& p) {
  const std::string what = "block " + std::to_string(kTileM * kTileN / 64);
  small.check(what, launch<kTileM, kTileN>(small));
  p.measure(what, launch<kTileM, kTileN>(p), learn::limits().tensor_per_s);
}

int main() {
  learn::MatmulProblem<bf16> small(256, 384, 96), p(learn::kSize, learn::kSize, learn::kSize);
  p.print();
  run<64, 64>(small, p);
  run<128, 64>(small, p);
  run<128, 128>(small, p);
  run<256, 128>(small, p);
}
