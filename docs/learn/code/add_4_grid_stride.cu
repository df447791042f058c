// SPDX-License-Identifier: Apache-2.0
// add, step 4: a grid of fixed size walks over the data.
//
// Just as many threads as the GPU can hold at once (2048 per multiprocessor), whatever n is; each
// steps by the size of the whole grid until the end. The launch no longer depends on n, one kernel
// serves every size, and what a thread prepares once pays for all of its elements. It need not be
// faster than step 3: a thread's next loads wait for the loop, where step 3 had the hardware start
// a new block.
#include "add.cuh"

// [kernel
__global__ void add_kernel(const float* a, const float* b, float* out, int64_t n) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n; i += step) {
    out[i] = a[i] + b[i];
  }
}
// kernel]

int main() {
  learn::AddProblem p((1 << 25) + 3);
  const int sms = learn::attribute(cudaDevAttrMultiProcessorCount);
  for (int threads = 64; threads <= 1024; threads *= 2) {
    const int blocks = sms * (2048 / threads);
    p.measure("block " + std::to_string(threads),
              [&] { add_kernel<<<blocks, threads>>>(p.a(), p.b(), p.out(), p.n); });
  }
}
