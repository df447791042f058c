// SPDX-License-Identifier: Apache-2.0
// matmul, step 7: Hopper's copy engine (TMA) and its tensor cores for four warps at once (wgmma).
//
// mma.sync makes every warp fetch its operands into registers. wgmma reads them straight from
// shared memory, 64 x 16 of A and 16 x 256 of B by one instruction of 128 threads, and returns at
// once. TMA copies a whole box of a matrix by one instruction of one thread. So the work is divided
// by trade: one warp, the producer, only asks for copies; two warpgroups, the consumers, only
// multiply. They meet at two barriers per stage of a ring in shared memory: `full` completes when
// the bytes of a stage have landed, `empty` when both consumers have read it. Nobody waits for the
// whole block.
//
// The instructions are wrapped in opzoo's own headers, which say what each one promises: build with
// -I opzoo/csrc and for sm_90a. N and K must be multiples of 8 (16-byte rows for TMA); TMA reads
// zeros outside the matrices.
#include <cuda_bf16.h>

#include "common/tma.cuh"
#include "common/wgmma.cuh"
#include "matmul.cuh"

using bf16 = __nv_bfloat16;

// [kernel
constexpr int kTileM = 128, kTileN = 256, kTileK = 64;  // 64 bf16 are the 128 bytes of a box's row
constexpr int kConsumers = 2, kThreads = kConsumers * 128 + 32;

struct Stage {
  bf16 a[kTileM][kTileK];           // one box
  bf16 b[kTileN / 64][kTileK][64];  // four boxes, each 64 columns wide
};

template <int kStages>
__global__ void __launch_bounds__(kThreads, 1)
    matmul_kernel(const __grid_constant__ CUtensorMap a_map,
                  const __grid_constant__ CUtensorMap b_map,
                  bf16* C,
                  int M,
                  int N,
                  int K) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ char dynamic[];  // with 1024 bytes to spare: boxes start at multiples of 1024
  const uint32_t skipped = (1024 - opzoo::shared_address(dynamic) % 1024) % 1024;
  auto* stages = reinterpret_cast<Stage*>(dynamic + skipped);
  __shared__ uint64_t full[kStages], empty[kStages];
  const int warp = threadIdx.x / 32, steps = (K + kTileK - 1) / kTileK;
  const int row0 = blockIdx.x * kTileM, col0 = blockIdx.y * kTileN;
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      opzoo::mbarrier_init(&full[s], 1);
      opzoo::mbarrier_init(&empty[s], kConsumers);
    }
    opzoo::mbarrier_fence_init();
  }
  __syncthreads();

  if (warp == kConsumers * 4) {  // the producer: one thread of it
    if (threadIdx.x % 32 != 0) return;
    for (int step = 0; step < steps; ++step) {
      const int s = step % kStages, round = step / kStages, k0 = step * kTileK;
      opzoo::mbarrier_wait(&empty[s], (round + 1) % 2);  // passes at once in round 0
      opzoo::mbarrier_arrive_expect(&full[s], sizeof(Stage));
      opzoo::tma_load(stages[s].a, a_map, &full[s], k0, row0, 0);
      for (int j = 0; j < kTileN / 64; ++j) {
        opzoo::tma_load(stages[s].b[j], b_map, &full[s], col0 + j * 64, k0, 0);
      }
    }
    return;
  }

  const int group = warp / 4;  // this warpgroup owns rows 64 * group to 64 * group + 63 of the tile
  float sum[kTileN / 2];       // 64 x 256 sums over 128 threads
  for (int step = 0; step < steps; ++step) {
    const int s = step % kStages, round = step / kStages;
    opzoo::mbarrier_wait(&full[s], round % 2);
    const uint64_t a = opzoo::wgmma_operand(stages[s].a[group * 64], 0);
    const uint64_t b = opzoo::wgmma_operand(stages[s].b, sizeof(stages[s].b[0]));
    opzoo::wgmma_fence();
#pragma unroll
    for (int i = 0; i < kTileK / 16; ++i) {  // the next 16 k: 32 bytes on in A, 16 rows in B
      opzoo::wgmma_bf16<false, true>(sum, a + i * 32 / 16, b + i * 2048 / 16, step > 0 || i > 0);
    }
    opzoo::wgmma_commit();
    // The products of the step before are done: its stage may be refilled, while these still run.
    opzoo::wgmma_wait<1>();
    if (threadIdx.x % 128 == 0 && step > 0) opzoo::mbarrier_arrive(&empty[(step - 1) % kStages]);
  }
  opzoo::wgmma_wait<0>();

  const int lane = threadIdx.x % 32;
  for (int half = 0; half < 2; ++half) {
    const int row = row0 + group * 64 + warp % 4 * 16 + half * 8 + lane / 4;
    if (row >= M) continue;
#pragma unroll
    for (int j = 0; j < kTileN / 8; ++j) {
      const int col = col0 + j * 8 + lane % 4 * 2;
      if (col >= N) continue;
      *reinterpret_cast<__nv_bfloat162*>(C + int64_t{row} * N + col) =
          __floats2bfloat162_rn(sum[4 * j + half * 2], sum[4 * j + half * 2 + 1]);
    }
  }
#endif
}
// kernel]

CUtensorMap map_of(const bf16* matrix, int rows, int cols, int box_rows) {
  const opzoo::TmaTensor tensor = {CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                                   sizeof(bf16),
                                   matrix,
                                   {cols, rows, 1},
                                   {cols, int64_t{rows} * cols}};
  CUtensorMap map;
  if (opzoo::make_tensor_map(map, tensor, box_rows) != 0) {
    std::printf("FAILED: no tensor map of a %d x %d matrix\n", rows, cols);
    std::exit(1);
  }
  return map;
}

template <int kStages>
auto launch(const learn::MatmulProblem<bf16>& p) {
  const CUtensorMap a = map_of(p.a(), p.M, p.K, kTileM), b = map_of(p.b(), p.K, p.N, kTileK);
  constexpr int kBytes = kStages * sizeof(Stage) + 1024;
  const auto kernel = matmul_kernel<kStages>;
  CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  return [&p, a, b, kernel] {
    const dim3 grid(learn::div_up(p.M, kTileM), learn::div_up(p.N, kTileN));
    kernel<<<grid, kThreads, kBytes>>>(a, b, p.c(), p.M, p.N, p.K);
  };
}

template <int kStages>
void run(learn::MatmulProblem<bf16>& odd, learn::MatmulProblem<bf16>& p) {
  const std::string what = "stages " + std::to_string(kStages);
  odd.check(what, launch<kStages>(odd));
  p.measure(what, launch<kStages>(p), learn::limits().tensor_per_s);
}

int main() {
  learn::require_gpu();
  if (learn::attribute(cudaDevAttrComputeCapabilityMajor) != 9) {
    std::printf("SKIPPED: wgmma exists in GPUs of compute capability 9.0 only\n");
    return 77;
  }
  learn::MatmulProblem<bf16> odd(199, 328, 152), p(learn::kSize, learn::kSize, learn::kSize);
  p.print();
  run<2>(odd, p);
  run<3>(odd, p);
  run<4>(odd, p);
}
