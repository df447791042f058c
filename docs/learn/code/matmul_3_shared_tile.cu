// SPDX-License-Identifier: Apache-2.0
// matmul, step 3: tiles in shared memory.
//
// A block owns a tile of C, kTile x kTile, one element per thread. It walks along k in steps of
// kTile: all threads together copy one tile of A and one of B to shared memory, which lies inside
// the multiprocessor, and then each reads its row and column there. An element fetched from memory
// now serves kTile threads: kTile times less traffic. Outside the matrices the tiles are zero,
// which adds nothing to a sum.
#include "matmul.cuh"

// [kernel
template <int kTile>
__global__ void matmul_kernel(const float* A, const float* B, float* C, int M, int N, int K) {
  __shared__ float a[kTile][kTile], b[kTile][kTile];
  const int x = threadIdx.x, y = threadIdx.y;
  const int row = blockIdx.y * kTile + y, col = blockIdx.x * kTile + x;
  float sum = 0;
  for (int k0 = 0; k0 < K; k0 += kTile) {
    a[y][x] = row < M && k0 + x < K ? A[int64_t{row} * K + k0 + x] : 0;
    b[y][x] = k0 + y < K && col < N ? B[int64_t{k0 + y} * N + col] : 0;
    __syncthreads();  // the tiles are complete before anyone reads them
    for (int k = 0; k < kTile; ++k) sum += a[y][k] * b[k][x];
    __syncthreads();  // everyone has read them before anyone overwrites them
  }
  if (row < M && col < N) C[int64_t{row} * N + col] = sum;
}
// kernel]

template <int kTile>
auto launch(const learn::MatmulProblem<float>& p) {
  return [&p] {
    const dim3 block(kTile, kTile), grid(learn::div_up(p.N, kTile), learn::div_up(p.M, kTile));
    matmul_kernel<kTile><<<grid, block>>>(p.a(), p.b(), p.c(), p.M, p.N, p.K);
  };
}

template <int kTile>
void run(learn::MatmulProblem<float>& odd, learn::MatmulProblem<float>& p) {
  const std::string what = "block " + std::to_string(kTile * kTile);
  odd.check(what, launch<kTile>(odd));
  p.measure(what, launch<kTile>(p), learn::limits().fp32_per_s);
}

int main() {
  learn::MatmulProblem<float> odd(129, 67, 45), p(learn::kSize, learn::kSize, learn::kSize);
  p.print();
  run<8>(odd, p);
  run<16>(odd, p);
  run<32>(odd, p);
}
