// SPDX-License-Identifier: Apache-2.0
// add, a counter-example: every thread takes a run of neighbouring elements.
//
// On a CPU that is the way to share out a loop. On a GPU the 32 threads of a warp load together,
// and memory delivers sectors of 32 bytes: with a run of 1 (step 3) a warp's load is 128 bytes
// without gaps, 4 sectors; with a run of 8 it touches 32 sectors and uses 4 bytes of each. What it
// did not use is wanted by the thread's next steps, if the cache still has it by then.
#include "add.cuh"

// [kernel
__global__ void add_kernel(const float* a, const float* b, float* out, int64_t n, int run) {
  const int64_t first = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * run;
  for (int64_t i = first; i < first + run && i < n; ++i) out[i] = a[i] + b[i];
}
// kernel]

int main() {
  learn::AddProblem p((1 << 25) + 3);
  constexpr int kThreads = 256;
  for (int run = 1; run <= 256; run *= 4) {
    const int64_t blocks = (p.n + kThreads * run - 1) / (kThreads * run);
    p.measure("run " + std::to_string(run),
              [&] { add_kernel<<<blocks, kThreads>>>(p.a(), p.b(), p.out(), p.n, run); });
  }
}
