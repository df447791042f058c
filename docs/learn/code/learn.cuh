// SPDX-License-Identifier: Apache-2.0
// What every program of this folder needs around its kernel: error checks, random data, memory on
// the GPU, a stopwatch and the limits of the GPU. Plain CUDA; read it once, then read the programs.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

namespace learn {

// Every call of the CUDA runtime returns an error code, and nothing else tells you that it failed.
#define CHECK(call) learn::check(call, #call, __FILE__, __LINE__)

inline void check(cudaError_t error, const char* call, const char* file, int line) {
  if (error == cudaSuccess) return;
  std::printf("FAILED %s:%d: %s: %s\n", file, line, call, cudaGetErrorString(error));
  std::exit(1);
}

// A launch returns no code. A wrong launch (too many threads, say) shows in cudaGetLastError at
// once, a fault inside the kernel only when somebody waits for it.
inline void check_launch() {
  CHECK(cudaGetLastError());
  CHECK(cudaDeviceSynchronize());
}

// Exit status 77: there is no GPU, so nothing was run.
inline void require_gpu() {
  int count = 0;
  if (cudaGetDeviceCount(&count) == cudaSuccess && count > 0) return;
  std::printf("SKIPPED: no GPU\n");
  std::exit(77);
}

// The same random numbers in [-1, 1) in every run (splitmix64).
struct Random {
  uint64_t state = 1;

  uint64_t bits() {
    uint64_t z = state += 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return z ^ z >> 31;
  }
  float number() { return static_cast<float>(bits() >> 40) * 0x1p-23f - 1.0f; }
  int64_t below(int64_t n) { return static_cast<int64_t>(bits() % static_cast<uint64_t>(n)); }
};

// n elements in the GPU's memory, freed with the object.
template <typename T>
class DeviceArray {
 public:
  explicit DeviceArray(int64_t n) : n_(n) { CHECK(cudaMalloc(&data_, n * sizeof(T))); }
  explicit DeviceArray(const std::vector<T>& host) : DeviceArray(host.size()) {
    CHECK(cudaMemcpy(data_, host.data(), n_ * sizeof(T), cudaMemcpyHostToDevice));
  }
  ~DeviceArray() { cudaFree(data_); }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;

  T* data() const { return data_; }

  std::vector<T> to_host() const {
    std::vector<T> host(n_);
    CHECK(cudaMemcpy(host.data(), data_, n_ * sizeof(T), cudaMemcpyDeviceToHost));
    return host;
  }

  // All bits set: NaN in every float type. An element that a kernel forgets stays NaN and is seen.
  void poison() { CHECK(cudaMemset(data_, 0xff, n_ * sizeof(T))); }

 private:
  T* data_ = nullptr;
  int64_t n_;
};

inline int attribute(cudaDeviceAttr which) {
  int value = 0;
  CHECK(cudaDeviceGetAttribute(&value, which, 0));
  return value;
}

// What the GPU could do at its highest clock: no kernel is faster than this.
struct Limits {
  double bytes_per_s;   // of its memory
  double fp32_per_s;    // operations of the ordinary cores, a multiply-add counted as two
  double tensor_per_s;  // operations of the tensor cores on bf16; 0 where this table has no entry
};

inline Limits limits() {
  const int sms = attribute(cudaDevAttrMultiProcessorCount);
  const double clock = 1e3 * attribute(cudaDevAttrClockRate);
  const double memory_clock = 1e3 * attribute(cudaDevAttrMemoryClockRate);
  const int major = attribute(cudaDevAttrComputeCapabilityMajor);
  const int minor = attribute(cudaDevAttrComputeCapabilityMinor);
  const double fp32 = major == 8 && minor == 0 ? 64 : 128;  // multiply-adds per SM and clock
  const double tensor = major == 9 ? 2048 : major == 8 && minor == 0 ? 1024 : 0;
  return {2 * memory_clock * attribute(cudaDevAttrGlobalMemoryBusWidth) / 8,
          2 * fp32 * sms * clock,
          2 * tensor * sms * clock};
}

inline void print_gpu() {
  cudaDeviceProp properties;
  CHECK(cudaGetDeviceProperties(&properties, 0));
  int runtime = 0;
  CHECK(cudaRuntimeGetVersion(&runtime));
  std::printf("GPU: %s, CUDA %d.%d\n", properties.name, runtime / 1000, runtime % 1000 / 10);
}

// Median time of one call in milliseconds, by the GPU's own clock. Before each call 256 MB are
// written elsewhere, so that it finds nothing of its data in the L2 cache.
template <typename Launch>
double median_ms(Launch launch) {
  constexpr int64_t kFlushBytes = int64_t{256} << 20;
  static DeviceArray<char> flush(kFlushBytes);
  cudaEvent_t start, stop;
  CHECK(cudaEventCreate(&start));
  CHECK(cudaEventCreate(&stop));
  std::vector<float> times;
  for (double total = 0; times.size() < 20 && total < 300;) {
    CHECK(cudaMemset(flush.data(), 0, kFlushBytes));
    CHECK(cudaEventRecord(start));
    launch();
    CHECK(cudaEventRecord(stop));
    CHECK(cudaEventSynchronize(stop));
    float ms = 0;
    CHECK(cudaEventElapsedTime(&ms, start, stop));
    times.push_back(ms);
    total += ms;
  }
  CHECK(cudaEventDestroy(start));
  CHECK(cudaEventDestroy(stop));
  std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
  return times[times.size() / 2];
}

// One line of results; measure.py reads it. `limit` is in the same unit as `rate`.
inline void print_rate(const char* what, double ms, double rate, double limit, const char* unit) {
  std::printf("%-22s %10.4f ms %10.2f %s", what, ms, rate, unit);
  if (limit > 0) std::printf(" %6.2f %% of %.0f", 100 * rate / limit, limit);
  std::printf("\n");
}

}  // namespace learn
