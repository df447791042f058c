// SPDX-License-Identifier: Apache-2.0
// Inverts a picture of bytes. It is right for 40000 x 40000. What is wrong?
#include "learn.cuh"

// [kernel
__global__ void invert_kernel(unsigned char* pixels, int height, int width) {
  const int x = blockIdx.x * blockDim.x + threadIdx.x;
  const int y = blockIdx.y;
  if (x < width && y < height) pixels[y * width + x] ^= 255;
}
// kernel]

int main() {
  learn::require_gpu();
  const int height = 50000, width = 50000;
  learn::DeviceArray<unsigned char> pixels(int64_t{height} * width);
  pixels.poison();  // all 255
  invert_kernel<<<dim3((width + 255) / 256, height), 256>>>(pixels.data(), height, width);
  learn::check_launch();
  unsigned char last = 1;
  CHECK(cudaMemcpy(&last, pixels.data() + int64_t{height} * width - 1, 1, cudaMemcpyDeviceToHost));
  std::printf("the last pixel is %d, must be 0\n", last);
  return last == 0 ? 0 : 1;
}
