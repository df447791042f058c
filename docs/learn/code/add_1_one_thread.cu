// SPDX-License-Identifier: Apache-2.0
// add, step 1: one thread does everything.
//
// A __global__ function, a kernel, runs on the GPU; <<<blocks, threads>>> says how many threads run
// it. Here it is one, so this is a CPU loop on a GPU. One thread can wait for only a few loads at a
// time, each takes more than half a microsecond to come from memory, and 131 of the 132
// multiprocessors of an H200 have nothing to do.
#include "add.cuh"

// [kernel
__global__ void add_kernel(const float* a, const float* b, float* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = a[i] + b[i];
}
// kernel]

int main() {
  learn::AddProblem p((1 << 20) + 3);
  p.measure("block 1", [&] { add_kernel<<<1, 1>>>(p.a(), p.b(), p.out(), p.n); });
}
