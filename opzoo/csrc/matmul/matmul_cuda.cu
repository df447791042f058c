// SPDX-License-Identifier: Apache-2.0
#include "matmul/matmul_cuda_plan.h"
#include "matmul/matmul_kernel.cuh"
#include "matmul/matmul_reduce.cuh"

namespace opzoo {
namespace {

// Whether every piece of four neighbours along the axis of stride 1 lies at a multiple of its size.
bool pieces_aligned(const MatmulParams& p,
                    MatmulOperand operand,
                    const void* data,
                    int64_t line,
                    int64_t depth,
                    int64_t element_bytes) {
  if (line != 1 && depth != 1) return false;
  const int64_t other = depth == 1 && line != 1 ? line : depth;
  bool aligned = other % 4 == 0 &&
                 reinterpret_cast<uintptr_t>(data) % std::min<int64_t>(4 * element_bytes, 16) == 0;
  for (int axis = 0; axis < p.batches.axes; ++axis) {
    const bool walked = p.batches.size[axis] > 1;
    aligned = aligned && (!walked || p.batches.stride[operand][axis] % 4 == 0);
  }
  return aligned;
}

int multiprocessors() {
  int device = 0, count = 0;
  check_cuda(cudaGetDevice(&device), "matmul");
  check_cuda(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), "matmul");
  return count;
}

// Ranges of K, so that few tiles still fill the GPU twice: at least 256 terms each, and no more
// partial sums than 2^26.
int split_count(const MatmulParams& p, int64_t tiles, int64_t processors) {
  const int64_t outputs = p.batches.numel * p.M * p.N;
  const int64_t wanted =
      std::min({2 * processors / tiles, p.K / 256, (int64_t{1} << 26) / outputs, int64_t{64}});
  return static_cast<int>(std::max<int64_t>(wanted, 1));
}

template <class T, int kQuads>
void launch_tiles(const MatmulPlan& plan, int processors, const int* only_if) {
  MatmulTiled p;
  static_cast<MatmulParams&>(p) = plan.params;
  p.a_aligned = pieces_aligned(p, kMatmulA, p.a, p.a_row, p.a_col, sizeof(T));
  p.b_aligned = pieces_aligned(p, kMatmulB, p.b, p.b_col, p.b_row, sizeof(T));
  const int64_t tiles = matmul_tile_count(p, kMatmulTile<kQuads>, kMatmulTile<kQuads>);
  if (only_if == nullptr) p.splits = split_count(p, tiles, processors);
  p.k_per_split = div_up<int64_t>(div_up<int64_t>(p.K, p.splits), 16) * 16;
  if (p.K > 0) p.splits = static_cast<int>(div_up(p.K, p.k_per_split));
  Tensor partial;
  if (p.splits > 1) {
    const ScalarType type = sizeof(acc_t<T>) == 8 ? ScalarType::Double : ScalarType::Float;
    partial = empty({p.batches.numel * p.splits * p.M * p.N}, type, plan.out);
    p.partial = partial.mutable_data_ptr();
  }
  const cudaStream_t stream = current_stream(plan.out);
  matmul_kernel<T, kQuads><<<grid_for(tiles * p.splits, 1), kBlockSize, 0, stream>>>(p, only_if);
  check_launch("matmul");
  if (p.splits > 1) {
    matmul_reduce_kernel<T>
        <<<matmul_reduce_grid(p.batches.numel * p.M, p.N), kBlockSize, 0, stream>>>(
            static_cast<T*>(p.out),
            static_cast<const acc_t<T>*>(p.partial),
            p.batches.numel,
            p.M,
            p.N,
            p.N,
            p.splits,
            nullptr);
    check_launch("matmul");
  }
}

// Which method computes a product, from its shape and types alone, so that the bits of a result do
// not depend on strides:
//
//   operands                     on sm_90, at least 2^21 multiply-adds,   else
//                                M and N >= 16, K >= 64
//   fp64, fp32 ieee              register tiles                           register tiles
//   fp32 tf32, tf32x3            wgmma (tf32)                             register tiles
//   fp16, bf16                   wgmma                                    register tiles
//
// tf32 and tf32x3 are permissions: register tiles are more accurate than either. Below the
// threshold a product is over in the time that one more launch takes.
bool suits_tensor_cores(const MatmulPlan& plan) {
  const MatmulParams& p = plan.params;
  const bool half = plan.dtype == ScalarType::Half || plan.dtype == ScalarType::BFloat16;
  const bool tf32 = plan.dtype == ScalarType::Float && plan.precision != MatmulPrecision::kIeee;
  const double multiply_adds = static_cast<double>(p.batches.numel) * static_cast<double>(p.M) *
                               static_cast<double>(p.N) * static_cast<double>(p.K);
  return (half || tf32) && p.M >= 16 && p.N >= 16 && p.K >= 64 && multiply_adds >= 1 << 21;
}

Tensor matmul_cuda(const Tensor& a, const Tensor& b, int64_t precision) {
  const DeviceGuard guard((a.is_cuda() ? a : b).get_device_index());
  const MatmulPlan plan = plan_matmul(a, b, precision);
  if (plan.out.numel() == 0) return plan.out;
  if (suits_tensor_cores(plan) && matmul_by_wgmma(plan)) return plan.out;
  matmul_by_tiles(plan);
  return plan.out;
}

}  // namespace

void matmul_by_tiles(const MatmulPlan& plan, const int* only_if) {
  const int processors = multiprocessors();
  dispatch_floating(plan.dtype, "matmul", [&]<class T>() {
    // 128 x 128 outputs per block once there are enough of them to give every processor one.
    if constexpr (sizeof(T) <= 4) {
      if (matmul_tile_count(plan.params, kMatmulTile<2>, kMatmulTile<2>) >= processors) {
        return launch_tiles<T, 2>(plan, processors, only_if);
      }
    }
    launch_tiles<T, 1>(plan, processors, only_if);
  });
}

}  // namespace opzoo

OPZOO_KERNELS(CUDA, m) {
  m.impl("matmul", OPZOO_BOX(opzoo::matmul_cuda));
}
