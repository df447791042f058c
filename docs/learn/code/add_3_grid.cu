// SPDX-License-Identifier: Apache-2.0
// add, step 3: a grid of blocks, one element per thread.
//
// Blocks are handed to whichever multiprocessor has room, so a grid of many blocks fills them all.
// blockIdx.x tells the blocks apart. The last block is rarely full: its surplus threads must do
// nothing, or they write behind the end. The product of block index and block size is formed in 64
// bits, because it may exceed 2^31.
#include "add.cuh"

// [kernel
__global__ void add_kernel(const float* a, const float* b, float* out, int64_t n) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < n) out[i] = a[i] + b[i];
}
// kernel]

int main() {
  learn::AddProblem p((1 << 25) + 3);
  for (int threads = 64; threads <= 1024; threads *= 2) {
    const int64_t blocks = (p.n + threads - 1) / threads;  // rounded up
    p.measure("block " + std::to_string(threads),
              [&] { add_kernel<<<blocks, threads>>>(p.a(), p.b(), p.out(), p.n); });
  }
}
