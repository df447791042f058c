// SPDX-License-Identifier: Apache-2.0
// matmul, step 2: one thread per element of C, neighbours along a row.
//
// Step 1 with x and y exchanged. The threads of a warp now own 32 neighbouring elements of one row:
// at every k they load 128 bytes of B without gaps, and all of them the same element of A, which
// is fetched once and handed to all. Still every multiply-add asks memory (the L1 cache, mostly)
// for two numbers, and that is what limits it.
#include "matmul.cuh"

// [kernel
__global__ void matmul_kernel(const float* A, const float* B, float* C, int M, int N, int K) {
  const int col = blockIdx.x * blockDim.x + threadIdx.x;
  const int row = blockIdx.y * blockDim.y + threadIdx.y;
  if (row >= M || col >= N) return;
  float sum = 0;
  for (int k = 0; k < K; ++k) sum += A[int64_t{row} * K + k] * B[int64_t{k} * N + col];
  C[int64_t{row} * N + col] = sum;
}
// kernel]

auto launch(const learn::MatmulProblem<float>& p, int threads) {
  return [&p, threads] {
    const dim3 block(32, threads / 32);
    const dim3 grid(learn::div_up(p.N, block.x), learn::div_up(p.M, block.y));
    matmul_kernel<<<grid, block>>>(p.a(), p.b(), p.c(), p.M, p.N, p.K);
  };
}

int main() {
  learn::MatmulProblem<float> odd(129, 67, 45), p(learn::kSize, learn::kSize, learn::kSize);
  p.print();
  for (int threads = 64; threads <= 1024; threads *= 2) {
    const std::string what = "block " + std::to_string(threads);
    odd.check(what, launch(odd, threads));
    p.measure(what, launch(p, threads), learn::limits().fp32_per_s);
  }
}
