// SPDX-License-Identifier: Apache-2.0
#include "add/add_kernel.cuh"
#include "add/add_plan.h"

namespace opzoo {
namespace {

bool on_vector_boundaries(const AddParams& p) {
  const auto aligned = [](const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; };
  return aligned(p.a.data) && aligned(p.b.data) && aligned(p.out);
}

template <class T>
void launch_add(const AddParams& p, cudaStream_t stream) {
  const int64_t numel = p.loop.numel;
  if (p.a.data && p.b.data && p.loop.is_contiguous() && on_vector_boundaries(p)) {
    const unsigned grid = grid_for(div_up<int64_t>(numel, kAddVector<T>));
    add_contiguous_kernel<T><<<grid, kBlockSize, 0, stream>>>(static_cast<const T*>(p.a.data),
                                                              static_cast<const T*>(p.b.data),
                                                              static_cast<T*>(p.out),
                                                              static_cast<acc_t<T>>(p.alpha),
                                                              numel);
  } else if (p.loop.fits_32_bits()) {
    add_strided_kernel<T, int32_t><<<grid_for(numel), kBlockSize, 0, stream>>>(p);
  } else {
    add_strided_kernel<T, int64_t><<<grid_for(numel), kBlockSize, 0, stream>>>(p);
  }
}

Tensor add_cuda(const Tensor& a, const Tensor& b, double alpha) {
  const DeviceGuard guard((a.is_cuda() ? a : b).get_device_index());
  const AddPlan plan = plan_add(a, b, alpha);
  if (plan.params.loop.numel == 0) return plan.out;
  const cudaStream_t stream = current_stream(plan.out);
  dispatch_all(plan.dtype, "add", [&]<class T>() { launch_add<T>(plan.params, stream); });
  check_launch("add");
  return plan.out;
}

}  // namespace
}  // namespace opzoo

OPZOO_KERNELS(CUDA, m) {
  m.impl("add", OPZOO_BOX(opzoo::add_cuda));
}
