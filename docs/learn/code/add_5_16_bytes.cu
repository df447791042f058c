// SPDX-License-Identifier: Apache-2.0
// add, step 5: 16 bytes per access.
//
// A float4 is loaded by one instruction, and a warp then asks for 512 bytes at once instead of 128.
// A quarter of the instructions keep as many bytes on their way. The address must be a multiple of
// 16: memory from cudaMalloc is (of 256), a pointer into the middle of a tensor may not be. The
// last n % 4 elements are one thread's own work.
#include "add.cuh"

// [kernel
__global__ void add_kernel(const float* a, const float* b, float* out, int64_t n) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < n / 4) {
    const float4 x = reinterpret_cast<const float4*>(a)[i];
    const float4 y = reinterpret_cast<const float4*>(b)[i];
    reinterpret_cast<float4*>(out)[i] = {x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w};
  } else if (i == n / 4) {
    for (int64_t j = n / 4 * 4; j < n; ++j) out[j] = a[j] + b[j];
  }
}
// kernel]

int main() {
  learn::AddProblem p((1 << 25) + 3);
  for (int threads = 64; threads <= 1024; threads *= 2) {
    const int64_t blocks = (p.n / 4 + 1 + threads - 1) / threads;  // one thread more for the tail
    p.measure("block " + std::to_string(threads),
              [&] { add_kernel<<<blocks, threads>>>(p.a(), p.b(), p.out(), p.n); });
  }
}
