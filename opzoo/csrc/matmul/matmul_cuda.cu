// SPDX-License-Identifier: Apache-2.0
#include "matmul/matmul_kernel.cuh"
#include "matmul/matmul_plan.h"

namespace opzoo {
namespace {

Tensor matmul_cuda(const Tensor& a, const Tensor& b) {
  const DeviceGuard guard((a.is_cuda() ? a : b).get_device_index());
  MatmulPlan plan = plan_matmul(a, b);
  if (plan.out.numel() == 0) return plan.out;
  const unsigned grid = grid_for(matmul_tile_count(plan.params, kMatmulTile, kMatmulTile), 1);
  dispatch_floating(plan.dtype, "matmul", [&]<class T>() {
    matmul_tiled_kernel<T><<<grid, kBlockSize, 0, current_stream(plan.out)>>>(plan.params);
  });
  check_launch("matmul");
  return plan.out;
}

}  // namespace
}  // namespace opzoo

OPZOO_KERNELS(CUDA, m) {
  m.impl("matmul", OPZOO_BOX(opzoo::matmul_cuda));
}
