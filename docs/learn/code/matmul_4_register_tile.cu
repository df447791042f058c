// SPDX-License-Identifier: Apache-2.0
// matmul, step 4: every thread keeps a tile of C in registers.
//
// In step 3 a multiply-add reads two numbers from shared memory, and shared memory delivers 32
// numbers per clock to cores that could do 128 multiply-adds. Here a thread owns 8 x 8 elements of
// C: per k it reads 8 numbers of A and 8 of B and does 64 multiply-adds with them, 4 per number.
// The elements are kTileM / 8 rows and kTileN / 8 columns apart, so that neighbouring threads read
// neighbouring columns of the tile of B: 32 banks of shared memory, no two threads in one.
//
// M, N and K must be multiples of the tile (opzoo's own kernels take any size).
#include "matmul.cuh"

// [kernel
constexpr int kStepK = 8;

template <int kTileM, int kTileN>
__global__ void matmul_kernel(const float* A, const float* B, float* C, int N, int K) {
  constexpr int kRows = kTileM / 8, kCols = kTileN / 8, kThreads = kRows * kCols;
  __shared__ float a[kStepK][kTileM + 4], b[kStepK][kTileN];  // + 4: see the store to a
  const int t = threadIdx.x, x = t % kCols, y = t / kCols;
  A += int64_t{blockIdx.y} * kTileM * K;
  B += blockIdx.x * kTileN;
  float sum[8][8] = {};
  for (int k0 = 0; k0 < K; k0 += kStepK) {
    // A warp loads 8 neighbouring k of 4 rows of A and stores them to 4 columns of 8 rows of a.
    // With 4 unused numbers behind each row of a, those 32 places lie in 32 different banks.
    for (int i = t; i < kTileM * kStepK; i += kThreads) {
      a[i % kStepK][i / kStepK] = A[int64_t{i / kStepK} * K + k0 + i % kStepK];
    }
    for (int i = t; i < kStepK * kTileN; i += kThreads) {
      b[i / kTileN][i % kTileN] = B[int64_t{k0 + i / kTileN} * N + i % kTileN];
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kStepK; ++k) {
      float row[8], col[8];
      for (int i = 0; i < 8; ++i) row[i] = a[k][y + i * kRows];
      for (int j = 0; j < 8; ++j) col[j] = b[k][x + j * kCols];
      for (int i = 0; i < 8; ++i) {
        for (int j = 0; j < 8; ++j) sum[i][j] += row[i] * col[j];
      }
    }
    __syncthreads();
  }
  C += int64_t{blockIdx.y} * kTileM * N + blockIdx.x * kTileN;
  for (int i = 0; i < 8; ++i) {
    for (int j = 0; j < 8; ++j) C[int64_t{y + i * kRows} * N + x + j * kCols] = sum[i][j];
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
  run<256, 128>(small, p);
}
