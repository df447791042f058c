// SPDX-License-Identifier: Apache-2.0
// Tiles of the output, one at a time per thread. For every kTileK of the sum the tile's rows of a
// and columns of b are packed (converted, and rearranged into strips the micro-kernel reads front
// to back), then every 6 x 16 (fp64: 6 x 8) block of the tile is advanced in registers.
#include <atomic>
#include <memory>
#include <new>

#include "matmul/matmul_plan.h"

namespace opzoo {
namespace {

// A strip of b (kTileK x kBlockN, 16 KiB) stays in L1 while the strips of a pass by; the packed
// tile of a (192 KiB in fp32) stays in L2.
constexpr int64_t kTileM = 192, kTileN = 256, kTileK = 256;
// Terms added one after another before their sum joins the tile's. Short sums lose less: 32 keeps
// the error near that of a dot product over vector lanes, for under a tenth of the rate.
constexpr int64_t kSumK = 32;
// 12 accumulators, 2 vectors of b and a broadcast of a: 15 of the 16 AVX registers.
constexpr int64_t kBlockM = 6;
template <class acc>
constexpr int64_t kLanes = 32 / sizeof(acc);
template <class acc>
constexpr int64_t kBlockN = 2 * kLanes<acc>;
constexpr int64_t kMinWork = 1 << 16;  // multiply-adds worth a thread

// Compiled twice, the right one picked when the library loads. -mfma implies 256-bit vectors.
// Contraction is wanted here, against the rule in setup.py: it doubles the arithmetic rate.
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#define OPZOO_MICRO_KERNEL \
  __attribute__((target_clones("fma", "default"), optimize("fp-contract=fast"), noinline))
#else
#define OPZOO_MICRO_KERNEL
#endif

template <class acc>
struct Vector {
  typedef acc type __attribute__((vector_size(32), may_alias));
};

// out[6][2 vectors] += strip_a[depth][6]^T * strip_b[depth][2 vectors].
template <class acc>
__attribute__((always_inline)) inline void multiply_strips(
    int64_t depth, const acc* strip_a, const acc* strip_b, acc* out, int64_t out_row) {
  using vector = typename Vector<acc>::type;
  const auto* b = reinterpret_cast<const vector*>(strip_b);
  while (depth > 0) {
    vector sum[kBlockM][2] = {};
    for (int64_t k = std::min(depth, kSumK); k > 0; --k) {
      const vector left = b[0];
      const vector right = b[1];
#pragma GCC unroll 6
      for (int64_t m = 0; m < kBlockM; ++m) {
        sum[m][0] += strip_a[m] * left;
        sum[m][1] += strip_a[m] * right;
      }
      strip_a += kBlockM;
      b += 2;
    }
#pragma GCC unroll 6
    for (int64_t m = 0; m < kBlockM; ++m) {
      auto* row = reinterpret_cast<vector*>(out + m * out_row);
      row[0] += sum[m][0];
      row[1] += sum[m][1];
    }
    depth -= kSumK;
  }
}

OPZOO_MICRO_KERNEL void multiply_block(
    int64_t depth, const float* strip_a, const float* strip_b, float* out, int64_t out_row) {
  multiply_strips(depth, strip_a, strip_b, out, out_row);
}
OPZOO_MICRO_KERNEL void multiply_block(
    int64_t depth, const double* strip_a, const double* strip_b, double* out, int64_t out_row) {
  multiply_strips(depth, strip_a, strip_b, out, out_row);
}

// Lines are rows of a or columns of b. Strip after strip: target[depth][kWidth], lines beyond the
// last one zero (their products are dropped).
template <int64_t kWidth, class T>
void pack(const T* source,
          int64_t line_stride,
          int64_t depth_stride,
          int64_t lines,
          int64_t depth,
          acc_t<T>* target) {
  for (int64_t line = 0; line < lines; line += kWidth) {
    const T* strip = source + line * line_stride;
    const int64_t used = std::min(kWidth, lines - line);
    const auto copy = [&](auto width, auto stride) {
      for (int64_t k = 0; k < depth; ++k) {
        const T* from = strip + k * depth_stride;
        for (int64_t lane = 0; lane < width; ++lane) {
          target[lane] = static_cast<acc_t<T>>(from[lane * stride]);
        }
        for (int64_t lane = width; lane < kWidth; ++lane) target[lane] = 0;
        target += kWidth;
      }
    };
    constexpr std::integral_constant<int64_t, kWidth> whole;
    constexpr std::integral_constant<int64_t, 1> adjacent;
    if (used < kWidth) {
      copy(used, line_stride);
    } else if (line_stride == 1) {
      copy(whole, adjacent);
    } else {
      copy(whole, line_stride);
    }
  }
}

int64_t round_up(int64_t value, int64_t step) {
  return div_up(value, step) * step;
}

// One thread's buffers, no larger than the problem asks for.
template <class acc>
class Scratch {
 public:
  explicit Scratch(const MatmulParams& p)
      : rows_(round_up(std::min(p.M, kTileM), kBlockM)),
        cols_(round_up(std::min(p.N, kTileN), kBlockN<acc>)),
        depth_(std::min(p.K, kTileK)) {
    const int64_t elements = rows_ * cols_ + (rows_ + cols_) * depth_;
    memory_.reset(static_cast<acc*>(
        ::operator new(elements * sizeof(acc), std::align_val_t(kAlignment), std::nothrow)));
  }

  bool failed() const { return memory_ == nullptr; }
  acc* sums() { return memory_.get(); }
  acc* strips_b() { return sums() + rows_ * cols_; }
  acc* strips_a() { return strips_b() + cols_ * depth_; }

 private:
  static constexpr size_t kAlignment = 64;
  struct Free {
    void operator()(acc* memory) const { ::operator delete(memory, std::align_val_t(kAlignment)); }
  };
  int64_t rows_, cols_, depth_;
  std::unique_ptr<acc, Free> memory_;
};

template <class T>
void multiply_tile(const MatmulParams& p, int64_t index, Scratch<acc_t<T>>& scratch) {
  using acc = acc_t<T>;
  const MatmulTile tile = matmul_tile(p, index, kTileM, kTileN);
  const T* a = static_cast<const T*>(p.a) + tile.offset[kMatmulA] + tile.row * p.a_row;
  const T* b = static_cast<const T*>(p.b) + tile.offset[kMatmulB] + tile.col * p.b_col;
  T* out = static_cast<T*>(p.out) + tile.offset[kMatmulOut] + tile.row * p.N + tile.col;
  const int64_t rows = std::min(kTileM, p.M - tile.row);
  const int64_t cols = std::min(kTileN, p.N - tile.col);
  const int64_t sums_row = round_up(cols, kBlockN<acc>);
  acc* sums = scratch.sums();
  std::fill_n(sums, round_up(rows, kBlockM) * sums_row, acc(0));

  for (int64_t k = 0; k < p.K; k += kTileK) {
    const int64_t depth = std::min(kTileK, p.K - k);
    pack<kBlockN<acc>>(b + k * p.b_row, p.b_col, p.b_row, cols, depth, scratch.strips_b());
    pack<kBlockM>(a + k * p.a_col, p.a_row, p.a_col, rows, depth, scratch.strips_a());
    for (int64_t n = 0; n < cols; n += kBlockN<acc>) {
      for (int64_t m = 0; m < rows; m += kBlockM) {
        multiply_block(depth,
                       scratch.strips_a() + m * depth,
                       scratch.strips_b() + n * depth,
                       sums + m * sums_row + n,
                       sums_row);
      }
    }
  }
  for (int64_t m = 0; m < rows; ++m) {
    for (int64_t n = 0; n < cols; ++n) out[m * p.N + n] = static_cast<T>(sums[m * sums_row + n]);
  }
}

Tensor matmul_cpu(const Tensor& a, const Tensor& b, int64_t precision) {
  MatmulPlan plan = plan_matmul(a, b, precision);
  const MatmulParams& p = plan.params;
  if (plan.out.numel() == 0) return plan.out;
  const int64_t tile_work =
      std::min(p.M, kTileM) * std::min(p.N, kTileN) * std::max<int64_t>(p.K, 1);
  const int64_t grain = std::max<int64_t>(1, kMinWork / tile_work);
  std::atomic<bool> out_of_memory{false};
  dispatch_floating(plan.dtype, "matmul", [&]<class T>() {
    parallel_for(0, matmul_tile_count(p, kTileM, kTileN), grain, [&](int64_t begin, int64_t end) {
      Scratch<acc_t<T>> scratch(p);
      if (scratch.failed()) {
        out_of_memory = true;
        return;
      }
      for (int64_t index = begin; index < end; ++index) multiply_tile<T>(p, index, scratch);
    });
  });
  OPZOO_CHECK(!out_of_memory, "matmul", "out of memory for a packing buffer");
  return plan.out;
}

}  // namespace
}  // namespace opzoo

OPZOO_KERNELS(CPU, m) {
  m.impl("matmul", OPZOO_BOX(opzoo::matmul_cpu));
}
