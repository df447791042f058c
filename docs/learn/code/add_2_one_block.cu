// SPDX-License-Identifier: Apache-2.0
// add, step 2: one block of threads.
//
// The threads of a block run the same code on one multiprocessor; threadIdx.x tells them apart.
// Thread t takes elements t, t + threads, t + 2 threads, ...: at each step the block covers one
// stretch of memory without gaps. While some threads wait for memory, others load: 32 threads (a
// warp) execute an instruction together, and 1024 threads are 32 warps to switch between.
#include "add.cuh"

// [kernel
__global__ void add_kernel(const float* a, const float* b, float* out, int64_t n) {
  for (int64_t i = threadIdx.x; i < n; i += blockDim.x) out[i] = a[i] + b[i];
}
// kernel]

int main() {
  learn::AddProblem p((1 << 22) + 3);
  for (int threads = 64; threads <= 1024; threads *= 2) {
    p.measure("block " + std::to_string(threads),
              [&] { add_kernel<<<1, threads>>>(p.a(), p.b(), p.out(), p.n); });
  }
}
