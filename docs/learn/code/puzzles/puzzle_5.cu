// SPDX-License-Identifier: Apache-2.0
// Counts how often each digit occurs. The first call is right. What is wrong?
#include "learn.cuh"

// [kernel
__global__ void count_kernel(const int* digits, int* counts, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) atomicAdd(&counts[digits[i]], 1);
}

void count(const int* digits, int* counts, int n) {  // counts: memory of a pool, used before
  count_kernel<<<(n + 255) / 256, 256>>>(digits, counts, n);
}
// kernel]

int main() {
  learn::require_gpu();
  const int n = 1000;
  std::vector<int> host(n);
  for (int i = 0; i < n; ++i) host[i] = i % 10;
  learn::DeviceArray<int> digits(host), counts(std::vector<int>(10, 0));
  int got = 0;
  for (int call = 1; call <= 2; ++call) {
    count(digits.data(), counts.data(), n);
    learn::check_launch();
    got = counts.to_host()[7];
    std::printf("call %d: 7 occurs %d times, must be 100\n", call, got);
  }
  return got == 100 ? 0 : 1;
}
