// SPDX-License-Identifier: Apache-2.0
// Reverses each stretch of 256 numbers through shared memory. What is wrong?
#include "learn.cuh"

// [kernel
__global__ void reverse_kernel(const int* in, int* out) {
  __shared__ int tile[256];
  const int64_t first = int64_t{blockIdx.x} * 256;
  tile[threadIdx.x] = in[first + threadIdx.x];
  out[first + threadIdx.x] = tile[255 - threadIdx.x];
}
// kernel]

int main() {
  learn::require_gpu();
  const int blocks = 10000;
  std::vector<int> host(blocks * 256);
  for (int i = 0; i < blocks * 256; ++i) host[i] = i;
  learn::DeviceArray<int> in(host), out(blocks * 256);
  reverse_kernel<<<blocks, 256>>>(in.data(), out.data());
  learn::check_launch();
  host = out.to_host();
  int wrong = 0;
  for (int i = 0; i < blocks * 256; ++i) wrong += host[i] != i / 256 * 256 + 255 - i % 256;
  std::printf("%d of %d numbers are wrong\n", wrong, blocks * 256);
  return wrong == 0 ? 0 : 1;
}
