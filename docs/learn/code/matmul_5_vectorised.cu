// SPDX-License-Identifier: Apache-2.0
// matmul, step 5: 16 bytes per access, and the next tiles on their way while these are used.
//
// As step 4, but a thread's 8 rows are two groups of 4 neighbours, and so are its columns: one
// instruction reads 4 numbers from shared memory, and a k costs 4 reads for 64 multiply-adds
// instead of 16. Memory is read in float4 as well. Those loads are issued before the multiply-adds
// of the current tile and stored to the other half of shared memory after them: their half a
// microsecond passes during the arithmetic, and one __syncthreads per step is enough.
//
// M and N must be multiples of the tile and K of 8.
#include "matmul.cuh"

// [kernel
constexpr int kStepK = 8;

__device__ float4& float4_at(float* p) {
  return *reinterpret_cast<float4*>(p);
}
__device__ float4 float4_at(const float* p) {
  return *reinterpret_cast<const float4*>(p);
}

template <int kTileM, int kTileN>
__global__ void matmul_kernel(const float* A, const float* B, float* C, int N, int K) {
  constexpr int kCols = kTileN / 8, kThreads = kTileM * kTileN / 64;
  constexpr int kA = kTileM * kStepK / 4 / kThreads, kB = kTileN * kStepK / 4 / kThreads;
  static_assert(kA >= 1 && kB >= 1, "every thread loads");
  __shared__ __align__(16) float a[2][kStepK][kTileM + 4], b[2][kStepK][kTileN];
  const int t = threadIdx.x, x = t % kCols * 4, y = t / kCols * 4;
  A += int64_t{blockIdx.y} * kTileM * K;
  B += blockIdx.x * kTileN;
  float4 next_a[kA], next_b[kB];  // on their way from memory

  auto load = [&](int k0) {  // 2 threads read 8 k of a row of A, kTileN / 4 threads a row of B
    for (int i = 0; i < kA; ++i) {
      const int at = t + i * kThreads;
      next_a[i] = float4_at(&A[int64_t{at / 2} * K + k0 + at % 2 * 4]);
    }
    for (int i = 0; i < kB; ++i) {
      const int at = t + i * kThreads;
      next_b[i] = float4_at(&B[int64_t{k0 + at / (kTileN / 4)} * N + at % (kTileN / 4) * 4]);
    }
  };
  auto store = [&](int half) {  // A is turned on the way: in shared memory its rows run along m
    for (int i = 0; i < kA; ++i) {
      const int at = t + i * kThreads, k = at % 2 * 4;
      a[half][k][at / 2] = next_a[i].x;
      a[half][k + 1][at / 2] = next_a[i].y;
      a[half][k + 2][at / 2] = next_a[i].z;
      a[half][k + 3][at / 2] = next_a[i].w;
    }
    for (int i = 0; i < kB; ++i) {
      const int at = t + i * kThreads;
      float4_at(&b[half][at / (kTileN / 4)][at % (kTileN / 4) * 4]) = next_b[i];
    }
  };

  float sum[8][8] = {};
  load(0);
  store(0);
  __syncthreads();
  for (int k0 = 0; k0 < K; k0 += kStepK) {
    const int half = k0 / kStepK % 2;
    if (k0 + kStepK < K) load(k0 + kStepK);
#pragma unroll
    for (int k = 0; k < kStepK; ++k) {
      float row[8], col[8];
      float4_at(row) = float4_at(&a[half][k][y]);
      float4_at(row + 4) = float4_at(&a[half][k][y + kTileM / 2]);
      float4_at(col) = float4_at(&b[half][k][x]);
      float4_at(col + 4) = float4_at(&b[half][k][x + kTileN / 2]);
      for (int i = 0; i < 8; ++i) {
        for (int j = 0; j < 8; ++j) sum[i][j] += row[i] * col[j];
      }
    }
    if (k0 + kStepK < K) store(1 - half);
    __syncthreads();
  }
  C += int64_t{blockIdx.y} * kTileM * N + blockIdx.x * kTileN;
  for (int i = 0; i < 8; ++i) {
    float* out = C + int64_t{y + i % 4 + i / 4 * (kTileM / 2)} * N + x;
    float4_at(out) = float4_at(&sum[i][0]);
    float4_at(out + kTileN / 2) = float4_at(&sum[i][4]);
  }
}
// kernel]

template <int kTileM, int kTileN>
auto launch(const learn::MatmulProblem<float>& p) {
  return [&p] {
    const dim3 grid(p.N / kTileN, p.M / kTileM);
    matmul_kernel<kTileM, kTileN><<<grid, kTileM * kTileN / 64>>>(p.a(), p.b(), p.c(), p.N, p.K);
  };
}

template <int kTileM, int kTileN>
void run(learn::MatmulProblem<float>& small, learn::MatmulProblem<float>& p) {
  const std::string what = "block " + std::to_string(kTileM * kTileN / 64);
  small.check(what, launch<kTileM, kTileN>(small));
  p.measure(what, launch<kTileM, kTileN>(p), learn::limits().fp32_per_s);
}

int main() {
  learn::MatmulProblem<float> small(256, 384, 40), p(learn::kSize, learn::kSize, learn::kSize);
  p.print();
  run<64, 64>(small, p);
  run<64, 128>(small, p);
  run<128, 128>(small, p);
}
