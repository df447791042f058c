// SPDX-License-Identifier: Apache-2.0
#include "add/add_kernel.cuh"
#include "add/add_plan.h"

namespace opzoo {
namespace {

Tensor add_cuda(const Tensor& a, const Tensor& b, double alpha) {
  const DeviceGuard guard((a.is_cuda() ? a : b).get_device_index());
  AddPlan plan = plan_add(a, b, alpha);
  const AddParams& p = plan.params;
  if (p.loop.numel == 0) return plan.out;
  const cudaStream_t stream = current_stream(plan.out);
  const unsigned grid = grid_for(p.loop.numel);
  dispatch_all(plan.dtype, "add", [&]<class T>() {
    if (p.a.data && p.b.data && p.loop.is_contiguous()) {
      add_contiguous_kernel<T><<<grid, kBlockSize, 0, stream>>>(static_cast<const T*>(p.a.data),
                                                                static_cast<const T*>(p.b.data),
                                                                static_cast<T*>(p.out),
                                                                static_cast<acc_t<T>>(p.alpha),
                                                                p.loop.numel);
    } else {
      add_strided_kernel<T><<<grid, kBlockSize, 0, stream>>>(p);
    }
  });
  check_launch("add");
  return plan.out;
}

}  // namespace
}  // namespace opzoo

OPZOO_KERNELS(CUDA, m) {
  m.impl("add", OPZOO_BOX(opzoo::add_cuda));
}
