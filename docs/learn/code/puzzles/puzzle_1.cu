// SPDX-License-Identifier: Apache-2.0
// Scales a vector. The guard value behind the end must survive. What is wrong?
#include "learn.cuh"

// [kernel
__global__ void scale_kernel(const float* in, float* out, float factor, int64_t n) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  out[i] = factor * in[i];
}
// kernel]

int main() {
  learn::require_gpu();
  const int64_t n = 1000;
  std::vector<float> host(n + 24, 1.0f);  // 24 values of somebody else
  learn::DeviceArray<float> in(host), out(host);
  scale_kernel<<<4, 256>>>(in.data(), out.data(), 2.0f, n);
  learn::check_launch();
  host = out.to_host();
  std::printf("element 999 is %g, must be 2; the guard is %g, must be 1\n", host[999], host[n]);
  return host[n] == 1.0f ? 0 : 1;
}
