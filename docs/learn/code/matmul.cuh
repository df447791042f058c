// SPDX-License-Identifier: Apache-2.0
// The harness of the matmul programs: C[M, N] = A[M, K] B[K, N], all stored row by row.
#pragma once

#include <cmath>
#include <string>

#include "learn.cuh"

namespace learn {

// T is float or __nv_bfloat16: both convert to and from float.
template <typename T>
class MatmulProblem {
 public:
  MatmulProblem(int M, int N, int K)
      : M(M), N(N), K(K), host_a_(random(int64_t{M} * K, 1)), host_b_(random(int64_t{K} * N, 2)) {}

  // launch() must write the product to C. Stops the program if it did not.
  template <typename Launch>
  void check(const std::string& what, Launch launch) {
    c_.poison();
    launch();
    check_launch();
    const std::vector<T> got = c_.to_host();
    // Every element of a small product; of a large one every corner and 1000 elements at random.
    const bool all = int64_t{M} * N * K <= 1 << 24;
    Random source{3};
    const int64_t count = all ? int64_t{M} * N : 1004;
    for (int64_t n = 0; n < count; ++n) {
      const int64_t at = all ? n : n < 4 ? corner(n) : source.below(int64_t{M} * N);
      check_element(what, at / N, at % N, static_cast<float>(got[at]));
    }
  }

  template <typename Launch>
  void measure(const std::string& what, Launch launch, double limit_per_s) {
    check(what, launch);
    const double ms = median_ms(launch);
    print_rate(what.c_str(), ms, 2.0 * M * N * K / ms * 1e-9, limit_per_s * 1e-12, "TFLOP/s");
  }

  void print() const {
    print_gpu();
    std::printf("%d x %d x %d, %s\n", M, N, K, sizeof(T) == 4 ? "fp32" : "bf16");
  }

  T* a() const { return a_.data(); }
  T* b() const { return b_.data(); }
  T* c() const { return c_.data(); }

  const int M, N, K;

 private:
  int64_t corner(int64_t n) const { return n / 2 * (M - 1) * N + n % 2 * (N - 1); }

  // The sum in double. K roundings of fp32, each of 2^-24 of a typical partial sum, are allowed: a
  // lost product is a hundred times larger. A bf16 result is rounded once more, by 2^-9 of itself.
  void check_element(const std::string& what, int64_t row, int64_t col, float got) const {
    double expected = 0, squares = 0;
    for (int k = 0; k < K; ++k) {
      const double product = static_cast<double>(static_cast<float>(host_a_[row * K + k])) *
                             static_cast<float>(host_b_[int64_t{k} * N + col]);
      expected += product;
      squares += product * product;
    }
    double allowed = K * 0x1p-24 * std::sqrt(squares);
    if (sizeof(T) == 2) allowed += 0x1p-8 * std::fabs(expected);
    if (std::fabs(got - expected) <= allowed) return;  // false for NaN
    std::printf("FAILED %s, %d x %d x %d: element (%lld, %lld) is %g, must be %g\n",
                what.c_str(),
                M,
                N,
                K,
                static_cast<long long>(row),
                static_cast<long long>(col),
                got,
                expected);
    std::exit(1);
  }

  static std::vector<T> random(int64_t n, uint64_t seed) {
    require_gpu();
    std::vector<T> values(n);
    Random source{seed};
    for (T& value : values) value = static_cast<T>(source.number());
    return values;
  }

  std::vector<T> host_a_, host_b_;
  DeviceArray<T> a_{host_a_}, b_{host_b_}, c_{int64_t{M} * N};
};

constexpr int kSize = 4096;  // the timed product is kSize x kSize x kSize

inline int div_up(int a, int b) {
  return (a + b - 1) / b;
}

}  // namespace learn
