// SPDX-License-Identifier: Apache-2.0
// matmul, step 1: one thread per element of C, in the wrong order.
//
// Every thread walks along a row of A and down a column of B. Neighbouring threads of a warp (those
// with neighbouring threadIdx.x) own neighbouring ROWS: at every k their loads of A lie K elements
// apart, 32 sectors of memory for 32 numbers, and their stores to C lie N apart.
#include "matmul.cuh"

// [kernel
__global__ void matmul_kernel(const float* A, const float* B, float* C, int M, int N, int K) {
  const int row = blockIdx.x * blockDim.x + threadIdx.x;
  const int col = blockIdx.y * blockDim.y + threadIdx.y;
  if (row >= M || col >= N) return;
  float sum = 0;
  for (int k = 0; k < K; ++k) sum += A[int64_t{row} * K + k] * B[int64_t{k} * N + col];
  C[int64_t{row} * N + col] = sum;
}
// kernel]

auto launch(const learn::MatmulProblem<float>& p, int threads) {
  return [&p, threads] {
    const dim3 block(32, threads / 32);
    const dim3 grid(learn::div_up(p.M, block.x), learn::div_up(p.N, block.y));
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
