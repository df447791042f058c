// SPDX-License-Identifier: Apache-2.0
// The harness of the add programs: two random vectors, the sum by the CPU, the check, the time.
#pragma once

#include <cstring>
#include <string>

#include "learn.cuh"

namespace learn {

class AddProblem {
 public:
  explicit AddProblem(int64_t n) : n(n), host_a_(random(n, 1)), host_b_(random(n, 2)) {
    print_gpu();
    std::printf("%lld elements of fp32\n", static_cast<long long>(n));
  }

  // launch() must write a + b to `out`. Adding two floats is rounded in one way only, so the result
  // must equal the CPU's bit for bit; only then is it timed.
  template <typename Launch>
  void measure(const std::string& what, Launch launch) {
    out_.poison();
    launch();
    check_launch();
    const std::vector<float> got = out_.to_host();
    for (int64_t i = 0; i < n; ++i) {
      const float expected = host_a_[i] + host_b_[i];
      if (std::memcmp(&got[i], &expected, sizeof(float)) == 0) continue;
      std::printf("FAILED %s: element %lld is %g, must be %g\n",
                  what.c_str(),
                  static_cast<long long>(i),
                  got[i],
                  expected);
      std::exit(1);
    }
    const double ms = median_ms(launch);
    const double bytes = 3.0 * n * sizeof(float);  // two reads, one write
    print_rate(what.c_str(), ms, bytes / ms * 1e-6, limits().bytes_per_s * 1e-9, "GB/s");
  }

  float* a() const { return a_.data(); }
  float* b() const { return b_.data(); }
  float* out() const { return out_.data(); }

  const int64_t n;

 private:
  static std::vector<float> random(int64_t n, uint64_t seed) {
    require_gpu();
    std::vector<float> values(n);
    Random source{seed};
    for (float& value : values) value = source.number();
    return values;
  }

  std::vector<float> host_a_, host_b_;
  DeviceArray<float> a_{host_a_}, b_{host_b_}, out_{n};
};

}  // namespace learn
