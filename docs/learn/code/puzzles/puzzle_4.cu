// SPDX-License-Identifier: Apache-2.0
// Fills a vector with ones, as fast as possible: many threads per block. What is wrong?
#include "learn.cuh"

// [kernel
__global__ void fill_kernel(float* out, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = 1.0f;
}

void fill(float* out, int n) {
  const int threads = 2048;
  fill_kernel<<<(n + threads - 1) / threads, threads>>>(out, n);
}
// kernel]

int main() {
  learn::require_gpu();
  const int n = 1 << 20;
  learn::DeviceArray<float> out(n);
  out.poison();
  fill(out.data(), n);
  const float first = out.to_host()[0];
  std::printf("the first element is %g, must be 1\n", first);
  return first == 1.0f ? 0 : 1;
}
